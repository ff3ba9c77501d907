"""What this plug-in reads and writes in a graph's nodes, for which torch and torchao have no public names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch.fx import Node

_ANNOTATION: Final = "quantization_annotation"
_VALUE: Final = "val"


def keep_in_float(node: Node) -> None:
    """Marks an op, in place, as annotated with nothing to round: later quantizers leave it alone."""
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

    node.meta[_ANNOTATION] = QuantizationAnnotation(_annotated=True)


def shape_of(node: Node) -> Sequence[int] | None:
    """The traced shape of a node's value; None if it was not traced."""
    value = node.meta.get(_VALUE)
    return None if value is None else value.shape
