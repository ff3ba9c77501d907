"""Bad cases of parts of the data, merged: those of one search."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pt2qa
from tests.merge.equal import merged_from_files, random_shards


def with_targets(batches: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(batch, torch.arange(len(batch)) % 4) for batch in batches]


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "k": 3,
            "metric": ["sqnr", "l1", "flips"],
            "inputs_of": lambda item: item[0],
            "targets_of": lambda item: item[1],
            "classes": ["crane", "gull", "crane", "owl"],
        },
        {"k": 20, "metric": "kl", "inputs_of": lambda item: item[0]},
        {"k": 2, "batch_axis": None, "inputs_of": lambda item: item[0]},
    ],
    ids=["labels", "all", "whole batches"],
)
@pytest.mark.parametrize("seed", range(2))
def test_shards_give_what_one_search_gives(
    pair, batches, not_finite, arguments: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    def searched(shard: list[tuple[Tensor, Tensor]]) -> pt2qa.BadCases:
        return pt2qa.find_bad_cases(pair, shard, **arguments)

    data = with_targets([*batches[:3], not_finite, *batches[3:]])
    merged, whole = merged_from_files(searched, random_shards(data, seed), tmp_path)
    assert str(merged) == str(whole)
    assert merged.csv(extended=True) == whole.csv(extended=True)
    assert merged.inputs.keys() == whole.inputs.keys()
    for name, array in whole.inputs.items():
        np.testing.assert_array_equal(merged.inputs[name], array)
    for one, other in zip(merged.batches(), whole.batches(), strict=True):
        assert torch.equal(one, other)


def test_what_is_not_of_one_search(pair, batches) -> None:
    report = pt2qa.find_bad_cases(pair, batches[:1])
    for text, arguments in {
        "k of report 2 is '2', of the first one '1'": {"k": 2},
        "metric of report 2 is 'l1', of the first one 'sqnr'": {"metric": "l1"},
        "batch_axis of report 2 is -1, of the first one 0": {"batch_axis": None},
    }.items():
        with pytest.raises(pt2qa.ReportError, match=re.escape(text)):
            pt2qa.merge([report, pt2qa.find_bad_cases(pair, batches[:1], **arguments)])  # type: ignore[arg-type]


def test_a_model_that_hands_its_state_on_cannot_be_sharded() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.linear(x) + h)
            return h * 2, h

    x, h = torch.randn(2, 4), torch.zeros(2, 4)
    pair = pt2qa.quantize(pt2qa.capture(Counter().eval(), (x, h)), "xnnpack", [(x, h)])
    report = pt2qa.find_bad_cases(pair, [{"x": x, "h": h}, {"x": x}], feedback={"h": "output[1]"})
    with pytest.raises(pt2qa.ReportError, match=r"with feedback \(h\) each batch continues from the state"):
        pt2qa.merge([report, report])
