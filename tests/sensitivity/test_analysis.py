"""Arguments, interruptions, and going on after them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pt2qa
from pt2qa.errors import BatchError, SelectionError
from tests.flows import residual_pair
from tests.models import images

BATCHES = [images(), images(seed=1), images(seed=2)]


def run(batches: Any = BATCHES, **options: Any) -> pt2qa.SensitivityReport:
    return pt2qa.sensitivity(residual_pair(), batches, **options)


def interrupting(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from batches
    raise KeyboardInterrupt


def facts(report: pt2qa.SensitivityReport) -> tuple[Any, ...]:
    return report.rows, report.signal, report.noise, report.value, report.batches, report.data, report.parts


@pytest.mark.parametrize("method", ["projection", "exact"])
@pytest.mark.parametrize("set_apart", [[], [0, 2]], ids=["all", "some"])
def test_an_interrupted_analysis_goes_on_from_its_file(method: Any, set_apart: list[int], tmp_path: Path) -> None:
    batches = [images(seed=seed) for seed in range(4)]
    for number in set_apart:
        batches[number][1, 0, 3, 3] = torch.nan
    whole, part = run(batches, method=method), run(interrupting(batches[:3]), method=method)
    assert part.batches == 3 - len(set_apart)
    assert part.notes[-1].startswith(f"interrupted: covers the {part.batches} batch")
    assert part.notes[-1].endswith(" finished; go on with resume=report")
    part.save(tmp_path / "part.safetensors")
    resumed = run(batches, method=method, resume=pt2qa.load(tmp_path / "part.safetensors"))
    assert (facts(resumed), resumed.set_apart) == (facts(whole), whole.set_apart)


def test_an_interruption_inside_a_batch_keeps_the_finished_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(method="exact")
    for stop in (4, len(whole.rows) + 3):
        calls = 0

        def loss_free(outputs: Any, stop: int = stop) -> Any:
            nonlocal calls
            calls += 1
            if calls == stop + 4:
                raise KeyboardInterrupt
            return outputs

        part = run(method="exact", post_process=loss_free)
        assert 0 < len(part.rows) <= part.planned
        assert "interrupted" in part.notes[-1]
        if len(part.rows) < part.planned:
            assert f"{part.planned - len(part.rows)} of {part.planned} rows are missing" in str(part)
            assert part.predicted_sqnr != part.predicted_sqnr
        assert facts(run(method="exact", resume=part)) == facts(whole)


def test_an_interruption_before_anything_was_measured_is_not_caught() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(interrupting([]))


def test_resume_refuses_what_does_not_belong_together() -> None:
    part = run(BATCHES[:1], method="exact")
    with pytest.raises(SelectionError, match='projections applies only to method="projection"'):
        run(method="auto", resume=part, projections=4)
    with pytest.raises(SelectionError, match="cannot resume: the report has method 'exact', this call 'projection'"):
        run(method="projection", resume=part)
    with pytest.raises(SelectionError, match="batch 0 is not that of the report to resume"):
        run(BATCHES[1:], method="exact", resume=part)
    with pytest.raises(SelectionError, match=r"squared output error is .* in the report"):
        run(method="exact", resume=part, post_process=lambda logits: 2 * logits)


@pytest.fixture
def only_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pt2qa.distributed():
            yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("method", ["auto", "exact"])
def test_batches_of_the_report_to_resume_that_no_rank_has_are_counted_in_a_note(only_rank: None, method: Any) -> None:
    before, part = run(method="exact"), run(BATCHES[1:], method="exact")
    resumed, again = run(BATCHES[1:], method=method, resume=before), run(method=method, resume=before)
    assert facts(resumed) == facts(part)
    lost = "of the 3 batches in the report to resume, 2 are in the data; the others do not count"
    assert (resumed.notes, again.notes) == ((*part.notes, lost), before.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "guess"}, "unknown method 'guess'; expected one of auto, projection, exact"),
        ({"metric": "psnr", "method": "exact"}, "unknown metric 'psnr'; expected one of sqnr, cosine, l1, atol, kl"),
        (
            {"metric": "kl", "method": "projection"},
            'method="projection" supports sqnr only; for kl pass method="exact"',
        ),
        ({"metric": "kl", "method": "exact", "larger_is_worse": False}, "larger_is_worse applies to functions only"),
        ({"group": "block"}, "cannot group by 'block'; expected one of region, module"),
        ({"projections": 0}, "projections is 0; expected 1 or more"),
        ({"post_process": lambda outputs: outputs.argmax(-1)}, "no output is a floating-point tensor"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        run(**options)


def test_outputs_must_keep_their_shapes() -> None:
    with pytest.raises(SelectionError, match="the outputs of the reference have the shapes"):
        run(method="exact", post_process=lambda logits: logits[logits > logits.median()][: int(logits.sum() * 50) % 7])


@pytest.mark.parametrize("method", ["projection", "exact"])
def test_there_must_be_a_batch(method: Any) -> None:
    with pytest.raises(BatchError, match="no batch to measure on"):
        run([], method=method)
    with pytest.raises(BatchError, match=r"Pass \[batch\] for one"):
        run(images(), method=method)


def test_rows_say_what_they_are() -> None:
    pair = residual_pair()
    report = run(inputs_of=lambda item: item[0], batches=[(batch, 7) for batch in BATCHES])
    assert [row.site for row in report.rows] == [site.index for site in pair.sites]
    flops = {"conv1/conv2d": 2 * 3 * 8 * 9 * 64, "conv2/conv2d": 2 * 8 * 8 * 64, "fc/linear": 2 * 8 * 4}
    for row in report.rows:
        site = pair.sites[row.site]
        assert (row.name, row.handle, row.dtype) == (site.name, site.handle, site.params.dtype)
        known = pair.names[row.handle]
        kind = "activation" if site.kind == "activation" else "weight"
        assert (row.kind, row.op, row.module) == (kind, site.op, known.module), row.name
        region = next((each.index for each in pair.regions if row.name in each.ops), -1)
        assert row.region == region, row.name
        assert row.noise_share == pytest.approx(row.noise / sum(each.noise for each in report.rows))
        assert row.value == pytest.approx(10 * math.log10(report.signal / row.noise))
        assert row.flops == flops.get(row.name, 0)
        assert row.flops_share == pytest.approx(row.flops / sum(flops.values())), row.name
    assert [row.rank for row in sorted(report.rows, key=lambda row: -row.noise)] == list(range(1, len(report.rows) + 1))
    inputs = next(row for row in report.rows if row.op == "input")
    assert (inputs.region, inputs.module) == (-1, "")
    assert report.samples == 6
