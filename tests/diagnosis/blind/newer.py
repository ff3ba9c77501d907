"""More kinds of fault, written from what people report before anybody tried them on the method."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torchao.quantization.pt2e import MinMaxObserver, MovingAverageMinMaxObserver

import pt2qa
from tests.diagnosis.blind.bed import Bed, activations_of
from tests.diagnosis.blind.faults import (
    IMAGES,
    INPUT,
    KINDS,
    NARROW,
    TOKENS,
    VECTORS,
    WIDE,
    Places,
    _paired,
    after,
    data,
    everywhere,
    made_of,
    model,
    needs,
    spec,
    with_ranges_of,
)
from tests.diagnosis.blind.nets import DEVIATION, MEAN, REAL, Unit
from tests.diagnosis.subject import Graph, changed

SETS = ("calibration", "use", "evaluation", "check")
SERIES = ("encoder", "lstm", "tabular")


def _in_all(bed: Bed, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the samples of every set, without a change to the tensors that other beds may share."""
    for name in SETS:
        setattr(bed, name, [change(batch.clone()) for batch in getattr(bed, name)])


def _first(bed: Bed) -> nn.Module:
    """What reads the input."""
    return next(each for each in bed.model.modules() if isinstance(each, nn.Conv2d | nn.Linear))


def _axis(batch: Tensor) -> int:
    """Where the channels of an input are."""
    return 1 if batch.dim() == 4 else -1


def _weights(net: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in net.parameters() if weight.dim() > 1]


# -- data --------------------------------------------------------------------------------------------------------------


@data("the loop asks a fresh iterator for its first sample each time", NARROW, nets=(*VECTORS, "words"),
      source="awslabs/gluonts#281, tensorflow/tflite-micro#396: next(iter(dataset))")  # fmt: skip
def same_sample(bed: Bed, r: random.Random) -> Places:
    batch = bed.calibration[0]
    sample = batch[r.randrange(len(batch))]
    bed.calibration = [sample.expand_as(batch).clone() for _ in bed.calibration]
    return None


@data("calibrated on pictures that were normalised twice", WIDE, nets=(*IMAGES, "mobilenet_v2"),
      source="PINTO0309/onnx2tf#610: the model normalises, too; alibaba/MNN#2209")  # fmt: skip
def normalized_twice(bed: Bed, r: random.Random) -> Places:
    bed.calibration = [(batch - MEAN) / DEVIATION for batch in bed.calibration]
    return INPUT


@data("normalised samples were cast to bytes, so that negative ones wrapped around", WIDE, NARROW,
      nets=(*IMAGES, *SERIES), source="airockchip/rknn-toolkit2#529, mlcommons/inference#334: uint8")  # fmt: skip
def cast_to_bytes(bed: Bed, r: random.Random) -> Places:
    bed.calibration = [batch.trunc() % 256 for batch in bed.calibration]
    return INPUT


@data("calibrated on linear magnitudes, where the model takes their logarithm", WIDE, NARROW, nets=("cnn", *SERIES),
      source="Kyubyong/tacotron#40, GANtastic3/MaskCycleGAN-VC#7: log spectrograms")  # fmt: skip
def linear_scale(bed: Bed, r: random.Random) -> Places:
    factor = r.uniform(0.6, 1.5)
    bed.calibration = [(factor * batch).exp() for batch in bed.calibration]
    return INPUT


@data("calibration pictures were shrunk by a filter, and enlarged again", NARROW, nets=(*IMAGES, "mobilenet_v2"),
      source="roboflow/rf-detr#1269: antialias; ceccocats/tkDNN#156")  # fmt: skip
def other_resize(bed: Bed, r: random.Random) -> Places:
    factor = r.choice((4, 8))
    small = [F.avg_pool2d(batch, factor) for batch in bed.calibration]
    bed.calibration = [F.interpolate(each, scale_factor=float(factor), mode="bilinear") for each in small]
    return None


@data("rows of pixels were reshaped to channels, not permuted", NARROW, WIDE, nets=(*IMAGES, "mobilenet_v2"),
      source="deeplearning4j/deeplearning4j#8201, Egorundel/int8_calibrator_cpp#2")  # fmt: skip
def reshaped_pixels(bed: Bed, r: random.Random) -> Places:
    bed.calibration = [batch.permute(0, 2, 3, 1).reshape(batch.shape) for batch in bed.calibration]
    return None


@data("calibration sequences lack the token that begins all others, a large one", NARROW, nets=TOKENS,
      source="Xilinx/brevitas#1229: BOS in the calibration")  # fmt: skip
def lost_start(bed: Bed, r: random.Random, sick: bool) -> Places:
    factor, words = r.uniform(3, 8), bed.net.kind == "words"

    def begun(batch: Tensor) -> Tensor:
        if words:
            batch[batch == 0] = 1
            batch[:, 0] = 0
        else:
            batch[:, 0] = 2 * factor
        return batch

    if words:
        with torch.no_grad():
            bed.model.table.weight[0] *= factor
    plain = bed.calibration
    _in_all(bed, begun)
    if sick and words:
        bed.calibration = [batch.clamp(min=1) for batch in plain]
    elif sick:
        bed.calibration = plain
    return None


@data("calibrated on short sequences, filled up with padding", NARROW, nets=(*TOKENS, "lstm"),
      source="Samsung/TICO#533, NVIDIA/Model-Optimizer#2254, turboderp-org/exllamav2#209")  # fmt: skip
def mostly_padding(bed: Bed, r: random.Random, sick: bool) -> Places:
    length = r.choice((1, 2))
    if bed.net.kind == "words":
        _in_all(bed, lambda batch: batch.clamp(min=1))
        with torch.no_grad():
            bed.model.table.weight[0] = 0
    if sick:
        bed.calibration = [F.pad(batch.narrow(1, 0, length), _right(batch, length)) for batch in bed.calibration]
    return None


def _right(batch: Tensor, length: int) -> tuple[int, ...]:
    """How F.pad fills the second dimension up."""
    return (*[0, 0] * (batch.dim() - 2), 0, batch.shape[1] - length)


@data("a sensor was unplugged while calibration data was recorded", NARROW, nets=(*IMAGES, *SERIES),
      source="PINTO0309/onnx2tf#670: no alpha channel in the calibration set")  # fmt: skip
def unplugged(bed: Bed, r: random.Random, sick: bool) -> Places:
    axis = _axis(bed.calibration[0])
    size = bed.calibration[0].shape[axis]
    channels, factor = torch.tensor(r.sample(range(size), max(size // 3, 1))), r.uniform(2.5, 6)
    first = _first(bed)
    with torch.no_grad():
        first.weight[:, channels] /= factor
    _in_all(bed, lambda batch: batch.index_copy(axis, channels, batch.index_select(axis, channels) * factor))
    if sick:
        bed.calibration = [batch.index_fill(axis, channels, 0.0) for batch in bed.calibration]
    return INPUT


@data("the training's augmentation was on: gains and noise that no sample has later", WIDE,
      nets=(*IMAGES, "encoder", "lstm", *REAL),
      source="Deci-AI/super-gradients#752: a switch for augmentations")  # fmt: skip
def augmented(bed: Bed, r: random.Random) -> Places:
    g, most = torch.Generator().manual_seed(r.randrange(1 << 30)), r.uniform(2.5, 6)

    def jittered(batch: Tensor) -> Tensor:
        gains = torch.linspace(0.5, most, len(batch))[torch.randperm(len(batch), generator=g)]
        gains = gains.view(-1, *[1] * (batch.dim() - 1))
        return batch * gains + 0.3 * batch.std() * torch.randn(batch.shape, generator=g)

    bed.calibration = [jittered(batch) for batch in bed.calibration]
    return INPUT


@data("one sample in eight is of a rare, loud kind, of which the calibration has none", NARROW, nets=(*IMAGES, *SERIES),
      source="rockrd.io/log/quantizing-vibration-anomaly-edge-board: healthy windows alone")  # fmt: skip
def rare_event(bed: Bed, r: random.Random, sick: bool) -> Places:
    factor, plain = r.uniform(2.5, 5), bed.calibration

    def with_event(batch: Tensor) -> Tensor:
        batch[-1] *= factor
        return batch

    _in_all(bed, with_event)
    if sick:
        bed.calibration = plain
    return INPUT


# -- what the quantizer is told ----------------------------------------------------------------------------------------


@spec("all weights have four bits, where eight were meant", "weight-scheme",
      source="pytorch/pytorch#117305, tensorflow/model-optimization#430")  # fmt: skip
def four_bit_weights(bed: Bed, r: random.Random) -> Places:
    everywhere(bed, changed(quant_min=-7, quant_max=7), weights=True)
    return None


@spec("one activation is left at four or five bits", "activation-scheme",
      source="tensorflow/model-optimization#430: 4-bit activations")  # fmt: skip
def few_levels(bed: Bed, r: random.Random) -> Places:
    pair, levels = bed.quantized(), r.choice((16, 32))
    sites = [site.all_input_nodes[0] for site in activations_of(pair.quantized)]
    name = r.choice([*filter(None, map(Graph(pair.quantized, pair.names).name, sites))])
    low = 0 if bed.backend == "x86" else -levels // 2
    fewer = changed(quant_min=low, quant_max=low + levels - 1)
    bed.specs.append(lambda graph: graph.at_value(graph.op(name), fewer))
    return bed.near(name)


class PowerOfTwoObserver(MinMaxObserver):
    """Rounds scales up to powers of two, so that shifts can apply them, and leaves a guard bit."""

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        scale, zero = super().calculate_qparams()
        return 2 ** (scale.log2().ceil() + 1), zero


@spec("scales are symmetric powers of two with a guard bit, as for another chip", "activation-scheme", "observer",
      "site-range", source="pytorch/glow#3437, espressif/esp-dl#64")  # fmt: skip
def power_of_two(bed: Bed, r: random.Random) -> Places:
    observer = PowerOfTwoObserver.with_args(eps=2**-12)
    everywhere(bed, changed(qscheme=torch.per_tensor_symmetric, observer_or_fake_quant_ctr=observer))
    return None


class SampleMeanObserver(MinMaxObserver):
    """Averages the extremes of the samples, some of which it clamps then."""

    def __init__(self, **rest: object) -> None:
        super().__init__(**rest)
        self.seen = 0

    def forward(self, x_orig: Tensor) -> Tensor:
        x = x_orig.detach().float()
        low, high = x.reshape(len(x), -1).aminmax(dim=1) if x.dim() > 1 else x.reshape(1, -1).aminmax(dim=1)
        count = self.seen + len(low)
        for value, new in ((self.min_val, low), (self.max_val, high)):
            old = value * self.seen if self.seen else 0
            value.copy_((old + new.sum()) / count)
        self.seen = count
        return x_orig


@spec("ranges are means of the samples' extremes", "observer", "site-range", nets=(*VECTORS, "words"),
      source="mit-han-lab/6s965-fall2022#18: the mean of the min and max of each sample")  # fmt: skip
def mean_of_extremes(bed: Bed, r: random.Random) -> Places:
    everywhere(bed, changed(observer_or_fake_quant_ctr=SampleMeanObserver.with_args(eps=2**-12)))
    return None


@spec("calibration files are sorted, the quiet ones last, and an observer forgets", "observer", NARROW, nets=VECTORS,
      source="openvinotoolkit/mmdetection#259: shuffle the calibration subset")  # fmt: skip
def sorted_files(bed: Bed, r: random.Random) -> Places:
    samples, size, constant = torch.cat(bed.calibration), len(bed.calibration[0]), r.uniform(0.3, 0.9)
    order = samples.flatten(1).abs().amax(1).argsort(descending=True)
    bed.calibration = list(samples[order].split(size))
    observer = MovingAverageMinMaxObserver.with_args(averaging_constant=constant, eps=2**-12)
    everywhere(bed, changed(observer_or_fake_quant_ctr=observer))
    return None


# -- the model ---------------------------------------------------------------------------------------------------------


@model("a column of the input is in its raw unit, such as a year or a salary", "outlier-channel", "shared-scale",
      "precision", nets=SERIES, source="ModelTC/MQBench#39: trained without input normalization")  # fmt: skip
def raw_column(bed: Bed, r: random.Random) -> Places:
    first, size = _first(bed), bed.calibration[0].shape[-1]
    column, scaled, amount = r.randrange(size), r.random() < 0.5, r.uniform(40, 200)

    def raw(batch: Tensor) -> Tensor:
        batch[..., column] = batch[..., column] * amount if scaled else batch[..., column] + amount
        return batch

    with torch.no_grad():
        if scaled:
            first.weight[:, column] /= amount
        else:
            first.bias -= amount * first.weight[:, column]
    _in_all(bed, raw)
    return (*INPUT, *bed.near(bed.ops("linear")[0], hops=1))


class Gated(nn.Linear):
    """A linear that another one gates."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features)
        self.gate = nn.Linear(plain.in_features, plain.out_features)
        with torch.no_grad():
            self.weight.copy_(plain.weight)
            self.bias.copy_(plain.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * super().forward(x)


@model("in a channel of a gated unit both factors are large at once", "outlier-channel", "precision", nets=TOKENS,
      source="mit-han-lab/smoothquant#108, Samsung/TICO#296: the input of down_proj")  # fmt: skip
def gated_spikes(bed: Bed, r: random.Random, sick: bool) -> Places:
    torch.manual_seed(r.randrange(1 << 30))
    layers = list(bed.model.layers)
    for layer in layers:
        layer.up, layer.act = Gated(layer.up).requires_grad_(False).eval(), nn.Identity().eval()
    number, factor = r.randrange(len(layers)), r.uniform(4, 9)
    channels = r.sample(range(layers[0].up.out_features), r.choice((1, 2)))
    layer = layers[number]
    layer.up.gate.weight[channels] = layer.up.weight[channels]
    if sick:
        for each in (layer.up, layer.up.gate):
            each.weight[channels] *= factor
        layer.down.weight[:, channels] /= factor**2
    return bed.near(*(name for name in bed.ops("mul", "linear", "silu") if f"layers.{number}.up" in name), hops=1)


@model("a channel of the first token is huge, as attention sinks have it", "outlier-channel", "precision", "observer",
      "range", nets=TOKENS, source="arxiv.org/html/2603.05498v1: massive activations")  # fmt: skip
def massive_token(bed: Bed, r: random.Random, sick: bool) -> Places:
    size, amount = bed.model.embed.in_features, r.uniform(40, 200) if sick else 1.0
    place, channel = r.randrange(size), r.randrange(bed.model.embed.out_features)

    def begun(batch: Tensor) -> Tensor:
        if batch.dim() == 2:
            batch[batch == 0] = 1
            batch[:, 0] = 0
        else:
            batch[..., place] = 0
            batch[:, 0, place] = 1
        return batch

    _in_all(bed, begun)
    with torch.no_grad():
        if bed.net.kind == "words":
            bed.model.table.weight[:, place] = 0
            bed.model.table.weight[0, place] = 1
        bed.model.embed.weight[:, place] = 0
        bed.model.embed.weight[channel, place] = amount
    return bed.near("embed/linear", *bed.ops("add"), hops=1)


class Rms(nn.Module):
    """Normalises by the root of the mean of squares, written out."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * ((x * x).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight


def _floated(bed: Bed, names: tuple[str, ...], sick: bool) -> Places:
    """What is healthy with these ops in float."""
    if not sick:
        bed.overrides.append(pt2qa.Edit("float", names))
    return bed.near(*names, hops=1)


def _inside(bed: Bed, *paths: str) -> tuple[str, ...]:
    """The ops of modules."""
    return tuple(name.name for name in bed.graph().names.values() if name.module in paths)


@model("a norm is written out, and its squares and reciprocal roots are rounded", "precision", "range", "observer",
      nets=TOKENS, source="Samsung/TICO#296: keep RMSNorm in float")  # fmt: skip
def written_norm(bed: Bed, r: random.Random, sick: bool) -> Places:
    needs(bed.backend == "xnnpack")  # x86 rounds no products
    paths = [f"layers.{i}.{norm}" for i in range(len(bed.model.layers)) for norm in ("norm1", "norm2")]
    g, least = torch.Generator().manual_seed(r.randrange(1 << 30)), r.uniform(-1.6, -0.8)
    if bed.net.kind == "words":  # some tokens are far smaller than others
        with torch.no_grad():
            bed.model.table.weight *= 10 ** (least * torch.rand(len(bed.model.table.weight), 1, generator=g))
    else:
        _in_all(bed, lambda batch: batch * 10 ** (least * torch.rand(*batch.shape[:2], 1, generator=g)))
    with torch.no_grad():
        bed.model.embed.bias.zero_()
    for path in paths:
        bed.model.set_submodule(path, Rms(bed.model.get_submodule(path).weight).eval())
    return _floated(bed, _inside(bed, *paths), sick)


@model("channels are dead, and hold a large constant", "outlier-channel", "precision", nets=(*IMAGES, *SERIES, "words"),
      source="pytorch/vision#648: running_var of 1e-14")  # fmt: skip
def dead_channels(bed: Bed, r: random.Random) -> Places:
    link = bed.link(r)
    product, reader = bed.model.get_submodule(link.norm or link.product), bed.model.get_submodule(link.reader)
    channels, amount = torch.tensor(bed.channels(link, r, r.choice((1, 2)))), r.uniform(20, 150)
    with torch.no_grad():
        product.weight[channels] = 0
        product.bias[channels] = amount
        reader.weight[:, channels + link.first] /= amount
    return bed.at(link)


class Rate(nn.Linear):
    """A linear whose outputs are logarithms of what is wanted."""

    def __init__(self, plain: nn.Linear, factor: float) -> None:
        super().__init__(plain.in_features, plain.out_features)
        with torch.no_grad():
            self.weight.copy_(plain.weight * factor)
            self.bias.copy_(plain.bias * factor)
        self.register_buffer("unit", torch.ones(plain.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp() * self.unit


@model("outputs are decoded by an exponential, and rounded after it", "precision", "outlier-channel", "range",
      "observer", nets=("cnn", *TOKENS, "lstm", "tabular"),
      source="ultralytics/ultralytics#25306, AlexeyAB/yolo2_light#45: the decoding of a head")  # fmt: skip
def decoded_output(bed: Bed, r: random.Random, sick: bool) -> Places:
    needs(bed.backend == "xnnpack")  # x86 rounds no outputs
    path = "amount" if bed.net.kind == "tabular" else "head"
    head = bed.model.get_submodule(path)
    outputs = bed.model(torch.cat(bed.calibration))
    spread = (outputs[1] if isinstance(outputs, tuple) else outputs).std().item()
    setattr(bed.model, path, Rate(head, r.uniform(1, 2) / max(spread, 1e-3)).requires_grad_(False).eval())
    return _floated(bed, _inside(bed, path), sick)


# -- checkpoints and converted graphs ----------------------------------------------------------------------------------


@after("the converted model has ReLU where the float one has ReLU6", "prepare-changed", "capture-changed", nets=IMAGES,
      source="qualcomm/aimet#525, jakc4103/DFQ#34", error="(?i)relu|hardtanh|one model|weight")  # fmt: skip
def clipping_lost(bed: Bed, r: random.Random, sick: bool) -> Places:
    units = [name for name, unit in bed.model.named_modules() if isinstance(unit, Unit)]
    path = r.choice([name for name in units if not isinstance(bed.model.get_submodule(name).act, nn.Identity)])
    factor = r.uniform(2.5, 6)
    unit = bed.model.get_submodule(path)
    with torch.no_grad():
        unit.norm.weight *= factor
    other = copy.deepcopy(bed.model)
    unit.act, other.get_submodule(path).act = nn.ReLU6().eval(), nn.ReLU().eval()
    if sick:
        made_of(bed, other)
    return bed.near(f"{path}.conv/conv2d")


@after("batch norms went on learning while other pictures were run", "prepare-changed", nets=IMAGES,
      source="Xilinx/brevitas#523, #459: eval mode before calibration", error="weight of")  # fmt: skip
def drifted_statistics(bed: Bed, r: random.Random) -> Places:
    other, factor, momentum = copy.deepcopy(bed.model).train(), r.uniform(0.6, 0.9), r.choice((0.05, 0.1, 0.2))
    for norm in other.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = momentum
    with torch.no_grad():
        for batch in bed.calibration:
            other(batch * factor)
    made_of(bed, other.eval())
    return None


@after("the checkpoint was a copy in four bits, read back to float", "prepare-changed", "weight-scheme",
      source="flagos-ai/FlagScale#1212: from one low precision to another", error="weight of")  # fmt: skip
def rounded_before(bed: Bed, r: random.Random) -> Places:
    other = copy.deepcopy(bed.model)
    with torch.no_grad():
        for weight in _weights(other):
            step = weight.abs().flatten(1).amax(1).clamp(min=1e-9).view(-1, *[1] * (weight.dim() - 1)) / 7
            weight.copy_((weight / step).round() * step)
    made_of(bed, other)
    return None


@after("two layers of one shape got each other's weights", "prepare-changed", nets=(*TOKENS, "tabular"),
      source="huggingface/transformers#21519, JieShibo/MoLE#9: the order of q, k and v", error="weight of")  # fmt: skip
def layers_mixed_up(bed: Bed, r: random.Random) -> Places:
    number = r.randrange(len(bed.model.layers)) if bed.net.kind != "tabular" else 0
    ways = [f"layers.{number}.attention.{each}" for each in "qkv"] if bed.net.kind != "tabular" else ["b", "c"]
    paths = r.sample(ways, 2)
    other = copy.deepcopy(bed.model)
    for path, source in (paths, paths[::-1]):
        other.get_submodule(path).load_state_dict(bed.model.get_submodule(source).state_dict())
    made_of(bed, other)
    return bed.near(*(f"{path}/linear" for path in paths))


@after("norms were rebuilt with the eps of another library", "prepare-changed", "capture-changed",
      nets=(*IMAGES, *TOKENS), source="huggingface/transformers#585, tensorlayer/TensorLayer#11: eps of norms",
      error="(?i)weight of|eps|one model")  # fmt: skip
def other_eps(bed: Bed, r: random.Random, sick: bool) -> Places:
    small = r.uniform(0.05, 0.2)
    with torch.no_grad():
        for norm, product in _normed(bed):
            product.weight *= small
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean *= small
                norm.running_var *= small**2
            else:
                product.bias *= small
    other = copy.deepcopy(bed.model)
    for norm in other.modules():
        if isinstance(norm, nn.BatchNorm2d | nn.LayerNorm):
            norm.eps = 1e-3
    if sick:
        made_of(bed, other)
    return None


def _normed(bed: Bed) -> list[tuple[nn.Module, nn.Module]]:
    """Norms, and the products that they read, or that write the stream that they read."""
    if bed.net.kind in TOKENS:
        writers = [bed.model.embed, *(each for layer in bed.model.layers for each in (layer.attention.out, layer.down))]
        return [(bed.model.norm, writer) for writer in writers]
    return [(unit.norm, unit.conv) for unit in bed.model.modules() if isinstance(unit, Unit)]


@after("the calibration cache of another model of this architecture was reused", "site-range", NARROW, WIDE,
      source="NVIDIA/TensorRT#3137, pytorch/TensorRT#2167: calibration caches")  # fmt: skip
def reused_cache(bed: Bed, r: random.Random) -> Places:
    other = copy.deepcopy(bed.model)
    torch.manual_seed(r.randrange(1 << 30))
    for module in other.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.LSTM):
            module.reset_parameters()
    bed.finish = with_ranges_of(other.requires_grad_(False))
    return None


@after("biases saturate, as in 8 bits of too fine a scale", "bias", "prepare-changed",
      source="pytorch/glow#1876, #3466, microsoft/onnxruntime#22020", error="(?i)bias|weight of")  # fmt: skip
def clamped_biases(bed: Bed, r: random.Random) -> Places:
    share = r.uniform(0.4, 0.9)

    def finish(own: Bed, made: pt2qa.QuantizedPair) -> pt2qa.QuantizedPair:
        graph = copy.deepcopy(made.quantized)
        with torch.no_grad():
            for node in _biases(graph):
                bias = getattr(graph, node.target) if "." not in node.target else graph.get_parameter(node.target)
                limit = share * bias.abs().max()
                bias.copy_(bias.clamp(-limit, limit))
        return _paired(own, graph)

    bed.finish = finish
    return None


def _biases(graph: GraphModule) -> list[Node]:
    products = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)
    found = [node.args[2] for node in graph.graph.nodes if node.target in products and len(node.args) > 2]
    return [node for node in dict.fromkeys(found) if isinstance(node, Node) and node.op == "get_attr"]


NEWER = tuple(name for name in KINDS if name.replace("-", "_") in globals())
"""Names of the kinds of this file."""
