"""``compare_deployed(mask=)``: padding is in no number of the kernels' comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pt2qa
from tests.padded_prompts import Running, padded, prompts, quantized, with_garbage


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized(Running(), "xnnpack")


def test_what_stands_at_padded_positions_changes_nothing(pair: pt2qa.QuantizedPair, tmp_path: Path) -> None:
    def compared(batch: Any, mask: str | None = "attention_mask") -> pt2qa.DeployedReport:
        return pt2qa.compare_deployed(pair, [batch], mask=mask, program=tmp_path / "program", progress=False)

    batch = padded(prompts())
    one, other, plain = compared(batch), compared(with_garbage(batch)), compared(batch, None)
    assert one.to_pandas(extended=True).equals(other.to_pandas(extended=True))
    for table in ("rows", "outputs", "stages"):
        assert [str(row) for row in getattr(one, table)] == [str(row) for row in getattr(other, table)]
    assert one.sqnr != plain.sqnr
    masked = pt2qa.compare_layers(pair, [batch], mask="attention_mask").outputs[0]
    assert one.outputs[0].quantized_sqnr == pytest.approx(masked.sqnr, abs=1e-6)
    assert {row.name: row.sqnr for row in one.stages}["converted"] == pytest.approx(masked.sqnr, abs=1e-6)
