"""The pretrained and random models that ``make bench-repair`` repairs, and their data in two parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.zoo import models


@dataclass(frozen=True)
class Setting:
    """A model, batches to calibrate on, and batches that nothing is fitted to."""

    model: nn.Module
    calibration: list[Tensor]
    held_out: list[Tensor]


OUTLIERS, SIZE = [3, 60, 120], 30.0
"""The channels of a norm's outliers, and how many times as large as others they are."""


class VisionTransformer(nn.Module):
    """A pre-norm transformer of six layers with random weights, and outliers in norms that the linears take back."""

    def __init__(self) -> None:
        super().__init__()
        models.torchvision_models()  # transformers imports torchvision where it is installed
        import transformers

        torch.manual_seed(0)
        config = transformers.ViTConfig(
            hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768, num_labels=100
        )
        self.model = transformers.ViTForImageClassification(config)
        vit = self.model.vit
        read = [(vit.layernorm, [self.model.classifier])]
        for layer in vit.layers:
            heads = layer.attention
            read += [(layer.layernorm_before, [heads.q_proj, heads.k_proj, heads.v_proj])]
            read += [(layer.layernorm_after, [layer.mlp.fc1])]
        with torch.no_grad():
            for linear in (each for each in self.modules() if isinstance(each, nn.Linear)):
                linear.weight *= 4  # so that attention tells positions apart
            for norm, linears in read:
                for parameter in norm.parameters():
                    parameter += 0.3 * torch.randn_like(parameter)
                    parameter[OUTLIERS] *= SIZE
                for linear in linears:
                    linear.weight[:, OUTLIERS] /= SIZE

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


_MADE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "mobilenet_v2": (models.mobilenet_v2, models.pictures, 5),
    "efficientnet_lite0": (models.efficientnet_lite0, lambda: models.pictures(models.LITE), 5),
    "resnet18": (lambda: models.healthy_resnet("resnet18"), models.pictures, 5),
    "resnet50": (lambda: models.healthy_resnet("resnet50"), models.pictures, 5),
    "digit_net": (models.digit_net, lambda: models.digits()[0][:400], 50),
    "speech_encoder": (models.speech_encoder, lambda: models.utterances(48), 8),
    "vision_transformer": (lambda: VisionTransformer().eval(), models.pictures, 5),
    "sentence_encoder": (models.sentence_encoder, lambda: models.sentences(64), 4),
}
"""How a model and its samples are made, and the size of a batch."""

NAMES = tuple(_MADE)
INSERTED = ", inserted"
"""Behind the name of an option of NNCF: how many modules it inserted, each an op more at run time."""


def setting(name: str) -> Setting:
    """The model of a name; every other sample calibrates."""
    model, samples, size = _MADE[name]
    data = samples()
    calibration, held_out = (list(data[start::2].split(size)) for start in (0, 1))
    return Setting(model(), calibration, held_out)


def rounded_weights(graph: GraphModule) -> int:
    """How many ops of a converted graph have an integer weight."""
    sources = (node.args[1] for node in graph.graph.nodes if node.op == "call_function" and len(node.args) > 1)
    return sum(isinstance(each, Node) and "dequantize_per" in str(each.target) for each in sources)
