"""Error budgets of parts of the data, merged: those of one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import pt2qa
from pt2qa.report import ErrorBudget
from tests.merge.equal import by_shards, differences, merged_from_files, random_shards
from tests.models import images

METHODS: dict[str, dict[str, Any]] = {
    "auto": {},
    "exact": {"method": "exact"},
    "projection": {"method": "projection", "projections": 2},
}


@pytest.fixture(params=METHODS)
def split(request: pytest.FixtureRequest, pair: pt2qa.QuantizedPair) -> Callable[[list[Tensor]], ErrorBudget]:
    """The budget of some batches."""
    return lambda shard: pt2qa.error_budget(pair, shard, **METHODS[request.param])


@pytest.mark.parametrize("seed", range(3))
def test_shards_of_any_size_give_what_one_run_gives(split, batches, seed: int, tmp_path: Path) -> None:
    merged, whole = merged_from_files(split, random_shards(batches, seed), tmp_path)
    assert str(merged) == str(whole)


def test_batches_set_apart_stay_apart_and_are_numbered_on(split, batches, not_finite) -> None:
    data = [batches[0], not_finite, images(0), batches[1], not_finite, batches[2]]
    whole = split(data)
    merged = pt2qa.merge(by_shards(split, [data[:2], data[2:4], data[4:]]))
    assert [each.batch for each in whole.set_apart] == [1, 2, 4]
    assert not differences(merged, whole)


def test_the_evidence_of_diagnoses_merges(pair, batches) -> None:
    def evidence(shard: list[Tensor]) -> Any:
        return pt2qa.diagnose(pair, shard, verify_code=False).reports["budget"]

    merged = pt2qa.merge([evidence(batches[:2]), evidence(batches[2:4])])
    assert not differences(merged, pt2qa.error_budget(pair, batches[:4], projections=4))


def test_equal_batches_have_the_same_random_vectors_in_one_run_as_in_shards(pair, batches) -> None:
    once, twice = (
        pt2qa.error_budget(pair, batches[:1] * count, method="projection", projections=2) for count in (1, 2)
    )
    assert [row.noise for row in twice.rows] == [2 * row.noise for row in once.rows]
    assert [row.error for row in twice.rows] == pytest.approx([row.error for row in once.rows])
    assert [row.noise for row in pt2qa.merge([once, once]).rows] == [row.noise for row in twice.rows]


def test_what_is_not_of_one_run(pair, batches) -> None:
    exact, projected, two = (
        pt2qa.error_budget(pair, batches[:1], **options)
        for options in ({"method": "exact"}, {"method": "projection"}, {"method": "projection", "projections": 2})
    )
    for reports, text in (
        ([exact, projected], "method of report 2 is 'projection', of the first one 'exact'"),
        ([projected, two], "projections that were asked for of report 2 is '2'"),
    ):
        with pytest.raises(pt2qa.ReportError, match=text):
            pt2qa.merge(reports)
