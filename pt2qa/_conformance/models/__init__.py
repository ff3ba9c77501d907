"""The models that ship with pt2qa: small, fixed, one pattern each."""

from __future__ import annotations

from pt2qa._conformance.model import ConformanceModel
from pt2qa._conformance.models.arithmetic import ARITHMETIC
from pt2qa._conformance.models.convolutions import CONVOLUTIONS
from pt2qa._conformance.models.linears import LINEARS
from pt2qa._conformance.models.sequences import SEQUENCES
from pt2qa._conformance.models.shapes import SHAPES
from pt2qa._conformance.models.sharing import SHARING
from pt2qa._conformance.models.values import VALUES

MODELS: dict[str, ConformanceModel] = {
    model.name: model for model in (*CONVOLUTIONS, *LINEARS, *ARITHMETIC, *SHARING, *SHAPES, *SEQUENCES, *VALUES)
}
"""By name, in the order in which they are run."""

__all__ = ["MODELS"]
