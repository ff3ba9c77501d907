"""Finds out what a backend's kernels take, by lowering tiny models to it, and writes its ``BackendSpec``."""

from __future__ import annotations

from typing import Any

__all__ = ["code_of", "probe"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from pt2qa_probe import probing  # it needs torch

        return getattr(probing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
