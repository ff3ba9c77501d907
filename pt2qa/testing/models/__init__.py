"""The models that ship with pt2qa: small, fixed, one pattern each."""

from __future__ import annotations

from pt2qa.testing.model import ConformanceModel
from pt2qa.testing.models.arithmetic import ARITHMETIC
from pt2qa.testing.models.convolutions import CONVOLUTIONS
from pt2qa.testing.models.linears import LINEARS
from pt2qa.testing.models.sequences import SEQUENCES
from pt2qa.testing.models.shapes import SHAPES
from pt2qa.testing.models.sharing import SHARING
from pt2qa.testing.models.values import VALUES

MODELS: dict[str, ConformanceModel] = {
    model.name: model for model in (*CONVOLUTIONS, *LINEARS, *ARITHMETIC, *SHARING, *SHAPES, *SEQUENCES, *VALUES)
}
"""By name, in the order in which they are run."""

__all__ = ["MODELS"]
