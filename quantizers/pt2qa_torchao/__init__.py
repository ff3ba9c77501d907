"""The last step with torchao's ``quantize_``: which config each linear gets, as a call to paste."""

from __future__ import annotations

from typing import Any

__all__ = ["MixedConfig", "mixed_config"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from pt2qa_torchao import mixed  # it needs torch

        return getattr(mixed, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
