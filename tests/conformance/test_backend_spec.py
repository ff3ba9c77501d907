"""The property backend_spec: where the spec comes from, and the line that each fault breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pt2qa.errors import SelectionError
from pt2qa.plugins import BackendSpec, OpSpec, spec_of
from pt2qa.testing import QuantizerConformance, check_quantizer
from tests.conformance.quantizers import SPEC, AffineWeights, Honest, SharesNoCat, WrongAxis

OTHERS = ["prepare", "convert", "simulator", "shared_specs", "sqnr"]


def report(quantizer: type[Honest], model: str, *properties: str, spec: BackendSpec | None = None):
    chosen = ["backend_spec", *properties]
    return check_quantizer(quantizer, models=[model], properties=chosen, spec=spec, progress=False)


@pytest.mark.parametrize(
    ("quantizer", "model", "why"),
    [
        (
            AffineWeights,
            "depthwise",
            "first/conv2d: its weight is int8, per tensor, affine, -128..127; the spec of its backend says "
            '"conv2d: weight int8, per channel (axis 0), symmetric, -127..127"',
        ),
        (
            WrongAxis,
            "linear",
            "0/linear: its weight is int8, per channel (axis 1), symmetric, -127..127; the spec of its backend says "
            '"linear: weight int8, per channel (axis 0), symmetric, -127..127"',
        ),
        (
            SharesNoCat,
            "cat",
            "cat: separate scales for its input branch/conv2d, its input stem/conv2d and its output; "
            'the spec of its backend says "cat: one scale for all inputs and the output"',
        ),
    ],
    ids=["affine", "axis", "cat"],
)
def test_each_fault_fails_with_the_line_that_it_breaks(quantizer: type[Honest], model: str, why: str) -> None:
    found = report(quantizer, model, *OTHERS)
    assert [row.property for row in found.failures] == ["backend_spec"]
    assert found.failures[0].why.startswith(why)


def test_without_a_spec_the_property_is_not_applied() -> None:
    class Silent(WrongAxis):
        spec = None

    found = report(Silent, "linear", "prepare")
    assert [(row.outcome, row.why.partition(":")[0]) for row in found.rows] == [
        ("does not apply", "no spec given"),
        ("passed", "a prepared graph"),
    ]
    assert found.notes[1].startswith("backend_spec was not applied: no spec given: pass spec=")
    unseen = "dtypes, axes, ranges and scales that the backend does not take are not seen"
    assert found.text(width=200).splitlines()[0] == f"Silent: 2 properties on 1 model, without a spec: {unseen}"
    every = replace(found, models=1, properties=2)
    assert every.passed
    assert every.summary().splitlines()[0] == f"Nothing failed, but {unseen}."
    assert report(Silent, "linear", spec=SPEC).failures
    judged = report(Honest, "linear")
    assert len(judged.notes) == 1
    assert judged.text(width=200).splitlines()[0] == "Honest: 1 property on 1 model"


def test_the_spec_that_is_given_comes_first() -> None:
    assert not report(WrongAxis, "linear", spec=BackendSpec("npu", (OpSpec(ops=("linear",)),))).failures
    (row,) = report(Honest, "linear", spec=BackendSpec("npu", (OpSpec(ops=("conv2d",)),))).rows
    assert (row.outcome, row.why) == ("does not apply", "the spec of npu has no line for any op that is annotated")
    assert spec_of(Honest()) is SPEC


def test_a_conformance_class_takes_a_spec() -> None:
    class Tests(QuantizerConformance):
        models = ("linear",)
        spec = SPEC

        def make_quantizer(self) -> WrongAxis:
            return WrongAxis()

    with pytest.raises(pytest.fail.Exception, match="linear: weight int8, per channel"):
        Tests().test_conformance("backend_spec", "linear")


def test_what_is_no_spec_is_an_error() -> None:
    with pytest.raises(SelectionError, match="spec: got tuple, expected a BackendSpec"):
        report(Honest, "linear", spec=())
