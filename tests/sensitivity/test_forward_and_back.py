"""The two passes of a projection, the independence of samples and the analysis around them, against plain autograd."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._sensitivity import analysis
from pt2qa._sensitivity.costs import CLEARLY, Costs
from pt2qa._sensitivity.gradients import GradientRun, float_tensors, gradients_of, laid_out_inputs, tracked_slots
from pt2qa._sensitivity.metrics import OutputMetric
from pt2qa._sensitivity.paths import plan_paths
from pt2qa._sensitivity.precision import FEWEST, MOST
from pt2qa._sensitivity.projection import (
    Independence,
    Projection,
    _apart,
    _dots,
    _inputs,
    _with_other_first,
    in_parts,
    independence,
)
from pt2qa._sensitivity.roundings import Variant, own_rounding
from pt2qa._sensitivity.site_groups import find_site_groups
from pt2qa._simulator.data import Counted, Positions
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.verification import Verification
from tests.flows import quantized_pair, residual_pair
from tests.models import images
from tests.recomputation import by_handle


class Forked(nn.Module):
    """A value that two ops read, two outputs of which one is read further, and a split whose parts are read apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(6, 8), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.first(x))
        one, two = y.split(4, 1)
        z = self.left(one) * self.right(two) + one
        return z, z.softmax(-1)


@functools.cache
def forked() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(Forked(), (torch.randn(5, 6),), dynamic_shapes=({0: torch.export.Dim("batch")},))


def projection_of(pair: pt2qa.QuantizedPair, post_process: Any = None) -> Projection:
    variants = {site.index: {"quantized": Variant(own_rounding(pair.simulator, site))} for site in pair.sites}
    return Projection(pair, post_process, plan_paths(pair.program), variants)


@pytest.mark.parametrize("pair", [forked, residual_pair])
def test_gradients_are_those_of_autograd_through_the_float_graph(pair: Any) -> None:
    pair = pair()
    batch = torch.randn(5, 6) if pair is forked() else images()
    values = pair.values((batch,))
    run = GradientRun(pair.simulator, values)
    slots = list(dict.fromkeys(slots_in(pair.program.outputs)))
    generator = torch.Generator().manual_seed(1)
    vectors = {slot: [[torch.randn(run.env[slot].shape, generator=generator) for _ in range(2)]] for slot in slots}
    found: dict[str, list[Tensor | None]] = {}

    def visit(step: Any, gradients: Any) -> None:
        if step.site is None:
            found[step.name] = [None if leaf is None else torch.stack(leaf) for leaf in gradients]

    run.backward({slot: [[each.clone() for each in own[0]]] for slot, own in vectors.items()}, visit)

    class Tracking(torch.fx.Interpreter):
        def __init__(self, graph: torch.fx.GraphModule) -> None:
            super().__init__(graph)
            self.kept: dict[int, Tensor] = {}

        def run_node(self, node: torch.fx.Node) -> Any:
            result = None if node.target == "_guards_fn" else super().run_node(node)
            written = any("relu_" in str(user.target) for user in node.users)
            if isinstance(result, Tensor) and result.requires_grad and not written:
                result.retain_grad()
                self.kept[node.meta["custom"]["numeric_debug_handle"] if "custom" in node.meta else -1] = result
            return result

    names = {pair.names[handle].name: handle for handle in by_handle(pair.reference) if handle in pair.names}
    for number in range(2):
        tracking = Tracking(pair.reference)
        outputs = tracking.run(batch.clone().requires_grad_(True), enable_io_processing=False)
        leaves = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        own = [vectors[slot][0][number] for slot in slots_in(pair.program.outputs)]
        torch.autograd.backward(leaves, own)
        compared = 0
        for name, leaves_of in found.items():
            value = tracking.kept.get(names.get(name, -2))
            if value is None or value.grad is None or len(leaves_of) != 1 or leaves_of[0] is None:
                continue
            torch.testing.assert_close(leaves_of[0][number], value.grad, rtol=1e-4, atol=1e-6, msg=name)
            compared += 1
        assert compared >= 4
        pair.reference.zero_grad(set_to_none=True)  # other tests share it
    assert all(value is None for step, value in ((step, run.env[step.out]) for step in pair.program.steps))


def test_an_op_that_no_gradient_reaches_may_write_to_a_value_that_others_share() -> None:
    pair = quantized_pair(nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4))
    (tanh,) = (step for step in pair.program.steps if step.op == "tanh")
    tanh.mutates = True
    (output,) = GradientRun(pair.simulator, pair.values(torch.ones(3, 4))).outputs()
    assert torch.equal(output, pair.reference(torch.ones(3, 4)))


def test_gradients_for_several_vectors_keep_the_graph_until_the_last() -> None:
    x, unused = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    y = x * x
    vectors = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])]
    found = gradients_of([y], [x, unused], [vectors])
    assert found[1] is None
    assert found[0] is not None
    assert [each.tolist() for each in found[0]] == [[2.0, 0.0], [0.0, 4.0], [2.0, 4.0]]
    with pytest.raises(RuntimeError, match="second time"):
        gradients_of([y], [x], [vectors])


def test_floating_point_tensors_are_found_among_other_values() -> None:
    first, second = torch.ones(2), torch.ones(0)
    assert [id(each) for each in float_tensors([first, torch.ones(2).long(), 3, {"a": (None, second)}])] == [
        id(first),
        id(second),
    ]


def test_slots_behind_what_is_rounded_are_tracked() -> None:
    pair = residual_pair()
    program = pair.program
    tracked = tracked_slots(program)
    expected: set[int] = set()
    for step in program.steps:
        constants = {each.slot for each in program.constants if each.site is not None}
        if step.site is not None or constants & set(step.constants) or expected & set(step.reads):
            expected.add(step.out)
    assert tracked == expected
    assert not tracked & set(program.inputs)


def test_convolutions_read_channels_last_and_ops_that_mind_read_contiguous_values() -> None:
    pair = residual_pair()
    run = GradientRun(pair.simulator, pair.values(images()))
    last = torch.channels_last
    for step in pair.program.steps:
        if step.site is not None:
            continue
        env = dict(enumerate(run.env))
        shape = next(iter(env[slot].dim() for slot in step.reads))
        own = laid_out_inputs(step, env)
        assert own.keys() == {*step.reads, *step.constants}
        for slot in step.reads:
            assert torch.equal(own[slot], env[slot])
            if shape == 4 and step.op == "conv2d":
                assert own[slot].is_contiguous(memory_format=last)
            elif step.op in ("relu", "add", "mean"):
                assert own[slot] is env[slot]
        for slot in step.constants:
            assert own[slot] is env[slot]


# -- dot products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dot_products_are_by_row_in_any_layout(rows: int, layout: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    error = torch.randn(4, 3, 2, 5, generator=generator).to(memory_format=layout)
    gradients = [torch.randn(4, 3, 2, 5, generator=generator) for _ in range(3)]
    expected = [[float((g.double() * error.double())[own].sum()) for own in _rows(rows)] for g in gradients]
    found = _dots(gradients, error, rows)
    assert (found.dtype, tuple(found.shape)) == (torch.float64, (3, rows))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def _rows(rows: int) -> list[slice]:
    return [slice(None)] if rows == 1 else [slice(row, row + 1) for row in range(rows)]


def test_noise_and_its_variance_are_those_of_the_formula() -> None:
    pair = forked()
    batch = torch.randn(5, 6)
    started = projection_of(pair).start(pair.values((batch,)), 7, Counted(None, {}, pair.program))
    assert (started.samples, started.projections) == (5, 0)
    assert torch.equal(started.reference[0], started.returned[0])
    started.project(2)
    started.project(2)
    assert started.projections == 4
    for site in pair.sites:
        dots = torch.cat(started._dots[site.index, "quantized"])
        assert tuple(dots.shape) == (4, 5)
        squares = dots.square().mean(0)
        left = started._left_to_chance(dots)
        noise, variance = started.noise([(site.index, "quantized")])
        assert noise == pytest.approx(float(squares.sum()))
        assert variance == pytest.approx(2 / (4 + 2) * float(squares.square().sum()) * left)
    keys = [(site.index, "quantized") for site in pair.sites]
    each = [started.noise([key]) for key in keys]
    assert started.noise(keys) == pytest.approx([sum(column) for column in zip(*each, strict=True)])
    assert started.noise([(99, "quantized")]) == (0, 0)
    assert started.reached == {site.index for site in pair.sites}
    total, spread = started.together()
    sums = sum(torch.cat(dots).square() for dots in started._dots.values())
    assert isinstance(sums, Tensor)
    assert total == pytest.approx(sum(noise for noise, _ in each)) == pytest.approx(float(sums.mean(0).sum()))
    assert spread == pytest.approx(float(sums.var(0).sum()) / 4 * left)
    assert started.scales == [pytest.approx(1 / float(leaf.norm())) for leaf in started.reference]


def test_together_of_one_vector_or_of_none() -> None:
    pair = forked()
    started = projection_of(pair).start(pair.values((torch.randn(5, 6),)), 7, Counted(None, {}, pair.program))
    assert started.together() == (0.0, 0.0)
    started.project(1)
    sums = sum(torch.cat(dots).square() for dots in started._dots.values())
    assert isinstance(sums, Tensor)
    noise, variance = started.together()
    assert noise == pytest.approx(float(sums.sum()))
    left = started._left_to_chance(sums)
    assert variance == pytest.approx(2 / 3 * float(sums.square().sum()) * left)
    # Where one site is projected for the whole batch, all of them are added up so.
    first = next(iter(started._dots))
    started._dots[first] = [started._dots[first][0].sum(1, keepdim=True)]
    mixed = sum(torch.cat(dots).square().sum(1, keepdim=True) for dots in started._dots.values())
    assert isinstance(mixed, Tensor)
    assert started.together()[0] == pytest.approx(float(mixed.sum()))


def test_vectors_may_have_a_scale_for_each_output() -> None:
    pair = forked()
    started = projection_of(pair).start(pair.values((torch.randn(5, 6),)), 7, Counted(None, {}, pair.program))
    plain, scaled = started.signs(3), started.signs(3, [2.0, 0.0])
    assert all(torch.equal(2 * a, b) for a, b in zip(plain[0], scaled[0], strict=True))
    assert not any(each.any() for each in scaled[1])
    zeroed = projection_of(pair, lambda out: (out[0] * 0, out[1]))
    assert zeroed.start(pair.values((torch.randn(5, 6),)), 7, Counted(None, {}, pair.program)).scales[0] == 0.0


# -- independence ------------------------------------------------------------------------------------------------------


def test_samples_are_apart_where_only_the_first_part_differs() -> None:
    one = torch.arange(12.0).reshape(3, 4)
    first, second = one.clone(), one.clone()
    first[0, 1], second[1, 0] = 9.0, 9.0
    assert _apart([one], [first], 3)
    assert not _apart([one], [second], 3)
    assert not _apart([one], [one.clone()], 3)
    assert not _apart([one, one], [first, second], 3)
    assert not _apart([one], [first[:, :2]], 3)
    assert not _apart([], [], 3)
    assert (
        _apart([one.T.reshape(2, 6)], [one.T.reshape(2, 6).clone().index_fill(1, torch.tensor([0]), 5.0)], 2) is False
    )
    assert in_parts([one, torch.ones(6)], 3)
    assert not in_parts([one, torch.ones(4)], 3)
    assert not in_parts([torch.ones(0)], 3)
    assert not in_parts([], 3)


def test_another_first_sample_differs_and_keeps_its_kind() -> None:
    generator = torch.Generator().manual_seed(0)

    def changed(value: Any, samples: int = 3) -> Any:
        return _with_other_first(value, samples, generator)

    floats = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    other = changed(floats)
    assert torch.equal(other[1:], floats[1:])
    assert not torch.equal(other[0], floats[0])
    assert bool(((other >= 0) & (other <= 1)).all())
    complexes = torch.rand(3, 4, generator=torch.Generator().manual_seed(2)).to(torch.complex64)
    assert changed(complexes).dtype == torch.complex64
    assert not torch.equal(changed(complexes)[0], complexes[0])
    indices = torch.tensor([[5, 6], [7, 8], [1, 2]])
    assert changed(indices).tolist() == [[8, 7], [7, 8], [1, 2]]
    ones = torch.ones(3, 8, dtype=torch.long)
    masked = changed(ones)
    assert masked[1:].tolist() == ones[1:].tolist()
    assert masked[0, 0] == 1
    assert masked[0, -1] == 0
    flags = changed(torch.zeros(3, 2, 4, dtype=torch.bool))
    assert (flags.dtype, bool(flags[0].any()), bool(flags[0].all()), bool(flags[1:].any())) == (
        torch.bool,
        True,
        False,
        False,
    )
    for same in (3, torch.tensor(2.0), torch.rand(2, 4)):
        assert changed(same) is same
    alone = torch.rand(1, 4)
    assert changed(alone, 1) is alone


def test_inputs_are_random_floats_and_the_integers_of_the_example() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.fc = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
            return self.fc(self.words(tokens) * x)

    torch.manual_seed(0)
    example = (torch.randint(2, 9, (3, 5)), torch.full((3, 5, 1), 7.0))
    pair = quantized_pair(Words(), example)
    (tokens, x), (others, y) = _inputs(pair)
    assert torch.equal(tokens, example[0])
    assert (x.shape, x.dtype) == ((3, 5, 1), torch.float32)
    assert 0 <= float(x.min()) < float(x.max()) <= 1
    assert torch.equal(others[1:], tokens[1:])
    assert torch.equal(y[1:], x[1:])
    assert not torch.equal(y[0], x[0])
    bare = pt2qa.pair(pair.float_graph, pair.quantized)
    (tokens, x), _ = _inputs(bare)
    assert (tokens.shape, tokens.dtype, set(tokens.flatten().tolist())) == ((3, 5), torch.int64, {0, 1})
    assert 0 <= float(x.min()) < float(x.max()) <= 1
    first, again = independence(pair, None), independence(pair, None)
    assert first is again
    assert independence(pair, lambda out: out) is not first
    assert independence(pair, lambda out: out) == first
    torch.manual_seed(0)
    single = quantized_pair(Words(), (example[0][:1], example[1][:1]))
    assert independence(single, None) == Independence()


def test_a_problem_is_named_with_its_error() -> None:
    def refuses(outputs: Any) -> Any:
        raise ValueError("no such outputs")

    found = independence(forked(), refuses)
    assert (found.slots, found.problem) == (frozenset(), "ValueError: no such outputs")


# -- the analysis ------------------------------------------------------------------------------------------------------


def measured(**options: Any) -> pt2qa.SensitivityReport:
    batches = [torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    return pt2qa.sensitivity(forked(), batches, progress=False, **options)


@pytest.mark.parametrize(("factor", "method"), [(1.0, "exact"), (1.0001, "projection")])
def test_the_exact_method_is_taken_up_to_a_known_factor(
    factor: float, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs(2.0, CLEARLY * factor * 28.0, 8.0, 5.0)
    monkeypatch.setattr(analysis, "estimate", lambda *given: costs)
    monkeypatch.setattr(analysis, "needed", lambda noise, variance, earlier, projections: projections)
    report = measured()
    assert report.method == method
    exact, projection = f"{costs.exact / 2:.3g}", "14"
    expected = (
        f"the exact method: for each batch it takes about {exact} float forwards, the projection with 4 random vectors "
        f"about {projection}"
        if method == "exact"
        else f"the projection: for each batch it takes about {projection} float forwards, the exact method about "
        f"{exact}"
    )
    assert f'method="auto" took {expected}' in report.notes
    one = measured(projections=1)
    assert one.method == "projection"
    assert any(f"takes about {13 / 2:.3g} float forwards" in note for note in one.notes)


def test_a_batch_takes_as_many_vectors_as_it_needs_or_is_measured_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def wanting(answers: list[int | None]) -> Any:
        left = iter(answers)

        def needed(noise: list[float], variance: list[float], earlier: list[float], projections: int) -> int | None:
            asked.append((projections, len(noise)))
            return next(left)

        return needed

    monkeypatch.setattr(analysis, "estimate", lambda *given: Costs(1.0, 1000.0, 1.0, 1.0))
    monkeypatch.setattr(analysis, "needed", wanting([8, 8, 4]))
    report = measured(method="projection")
    assert asked == [(count, len(report.rows)) for count in (FEWEST, 8, FEWEST)]
    assert [batch.projections for batch in report.data] == [8, 4]
    # More vectors would cost more than the runs: 12 more, and a thirteenth unit for the forward.
    for exact, projections in ((12.9, [0, 4]), (13.0, [16, 4])):
        monkeypatch.setattr(analysis, "estimate", lambda *given, exact=exact: Costs(1.0, exact, 1.0, 1.0))
        monkeypatch.setattr(analysis, "needed", wanting([16, 16, 4] if projections[0] else [16, 4]))
        assert [batch.projections for batch in measured(method="projection").data] == projections
    monkeypatch.setattr(analysis, "estimate", lambda *given: Costs(1.0, 1e9, 1.0, 1.0))
    monkeypatch.setattr(analysis, "needed", wanting([None, 4]))
    assert [batch.projections for batch in measured(method="projection").data] == [0, 4]
    # The sites of a group are not measured alone: as many vectors as there may be.
    monkeypatch.setattr(analysis, "needed", wanting([None, None, 4]))
    grouped = measured(method="projection", group="module")
    assert [batch.projections for batch in grouped.data] == [MOST, 4]
    monkeypatch.setattr(analysis, "estimate", lambda *given: Costs(1.0, 100.0, 1.0, 1.0))
    monkeypatch.setattr(analysis, "needed", wanting([None]))
    chosen = measured(method="auto")
    assert chosen.method == "exact"
    assert any(
        f"took the exact method: the ranking needs more than {MOST} vectors; for each batch it takes about 100 float "
        f"forwards, the projection with {MOST - FEWEST} random vectors about 61" in note
        for note in chosen.notes
    )
    monkeypatch.setattr(analysis, "estimate", lambda *given: Costs(1.0, 20.0, 1.0, 1.0))
    monkeypatch.setattr(analysis, "needed", wanting([32]))
    assert any(
        "the ranking needs 28 more vectors; for each batch it takes about 20" in note for note in measured().notes
    )


def test_what_an_interruption_left_is_said() -> None:
    def interrupted(after: int) -> Any:
        for seed in range(after):
            yield torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        raise KeyboardInterrupt

    for count, says in ((1, "covers the 1 batch that was finished"), (2, "covers the 2 batches that were finished")):
        report = pt2qa.sensitivity(forked(), interrupted(count), method="exact", progress=False)
        assert f"interrupted: {says}; go on with resume=report" in report.notes
        assert report.batches == count
    with pytest.raises(KeyboardInterrupt):
        pt2qa.sensitivity(forked(), interrupted(0), method="exact", progress=False)


def test_arguments_that_do_not_go_together_are_refused() -> None:
    for options, says in (
        ({"method": "all"}, "unknown method 'all'; expected one of auto, projection, exact"),
        (
            {"method": "projection", "metric": "KL"},
            'method="projection" supports sqnr only; for kl pass method="exact"',
        ),
        ({"projections": 0}, "projections is 0; expected 1 or more"),
        ({"method": "exact", "projections": 1}, 'projections applies only to method="projection"'),
        ({"metric": "l3"}, "unknown metric 'l3'"),
        ({"metric": "l1", "larger_is_worse": True}, "larger_is_worse applies to functions only"),
    ):
        with pytest.raises(pt2qa.SelectionError, match=says):
            measured(**options)
    assert measured(method="exact", metric="SQNR").metric == "sqnr"


def test_ranks_agree_on_the_method_of_the_first_and_start_anew_where_theirs_was_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = forked()
    data = [torch.randn(size, 6) for size in (0, 5, 3)]
    told: list[Any] = []

    def begun(agreed: Any) -> tuple[analysis._Analysis, list[Tensor]]:
        monkeypatch.setattr(analysis, "first_anywhere", lambda own: told.append(own) or agreed)
        own = analysis._Analysis(
            pair,
            find_site_groups(pair.program, None),
            OutputMetric.of("sqnr", None),
            None,
            "auto",
            None,
            SimpleNamespace(update=lambda: None),
            Verification(pair.graphs),
            Positions(pair.quantized, pair.program, None),
        )
        return own, list(own.agree(iter(data)))

    # Of this size the exact method is the cheaper one; the batch with samples is measured, the last one is left.
    same, left = begun((True, ["chosen elsewhere"]))
    assert told[-1][0] is True
    assert 'method="auto" took the exact method' in told[-1][1][0]
    assert (same.method, same.choices, same.batches, left) == ("exact", ["chosen elsewhere"], 2, data[2:])
    assert [len(own) for own in same.ledger.parts.values()] == [len(pair.sites) + 1]
    other, left = begun((False, ["chosen elsewhere"]))
    assert (other.method, other.choices, other.batches, other.number) == ("projection", ["chosen elsewhere"], 0, -1)
    assert [id(batch) for batch in left] == [id(batch) for batch in data]
    assert (other.seen, other.projection, other.notes, dict(other.ledger.by_content)) == (None, None, [], {})
    for batch in left:
        other.add(batch)
    assert (other.batches, list(other.ledger.set_apart)) == (3, [0])
    assert other.projection is not None
    alone, left = begun(None)
    assert (alone.method, alone.batches, len(left)) == ("auto", 2, 1)

    def interrupted() -> Any:
        raise KeyboardInterrupt
        yield

    told.clear()
    with pytest.raises(KeyboardInterrupt):
        alone.agree(interrupted())
    assert told == [None]
