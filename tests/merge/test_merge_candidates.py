"""Comparisons of quantizers on parts of the data, merged: those of one run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pt2qa
from tests.merge.equal import by_shards, differences, merged_from_files
from tests.models import images


@pytest.fixture(scope="module")
def x86(capture: pt2qa.Capture) -> pt2qa.QuantizedPair:
    return pt2qa.quantize(capture, "x86", [images(4)])


def test_shards_give_what_one_run_gives(capture, pair, x86, batches, not_finite, tmp_path: Path) -> None:
    def compared(shard: list[Tensor]) -> pt2qa.CandidateReport:
        return pt2qa.compare_quantizers(capture, {"a": pair, "b/c": x86}, [], shard)

    data = [*batches[:3], not_finite, images(0), *batches[3:], not_finite]
    merged, whole = merged_from_files(compared, [data[:2], data[2:5], data[5:8], data[8:]], tmp_path)
    assert str(merged) == str(whole)


def test_a_candidate_that_fails_on_some_batches(batches) -> None:
    class Log(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(torch.sigmoid(self.linear(x)) * 3)

    torch.manual_seed(0)
    good, bad = torch.ones(2, 4), torch.tensor([[-400.0] * 4, [400.0] * 4]) * torch.tensor([1.0, -1.0, 1.0, -1.0])
    capture = pt2qa.capture(Log().eval(), good)
    pairs: dict[str, Any] = {name: pt2qa.quantize(capture, name, [good]) for name in ("xnnpack", "x86")}

    def compared(shard: list[Tensor]) -> pt2qa.CandidateReport:
        return pt2qa.compare_quantizers(capture, pairs, [], shard)

    data = [good, bad, good / 2, bad]
    merged = pt2qa.merge(by_shards(compared, [data[:1], data[1:2], data[2:]]))
    assert merged.set_apart
    assert not differences(merged, compared(data))


def test_what_is_not_of_one_run(capture, pair, x86, batches) -> None:
    report = pt2qa.compare_quantizers(capture, {"a": pair}, [], batches[:1])
    for text, quantizers in {
        "quantization of a of report 2 is": {"a": x86},
        "quantization of b of report 2 is": {"a": pair, "b": x86},
    }.items():
        with pytest.raises(pt2qa.ReportError, match=re.escape(text)):
            pt2qa.merge([report, pt2qa.compare_quantizers(capture, quantizers, [], batches[:1])])
