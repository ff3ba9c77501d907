"""Sums by place and batch become rows: each column of each row against NumPy, by every metric."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pt2qa
from pt2qa._sensitivity.ledger import Ledger, Place, precision_notes, results
from pt2qa._sensitivity.metrics import OutputMetric, fault_of, float_leaves, paired_leaves, signal_of
from pt2qa._sensitivity.precision import FEWEST, error_of
from pt2qa._sensitivity.report import ALL_SITES, SensitivityBatch, SensitivityPart
from pt2qa.report import SetApart
from tests.flows import residual_pair
from tests.models import images

PLACES = [
    Place("a", "activation", "conv2d", "int8", 10.4, 0.25, 0, 3, "m", 1),
    Place("b", "weight", "linear", "uint8", 31.6, 0.75, 1, 4, "n", 2),
    Place("c"),
]
SAMPLES = [2, 3]


def outputs(seed: int, samples: int) -> dict[str, Tensor]:
    """Two outputs that count, of several shapes, and one that does not."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(samples, 2, 4, generator=generator)
    return {"scores": scores, "sum": scores.sum(), "classes": scores.argmax(-1)}


def of_place(place: int, reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a place quantized: the further, the more is lost; all of them lose most."""
    step = {ALL_SITES: 0.5, 0: 0.05, 1: 0.25, 2: 0.125}[place]
    return {**reference, "scores": (reference["scores"] / step).round() * step, "sum": reference["sum"] + step / 10}


def largest_error(reference: dict[str, Tensor], quantized: dict[str, Tensor]) -> float:
    return float((reference["scores"] - quantized["scores"]).abs().max())


def direct(metric: str, place: int) -> float:
    """The metric over both batches, in NumPy."""
    refs, quants, kl, losses = [], [], [], []
    for batch, samples in enumerate(SAMPLES):
        reference = outputs(batch, samples)
        quantized = of_place(place, reference)
        for name in ("scores", "sum"):
            refs.append(reference[name].double().numpy().ravel())
            quants.append(quantized[name].double().numpy().ravel())
            p, q = (
                side[name].double().reshape(-1, side[name].shape[-1] if side[name].dim() else 1)
                for side in (reference, quantized)
            )
            p, q = p.softmax(-1).numpy(), q.softmax(-1).numpy()
            kl += (p * np.log(p / q)).sum(-1).tolist()
        losses += [largest_error(reference, quantized)] * samples
    ref, quant = np.concatenate(refs), np.concatenate(quants)
    error = ref - quant
    return float(
        {
            "sqnr": lambda: 10 * math.log10((ref**2).sum() / (error**2).sum()),
            "cosine": lambda: ref @ quant / np.linalg.norm(ref) / np.linalg.norm(quant),
            "l1": lambda: np.abs(error).mean(),
            "atol": lambda: np.abs(error).max(),
            "kl": lambda: np.mean(kl),
            "largest_error": lambda: np.mean(losses),
        }[metric]()
    )


def noise_of(place: int) -> float:
    pairs = [
        (outputs(batch, samples), of_place(place, outputs(batch, samples))) for batch, samples in enumerate(SAMPLES)
    ]
    return sum(
        float((ref[name] - quant[name]).double().square().sum()) for ref, quant in pairs for name in ("scores", "sum")
    )


def ledger(metric: OutputMetric) -> Ledger:
    found = Ledger()
    for number, samples in enumerate(SAMPLES):
        reference = outputs(number, samples)
        found.begin(SensitivityBatch(f"batch {number}", samples, signal_of(reference), 8 * number))
        for place in (ALL_SITES, 0, 1, 2):
            found.add(metric.part(place, number, reference, of_place(place, reference), samples))
    return found


@pytest.mark.parametrize("metric", ["sqnr", "cosine", "l1", "atol", "kl", largest_error])
def test_every_number_of_a_report_is_that_of_numpy(metric: Any) -> None:
    chosen = OutputMetric.of(metric, None)
    found = results(PLACES, ledger(chosen), chosen)
    noises = [noise_of(place) for place in range(3)]
    order = sorted(range(3), key=lambda place: -noises[place])
    for place, row in enumerate(found["rows"]):
        known = PLACES[place]
        assert row.value == pytest.approx(direct(chosen.name, place), rel=1e-5, abs=1e-9)
        assert row.noise == pytest.approx(noises[place], rel=1e-5)
        assert row.noise_share == pytest.approx(noises[place] / sum(noises), rel=1e-5)
        assert row.rank == order.index(place) + 1
        assert (row.error, row.near_tie, row.flops) == (0.0, False, round(known.flops))
        for name in ("name", "kind", "op", "dtype", "flops_share", "site", "handle", "module", "region"):
            assert getattr(row, name) == getattr(known, name)
    assert found["value"] == pytest.approx(direct(chosen.name, ALL_SITES), rel=1e-5)
    assert found["noise"] == pytest.approx(noise_of(ALL_SITES), rel=1e-5)
    signal = sum(
        float(each.double().square().sum())
        for n, s in enumerate(SAMPLES)
        for each in [outputs(n, s)["scores"], outputs(n, s)["sum"]]
    )
    assert found["signal"] == pytest.approx(signal, rel=1e-6)
    assert (found["batches"], found["samples"], found["planned"], found["projections"]) == (2, 5, 3, 8)
    assert [(part.batch, part.place) for part in found["parts"]] == [(b, p) for b in range(2) for p in range(-1, 3)]


def test_which_way_is_worse_is_known_of_names_and_told_of_functions() -> None:
    known = {name: OutputMetric.of(name, None) for name in ("sqnr", "cosine", "l1", "atol", "kl")}
    assert [name for name, each in known.items() if each.smallest_is_worst] == ["sqnr", "cosine"]
    assert [name for name, each in known.items() if each.weighted] == ["kl"]
    given = {way: OutputMetric.of(largest_error, way) for way in (None, True, False)}
    assert {way: each.smallest_is_worst for way, each in given.items()} == {None: False, True: False, False: True}
    assert all(each.weighted and each.name == "largest_error" for each in given.values())

    class Callable:
        def __call__(self, reference: Any, quantized: Any) -> float:
            return 0.0

    assert OutputMetric.of(Callable(), None).name == "Callable"


def test_numbers_that_are_not_defined_are_nan() -> None:
    weighted, sqnr = OutputMetric.of("kl", None), OutputMetric.of("sqnr", None)
    assert math.isnan(weighted.value([SensitivityPart(0, 0, 0.0)], []))
    data = [SensitivityBatch("", 1, 0.0)]
    assert sqnr.value([SensitivityPart(0, 0, 0.0)], data) == math.inf
    assert math.isnan(sqnr.value([SensitivityPart(0, 0, 1.0)], data))
    broken = sqnr.part(0, 0, torch.ones(2), torch.tensor([1.0, math.nan]), 2)
    assert math.isnan(broken.noise)
    assert math.isnan(broken.largest)
    for metric in ("sqnr", "cosine", "l1", "atol"):
        assert math.isnan(OutputMetric.of(metric, None).value([broken], [SensitivityBatch("", 1, 2.0)]))


def test_what_has_an_error_is_a_tensor_of_real_or_complex_numbers_with_elements() -> None:
    given = {"a": torch.ones(2), "b": torch.ones(0), "c": torch.ones(2).long(), "d": torch.tensor([1 + 2j]), "e": 3.0}
    assert [leaf.tolist() for leaf in float_leaves(given)] == [[1.0, 1.0], [[1.0, 2.0]]]
    assert float_leaves({"only": torch.ones(0), "n": 1}) == []
    with pytest.raises(pt2qa.SelectionError, match="no output is a floating-point tensor"):
        float_leaves([torch.ones(2).long(), None])
    with pytest.raises(pt2qa.SelectionError, match=r"have the shapes \[\(2,\)\], with sites quantized \[\(3,\)\]"):
        paired_leaves(torch.ones(2), torch.ones(3))


def test_a_batch_without_a_number_has_a_reason() -> None:
    pair = residual_pair()
    values = pair.values(images())
    fine, broken = torch.ones(2, 4), torch.tensor([[1.0] * 4, [1.0, math.nan, 1.0, 1.0]])
    assert fault_of(pair.simulator, values, 3, 2, fine, fine) is None
    # Both models are finite on this batch, so what breaks is behind them.
    assert fault_of(pair.simulator, values, 3, 2, fine, broken) == SetApart(
        3, 2, -1, "quantized", "NaN", "post_process"
    )
    assert fault_of(pair.simulator, values, 3, 2, broken, broken) == SetApart(3, 2, -1, "both", "NaN", "post_process")
    nothing = fault_of(pair.simulator, values, 3, 2, torch.ones(0), torch.ones(0))
    assert nothing is not None
    assert (nothing.batch, nothing.samples) == (3, 2)


# -- ranks -------------------------------------------------------------------------------------------------------------


def ranked(parts: list[tuple[float, float]], metric: str = "sqnr") -> list[tuple[int, bool, float]]:
    """Rank, mark and share of rows of these noises and variances, of a signal of 100."""
    found = Ledger()
    found.begin(SensitivityBatch("", 1, 100.0, 4))
    found.add(SensitivityPart(ALL_SITES, 0, 1.0))
    for place, (noise, variance) in enumerate(parts):
        found.add(SensitivityPart(place, 0, noise, variance, absolute=noise, count=1))
    places = [Place(str(number)) for number in range(len(parts))]
    rows = results(places, found, OutputMetric.of(metric, None))["rows"]
    return [(row.rank, row.near_tie, row.noise_share) for row in rows]


def test_rows_within_the_errors_of_their_neighbours_are_marked() -> None:
    # Of 1 and 1.05 each is uncertain by a tenth or so; 4 and 0.25 are 6 dB away from them.
    found = ranked([(0.25, 1e-4), (1.0, 1e-2), (4.0, 1e-2), (1.05, 1e-2)])
    assert [(rank, near) for rank, near, _ in found] == [(4, False), (3, True), (1, False), (2, True)]
    assert [share for _, _, share in found] == pytest.approx([each / 6.3 for each in (0.25, 1.0, 4.0, 1.05)])


def test_equal_rows_are_marked_whatever_their_error_and_rows_without_a_value_come_last() -> None:
    assert [each[:2] for each in ranked([(1.0, 0.0), (1.0, 0.0), (2.0, 0.0)])] == [(2, True), (3, True), (1, False)]
    found = ranked([(math.nan, 0.0), (1.0, 0.0), (3.0, 0.0)])
    assert [each[:2] for each in found] == [(3, False), (2, False), (1, False)]
    assert all(math.isnan(share) for _, _, share in found)
    assert [share for _, _, share in ranked([(0.0, 0.0), (0.0, 0.0)])] == [0.0, 0.0]
    # Equal in the metric: the one with the more noise is the worse one.
    tied = Ledger([SensitivityBatch("", 1, 1.0)])
    for place, noise in ((ALL_SITES, 9.0), (0, 1.0), (1, 2.0)):
        tied.add(SensitivityPart(place, 0, noise, largest=5.0, count=1))
    rows = results([Place("x"), Place("y")], tied, OutputMetric.of("atol", None))["rows"]
    assert [row.rank for row in rows] == [2, 1]


# -- ledgers -----------------------------------------------------------------------------------------------------------


def test_rows_cover_the_finished_batches_or_else_the_first_that_counts() -> None:
    metric = OutputMetric.of("sqnr", None)
    found = Ledger([SensitivityBatch(name, samples, 1.0) for name, samples in (("a", 1), ("b", 2), ("c", 4))])
    found.set_apart[0] = SetApart(0, 1, -1, "batch", "NaN", "x")
    for place in (ALL_SITES, 0):
        found.add(SensitivityPart(place, 1, 1.0))
    # Nothing is finished: the rows of batch 1 that are there.
    begun = results(PLACES[:2], found, metric)
    assert [row.name for row in begun["rows"]] == ["a"]
    assert (begun["batches"], begun["samples"], begun["planned"]) == (1, 2, 2)
    found.add(SensitivityPart(1, 1, 1.0))
    found.add(SensitivityPart(ALL_SITES, 2, 1.0))
    done = results(PLACES[:2], found, metric)
    assert [row.name for row in done["rows"]] == ["a", "b"]
    assert (done["batches"], done["samples"], len(done["data"])) == (1, 2, 3)
    assert found.counted == [1, 2]
    assert found.has(1, 1)
    assert not found.has(1, 2)
    assert not found.has(0, 7)
    assert (found.noise, found.variance) == ({ALL_SITES: 2.0, 0: 1.0, 1: 1.0}, {ALL_SITES: 0.0, 0: 0.0, 1: 0.0})


def test_batches_are_taken_over_with_their_parts_and_faults_under_new_numbers() -> None:
    other = Ledger([SensitivityBatch(name, 1, 1.0) for name in ("a", "b", "a")])
    other.set_apart[1] = SetApart(1, 1, -1, "batch", "NaN", "x")
    other.add(SensitivityPart(0, 2, 3.0, 0.5))
    assert other.by_content == {"a": [0, 2], "b": [1]}
    own = Ledger()
    for number in (2, 1):
        own.append(other, number)
    assert [batch.fingerprint for batch in own.data] == ["a", "b"]
    assert own.set_apart == {1: other.set_apart[1]}
    assert own.parts[0][0].batch == 0
    assert (own.noise[0], own.variance[0]) == (3.0, 0.5)


def test_equal_batches_have_the_same_vectors_so_their_errors_add_up() -> None:
    found = Ledger([SensitivityBatch(name, 1, 1.0, 4) for name in ("a", "b", "a", "a")])
    for number in range(4):
        for place in (ALL_SITES, 0):
            found.add(SensitivityPart(place, number, 1.0, 0.01))
    # The variance of 3 times one estimate, and of another one.
    assert found.variance[0] == pytest.approx(3**2 * 0.01 + 0.01)
    [row] = results(PLACES[:1], found, OutputMetric.of("sqnr", None))["rows"]
    assert row.error == pytest.approx(error_of(4.0, 0.1))


def test_what_is_not_given_of_a_place_is_not_known() -> None:
    assert Place() == Place("", "activation", "", "", 0.0, 0.0, -1, -1, "", -1)
    found = Ledger([SensitivityBatch("a", 1, 1.0)])
    for place in (ALL_SITES, 1):
        found.add(SensitivityPart(place, 0, 1.0))
    # A place that is missing takes no later one with it.
    assert [row.name for row in results(PLACES, found, OutputMetric.of("sqnr", None))["rows"]] == ["b"]


# -- notes -------------------------------------------------------------------------------------------------------------


def noted(projections: list[int], parts: list[list[tuple[float, float]]], given: bool = False) -> list[str]:
    found = Ledger([SensitivityBatch(str(number), 1, 1.0, each) for number, each in enumerate(projections)])
    for batch, own in enumerate(parts):
        for place, (noise, variance) in enumerate(own):
            found.add(SensitivityPart(place, batch, noise, variance))
    return [str(note) for note in precision_notes(found, len(parts[0]), given=given)]


def test_notes_say_how_many_projections_it_took_and_whether_they_suffice() -> None:
    apart = [(1.0, 0.0), (100.0, 0.0)]
    close = [(1.0, 4.0), (1.001, 4.0)]
    assert noted([FEWEST, FEWEST], [apart, apart]) == []
    raised = "projections: up to 32 on 2 of 3 batches, for a reliable ranking"
    assert noted([8, 32, FEWEST], [apart] * 3) == [raised]
    assert noted([8, 32, FEWEST], [apart] * 3, given=True) == []
    alone = "each row measured alone, cheaper than the projections that its ranking needs"
    assert noted([0, FEWEST], [apart] * 2) == [f"1 of 2 batches: {alone}"]
    assert noted([0], [apart]) == [f"1 of 1 batch: {alone}"]
    (uncertain,) = noted([FEWEST], [close])
    assert "one in ten rankings would agree with it at a Spearman correlation below -1.00" in uncertain
