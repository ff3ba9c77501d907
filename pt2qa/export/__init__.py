"""Capture: from an ``nn.Module`` to an exported program whose ops can be followed and quantized."""

from __future__ import annotations

from pt2qa.export.batches import check_inputs
from pt2qa.export.changes import Change
from pt2qa.export.program import Capture, capture

__all__ = ["Capture", "Change", "capture", "check_inputs"]
