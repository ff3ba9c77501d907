"""Faults that are in the weights and values of the model itself."""

from __future__ import annotations

import torch
from torch import nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from tests.diagnosis.faults import fault
from tests.diagnosis.models import Link
from tests.diagnosis.subject import Graph, Planted, Subject

PER_TENSOR = QuantizationSpec(torch.int8, MinMaxObserver.with_args(eps=2**-12), -127, 127, torch.per_tensor_symmetric)


def modules(subject: Subject, link: Link) -> tuple[nn.Module, nn.Module | None, nn.Module]:
    """The product, its batch norm, the product that reads it."""
    model = subject.model()
    return (
        model.get_submodule(link.product),
        model.get_submodule(link.norm) if link.norm else None,
        model.get_submodule(link.reader),
    )


def scaled(subject: Subject, link: Link, channels: slice | int, factor: float) -> None:
    """Channels between two products are a factor larger; the second takes it out."""
    product, norm, reader = modules(subject, link)
    source = product if norm is None else norm
    with torch.no_grad():
        source.weight[channels] *= factor
        source.bias[channels] *= factor
        reader.weight[:, channels] /= factor


def twinned(subject: Subject, link: Link) -> None:
    """Every odd channel of the first product is the even one before it."""
    product, norm, _ = modules(subject, link)
    tensors = [product.weight, product.bias]
    if norm is not None:
        tensors += [norm.weight, norm.bias, norm.running_mean, norm.running_var]
    with torch.no_grad():
        for tensor in tensors:
            if tensor is not None:
                tensor[1::2] = tensor[0::2]


def cancelling(subject: Subject, link: Link, factor: float = 15.0) -> None:
    """One output channel of the second product has huge weights, which cancel: it reads each channel and its twin."""
    twinned(subject, link)
    weight = modules(subject, link)[2].weight
    with torch.no_grad():
        huge = factor * weight.abs().max()
        weight[0, 0::2] += huge
        weight[0, 1::2] -= huge


@fault("one scale for a weight of which one channel is huge", "per-tensor-weights")
def outlier_weight_channel(subject: Subject) -> Planted:
    link = subject.net.links[0]
    cancelling(subject, link, 50)
    name = subject.op_at(link.reader)

    def edit(graph: Graph) -> None:
        graph.op(name).meta["quantization_annotation"].input_qspec_map[graph.weight_of(name)] = PER_TENSOR

    subject.altered(edit)
    return subject.planted([name])


@fault("the quantizer has one scale for each weight, and channels differ", "per-tensor-weights")
def per_tensor_option(subject: Subject) -> Planted | None:
    if subject.backend != "xnnpack":
        return None
    for link in sorted(subject.net.links, key=lambda link: link.product):  # as the data flows
        cancelling(subject, link, 25)
    subject.quantizer = "xnnpack:per_channel=false"
    return subject.planted()


@fault("one scale for each weight, and channels differ", "per-tensor-weights")
def per_tensor_everywhere(subject: Subject) -> Planted:
    for link in sorted(subject.net.links, key=lambda link: link.product):  # as the data flows
        cancelling(subject, link, 25)
    subject.altered(lambda graph: graph.everywhere(lambda spec: PER_TENSOR, weights=True))
    return subject.planted()


@fault("one channel of a value is two hundred times the others", "outlier-channel")
def outlier_activation_channel(subject: Subject) -> Planted | None:
    link = subject.net.links[0]
    if not link.scales:
        return None
    scaled(subject, link, 2, 200)
    return subject.planted(subject.places_at(link))


@fault("huge weights for a channel that is always zero", "outlier-channel")
def weights_of_a_dead_channel(subject: Subject) -> Planted | None:
    link = subject.net.links[0]
    product, norm, reader = modules(subject, link)
    dead(product, norm)
    with torch.no_grad():
        reader.weight[:, 1] = 40 * reader.weight.abs().max()
    return subject.planted([subject.op_at(link.reader), subject.op_at(link.product)])


def dead(product: nn.Module, norm: nn.Module | None, channel: int = 1) -> None:
    """A channel that is always zero."""
    source = product if norm is None else norm
    with torch.no_grad():
        source.weight[channel], source.bias[channel] = 0.0, 0.0


@fault("a value is small beside its offset, which takes the range", "precision")
def offset(subject: Subject) -> Planted | None:
    link = next((link for link in subject.net.links if _passes_an_offset(subject, link)), None)
    if link is None:
        return None
    product, norm, reader = modules(subject, link)
    added = 60.0
    with torch.no_grad():
        (product if norm is None else norm).bias += added
        taken = reader.weight.flatten(1).sum(1) * added
        after = subject.model().get_submodule(link.reader.removesuffix("0") + "1") if norm is not None else None
        if after is None:
            reader.bias -= taken
        else:
            after.running_mean += taken
    return subject.planted(subject.places_at(link))


def _passes_an_offset(subject: Subject, link: Link) -> bool:
    reader = modules(subject, link)[2]
    return link.scales and (isinstance(reader, nn.Linear) or reader.kernel_size == (1, 1))


@fault("differences of values that are nearly equal: rounding is amplified", "precision")
def near_twins(subject: Subject) -> Planted | None:
    link = subject.net.links[0]
    if not link.scales:
        return None
    product, _, reader = modules(subject, link)
    before = product.weight.clone()
    twinned(subject, link)
    with torch.no_grad():
        product.weight[1::2] += 0.02 * before[1::2]
        reader.weight[:, 1::2] = -50 * reader.weight[:, 0::2]
        reader.weight[:, 0::2] *= 50
    return subject.planted(subject.places_at(link))


@fault("a branch of a concatenation is a hundred times the other", "shared-scale", "outlier-channel")
def unequal_cat(subject: Subject) -> Planted | None:
    if subject.net.name != "cat":
        return None
    model = subject.model()
    norm, reader = model.wide[1], model.mix[0]
    twinned(subject, Link("wide.0", "mix.0", "wide.1"))
    with torch.no_grad():
        norm.weight *= 100
        norm.bias *= 100
        reader.weight[:, 13::2] = -reader.weight[:, 12::2]
    return subject.planted(["cat", "point.0/conv2d", "point.2/relu", "wide.0/conv2d", "wide.2/relu", "mix.0/conv2d"])


@fault("the branch of a residual add is small beside what it is added to", "precision", "outlier-channel")
def unequal_add(subject: Subject) -> Planted | None:
    if subject.net.name != "residual":
        return None
    model = subject.model()
    conv, norm, _ = model.stem
    with torch.no_grad():
        # Half of the stem's channels are pairs of huge twins; what reads a sum reads the difference of twins.
        for tensor in (conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor[1:8:2] = tensor[0:8:2]
        norm.weight[:8] *= 100
        norm.bias[:8] *= 100
        model.blocks[0].a[0].weight[:, :8] = 0
        for weight in (model.blocks[1].a[0].weight, model.blocks[2].a[0].weight, model.fc.weight.view(10, 16, 4)):
            weight[:, 1:8:2] = -weight[:, 0:8:2]
    sums = [f"blocks.{i}/{op}" for i in range(3) for op in ("add", "relu")]
    ends = ["stem.2/relu", "avg_pool2d", "flatten", "fc/linear"]
    return subject.planted([*sums, *ends, *(f"blocks.{i}.a.0/conv2d" for i in range(3))])


@fault("a mask of -1e9 in what is rounded", "masked-values")
def huge_mask(subject: Subject) -> Planted | None:
    if subject.net.name != "transformer":
        return None
    model = subject.model()
    adds = [f"layers.{i}.attention/add" for i in range(2)]
    for layer in model.layers:
        layer.attention.mask += torch.full_like(layer.attention.mask, -1e9).triu(1)
    if subject.backend == "x86":
        subject.altered(lambda graph: [graph.round_at(graph.op(name)) for name in adds] and None)
    return subject.planted([*adds, *(name.replace("add", op) for name in adds for op in ("div", "softmax", "matmul"))])


@fault("one channel of a transformer's residual stream is massive", "outlier-channel")
def massive_activation(subject: Subject) -> Planted | None:
    if subject.net.name != "transformer" or subject.backend != "xnnpack":
        return None  # x86 rounds no sum of the stream
    with torch.no_grad():
        model = subject.model()
        model.embed.bias[5] += 200
        for part in ("attention.q", "attention.k", "attention.v", "up"):
            for layer in model.layers:
                layer.get_submodule(part).weight[:, 5] = 0
        model.head.weight[:, 5] = 0
    stream = ["embed/linear"]
    for i in range(2):
        stream += [
            f"layers.{i}/add",
            f"layers.{i}/add_1",
            f"layers.{i}.norm1/layer_norm",
            f"layers.{i}.norm2/layer_norm",
        ]
        stream += [f"layers.{i}.attention.{part}/linear" for part in ("q", "k", "v", "out")]
        stream += [f"layers.{i}.up/linear", f"layers.{i}.down/linear"]
    return subject.planted([*stream, "norm/layer_norm", "head/linear"])


@fault(
    "weights and values so small that the smallest scale of an observer is too large",
    "observer",
    "weight-scheme",
    "site-range",
)
def tiny_scales(subject: Subject) -> Planted | None:
    link = subject.net.links[0]
    if not link.scales:
        return None
    scaled(subject, link, slice(None), 1e-4)
    return subject.planted(subject.places_at(link))


@fault("a convolution and its activation are not quantized as one", "unfused-activation")
def unfused(subject: Subject) -> Planted | None:
    if subject.overrides is None:
        return None
    with torch.no_grad():
        for path, norm in subject.model().named_modules():
            if isinstance(norm, nn.BatchNorm2d) and not path.startswith("blocks.0") and "project" not in path:
                norm.weight[0], norm.bias[0] = 0.01, -150.0
    places = [name for edit in subject.overrides.edits for name in edit.ops]
    subject.overrides = None
    return subject.planted(places)


def _with_low_channel(subject: Subject) -> Link | None:
    """A link whose product has a channel far below zero, which the ReLU behind it drops; None if the net has none."""
    link = next((link for link in subject.net.links if any("relu" in name for name in link.between)), None)
    if link is not None:
        product, norm, _ = modules(subject, link)
        source = product if norm is None else norm
        with torch.no_grad():
            source.weight[0] *= 0.01
            source.bias[0] = -100.0
    return link


@fault("a product is rounded before its ReLU, too", "unfused-activation")
def rounded_before_relu(subject: Subject) -> Planted | None:
    link = _with_low_channel(subject)
    if link is None:
        return None
    name = subject.op_at(link.product)
    subject.altered(lambda graph: graph.round_at(graph.op(name)))
    return subject.planted([name, *link.between])


@fault("biases in eight bits, one of them huge", "weight-scheme")
def int8_bias(subject: Subject) -> Planted | None:
    link = _with_low_channel(subject)
    if link is None:
        return None
    name = subject.op_at(link.product)

    def edit(graph: Graph) -> None:
        node = graph.op(name)
        node.meta["quantization_annotation"].input_qspec_map[node.all_input_nodes[2]] = PER_TENSOR

    subject.altered(edit)
    return subject.planted([name])


@fault("a channel is a hundredth of the others, and what reads it has weights to match", "outlier-channel", "precision")
def faint_channel(subject: Subject) -> Planted | None:
    link = subject.net.links[0]
    if not link.scales:
        return None
    scaled(subject, link, 2, 1 / 100)
    return subject.planted(subject.places_at(link))


@fault("one channel has a huge bias, which is taken out behind", "outlier-channel", "precision")
def huge_bias(subject: Subject) -> Planted | None:
    link = next((link for link in subject.net.links if _passes_an_offset(subject, link)), None)
    if link is None:
        return None
    product, norm, reader = modules(subject, link)
    with torch.no_grad():
        (product if norm is None else norm).bias[3] += 200
        taken = reader.weight[:, 3].flatten(1).sum(1) * 200 if reader.weight.dim() > 2 else reader.weight[:, 3] * 200
        if reader.bias is not None:
            reader.bias -= taken
        else:
            subject.model().get_submodule(link.reader.removesuffix("0") + "1").running_mean += taken
    return subject.planted(subject.places_at(link))


@fault("one channel behind a layer norm is a hundred times the others", "outlier-channel")
def outlier_behind_layer_norm(subject: Subject) -> Planted | None:
    if subject.net.name not in ("transformer", "mixer"):
        return None
    layer = subject.model().layers[0]
    with torch.no_grad():
        layer.norm2.weight[5] *= 100
        layer.norm2.bias[5] *= 100
        layer.up.weight[:, 5] /= 100
    return subject.planted(["layers.0.norm2/layer_norm", "layers.0.up/linear"])
