"""A batch without an element is set apart by every analysis, and runs no model: many ops cannot take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pt2qa

BATCHES = [torch.linspace(-1, 1, 12).reshape(3, 4), torch.zeros(0, 4), torch.linspace(-2, 1, 20).reshape(5, 4)]
FILLED = [batch for batch in BATCHES if len(batch)]


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    """Dynamic quantization, whose ``choose_qparams`` has no range of nothing."""
    torch.manual_seed(0)
    capture = pt2qa.capture(nn.Linear(4, 3).eval(), BATCHES[0], dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    return pt2qa.quantize(capture, "x86:mode=dynamic", FILLED, progress=False)


ANALYSES: dict[str, Callable[[pt2qa.QuantizedPair, Any], Any]] = {
    "layers": lambda pair, data: pt2qa.compare_layers(pair, data, progress=False),
    "bad cases": lambda pair, data: pt2qa.find_bad_cases(pair, data, progress=False),
    "graphs": lambda pair, data: pt2qa.compare_graphs(pair.reference, pair.quantized, data, progress=False),
    "sensitivity": lambda pair, data: pt2qa.sensitivity(pair, data, progress=False),
    "quantizers": lambda pair, data: pt2qa.compare_quantizers(
        pair.capture, {"dynamic": pair}, FILLED, batches=data, progress=False
    ),
}


@pytest.mark.parametrize("analysis", ANALYSES)
def test_an_empty_batch_is_set_apart_where_no_op_can_run_it(pair: pt2qa.QuantizedPair, analysis: str) -> None:
    report, filled = (ANALYSES[analysis](pair, data) for data in (BATCHES, FILLED))
    assert [(apart.batch, apart.what) for apart in report.set_apart] == [(1, "no samples")]
    numbers = [each.to_pandas().select_dtypes("float").to_numpy() for each in (report, filled)]
    assert numbers[0].size > 0
    np.testing.assert_array_equal(*numbers)


@pytest.mark.parametrize("side", ["reference", "quantized"])
def test_a_profile_names_the_empty_batch(pair: pt2qa.QuantizedPair, side: Any) -> None:
    profile = pt2qa.profile(pair, BATCHES, side=side, progress=False)
    assert [(apart.batch, apart.what) for apart in profile.set_apart] == [(1, "no samples")]
    assert profile.summary().splitlines()[0] == "No samples in 1 of 3 batches: batch 1."
    assert profile.find("linear").mean == pt2qa.profile(pair, FILLED, side=side, progress=False).find("linear").mean


@pytest.mark.parametrize("analysis", ANALYSES)
def test_only_empty_batches_are_an_error(pair: pt2qa.QuantizedPair, analysis: str) -> None:
    with pytest.raises(pt2qa.BatchError, match=r"empty|No samples"):
        ANALYSES[analysis](pair, [BATCHES[1]])
