"""Overrides: edits to what a quantizer annotates, op by op.

A plan (:mod:`pt2qa.overrides.plan`) is a list of edits and needs no torch.  What a plan does to the annotation of a
model is in :mod:`pt2qa.overrides.annotations`; :mod:`pt2qa.overrides.edited` does it inside ``prepare``.  The names
below that need torch are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pt2qa.overrides.plan import Edit, EditKind, OverridePlan

if TYPE_CHECKING:
    from pt2qa.overrides.annotations import AnnotatedOp, Annotations, Edge, annotations_of, sites_on
    from pt2qa.overrides.fusion import fusions, fusions_in

__all__ = [
    # plans
    "Edit",
    "EditKind",
    "OverridePlan",
    # what they do to an annotation
    "AnnotatedOp",
    "Annotations",
    "Edge",
    "annotations_of",
    "sites_on",
    # what could be fused
    "fusions",
    "fusions_in",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pt2qa.overrides' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = "fusion" if name.startswith("fusions") else "annotations"
    value = globals()[name] = getattr(importlib.import_module(f"pt2qa.overrides.{module}"), name)
    return value
