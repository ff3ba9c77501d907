"""One graph that computes the reference, the quantized model and everything between."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa._graph.handles import assign_handles
from pt2qa._simulator.batches import output_names
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.lockstep import Event, Lockstep
from pt2qa._simulator.simulator import tensors_equal
from pt2qa.plugins import resolve
from tests.flows import quantized_pair, residual_pair
from tests.models import (
    Counter,
    InPlaceViews,
    KeywordInputs,
    Linears,
    NestedOutputs,
    Parameters,
    SameInputTwice,
    TwoUsers,
    images,
    residual,
)
from tests.sensitivity import brute_force


def cases() -> dict[str, tuple[nn.Module, Any, Any, dict[str, Any]]]:
    linear_input = (torch.randn(4, 16),)
    return {
        "static per tensor": (residual(), images(), pt2qa.quantizer("xnnpack", per_channel=False), {}),
        "static per channel": (residual(), images(), pt2qa.quantizer("xnnpack", per_channel=True), {}),
        "static x86": (residual(), images(), "x86", {}),
        "7 bit x86": (residual(), images(), pt2qa.quantizer("x86", reduce_range=True), {}),
        "dynamic xnnpack": (Linears(), linear_input, pt2qa.quantizer("xnnpack", mode="dynamic"), {}),
        "dynamic x86": (Linears(), linear_input, pt2qa.quantizer("x86", mode="dynamic"), {}),
        "weight only x86": (Linears(), linear_input, pt2qa.quantizer("x86", mode="weight_only"), {}),
        "qat xnnpack": (residual(), images(), "xnnpack", {"qat": True}),
        "qat x86": (residual(), images(), "x86", {"qat": True}),
        "two users": (TwoUsers(), images(), "xnnpack", {}),
        "same input twice": (SameInputTwice(), images(), "xnnpack", {}),
        "parameters": (Parameters(), images(), "xnnpack", {}),
        "in-place views": (InPlaceViews(), images(), "x86", {}),
        "nested outputs": (NestedOutputs(), linear_input, "xnnpack", {}),
    }


@pytest.mark.parametrize("name", cases())
def test_all_on_is_the_converted_graph_and_all_off_the_reference(name: str) -> None:
    model, example, quantizer, options = cases()[name]
    pair = quantized_pair(model, example, quantizer, **options)
    values = pair.values(example)
    call = example if isinstance(example, tuple) else (example,)
    expected = pair.quantized(*call)
    assert tensors_equal(pair.simulator.run(values, on=True), expected)
    assert tensors_equal(pair.simulator.run(values, on=[site.index for site in pair.sites]), expected)
    assert tensors_equal(pair.simulator.run(values, on=False), pair.reference(*call))
    assert tensors_equal(pair.simulator.run(values, on=[]), pair.reference(*call))
    assert pair.verify(example) == ()


def test_a_site_switches_its_own_value_alone() -> None:
    pair = quantized_pair(Linears(), (torch.randn(4, 16),))
    values = [torch.randn(4, 16)]
    off = pair.simulator.run(values, on=False)[0]
    for site in pair.sites:
        alone = pair.simulator.run(values, on=[site.index])[0]
        assert not torch.equal(alone, off), site
    weight = next(site for site in pair.sites if site.kind == "weight" and site.name == "second/linear")
    with torch.no_grad():
        constant = next(c for c in pair.program.constants if c.site == weight.index)
        hidden = torch.relu(torch.nn.functional.linear(values[0], *_parameters(pair, "first/linear")))
        expected = torch.nn.functional.linear(hidden, constant.quantized, _parameters(pair, "second/linear")[1])
    assert torch.equal(pair.simulator.run(values, on=[weight.index])[0], expected)


def _parameters(pair: pt2qa.QuantizedPair, reader: str) -> list[Tensor]:
    return [c.reference for c in sorted(pair.program.constants, key=lambda c: c.argument) if c.reader == reader]


def test_sites_know_what_they_quantize() -> None:
    pair = residual_pair()
    kinds = {(site.kind, site.name): site for site in pair.sites}
    weight = kinds["weight", "conv1/conv2d"]
    assert (weight.params.dtype, weight.params.axis, weight.op) == ("int8", 0, "conv2d")
    activation = kinds["activation", "relu/relu"]
    assert activation.readers == ("conv2/conv2d", "add")
    assert (activation.params.quant_min, activation.params.quant_max) == (-128, 127)
    assert kinds["activation", "x"].op == "input"


def test_kinds_of_constants() -> None:
    """Trap 27: a parameter that is multiplied is a weight, a buffer is an activation."""
    pair = quantized_pair(Parameters(), images())
    kinds = {site.name: site.kind for site in pair.sites if site.result == site.source and site.op == "mul"}
    assert kinds == {"mul": "weight", "mul_1": "activation"}


def test_regions_hold_what_is_quantized_as_one_unit() -> None:
    pair = residual_pair()
    regions = {region.name: region for region in pair.regions}
    assert regions["conv1/conv2d"].ops == ("conv1/conv2d", "relu/relu")
    assert regions["add"].ops == ("add", "relu/relu_1")
    assert regions["conv2/conv2d"].ops == ("conv2/conv2d",)
    kinds = sorted(pair.sites[index].kind for index in regions["conv1/conv2d"].sites)
    assert kinds == ["activation", "activation", "weight"]


def test_two_users_are_two_regions() -> None:
    """Trap 5: conv and relu are not fused where the add reads the conv too."""
    pair = quantized_pair(TwoUsers(), images())
    assert [region.ops for region in pair.regions] == [("conv/conv2d",), ("relu",), ("add",)]


def test_runs_change_neither_inputs_nor_graphs() -> None:
    pair = residual_pair()
    batch = images(seed=3)
    before, state = batch.clone(), copy.deepcopy(pair.quantized.state_dict())
    run = Lockstep(pair.simulator, groups=[region.steps for region in pair.regions], ranges=True)
    run.run([batch], lambda event: None)
    pair.simulator.run([batch], on=True)
    pair.simulator.run([batch], on=False)
    assert torch.equal(batch, before)
    assert all(torch.equal(state[name], value) for name, value in pair.quantized.state_dict().items())


def test_lockstep_gives_both_outputs_and_every_value_once() -> None:
    pair = residual_pair()
    batch, events = images(seed=4), []
    reference, quantized = Lockstep(pair.simulator).run([batch], lambda event: events.append(event.step.index))
    assert torch.equal(reference[0], pair.reference(batch))
    assert torch.equal(quantized[0], pair.quantized(batch))
    assert events == list(range(len(pair.program.steps)))


def test_values_are_dropped_when_no_later_step_reads_them() -> None:
    """Memory holds live values alone: of a chain of 40 convolutions, at most three values on each side."""
    chain = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(40)))
    pair = quantized_pair(chain, images())
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def visit(event: Event) -> None:
        nonlocal most
        alive.extend(weakref.ref(value) for value in (event.reference, event.quantized, *event.isolated.values()))
        most = max(most, len({id(ref()) for ref in alive if ref() is not None}))

    Lockstep(pair.simulator, groups=[region.steps for region in pair.regions]).run([images()], visit)
    assert most <= 9


def test_isolated_values_are_the_region_on_the_references_inputs() -> None:
    pair = residual_pair()
    batch = images(seed=5)
    regions = [region for region in pair.regions if region.name == "conv2/conv2d"]
    seen: dict[str, Any] = {}

    def visit(event: Event) -> None:
        if event.isolated:
            seen["isolated"] = event.isolated[0].clone()
        if event.step.site is not None and event.step.name == "relu/relu":
            seen["input"] = event.rounded.clone() if event.rounded is not None else None

    Lockstep(pair.simulator, groups=[regions[0].steps]).run([batch], visit)
    weight = next(c for c in pair.program.constants if c.reader == "conv2/conv2d" and c.site is not None)
    bias = next(c for c in pair.program.constants if c.reader == "conv2/conv2d" and c.argument == 2)
    site = next(s for s in pair.sites if s.kind == "activation" and s.name == "conv2/conv2d").params
    with torch.no_grad():
        raw = torch.nn.functional.conv2d(seen["input"], weight.quantized, bias.quantized)
    integers = ((raw * (1 / site.scale)).round() + site.zero_point).clamp(site.quant_min, site.quant_max)  # type: ignore[operator]
    assert torch.equal(seen["isolated"], (integers - site.zero_point) * site.scale)


class CountsAndScores(nn.Module):
    """Ops with an in-place spelling make float values of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        count = (self.conv(x) > 0).sum(1)
        return torch.sigmoid(count.add(1)), count.add(2).clamp(min=2.5)


def test_integers_are_not_overwritten_by_the_float_values_made_of_them() -> None:
    pair = quantized_pair(CountsAndScores(), images(), "x86")
    assert pair.verify(images()) == ()
    assert pt2qa.compare_layers(pair, [images()], progress=False).rows[-1].dtype == "float32"


class WritesToQuantized(nn.Module):
    """A view of a value that is quantized is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y[:, 0] = 5
        return self.last(y)


def test_writes_to_a_view_of_a_quantized_value_survive_a_capture() -> None:
    pair = quantized_pair(WritesToQuantized(), images())
    assert pt2qa.compare_layers(pair, [images()], progress=False).sqnr > 25


class ReadAndWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        other: Tensor = self.second(y)
        return other + self.last(torch.relu_(y))


def test_a_value_with_a_reader_that_writes_in_place_is_one_site() -> None:
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    pair = quantized_pair(ReadAndWritten(), (x,))
    assert [site.name for site in pair.sites if site.kind == "activation"].count("first/linear") == 1
    rows = pt2qa.sensitivity(pair, [x], method="exact", progress=False).rows
    assert [row.noise for row in rows] == pytest.approx(brute_force.noises(pair, [x]), rel=1e-4)


def without_capture(model: nn.Module, x: Tensor, quantizer: str) -> pt2qa.QuantizedPair:
    """What plain torchao makes of a model: in-place ops and views stay as they are."""
    program = torch.export.export(model.eval(), (x,))
    assign_handles(program)
    graph = program.module()
    prepared = prepare_pt2e(graph, resolve(quantizer).build(graph, qat=False))
    prepared(x)
    return pt2qa.pair(program, convert_pt2e(prepared))


class WrittenTwice(nn.Module):
    """A value is written to, viewed, and written to again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        y.add_(1)
        view = y.view(-1)
        y.mul_(2)
        result: Tensor = self.last(y) + view.view(-1, 4).exp()
        return result


def test_a_view_between_two_writes_sees_the_second_one() -> None:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    assert without_capture(WrittenTwice(), x, "x86").verify(x) == ()


def test_writes_that_convert_loses_are_not_blamed_on_int8() -> None:
    """Each reader gets its own copy of a quantized value, so without a capture writes through a view are lost."""
    pair = without_capture(WritesToQuantized(), images(), "xnnpack")
    with pytest.raises(
        pt2qa.SimulationError, match=r"quantization does not explain.*an in-place op writes to a quantized"
    ):
        pt2qa.compare_layers(pair, [images()], progress=False)


def test_keyword_inputs_and_dynamic_shapes() -> None:
    dim = torch.export.Dim("batch")
    shapes = {"x": {0: dim}, "scale": {0: dim}}
    capture = pt2qa.capture(
        KeywordInputs().eval(), (torch.randn(4, 16),), {"scale": torch.rand(4, 16)}, dynamic_shapes=shapes
    )
    batches = [{"x": torch.randn(size, 16), "scale": torch.rand(size, 16)} for size in (4, 3)]
    pair = pt2qa.quantize(capture, "xnnpack", batches, progress=False)
    for batch in batches:
        expected = pair.quantized(batch["x"], scale=batch["scale"])
        assert torch.equal(pair.simulator.run(pair.values(batch), on=True)[0], expected)


def test_the_steps_of_a_recurrent_op_share_their_dequantized_weights() -> None:
    """convert gives every step its own dequantize op; memory must not grow with the length of the sequence."""
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 16).eval(), torch.randn(7, 2, 8)
    pair = pt2qa.quantize(pt2qa.capture(model, x, decompose="lstm"), "xnnpack", [x], progress=False)
    weights = [constant for constant in pair.program.constants if constant.site is not None]
    assert len(weights) > 2
    assert len({constant.quantized.data_ptr() for constant in weights}) == 2
    pair.verify(x)


def test_every_value_is_released_once_and_outputs_are_not() -> None:
    for pair in (residual_pair(), quantized_pair(Counter(), images())):
        program = pair.program
        made = {step.out for step in program.steps}
        released = [slot for step in program.steps for slot in step.releases if slot in made]
        assert sorted(released) == sorted(made - set(slots_in(program.outputs)))


def test_a_graph_that_does_not_say_how_it_nests_its_outputs_numbers_them() -> None:
    traced = torch.fx.symbolic_trace(nn.ReLU())
    assert [output_names(traced, count) for count in (1, 2)] == [["output"], ["output[0]", "output[1]"]]
