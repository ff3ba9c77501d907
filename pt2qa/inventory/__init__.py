"""Inventory: what a quantizer asks for and what a converted model does, place by place, and how two of them differ."""

# No `from __future__ import annotations` here or in listing: the function has its name.
from pt2qa.inventory.differences import diff_annotations
from pt2qa.inventory.listing import annotations

__all__ = ["annotations", "diff_annotations"]
