"""Sensitivities of parts of the data, merged: those of one run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pt2qa
from tests.merge.equal import by_shards, differences, merged_from_files, random_shards
from tests.models import images


def squared(reference: Tensor, quantized: Tensor) -> float:
    return float((reference - quantized).square().mean())


@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "exact"},
        {"method": "exact", "metric": "kl", "group": "region"},
        {"method": "exact", "metric": "atol"},
        {"method": "exact", "metric": squared, "post_process": torch.sigmoid},
        {"method": "projection", "projections": 4},
    ],
    ids=["exact", "kl", "atol", "loss", "projection"],
)
def test_shards_give_what_one_run_gives(pair, batches, not_finite, arguments: dict[str, Any], tmp_path: Path) -> None:
    def measured(shard: list[Tensor]) -> pt2qa.SensitivityReport:
        return pt2qa.sensitivity(pair, shard, **arguments)

    data = [*batches[:2], not_finite, batches[2], images(0), batches[3]]
    merged, whole = merged_from_files(measured, [data[:1], data[1:4], data[4:]], tmp_path)
    assert str(merged) == str(whole)


def test_a_sharded_run_goes_on_from_what_was_merged(pair, batches) -> None:
    shards = random_shards(batches[:4], 0, 2)
    merged = pt2qa.merge(by_shards(lambda shard: pt2qa.sensitivity(pair, shard, method="exact"), shards))
    resumed = pt2qa.sensitivity(pair, batches[:5], method="exact", resume=merged)
    assert not differences(resumed, pt2qa.sensitivity(pair, batches[:5], method="exact"))


def test_equal_batches_have_the_same_random_vectors_in_one_run_as_in_shards(pair, batches) -> None:
    once, twice = (pt2qa.sensitivity(pair, batches[:1] * count, method="projection", projections=2) for count in (1, 2))
    assert not differences(pt2qa.merge([once, once]), twice)
    assert [row.noise for row in twice.rows] == [2 * row.noise for row in once.rows]
    assert [row.error for row in twice.rows] == pytest.approx([row.error for row in once.rows])


def test_what_is_not_of_one_run(pair, batches) -> None:
    report = pt2qa.sensitivity(pair, batches[:1], method="exact")
    for text, arguments in {
        "method of report 2 is 'projection', of the first one 'exact'": {"method": "projection"},
        "metric of report 2 is 'l1', of the first one 'sqnr'": {"method": "exact", "metric": "l1"},
        "group of report 2 is 'module', of the first one 'site'": {"method": "exact", "group": "module"},
    }.items():
        with pytest.raises(pt2qa.ReportError, match=re.escape(text)):
            pt2qa.merge([report, pt2qa.sensitivity(pair, batches[:1], **arguments)])  # type: ignore[arg-type]
