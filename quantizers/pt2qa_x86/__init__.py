"""Intel/AMD CPUs through Inductor as a pt2qa quantizer plug-in."""

from __future__ import annotations

from pt2qa_x86.backend import X86Backend
from pt2qa_x86.plugin import PLUGIN, X86

__all__ = ["PLUGIN", "X86", "X86Backend"]
