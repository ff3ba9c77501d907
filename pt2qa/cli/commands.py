"""The group with all of its commands.

Commands import what they need when they run: ``pt2qa show`` must not wait for torch.
"""

from __future__ import annotations

from pt2qa.cli import analyzing, checking, listing, measuring, reading
from pt2qa.cli.group import main

COMMANDS = (reading, checking, analyzing, measuring, listing)
"""The modules that define the commands of :data:`main`."""

__all__ = ["COMMANDS", "main"]
