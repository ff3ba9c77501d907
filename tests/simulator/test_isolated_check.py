"""The check of isolated errors: which regions it runs again, on what, and how much it lets pass."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._metrics import NoiseSums, error_sums
from pt2qa._simulator.lockstep import Event, Lockstep
from pt2qa._simulator.verification import Isolated, IsolatedCheck, graph_outputs
from tests.flows import quantized_pair, residual_pair
from tests.models import InPlaceViews, images

ROWS = torch.linspace(-1, 1, 12).reshape(3, 4)


def found_of(pair: pt2qa.QuantizedPair, values: Sequence[Any]) -> list[Isolated]:
    """The isolated errors of all regions, where each ends, as an engine finds them."""
    program, found = pair.program, dict[int, Isolated]()
    ends = {region.steps[-1]: number for number, region in enumerate(program.regions)}
    for site in program.sites:
        step = next((each for each in program.steps if each.site == site.index), None)
        producer = None if step is None else program.producers.get(step.reads[0])
        if step is not None and producer in ends:
            ends[step.index] = ends.pop(producer)

    def visit(event: Event) -> None:
        number = ends.get(event.step.index)
        if number is not None and number in event.isolated:
            sums = error_sums(event.reference, event.isolated[number])
            noise = NoiseSums(sums.signal, math.nan if sums.nonfinite else sums.noise, sums.count)
            steps = [program.steps[each] for each in program.regions[number].steps]
            found[number] = Isolated(program.regions[number].name, steps[-1].handle, event.step, steps, noise)

    Lockstep(pair.simulator, groups=[region.steps for region in program.regions]).run(list(values), visit)
    return list(found.values())


def checked(
    pair: pt2qa.QuantizedPair, values: Sequence[Any], found: Sequence[Isolated], *, exact: bool = True, seed: int = 0
) -> IsolatedCheck:
    check = IsolatedCheck(pair.quantized, pair.reference, pair.program, found, seed)
    graph_outputs(pair.reference, values, check.keep)
    check.check(exact=exact)
    return check


def scaled(found: Isolated, factor: float) -> Isolated:
    return replace(found, noise=replace(found.noise, noise=found.noise.noise * factor))


@pytest.mark.parametrize(
    ("exact", "passes", "fails"),
    [(True, (1 + 9e-5, 1 - 9e-5), (1 + 1.1e-4, 1 - 1.1e-4)), (False, (1.09, 0.91), (1.11, 0.89))],
)
def test_an_error_may_differ_as_much_as_rounding_explains(
    exact: bool, passes: tuple[float, ...], fails: tuple[float, ...]
) -> None:
    pair, batch = residual_pair(), images(seed=2)
    every = found_of(pair, [batch])
    assert [each.name for each in every] == [region.name for region in pair.regions]
    for each in every:
        if not each.noise.noise:
            continue
        for factor in (1.0, *passes):
            assert len(checked(pair, [batch], [scaled(each, factor)], exact=exact).plans) == 1
        for factor in (*fails, math.nan, math.inf):
            with pytest.raises(pt2qa.SimulationError, match=f"isolated error of {each.name} has a squared sum of"):
                checked(pair, [batch], [scaled(each, factor)], exact=exact)


def test_the_error_says_both_sums() -> None:
    pair, batch = residual_pair(), images(seed=2)
    first = found_of(pair, [batch])[0]
    noise = first.noise.noise
    with pytest.raises(pt2qa.SimulationError) as error:
        checked(pair, [batch], [scaled(first, 2)])
    assert str(error.value) == (
        f"the isolated error of conv1/conv2d has a squared sum of {2 * noise:.6g}; the nodes of the converted graph, "
        f"run on the reference's values, give {noise:.6g}. The numbers would be wrong, so none are reported. Please "
        "file a bug with the model."
    )


@pytest.mark.parametrize(
    ("count", "seed", "names"),
    [
        (0, 3, ""),
        (3, 0, "012"),
        (3, 7, "120"),
        (4, 2, "2301"),
        (7, 0, "0123"),
        (8, 0, "0246"),
        (9, 0, "0246"),
        (9, 12, "3570"),
        (12, 1, "147a"),
    ],
)
def test_regions_far_apart_are_checked_and_others_for_other_data(count: int, seed: int, names: str) -> None:
    pair, batch = residual_pair(), images(seed=2)
    first = found_of(pair, [batch])[0]
    found = [replace(first, name=f"{number:x}") for number in range(count)]
    check = IsolatedCheck(pair.quantized, pair.reference, pair.program, found, seed)
    assert "".join(plan.found.name for plan in check.plans) == names


def test_an_op_that_no_plan_is_known_for_is_left_out_and_others_are_checked_instead() -> None:
    pair, batch = residual_pair(), images(seed=2)
    first, *others = found_of(pair, [batch])[:4]
    unknown = [replace(first, name="unknown", handle=handle) for handle in (-1, 999)] * 3
    check = IsolatedCheck(pair.quantized, pair.reference, pair.program, [*unknown, first, *others], 0)
    assert {plan.found.name for plan in check.plans} == {first.name, *(each.name for each in others)}


def test_nodes_inputs_and_kept_values_of_a_plan() -> None:
    pair, batch = residual_pair(), images(seed=2)
    (conv,) = (each for each in found_of(pair, [batch]) if each.name == "conv2/conv2d")
    check = checked(pair, [batch], [conv])
    (plan,) = check.plans
    kinds = [str(node.target).split(".")[1] if node.op == "call_function" else node.op for node in plan.nodes]
    assert kinds[-3:] == ["conv2d", "quantize_per_tensor", "dequantize_per_tensor"]
    assert kinds.count("dequantize_per_channel") + kinds.count("dequantize_per_tensor") == 3
    order = list(pair.quantized.graph.nodes)
    assert [order.index(node) for node in plan.nodes] == sorted(order.index(node) for node in plan.nodes)
    assert [(each.target, source.target) for each, source in plan.sources.items()] == [
        (torch.ops.aten.relu.default, torch.ops.aten.relu.default)
    ] or len(plan.sources) == 1
    assert check.wanted == {plan.reference, *plan.sources.values()} == check.values.keys()


class Overwritten(nn.Module):
    """A value is written to after an op has read it, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        z: Tensor = self.second(y)
        y[:, 0] = 1
        return z + y.exp()


class Counting(nn.Module):
    """A buffer is written to before an op reads it."""

    buf: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("buf", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        self.buf.add_(1)
        y = y * self.buf
        self.buf.sub_(1)
        return y


@pytest.mark.parametrize(
    ("model", "batch", "quantizer"),
    [
        (Counting, ROWS, "x86"),
        (Counting, ROWS, "xnnpack"),
        (InPlaceViews, images(seed=2), "x86"),
        (Overwritten, ROWS, "x86"),
    ],
    ids=["a buffer", "a buffer in a region", "views in place", "overwritten later"],
)
def test_regions_that_read_what_is_overwritten_are_right_or_left_out(
    model: type[nn.Module], batch: Tensor, quantizer: str
) -> None:
    torch.manual_seed(0)
    pair = quantized_pair(model(), batch, quantizer)
    found = found_of(pair, [batch])
    for each in found:
        checked(pair, [batch], [each])
    checkable = [each for each in found if checked(pair, [batch], [each]).plans]
    assert checkable
    for each in checkable:
        if each.noise.noise:
            with pytest.raises(pt2qa.SimulationError):
                checked(pair, [batch], [scaled(each, 1.01)])


def test_inputs_are_the_same_without_a_handle() -> None:
    pair, batch = residual_pair(), images(seed=2)
    quantized = copy.deepcopy(pair.quantized)
    for node in quantized.graph.find_nodes(op="placeholder"):
        del node.meta["custom"]
    check = IsolatedCheck(quantized, pair.reference, pair.program, found_of(pair, [batch])[:1], 0)
    (plan,) = check.plans
    assert [source.op for source in plan.sources.values()] == ["placeholder"]
    assert next(iter(plan.sources.values())).graph is pair.reference.graph


def test_only_elements_that_count_are_compared() -> None:
    pair, batch = residual_pair(), images(seed=2)
    first = found_of(pair, [batch])[0]
    half = replace(first, counted=lambda step, value: value[:1])
    with pytest.raises(pt2qa.SimulationError):
        checked(pair, [batch], [half])


def test_errors_that_are_nan_in_both_are_equal_and_in_one_are_not() -> None:
    pair, batch = residual_pair(), images(seed=2)
    batch[0, 0, 0, 0] = math.inf
    every = found_of(pair, [batch])
    broken = [each for each in every if math.isnan(each.noise.noise)]
    for each in broken:
        checked(pair, [batch], [each])
        with pytest.raises(pt2qa.SimulationError, match="give nan"):
            checked(pair, [batch], [replace(each, noise=NoiseSums(1.0, 1.0, 1))])
    assert broken
