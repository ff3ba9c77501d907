"""The kinds of fault: each from what somebody reported, with what is right to say of it."""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import MinMaxObserver, MovingAverageMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec, SharedQuantizationSpec

import pt2qa
from pt2qa.plugins import resolve
from tests.diagnosis.blind.bed import Bed, UnfitError, activations_of
from tests.diagnosis.blind.nets import DEVIATION, MEAN, REAL, Detector, Link, Tabular, Unit
from tests.diagnosis.subject import Graph, changed

Places = tuple[str, ...] | None
"""Names of ops and modules that are right to name, ``""`` for the model as a whole; None: any."""

INPUT = ("x", "")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        id, sentence: what tables call it, and what is wrong.
        causes: what it may be called, of the words that docs/diagnose.md has.
        source: where it is reported.
        plant: edits a bed; told whether to plant the fault, or only what belongs to the model without it.
        part: where it lies: ``data``, ``specs``, ``model`` or ``after``, in checkpoints and converted graphs.
        nets: kinds of net that have a place for it.
        error: what it may be refused with, a regular expression; empty: it must be diagnosed.
        by_hand: whether it lies where no edit of the quantization reaches, so that to name it is to repair it.
        elsewhere: whether it is in the data that is diagnosed alone, and costs nothing on other data.
        prepares: whether it changes the bed without the fault, too.
    """

    id: str
    sentence: str
    causes: tuple[str, ...]
    source: str
    plant: Callable[[Bed, random.Random, bool], Places]
    part: str
    nets: tuple[str, ...]
    error: str = ""
    by_hand: bool = False
    elsewhere: bool = False
    prepares: bool = False

    @property
    def composes(self) -> bool:
        """Whether another fault can be planted beside it."""
        return not (self.error or self.by_hand or self.elsewhere)


KINDS: dict[str, Kind] = {}
RANDOM = ("cnn", "detector", "encoder", "words", "lstm", "tabular")
VECTORS, IMAGES, TOKENS = (*RANDOM[:3], *RANDOM[4:], *REAL), RANDOM[:2], RANDOM[2:4]


def _kind(
    part: str, usual: tuple[str, ...], sentence: str, *causes: str, source: str, nets: tuple[str, ...] = (), **rest: Any
) -> Callable[..., Callable[..., Places]]:
    """Makes a kind of a function of a bed and random numbers, and, if it takes it, whether to plant the fault."""

    def added(plant: Callable[..., Places]) -> Callable[..., Places]:
        whole = plant.__code__.co_argcount == 3

        def planted(bed: Bed, r: random.Random, sick: bool) -> Places:
            return plant(bed, r, sick) if whole else plant(bed, r) if sick else None

        name = plant.__name__.replace("_", "-")
        rest.setdefault("by_hand", part == "after")
        rest["prepares"] = whole
        KINDS[name] = Kind(name, sentence, causes, source, planted, part, nets or usual, **rest)
        return plant

    return added


data = functools.partial(_kind, "data", VECTORS)
spec = functools.partial(_kind, "specs", (*RANDOM, *REAL))
model = functools.partial(_kind, "model", RANDOM)
after = functools.partial(_kind, "after", RANDOM)


def needs(holds: object) -> None:
    """Tries another net if something is missing."""
    if not holds:
        raise UnfitError


NARROW, WIDE = "narrow-calibration", "wide-calibration"
DEBUGGING = "docs.pytorch.org: Quantization Accuracy Debugging"

# -- data --------------------------------------------------------------------------------------------------------------


def _pixels(bed: Bed) -> list[Tensor]:
    return [batch * DEVIATION + MEAN for batch in bed.calibration]


@data("calibrated on pixels of 0..255", WIDE, nets=IMAGES, source="PINTO0309/onnx2tf#610")
def raw_pixels(bed: Bed, r: random.Random) -> Places:
    bed.calibration = [pixels * 255 for pixels in _pixels(bed)]
    return INPUT


@data("calibrated on pixels of 0..1, not normalised", NARROW, nets=IMAGES, source="ModelTC/MQBench#39")
def not_normalized(bed: Bed, r: random.Random) -> Places:
    bed.calibration = _pixels(bed)
    return INPUT


@data("calibration has the channels in another order", NARROW, WIDE, source="taourl.com/read-2536536: channel order")
def channels_swapped(bed: Bed, r: random.Random, sick: bool) -> Places:
    axis = 1 if bed.calibration[0].dim() == 4 else -1
    size = [1] * bed.calibration[0].dim()
    size[axis] = -1
    units = torch.logspace(0, -r.uniform(1, 1.6), bed.calibration[0].shape[axis]).view(size)
    for name in ("calibration", "use", "evaluation", "check"):
        setattr(bed, name, [batch * units for batch in getattr(bed, name)])
    if sick:
        bed.calibration = [batch.flip(axis) for batch in bed.calibration]
    return None


@data("calibrated on one blank batch", NARROW, source="pytorch/pytorch#160095: ones as example inputs")
def blank_batch(bed: Bed, r: random.Random) -> Places:
    bed.calibration = [torch.full_like(bed.calibration[0], r.choice((0.0, 0.2, 1.0)))]
    return INPUT


@data("calibrated on faint samples alone, such as pictures of the night", NARROW, source=DEBUGGING)
def faint_calibration(bed: Bed, r: random.Random) -> Places:
    factor = r.uniform(0.15, 0.5)
    bed.calibration = [batch * factor for batch in bed.calibration]
    return INPUT


@data("calibrated on random numbers, as tutorials do", NARROW, WIDE, source="pytorch docs, PTSQ example")
def noise_calibration(bed: Bed, r: random.Random) -> Places:
    g = torch.Generator().manual_seed(r.randrange(1 << 30))
    noise = r.choice((torch.rand, torch.randn))
    bed.calibration = [noise(batch.shape, generator=g) for batch in bed.calibration]
    return None


@data("calibrated on samples of one class", NARROW, nets=RANDOM, source=DEBUGGING + ", every category")
def one_class(bed: Bed, r: random.Random) -> Places:
    samples, labels = bed.net.draw(1, 512)
    alike = samples[labels == r.randrange(6)]
    bed.calibration = list(alike[:16].split(8))
    return None


@data("one sample of the calibration is corrupt", "calibration-outlier", source="Samsung/ONE#3047")
def corrupt_sample(bed: Bed, r: random.Random) -> Places:
    factor, batch = r.uniform(8, 60), r.randrange(len(bed.calibration))
    bed.calibration[batch] = bed.calibration[batch].clone()
    bed.calibration[batch][r.randrange(4)] *= factor
    return None


@data("missing values are coded as -999 in the calibration", WIDE, nets=("tabular", "lstm", "encoder"),
      source="a habit of those who work on tables")  # fmt: skip
def coded_missing(bed: Bed, r: random.Random) -> Places:
    g, code = torch.Generator().manual_seed(r.randrange(1 << 30)), -r.choice((99.0, 999.0))
    for number, batch in enumerate(bed.calibration):
        bed.calibration[number] = torch.where(torch.rand(batch.shape, generator=g) < 0.03, code, batch)
    return INPUT


@data("a division by zero left an infinity in the calibration", "nonfinite", "calibration-outlier", WIDE,
      source="alibaba/TinyNeuralNetwork#375: an observer's min_val=inf", error="(?i)inf|nan|finite")  # fmt: skip
def infinite_sample(bed: Bed, r: random.Random) -> Places:
    bed.calibration[1] = bed.calibration[1].clone()
    bed.calibration[1].view(-1)[r.randrange(50)] = r.choice((torch.inf, 3e38))
    return None


@data("a sample of the evaluation is a glitch of the sensor", "bad-sample", source=DEBUGGING + ", data sensitive error",
      elsewhere=True)  # fmt: skip
def glitch(bed: Bed, r: random.Random) -> Places:
    factor = r.uniform(15, 50)
    for batches in (bed.use, bed.evaluation):
        batches[0] = batches[0].clone()
        batches[0][r.randrange(8 if bed.net.kind != "mobilenet_v2" else 4)] *= factor
    return None


# -- what the quantizer is told ----------------------------------------------------------------------------------------


def everywhere(bed: Bed, change: Callable[..., object], weights: bool = False) -> None:
    bed.specs.append(lambda graph: graph.everywhere(change, weights=weights))


@spec("an observer averages slowly, and the first batches are a warm-up", "observer", NARROW,
      nets=VECTORS, source="pytorch/pytorch#27377, Samsung/ONE#11269")  # fmt: skip
def slow_average(bed: Bed, r: random.Random) -> Places:
    bed.calibration[0] = bed.calibration[0] * r.uniform(0.1, 0.4)
    constant = r.choice((0.01, 0.05))
    observer = MovingAverageMinMaxObserver.with_args(averaging_constant=constant, eps=2**-12)
    everywhere(bed, changed(observer_or_fake_quant_ctr=observer))
    return None


class PercentileObserver(MinMaxObserver):
    """Cuts the extremes of each batch off."""

    def __init__(self, percent: float = 99.0, **rest: object) -> None:
        super().__init__(**rest)
        self.percent = percent

    def forward(self, x_orig: Tensor) -> Tensor:
        edge = torch.tensor([100 - self.percent, self.percent]) / 100
        low, high = torch.quantile(x_orig.detach().float().flatten()[:100_000], edge)
        super().forward(x_orig.detach().clamp(low, high))
        return x_orig


@spec("percentiles cut the tails off that the model needs", "observer", "site-range",
      source="cruxible.dev/learn/ml49-int8-calibration, Samsung/ONE#3047")  # fmt: skip
def percentile(bed: Bed, r: random.Random) -> Places:
    percent = r.uniform(95, 99)
    everywhere(bed, changed(observer_or_fake_quant_ctr=PercentileObserver.with_args(percent=percent)))
    return None


@spec("weights per tensor, and a dead channel's are huge, as a folded batch norm leaves them", "per-tensor-weights",
      nets=("cnn",), source="Edgecortix-Inc/pytorch_quantization#5, qualcomm/aimet#2474")  # fmt: skip
def per_tensor_weights(bed: Bed, r: random.Random, sick: bool) -> Places:
    number, channel, factor = r.randrange(len(bed.model.blocks)), r.randrange(12), r.uniform(8, 60)
    block = bed.model.blocks[number]
    needs(isinstance(block.deep, Unit) and isinstance(block.a.act, nn.ReLU | nn.Hardswish))
    with torch.no_grad():
        block.a.norm.weight[channel], block.a.norm.bias[channel] = 0, -4
        block.deep.conv.weight[channel] *= factor
    if sick and bed.backend == "xnnpack":
        bed.quantizer = "xnnpack:per_channel=false"
    elif sick:
        observer = MinMaxObserver.with_args(eps=2**-12)
        fields = {"qscheme": torch.per_tensor_symmetric, "ch_axis": None, "observer_or_fake_quant_ctr": observer}
        everywhere(bed, changed(**fields), weights=True)
    return ("", *bed.near(f"blocks.{number}.deep.conv/conv2d"))


@spec("activations of 7 bits or fewer in an int8 spec", "activation-scheme",
      source="pytorch/executorch#13284, #14559, pytorch/pytorch#45563")  # fmt: skip
def reduced_range(bed: Bed, r: random.Random) -> Places:
    levels = r.choice((128, 64))
    if bed.backend == "x86" and levels == 128 and r.random() < 0.5:
        bed.quantizer = "x86:reduce_range=true"
    else:
        low = 0 if bed.backend == "x86" else -levels // 2
        everywhere(bed, changed(quant_min=low, quant_max=low + levels - 1))
    return None


@spec("activations symmetric, though they are positive", "activation-scheme", "site-range",
      nets=(*IMAGES, "tabular", "digits"), source="Xilinx/brevitas#1406, ultralytics/yolov5#10164")  # fmt: skip
def symmetric_activations(bed: Bed, r: random.Random) -> Places:
    needs(bed.ops("relu", "silu", "hardswish", "gelu"))
    everywhere(bed, changed(qscheme=torch.per_tensor_symmetric))
    return None


@spec(
    "one weight is left at 3 to 5 bits", "weight-scheme", source="guides of accuracy tuning: the odd qconfig of a layer"
)
def few_bits(bed: Bed, r: random.Random) -> Places:
    name, bits = r.choice(bed.ops("conv2d", "linear")), r.choice((3, 4, 5))
    edge = 2 ** (bits - 1)

    def edit(graph: Graph) -> None:
        graph.at_value(graph.weight_of(name), changed(quant_min=1 - edge, quant_max=edge - 1))

    bed.specs.append(edit)
    return (name,)


@spec("an op has the fixed scale of another one, a sigmoid's", "site-range", NARROW, "activation-scheme",
      source="SonySemiconductorSolutions/mct-model-optimization#771")  # fmt: skip
def fixed_scale(bed: Bed, r: random.Random) -> Places:
    name = r.choice(bed.ops("relu", "silu", "hardswish", "gelu", "conv2d", "linear", "layer_norm"))
    low, dtype = (0, torch.uint8) if bed.backend == "x86" else (-128, torch.int8)
    spec = FixedQParamsQuantizationSpec(dtype, 1 / 256, low, low, low + 255, torch.per_tensor_affine)
    bed.specs.append(lambda graph: graph.at_value(graph.op(name), lambda own: spec))
    return bed.near(name)


@spec("a product shares its output's scale with its input, as a pool would", "shared-scale", "broken-sharing",
      source="pytorch/executorch#3091, #19159")  # fmt: skip
def shared_with_input(bed: Bed, r: random.Random, sick: bool) -> Places:
    link = bed.link(r)
    count = len(bed.model.get_submodule(link.product).weight)
    bed.scale(link, list(range(count)), r.uniform(10, 60))
    places = bed.at(link)
    last = bed.op_of(link.reader)

    def edit(graph: Graph) -> None:
        product = graph.op(places[0])
        source = product.all_input_nodes[0]
        annotation = product.meta.get("quantization_annotation")
        if annotation is not None and source in annotation.input_qspec_map:  # else it costs nothing, which is counted
            shared = SharedQuantizationSpec((source, product))
            graph.at_value(graph.input_of(last), lambda own: shared)

    if sick:
        bed.specs.append(edit)
    return (*places, *bed.near(places[0], hops=0))


@spec("XNNPACK's quantizer rounds between a convolution and its ReLU6", "unfused-activation",
      nets=IMAGES, source="guides of accuracy tuning: patterns that are not fused")  # fmt: skip
def not_fused(bed: Bed, r: random.Random, sick: bool) -> Places:
    needs(bed.backend == "xnnpack")
    units = [name for name, unit in bed.model.named_modules() if isinstance(unit, Unit)]
    bent = [name for name in units if not isinstance(bed.model.get_submodule(name).act, nn.Identity)]
    name, factor = r.choice(bent), r.uniform(6, 20)
    unit = bed.model.get_submodule(name)
    unit.act = nn.ReLU6().eval()
    with torch.no_grad():
        unit.norm.weight *= factor
    ops = (f"{name}.conv/conv2d", f"{name}.act/hardtanh")
    if not sick:
        bed.overrides.append(pt2qa.Edit("fuse", ops))
    return (*ops, *bed.near(*ops, hops=1))


@spec("a dynamic scale for all tokens, one of which is far larger", "dynamic-by-row", by_hand=True, nets=("encoder",),
      source="ExecuTorch's XNNPACK backend quantizes each row")  # fmt: skip
def dynamic_rows(bed: Bed, r: random.Random, sick: bool) -> Places:
    needs(bed.backend == "xnnpack")
    bed.quantizer, factor = "xnnpack:mode=dynamic", r.uniform(30, 150)
    for batches in (bed.calibration, bed.use, bed.evaluation, bed.check):
        for number, batch in enumerate(batches):
            batches[number] = torch.cat([batch[:, :1] * factor, batch[:, 1:]], 1)
    bed.finish = None if sick else lambda own, pair: pair.as_deployed()
    return None


# -- the model ---------------------------------------------------------------------------------------------------------


@model("a few channels are far larger than the others, and taken back later", "outlier-channel",
      source="mit-han-lab/6s965-fall2022#16, cross-layer equalization")  # fmt: skip
def loud_channels(bed: Bed, r: random.Random) -> Places:
    link = bed.link(r)
    bed.scale(link, bed.channels(link, r, r.choice((1, 2, 3))), r.uniform(20, 120))
    return bed.at(link)


@model("one output reads the smallest channels of what all share", "outlier-channel", "precision",
      nets=("tabular",), source="guides of accuracy tuning: outputs that need high precision")  # fmt: skip
def small_features(bed: Bed, r: random.Random) -> Places:
    needs(bed.net.links and bed.backend == "xnnpack")  # x86 rounds what each linear reads
    width = len(bed.model.c.weight)
    link = Link("c", "amount", first=6 - width)
    bed.scale(link, list(range(width - 6, width)), 1 / r.uniform(20, 100))
    return (*bed.at(link), *bed.near(bed.op_of("c")))


@model("boxes in pixels and scores share a concatenation", "shared-scale", "outlier-channel",
      nets=("detector",), source="ultralytics/yolov5#2509, Tencent/ncnn#2935, PINTO0309/onnx2tf#269")  # fmt: skip
def boxes_in_pixels(bed: Bed, r: random.Random, sick: bool) -> Places:
    pixels = r.uniform(40, 640)
    if sick:
        with torch.no_grad():
            bed.model.boxes.weight *= pixels
            bed.model.boxes.bias *= pixels
    else:
        bed.model.late = pixels
    return bed.near(bed.ops("cat")[-1])


@model("branches of different size are concatenated", "shared-scale", "outlier-channel",
      nets=("detector",), source="PaddlePaddle/Paddle-Lite#9273, pytorch/executorch#19159")  # fmt: skip
def unequal_branches(bed: Bed, r: random.Random) -> Places:
    link = bed.link(r)
    count = len(bed.model.get_submodule(link.product).weight)
    bed.scale(link, list(range(count)), r.uniform(20, 100))
    return (*bed.at(link), *bed.near(bed.ops("cat")[0]))


@model("a channel of the residual stream explodes", "outlier-channel", "precision",
      nets=("cnn",), source="PaddlePaddle/Paddle#25532: elementwise_add loses the accuracy")  # fmt: skip
def loud_stream(bed: Bed, r: random.Random) -> Places:
    needs(bed.model.streams)
    channels, factor = r.sample(range(12), r.choice((1, 2))), r.uniform(20, 100)
    blocks = list(bed.model.blocks)
    with torch.no_grad():
        for unit in (bed.model.stem, *(block.b for block in blocks)):
            unit.norm.weight[channels] *= factor
            unit.norm.bias[channels] *= factor
        for reader in (*(block.a.conv for block in blocks), bed.model.head):
            reader.weight[:, channels] /= factor
    ends = ("add", "relu", "mean")
    return bed.near(*bed.ops(*ends), *(f"blocks.{i}.a.conv/conv2d" for i in range(len(blocks))), hops=1)


@model("a few dimensions of the embedding are far larger", "outlier-channel", "norm-outliers",
      nets=("words",), source="LLM.int8: outlier features")  # fmt: skip
def loud_embedding(bed: Bed, r: random.Random) -> Places:
    channels, factor = r.sample(range(16), r.choice((1, 2))), r.uniform(20, 100)
    with torch.no_grad():
        bed.model.table.weight[:, channels] *= factor
        bed.model.embed.weight[:, channels] /= factor
    return bed.near(*bed.ops("embedding"), hops=1)


@model("values carry a large constant that is taken out later", "precision", "outlier-channel", "site-range",
      nets=TOKENS, source="ModelTC/MQBench#39: what is not centred")  # fmt: skip
def large_offset(bed: Bed, r: random.Random) -> Places:
    link = bed.link(r, scales=False)
    product, reader = bed.model.get_submodule(link.product), bed.model.get_submodule(link.reader)
    offset = torch.full_like(product.bias, r.uniform(20, 120))
    with torch.no_grad():
        product.bias += offset
        reader.bias -= reader.weight @ offset
    return bed.at(link)


@model("padding is masked by a huge negative number", "masked-values",
      nets=TOKENS, source="microsoft/Olive#1597, pytorch/executorch#8736, #20471")  # fmt: skip
def huge_mask(bed: Bed, r: random.Random, sick: bool) -> Places:
    needs(bed.backend == "xnnpack")  # x86 rounds no sum of scores
    value, padded = r.choice((-1e4, -1e9, torch.finfo(torch.float32).min)), r.choice((1, 2, 3))
    mask = torch.zeros(10, 10)
    mask[:, -padded:] = value if sick else -20.0
    for layer in bed.model.layers:
        layer.attention.mask = mask.clone()
    return bed.near(*bed.ops("add", "softmax"), hops=1)


@model("attention is sharp: logits without their scale, or with a large learned one", "precision",
      nets=TOKENS, source="PaddlePaddle/Paddle#24052: softmax; logit scales that are learned")  # fmt: skip
def sharp_attention(bed: Bed, r: random.Random, sick: bool) -> Places:
    needs(bed.backend == "xnnpack")  # x86 rounds no scores
    layers = list(bed.model.layers)
    number, factor = r.randrange(len(layers)), r.uniform(3, 8)
    with torch.no_grad():
        for product in (layers[number].attention.q, layers[number].attention.k):
            product.weight *= factor
            product.bias *= factor
    inside = tuple(name.name for name in bed.graph().names.values() if name.module.startswith(f"layers.{number}.att"))
    if not sick:
        bed.overrides.append(pt2qa.Edit("float", inside))
    return (*inside, *bed.near(f"layers.{number}.attention.q/linear", hops=1))


# -- checkpoints and converted graphs ----------------------------------------------------------------------------------


def made_of(bed: Bed, other: nn.Module) -> None:
    """The converted graph is made of another model than the float one."""
    bed.finish = lambda own, pair: _paired(own, own.quantized(other).quantized)


def _paired(bed: Bed, quantized: GraphModule) -> pt2qa.QuantizedPair:
    return pt2qa.pair(bed.capture(), quantized, quantizer=bed.backend)


@after("the quantized model was made of an earlier checkpoint", "prepare-changed",
      source="pytorch/pytorch#111192: weights of a QAT checkpoint", error="(?i)weight|one model")  # fmt: skip
def stale_checkpoint(bed: Bed, r: random.Random) -> Places:
    other, noise = copy.deepcopy(bed.model), r.uniform(0.05, 0.4)
    torch.manual_seed(r.randrange(1 << 30))
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn_like(weight)
    made_of(bed, other)
    return None


@after("one layer's weights did not come from the checkpoint", "prepare-changed",
      source="Blaizzy/mlx-audio#902: load_state_dict(strict=False)", error="weight of")  # fmt: skip
def strange_layer(bed: Bed, r: random.Random) -> Places:
    name = r.choice(bed.ops("conv2d", "linear"))
    other, share = copy.deepcopy(bed.model), r.uniform(0.3, 1)
    module = other.get_submodule(name.rpartition("/")[0])
    needs(isinstance(module, (nn.Conv2d, nn.Linear)))  # of an LSTM, the ops are decomposed
    weight = module.weight
    torch.manual_seed(r.randrange(1 << 30))
    with torch.no_grad():
        weight += share * weight.std() * torch.randn_like(weight)
    made_of(bed, other)
    return bed.near(name)


@after("batch norm statistics were not loaded", "prepare-changed",
      nets=IMAGES, source="pytorch/pytorch#111384, strict=False", error="weight of")  # fmt: skip
def lost_statistics(bed: Bed, r: random.Random) -> Places:
    other = copy.deepcopy(bed.model)
    norms = [name for name, norm in other.named_modules() if isinstance(norm, nn.BatchNorm2d)]
    name = r.choice(norms)
    other.get_submodule(name).reset_running_stats()
    made_of(bed, other)
    return bed.near(f"{name.removesuffix('norm')}conv/conv2d")


def _activation(bed: Bed, graph: GraphModule, r: random.Random) -> Node:
    """One that an op computed."""
    sites = [node for node in activations_of(graph) if node.all_input_nodes[0].op == "call_function"]
    needs(sites)
    return r.choice(sites)


def _edited(bed: Bed, r: random.Random, edit: Callable[[Node], None]) -> Places:
    """Edits how one activation is rounded, in the converted graph."""
    pair = bed.quantized()
    site = _activation(bed, pair.quantized, random.Random(state := r.random()))
    names = pair.names
    place = Graph(pair.quantized, names).name(site.all_input_nodes[0])

    def finish(own: Bed, made: pt2qa.QuantizedPair) -> pt2qa.QuantizedPair:
        graph = copy.deepcopy(made.quantized)
        edit(_activation(own, graph, random.Random(state)))
        graph.recompile()
        return _paired(own, graph)

    bed.finish = finish
    return bed.near(*[place] * bool(place))


@after("a scale in the converted graph is an older run's", "site-range", WIDE, NARROW, "broken-sharing",
      source="pytorch/pytorch#39058: scales of a state dict")  # fmt: skip
def old_scale(bed: Bed, r: random.Random) -> Places:
    factor = r.choice((r.uniform(0.15, 0.4), r.uniform(6, 30)))

    def edit(site: Node) -> None:
        for node in (site, *site.users):
            node.args = (node.args[0], node.args[1] * factor, *node.args[2:])

    return _edited(bed, r, edit)


@after("a zero point is off between quantize and dequantize", "prepare-changed", "broken-sharing", "site-range",
      source="anilsathyan7/Portrait-Segmentation#24: int8 and uint8")  # fmt: skip
def zero_point_off(bed: Bed, r: random.Random) -> Places:
    offset = r.choice((-1, 1)) * r.randrange(6, 60)

    def edit(site: Node) -> None:
        for node in list(site.users):
            zero = node.args[2]
            node.args = (*node.args[:2], max(min(zero + offset, 127), 0), *node.args[3:])

    return _edited(bed, r, edit)


@after("observers were frozen before the training ended", NARROW, "site-range",
      source="neuralmagic/sparseml#1206, pytorch/tutorials#1370")  # fmt: skip
def frozen_observers(bed: Bed, r: random.Random) -> Places:
    link = bed.link(r)
    scaled = bed.model.get_submodule(link.norm or link.product)
    early, shrunk = copy.deepcopy(bed.model), 1 / r.uniform(3, 8)
    with torch.no_grad():
        for each in ("weight", "bias"):
            early.get_parameter(f"{link.norm or link.product}.{each}").copy_(scaled.get_parameter(each) * shrunk)

    bed.finish = with_ranges_of(early)
    return None


def with_ranges_of(model: nn.Module) -> Callable[[Bed, pt2qa.QuantizedPair], pt2qa.QuantizedPair]:
    """Activations get the scales that calibration found for another model."""

    def finish(own: Bed, made: pt2qa.QuantizedPair) -> pt2qa.QuantizedPair:
        graph, old = copy.deepcopy(made.quantized), own.quantized(model).quantized
        for node, before in zip(activations_of(graph), activations_of(old), strict=True):
            for each in (node, *node.users):
                each.args = (each.args[0], *before.args[1:3], *each.args[3:])
        graph.recompile()
        return _paired(own, graph)

    return finish


def by_torchao(bed: Bed, model: nn.Module, calibrate: bool = True) -> GraphModule:
    """What torchao alone makes of a model as it is."""
    graph = torch.export.export(model, (bed.calibration[0],)).module()
    prepared = prepare_pt2e(graph, resolve(bed.quantizer).build(graph, qat=False))
    for batch in bed.calibration if calibrate else ():
        prepared(batch)
    return convert_pt2e(prepared)


def _in_training(bed: Bed) -> None:
    other = copy.deepcopy(bed.model).train()
    for norm in other.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 0.1  # export cannot count batches
    bed.finish = lambda own, pair: _paired(own, by_torchao(own, other))


@after("dropout was on when the model was exported", "prepare-changed", "capture-changed",
      nets=("encoder", "tabular"), source="pytorch/pytorch#103681, #104110", error="(?i)dropout|random")  # fmt: skip
def dropout_left_on(bed: Bed, r: random.Random) -> Places:
    _in_training(bed)
    return None


@after("a batch norm that follows no convolution was exported in training mode", "prepare-changed", "capture-changed",
      nets=("cnn",), source="pytorch/pytorch#115715", error="(?i)batch.?norm|training mode")  # fmt: skip
def norms_in_training(bed: Bed, r: random.Random, sick: bool) -> Places:
    with torch.no_grad():
        seen = bed.model.stem(torch.cat(bed.calibration))
    norm = nn.BatchNorm2d(seen.shape[1]).requires_grad_(False)
    norm.running_mean, norm.running_var = seen.mean((0, 2, 3)), seen.var((0, 2, 3))
    bed.model.blocks.insert(0, norm.eval())
    if sick:
        _in_training(bed)
    return None


@after("nothing ran between prepare and convert", source="pytorch docs, calibration (not shown)",
      error="(?i)calibrat|scale is 1.0|saw no")  # fmt: skip
def not_calibrated(bed: Bed, r: random.Random) -> Places:
    needs(not bed.net.decompose)
    bed.finish = lambda own, pair: _paired(own, by_torchao(own, own.model, calibrate=False))
    return None


# -- what must change nothing ------------------------------------------------------------------------------------------


def _edit_first(bed: Bed, r: random.Random) -> None:
    """The input in another unit, which the first layer takes out."""
    needs(bed.net.kind != "words")  # indices have no unit
    factor = r.choice((0.01, 1 / 255, 3.7, 100.0))
    first = next(each for each in bed.model.modules() if isinstance(each, nn.Conv2d | nn.Linear))
    with torch.no_grad():
        first.weight /= factor
    for name in ("calibration", "use", "evaluation", "check"):
        setattr(bed, name, [batch * factor for batch in getattr(bed, name)])


def _edit_last(bed: Bed, r: random.Random) -> None:
    """Outputs in another unit."""
    needs(not isinstance(bed.model, Detector))  # its outputs share a concatenation
    factor = r.choice((0.001, 0.3, 50.0, 1000.0))
    tabular = isinstance(bed.model, Tabular)
    needs(tabular or hasattr(bed.model, "head"))
    last = [bed.model.classes, bed.model.amount] if tabular else [bed.model.head]
    with torch.no_grad():
        for layer in last:
            layer.weight *= factor
            layer.bias *= factor


def _permute(bed: Bed, r: random.Random) -> None:
    """Channels in another order."""
    link = bed.link(r)
    product, reader = bed.model.get_submodule(link.product), bed.model.get_submodule(link.reader)
    needs(reader.weight.shape[1] == len(product.weight))
    order = torch.tensor(r.sample(range(len(product.weight)), len(product.weight)))
    with torch.no_grad():
        for module in (product, *([bed.model.get_submodule(link.norm)] if link.norm else ())):
            for value in (*module.parameters(), *module.buffers()):
                if value.dim():
                    value.copy_(value[order].clone())
        reader.weight.copy_(reader.weight[:, order].clone())


def _again(bed: Bed, r: random.Random) -> None:
    """Saved, loaded and exported again."""
    file = io.BytesIO()
    torch.save(bed.model, file)
    file.seek(0)
    bed.model = torch.load(file, weights_only=False)


HARMLESS = {"input-unit": _edit_first, "output-unit": _edit_last, "permuted": _permute, "exported-again": _again}
