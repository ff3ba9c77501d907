"""``compare_quantizers(mask=)``: padding is in no number of any candidate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pt2qa
from tests.padded_prompts import Running, padded, prompts, quantized, with_garbage


@pytest.fixture(scope="module")
def pairs() -> dict[str, pt2qa.QuantizedPair]:
    torch.manual_seed(0)
    first = quantized(Running(), "xnnpack")
    assert first.capture is not None
    other = pt2qa.quantize(first.capture, "xnnpack:per_channel=False", [padded(prompts())], progress=False)
    return {"channel": first, "tensor": other}


def compared(pairs: dict[str, pt2qa.QuantizedPair], batches: Any, mask: Any = None) -> pt2qa.CandidateReport:
    capture = pairs["channel"].capture
    assert capture is not None
    return pt2qa.compare_quantizers(capture, pairs, [], batches, mask=mask, progress=False)


def _values(report: pt2qa.CandidateReport) -> dict[str, float]:
    found = {f"{row.name} {name}": value for row in report.rows for name, value in row.custom.items()}
    return found | {each.name: each.sqnr for each in report.candidates}


def test_a_padded_batch_equals_its_prompts_one_by_one(pairs: dict[str, pt2qa.QuantizedPair]) -> None:
    masked = compared(pairs, [padded(prompts())], "attention_mask")
    alone = compared(pairs, [padded([prompt]) for prompt in prompts()])
    assert _values(masked) == pytest.approx(_values(alone), abs=1e-6, nan_ok=True)


def test_what_stands_at_padded_positions_changes_nothing(pairs: dict[str, pt2qa.QuantizedPair]) -> None:
    batch = padded(prompts())
    masked, other = (compared(pairs, [each], "attention_mask") for each in (batch, with_garbage(batch)))
    assert _values(masked) == _values(other)
    assert _values(masked) != _values(compared(pairs, [batch]))


def test_masked_reports_merge_with_their_like_alone(pairs: dict[str, pt2qa.QuantizedPair]) -> None:
    batches = [padded(prompts()[:2]), padded(prompts()[2:])]
    masked = [compared(pairs, [batch], "attention_mask") for batch in batches]
    whole = compared(pairs, batches, "attention_mask")
    assert _values(pt2qa.merge(masked)) == pytest.approx(_values(whole), rel=1e-9)
    with pytest.raises(pt2qa.ReportError, match="mask of report 2 is None, of the first one 'attention_mask'"):
        pt2qa.merge([masked[0], compared(pairs, batches[1:])])


def test_there_is_no_such_input(pairs: dict[str, pt2qa.QuantizedPair]) -> None:
    with pytest.raises(pt2qa.SelectionError, match="mask: the model has no input 'mask'; it has input_ids"):
        compared(pairs, [padded(prompts())], "mask")
