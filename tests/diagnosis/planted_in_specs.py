"""Faults of a quantizer that somebody wrote: what it asks for is not what the model needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec, QuantizationSpec, SharedQuantizationSpec

from tests.diagnosis.faults import fault
from tests.diagnosis.planted_in_models import cancelling, scaled
from tests.diagnosis.subject import Graph, Planted, Subject, changed


class Narrow(PerChannelMinMaxObserver):  # type: ignore[misc]  # torchao is not typed
    """Sees a third of every weight."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x / 3)
        return x


class Clipping(MinMaxObserver):  # type: ignore[misc]  # torchao is not typed
    """Sees the values within one standard deviation."""

    def forward(self, x: Tensor) -> Tensor:
        deviation = float(x.std())
        super().forward(x.clamp(-deviation, deviation))
        return x


def weight_spec(subject: Subject, change: Callable[[Any], Any]) -> Planted:
    """Another spec for the weight of one product."""
    name = subject.op_at(subject.net.links[0].reader)

    def edit(graph: Graph) -> None:
        specs = graph.op(name).meta["quantization_annotation"].input_qspec_map
        specs[graph.weight_of(name)] = change(specs[graph.weight_of(name)])

    subject.altered(edit)
    return subject.planted([name])


def value_spec(subject: Subject, change: Callable[[Any], Any]) -> Planted:
    """Another spec for the value that one product reads."""
    link = subject.net.links[0]
    name = subject.op_at(link.reader)
    subject.altered(lambda graph: graph.at_value(graph.input_of(name), change))
    return subject.planted(subject.places_at(link))


def few_bits(bits: int) -> Callable[[Any], Any]:
    """A spec with fewer integers, signed or not as before."""

    def fewer(own: Any) -> Any:
        lowest = -(2 ** (bits - 1)) if own.quant_min < 0 else 0
        return replace(own, quant_min=lowest, quant_max=lowest + 2**bits - 1)

    return fewer


# -- weights -----------------------------------------------------------------------------------------------------------


@fault("a weight has its scales along the wrong axis", "weight-scheme")
def wrong_axis(subject: Subject) -> Planted:
    cancelling(subject, subject.net.links[0], 25)
    return weight_spec(subject, changed(ch_axis=1))


@fault("a weight is affine, with one scale", "weight-scheme", "per-tensor-weights")
def affine_weight(subject: Subject) -> Planted:
    cancelling(subject, subject.net.links[0], 25)
    spec = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
    return weight_spec(subject, lambda own: spec)


@fault("a weight in four bits among weights in eight", "weight-scheme")
def four_bit_weight(subject: Subject) -> Planted:
    return weight_spec(subject, changed(quant_min=-7, quant_max=7))


@fault("all weights in four bits", "weight-scheme")
def four_bit_weights(subject: Subject) -> Planted:
    subject.altered(lambda graph: graph.everywhere(changed(quant_min=-7, quant_max=7), weights=True))
    return subject.planted()


@fault("the observer of a weight clips it", "weight-scheme", "observer")
def clipped_weight(subject: Subject) -> Planted:
    return weight_spec(subject, changed(observer_or_fake_quant_ctr=Narrow))


# -- activations -------------------------------------------------------------------------------------------------------


@fault("a value in four bits among values in eight", "activation-scheme")
def four_bit_value(subject: Subject) -> Planted:
    return value_spec(subject, few_bits(4))


@fault("all values in six bits", "activation-scheme")
def six_bit_values(subject: Subject) -> Planted:
    subject.altered(lambda graph: graph.everywhere(few_bits(6), weights=False))
    return subject.planted()


@fault("values after ReLUs are symmetric in six bits", "activation-scheme")
def symmetric_values(subject: Subject) -> Planted:
    spec = QuantizationSpec(torch.int8, MinMaxObserver, -31, 31, torch.per_tensor_symmetric)
    subject.altered(lambda graph: graph.everywhere(lambda own: spec, weights=False))
    return subject.planted()


@fault("a range that stays where the first, faint batch put it", "observer")
def lagging_observer(subject: Subject) -> Planted:
    subject.calibration = [subject.calibration[0] / 6, *subject.calibration]
    maker = MovingAverageMinMaxObserver.with_args(averaging_constant=1e-4)
    subject.altered(lambda graph: graph.everywhere(changed(observer_or_fake_quant_ctr=maker), weights=False))
    return subject.planted()


@fault("an observer that clips at one standard deviation", "observer", "site-range")
def clipping_observer(subject: Subject) -> Planted:
    return value_spec(subject, changed(observer_or_fake_quant_ctr=Clipping))


@fault("a histogram with too few bins", "observer")
def coarse_histogram(subject: Subject) -> Planted:
    maker = HistogramObserver.with_args(bins=2)
    subject.altered(lambda graph: graph.everywhere(changed(observer_or_fake_quant_ctr=maker), weights=False))
    return subject.planted()


def read_range(subject: Subject, module: str) -> tuple[float, float]:
    """Smallest and largest value that a product reads, zero included."""
    seen: list[Tensor] = []
    model = subject.model()
    with torch.no_grad(), model.get_submodule(module).register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        for batch in subject.calibration:
            model(batch)
    values = torch.cat([each.flatten() for each in seen])
    return min(0.0, float(values.min())), max(0.0, float(values.max()))


def fixed(low: float, high: float, like: Any) -> FixedQParamsQuantizationSpec:
    """Fixed parameters for a range, in the dtype of a spec."""
    scale = (high - low) / (like.quant_max - like.quant_min)
    zero_point = like.quant_min - round(low / scale)
    return FixedQParamsQuantizationSpec(
        like.dtype, scale, zero_point, like.quant_min, like.quant_max, torch.per_tensor_affine
    )


@fault("a fixed range of a third of the values", "site-range")
def narrow_fixed_range(subject: Subject) -> Planted:
    low, high = read_range(subject, subject.net.links[0].reader)
    return value_spec(subject, lambda own: fixed(low / 3, high / 3, own))


@fault("a fixed range forty times too wide", "site-range")
def wide_fixed_range(subject: Subject) -> Planted:
    low, high = read_range(subject, subject.net.links[0].reader)
    return value_spec(subject, lambda own: fixed(40 * low, 40 * high, own))


@fault("a softmax in a fixed range that ends too soon", "site-range")
def softmax_range(subject: Subject) -> Planted | None:
    if subject.net.name != "transformer":
        return None
    name = "layers.0.attention/softmax"
    subject.altered(lambda graph: graph.round_at(graph.op(name), fixed(0.0, 0.1, graph.activation())))
    return subject.planted([name, "layers.0.attention/matmul_1"])


@fault("sigmoids in the range of a tanh, in four bits, and its lower half unused", "site-range", "activation-scheme")
def sigmoid_range(subject: Subject) -> Planted | None:
    if subject.net.name not in ("lstm", "gru"):
        return None
    names = [name.name for name in subject.capture().names.values() if name.op == "sigmoid"]

    def edit(graph: Graph) -> None:
        spec = fixed(-8.0, 8.0, graph.activation())
        for name in names:
            graph.round_at(graph.op(name), spec)

    subject.altered(edit)
    readers = [name.name for name in subject.capture().names.values() if name.op == "mul"]
    return subject.planted([*names, *readers])


@fault("a value shares its scale with one that is forty times as large", "shared-scale")
def stranger_shares(subject: Subject) -> Planted | None:
    links = [link for link in subject.net.links if link.scales]
    if len(links) < 2:
        return None
    small, large = links[:2]
    scaled(subject, large, slice(None), 40)
    names = [subject.op_at(link.reader) for link in (small, large)]

    def edit(graph: Graph) -> None:
        edges = [(graph.input_of(name), graph.op(name)) for name in names]
        order = list(graph.module.graph.nodes)
        first, second = sorted(edges, key=lambda edge: order.index(edge[1]))
        graph.at_value(second[0], lambda own: SharedQuantizationSpec(first))

    subject.altered(edit)
    return subject.planted([*subject.places_at(small), *subject.places_at(large)])


@fault("an input is rounded in three bits before anything else", "activation-scheme")
def three_bit_input(subject: Subject) -> Planted:
    def edit(graph: Graph) -> None:
        value = next(node for node in graph.module.graph.nodes if node.op == "placeholder")
        graph.at_value(value, few_bits(3))

    subject.altered(edit)
    names = [name.name for name in subject.capture().names.values()]
    return subject.planted(["x", *(names[1:2])])


@fault("a fixed zero point that leaves no room for most values", "site-range")
def misplaced_zero(subject: Subject) -> Planted:
    low, high = read_range(subject, subject.net.links[0].reader)
    return value_spec(subject, lambda own: fixed(-0.9 * (high - low), 0.1 * (high - low), own))


@fault("the output in four bits", "activation-scheme")
def four_bit_output(subject: Subject) -> Planted:
    def edit(graph: Graph) -> None:
        (outputs,) = next(node for node in graph.module.graph.nodes if node.op == "output").args
        last = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
        graph.round_at(last, few_bits(4)(graph.activation()))

    names = [name.name for name in subject.capture().names.values() if name.op != "input"]
    subject.altered(edit)
    return subject.planted(names[-2:])


# -- what kernels and data have to do with each other ------------------------------------------------------------------


@fault("rows of very different size share a dynamic scale", "dynamic-by-row")
def unequal_rows(subject: Subject) -> Planted | None:
    if subject.backend != "xnnpack" or subject.net.name != "transformer":
        return None
    with torch.no_grad():
        subject.model().embed.bias.zero_()

    def unequal(batch: Tensor) -> Tensor:
        return batch * torch.logspace(-3, 0, batch.shape[1]).view(1, -1, 1)

    subject.calibration = [unequal(batch) for batch in subject.calibration]
    subject.evaluation = [unequal(batch) for batch in subject.evaluation]
    subject.quantizer = "xnnpack:mode=dynamic"
    return subject.planted(["x", "embed/linear"])


class LogProbabilities(nn.Module):
    """The logarithm of a softmax, written in two steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, x: Tensor) -> Tensor:
        return (8 * self.net(x)).softmax(-1).log()


@fault("a probability is rounded to zero, and its logarithm is taken", "nonfinite")
def log_of_zero(subject: Subject) -> Planted | None:
    model = LogProbabilities(subject.model()).eval()
    with torch.no_grad():
        if not all(bool(model(batch).isfinite().all()) for batch in subject.evaluation):
            return None  # 0 in the float model, too
    subject.replace_model(model)

    def edit(graph: Graph) -> None:
        spec = fixed(0.0, 1.0, graph.activation())
        graph.round_at(graph.op("softmax"), spec)

    subject.overrides = subject.nested_overrides("net")
    subject.altered(edit)
    return subject.planted(["softmax", "log"])
