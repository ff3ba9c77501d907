"""Capture: from an ``nn.Module`` to an exported program whose ops can be followed and quantized."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from pt2qa.capture.batches import check_inputs
from pt2qa.capture.changes import Change
from pt2qa.capture.program import Capture, capture

__all__ = ["Capture", "Change", "capture", "check_inputs"]


class _CallablePackage(ModuleType):
    """``pt2qa.capture`` names the function and this package; whichever is found, it can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Capture:
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
