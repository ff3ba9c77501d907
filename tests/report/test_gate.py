"""A gate passes what meets its requirements, and says of all else what misses, where, and by how much."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace
from math import inf, isnan, nan
from xml.etree import ElementTree

import pytest

from pt2qa.errors import ReportError, SelectionError
from pt2qa.report import ConformanceReport, ConformanceRow, Finding, Findings, GateCheck, GateResult, gate
from tests.report.conftest import HERE


@pytest.fixture
def worse(layers):
    """A planted regression: one layer loses 12 dB, the output 2.5; one row is renamed; other data, another model."""
    rows = list(layers.rows)
    rows[3] = replace(rows[3], isolated_sqnr=rows[3].isolated_sqnr - 12.0)
    rows[4] = replace(rows[4], isolated_sqnr=rows[4].isolated_sqnr - 0.5)
    rows[6] = replace(rows[6], name="features.6.conv.1.1/conv2d")
    output = replace(layers.outputs[0], sqnr=layers.outputs[0].sqnr - 2.5)
    environment = replace(HERE, torch="2.14.0", fingerprint="77")
    return replace(layers, rows=tuple(rows), outputs=(output,), samples=64, environment=environment)


def only(result: GateResult) -> GateCheck:
    (check,) = result.checks
    return check


@pytest.mark.parametrize(
    ("requirement", "passed", "measured"),
    [
        ("sqnr>=13", True, 13.46),
        ("sqnr >= 13.5 dB", False, 13.46),
        ("sqnr>13.46", False, 13.46),
        ("sqnr==13.46", True, 13.46),
        ("samples==32", True, 32.0),
        ("batches<4", False, 4.0),
        ("rows.saturation<=0.05", True, 0.0421),
        ("rows.saturation<0.01", False, 0.0421),
        ("features.7.*:isolated_sqnr>=8", True, 8.24),
        ("features.1*:isolated_sqnr>=25.5", False, 25.0),
        ("modules.sqnr>=30", True, 30.0),
        ("outputs.atol<=0.5", False, 0.5321),
    ],
)
def test_a_requirement_is_held(layers, requirement, passed, measured):
    result = gate(layers, require=requirement)
    assert (result.passed, only(result).passed, only(result).measured) == (passed, passed, measured)


def test_every_row_must_meet_a_requirement_and_the_worst_come_first(layers):
    check = only(gate(layers, require="rows.sqnr>=22.5 dB"))
    assert (check.passed, check.rows, check.measured) == (False, 26, 21.0)
    assert check.where == (
        "features.7.conv.1.0/conv2d: 21 dB",
        "features.25.conv.1.0/conv2d: 21.25 dB",
        "features.24.conv.1.0/conv2d: 22 dB",
        "features.9.conv.1.0/conv2d: no number (the reference is zero)",
    )
    equal = only(gate(layers, require="rows.handle==3"))
    assert (equal.measured, equal.where[0]) == (25.0, "features.25.conv.1.0/conv2d: 25")


def test_a_missing_number_meets_nothing(layers, empty, layer):
    for requirement in ("rows.mse<=inf", "rows.sqnr>=-1000"):
        rows = replace(layers, rows=(layer(mse=nan, sqnr=nan, note="nothing was seen"),))
        check = only(gate(rows, require=requirement))
        assert not check.passed
        assert isnan(check.measured)
        assert check.where == ("features.0/conv2d: no number (nothing was seen)",)
    for requirement in ("sqnr>=-1000", "rows.sqnr>=-1000", "any*:sqnr>=-1000"):
        assert not gate(empty, require=requirement).passed
    assert only(gate(empty, require="sqnr>=1")).outcome == "no number, the report has no outputs"
    assert only(gate(empty, require="rows.sqnr>=1")).outcome == "no number, the report has no rows"


def test_an_output_without_a_number_does_not_hide_behind_another(layers, layer):
    broken = layer(name="output[1]", sqnr=nan, note="not finite in the quantized model: 3 values")
    report = replace(layers, outputs=(layer(name="output[0]", sqnr=30.0), broken))
    assert report.sqnr == 30.0
    check = only(gate(report, require="sqnr>=20"))
    assert not check.passed
    assert check.where == ("output[1]: no number (not finite in the quantized model: 3 values)",)
    healthy = replace(report, outputs=(report.outputs[0], replace(broken, sqnr=30.0, note="")))
    assert [check.passed for check in gate(report, baseline=healthy, max_drop=99).checks] == [False, True]


def test_infinity_is_a_number(layers, layer):
    same = replace(layers, rows=(layer(sqnr=inf),))
    assert gate(same, require=["rows.sqnr>=100", "rows.sqnr==inf"]).passed
    assert gate(same, baseline=same, max_drop=0).checks[-1].measured == 0.0


def test_the_same_report_drops_by_nothing(layers, weights):
    for report in (layers, weights):
        result = gate(report, baseline=report, max_drop=0.0)
        assert result.passed
        assert result.warnings == ()
    assert gate(layers, baseline=layers, max_drop=0).notes == (
        "1 row not compared: features.9.conv.1.0/conv2d (no number before and now: the reference is zero)",
    )


def test_a_drop_is_held_against_the_baseline(layers, worse):
    result = gate(worse, baseline=layers, max_drop=1.0)
    outputs, rows = result.checks
    assert (outputs.what, outputs.limit, outputs.passed) == ("drop of outputs.sqnr", "<= 1 dB", False)
    assert outputs.measured == pytest.approx(2.5)
    assert outputs.where == ("output: 2.5 dB, from 13.46 to 10.96 dB",)
    assert (rows.what, rows.rows, rows.measured) == ("drop of rows.isolated_sqnr", 24, 12.0)
    assert rows.where == ("features.3.conv.1.0/conv2d: 12 dB, from 33 to 21 dB",)
    assert result.missed == (outputs, rows)
    assert gate(worse, baseline=layers, max_drop=12.0).passed
    assert [len(check.where) for check in gate(worse, baseline=layers, max_drop=0.1).checks] == [1, 2]


def test_another_measure_can_be_held_against_the_baseline(layers, worse):
    check = gate(worse, baseline=layers, max_drop=1.0, by="sqnr").checks[-1]
    assert (check.what, check.rows, check.passed) == ("drop of rows.sqnr", 24, True)


def test_a_baseline_that_is_hard_to_compare_with_is_a_warning_and_what_is_left_out_a_note(layers, worse):
    result = gate(replace(worse, quantizer="x86"), baseline=layers, max_drop=99)
    assert result.passed
    assert result.warnings == (
        "the baseline used another amount of data: samples 32, now 64",
        "the baseline was made with another quantizer: quantizer xnnpack, now x86",
        "the baseline was made from another float model: fingerprint 3f2a, now 77",
        "1 row of the baseline is gone: features.6.conv.1.0/conv2d",
    )
    assert result.notes == (
        "1 row is new: features.6.conv.1.1/conv2d",
        "1 row not compared: features.9.conv.1.0/conv2d (no number before and now: the reference is zero)",
        "torch: 2.13.0, now 2.14.0",
    )


def test_a_number_that_went_is_a_miss_and_one_that_came_is_not(layers, layer):
    there = replace(layers, rows=(layer(isolated_sqnr=30.0), layer(name="b")))
    gone = replace(layers, rows=(layer(isolated_sqnr=nan, note="nothing was seen"), layer(name="b")))
    check = gate(gone, baseline=there, max_drop=99).checks[-1]
    assert not check.passed
    assert check.where == ("features.0/conv2d: no number now: nothing was seen",)
    assert gate(there, baseline=gone, max_drop=0).passed


def test_nothing_to_compare_is_a_miss(layers, empty, layer):
    other = replace(layers, rows=(layer(name="another"),))
    for report, baseline in ((layers, other), (empty, empty)):
        check = gate(report, baseline=baseline, max_drop=99).checks[-1]
        assert not check.passed
        assert check.outcome == "no number, no row has a number in both reports"


FINDINGS = Findings(
    (Finding("dead-code", "warning", "a/relu", "", "w", "f"),),
    (),
    (),
    notes=(),
    quantizer="xnnpack",
    model="Net",
    environment=HERE,
)


def test_findings_are_gated_by_their_counts():
    assert gate(FINDINGS, require=["error_count==0", "warning_count<=1"]).passed
    more = replace(FINDINGS, rows=(*FINDINGS.rows, replace(FINDINGS.rows[0], severity="error")))
    assert gate(more, require="error_count==0").missed[0].title == "error_count == 0"
    result = gate(more, baseline=FINDINGS, max_drop=0)
    assert [(check.what, check.outcome) for check in result.missed] == [("drop of error_count", "1, from 0 to 1")]
    assert result.notes[0] == "1 row is new: a/relu (dead-code)"
    assert gate(FINDINGS, baseline=more, max_drop=0).passed


def test_a_gate_without_a_check_is_no_pass():
    result = GateResult((), (), (), "annotations", "xnnpack", "Net")
    assert not result.passed
    assert str(result).startswith("Missed: nothing was checked (Net, xnnpack, annotations).")


def test_conformance_is_gated_by_the_number_of_failures():
    row = ConformanceRow("q", "prepare", "linear", "failed", "", 0.0)
    old = ConformanceReport((row,), (), notes=(), quantizer="q", environment=HERE)
    new = replace(old, rows=(row, replace(row, model="conv")))
    assert gate(old, baseline=old, max_drop=0).passed
    assert [check.what for check in gate(new, baseline=old, max_drop=0).missed] == ["drop of failure_count"]


def test_a_flag_may_not_drop_however_much_numbers_may():
    from tests.report.test_report_diff import edited

    result = gate(edited(quality=20.0, met=0), baseline=edited(quality=20.0, met=1), max_drop=5.0)
    assert [(check.title, check.outcome) for check in result.missed] == [("drop of met <= 0", "1, from 1 to 0")]


def test_a_number_of_the_report_that_is_missing_says_what_it_is():
    from tests.report.test_report_diff import SENSITIVITY

    report = replace(SENSITIVITY, planned=5)
    assert only(gate(report, require="predicted_sqnr>=1")).outcome == (
        "no number, Output SQNR in dB if the noise of the sites added up; nan where rows are missing."
    )
    assert only(gate(report, require="rows.value >= 35 dB")).where == ("a (weight): 30 dB",)


@pytest.mark.parametrize("width", [60, 100])
def test_a_result_at_several_widths(layers, worse, golden, width):
    require = ["sqnr>=20", "rows.isolated_sqnr>=26", "samples>=8", "features.2*:sqnr>=20"]
    text = gate(worse, require=require, baseline=layers, max_drop=1.0).text(width=width)
    golden(f"gate-missed-{width}", text)
    assert max(map(len, text.splitlines())) <= width


def test_a_result_that_is_passed(layers, golden):
    result = gate(layers, require=["sqnr>=10", "sqnr >= 10"], baseline=layers, max_drop=1.0)
    assert len(result.checks) == 3
    golden("gate-passed", result.text(width=100))


def test_a_result_cannot_be_changed(layers):
    result = gate(layers, require="sqnr>=1")
    with pytest.raises(FrozenInstanceError):
        result.checks = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, SelectionError, "nothing to check: give requirements such as 'sqnr>=20', or a baseline and max_drop"),
        ({"max_drop": 1.0}, SelectionError, "give a baseline and max_drop .* together"),
        ({"require": "sqnr>=1", "by": "sqnr"}, SelectionError, "by: got 'sqnr' without a baseline; it names the col"),
        ({"require": "sqnr>=twenty"}, SelectionError, "requirement: got 'sqnr>=twenty', expected a metric"),
        ({"require": "sqrn>=20"}, ReportError, "a LayerReport has no number 'sqrn': did you mean 'sqnr'? expected "),
        ({"require": "cosine>=1"}, ReportError, "no number 'cosine': for each row write 'rows.cosine'; expected "),
        ({"require": "rows.isolated>=1"}, ReportError, "LayerReport.rows has no column 'isolated': did you mean 'iso"),
        ({"require": "row.sqnr>=1"}, ReportError, "a LayerReport has no table 'row': did you mean 'rows'? expected"),
        ({"require": "rows.dtype==8"}, ReportError, "rows.dtype: the column 'dtype' holds text, expected num"),
        ({"require": "rows.cosine>=1 dB"}, ReportError, "rows.cosine is not in dB: leave the unit out"),
        ({"require": "conv9*:sqnr>=1"}, SelectionError, "the pattern 'conv9*' matches no row; the rows are x, "),
    ],
)  # fmt: skip
def test_a_mistake_is_no_miss(layers, options, error, message):
    with pytest.raises(error, match=re.escape(message).replace(r"\.\*", ".*")):
        gate(layers, **options)


@pytest.mark.parametrize("text", ["rows.psnr.low>=30", "*:psnr.low>=30", "*:rows.psnr.low>=30"])
def test_the_name_of_a_custom_metric_may_have_a_dot(layers, text):
    rows = tuple(replace(row, custom={"psnr.low": 40.0}) for row in layers.rows[:2])
    good = replace(layers, rows=rows, outputs=(), modules=())
    bad = replace(good, rows=(rows[0], replace(rows[1], custom={"psnr.low": 5.0})))
    assert gate(good, require=[text]).passed
    assert not gate(bad, require=[text]).passed
    with pytest.raises(ReportError, match=r"no number 'psnr.low': for each row write 'rows.psnr.low'"):
        gate(good, require=["psnr.low>=30"])


def test_a_custom_metric_drops_as_it_says(layers):
    """psnr 40 -> 5 once passed: large values of every custom metric were taken for the bad ones."""
    rows = tuple(replace(row, custom={"psnr": 40.0}) for row in layers.rows[:2])
    old = replace(layers, rows=rows, outputs=(), modules=(), smaller_is_worse=("psnr",))
    new = replace(old, rows=(replace(rows[0], custom={"psnr": 5.0}), rows[1]))
    missed = {check.what: check.measured for check in gate(new, baseline=old, max_drop=1.0, by="psnr").missed}
    assert missed["drop of rows.psnr"] == 35.0
    assert "drop of rows.psnr" not in {check.what for check in gate(old, baseline=new, max_drop=1.0, by="psnr").missed}


def test_a_drop_of_a_metric_that_does_not_say_what_is_worse_is_refused(layers):
    rows = tuple(replace(row, custom={"psnr": 40.0}) for row in layers.rows[:2])
    silent = replace(layers, rows=rows, outputs=(), modules=())
    message = "'psnr' does not say which of its values are worse, .* worse = 'smaller' or 'larger' .* 'rows.psnr>=30'"
    with pytest.raises(ReportError, match=message):
        gate(silent, baseline=silent, max_drop=1.0, by="psnr")
    assert gate(silent, require="rows.psnr>=30").passed


@pytest.mark.parametrize("max_drop", [-1.0, nan])
def test_a_drop_is_no_less_than_nothing(layers, max_drop):
    with pytest.raises(SelectionError, match=f"max_drop: got {max_drop}, expected 0 or more"):
        gate(layers, baseline=layers, max_drop=max_drop)


def test_a_baseline_of_another_kind_is_refused(layers, weights):
    with pytest.raises(ReportError, match="cannot compare a report of weights with one of layers"):
        gate(layers, baseline=weights, max_drop=1)
    with pytest.raises(SelectionError, match="give a baseline and max_drop"):
        gate(layers, baseline=layers)


def test_junit_has_a_case_for_each_check(layers, worse):
    result = gate(worse, require=["sqnr>=20", "samples>=8"], baseline=layers, max_drop=1.0)
    root = ElementTree.fromstring(result.junit())
    assert result.junit().startswith('<?xml version="1.0" encoding="UTF-8"?>\n')
    (suite,) = root
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    assert {name: suite.attrib[name] for name in ("name", "tests", "failures", "errors", "skipped")} == {
        "name": "MobileNetV2 xnnpack layers", "tests": "4", "failures": "3", "errors": "0", "skipped": "0",
    }  # fmt: skip
    cases = suite.findall("testcase")
    assert [case.attrib["name"] for case in cases] == [check.title for check in result.checks]
    assert {case.attrib["classname"] for case in cases} == {"pt2qa.gate.layers"}
    assert [case.find("failure") is None for case in cases] == [check.passed for check in result.checks]
    failure = cases[0].find("failure")
    assert failure is not None
    assert (failure.attrib["message"], failure.text) == ("output: 10.96 dB", "output: 10.96 dB")
    said = suite.findtext("system-out") or ""
    assert said.splitlines()[0] == "warning: the baseline used another amount of data: samples 32, now 64"


def test_junit_survives_any_name(layers, layer):
    name = 'a<b>&"c"\x1b[31m\x00\ud800]]>'
    report = replace(layers, rows=(layer(name=name, note="<&>"),), model="<Net>")
    root = ElementTree.fromstring(gate(report, require="rows.sqnr>=99").junit())
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.text == 'a<b>&"c"?[31m??]]>: 31.25 dB'
    assert root[0].attrib["name"] == "<Net> xnnpack layers"


def test_github_annotations_are_exactly_these(layers, worse):
    result = gate(worse, require=["sqnr>=20", "samples>=8"], baseline=layers, max_drop=0.25)
    subject = "MobileNetV2 xnnpack layers"
    assert result.github().splitlines() == [
        f"::error title=pt2qa gate%3A sqnr >= 20 dB::{subject}: output: 10.96 dB",
        "::error title=pt2qa gate%3A drop of outputs.sqnr <= 0.25 dB"
        f"::{subject}: output: 2.5 dB, from 13.46 to 10.96 dB",
        f"::error title=pt2qa gate%3A drop of rows.isolated_sqnr <= 0.25 dB::{subject}: 2 of 24 rows miss it"
        "%0Afeatures.3.conv.1.0/conv2d: 12 dB, from 33 to 21 dB"
        "%0Afeatures.4.conv.1.0/conv2d: 0.5 dB, from 27 to 26.5 dB",
        f"::warning title=pt2qa gate::{subject}: the baseline used another amount of data: samples 32, now 64",
        f"::warning title=pt2qa gate::{subject}: the baseline was made from another float model: fingerprint 3f2a, "
        "now 77",
        f"::warning title=pt2qa gate::{subject}: 1 row of the baseline is gone: features.6.conv.1.0/conv2d",
    ]
    assert gate(layers, require="sqnr>=1").github() == ""


def test_an_output_that_is_gone_is_a_miss_and_a_layer_a_warning(layers):
    renamed = replace(layers, outputs=(replace(layers.outputs[0], name="logits", sqnr=-30.0),))
    result = gate(renamed, baseline=layers, max_drop=1.0)
    missed = next(check for check in result.checks if check.what == "drop of outputs.sqnr")
    assert not result.passed
    assert "output: is gone" in missed.where
    rows = tuple(replace(row, name=f"new.{row.name}", isolated_sqnr=-20.0) for row in layers.rows[1:])
    result = gate(replace(layers, rows=(layers.rows[0], *rows)), baseline=layers, max_drop=1.0)
    assert any("25 rows of the baseline are gone" in warning for warning in result.warnings)


def test_the_measure_is_the_baselines(layers):
    quick = replace(layers, rows=tuple(replace(row, isolated_sqnr=nan) for row in layers.rows))
    result = gate(quick, baseline=layers, max_drop=1.0)
    assert not result.passed
    assert any(check.what == "drop of rows.isolated_sqnr" and not check.passed for check in result.checks)


def test_what_cannot_be_held_against_a_baseline_is_refused(layers):
    with pytest.raises(ReportError, match="by: 'op' is text, which is neither better nor worse"):
        gate(layers, baseline=layers, max_drop=1.0, by="op")
    with pytest.raises(SelectionError, match="max_drop: got inf"):
        gate(layers, baseline=layers, max_drop=inf)
    with pytest.raises(ReportError, match=r"got str, expected a report; pt2qa\.load\(path\) reads one"):
        gate("layers.safetensors", require="sqnr>=20")
    with pytest.raises(ReportError, match="got str, expected a report"):
        gate(layers, baseline="layers.safetensors", max_drop=1.0)


def test_github_annotations_escape_what_ends_them():
    check = GateCheck("a,b:c", "<= 5 %", 6.0, "", False, 2, ("x: 50 %", "y\r\n::error::z"))
    assert GateResult((check,), (), (), "k", "q", "M").github() == (
        "::error title=pt2qa gate%3A a%2Cb%3Ac <= 5 %25::M q k: 2 of 2 rows miss it%0Ax: 50 %25%0Ay??::error::z"
    )


def test_annotations_stop_after_some_rows_and_junit_names_all(layers):
    result = gate(layers, require="rows.handle==-1")
    assert len(only(result).where) == 26
    assert result.github().endswith("%0Aand 21 more")
    assert "  and 21 more" in str(result)
    failure = ElementTree.fromstring(result.junit()).find("testsuite/testcase/failure")
    assert failure is not None
    assert len((failure.text or "").splitlines()) == 26
