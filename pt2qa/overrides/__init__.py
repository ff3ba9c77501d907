"""Overrides: edits to a quantizer's annotations, op by op; the names of ``__init__.pyi`` are imported on first use."""

from typing import Any

import lazy_loader

from pt2qa.overrides import plan

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _edited(quantizer: Any, edits: tuple[plan.Edit, ...], *, qat: bool) -> Any:
    from pt2qa.overrides.edited import EditedQuantizer

    return EditedQuantizer(quantizer, edits, qat=qat)


# A plan is data that every layer may hold; what makes a quantizer of it stands above.
plan.OverridePlan.make_quantizer = staticmethod(_edited)
