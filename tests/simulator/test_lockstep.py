"""Both models side by side: what runs in pieces gives what whole tensors give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._metrics import CHUNK
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.lockstep import Event, Lockstep
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import tensors_equal
from tests.flows import quantized_pair, residual_pair
from tests.models import InPlaceViews, Linears, NestedOutputs, TwoUsers, images

SIDE = 128
"""Of the pictures; with 64 channels a value has more than one piece."""


class Bounded(nn.Module):
    """A convolution, and an op that keeps its result within bounds."""

    low: Tensor

    def __init__(self, bound: Callable[[Tensor, Tensor], Tensor], low: Tensor) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 1)
        self.bound = bound
        self.register_buffer("low", low)

    def forward(self, x: Tensor) -> Tensor:
        return self.bound(self.conv(x), self.low)


def large_pair(bound: Callable[[Tensor, Tensor], Tensor], low: Tensor) -> tuple[pt2qa.QuantizedPair, Tensor]:
    torch.manual_seed(0)
    image = torch.randn(1, 3, SIDE, SIDE)
    return quantized_pair(Bounded(bound, low), image, "x86"), image


BOUNDS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "by a buffer": (lambda x, low: torch.clamp(x, min=low), torch.zeros(64, 1, 1)),
    "by a buffer of the size of the value": (lambda x, low: torch.clamp(x, min=low), torch.zeros(1, 64, SIDE, SIDE)),
    "by a buffer that makes the value larger": (lambda x, low: torch.clamp(x, min=low), torch.zeros(2, 64, 1, 1)),
    "by another value": (lambda x, low: torch.clamp(x, min=x.mean((2, 3), keepdim=True)), torch.zeros(1)),
    "by numbers": (lambda x, low: torch.clamp(x, -0.5, 0.5), torch.zeros(1)),
}


@pytest.mark.parametrize("how", BOUNDS)
def test_a_large_value_that_is_bounded_gives_the_numbers_of_the_whole(how: str) -> None:
    pair, image = large_pair(*BOUNDS[how])
    report = pt2qa.compare_layers(pair, [image], progress=False)
    row = next(row for row in report.rows if row.op == "clamp")
    with torch.no_grad():
        expected, actual = pair.reference(image), pair.quantized(image)
    assert row.shape == tuple(expected.shape)
    assert (row.ref_min, row.ref_max) == (float(expected.min()), float(expected.max()))
    assert row.atol == pytest.approx(float((expected - actual).abs().max()), rel=1e-6)


@pytest.mark.parametrize("bound", [lambda x, low: x.relu(), lambda x, low: x.clamp(-0.5, 0.5)], ids=["relu", "clamp"])
def test_an_op_of_the_value_alone_runs_in_the_pieces_of_the_op_before_it(
    bound: Callable[[Tensor, Tensor], Tensor],
) -> None:
    pair, image = large_pair(bound, torch.zeros(1))
    seen: list[tuple[str, int]] = []

    def visit(event: Event) -> None:
        if event.step.site is None:
            seen.append((event.step.op, event.reference.numel()))

    Lockstep(pair.simulator, pieces=True).run(pair.values(image), visit)
    sizes = [size for _, size in seen]
    assert 64 * SIDE * SIDE > CHUNK >= max(sizes)
    assert [op for op, _ in seen[:2]] == ["conv2d", pair.program.steps[-1].op]


# -- every field of every event ----------------------------------------------------------------------------------------


CHOOSE = torch.ops.quantized_decomposed.choose_qparams.tensor


class Plain:
    """What an event should hold, from plain runs of the two models and of each group by itself."""

    def __init__(self, pair: pt2qa.QuantizedPair, values: list[Any], groups: Sequence[Collection[int]]) -> None:
        self.simulator, self.program, self.groups = pair.simulator, pair.program, [set(group) for group in groups]
        self.runs: dict[bool, dict[int, Any]] = {}
        for on in (False, True):
            kept = self.runs[on] = dict(zip(self.program.inputs, values, strict=True))
            with torch.no_grad():
                for step, value in self.simulator.walk(values, on):
                    kept[step.out] = value.clone() if isinstance(value, Tensor) else value
        self.constants = {each.slot: each.quantized for each in self.program.constants}

    def alone(self, group: Collection[int], slot: int) -> Any:
        """A value of a group of ops that runs quantized on the reference's inputs, each rounded as its sites say."""
        number = self.program.producers.get(slot)
        if number is None:
            return self.runs[False][slot]
        step = self.program.steps[number]
        if step.site is not None:
            return self.simulator.site_function(step)(self.alone(group, step.reads[0]))
        if number not in group:
            return self.runs[False][slot]
        own = {each: self.alone(group, each) for each in step.reads}
        if step.mutates:
            own = {each: value.clone() if isinstance(value, Tensor) else value for each, value in own.items()}
        return self.simulator.call(step, {**own, **{each: self.constants[each] for each in step.constants}}, False)

    def isolated(self, step: Step) -> dict[int, Any]:
        """By group, for the groups that the value is in."""
        slot = step.out if step.site is None else self.program.unrounded(step.reads[0])
        producer = self.program.producers.get(slot)
        return {n: self.alone(group, step.out) for n, group in enumerate(self.groups) if producer in group}

    def clamped(self, step: Step) -> int:
        """How many values of the quantized run the clamp of a site moves."""
        params, value = self.program.sites[step.site or 0].params, self.runs[True][step.reads[0]]
        scale, zero_point = params.scale, params.zero_point
        if params.dynamic:
            scale, zero_point = CHOOSE(value, params.quant_min, params.quant_max, 1e-9, torch.int8)
        steps = (value * (1 / float(scale))).round() + int(zero_point)
        return int(((steps < params.quant_min) | (steps > params.quant_max)).sum())


@dataclass
class Seen:
    """All that the events of one step said; the pieces of a large value are put together."""

    reference: list[Any] = field(default_factory=list)
    quantized: list[Any] = field(default_factory=list)
    rounded: list[Any] = field(default_factory=list)
    isolated: dict[int, list[Any]] = field(default_factory=dict)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    clamped: list[int | None] = field(default_factory=list)
    ranges: list[Any] = field(default_factory=list)


def seen_of(pair: pt2qa.QuantizedPair, values: list[Any], **options: Any) -> tuple[dict[int, Seen], Any]:
    found: dict[int, Seen] = {}

    def kept(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    def visit(event: Event) -> None:
        seen = found.setdefault(event.step.index, Seen())
        seen.reference.append(kept(event.reference))
        seen.quantized.append(kept(event.quantized))
        seen.rounded.append(kept(event.rounded))
        for group, value in event.isolated.items():
            seen.isolated.setdefault(group, []).append(kept(value))
        seen.shapes.add(event.shape)
        seen.clamped.append(event.clamped)
        seen.ranges.append(event.ranges)
        if event.ranges:
            quantized, reference = event.quantized, event.reference
            assert event.ranges == tuple((float(x.min()), float(x.max())) for x in (reference, quantized))

    return found, Lockstep(pair.simulator, **options).run(values, visit)


def whole(pieces: list[Any], like: Any) -> Any:
    """The pieces of a value in its own shape."""
    if len(pieces) == 1:
        return pieces[0]
    channels_last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    joined = torch.cat(pieces)
    if channels_last:
        return joined.reshape(*(like.shape[axis] for axis in (0, 2, 3, 1))).permute(0, 3, 1, 2)
    return joined.reshape(like.shape)


PAIRS: dict[str, Callable[[], tuple[pt2qa.QuantizedPair, list[Any]]]] = {
    "residual": lambda: (residual_pair(), [images(seed=1)]),
    "residual x86": lambda: (residual_pair("x86"), [images(seed=1)]),
    "two users": lambda: (quantized_pair(TwoUsers(), images()), [images(seed=1)]),
    "views in place": lambda: (quantized_pair(InPlaceViews(), images(), "x86"), [images(seed=1)]),
    "outputs": lambda: (quantized_pair(NestedOutputs(), ROWS), [ROWS * 1.5]),
    "dynamic": lambda: (quantized_pair(Linears(), ROWS, "xnnpack:mode=dynamic"), [ROWS * 1.5]),
}
ROWS = torch.linspace(-1, 1, 64).reshape(4, 16)


@torch.no_grad()
def check_events(plain: Plain, found: dict[int, Seen], *, rounding: bool, ranges: bool) -> None:
    program = plain.program
    assert list(found) == [step.index for step in program.steps]
    for step in program.steps:
        seen = found[step.index]
        reference, quantized = plain.runs[False][step.out], plain.runs[True][step.out]
        assert tensors_equal(whole(seen.reference, reference), reference), step.name
        assert tensors_equal(whole(seen.quantized, quantized), quantized), step.name
        assert seen.shapes == {tuple(reference.shape) if isinstance(reference, Tensor) else ()}
        isolated = plain.isolated(step)
        assert seen.isolated.keys() == isolated.keys(), step.name
        for group, value in isolated.items():
            assert tensors_equal(whole(seen.isolated[group], value), value), step.name
        if step.site is None:
            assert seen.clamped == seen.rounded == [None] * len(seen.clamped)
            assert len(seen.ranges) == 1 or all(map(bool, seen.ranges)) == ranges
            continue
        assert [each is None for each in seen.rounded] == [not rounding] * len(seen.rounded)
        if rounding:
            assert tensors_equal(whole(seen.rounded, reference), plain.alone((), step.out))
        if not ranges:
            assert set(seen.clamped) == {None}
            assert set(seen.ranges) == {()}
        elif program.sites[step.site].exact:
            assert sum(each or 0 for each in seen.clamped) == plain.clamped(step), step.name
            assert all(map(bool, seen.ranges))


@pytest.mark.parametrize("name", PAIRS)
def test_every_field_of_every_event_is_that_of_plain_runs(name: str) -> None:
    pair, values = PAIRS[name]()
    groups = [region.steps for region in pair.regions] + [[step.index for step in pair.program.steps]]
    for own, rounding, ranges in ((groups, True, True), ([], True, False), ([], False, True)):
        plain = Plain(pair, values, own)
        found, outputs = seen_of(pair, values, groups=own, rounding=rounding, ranges=ranges)
        check_events(plain, found, rounding=rounding, ranges=ranges)
        for on, made in zip((False, True), outputs, strict=True):
            assert tensors_equal(made, pair.simulator.run(values, on=on))


class Chain(nn.Module):
    """A large value that several ops and a site may overwrite one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x).relu().clamp(-1, 0.5).sigmoid().relu())
        return result


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
def test_events_in_pieces_are_those_of_plain_runs(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    image = torch.randn(1, 3, SIDE, 144)
    pair = quantized_pair(Chain(), image, "x86")
    values = [(image * 1.5).to(memory_format=layout)]
    groups = [region.steps for region in pair.regions]
    for own, rounding, ranges in ((groups, True, True), ([], True, False), ([], False, True), ([], False, False)):
        plain = Plain(pair, values, own)
        found, _ = seen_of(pair, values, groups=own, rounding=rounding, ranges=ranges, pieces=True)
        check_events(plain, found, rounding=rounding, ranges=ranges)
        sizes = {pair.program.steps[number].op: len(seen.reference) for number, seen in found.items()}
        assert sizes["conv2d"] == 1  # the last one
        assert sizes["relu"] == sizes["clamp"] == sizes["sigmoid"] == sizes["quantize"] == 2
    with_converted = dataclasses.replace(pair)
    with_converted.simulator.fused = False
    found, _ = seen_of(with_converted, values, rounding=True, pieces=True)
    (site,) = (step for step in pair.program.steps if step.site is not None and step.name.startswith("relu"))
    assert len(found[site.index].reference) == 1, "the converted ops round the whole"


def test_ops_overwrite_only_what_the_other_run_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            early = x.tanh()
            late: Tensor = self.linear(early).sigmoid().relu()
            return early.sigmoid().relu().clamp(min=late)

    torch.manual_seed(0)
    x = torch.randn(3, 4)
    pair = quantized_pair(Mixed(), x)
    calls: dict[str, list[bool]] = {}
    right = pair.simulator.call

    def call(step: Step, values: Any, reuse: bool) -> Any:
        calls.setdefault(step.name, []).append(reuse)
        return right(step, values, reuse)

    monkeypatch.setattr(pair.simulator, "call", call)
    Lockstep(pair.simulator).run([x], lambda event: None)
    assert calls == {
        "tanh": [False],
        "linear/linear": [False, False],
        "sigmoid": [True, True],
        "relu": [True, True],
        "sigmoid_1": [False],
        "relu_1": [False],
        "clamp": [False, False],
    }
    # By itself, an op reads the values of the reference, and no copies of them.
    read: dict[str, bool] = {}
    run = Lockstep(pair.simulator, groups=[[step.index] for step in pair.program.steps if step.site is None])

    def same(step: Step, values: Any, reuse: bool) -> Any:
        read.setdefault(step.name, all(values[slot] is run.reference[slot] for slot in step.reads))
        return right(step, values, reuse)

    monkeypatch.setattr(pair.simulator, "call", same)
    run.run([x], lambda event: None)
    assert [name for name, is_same in read.items() if not is_same] == ["linear/linear", "sigmoid"]


def test_nothing_is_left_when_the_last_step_ran() -> None:
    pair, values = PAIRS["residual"]()
    groups = [region.steps for region in pair.regions]
    run = Lockstep(pair.simulator, groups=groups, rounding=True, ranges=True)
    most = [0, 0]

    def visit(event: Event) -> None:
        isolated = sum(group is not None for group, _ in run.alone)
        for number, kept in enumerate((isolated, len(run.alone) - isolated)):
            most[number] = max(most[number], kept)

    run.run(values, visit)
    assert run.alone == {}
    assert most == [2, 2], "what one op reads of its own, and its two inputs"
    made = {step.out for step in pair.program.steps} - set(slots_in(pair.program.outputs))
    assert all(run.reference[slot] is None and run.quantized[slot] is None for slot in made)


def test_clamped_values_are_counted_among_those_that_count() -> None:
    pair, values = PAIRS["residual"]()
    counted = [[], []]  # type: list[list[int | None]]
    for seen, narrow in zip(counted, (None, lambda step, value: value[:1]), strict=True):
        found, _ = seen_of(pair, [values[0] * 3], ranges=True, counted=narrow)
        seen += [each for number in found for each in found[number].clamped if each is not None]
    plain = Plain(pair, [values[0] * 3], [])
    for run in plain.runs.values():
        run.update({slot: value[:1] for slot, value in run.items() if isinstance(value, Tensor)})
    sites = [step for step in pair.program.steps if step.site is not None]
    assert counted[1] == [plain.clamped(step) for step in sites]
    assert sum(each or 0 for each in counted[0]) > sum(each or 0 for each in counted[1]) > 0
