"""Overrides: edits to a quantizer's annotations, op by op; the names of ``__init__.pyi`` are imported on first use."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
