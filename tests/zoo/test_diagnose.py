"""Diagnoses of real models: the causes that are known, and none where nothing is wrong."""

from __future__ import annotations

import functools

import pytest
import torch

import pt2qa
from tests.zoo import pairs

pytestmark = pytest.mark.zoo


@functools.cache
def diagnosed(model: str, quantizer: str) -> pt2qa.Diagnosis:
    """The diagnosis on all the model's data."""
    return pt2qa.diagnose(pairs.pair_of(model, quantizer), pairs.captured(model).batches[:2], progress=False)


@pytest.mark.parametrize(("model", "least"), [("efficientnet_lite0", 8.0), ("mobilenet_v2", 3.0)])
def test_unfused_activations_are_the_cause(model: str, least: float) -> None:
    found = diagnosed(model, "xnnpack")
    row = found.rows[0]
    assert row.cause == "unfused-activation"
    assert row.gain > least
    assert row.cost == 0.0
    assert found.code_verified == "equal"
    # The pair that it holds has what it says, measured by torch alone.
    made = pairs.captured(model)
    with torch.no_grad():
        reference = [made.model(batch) for batch in made.batches[:2]]
        quantized = [found.pair.quantized(batch) for batch in made.batches[:2]]
    assert pairs.decibels(reference, quantized) == pytest.approx(found.sqnr_after, abs=0.01)


@pytest.mark.parametrize("quantizer", pairs.QUANTIZERS)
@pytest.mark.parametrize("model", ["resnet18", "digit_net"])
def test_nothing_is_wrong(model: str, quantizer: str) -> None:
    found = diagnosed(model, quantizer)
    assert [(row.cause, row.name, row.gain) for row in found.rows] == []
    assert found.verdict.startswith("Nothing to do: ")


@pytest.mark.parametrize("quantizer", pairs.QUANTIZERS)
def test_what_a_good_model_gains_for_little_holds_on_utterances_that_nothing_has_seen(quantizer: str) -> None:
    """The last linear makes most of the noise, and has few of the multiply-accumulates.

    Of utterances that did not calibrate the model, other values are clamped as well, so the gain is smaller there.
    """
    found, made = diagnosed("speech_encoder", quantizer), pairs.captured("speech_encoder")
    (unseen,) = made.batches[2:]
    assert [row.cause for row in found.rows] in ([], ["precision"])
    for row in found.rows:
        assert row.cost < 0.001
        with torch.no_grad():
            before, after = (
                pairs.decibels([made.model(unseen)], [pair.quantized(unseen)])
                for pair in (pairs.pair_of("speech_encoder", quantizer), found.pair)
            )
        assert after - before > 1


@pytest.mark.parametrize("model", ["mobilenet_v2", "efficientnet_lite0"])
def test_poor_models_without_a_fault_get_fallbacks_at_most(model: str) -> None:
    """On x86 both have less than 20 dB, and no range, weight or configuration is at fault."""
    found = diagnosed(model, "x86")
    assert found.sqnr < 20
    for row in found.rows:
        assert row.cause == "precision"
        assert row.gain_in_sequence >= 3
        assert row.cost < 0.25
    assert found.rows or found.verdict.startswith("No single cause: ")
