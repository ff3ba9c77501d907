"""The pretrained and random models that ``make bench-repair`` repairs, and their data in two parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.zoo import models


@dataclass(frozen=True)
class Setting:
    """A model, batches to calibrate on, and batches that nothing is fitted to."""

    model: nn.Module
    calibration: list[Tensor]
    held_out: list[Tensor]


_MADE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "mobilenet_v2": (models.mobilenet_v2, models.pictures, 5),
    "efficientnet_lite0": (models.efficientnet_lite0, lambda: models.pictures(models.LITE), 5),
    "resnet18": (lambda: models.healthy_resnet("resnet18"), models.pictures, 5),
    "resnet50": (lambda: models.healthy_resnet("resnet50"), models.pictures, 5),
    "digit_net": (models.digit_net, lambda: models.digits()[0][:400], 50),
    "speech_encoder": (models.speech_encoder, lambda: models.utterances(48), 8),
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
