"""A part of the bench: what is planted is what a diagnosis names first, and its remedy brings back what was lost."""

from __future__ import annotations

import pytest

from tests.diagnosis.bench import Bench
from tests.diagnosis.faults import every_fault

FAULTS = every_fault()

CASES = [
    ("faint-calibration", "linears", "xnnpack"),
    ("freak-batch", "linears", "x86"),
    ("lagging-observer", "linears", "xnnpack"),
    ("outlier-weight-channel", "linears", "x86"),
    ("wrong-axis", "plain", "xnnpack"),
    ("int8-bias", "linears", "xnnpack"),
    ("weights-of-a-dead-channel", "linears", "xnnpack"),
    ("outlier-activation-channel", "linears", "xnnpack"),
    ("tiny-scales", "linears", "xnnpack"),
    ("four-bit-value", "plain", "x86"),
    ("wide-fixed-range", "linears", "x86"),
    ("rounded-before-relu", "linears", "x86"),
    ("log-of-zero", "linears", "xnnpack"),
    ("forgotten-mean", "plain", "xnnpack"),
    ("scale-too-small", "linears", "x86"),
    ("drifted", "linears", "xnnpack"),
    ("overflowing-bias", "linears", "xnnpack"),
]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(("fault", "model", "quantizer"), CASES)
def test_the_first_cause_is_the_planted_one(bench: Bench, fault: str, model: str, quantizer: str) -> None:
    found = bench.planted(FAULTS[fault], model, quantizer)
    assert found is not None
    assert (found.cause in FAULTS[fault].causes, found.right_place) == (True, True), found
    assert found.share > 0.5, found


@pytest.mark.parametrize("fault", ["units-and-weight", "contrast-and-bias"])
def test_of_two_faults_both_are_found_the_larger_first(bench: Bench, fault: str) -> None:
    found = bench.planted(FAULTS[fault], "linears", "xnnpack")
    assert found is not None
    assert found.right, found


@pytest.mark.parametrize("fault", ["dead-channel", "nan-sample", "prepare-changes"])
def test_what_costs_nothing_is_no_cause_and_is_shown(bench: Bench, fault: str) -> None:
    found = bench.planted(FAULTS[fault], "linears", "xnnpack")
    assert found is not None
    assert found.right, found


@pytest.mark.parametrize(("model", "quantizer"), [("plain", "xnnpack"), ("linears", "x86")])
def test_an_untouched_model_has_nothing_to_do(bench: Bench, model: str, quantizer: str) -> None:
    assert bench.healthy(model, quantizer).right
