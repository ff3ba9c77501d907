"""What this plug-in uses from torch and OpenVINO that has no public name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import openvino
    from torch.fx import Node


def optimize(model: openvino.Model) -> None:
    """Makes of a translated model what ``openvino.convert_model`` returns, in place: weights are integers again."""
    from openvino._offline_transformations import apply_moc_transformations, compress_quantize_weights_transformation

    apply_moc_transformations(model, cf=False, smart_reshape=True)
    compress_quantize_weights_transformation(model)


def is_tensor(node: Node) -> bool:
    """Whether a node of an exported graph stands for a tensor; ``torch.export`` takes a number for a constant."""
    from torch import Tensor

    return isinstance(node.meta.get("val"), Tensor)
