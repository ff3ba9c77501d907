"""Profiles of parts of the data, merged: those of one run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import pt2qa
from tests.merge.equal import merged_from_files
from tests.models import images


@pytest.mark.parametrize(
    "arguments",
    [{"per_channel": True}, {"side": "quantized"}, {"side": "reference", "histograms": False, "prefixes": ["conv1"]}],
    ids=["channels", "quantized", "plain"],
)
def test_shards_give_what_one_run_gives(pair, batches, not_finite, arguments: dict[str, Any], tmp_path: Path) -> None:
    def measured(shard: list[Tensor]) -> pt2qa.Profile:
        return pt2qa.profile(pair, shard, **arguments)

    data = [*batches[:3], not_finite, images(0), *batches[3:]]
    merged, whole = merged_from_files(measured, [data[:2], data[2:6], data[6:]], tmp_path)
    assert merged.table() == whole.table()
    assert merged.histograms.keys() == whole.histograms.keys()
    for name, counts in whole.histograms.items():
        np.testing.assert_array_equal(merged.histograms[name], counts)
    for name, numbers in whole.channels.items():
        np.testing.assert_allclose(merged.channels[name], numbers, rtol=1e-9, atol=1e-12)


def test_weights_count_once(pair, batches) -> None:
    report = pt2qa.profile(pair, batches[:1])
    weights = [row for row in pt2qa.merge([report, report]).rows if row.role == "weight"]
    assert [row.count for row in weights] == [row.count for row in report.rows if row.role == "weight"]


def test_what_is_not_of_one_run(pair, batches) -> None:
    report = pt2qa.profile(pair, batches[:1])
    for text, arguments in {
        "side of report 2 is 'quantized', of the first one 'reference'": {"side": "quantized"},
        "histograms of report 2 is 'False', of the first one 'True'": {"histograms": False},
        "report 2 measures other values than the first one": {"ops": ["conv2d"]},
    }.items():
        with pytest.raises(pt2qa.ReportError, match=re.escape(text)):
            pt2qa.merge([report, pt2qa.profile(pair, batches[:1], **arguments)])  # type: ignore[arg-type]
