"""A quantizer that behaves passes; one that breaks a property fails there alone, and the message names the op."""

from __future__ import annotations

import pytest

from pt2qa.testing import MODELS, PROPERTIES, check_quantizer
from tests.conformance.quantizers import BROKEN, Circle, Honest, Integers

SOME = [*list(MODELS)[::4], "lstm_decomposed"]
"""Enough to see every property."""


def failures(quantizer: object, model: str) -> dict[str, str]:
    """The reason by property that fails."""
    report = check_quantizer(quantizer, models=[model], progress=False)
    return {row.property: row.why for row in report.failures}


def test_a_small_honest_quantizer_passes_everything() -> None:
    report = check_quantizer(Honest, models=SOME, progress=False)
    assert report.passed, str(report)
    assert len(report.rows) == len(SOME) * len(PROPERTIES)
    passed = {row.property for row in report.rows if row.outcome == "passed"}
    assert passed == set(PROPERTIES) - {"order"}  # it has no list of annotators


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_one_property_fails_there_and_names_the_op(name: str) -> None:
    quantizer, model, where, what = BROKEN[name]
    found = failures(quantizer, model)
    assert list(found) == [name], found
    assert where in found[name]
    assert what in found[name]


def test_every_property_has_a_quantizer_that_breaks_it() -> None:
    assert {*BROKEN, "float_tensors"} == set(PROPERTIES)


def test_integers_that_are_observed_fail_where_they_are_used_too() -> None:
    found = failures(Integers, "embedding")
    assert found["float_tensors"] == "words → table/embedding is int64"
    assert "cannot run: at words, quantized_decomposed.quantize_per_tensor.default fails on int64" in found["convert"]
    assert set(found) == {"convert", "float_tensors"}


def test_a_circle_of_shared_scales_is_named_where_torchao_ends_in_a_recursion() -> None:
    found = failures(Circle, "conv_relu")
    assert found["shared_specs"] == (
        "conv/conv2d: shares its scale in a cycle: x, as conv/conv2d reads it -> the output of conv/conv2d -> x, as "
        "conv/conv2d reads it"
    )
    assert "RecursionError" in found["prepare"]
    assert set(found) == {"prepare", "shared_specs"}
