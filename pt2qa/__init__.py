"""Where a PT2E-quantized model loses accuracy, why, and what to change.

The public names stand in ``__init__.pyi``, which type checkers read.  They are imported on first use, so that reading a
saved report (``pt2qa show``) needs neither torch nor a quantizer.
"""

import lazy_loader

__version__ = "0.2.0"

_imported, _, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted(["__version__", *_names])


def __getattr__(name: str) -> object:
    if name not in _names:
        from pt2qa._printable import question

        near = question(name, __all__) or f"it has {', '.join(__all__)};"
        others = "docs/numeric_suite.md has the names of other tools"
        raise AttributeError(f"module 'pt2qa' has no attribute {name!r}; {near} {others}")
    from pt2qa._noise import drop

    drop()
    return _imported(name)


def __dir__() -> list[str]:
    return __all__
