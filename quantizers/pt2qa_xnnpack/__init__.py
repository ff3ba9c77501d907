"""XNNPACK as a pt2qa quantizer plug-in: int8 on Arm and x86 phones, tablets and laptops, through ExecuTorch."""

from __future__ import annotations

from pt2qa_xnnpack.plugin import PLUGIN, XNNPACK

__all__ = ["PLUGIN", "XNNPACK"]
