"""XNNPACK as a pt2qa quantizer plug-in: int8 on Arm and x86 phones, tablets and laptops, through ExecuTorch.

Without ExecuTorch, the package cannot be imported, and pt2qa lists the plug-in as unavailable, with the reason.
"""

from __future__ import annotations

from typing import Any

from pt2qa_xnnpack.internals import has_executorch

if not has_executorch():
    raise ModuleNotFoundError('executorch is not installed: pip install "pt2qa[xnnpack]"', name="executorch")

from pt2qa_xnnpack.plugin import PLUGIN, XNNPACK

__all__ = ["PLUGIN", "XNNPACK", "for_xnnpack"]


def __getattr__(name: str) -> Any:
    if name == "for_xnnpack":
        from pt2qa_xnnpack.separation import for_xnnpack  # it needs torch

        return for_xnnpack
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
