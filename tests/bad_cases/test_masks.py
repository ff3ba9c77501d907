"""What analyses say of a mask that some outputs have no axes for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pt2qa
from pt2qa._report.sums import settings_of
from tests.padded_prompts import Running, padded, prompts, quantized


class Pooled(Running):
    """Logits of each token, and one vector for each prompt."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        logits = super().forward(input_ids, attention_mask)["logits"]
        return {"logits": logits, "pooled": logits.sum(1)}


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized(Pooled(), "xnnpack")


@pytest.mark.parametrize("analysis", [pt2qa.find_bad_cases, pt2qa.sensitivity])
def test_outputs_without_the_axes_of_a_mask_are_noted_and_the_mask_is_named(
    pair: pt2qa.QuantizedPair, analysis: Any
) -> None:
    def noted(**options: Any) -> tuple[list[str], str | None]:
        report = analysis(pair, [padded(prompts())], progress=False, **options)
        return [note for note in report.notes if "1 of 2 outputs" in note], settings_of(report.sums).get("mask")

    (note,), name = noted(mask="attention_mask")
    assert "pooled" in note or "sum" in note
    assert name == "attention_mask"
    assert noted(mask="attention_mask", post_process=lambda out: out["logits"]) == ([], "attention_mask")
    assert noted() == ([], None)
