"""What the prober writes in graphs and reads of observers: neither has a public name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation


def annotate(node: Node, inputs: dict[Node, Any], output: Any) -> None:
    """Annotates an op, in place."""
    node.meta["quantization_annotation"] = QuantizationAnnotation(inputs, output, _annotated=True)


def scales_of(observers: Sequence[Any]) -> list[Tensor]:
    """The scale that each observer gives."""
    return [observer.calculate_qparams()[0] for observer in observers]
