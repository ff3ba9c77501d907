"""The command line: ``pt2qa show``, ``diff``, ``gate``, ``check``, ``analyze`` and others."""

from __future__ import annotations

from typing import Final

from pt2qa.cli.program import Program

main: Final = Program()
"""The program around the commands."""

__all__ = ["main"]
