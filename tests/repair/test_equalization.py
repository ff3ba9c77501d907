"""Channels of unequal size that are scaled in the weights around them."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._graph.internals.flow_runtime import scaled
from pt2qa._repair.equalization import ELEMENTS, Equalization, Weight, _largest
from pt2qa._repair.methods import methods_named
from pt2qa._repair.ranges import RangeGroup, moved
from pt2qa._simulator.data import Data
from pt2qa._simulator.program import QuantParams
from pt2qa._trials.outcome import Folds
from pt2qa.overrides.channels import Chain, Side, channels_in
from pt2qa.overrides.parameters import edit_parameters, with_folded_norms
from pt2qa.overrides.plan import in_base64
from tests.flows import direct_sqnr, quantized_pair
from tests.repair.kept import check_plan, check_reference
from tests.repair.nets import encoder_pair, played, sequences

QUANTIZERS = ("xnnpack:per_channel=false", "xnnpack", "x86", "xnnpack:mode=dynamic")
HELD_OUT = sequences(seed=9)


def measured(pair: pt2qa.QuantizedPair, data: list[Tensor]) -> float:
    reference, quantized = ([graph(x) for x in data] for graph in (pair.float_graph, pair.quantized))
    return direct_sqnr(torch.cat(reference), torch.cat(quantized))


def look(pair: pt2qa.QuantizedPair, batches: list[Tensor]) -> Equalization:
    return Equalization.look(pair, Folds(pair, Data("calibration", batches)))


def chains(model: nn.Module, x: Tensor) -> tuple[Chain, ...]:
    capture = pt2qa.capture(model.eval(), x)
    return channels_in(with_folded_norms(capture.module()), capture.names).chains


# -- behind norms ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=QUANTIZERS)
def repaired(request: pytest.FixtureRequest) -> pt2qa.Reconfiguration:
    pair = encoder_pair(request.param, 50.0)
    return pt2qa.repair(pair, HELD_OUT, methods=["equalization"], progress=False)


def test_planted_outliers_are_taken_back(repaired: pt2qa.Reconfiguration) -> None:
    without, planted = (measured(encoder_pair(repaired.quantizer, factor), HELD_OUT) for factor in (1.0, 50.0))
    assert planted < without - 10
    assert measured(repaired.pair, HELD_OUT) > without - 1


def test_the_reference_is_the_users_model_but_for_float_rounding(repaired: pt2qa.Reconfiguration) -> None:
    check_reference(encoder_pair(repaired.quantizer, 50.0), repaired, HELD_OUT)


def test_the_plan_and_the_printed_code_give_the_same(repaired: pt2qa.Reconfiguration) -> None:
    assert {"scale"} <= {edit.kind for edit in repaired.plan.edits} <= {"scale", "observer"}
    check_plan(encoder_pair(repaired.quantizer, 50.0), repaired, HELD_OUT)


def test_the_earlier_names_of_the_method_and_of_its_edits_are_known() -> None:
    assert methods_named(["smoothing"], "methods") == [Equalization]
    x = torch.randn(6, 8)
    pair = quantized_pair(Block("plain"), x, "xnnpack")
    assert pair.capture is not None
    ops, values = (
        ("norm/layer_norm", "first/linear", "second/linear"),
        in_base64([2.0**power for power in range(-4, 4)]),
    )
    smoothed, scaled = (
        pt2qa.quantize(pair.capture, "xnnpack", [x], overrides=OverridePlan((edit,)), progress=False)
        for edit in (Edit("smooth", ops, values=values), Edit("scale", ops, values=values))
    )
    assert torch.equal(smoothed.reference(x), pair.reference(x))
    assert torch.equal(smoothed.quantized(x), scaled.quantized(x))


class Block(nn.Module):
    """A norm, and what else of it is read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(8, elementwise_affine=kind != "without weights")
        self.scale = nn.Parameter(torch.ones(8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        if kind == "tied":
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "written out":
            found = self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True)))
        else:
            found = self.norm(x)
        if self.kind == "mixed":
            found = found.reshape(-1, 4, 2).transpose(1, 2).reshape(-1, 8)
        elif self.kind == "rearranged":
            found = found.unsqueeze(0).transpose(0, 1)[:, 0].reshape(2, -1, 8).permute(1, 0, 2).flatten(0, 1)
        result: Tensor = self.first(found) * self.second(found)
        return result + found if self.kind == "residual" else result


@pytest.mark.parametrize(
    ("kind", "possible"),
    [
        ("plain", True),
        ("written out", True),
        ("rearranged", True),
        ("mixed", True),
        ("residual", False),
        ("tied", False),
        ("without weights", False),
    ],
)
def test_which_norms_can_be_scaled(kind: str, possible: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    model = Block(kind)
    found = chains(model, x)
    assert [len(chain.labels) for chain in found] == [8] * possible
    if possible:
        exactly(model, x, found)


def exactly(model: nn.Module, x: Tensor, found: tuple[Chain, ...], quantizer: str = "xnnpack") -> None:
    """Scales all chains at random: the float model stays what it is, and the quantized one does not."""
    plain = quantized_pair(model, x, quantizer)
    assert plain.capture is not None
    plan = OverridePlan(
        tuple(
            Edit("scale", chain.ops, values=in_base64(torch.rand(len(chain.labels)).add(0.2).tolist()))
            for chain in found
        )
    )
    new = pt2qa.quantize(plain.capture, quantizer, [x], overrides=plan, progress=False)
    assert direct_sqnr(plain.reference(x), new.reference(x)) > 110
    assert not torch.equal(new.quantized(x), plain.quantized(x))


# -- through convolutions ----------------------------------------------------------------------------------------------

Made = Callable[[], nn.Module]


class Through(nn.Module):
    """A convolution of two channels into eight, something in between, and what reads it."""

    def __init__(self, between: Callable[[Tensor], Tensor], reader: nn.Module, *others: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.reader = nn.Conv2d(2, 8, 3, padding=1), between, reader
        self.others = nn.ModuleList(others)

    def forward(self, x: Tensor) -> Tensor:
        value = self.first(x)
        for other in self.others:
            value = F.relu(other(value))
        result: Tensor = self.reader(self.between(value))
        return result


def magnitude(value: Tensor) -> Tensor:
    return torch.sqrt(value[:, :4] ** 2 + value[:, 4:] ** 2)


def conv(inputs: int = 8, **options: int) -> nn.Module:
    return nn.Conv2d(inputs, 4, 3, **options)


BETWEEN: dict[str, tuple[Made, list[int]]] = {
    "relu": (lambda: Through(F.relu, conv()), [8]),
    "leaky relu and a max pool": (lambda: Through(lambda v: F.max_pool2d(F.leaky_relu(v), 2), conv()), [8]),
    "prelu and an average pool": (lambda: Through(lambda v: F.avg_pool2d(v, 2), conv(), nn.PReLU(8)), [8]),
    "a mean and a linear": (lambda: Through(lambda v: v.relu().mean((2, 3)), nn.Linear(8, 3)), [8]),
    "a view and a linear": (lambda: Through(lambda v: v.relu().flatten(1), nn.Linear(8 * 64, 3)), [8]),
    "a permutation and a linear": (lambda: Through(lambda v: v.permute(0, 2, 3, 1), nn.Linear(8, 3)), [8]),
    "a magnitude": (lambda: Through(magnitude, conv(4)), [4]),
    "a shuffle, groups": (lambda: Through(lambda v: F.channel_shuffle(v.relu(), 2), conv(groups=2)), [8]),
    "a larger picture": (lambda: Through(lambda v: F.interpolate(v.relu(), scale_factor=2), conv()), [8]),
    "padding": (lambda: Through(lambda v: F.pad(v.relu(), (1, 2, 1, 0)), conv()), [8]),
    "a depthwise convolution": (lambda: Through(F.relu, conv(), nn.Conv2d(8, 8, 3, groups=8)), [8, 8]),
    "a transposed convolution": (lambda: Through(F.relu, nn.ConvTranspose2d(8, 4, 2, 2, groups=2)), [8]),
    "a batch norm behind a ReLU": (lambda: Through(F.relu, conv(), nn.ReLU(), nn.BatchNorm2d(8)), [8, 8]),
    "a folded batch norm": (lambda: Through(F.relu, conv(), nn.BatchNorm2d(8)), [8]),
    "a residual": (lambda: Residual(), [8, 8]),
    "two readers": (lambda: Through(lambda v: v.relu().repeat(1, 2, 1, 1), conv(16)), [8]),
    "relu6": (lambda: Through(F.relu6, conv()), []),
    "a sigmoid": (lambda: Through(torch.sigmoid, conv()), []),
    "a constant that is added": (lambda: Through(lambda v: v.relu() + 1, conv()), []),
    "a softmax": (lambda: Through(lambda v: v.softmax(1), conv()), []),
    "padding with ones": (lambda: Through(lambda v: F.pad(v.relu(), (1, 1), value=1.0), conv()), []),
}


class Residual(nn.Module):
    """Two branches that are added, and a gate that nothing may scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(2, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.inner, self.gate = nn.Conv2d(8, 8, 3, padding=1), nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        value = F.relu(self.first(x))
        value += self.inner(F.relu(self.second(value))) * self.gate
        result: Tensor = self.third(F.relu(value))
        return result


@pytest.mark.parametrize("kind", BETWEEN)
def test_what_channels_are_scaled_through(kind: str) -> None:
    torch.manual_seed(0)
    make, expected = BETWEEN[kind]
    model, x = make().eval(), torch.randn(2, 2, 8, 8)
    for norm in (each for each in model.modules() if isinstance(each, nn.BatchNorm2d)):
        assert norm.running_mean is not None
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.weight)
    found = chains(model, x)
    assert [len(chain.labels) for chain in found] == expected
    if found:
        exactly(model, x, found)


class Voice(nn.Module):
    """A spectrum of magnitudes, and strided convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (16, 32, 32, 48)
        self.spectrum, self.fc = nn.Conv1d(1, 32, 16, 8), nn.Linear(48, 10)
        self.convs = nn.ModuleList(nn.Conv1d(a, b, 3, 2) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        value = self.spectrum(x)
        value = torch.sqrt(value[:, :16] ** 2 + value[:, 16:] ** 2)
        for each in self.convs:
            value = F.relu(each(value))
        result: Tensor = self.fc(value.mean(-1))
        return result


def sounds(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 1, 500, generator=generator) for _ in range(4)]


@functools.cache
def voice_pair(quantizer: str, decades: float = 0.0) -> pt2qa.QuantizedPair:
    """The net, with channels over some decades that the next weights take back."""
    torch.manual_seed(0)
    model = Voice().eval()
    layers = [model.spectrum, *model.convs, model.fc]
    with torch.no_grad():
        for number, (one, other) in enumerate(itertools.pairwise(layers)):
            factors = 10 ** (decades * (torch.rand(other.get_parameter("weight").shape[1]) - 0.5))
            weight = other.get_parameter("weight")
            weight /= factors.reshape(1, -1, *[1] * (weight.dim() - 2))
            twice = factors.repeat(2) if number == 0 else factors
            one.get_parameter("weight").mul_(twice[:, None, None])
            one.get_parameter("bias").mul_(twice)
    return pt2qa.quantize(pt2qa.capture(model, sounds()[0]), quantizer, sounds(), progress=False)


@pytest.mark.parametrize("quantizer", ["xnnpack:per_channel=false", "x86"])
def test_channels_over_two_decades_come_back(quantizer: str) -> None:
    without, planted = voice_pair(quantizer), voice_pair(quantizer, 2.0)
    assert measured(planted, sounds(9)) < measured(without, sounds(9)) - 15
    report = pt2qa.repair(planted, sounds(9), methods=["equalization"], progress=False)
    assert measured(report.pair, sounds(9)) > measured(without, sounds(9)) - 0.5
    assert report.code_verified.startswith("equal")
    assert Counter(edit.kind for edit in report.plan.edits)["scale"] == 4


def test_the_simulator_of_a_fit_is_that_of_the_pair_quantized_again() -> None:
    pair = voice_pair("xnnpack:per_channel=false", 2.0)
    fit = look(pair, sounds()).fit((0, 1))
    assert pair.capture is not None
    again = pt2qa.quantize(pair.capture, pair.quantizer, sounds(), overrides=OverridePlan(fit.edits), progress=False)
    found = torch.cat([played(fit, pair, x) for x in sounds(9)])
    expected = torch.cat([again.quantized(x) for x in sounds(9)])
    assert direct_sqnr(expected, found) > measured(again, sounds(9)) + 3


def test_any_flow_that_takes_a_quantizer_can_scale() -> None:
    pair, batches = voice_pair("xnnpack", 2.0), sounds()
    assert pair.capture is not None
    assert pair.capture.eager is not None
    plan = OverridePlan(look(pair, batches).fit((0, 1)).edits)
    expected = pt2qa.quantize(pair.capture, "xnnpack", batches, overrides=plan, progress=False)
    graph = torch.export.export(pair.capture.eager, (batches[0],)).module()
    assert isinstance(graph, GraphModule)
    prepared = prepare_pt2e(graph, plan.apply_to("xnnpack"))
    for batch in batches:
        prepared(batch)
    assert torch.equal(convert_pt2e(prepared)(batches[0]), expected.quantized(batches[0]))
    assert torch.equal(pair.capture.eager(batches[0]), pair.reference(batches[0]))


def test_what_cannot_be_scaled_is_said() -> None:
    pair = voice_pair("xnnpack")
    assert pair.capture is not None
    ops = ("convs.0/conv1d", "convs.1/conv1d")
    for names, count, message in (
        ((*ops[:1], "fc/linear"), 32, "these are not all ops that write and read the same channels"),
        (ops[::-1], 32, "these are not all ops that write and read the same channels"),
        (ops, 4, r"convs.0/conv1d has 32 channels to scale"),
    ):
        plan = OverridePlan((Edit("scale", names, values=in_base64([2.0] * count)),))
        with pytest.raises(pt2qa.QuantizeError, match=message):
            pt2qa.quantize(pair.capture, "xnnpack", sounds(), overrides=plan, progress=False)


class Random(nn.Module):
    """Ops drawn at random, one after the other; some scale with their channels, others do not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance, self.kinds, self.made, channels = random.Random(seed), list[str](), nn.ModuleList(), 4
        for _ in range(10):
            kind = chance.choice(("conv", "conv", "depthwise", "norm", "relu", "prelu", "pool", "residual", "cat"))
            kind = kind if chance.random() < 0.7 else chance.choice(("magnitude", "shuffle", "turn", "relu6", "gate"))
            kind = "conv" if kind == "cat" and channels > 16 else kind
            outputs = chance.choice((4, 8)) if kind == "conv" else channels
            self.kinds.append(kind)
            self.made.append(
                nn.BatchNorm2d(channels)
                if kind == "norm"
                else nn.PReLU(channels)
                if kind == "prelu"
                else nn.Conv2d(channels, outputs, 3, padding=1, groups=channels if kind == "depthwise" else 1)
            )
            channels = {"cat": 2 * channels, "magnitude": channels // 2, "conv": outputs}.get(kind, channels)
            channels += kind == "magnitude" and channels % 2
        self.last = nn.LazyConv2d(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for kind, made in zip(self.kinds, self.made, strict=True):
            half = (x.shape[1] + 1) // 2
            x = {
                "relu": F.relu,
                "pool": lambda v: F.max_pool2d(v, 3, 1, 1),
                "residual": lambda v, made=made: v + made(F.relu(v)),
                "cat": lambda v, made=made: torch.cat([v, made(v)], 1),
                "magnitude": lambda v, half=half: torch.sqrt(v[:, :half] ** 2 + v[:, -half:] ** 2),
                "shuffle": lambda v: v.flip(1).roll(1, 1),
                "turn": lambda v: v.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2).unflatten(2, (8, 8)),
                "relu6": F.relu6,
                "gate": lambda v: v * torch.sigmoid(v.mean((2, 3), keepdim=True)),
            }.get(kind, made)(x)
        result: Tensor = self.last(x)
        return result


def test_random_graphs_compute_what_they_did() -> None:
    scaled = 0
    for seed in range(12):
        torch.manual_seed(seed)
        model, x = Random(seed).eval(), torch.randn(2, 4, 8, 8)
        model(x)
        capture = pt2qa.capture(model, x)
        graph, changed = (with_folded_norms(capture.module()) for _ in range(2))
        found = channels_in(graph, capture.names).chains
        values = [in_base64(torch.rand(len(chain.labels)).add(0.2).tolist()) for chain in found]
        edits = [Edit("scale", chain.ops, values=each) for chain, each in zip(found, values, strict=True)]
        edit_parameters(changed, edits, capture.names)
        assert direct_sqnr(graph(x), changed(x)) > 100, (seed, model.kinds)
        scaled += len(found)
    assert scaled > 24


# -- values of zeros ---------------------------------------------------------------------------------------------------


def test_a_range_of_zeros_keeps_its_scale() -> None:
    group = RangeGroup((0,), "start", QuantParams("int8", 0.5, 0, -128, 127), True)
    assert moved(group, (0.0, 0.0), (-0.0, 0.0)) == group.params
    assert moved(group, (0.0, 2.0), (0.0, 1.0)) == replace(group.params, scale=0.25)


@pytest.mark.parametrize("axis", [0, None])
def test_a_channel_of_zeros_keeps_its_scale(axis: int | None) -> None:
    value = torch.tensor([[0.0, 0.0], [1.0, -0.5]]) if axis == 0 else torch.zeros(2, 2)
    scale = torch.tensor([0.5, 0.25]) if axis == 0 else 0.25
    zero = torch.zeros(2) if axis == 0 else 0
    side = Side("first", 1, 0, -1.0, torch.tensor([0, 1]))
    constant: Any = SimpleNamespace(reference=value)
    params = QuantParams("int8", cast(Any, scale), zero, -127, 127, axis)
    weight = Weight(cast(Any, None), constant, params, _largest(value, axis), (side,))
    # Of channels that are 4 and 2 times smaller, and back.
    assert torch.equal(weight.rounding(torch.tensor([4.0, 2.0]))(value), value)


class WithNothing(nn.Module):
    """A value of no elements, which is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x[..., :0]], -1)


def test_a_value_of_no_elements_has_no_range() -> None:
    data = [torch.randn(4, 3) for _ in range(2)]
    pair = quantized_pair(WithNothing(), data[0], batches=data)
    assert all(bool(group.ends.isfinite().any()) for group in look(pair, data).groups)


SHAPES = {
    "linear": ((6, 5), 5),
    "convolution": ((6, 2, 1, 1), 2),
    "groups": ((6, 2, 1, 1), 6),
    "depthwise": ((6, 1, 1, 1), 6),
    "a group for each row": ((6, 2, 1, 1), 12),
    "one factor for each": ((6,), None),
}


@pytest.mark.parametrize(
    ("axis", "kind"), [(axis, kind) for kind in SHAPES for axis in (None, 0, 1)[: 1 + len(SHAPES[kind][0])]]
)
def test_what_a_weight_costs_is_the_sum_over_its_elements(kind: str, axis: int | None) -> None:
    """And its gradients are those of that sum, where one or both sides are scaled."""
    shape, inputs = SHAPES[kind]
    sizes = [(0, shape[0])] if inputs is None else [(0, shape[0]), (1, inputs)]
    for sides in (sizes, sizes[:1], sizes[1:]):
        known = tuple(Side("op", 1, own, 1.0, torch.arange(count)) for own, count in sides)
        weight = weight_of(torch.randn(shape).double(), axis, known)
        factors = [(torch.rand(count).double() + 0.1).requires_grad_() for _, count in sides]
        by_element = torch.ones_like(weight.value)
        for own, side in zip(factors, known, strict=True):
            by_element = scaled(by_element, own, side.axis)
        squares = torch.rand(shape).double()
        sizes_of_steps = largest(weight.value * by_element, axis) * 2 / 254
        expected = ((sizes_of_steps / by_element).square() * squares).sum() / 12
        found = weight.cost(weight._by_channel(squares, Tensor.sum))(factors)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
        for own, other in zip(*(_gradients(each, factors) for each in (found, expected)), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12 * float(expected.detach()))


def weight_of(value: Tensor, axis: int | None, sides: tuple[Side, ...]) -> Weight:
    params = QuantParams("int8", torch.ones(1), 0, -127, 127, axis)
    return Weight(cast(Any, None), cast(Any, SimpleNamespace(reference=value)), params, _largest(value, axis), sides)


def largest(value: Tensor, axis: int | None) -> Tensor:
    others = [each for each in range(value.dim()) if each != axis]
    return value.abs().amax(others, keepdim=True) if others else value.abs()


def test_some_rows_stand_for_all_of_a_large_weight() -> None:
    torch.manual_seed(0)
    value, squares, factors = torch.randn(40000, 32), torch.rand(40000, 32), torch.rand(32).exp2()
    weight = weight_of(value, 0, (Side("op", 1, 1, 1.0, torch.arange(32)),))
    kept = weight._by_channel(squares, Tensor.sum)
    assert kept.numel() <= ELEMENTS
    steps = (value * factors).abs().amax(1, keepdim=True) * 2 / 254
    expected = ((steps / factors).square() * squares).sum() / 12
    torch.testing.assert_close(weight.cost(kept)([factors]), expected, rtol=0.05, atol=0.0)


def _gradients(of: Tensor, factors: list[Tensor]) -> tuple[Tensor, ...]:
    """Zeros where nothing depends on factors, such as those of rows that have a scale each."""
    if not of.requires_grad:
        return tuple(map(torch.zeros_like, factors))
    return torch.autograd.grad(of, factors, materialize_grads=True)
