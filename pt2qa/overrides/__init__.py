"""Overrides: edits to a quantizer's annotations, op by op.

A plan (:mod:`pt2qa.overrides.plan`) is a list of edits and needs no torch.  :mod:`pt2qa.overrides.annotations` applies
a plan to the annotations of a model; :mod:`pt2qa.overrides.edited` does so inside ``prepare``.  The names of
``__init__.pyi`` are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
