"""Overrides: edits to what a quantizer annotates, op by op.

A plan (:mod:`pt2qa.overrides.plan`) is a list of edits and needs no torch.  What a plan does to the annotation of a
model is in :mod:`pt2qa.overrides.annotations`; :mod:`pt2qa.overrides.edited` does it inside ``prepare``.  The names of
``__init__.pyi`` are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
