"""The pieces of a search for bad cases, each against a computation by hand: values, metrics, labels, ranks, inputs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pt2qa
from pt2qa._bad_cases import report as bad_cases_report
from pt2qa._bad_cases.case_metrics import (
    BUILT_IN,
    LARGE,
    OutputPair,
    Scores,
    as_targets,
    chosen_metrics,
    count_labels,
    output_pairs,
)
from pt2qa._bad_cases.report import LabelCounts, check_structure, rebuild, stored_dtype
from pt2qa._bad_cases.search import CaseBatch, Feedback, cut, stored
from pt2qa._bad_cases.standings import Found, Standing
from pt2qa._capture.inputs import detached
from pt2qa._simulator.data import LEADING, Layout
from pt2qa.report import BadCases, CaseRow, Environment, Ranking, StoredCase

GENERATOR = torch.Generator().manual_seed(0)


def both(*shape: int) -> tuple[Tensor, Tensor]:
    reference = torch.randn(shape, generator=GENERATOR)
    return reference, reference + 0.1 * torch.randn(shape, generator=GENERATOR)


def by_hand(metric: str, reference: Tensor, quantized: Tensor) -> float:
    ref, quant = (np.asarray(side.double()).ravel() for side in (reference, quantized))
    error = ref - quant
    if metric == "kl":
        p, q = (side.double().reshape(-1, side.shape[-1]).softmax(-1).numpy() for side in (reference, quantized))
        return float((p * np.log(p / q)).sum(-1).mean())
    return float(
        {
            "sqnr": lambda: 10 * np.log10((ref**2).sum() / (error**2).sum()),
            "cosine": lambda: ref @ quant / np.linalg.norm(ref) / np.linalg.norm(quant),
            "l1": lambda: np.abs(error).mean(),
            "atol": lambda: np.abs(error).max(),
        }[metric]()
    )


# -- one output --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", BUILT_IN)
@pytest.mark.parametrize("axis", [0, 1, None])
def test_each_sample_has_the_number_of_its_own_values(metric: str, axis: int | None) -> None:
    reference, quantized = both(3, 4, 5)
    output = OutputPair("output", reference, quantized, axis)
    samples = (
        [(reference, quantized)]
        if axis is None
        else list(zip(reference.unbind(axis), quantized.unbind(axis), strict=True))
    )
    scores = BUILT_IN[metric].scores(output)
    assert list(scores.places) == ([-1] if axis is None else list(range(len(samples))))
    assert list(scores.numbers) == pytest.approx([by_hand(metric, *sample) for sample in samples])
    assert list(scores.notes) == [""] * len(samples)
    keep = torch.tensor([[True, True, False, True], [True, False, False, False], [False, True, True, True]])
    if axis == 0:
        masked = BUILT_IN[metric].scores(replace(output, layout=LEADING, keep=keep))
        kept = [(ref[own], quant[own]) for (ref, quant), own in zip(samples, keep, strict=True)]
        assert list(masked.numbers) == pytest.approx([by_hand(metric, *each) for each in kept])
    if axis is None:
        (whole,) = BUILT_IN[metric].scores(replace(output, layout=LEADING, keep=keep)).numbers
        assert whole == pytest.approx(by_hand(metric, reference[keep], quantized[keep]))


def test_a_vector_has_one_number_by_sample_and_none_by_kl() -> None:
    reference, quantized = both(4)
    output = OutputPair("output", reference, quantized, 0)
    numbers = BUILT_IN["l1"].scores(output).numbers
    assert list(numbers) == pytest.approx((reference - quantized).abs().double().tolist())
    assert BUILT_IN["kl"].scores(output).problem == "kl needs an axis of classes, the last one"
    assert BUILT_IN["kl"].scores(replace(output, axis=None)).problem == ""
    integers = OutputPair("output", torch.tensor([[1, 2]]), torch.tensor([[1, 3]]), 0)
    assert BUILT_IN["kl"].scores(integers).problem == "kl needs floating-point logits, not int64"
    assert list(BUILT_IN["l1"].scores(integers).numbers) == [0.5]
    mixed = OutputPair("output", torch.ones(1, 2), torch.tensor([[1, 3]]), 0)
    assert BUILT_IN["kl"].scores(mixed).problem == "kl needs floating-point logits, not float32"
    unlike = OutputPair("output", torch.ones(1, 2), torch.ones(1, 3), 0)
    assert BUILT_IN["l1"].scores(unlike).problem == "shapes differ: (1, 2) and (1, 3)"
    assert BUILT_IN["l1"].scores(replace(unlike, problem="other")).problem == "other"


def test_numbers_that_are_not_defined_have_a_reason() -> None:
    reference = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, inf], [nan, 1.0]])
    quantized = torch.tensor([[1.0, 2.5], [1.0, 0.0], [1.0, inf], [1.0, 1.0]])
    output = OutputPair("output", reference, quantized, 0)
    sqnr, cosine = BUILT_IN["sqnr"].scores(output), BUILT_IN["cosine"].scores(output)
    assert [math.isnan(number) for number in sqnr.numbers] == [False, True, False, True]
    assert [math.isnan(number) for number in cosine.numbers] == [False, True, False, True]
    assert sqnr.numbers[2] == inf
    assert cosine.notes[0] == sqnr.notes[0] == ""
    assert all(sqnr.notes[place] for place in (1, 2, 3))
    # The errors of a zero reference are defined; the cosine is the only number without a reason of the sums.
    zero = OutputPair("output", torch.ones(1, 2), torch.zeros(1, 2), 0)
    assert list(BUILT_IN["cosine"].scores(zero).notes) == ["one of the two is all zero"]
    assert list(BUILT_IN["kl"].scores(output).notes)[3] == "NaN or infinite logits"


def test_large_samples_complex_ones_and_those_without_elements_are_summed_one_by_one() -> None:
    for reference, quantized in (
        both(2, LARGE),
        both(2, LARGE - 1),
        tuple(torch.view_as_complex(x) for x in both(2, 3, 2)),
        (torch.ones(2, 3), torch.ones(2, 3) + 1j),
        (torch.ones(2, 3) + 1j, torch.ones(2, 3)),
    ):
        sums = OutputPair("output", reference, quantized, 0).sums
        noise = (reference - quantized).abs().double().square().sum(1)
        assert [each.noise for each in sums] == pytest.approx(noise.tolist(), rel=1e-5)
    nothing = OutputPair("output", torch.ones(2, 0), torch.ones(2, 0), 0)
    assert [each.count for each in nothing.sums] == [0, 0]


def test_positions_are_those_of_the_first_other_token_and_of_the_lowest_sqnr() -> None:
    reference = torch.tensor([[[3.0, 0.0], [0.0, 4.0], [1.0, 0.0], [5.0, 0.0]]] * 2)
    quantized = reference.clone()
    quantized[0, 1] = torch.tensor([4.0, 0.0])  # another token, and all of the signal is noise
    quantized[0, 2] = torch.tensor([0.0, 2.0])  # another token, and five times as much noise as signal
    quantized[0, 3] = torch.tensor([-50.0, 9.0])  # does not count
    quantized[1, 0] = torch.tensor([2.0, 0.0])  # noise alone
    keep = torch.tensor([[True, True, True, False]] * 2)
    output = OutputPair("output", reference, quantized, 0, layout=LEADING, keep=keep)
    assert output.positions == [(1, 2), (-1, 0)]
    assert replace(output, layout=Layout(None, (1,))).positions == [(1, 2), (-1, 0)]
    classes = OutputPair("output", reference.argmax(-1), quantized.argmax(-1), 0, layout=LEADING, keep=keep)
    # Class 0 of the reference, where the quantized model has 1, is no signal: no SQNR is lower.
    assert classes.positions == [(1, 2), (-1, -1)]
    none = [(-1, -1)] * 2
    assert replace(output, layout=Layout(0, (2,))).positions == none
    assert replace(output, keep=None).positions == none
    assert replace(output, quantized=quantized[..., :1]).positions == none
    assert replace(output, axis=None).positions == none[:1]
    images = reference[..., None].expand(-1, -1, -1, 3)
    assert (
        replace(output, reference=images, quantized=quantized[..., None].expand(-1, -1, -1, 3)).positions[0] != none[0]
    )


def test_a_quantized_model_that_alone_is_not_finite() -> None:
    reference = torch.tensor([[1.0, 2.0], [nan, 1.0], [inf, 1.0]])
    quantized = torch.tensor([[1.0, inf], [1.0, 1.0], [inf, 1.0]])
    output = OutputPair("output", reference, quantized, 0)
    assert [output.nonfinite(place) for place in range(3)] == [True, False, False]
    assert output.nonfinite(-1)  # of a batch as a whole, by a metric of the user
    assert not replace(output, quantized=reference).nonfinite(-1)
    assert not replace(output, problem="nested differently").nonfinite(0)
    assert not OutputPair("output", reference, quantized[:, :1], 0).nonfinite(0)
    keep = torch.tensor([[True, False], [True, True], [True, True]])
    assert not replace(output, layout=LEADING, keep=keep).nonfinite(0)


def test_outputs_are_paired_by_leaf_with_the_samples_where_both_have_as_many() -> None:
    reference = {"a": torch.ones(2, 3), "b": torch.ones(3), "c": None, "d": 4, "e": torch.ones(2)}
    quantized = {"a": torch.ones(2, 3), "b": torch.ones(2), "c": None, "d": 5, "e": torch.ones(3)}
    found = list(output_pairs(reference, quantized, 0, 2, [None] * 5, None))
    assert [(each.name, each.axis, each.problem) for each in found] == [
        ("output.a", 0, ""),
        ("output.b", None, ""),
        ("output.c", None, "None is not a tensor"),
        ("output.d", None, ""),
        ("output.e", None, ""),
    ]
    assert [each.axis for each in output_pairs(reference, reference, 1, 3, [None] * 5, None)] == [
        1,
        None,
        None,
        None,
        None,
    ]
    assert [each.axis for each in output_pairs(reference, reference, None, 2, [None] * 5, None)] == [None] * 5
    assert (found[3].reference, found[3].quantized) == (torch.tensor(4), torch.tensor(5))
    (text,) = output_pairs("x", torch.ones(2), 0, 2, [None], None)
    assert (text.problem, text.axis) == ("str is not a tensor", None)
    (other,) = output_pairs([torch.ones(2)], [torch.ones(2)] * 2, 0, 2, [None], None)
    assert (other.problem, other.quantized) == ("reference and quantized results are nested differently", None)
    keep = torch.ones(2, 3, dtype=torch.bool)
    (masked,) = output_pairs(torch.ones(2, 3), torch.ones(2, 3), 0, 2, [LEADING], keep)
    assert (masked.layout, masked.keep) == (LEADING, keep)


# -- a metric of the user ----------------------------------------------------------------------------------------------


def test_a_users_metric_has_one_number_a_sample_or_one_for_the_batch() -> None:
    reference, quantized = both(3, 4)
    output = OutputPair("output", reference, quantized, 0)

    def scored(function: Any, output: OutputPair = output, worst: Any = "largest") -> Scores:
        return pt2qa.CaseMetric("own", function, worst).scores(output)

    assert list(scored(lambda r, q: torch.tensor([1.0, nan, 3.0])).notes) == ["", "the metric is nan", ""]
    assert scored(lambda r, q: 2).numbers == [2.0]
    assert scored(lambda r, q: torch.tensor([2.0])).places == [-1]
    whole = replace(output, axis=None)
    several = torch.tensor([2.0, nan, 5.0])
    assert scored(lambda r, q: several, whole).numbers == [5.0]
    assert scored(lambda r, q: several, whole, "smallest").numbers == [2.0]
    silent = scored(lambda r, q: torch.tensor([nan, nan]), whole)
    assert (math.isnan(silent.numbers[0]), list(silent.notes)) == (True, ["the metric is nan"])
    assert list(scored(lambda r, q: several, whole).notes) == [""]
    nothing = scored(lambda r, q: torch.empty(0), whole)
    assert math.isnan(nothing.numbers[0])
    # What has no other side is no matter of a metric; all else is.
    other = OutputPair("output", reference, None, None, "nested differently")
    assert scored(lambda r, q: 1.0, other).problem == "nested differently"
    unlike = OutputPair("output", None, torch.ones(2), None, "None is not a tensor")
    assert scored(lambda r, q: 7.0, unlike).numbers == [7.0]
    masked = replace(
        output, layout=LEADING, keep=torch.tensor([[True] * 4, [True, False, False, False], [True, True, False, False]])
    )
    seen: list[tuple[int, ...]] = []

    def largest(reference: Tensor, quantized: Tensor) -> Tensor:
        seen.append(tuple(reference.shape))
        return (reference - quantized).abs().amax(1)

    numbers = scored(largest, masked).numbers
    assert seen == [(1, 4), (1, 1), (1, 2)]
    assert numbers == pytest.approx(
        [float((reference - quantized)[place, :end].abs().max()) for place, end in enumerate((4, 1, 2))]
    )


def test_metrics_are_chosen_by_name() -> None:
    assert chosen_metrics("SQNR", with_targets=False) == [BUILT_IN["sqnr"]]
    own = pt2qa.CaseMetric("own", lambda ref, quant: 0.0)
    assert chosen_metrics([own, "flips", "kl"], with_targets=True) == [own, BUILT_IN["kl"]]
    assert {name: each.worst for name, each in BUILT_IN.items()} == {
        "sqnr": "smallest",
        "cosine": "smallest",
        "l1": "largest",
        "atol": "largest",
        "kl": "largest",
    }


# -- labels ------------------------------------------------------------------------------------------------------------


def test_labels_are_counted_by_sample() -> None:
    targets = torch.tensor([[0, 1, 2], [1, -100, 1]])
    right = torch.nn.functional.one_hot(targets.clamp(min=0), 3).float()
    reference, quantized = right.clone(), right.clone()
    reference[0, 0] = reference[0, 0].flip(0)  # wrong in the reference alone
    quantized[0, 2] = quantized[0, 2].flip(0)
    quantized[1, 0] = quantized[1, 0].roll(1)
    quantized[1, 2] = quantized[1, 2].roll(1)
    output = OutputPair("output", reference, quantized, 0)
    for pair in (output, replace(output, reference=reference.argmax(-1), quantized=quantized.argmax(-1))):
        found = count_labels(pair, targets)
        assert found is not None
        counts, scores = found
        assert counts == LabelCounts("output", targets=5, ref_right=4, quant_right=2, lost=3, gained=1)
        assert (list(scores.places), list(scores.numbers)) == ([0, 1], [1.0, 2.0])
    for axis, numbers in ((1, [1.0, 0.0, 2.0]), (None, [3.0])):
        along = count_labels(replace(output, axis=axis), targets)
        assert along is not None
        assert list(along[1].numbers) == numbers
    single = count_labels(OutputPair("output", reference[0], quantized[0], 0), targets[0])
    assert single is not None
    assert list(single[1].numbers) == [0.0, 0.0, 1.0]


def test_what_names_no_class_has_no_labels() -> None:
    targets = torch.tensor([0, 1])
    scores = torch.ones(2, 3)
    for reference, quantized in (
        (scores, torch.ones(3, 3)),
        (torch.ones(2), torch.ones(2)),
        (scores.long(), scores.long()),
        (None, scores),
        (scores, None),
        (torch.ones(2, 3, 3), torch.ones(2, 3, 3)),
        (torch.ones(3, 3), torch.ones(3, 3)),
    ):
        assert count_labels(OutputPair("output", reference, quantized, 0), targets) is None
    assert count_labels(OutputPair("output", scores, scores, 0, problem="x"), targets) is None
    # Scores of another batch size than the targets': the loss of the batch as a whole.
    whole = count_labels(OutputPair("output", scores, scores.flip(1), None), targets)
    assert whole is not None
    assert (list(whole[1].places), list(whole[1].numbers)) == ([-1], [0.0])
    assert as_targets([1, 2]).tolist() == [1, 2]
    for wrong in (torch.ones(2), torch.ones(2).to(torch.complex64)):
        with pytest.raises(pt2qa.BatchError, match="expected integer class numbers"):
            as_targets(wrong)


# -- standings ---------------------------------------------------------------------------------------------------------


def standing(numbers: list[float], worst: Any = "largest", k: int = 2, metric: str = "own") -> Standing:
    values = torch.tensor([[1.0], [1.0], [1.0]])
    output = OutputPair("output", values, torch.tensor([[1.0], [inf], [1.0]]), 0)
    notes = ["no number" if math.isnan(number) else "" for number in numbers]
    scores = Scores(range(len(numbers)), numbers, notes)
    return Standing(metric, "output", worst, k).of_batch(scores, output)


def test_ranks_of_one_batch_and_what_is_counted() -> None:
    found = standing([3.0, nan, 5.0])
    # The quantized model alone is infinite in sample 1, which is worst of all.
    assert [(entry.key, entry.row.value, entry.tier) for entry in found.entries][1:] == [((0, 2), 5.0, 1)]
    assert (found.entries[0].key, found.entries[0].tier) == ((0, 1), 0)
    assert (found.values, found.total, found.finite, found.nonfinite, found.without_number) == (2, 8.0, 2, 1, 0)
    last = standing([nan, 4.0, nan], k=3)
    assert [entry.key[1] for entry in last.entries] == [1, 0, 2]
    assert (last.without_number, last.reason, last.nonfinite) == (2, "no number", 0)
    assert [entry.key[1] for entry in standing([3.0, 4.0, 3.0], "smallest", 3).entries] == [0, 2, 1]
    assert [entry.key[1] for entry in standing([0.0, 0.0, 2.0], k=3, metric="flips").entries] == [2]
    infinite = standing([inf, 4.0, 2.0])
    assert (infinite.values, infinite.total, infinite.finite) == (3, 6.0, 2)
    assert infinite.ranking() == Ranking("own", "output", "largest", 3, 3.0, 0, 0)
    assert math.isnan(standing([inf, inf, inf]).ranking().mean)
    problem = Standing("own", "output", "largest", 2).of_batch(
        Scores(problem="why"), OutputPair("output", None, None, None)
    )
    assert (problem.without_number, problem.reason, problem.entries) == (1, "why", ())
    notes = [str(note) for note in replace(found, without_number=2).notes()]
    assert notes == [
        "output: 1 without own, NaN or infinite in the quantized model only; ranked worst",
        "output: 2 without own (nan); ranked last",
    ]
    assert list(standing([1.0, 2.0, 3.0]).notes()) == []


def test_later_batches_are_numbered_on() -> None:
    first, second = standing([3.0, 4.0, 1.0]), standing([9.0, 4.0, 2.0])
    both = first.merge(second, batches=2, samples=5)
    assert [(entry.key, entry.row.index, entry.row.value) for entry in both.entries] == [
        ((2, 0), 5, 9.0),
        ((0, 1), 1, 4.0),
    ]
    assert (both.values, both.total, both.k) == (6, 23.0, 2)
    rows = list(both.rows())
    assert [(row.rank, row.batch, row.sample, row.index, row.value, row.note) for row in rows] == [
        (1, 2, 0, 5, 9.0, ""),
        (2, 0, 1, 1, 4.0, ""),
    ]
    broken = next(iter(standing([nan, nan, 1.0], k=3).rows()))
    assert (broken.sample, broken.note) == (1, "NaN or infinite in the quantized model only")
    whole = Standing("own", "output", "largest", 1).of_batch(
        Scores([-1], [2.0], [""]), OutputPair("output", torch.ones(2), torch.ones(2), None)
    )
    assert (whole.entries[0].key, whole.entries[0].row.index) == ((0, -1), 0)
    found = Found({("own", "output"): first}, {}, 2, 5).merge(Found({("own", "output"): second}, {}, 3, 7))
    assert (found.steps, found.samples) == (5, 12)
    assert found.keys == {(2, 0): 5, (0, 1): 1}
    assert found.standings["own", "output"].entries == both.entries


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_fed_inputs_are_filled_in_where_they_are_missing() -> None:
    feedback = Feedback({"s": "output[2]", "h": "output[1]"}, ("x", "h", "s", "mask"))
    state = {"h": "H", "s": "S"}
    assert feedback.fill("x", state) == ("x", "H", "S")
    assert feedback.fill(("x",), state) == ("x", "H", "S")
    assert feedback.fill(["x", None, "s"], state) == ("x", "H", "s")
    assert feedback.fill(("x", "h", None, "m"), state) == ("x", "h", "S", "m")
    assert feedback.fill(("x", None, None, "m", "more"), state) == ("x", "H", "S", "m", "more")
    assert feedback.fill({"x": "x", "s": "s"}, state) == {"x": "x", "h": "H", "s": "s"}
    given = {"x": "x"}
    feedback.fill(given, state)
    assert given == {"x": "x"}
    with pytest.raises(pt2qa.BatchError, match=r"has no input 'h'. feedback takes it from output\[1\]"):
        feedback.fill("x", {})
    plain = Feedback({}, ("x",))
    assert plain.fill(given, {}) is given
    assert plain.state(["anything"]) == {}


def test_a_sample_is_cut_out_of_all_that_has_its_axis() -> None:
    batch = {"x": torch.arange(6).reshape(3, 2), "scale": torch.tensor(2.0), "n": 3}
    own = cut(batch, 1, 0)
    assert (own["x"].tolist(), own["scale"].item(), own["n"]) == ([[2, 3]], 2.0, 3)
    along = cut((torch.arange(6).reshape(3, 2), torch.arange(3)), 1, 1)
    assert [each.tolist() for each in along] == [[[1], [3], [5]], [0, 1, 2]]
    view = detached(own)
    batch["x"].zero_()
    assert view["x"].tolist() == [[2, 3]]


STRUCTURES: list[Any] = [
    torch.arange(3.0),
    (torch.ones(1, 2, dtype=torch.bfloat16), [None, True, 2, 0.5, "text"], {"a": torch.tensor([1, 2])}),
    {"z": torch.tensor([[1 + 2j, -1j]]).conj(), "e": torch.ones(1, 2, dtype=torch.float8_e5m2), "d": torch.tensor(7.0)},
]


@pytest.mark.parametrize("batch", STRUCTURES)
def test_inputs_come_back_as_they_were_repeated_along_the_axis(batch: Any) -> None:
    case, arrays = stored(CaseBatch(batch, 9, 1), (4, -1))
    assert (case.batch, case.sample, case.index, case.repeats) == (4, -1, 9, 1)
    assert arrays.keys() == check_structure(case.structure, (4, -1), arrays)
    assert {name.rsplit("/", 1)[0] for name in arrays} == {"4/-1"}
    for repeats in (1, 3):
        again = rebuild(case.structure, (4, -1), arrays, repeats, 0)
        given, found = _leaves(batch), _leaves(again)
        assert len(given) == len(found)
        for left, right in zip(given, found, strict=True):
            if isinstance(left, Tensor):
                expected = left.resolve_conj()
                if repeats > 1 and left.dim():
                    expected = torch.cat(
                        [
                            expected.to(torch.complex64 if left.is_complex() else torch.float32)[
                                n : n + 1
                            ].repeat_interleave(repeats, 0)
                            for n in range(len(left))
                        ]
                    ).to(left.dtype)
                assert (right.dtype, right.shape) == (expected.dtype, expected.shape)
                assert torch.equal(right.to(torch.complex64), expected.to(torch.complex64))
            else:
                assert (left, type(left)) == (right, type(right))
    assert isinstance(again, type(batch))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for name, item in value.items() for leaf in (name, *_leaves(item))]
    return [value]


@pytest.mark.parametrize("batch", [{"a": torch.ones(1), 1: torch.ones(1)}, {"a", "b"}, 1j])
def test_inputs_that_a_report_cannot_hold_are_refused_by_their_type(batch: Any) -> None:
    with pytest.raises(
        pt2qa.BatchError, match=f"an input is of type {type(batch).__name__}, which a report cannot hold"
    ):
        stored(CaseBatch([batch], 9, 1), (4, -1))


def test_a_deep_structure_is_read_to_the_last_level_that_is_allowed() -> None:
    def nested(levels: int) -> str:
        return '{"list": [' * levels + '{"value": 1}' + "]}" * levels

    assert check_structure(nested(64), (0, 0), {}) == set()
    with pytest.raises(pt2qa.ReportError, match="nested more than 64 deep"):
        check_structure(nested(65), (0, 0), {})
    for kind in ("tuple", "list"):
        with pytest.raises(pt2qa.ReportError, match="expected a tensor, a value"):
            check_structure(json.dumps({kind: [], "more": 1}), (0, 0), {})
    for text in ('{"dict": [["a", {"value": 1}, 2]]}', '{"dict": [[1, {"value": 1}]]}', '{"dict": ["ab"]}'):
        with pytest.raises(pt2qa.ReportError, match="expected pairs of name and value"):
            check_structure(text, (0, 0), {})
    for text in ('{"tensor": 0, "dtype": "int8", "x": 1}', '{"value": 1, "x": 1}', '{"dict": [], "x": 1}'):
        with pytest.raises(pt2qa.ReportError, match="expected a tensor, a value"):
            check_structure(text, (0, 0), {})
    assert [stored_dtype(name) for name in ("float8_e4m3fn", "complex128", "uint64", "qint8")] == [
        "float32",
        "float64",
        "uint64",
        "",
    ]
    complex_case = json.dumps({"tensor": 0, "dtype": "complex64"})
    for shape in ((), (2, 1), (2, 3)):
        with pytest.raises(pt2qa.ReportError, match="expected float32"):
            check_structure(complex_case, (0, 0), {"0/0/0": np.zeros(shape, np.float32)})
    assert check_structure(complex_case, (0, 0), {"0/0/0": np.zeros((1, 2), np.float32)}) == {"0/0/0"}


# -- the report --------------------------------------------------------------------------------------------------------


def report(rows: tuple[CaseRow, ...], rankings: tuple[Ranking, ...], **fields: Any) -> BadCases:
    keys = dict.fromkeys((row.batch, row.sample) for row in rows)
    known: dict[str, Any] = {
        "labels": (),
        "cases": tuple(StoredCase(*key, 0, 1, json.dumps({"tensor": 0, "dtype": "float32"})) for key in keys),
        "inputs": {f"{batch}/{sample}/0": np.full((1, 2), batch, np.float32) for batch, sample in keys},
        "batch_axis": 0,
        "notes": (),
        "steps": 8,
        "samples": 64,
        "quantizer": "xnnpack",
        "model": "Net",
        "environment": Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a"),
    }
    return BadCases(rows=rows, rankings=rankings, **{**known, **fields})


def about(value: float, sample: int = 1, metric: str = "sqnr", **ranking: Any) -> str:
    row = CaseRow(metric, "output", 1, value, 3, sample, 25)
    known = Ranking(metric, "output", "smallest", 62, 21.5, 0, 0)
    return report((row,), (replace(known, **ranking),)).summary().splitlines()[-2]


def test_each_ranking_has_its_sentence() -> None:
    assert about(8.25) == "sqnr of output: worst is sample 25 (batch 3, place 1), 8.25 dB; the mean of 62 is 21.5 dB."
    assert about(8.25, -1) == "sqnr of output: worst is batch 3 as a whole, 8.25 dB; the mean of 62 is 21.5 dB."
    assert (
        about(8.25, 0, "kl")
        == "kl of output: worst is sample 25 (batch 3, place 0), 8.25 nats; the mean of 62 is 21.5 nats."
    )
    assert about(8.25, 1, "own", mean=nan) == "own of output: worst is sample 25 (batch 3, place 1), 8.25."
    assert about(inf) == "sqnr of output: no sample differs."
    assert about(inf, metric="own", mean=nan).endswith("(batch 3, place 1), inf.")
    missing = about(nan, nonfinite=2, without_number=3, mean=nan)
    assert missing == (
        "sqnr of output: worst is sample 25 (batch 3, place 1), no number. 2 NaN or infinite in the quantized model "
        "only, ranked worst of all. 3 without a number (nan), ranked last."
    )
    assert about(inf, without_number=1, reason="zero") == (
        "sqnr of output: no sample differs. 1 without a number (zero), ranked last."
    )
    none = report((), (Ranking("flips", "output", "largest", 9, 0.0, 0, 0),))
    assert none.summary().splitlines()[-2:] == ["flips of output: no bad case.", "No case was kept."]
    advice = "To see where they lose accuracy: pt2qa.compare_layers(pair, report.batches())."
    some = report(
        (CaseRow("sqnr", "output", 1, 8.25, 3, 1, 25),), (Ranking("sqnr", "output", "smallest", 1, 8.25, 0, 0),)
    )
    assert some.summary().splitlines()[-1] == advice


ROWS = (
    CaseRow("sqnr", "b", 1, 8.0, 3, 1, 25),
    CaseRow("sqnr", "b", 2, 9.0, 0, 4, 4),
    CaseRow("l1", "a", 1, 0.5, 7, -1, 56),
    CaseRow("l1", "a", 2, 0.25, 3, 1, 25),
)
RANKINGS = (Ranking("sqnr", "b", "smallest", 62, 21.5, 0, 0), Ranking("l1", "a", "largest", 8, 0.25, 0, 0))


def test_cases_come_worst_first_each_once_and_by_ranking() -> None:
    found = report(ROWS, RANKINGS)

    def firsts(batches: list[Any]) -> list[float]:
        return [float(batch[0, 0]) for batch in batches]

    assert firsts(found.batches()) == [3.0, 7.0, 0.0]
    assert firsts(found.batches("l1")) == [7.0, 3.0]
    assert firsts(found.batches(output="b")) == [3.0, 0.0]
    assert found.worst(output="a") == found.worst("l1") == ROWS[2:]
    for given in ({"metric": "kl"}, {"output": "c"}, {"metric": "sqnr", "output": "a"}):
        with pytest.raises(pt2qa.ReportError, match=r"no ranking by .* there are: sqnr of b, l1 of a"):
            found.batches(**given)
    with pytest.raises(pt2qa.ReportError, match=r"there are: none"):
        report((), ()).worst()
    assert [row.output for row in found._ordered("name")[0]] == ["a", "a", "b", "b"]
    assert [row.index for row in found._ordered("graph")[0]] == [4, 25, 25, 56]
    assert found._ordered("worst") == (ROWS, None)
    of = "Net, quantized by xnnpack: 3 bad cases of 64 samples in 8 batches"
    assert [found._title(sort) for sort in ("worst", "graph", "name", "value")] == [
        f"{of}, worst first",
        f"{of}, in the loader's order",
        f"{of}, by output",
        f"{of}, by value",
    ]
    assert repr(found) == "<BadCases of Net, xnnpack: 3 cases of 64 samples, 2 rankings>"


def test_the_first_position_is_shown_and_none_is_blank() -> None:
    assert [bad_cases_report._position(value) for value in (-1, 0, 1)] == ["", "0", "1"]


def test_values_have_the_unit_and_direction_of_their_ranking() -> None:
    mixed, single = report(ROWS, RANKINGS), report(ROWS[:2], RANKINGS[:1])
    (value,) = [each for each in mixed.columns() if each.name == "value"]
    assert (mixed.meant(value).unit, single.meant(value).unit) == ("", "dB")
    assert mixed.meant(value, ("sqnr", "b")).worse == "smaller"
    assert mixed.meant(value, ("l1", "a")).worse == "larger"
    assert single.meant(value).worse == "larger"  # of all rankings together
    (batch,) = [each for each in mixed.columns() if each.name == "batch"]
    assert mixed.meant(batch, ("sqnr", "b")) is batch


def test_labels_are_shown_with_their_rates() -> None:
    labels = (
        LabelCounts("output", 64, 48, 46, 3, 1),
        LabelCounts("other", 0, 0, 0, 0, 0),
        LabelCounts("one", 1, 1, 0, 1, 0),
    )
    entries = next(iter(report(ROWS, RANKINGS, labels=labels)._after(None))).entries  # type: ignore[union-attr]
    assert list(entries) == [
        "output: 64 targets, reference right in 48 (75.00 %), quantized in 46 (71.88 %); 3 lost, 1 gained",
        "other: 0 targets, reference right in 0 (- %), quantized in 0 (- %); 0 lost, 0 gained",
        "one: 1 target, reference right in 1 (100.00 %), quantized in 0 (0.00 %); 1 lost, 0 gained",
    ]


def test_inputs_must_fit_their_description_to_the_last_byte() -> None:
    found = report(ROWS[:1], RANKINGS[:1])
    largest = 2**32 // 8  # of eight bytes each
    assert replace(found, cases=(replace(found.cases[0], repeats=largest),)).cases[0].repeats == largest
    with pytest.raises(pt2qa.ReportError, match=f"{largest + 1} repeats of its inputs would take {2**32 + 8} bytes"):
        replace(found, cases=(replace(found.cases[0], repeats=largest + 1),))
    with pytest.raises(pt2qa.ReportError, match="repeats is 0, expected 1 or more"):
        replace(found, cases=(replace(found.cases[0], repeats=0),))
    nothing = {"3/1/0": np.zeros((2**31, 0), np.float32)}
    with pytest.raises(pt2qa.ReportError, match="3 repeats of its inputs would take"):
        replace(found, cases=(replace(found.cases[0], repeats=3),), inputs=nothing)
    plain = StoredCase(3, 1, 25, 2**32, '{"value": 3}')
    assert replace(found, cases=(plain,), inputs={}).batch() == 3
    with pytest.raises(pt2qa.ReportError, match=f"{2**32 + 1} repeats of its inputs would take {2**32 + 1} bytes"):
        replace(found, cases=(replace(plain, repeats=2**32 + 1),), inputs={})
    with pytest.raises(pt2qa.ReportError, match="the inputs of sample 2 of batch 3 are not in the report"):
        found.batch(CaseRow("sqnr", "b", 1, 8.0, 3, 2, 25))
    with pytest.raises(pt2qa.ReportError, match="the inputs of sample 1 of batch 2 are not in the report"):
        found.batch(CaseRow("sqnr", "b", 1, 8.0, 2, 1, 25))
    whole = replace(found, batch_axis=-1)
    assert whole.batch().shape == (1, 2)
