"""What holds for the reports of every analysis over batches, whatever their kind."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import pt2qa
from pt2qa.cli import main
from pt2qa.report import Report
from tests.merge.equal import differences, merged_from_files, random_shards
from tests.models import images
from tests.padded_prompts import Running, padded, prompts, quantized

Analysis = Callable[[pt2qa.QuantizedPair, Iterable[Any]], Report]

KINDS: dict[str, Callable[..., Report]] = {
    "layers": pt2qa.compare_layers,
    "modules": lambda pair, data, **mask: pt2qa.compare_modules(
        pair, data, modules=[name for name, _ in pair.capture.eager.named_children()][-1:], **mask
    ),
    "graphs": lambda pair, data, **mask: pt2qa.compare_graphs(pair.reference, pair.quantized, data, **mask),
    "candidates": lambda pair, data, **mask: pt2qa.compare_quantizers(pair.capture, {"it": pair}, [], data, **mask),
    "exact": lambda pair, data, **mask: pt2qa.sensitivity(pair, data, method="exact", **mask),
    "projected": lambda pair, data, **mask: pt2qa.sensitivity(pair, data, method="projection", projections=2, **mask),
    "bad-cases": lambda pair, data, **mask: pt2qa.find_bad_cases(pair, data, k=3, **mask),
    "profile": lambda pair, data, **mask: pt2qa.profile(pair, data, side="quantized", per_channel=True, **mask),
    "error-budget": lambda pair, data, **mask: pt2qa.error_budget(pair, data, method="projection", **mask),
}
"""Analyses that add up over batches; each takes a pair, batches and perhaps a mask."""


@pytest.fixture(params=KINDS)
def analysis(request: pytest.FixtureRequest, pair: pt2qa.QuantizedPair) -> Callable[[Iterable[Any]], Report]:
    """The report of some batches."""
    return lambda data: KINDS[request.param](pair, data)


@pytest.mark.parametrize("seed", range(2))
def test_random_shards_with_empty_batches_give_what_one_run_gives(
    analysis: Callable[..., Report], batches: list[Tensor], seed: int, tmp_path: Path
) -> None:
    data = [*batches, images(0), images(0)]
    random.Random(seed).shuffle(data)
    shards = [shard for shard in random_shards(data, seed, 4) if any(map(len, shard))]
    _, whole = merged_from_files(analysis, shards, tmp_path)
    out, files = tmp_path / "merged.safetensors", [str(tmp_path / f"{each}.safetensors") for each in range(len(shards))]
    found = CliRunner().invoke(main, ["merge", *files, "-o", str(out)])
    assert found.exit_code == 0, found.output
    assert not differences(pt2qa.load(out), whole)


def test_an_interrupted_sharded_run_goes_on_from_its_reports(
    analysis: Callable[..., Report], batches: list[Tensor], tmp_path: Path
) -> None:
    def interrupted(shard: list[Tensor]) -> Iterator[Tensor]:
        yield from shard[:-1]
        raise KeyboardInterrupt

    shards = batches[:3], batches[3:5]
    files = []
    for number, shard in enumerate(shards):
        report: Any = analysis(interrupted(shard))
        (said,) = (note for note in report.notes if getattr(note, "kind", "") == "interrupted")
        assert f" {len(shard) - 1} " in said
        report.save(tmp_path / f"{number}.safetensors")
        files.append(tmp_path / f"{number}.safetensors")
    rest = [analysis(shard[-1:]) for shard in shards]
    merged = pt2qa.merge([*map(pt2qa.load, files), *rest])
    assert not differences(merged, analysis([*shards[0][:-1], *shards[1][:-1], shards[0][-1], shards[1][-1]]))


@pytest.fixture(scope="module")
def padding() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized(Running(), "xnnpack")


@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_report_merges_with_its_like_alone(padding: pt2qa.QuantizedPair, kind: str) -> None:
    data = [padded(prompts()[:2]), padded(prompts()[2:])]
    masked, other = (KINDS[kind](padding, [batch], mask="attention_mask") for batch in data)
    assert not differences(pt2qa.merge([masked, other]), KINDS[kind](padding, data, mask="attention_mask"))
    plain = KINDS[kind](padding, data[1:])
    with pytest.raises(pt2qa.ReportError, match="mask of report 2 is None, of the first one 'attention_mask'"):
        pt2qa.merge([masked, plain])


@pytest.fixture(scope="module")
def wide(capture: pt2qa.Capture) -> pt2qa.QuantizedPair:
    return pt2qa.quantize(capture, "xnnpack", [3 * images(4)])


@pytest.mark.parametrize("kind", KINDS)
def test_reports_of_another_quantization_do_not_merge(
    pair: pt2qa.QuantizedPair, wide: pt2qa.QuantizedPair, batches: list[Tensor], kind: str
) -> None:
    one, other = (KINDS[kind](each, batches[:1]) for each in (pair, wide))
    with pytest.raises(pt2qa.ReportError, match=r"cannot merge: .*report 2"):
        pt2qa.merge([one, other])


def test_what_reads_no_batches_says_so(pair: pt2qa.QuantizedPair) -> None:
    for report, said in {
        pt2qa.compare_weights(pair): "Weights do not depend on batches: run it once.",
        pt2qa.annotations(pair): "Annotations do not depend on batches: run it once.",
        pt2qa.check(pair): "Run check once, with all batches if rules are to read any.",
    }.items():
        with pytest.raises(pt2qa.ReportError, match=re.escape(said)):
            pt2qa.merge([report])
