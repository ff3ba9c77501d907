"""What each method costs by estimate, written out for a small model, and the paths along which errors are followed."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2qa
from pt2qa._sensitivity import paths as paths_module
from pt2qa._sensitivity.costs import BACK, CALL, ELEMENT, Costs, estimate, survey
from pt2qa._sensitivity.paths import Path, error_at_end, pieces_of, plan_paths
from pt2qa._sensitivity.site_groups import find_site_groups, steps_behind, walk_places
from tests.flows import quantized_pair, residual_pair
from tests.models import Linears, images

SAMPLES = 4
FIRST, SECOND = 2 * SAMPLES * 16 * 32, 2 * SAMPLES * 32 * 4
"""The flops of both linears."""


@functools.cache
def linears() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(Linears(), (torch.randn(SAMPLES, 16),))


def test_a_survey_counts_flops_and_elements_by_step() -> None:
    pair = linears()
    seen = survey(pair.simulator, pair.values((torch.randn(SAMPLES, 16),)))
    ops = {step.op: step.index for step in pair.program.steps if step.site is None}
    flops = {step.name: seen.flops[step.index] for step in pair.program.steps if step.site is None}
    assert seen.samples == SAMPLES
    assert flops == {"first/linear": FIRST, "relu": 0, "second/linear": SECOND}
    elements = {step.index: SAMPLES * (4 if step.index >= ops["linear"] else 32) for step in pair.program.steps}
    first = next(step.index for step in pair.program.steps if step.site is None)
    elements |= {index: SAMPLES * 16 for index in elements if index < first}
    assert seen.elements == elements


def test_the_estimate_is_the_sum_of_what_the_runs_write_and_compute() -> None:
    pair = linears()
    program, places = pair.program, find_site_groups(pair.program, None)
    seen = survey(pair.simulator, pair.values((torch.randn(SAMPLES, 16),)))

    def write(elements: int) -> float:
        return ELEMENT * SAMPLES * elements + CALL

    # x is rounded, then first, relu, a rounding, second, a rounding.
    ops = {"first": FIRST + write(32), "relu": write(32), "second": SECOND + write(4)}
    forward = sum(ops.values())
    roundings = write(16) + write(32) + write(4)
    # The output is what the last rounding gives.
    output = write(4)
    behind = {
        "x": forward,
        "first/linear": forward,  # its weight
        "relu": ops["second"],
        "second/linear weight": ops["second"],
        "second/linear": 0.0,
    }
    two_runs = 2 * forward + roundings
    found = estimate(program, places, plan_paths(program), seen)
    assert found.forward == pytest.approx(forward)
    assert found.exact == pytest.approx(two_runs + forward + sum(behind.values()) + 5 * output)
    # From x through the first linear and the relu; from its weight likewise; from the relu's value through the second
    # linear, which no nonlinear op follows: the error is projected where it arises.
    through = ops["first"] + ops["relu"]
    assert len(plan_paths(program)) == 5
    at_ends = {path.end.name: write(seen.elements[path.end.index] // SAMPLES) for path in plan_paths(program)}
    assert found.each - BACK * forward - output == pytest.approx(
        sum(at_ends[path.end.name] for path in plan_paths(program))
    )
    assert found.once == pytest.approx(
        two_runs
        + (write(16) + through + write(32))  # x, at the relu
        + (through + write(32))  # the first weight, at the relu
        + (write(32) + write(32))  # the rounding of the relu, where it is
        + (ops["second"] + write(4))  # the second weight, at its op
        + (write(4) + write(4))  # the last rounding
    )
    assert Costs(1.0, 2.0, 3.0, 5.0).projection(4) == 23.0


# -- paths -------------------------------------------------------------------------------------------------------------


class Bends(nn.Module):
    """Errors that pass linear ops, nonlinear ones, a branch, a second product, and an op that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(F.avg_pool2d(self.one(x), 2) + 1)
        z = F.hardtanh(self.two(y)) - self.three(y).cumsum(1)
        out = self.head(z.mean((2, 3)))
        return out, out.softmax(-1)


@functools.cache
def bends() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(Bends(), (images(),))


def test_a_path_ends_behind_the_last_nonlinear_op_before_a_branch_a_second_product_or_an_unknown_op() -> None:
    pair = bends()
    kinds = {site.index: (site.name, site.kind) for site in pair.sites}
    found = {
        (*kinds[path.site], path.start.op): [step.op for step in path.steps if step.site is None]
        for path in plan_paths(pair.program)
    }
    x, weights = ["conv2d", "avg_pool2d", "add", "relu"], ["avg_pool2d", "add", "relu"]
    for (name, kind, start), steps in found.items():
        if name == "x":
            assert steps == x
        elif (name, kind) == ("one/conv2d", "weight"):
            assert (start, steps) == ("conv2d", weights)
        elif (name, kind) == ("two/conv2d", "weight"):
            assert (start, steps) == ("conv2d", ["hardtanh"])
        elif (name, kind) in (("three/conv2d", "weight"), ("head/linear", "weight")):
            assert steps == []
        elif kind == "activation" and name == "one/conv2d":
            assert steps == weights
        elif kind == "activation" and name in ("relu", "head/linear"):
            assert steps == []  # two ops read it, or it is returned
    assert {name for name, kind, _ in found if kind == "weight"} == {
        "one/conv2d",
        "two/conv2d",
        "three/conv2d",
        "head/linear",
    }
    assert len(found) == len(set(kinds))


@pytest.mark.parametrize("pair", [bends, residual_pair, linears])
def test_an_error_at_the_end_of_a_path_is_the_difference_that_a_run_makes(pair: pt2qa.QuantizedPair) -> None:
    pair = pair()
    batch = torch.randn(SAMPLES, 16) if pair is linears() else images()
    values = pair.values((batch,))
    simulator = pair.simulator
    reference = dict(enumerate(simulator.environment(values, False)))
    for step in pair.program.steps:
        reference[step.out] = (
            reference[step.reads[0]] if step.site is not None else simulator.call(step, reference, False)
        )
    kept = {slot: value.clone() for slot, value in reference.items() if isinstance(value, Tensor)}
    for path in plan_paths(pair.program):
        seen: dict[int, Tensor] = {}
        simulator.run(
            values, on={path.site}, visit=lambda step, value, seen=seen: seen.update({step.index: value.clone()})
        )
        site = pair.sites[path.site]
        changed = simulator.on[site.source] if path.constant is not None else seen[path.start.index].clone()
        (error,) = error_at_end(path, simulator, reference, changed)
        expected = seen[path.end.index] - reference[path.end.out]
        # Both are differences of values that round at their own size, in kernels that sum in the order of their CPU.
        atol = max(1e-6, 2 * torch.finfo(torch.float32).eps * float(reference[path.end.out].detach().abs().max()))
        torch.testing.assert_close(error, expected, rtol=1e-4, atol=atol, msg=site.name)
    assert all(torch.equal(reference[slot], value) for slot, value in kept.items())


def test_samples_are_followed_a_few_at_a_time_where_ops_treat_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = linears()
    values = pair.values((torch.randn(SAMPLES, 16),))
    reference = dict(enumerate(pair.simulator.environment(values, False)))
    for step in pair.program.steps:
        reference[step.out] = (
            reference[step.reads[0]] if step.site is not None else pair.simulator.call(step, reference, False)
        )
    paths = {path.site: path for path in plan_paths(pair.program)}
    (x,) = [path for path in paths.values() if path.constant is None and pair.sites[path.site].name == "x"]
    widest = 4 * SAMPLES * 32  # bytes of the widest value on the way, in float32
    for piece, expected in ((widest, [4]), (widest // 2, [2, 2]), (widest - 1, [3, 1]), (1, [1] * 4)):
        monkeypatch.setattr(paths_module, "PIECE", piece)
        pieces = list(pieces_of(x, reference, SAMPLES))
        assert [len(own[x.source]) for _, own in pieces] == expected
        assert next((own.start, own.stop) for own, _ in pieces if own is not None) == (0, expected[0])
        assert torch.equal(torch.cat([own[x.end.out] for _, own in pieces]), reference[x.end.out])
        for step in (x.start, *x.steps):
            assert all(own[slot] is reference[slot] for _, own in pieces for slot in step.constants)
    # With another number of samples than the values have, everything is followed at once.
    assert [own for own, _ in pieces_of(x, reference, SAMPLES - 1)] == [None]
    mean = [path for path in plan_paths(residual_pair().program) if path.steps]
    assert any(not path.by_sample({}, 2) for path in mean if any(len(step.reads) > 1 for step in path.steps))


def test_a_path_starts_at_a_site_or_at_a_constant() -> None:
    pair = linears()
    for path in plan_paths(pair.program):
        site = pair.sites[path.site]
        assert (path.source, path.constant is None) == (site.source, site.kind == "activation")
        assert path.end is (path.steps[-1] if path.steps else path.start)
    assert Path(0, pair.program.steps[0], None, ()).end is pair.program.steps[0]


# -- the walk ----------------------------------------------------------------------------------------------------------


def test_steps_behind_a_place_are_those_that_it_changes() -> None:
    pair = residual_pair()
    values = pair.values(images())
    reference: dict[int, Tensor] = {}
    pair.simulator.run(values, on=False, visit=lambda step, value: reference.update({step.index: value.clone()}))
    for place in find_site_groups(pair.program, None):
        changed: list[int] = []

        def visit(step: object, value: Tensor, changed: list[int] = changed) -> None:
            if not torch.equal(value, reference[step.index]):  # type: ignore[attr-defined]
                changed.append(step.index)  # type: ignore[attr-defined]

        pair.simulator.run(values, on=place.sites, visit=visit)
        assert set(changed) <= set(steps_behind(pair.program, place)), place.name
        assert list(steps_behind(pair.program, place)) == sorted(steps_behind(pair.program, place))
        assert changed[:1] == list(steps_behind(pair.program, place))[:1]


def test_the_walk_returns_the_reference_and_runs_what_is_wanted_alone() -> None:
    pair = residual_pair()
    values = pair.values(images())
    places = find_site_groups(pair.program, None)
    finished: list[int] = []
    outputs = walk_places(pair.simulator, values, places, [2, 0], lambda place, _: finished.append(place))
    assert sorted(finished) == [0, 2]
    assert torch.equal(outputs[0], pair.simulator.run(values, on=False)[0])
