"""The worst samples are those that an exhaustive loop finds, whatever the data, and their inputs come back."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._simulator.verification import Outputs, Verification
from pt2qa.report import SetApart
from tests.flows import direct_sqnr, quantized_pair, residual_pair
from tests.models import KeywordInputs, Linears, NestedOutputs, Recurrent, images, residual

BATCHES = [images(seed=seed) for seed in range(1, 6)]


def found(pair: pt2qa.QuantizedPair, batches: Any, **options: Any) -> pt2qa.BadCases:
    return pt2qa.find_bad_cases(pair, batches, **options)


@pytest.fixture(scope="module")
def dynamic_pair() -> pt2qa.QuantizedPair:
    """The shared model, for any batch size."""
    return quantized_pair(residual(), (images(6),), dynamic_shapes=({0: torch.export.Dim("batch")},))


def kl(ref: Tensor, quant: Tensor) -> float:
    p, q = ref.double().softmax(-1), quant.double().softmax(-1)
    return float((p * (p.log() - q.log())).sum())


DIRECT: dict[str, Callable[[Tensor, Tensor], float]] = {
    "sqnr": direct_sqnr,
    "cosine": lambda ref, quant: float(
        torch.nn.functional.cosine_similarity(ref.double().flatten(), quant.double().flatten(), 0)
    ),
    "l1": lambda ref, quant: float((ref.double() - quant.double()).abs().mean()),
    "atol": lambda ref, quant: float((ref.double() - quant.double()).abs().max()),
    "kl": kl,
}


def exhaustive(
    pair: pt2qa.QuantizedPair, batches: list[Tensor], function: Callable[[Tensor, Tensor], float]
) -> list[tuple[float, int, int]]:
    """(value, batch, sample) of every sample, by the graphs themselves."""
    values = []
    with torch.no_grad():
        for number, batch in enumerate(batches):
            reference, quantized = pair.reference(batch), pair.quantized(batch)
            values += [(function(reference[i], quantized[i]), number, i) for i in range(len(batch))]
    return values


@pytest.mark.parametrize("metric", DIRECT)
def test_the_worst_sample_is_that_of_an_exhaustive_loop(metric: str) -> None:
    pair = residual_pair()
    everything = exhaustive(pair, BATCHES, DIRECT[metric])
    ordered = sorted(everything, reverse=metric not in {"sqnr", "cosine"})
    report = found(pair, BATCHES, metric=metric, k=4)
    assert [(row.batch, row.sample) for row in report.rows] == [(batch, sample) for _, batch, sample in ordered[:4]]
    assert [row.value for row in report.rows] == pytest.approx([value for value, _, _ in ordered[:4]], rel=1e-6)
    assert [row.index for row in report.rows] == [2 * row.batch + row.sample for row in report.rows]
    assert [row.rank for row in report.rows] == [1, 2, 3, 4]
    (ranking,) = report.rankings
    assert (ranking.values, report.samples, report.steps) == (10, 10, 5)
    assert ranking.mean == pytest.approx(sum(value for value, _, _ in everything) / 10, rel=1e-6)


def test_several_metrics_keep_each_case_once() -> None:
    pair = residual_pair()
    report = found(pair, BATCHES, metric=["sqnr", "l1", "atol"], k=2)
    assert [ranking.metric for ranking in report.rankings] == ["sqnr", "l1", "atol"]
    for metric in ("sqnr", "l1", "atol"):
        assert report.worst(metric) == found(pair, BATCHES, metric=metric, k=2).rows
    keys = {(row.batch, row.sample) for row in report.rows}
    assert {(case.batch, case.sample) for case in report.cases} == keys
    assert len(report.cases) == len(keys) == len(report.batches())


def test_samples_of_ragged_batches(dynamic_pair: pt2qa.QuantizedPair) -> None:
    data = images(11, seed=4)
    batches = [data[:4], data[4:5], data[5:]]
    everything = exhaustive(dynamic_pair, batches, direct_sqnr)
    report = found(dynamic_pair, batches, k=11)
    assert [(row.value, row.batch, row.sample) for row in report.rows] == [
        (pytest.approx(value), batch, sample) for value, batch, sample in sorted(everything)
    ]
    for row in report.rows:
        assert torch.equal(report.batch(row), data[row.index : row.index + 1])


def test_large_samples_take_the_same_numbers_as_small_ones() -> None:
    """From 16384 elements on, samples are reduced one by one."""
    model = nn.Conv2d(3, 8, 3, padding=1)
    batch = torch.randn(2, 3, 48, 48)
    pair = quantized_pair(model, (batch,))
    everything = exhaustive(pair, [batch], direct_sqnr)
    report = found(pair, [batch], k=2)
    assert [row.value for row in report.rows] == pytest.approx([value for value, _, _ in sorted(everything)], rel=1e-6)


# -- the inputs of a case ---------------------------------------------------------------------------------------------


def test_the_cases_are_batches_that_analyses_take(dynamic_pair: pt2qa.QuantizedPair) -> None:
    report = found(dynamic_pair, [images(5, seed=seed) for seed in (1, 2)], k=3)
    layers = pt2qa.compare_layers(dynamic_pair, report.batches())
    assert layers.samples == 3
    worst = pt2qa.compare_layers(dynamic_pair, [report.batch()])
    assert worst.sqnr == pytest.approx(report.rows[0].value, abs=1e-4)


def test_a_fixed_batch_size_is_filled_with_the_sample() -> None:
    pair = residual_pair()
    report = found(pair, BATCHES)
    row = report.rows[0]
    batch = report.batch(row)
    assert batch.shape == (2, 3, 8, 8)
    assert torch.equal(batch[0], BATCHES[row.batch][row.sample])
    assert torch.equal(batch[0], batch[1])
    assert next(iter(report.inputs.values())).shape == (1, 3, 8, 8)
    assert pt2qa.compare_layers(pair, [batch]).sqnr == pytest.approx(row.value, abs=1e-4)


def test_a_sample_that_cannot_be_cut_out_keeps_its_batch() -> None:
    """The keyword input is one vector for the whole batch."""
    capture = pt2qa.capture(KeywordInputs().eval(), (torch.randn(4, 16),), {"scale": torch.rand(16)})
    batches = [{"x": torch.randn(4, 16), "scale": torch.rand(16)} for _ in range(3)]
    pair = pt2qa.quantize(capture, "xnnpack", batches)
    report = found(pair, batches, k=12)
    assert len(report.rows) == 12
    assert [case.sample for case in report.cases] == [-1] * 3
    for row in report.rows:
        assert all(torch.equal(report.batch(row)[name], batches[row.batch][name]) for name in ("x", "scale"))


def test_loaders_may_fill_their_tensors_again() -> None:
    pair = residual_pair()
    buffer = torch.empty(2, 3, 8, 8)

    def refilled() -> Iterator[Tensor]:
        for batch in BATCHES:
            yield buffer.copy_(batch)

    assert torch.equal(found(pair, refilled()).batch(), found(pair, BATCHES).batch())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_inputs_keep_their_dtype(dtype: torch.dtype, tmp_path: Any) -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x: Tensor, flags: Tensor) -> Tensor:
            return self.fc(x.float()) * flags.float()

    example = (torch.randn(4, 16).to(dtype), torch.ones(4, 1, dtype=torch.bool))
    pair = quantized_pair(Casts(), example)
    report = found(pair, [example])
    report.save(tmp_path / "cases.safetensors")
    loaded = pt2qa.load(tmp_path / "cases.safetensors")
    assert isinstance(loaded, pt2qa.BadCases)
    x, flags = loaded.batch()
    sample = report.rows[0].sample
    assert (x.dtype, flags.dtype) == (dtype, torch.bool)
    assert torch.equal(x[0], example[0][sample])


# -- reading the data -------------------------------------------------------------------------------------------------


def test_memory_is_for_the_cases_and_not_for_the_data() -> None:
    pair = quantized_pair(Linears(), (torch.randn(4, 16),))
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def many() -> Iterator[tuple[Tensor]]:
        nonlocal most
        for _ in range(200):
            batch = torch.randn(4, 16)
            alive.append(weakref.ref(batch))
            yield (batch,)
            del batch
            most = max(most, sum(reference() is not None for reference in alive))

    report = found(pair, many(), k=2, metric=["sqnr", "l1"])
    assert report.samples == 800
    assert len(report.cases) <= 4
    assert most <= 3
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def test_num_steps_reads_no_more_items() -> None:
    taken = []

    def counted() -> Iterator[Tensor]:
        for number, batch in enumerate(BATCHES):
            taken.append(number)
            yield batch

    assert found(residual_pair(), counted(), num_steps=3).steps == 3
    assert taken == [0, 1, 2]


def test_no_batch_is_an_error() -> None:
    pair = residual_pair()
    with pytest.raises(pt2qa.BatchError, match="no batch to search"):
        found(pair, [])
    with pytest.raises(pt2qa.BatchError, match=r"batches is a single Tensor; expected an iterable"):
        found(pair, images())
    with pytest.raises(pt2qa.BatchError, match=r"shape \[2, 3, 9, 9\]; captured with \[2, 3, 8, 8\]"):
        found(pair, [torch.randn(2, 3, 9, 9)])


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_loader_that_fails_keeps_what_was_found(error: BaseException) -> None:
    pair = residual_pair()

    def failing(after: int) -> Iterator[Tensor]:
        yield from BATCHES[:after]
        raise error

    report = found(pair, failing(3))
    assert report.steps == 3
    assert report.rows == found(pair, BATCHES[:3]).rows
    expected = "stopped at batch 3, OSError: disk gone"
    if isinstance(error, KeyboardInterrupt):
        expected = "interrupted: covers the 3 batches that were finished"
    assert expected in report.notes
    with pytest.raises(type(error)):
        found(pair, failing(0))


def test_a_batch_that_does_not_fit_ends_the_search() -> None:
    """The last batch of a loader, where the capture has a fixed batch size."""
    report = found(residual_pair(), [*BATCHES[:2], images(1)])
    assert report.steps == 2
    assert any(note.startswith("stopped at batch 2, BatchError: ") for note in report.notes)


def test_an_interrupted_batch_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def metric(ref: Tensor, quant: Tensor) -> Tensor:
        calls.append(len(calls))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return (ref - quant).abs().amax(1)

    report = found(residual_pair(), BATCHES, metric=["sqnr", pt2qa.CaseMetric("max", metric)])
    assert report.worst("sqnr") == found(residual_pair(), BATCHES[:2]).rows


# -- metrics and post-processing --------------------------------------------------------------------------------------


def test_samples_are_counted_also_where_batches_are_ranked_whole() -> None:
    pair, axes = residual_pair(), (0, None, 3, 4)
    counted = [found(pair, BATCHES[:2], batch_axis=axis).samples for axis in axes]
    assert counted == [4, 4, 16, 2]


def test_equal_samples_rank_by_their_order() -> None:
    pair = residual_pair()
    batch = BATCHES[0]
    report = found(pair, [batch, batch, batch.flip(0)], k=6)
    first, second = report.rows[:3], report.rows[3:]
    assert len({row.value for row in first}) == len({row.value for row in second}) == 1
    for rows in (first, second):
        assert [row.index for row in rows] == sorted(row.index for row in rows)


def test_a_users_metric_by_sample_and_by_batch() -> None:
    pair = residual_pair()
    by_sample = pt2qa.CaseMetric("first class", lambda ref, quant: (ref - quant)[:, 0].abs())
    by_batch = pt2qa.CaseMetric("agreement", lambda ref, quant: float((ref - quant).abs().sum()), worst="smallest")
    report = found(pair, BATCHES, metric=[by_sample, by_batch])
    everything = exhaustive(pair, BATCHES, lambda ref, quant: float((ref - quant)[0].abs()))
    value, batch, sample = max(everything)
    (row,) = report.worst("first class")
    assert (row.value, row.batch, row.sample) == (pytest.approx(value), batch, sample)
    (whole,) = report.worst("agreement")
    with torch.no_grad():
        sums = [float((pair.reference(b) - pair.quantized(b)).abs().sum()) for b in BATCHES]
    assert (whole.batch, whole.sample, whole.index) == (sums.index(min(sums)), -1, 2 * sums.index(min(sums)))
    assert whole.value == pytest.approx(min(sums))
    assert torch.equal(report.batch(whole), BATCHES[whole.batch])


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("psnr", r"unknown metric 'psnr'; expected sqnr, cosine, l1, atol, kl, flips, or a pt2qa\.CaseMetric"),
        (["sqnr", "sqnr"], r"the metric 'sqnr' was given twice"),
        (pt2qa.CaseMetric("l1", lambda ref, quant: 0.0), r"the metric name 'l1' is taken"),
        ("flips", r"metric=\"flips\" needs targets: pass targets_of="),
        ([], r"no metric was given"),
        (pt2qa.CaseMetric("own", lambda ref, quant: ref - quant), r"returned a tensor of shape \(2, 4\) for output"),
        (pt2qa.CaseMetric("own", lambda ref, quant: torch.ones(3)), r"returned 3 numbers for output, which holds 2"),
        (pt2qa.CaseMetric("own", lambda ref, quant: "bad"), r"returned str for output; expected one number"),
    ],
)
def test_a_metric_that_cannot_be_is_refused(metric: Any, message: str) -> None:
    with pytest.raises(pt2qa.SelectionError, match=message):
        found(residual_pair(), BATCHES, metric=metric)


@pytest.mark.parametrize("option", [{"k": 0}, {"num_steps": 0}, {"batch_axis": -1}])
def test_a_number_that_makes_no_sense_is_refused(option: dict[str, int]) -> None:
    with pytest.raises(pt2qa.SelectionError, match=rf"{next(iter(option))} is -?\d; expected [01] or more"):
        found(residual_pair(), BATCHES, **option)


def test_post_processing_sees_the_models_own_nesting_and_is_applied_to_both() -> None:
    example = (torch.randn(4, 16),)
    pair = quantized_pair(NestedOutputs(), example)
    seen = []

    def scores(outputs: Any) -> Any:
        seen.append(set(outputs))
        return {"p": outputs["logits"].softmax(-1), "hidden": outputs["rest"][0].mean()}

    report = found(pair, [example], post_process=scores, metric="atol")
    assert seen == [{"logits", "rest"}] * 2
    assert [(row.output, row.sample >= 0) for row in report.rows] == [("output.p", True), ("output.hidden", False)]
    with torch.no_grad():
        ref, quant = (graph(*example)["logits"].softmax(-1) for graph in (pair.reference, pair.quantized))
    assert report.rows[0].value == pytest.approx(float((ref - quant).abs().max()))


def test_every_output_has_its_ranking() -> None:
    example = (torch.randn(4, 16),)
    report = found(quantized_pair(NestedOutputs(), example), [example], metric=["sqnr", "kl"])
    names = ["output.logits", "output.rest[0]", "output.rest[1]", "output.rest[2]"]
    assert [ranking.output for ranking in report.rankings] == names * 2
    assert "output.rest[1]: 1 without kl (kl needs floating-point logits, not int64); ranked last" in report.notes
    assert {row.output for row in report.rows if row.metric == "kl"} == {"output.logits", "output.rest[0]"}


def test_results_of_different_shapes_are_counted_and_left_to_the_users_metric() -> None:
    """What is left after NMS differs in number."""
    pair = residual_pair()

    def kept(y: Tensor) -> Tensor:
        return y[y > y.flatten()[0]]

    count = pt2qa.CaseMetric("boxes", lambda ref, quant: abs(len(ref) - len(quant)))
    sizes = [(len(kept(pair.reference(b))), len(kept(pair.quantized(b)))) for b in BATCHES]
    report = found(pair, BATCHES, metric=["l1", count], post_process=lambda y: kept(y + 0))
    (row,) = report.worst("boxes")
    assert row.value == max(abs(a - b) for a, b in sizes)
    by_l1 = report.rankings[0]
    assert by_l1.without_number == sum(a != b for a, b in sizes)


def test_results_of_different_nesting_are_counted() -> None:
    calls = iter([1, 2, 2, 2])
    report = found(residual_pair(), BATCHES[:2], post_process=lambda y: [y] * next(calls))
    ranking = report.rankings[0]
    assert (ranking.values, ranking.without_number) == (2, 1)
    assert ranking.reason == "reference and quantized results are nested differently"


class LogOfLinear(nn.Module):
    """log|fc(x)|: a small value that int8 rounds to zero becomes -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).abs().log()


def test_infinities_of_the_quantized_model_alone_are_worst_of_all() -> None:
    """A failure that no finite error equals, though no number can be given."""
    pair = quantized_pair(LogOfLinear(), (torch.tensor([[1.0, 1.0], [1.0, -1.0]]),))
    fine, broken = [0.7, 0.9], [1e-4, 0.9]
    batches = [torch.tensor([fine, [0.6, 0.5]]), torch.tensor([fine, broken])]
    metrics = ("sqnr", "atol", "cosine")
    report = found(pair, batches, k=3, metric=metrics)
    for metric in metrics:
        worst, second, _ = report.worst(metric)
        assert (worst.batch, worst.sample) == (1, 1)
        assert math.isnan(worst.value)
        assert worst.note == "NaN or infinite in the quantized model only"
        assert not math.isnan(second.value)
    assert "output: 1 without sqnr, NaN or infinite in the quantized model only; ranked worst" in report.notes
    assert [ranking.nonfinite for ranking in report.rankings] == [1, 1, 1]


def test_a_sample_without_a_number_is_ranked_last_and_counted() -> None:
    """The reference is NaN too: the quantized model is not to blame."""
    pair = quantized_pair(LogOfLinear(), (torch.tensor([[1.0, 1.0], [1.0, -1.0]]),))
    batches = [torch.tensor([[math.nan, 0.5], [0.6, 0.5]]), torch.tensor([[0.7, 0.9], [0.6, 0.55]])]
    report = found(pair, batches, k=4)
    assert [row.index for row in report.rows][-1] == 0
    assert math.isnan(report.rows[-1].value)
    assert [math.isnan(row.value) for row in report.rows] == [False] * 3 + [True]
    (ranking,) = report.rankings
    assert (ranking.values, ranking.nonfinite, ranking.without_number) == (3, 0, 1)
    reason = "2 values are NaN or infinite in one of the two only"
    assert f"output: 1 without sqnr ({reason}); ranked last" in report.notes
    own = pt2qa.CaseMetric("own", lambda ref, quant: torch.tensor([math.nan, 1.0]))
    assert [row.sample for row in found(pair, batches[1:], metric=own, k=2).rows] == [1, 0]


def test_an_output_that_is_not_finite_names_its_batch_and_op_and_whose_fault_it_is(tmp_path: Path) -> None:
    pair = quantized_pair(LogOfLinear(), (torch.tensor([[1.0, 1.0], [1.0, -1.0]]),))
    fine, broken = [0.7, 0.9], [1e-4, 0.9]
    batches = [torch.tensor([fine, [math.nan, 0.5]]), torch.tensor([fine, broken]), torch.tensor([fine, fine])]
    # argmax makes an integer of NaN, so what is ranked is finite.
    for post_process in (None, lambda output: output.argmax(1)):
        report = found(pair, batches, k=1, metric="atol", post_process=post_process)
        assert report.set_apart == (
            SetApart(0, 2, 1, "batch", "NaN", "x"),
            SetApart(1, 2, 1, "quantized", "infinite", "log"),
        )
        assert report.summary().splitlines()[:2] == [
            "Quantization fails on 1 of 3 batches: infinite in the quantized model alone, first at log "
            "(batch 1, sample 1).",
            "The input data contain NaN or infinities in 1 of 3 batches: NaN in the input x (batch 0, sample 1).",
        ]
        assert not pt2qa.gate(report, require="rankings.values>=0").passed
        report.save(tmp_path / "cases.safetensors")
        loaded = pt2qa.load(tmp_path / "cases.safetensors")
        assert isinstance(loaded, pt2qa.BadCases)
        assert (loaded.set_apart, str(loaded)) == (report.set_apart, str(report))
        assert report.grade() == "bad"
    clean = found(pair, batches[2:], metric="atol")
    assert clean.set_apart == ()
    assert pt2qa.gate(clean, require="rankings.values>=0").passed


def test_an_empty_batch_is_counted_and_several_of_them_alone_are_an_error(dynamic_pair: pt2qa.QuantizedPair) -> None:
    pair = dynamic_pair
    batches = [images(3), images(2, seed=1)]
    empty = images()[:0]
    report = found(pair, [empty, batches[0], empty, batches[1]])
    clean = found(pair, batches)
    assert [apart.batch for apart in report.set_apart] == [0, 2]
    assert (report.steps, report.samples) == (4, 5)
    assert report.rankings == clean.rankings
    assert [row.index for row in report.rows] == [row.index for row in clean.rows]
    assert report.summary().startswith("No samples in 2 of 4 batches: batch 0.\n")
    assert "batch 2: no samples" in str(report)
    with pytest.raises(pt2qa.BatchError, match=r"every batch is empty \(2 read\)\. Pass batches with samples\."):
        found(pair, [empty, empty])


def test_a_batch_without_samples_is_not_empty_where_the_reference_alone_gives_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache that starts empty is the first input, so the batch has no sample along its axis."""

    class Cached(nn.Module):
        def forward(self, cache: Tensor, x: Tensor) -> Tensor:
            return torch.cat([cache, x]) + 1

    size = {0: torch.export.Dim("size")}
    pair = quantized_pair(Cached(), (torch.rand(3, 4), torch.rand(2, 4)), dynamic_shapes=(size, None))
    right = Verification.run

    def overflowing(*given: Any) -> Outputs:
        outputs = right(*given)
        return replace(outputs, quantized=[value * math.inf for value in outputs.quantized])

    monkeypatch.setattr(Verification, "run", overflowing)
    batches = [(torch.rand(size, 4), torch.rand(2, 4) + 1) for size in (0, 3)]
    assert [(apart.batch, apart.what) for apart in found(pair, batches).set_apart] == [(0, "infinite"), (1, "infinite")]
    # One without a number in the reference, either, is empty.
    empty = torch.rand(0, 4), torch.full((2, 4), math.inf)
    report = found(pair, [empty, batches[1]])
    assert [(apart.batch, apart.what) for apart in report.set_apart] == [(0, "no samples"), (1, "infinite")]
    assert report.steps == 2


# -- labels -----------------------------------------------------------------------------------------------------------


def labelled() -> tuple[pt2qa.QuantizedPair, list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Samples whose two largest logits are near each other, so that some classes change."""
    pair = quantized_pair(Linears(), (torch.randn(64, 16),))
    data = [torch.randn(64, 16) for _ in range(8)]
    with torch.no_grad():
        reference = torch.cat([pair.reference(batch) for batch in data]).argmax(-1)
        quantized = torch.cat([pair.quantized(batch) for batch in data]).argmax(-1)
    targets = torch.where(torch.arange(512) % 3 == 0, quantized, reference)
    return pair, list(zip(data, targets.split(64), strict=True)), reference, quantized


def test_labels_that_flip_are_counted_and_ranked() -> None:
    pair, items, reference, quantized = labelled()
    targets = torch.cat([target for _, target in items])
    lost = (reference == targets) & (quantized != targets)
    gained = (reference != targets) & (quantized == targets)
    assert lost.any()
    assert gained.any()
    report = found(pair, items, k=1000, inputs_of=lambda item: item[0], targets_of=lambda item: item[1])
    (counts,) = report.labels
    assert (counts.targets, counts.lost, counts.gained) == (512, int(lost.sum()), int(gained.sum()))
    assert counts.ref_right == int((reference == targets).sum())
    assert counts.quant_right == int((quantized == targets).sum())
    assert [row.index for row in report.worst("flips")] == lost.nonzero().flatten().tolist()
    assert "lost" in report.text(width=120)


def test_classes_may_come_from_post_processing_and_negative_targets_are_left_out() -> None:
    pair, items, _, _ = labelled()
    options = {"inputs_of": lambda item: item[0], "metric": "flips"}
    plain = found(pair, items, targets_of=lambda item: item[1], **options)
    classes = found(pair, items, targets_of=lambda item: item[1], post_process=lambda y: y.argmax(1), **options)
    assert classes.labels == plain.labels
    without = [[replace(row, ref_value=0.0, quant_value=0.0) for row in each.rows] for each in (classes, plain)]
    assert without[0] == without[1], "a class has no score"
    ignored = found(pair, items, targets_of=lambda item: torch.full((64,), -100), **options)
    assert (ignored.labels[0].targets, ignored.rows, ignored.cases) == (0, (), ())


def test_targets_that_fit_no_output_are_refused() -> None:
    pair, items, _, _ = labelled()
    with pytest.raises(
        pt2qa.SelectionError, match=r"no output has class scores for targets of shape \(64, 2\): output"
    ):
        found(pair, items, inputs_of=lambda item: item[0], targets_of=lambda item: torch.zeros(64, 2).long())
    with pytest.raises(pt2qa.BatchError, match=r"targets_of returned float32 values; expected integer class numbers"):
        found(pair, items, inputs_of=lambda item: item[0], targets_of=lambda item: torch.zeros(64))


# -- stateful models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recurrent() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    example = (torch.randint(0, 10, (5, 3)), torch.zeros(2, 3, 8), torch.ones(2, 3, 8))
    return quantized_pair(Recurrent(), example, pt2qa.quantizer("xnnpack", mode="dynamic"))


FEEDBACK = {"h": "output[1]", "c": "output[2]"}


@pytest.mark.parametrize("form", ["tuple", "shorter", "dict"])
def test_each_model_is_fed_with_its_own_state(recurrent: pt2qa.QuantizedPair, form: str) -> None:
    tokens = [torch.randint(0, 10, (5, 3)) for _ in range(4)]
    start = (torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))
    later: dict[str, Callable[[Tensor], Any]] = {
        "tuple": lambda t: (t, None, None),
        "shorter": lambda t: t,
        "dict": lambda t: {"tokens": t},
    }
    first = {"tokens": tokens[0], "h": start[0], "c": start[1]} if form == "dict" else (tokens[0], *start)
    report = found(
        recurrent, [first, *map(later[form], tokens[1:])], metric="l1", k=4, batch_axis=None, feedback=FEEDBACK
    )
    states = [start, start]
    expected, inputs, graphs = [], [], (recurrent.reference, recurrent.quantized)
    with torch.no_grad():
        for step in tokens:
            inputs.append((step, *states[0]))
            results = [graph(step, *state) for graph, state in zip(graphs, states, strict=True)]
            expected.append(float((results[0][0] - results[1][0]).double().abs().mean()))
            states = [result[1:] for result in results]
    rows = report.worst("l1", "output[0]")
    assert [row.batch for row in rows] == sorted(range(4), key=lambda step: -expected[step])
    assert [row.value for row in rows] == pytest.approx(sorted(expected, reverse=True), rel=1e-5)
    for row in rows:
        batch = report.batch(row)
        values = [batch[name] for name in ("tokens", "h", "c")] if form == "dict" else batch
        assert all(torch.equal(kept, given) for kept, given in zip(values, inputs[row.batch], strict=True))


def test_an_item_that_gives_the_state_starts_a_new_sequence(recurrent: pt2qa.QuantizedPair) -> None:
    items = [(torch.randint(0, 10, (5, 3)), torch.zeros(2, 3, 8), torch.zeros(2, 3, 8)) for _ in range(3)]
    options: dict[str, Any] = {"metric": "l1", "k": 3, "batch_axis": 1}
    assert found(recurrent, items, feedback=FEEDBACK, **options).rows == found(recurrent, items, **options).rows


def test_samples_along_another_axis(recurrent: pt2qa.QuantizedPair) -> None:
    """Sequences are stored with the time first: axis 1 holds the samples, of inputs, outputs and states."""
    item = (torch.randint(0, 10, (5, 3)), torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    report = found(recurrent, [item], metric="l1", k=3, batch_axis=1)
    with torch.no_grad():
        ref, quant = recurrent.reference(*item)[0], recurrent.quantized(*item)[0]
    expected = (ref - quant).double().abs().mean((0, 2))
    rows = report.worst("l1", "output[0]")
    assert [row.sample for row in rows] == expected.argsort(descending=True).tolist()
    tokens, h, _ = report.batch(rows[0])
    assert torch.equal(tokens, item[0][:, [rows[0].sample] * 3])
    assert torch.equal(h, item[1][:, [rows[0].sample] * 3])


@pytest.mark.parametrize(
    ("feedback", "error", "message"),
    [
        ({"state": "output[1]"}, pt2qa.SelectionError, r"the model has no input 'state'; it takes tokens, h, c"),
        ({"h": "hidden"}, pt2qa.SelectionError, r"the model has no output 'hidden'; it returns output, output\[0\]"),
    ],
)
def test_feedback_names_what_is_there(
    recurrent: pt2qa.QuantizedPair, feedback: dict[str, str], error: type[Exception], message: str
) -> None:
    item = (torch.randint(0, 10, (5, 3)), torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))
    with pytest.raises(error, match=message):
        found(recurrent, [item], feedback=feedback)


def test_the_first_step_of_a_sequence_needs_a_state(recurrent: pt2qa.QuantizedPair) -> None:
    with pytest.raises(pt2qa.BatchError, match=r"the first batch has no input 'h'. feedback takes it from output\[1\]"):
        found(recurrent, [torch.randint(0, 10, (5, 3))], feedback=FEEDBACK)
