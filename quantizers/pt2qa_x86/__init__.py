"""Intel/AMD CPUs through Inductor as a pt2qa quantizer plug-in."""

from __future__ import annotations

from typing import Any

from pt2qa_x86.backend import X86Backend
from pt2qa_x86.plugin import PLUGIN, X86

__all__ = ["PLUGIN", "X86", "X86Backend", "for_x86"]


def __getattr__(name: str) -> Any:
    if name == "for_x86":
        from pt2qa_x86.layout import for_x86  # it needs torch

        return for_x86
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
