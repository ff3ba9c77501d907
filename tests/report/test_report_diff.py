"""A diff finds rows again by name, holds numbers against a tolerance, and says what else is different."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, isnan, nan

import numpy as np
import pytest
from click.testing import CliRunner

import pt2qa
from pt2qa.cli import main
from pt2qa.errors import ReportError
from pt2qa.report import (
    BadCases,
    CandidateReport,
    CandidateRow,
    CaseRow,
    DiffRow,
    EditRow,
    Finding,
    Findings,
    Ranking,
    Reconfiguration,
    Report,
    SensitivityReport,
    SensitivityRow,
    Stage,
    StoredCase,
    diff,
    history,
    load,
)
from tests.report.conftest import HERE


def statuses(found) -> dict[str, str]:
    return {row.place: row.status for row in found.rows}


@pytest.fixture
def newer(layers):
    """The same layers later: one worse, one better, one renamed, one without a number; more data, another torch."""
    rows = list(layers.rows)
    rows[3] = replace(rows[3], isolated_sqnr=rows[3].isolated_sqnr - 12.5)
    rows[4] = replace(rows[4], isolated_sqnr=rows[4].isolated_sqnr + 0.05)
    rows[5] = replace(rows[5], isolated_sqnr=inf)
    rows[6] = replace(rows[6], name="features.6.conv.1.1/conv2d")
    rows[8] = replace(rows[8], isolated_sqnr=nan, note="not finite in the quantized model: 3 values")
    output = replace(layers.outputs[0], sqnr=11.0)
    environment = replace(HERE, torch="2.14.0", fingerprint="77")
    return replace(layers, rows=tuple(rows), outputs=(output,), samples=64, environment=environment)


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_diff_at_several_widths(layers, newer, golden, width):
    text = diff(layers, newer).text(width=width)
    golden(f"diff-layers-{width}", text)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("sort", ["graph", "name", "loss"])
def test_a_diff_in_several_orders(layers, newer, golden, sort):
    golden(f"diff-by-{sort}", diff(layers, newer).table(sort, limit=12, width=100))


def test_equal_reports_have_no_difference(layers, weights, empty, golden):
    golden("diff-equal", diff(layers, layers).text(width=100))
    golden("diff-empty", diff(empty, empty).text(width=100))
    for report in (layers, weights, empty):
        found = diff(report, report)
        assert set(statuses(found).values()) <= {"unchanged"}
        assert found.changes == ()
        assert {row.status for row in found.figures} <= {"unchanged"}


def test_rows_without_a_number_in_either_report_are_not_said_to_be_unchanged(layers, layer):
    rows = (layer(name="a"), layer(name="b", isolated_sqnr=nan, note="not finite"))
    some = replace(layers, rows=rows)
    said = diff(some, some).text(width=120)
    assert "Of 2 rows: 1 unchanged, 1 without a number before and now." in said
    assert said.splitlines()[-1] == "Without a number before and now: b."
    none = replace(layers, rows=(replace(rows[1], sqnr=nan),), outputs=())
    assert "No row has a number in either report." in diff(none, none).text(width=120)
    assert not pt2qa.gate(none, baseline=none, max_drop=1.0).passed


def test_rows_are_worse_and_better_beyond_the_tolerance(layers, newer):
    found = diff(layers, newer)
    assert (found.measure, found.worst_is, found.unit, found.tolerance) == ("rows.isolated_sqnr", "smallest", "dB", 0.1)
    changed = {name: status for name, status in statuses(found).items() if status != "unchanged"}
    assert changed == {
        "features.3.conv.1.0/conv2d": "worse",
        "features.5.conv.1.0/conv2d": "better",
        "features.6.conv.1.0/conv2d": "gone",
        "features.6.conv.1.1/conv2d": "new",
        "features.8.conv.1.0/conv2d": "changed",
    }
    assert statuses(diff(layers, newer, tolerance=0.01))["features.4.conv.1.0/conv2d"] == "better"
    assert statuses(diff(layers, newer, tolerance=12.5))["features.3.conv.1.0/conv2d"] == "unchanged"


def test_numbers_are_those_of_numpy(layers, layer):
    noise = np.random.default_rng(0).normal(0, 1, (2, 40))
    reports = [
        replace(layers, rows=tuple(layer(name=f"l{i}", mse=float(value)) for i, value in enumerate(values)))
        for values in noise
    ]
    found = diff(*reports, by="mse", tolerance=0.5)
    change = noise[1] - noise[0]
    assert [row.change for row in found.rows] == pytest.approx(change, abs=1e-15)
    assert [row.loss for row in found.rows] == pytest.approx(change, abs=1e-15)
    assert [row.status for row in found.rows] == np.select(
        [change > 0.5, change < -0.5], ["worse", "better"], "unchanged"
    ).tolist()


@pytest.mark.parametrize(
    ("before", "after", "status", "loss"),
    [
        (inf, inf, "unchanged", 0.0),
        (inf, 40.0, "worse", inf),
        (40.0, inf, "better", -inf),
        (40.0, -inf, "worse", inf),
        (nan, nan, "unchanged", nan),
        (nan, 40.0, "changed", nan),
        (40.0, nan, "changed", nan),
        (40.0, 39.95, "unchanged", 0.05),
        (0.0, -0.0, "unchanged", 0.0),
    ],
)
def test_infinities_and_missing_numbers(layers, layer, before, after, status, loss):
    old, new = (
        replace(layers, rows=(layer(name="a", isolated_sqnr=30.0), layer(name="b", isolated_sqnr=value, note="why")))
        for value in (before, after)
    )
    row = diff(old, new).rows[1]
    assert row.status == status
    assert row.loss == pytest.approx(loss, nan_ok=True)
    assert row.note == {(True, True): "no number before and now: why", (True, False): "no number before: why",
                        (False, True): "no number now: why"}.get((isnan(before), isnan(after)), "")  # fmt: skip


def test_gone_rows_stand_where_they_were(layers, layer):
    old = replace(layers, rows=tuple(layer(name=name) for name in "abcdef"))
    new = replace(layers, rows=tuple(layer(name=name) for name in "bxdf"))
    assert [row.name for row in diff(old, new).rows] == ["a", "b", "c", "x", "d", "e", "f"]
    assert [row.name for row in diff(old, replace(new, rows=())).rows] == list("abcdef")
    assert set(statuses(diff(replace(new, rows=()), old)).values()) == {"new"}


def test_rows_of_one_name_are_compared_in_their_order(layers, layer):
    old = replace(layers, rows=(layer(name="a", isolated_sqnr=30.0), layer(name="a", isolated_sqnr=20.0)))
    new = replace(
        layers, rows=(layer(name="a", isolated_sqnr=30.0), layer(name="a", isolated_sqnr=10.0), layer(name="a"))
    )
    found = diff(old, new)
    assert [row.status for row in found.rows] == ["unchanged", "worse", "new"]
    assert found.notes == ("1 name shared by several rows, compared in their order: a",)


def test_layers_without_isolated_errors_are_compared_by_the_cumulative(layers):
    cumulative = replace(layers, rows=tuple(replace(row, isolated_sqnr=nan) for row in layers.rows))
    assert diff(cumulative, layers).measure == "rows.sqnr"
    assert diff(layers, cumulative, by="isolated_sqnr").measure == "rows.isolated_sqnr"


def test_each_output_is_a_figure(layers, newer, layer):
    assert [(row.name, row.role, row.loss) for row in diff(layers, newer).figures] == [
        ("output", "sqnr", pytest.approx(2.46))
    ]
    two = replace(layers, outputs=(layer(name="output[0]", sqnr=40.0), layer(name="output[1]", sqnr=20.0)))
    later = replace(two, outputs=(layer(name="output[0]", sqnr=30.0), layer(name="output[1]", sqnr=20.0)))
    assert two.sqnr == later.sqnr
    assert [row.status for row in diff(two, later).figures] == ["worse", "unchanged"]


def test_what_else_differs_is_listed(layers, newer):
    changes = {change.name: (change.before, change.after) for change in diff(layers, newer).changes}
    assert changes == {"samples": ("32", "64"), "torch": ("2.13.0", "2.14.0"), "fingerprint": ("3f2a", "77")}
    other = replace(layers, quantizer="x86", model="ResNet", environment=replace(HERE, fingerprint=""))
    changes = {change.name: change.after for change in diff(layers, other).changes}
    assert changes == {"quantizer": "x86", "model": "ResNet", "fingerprint": "none"}


def test_weights_are_told_apart_by_their_parameter(weights):
    worse = replace(
        weights, rows=(*weights.rows[:1], replace(weights.rows[1], worst_channel_sqnr=-3.0), *weights.rows[2:])
    )
    found = diff(weights, worse)
    assert found.measure == "rows.worst_channel_sqnr"
    assert [row.place for row in found.having("worse")] == ["features.1/conv2d (weight)"]
    assert statuses(found)["classifier.1/linear (bias)"] == "unchanged"
    assert found.figures == ()


SITE = SensitivityRow("a", "weight", "conv2d", 30.0, "int8", 10, 0.1, 0, 0, "", 0, 1.0, 0.1, 0.0, 1, False)
SENSITIVITY = SensitivityReport(
    *((SITE, replace(SITE, name="b", value=40.0)), ("output",), "exact", "sqnr", "smallest", "site", 0, 2, 1e4, 10.0),
    *(30.0, (), ()),
    batches=2,
    samples=16,
    notes=(),
    quantizer="xnnpack",
    model="Net",
    environment=HERE,
)


def test_sensitivities_are_compared_as_their_metric_says(golden):
    later = replace(SENSITIVITY, rows=(replace(SITE, value=25.0), SENSITIVITY.rows[1]), noise=20.0, method="projection")
    found = diff(SENSITIVITY, later)
    golden("diff-sensitivity", found.text(width=100))
    assert (found.unit, found.tolerance, found.worst_is) == ("dB", 0.1, "smallest")
    assert statuses(found) == {"a (weight)": "worse", "b (weight)": "unchanged"}
    assert [row.status for row in found.figures] == ["unchanged", "worse"]
    loss = {"metric": "kl", "worst_is": "largest"}
    found = diff(replace(SENSITIVITY, **loss), replace(later, **loss))
    assert (found.unit, found.tolerance, found.worst_is) == ("", 0.0, "largest")
    assert statuses(found)["a (weight)"] == "better"
    with pytest.raises(
        ReportError, match="cannot compare a report by sqnr with one by kl: give two reports with the same metric"
    ):
        diff(SENSITIVITY, replace(later, **loss))


CASES = BadCases(
    rows=(CaseRow("sqnr", "output", 1, 8.0, 0, 1, 1), CaseRow("l1", "output", 1, 0.5, 0, 1, 1)),
    rankings=(Ranking("sqnr", "output", "smallest", 8, 20.0, 0, 0), Ranking("l1", "output", "largest", 8, 0.1, 0, 0)),
    labels=(),
    cases=(StoredCase(0, 1, 1, 1, '{"tensor": 0, "dtype": "float32"}'),),
    inputs={"0/1/0": np.ones((1, 2), np.float32)},
    batch_axis=0,
    notes=(),
    steps=2,
    samples=8,
    quantizer="xnnpack",
    model="Net",
    environment=HERE,
)


def test_bad_cases_are_compared_sample_by_sample_each_metric_in_its_own_way():
    later = replace(CASES, rows=tuple(replace(row, value=0.75 * row.value) for row in CASES.rows))
    found = diff(CASES, later)
    assert statuses(found) == {"sqnr/output/1": "worse", "l1/output/1": "better"}
    assert (found.worst_is, found.unit) == ("either", "")
    means = replace(CASES, rankings=(CASES.rankings[0], replace(CASES.rankings[1], mean=0.2)))
    assert statuses(diff(CASES, means, by="rankings.mean")) == {"sqnr/output": "unchanged", "l1/output": "worse"}
    only = replace(CASES, rows=CASES.rows[:1], rankings=CASES.rankings[:1])
    assert diff(only, only).unit == "dB"


def edited(*names: str, quality: float, met: int) -> Reconfiguration:
    return Reconfiguration(
        rows=tuple(EditRow(name, "float", 0.1, 0.5, 2, name) for name in names),
        curve=(),
        stages=(Stage("before", 12.0, 0.0, 9), Stage("converted", quality, 0.2, 7)),
        target="sqnr ≥ 20 dB",
        met=met,
        verdict="The target is met." if met else "The target is not met.",
        evaluations=7,
        plan_json='{"edits": []}' if met else '{"edits": [1]}',
        code="a = 1\nb = 2" if met else "a = 1\nb = 3",
        notes=(),
        quantizer="xnnpack",
        model="Net",
        environment=HERE,
    )


def test_reconfigurations_are_compared_by_what_was_measured_with_edits_and_verdict(golden):
    found = diff(edited("a", "b", quality=20.5, met=1), edited("b", "c", quality=19.0, met=0))
    golden("diff-reconfiguration", found.text(width=100))
    assert found.measure == "stages.quality"
    assert statuses(found) == {"before": "unchanged", "converted": "worse"}
    assert found.notes == ("1 row new: c (float)", "1 row gone: a (float)")
    assert [(row.name, row.status) for row in found.figures] == [("met", "worse")]
    assert {change.name for change in found.changes} == {"verdict", "plan_json", "code"}


def test_findings_are_compared_by_severity(golden):
    def findings(*rows: Finding) -> Findings:
        return Findings(rows, (), (), notes=(), quantizer="xnnpack", model="Net", environment=HERE)

    one = Finding("unfused-pair", "warning", "a/conv2d", "", "why", "fix")
    other = Finding("dead-code", "note", "b/relu", "", "why", "fix")
    found = diff(findings(one, other), findings(replace(one, severity="error"), replace(one, name="c/conv2d")))
    golden("diff-findings", found.text(width=100))
    assert statuses(found) == {
        "a/conv2d (unfused-pair)": "changed",
        "b/relu (dead-code)": "gone",
        "c/conv2d (unfused-pair)": "new",
    }
    assert {row.name: row.status for row in found.figures} == {
        "error_count": "worse",
        "warning_count": "unchanged",
        "note_count": "better",
    }


def test_a_diff_is_a_report_like_any_other(layers, newer, tmp_path):
    found = diff(layers, newer)
    found.save(tmp_path / "diff.safetensors")
    back = load(tmp_path / "diff.safetensors")
    assert repr(back.rows) == repr(found.rows)
    assert (back.changes, back.measure) == (found.changes, found.measure)
    assert str(back) == str(found)
    frame = found.to_pandas()
    assert list(frame.columns) == ["name", "role", "status", "before", "after", "change"]
    assert list(found.to_pandas(extended=True).columns)[-3:] == ["loss", "note", "unit"]
    assert frame["change"][3] == -12.5
    assert found.csv().splitlines()[4] == "features.3.conv.1.0/conv2d,,worse,33.0,20.5,-12.5"
    assert repr(found) == "<ReportDiff of layers, MobileNetV2, xnnpack: 1 worse, 1 better of 27 rows>"


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (
            "isolatd",
            r"LayerReport\.rows has no column 'isolatd': did you mean 'isolated_sqnr'\? expected handle, name,",
        ),
        (
            "output.sqnr",
            r"LayerReport has no table 'output': did you mean 'outputs'\? expected rows, outputs, modules,",
        ),
        ("batches", r"LayerReport\.rows has no column 'batches': expected handle, "),
    ],
)
def test_an_unknown_measure_is_refused(layers, by, message):
    with pytest.raises(ReportError, match=message):
        diff(layers, layers, by=by)


def test_two_kinds_are_refused(layers, weights):
    with pytest.raises(
        ReportError, match="cannot compare a report of layers with one of weights: give two reports of the same kind"
    ):
        diff(layers, weights)


@pytest.mark.parametrize("tolerance", [-0.1, nan])
def test_a_tolerance_is_no_less_than_nothing(layers, tolerance):
    with pytest.raises(ReportError, match=f"tolerance: got {tolerance}, expected 0 or more"):
        diff(layers, layers, tolerance=tolerance)


def test_a_kind_without_a_measure_says_how_to_name_one(layers):
    made = diff(layers, layers)
    with pytest.raises(
        ReportError, match=r"the kind 'diff' have no default measure; name one with by= or --by: name, "
    ):
        diff(made, made)
    assert diff(made, made, by="after").rows[0] == DiffRow("x", "", "unchanged", inf, inf, 0.0, 0.0, "")


def test_rows_without_a_name_are_refused():
    with pytest.raises(ReportError, match=r"the rows of SensitivityReport\.parts have no name"):
        diff(SENSITIVITY, SENSITIVITY, by="parts.noise")


def test_yes_and_no_are_equal_or_not():
    later = replace(SENSITIVITY, rows=(replace(SITE, near_tie=True), SENSITIVITY.rows[1]))
    found = diff(SENSITIVITY, later, by="near_tie")
    assert found.worst_is == ""
    assert [(row.status, row.note) for row in found.rows] == [("changed", "False → True"), ("unchanged", "False")]


def test_texts_and_custom_metrics_can_be_compared(layers):
    rows = tuple(replace(row, custom={"psnr": 1.0}) for row in layers.rows[:2])
    old = replace(layers, rows=rows, outputs=(), modules=())
    new = replace(old, rows=(replace(rows[0], dtype="uint8", custom={"psnr": 2.0}), rows[1]))
    assert [row.status for row in diff(old, new, by="psnr").rows] == ["changed", "unchanged"]
    found = diff(old, new, by="dtype")
    assert [(row.status, row.note) for row in found.rows] == [("changed", "int8 → uint8"), ("unchanged", "int8")]
    assert "tolerance" not in str(found)


def test_a_custom_metric_is_worse_as_it_says(layers):
    rows = tuple(replace(row, custom={"psnr": 40.0}) for row in layers.rows[:2])
    old = replace(layers, rows=rows, outputs=(), modules=())
    new = replace(old, rows=(replace(rows[0], custom={"psnr": 5.0}), rows[1]))

    def compared(**says):
        found = diff(replace(old, **says), replace(new, **says), by="psnr")
        return found.worst_is, [(row.status, row.loss) for row in found.rows]

    assert compared(smaller_is_worse=("psnr",)) == ("smallest", [("worse", 35.0), ("unchanged", 0.0)])
    assert compared(larger_is_worse=("psnr",)) == ("largest", [("better", -35.0), ("unchanged", 0.0)])
    # One that does not say has changed, and no more.
    silent = diff(old, new, by="psnr")
    assert silent.worst_is == "unknown"
    assert [(row.status, row.change, isnan(row.loss)) for row in silent.rows] == [
        ("changed", -35.0, True),
        ("unchanged", 0.0, True),
    ]
    assert "psnr, which does not say what is worse" in " ".join(str(silent).split())
    # A report that was made before metrics could say so is read as the other one says.
    assert diff(replace(old, smaller_is_worse=("psnr",)), new, by="psnr").having("worse")


def test_a_metric_is_not_worse_both_ways(layers):
    with pytest.raises(ReportError, match="custom metric 'psnr': said to be worse when smaller and when larger"):
        replace(layers, smaller_is_worse=("psnr",), larger_is_worse=("psnr",))


def test_the_worst_by_a_metric_are_those_that_it_says(layers):
    rows = tuple(replace(row, custom={"psnr": float(row.handle)}) for row in layers.rows[:3])
    report = replace(layers, rows=rows, outputs=(), modules=())
    assert [row.handle for row in report.worst(3, by="psnr")] == [2, 1, 0]
    report = replace(report, smaller_is_worse=("psnr",))
    assert [row.handle for row in report.worst(3, by="psnr")] == [0, 1, 2]
    lines = report.table(sort="psnr", width=60).splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("x ", "feat"))] == [row.name for row in rows]


def test_the_sqnr_of_a_candidate_is_worse_when_smaller():
    row = CandidateRow(0, "fc/linear", "fc", "linear", custom={"a": 30.0})
    report = CandidateReport((row,), (), notes=(), batches=1, samples=1, model="Net", environment=HERE)
    assert diff(report, replace(report, rows=(replace(row, custom={"a": 20.0}),)), by="a").having("worse")


@pytest.mark.parametrize(
    ("column", "smaller", "unit"),
    [
        ("sqnr", True, "dB"),
        ("cosine", True, ""),
        ("range_use", True, ""),
        ("mse", False, ""),
        ("saturation", False, ""),
    ],
)
def test_the_worse_way_and_the_unit_of_a_column(layers, column, smaller, unit):
    assert isinstance(layers, Report)
    found = layers.column(column)
    assert (found.worse == "smaller", found.unit) == (smaller, unit)


def test_a_history_goes_from_build_to_build_and_from_the_first_to_the_last(layers, newer):
    last = replace(newer, rows=layers.rows[:5] + newer.rows[5:])
    found = history({"mon": layers, "tue": newer, "wed": last})
    pairwise = [diff(layers, newer), diff(newer, last)]
    mon, tue, wed = found.builds
    assert [each.value for each in found.builds] == [layers.sqnr, newer.sqnr, last.sqnr]
    assert isnan(mon.moved)
    assert (tue.moved, wed.moved) == (newer.sqnr - layers.sqnr, 0.0)
    assert {(each.number, each.unit) for each in found.builds} == {("sqnr", "dB")}
    for build, changed in zip((tue, wed), pairwise, strict=True):
        counts = [sum(row.status == status for row in changed.rows) for status in ("worse", "better")]
        assert [build.worse, build.better] == counts
    assert (tue.row, tue.loss) == (layers.rows[3].name, 12.5)
    assert "torch 2.13.0 → 2.14.0" in tue.different
    assert (wed.row, wed.different) == ("", "")
    assert isnan(wed.loss)
    assert found.rows == diff(layers, last).rows
    assert "Builds, by sqnr; below, mon → wed" in found.text()
    with pytest.raises(ReportError, match="two reports or more, got 1"):
        history({"mon": layers})


def test_of_several_outputs_a_history_follows_the_worst(layers):
    (output,) = layers.outputs
    builds = [replace(layers, outputs=(replace(output, name="a", sqnr=a), replace(output, name="b", sqnr=b)))
              for a, b in ((30.0, 20.0), (31.0, 12.0), (inf, inf), (inf, inf))]  # fmt: skip
    found = history(dict(zip("1234", builds, strict=True)))
    assert [each.value for each in found.builds] == [20.0, 12.0, inf, inf]
    assert [each.moved for each in found.builds[1:]] == [-8.0, inf, 0.0]


def test_what_is_not_in_decibels_has_no_chart(layers):
    empty = Findings((), (), (), notes=(), quantizer="xnnpack", model="Net", environment=HERE)
    found = history({"1": empty, "2": empty}, by="rows.name")
    assert found.builds[0].unit == ""
    assert found.charts(()) == []
    assert history({"1": layers, "2": layers}).charts(()) != []


def test_builds_are_called_by_their_folder_or_by_the_file(layers, newer, tmp_path):
    files = []
    for name, report in (("1", layers), ("2", newer), ("3", layers)):
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "layers.safetensors")
        report.save(files[-1])
    page, kept = tmp_path / "page.html", tmp_path / "history.safetensors"
    arguments = ["history", *map(str, files), "--html", str(page), "-o", str(kept), "--width", "200"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert [each.name for each in load(kept).builds] == ["1", "2", "3"]
    assert load(kept) == history({"1": layers, "2": newer, "3": layers})
    assert [each["table"] for each in load(kept).charts(())] == ["builds"]
    newer.save(tmp_path / "1" / "weights.safetensors")
    of_folders = CliRunner().invoke(main, ["history", *(str(file.parent) for file in files), "--width", "200"])
    assert of_folders.stdout == result.stdout
    newer.save(tmp_path / "1" / "other-layers.safetensors")
    refused = CliRunner().invoke(main, ["history", str(tmp_path / "1"), str(files[1])])
    assert "1: is a folder; give one report in it, such as layers.safetensors" in refused.stderr
    newer.save(tmp_path / "1" / "other.safetensors")
    both = CliRunner().invoke(main, ["history", str(files[0]), str(tmp_path / "1" / "other.safetensors"), "--json"])
    assert [each["name"] for each in json.loads(both.stdout)["reports"][0]["tables"]["builds"]] == [
        str(files[0]),
        str(tmp_path / "1" / "other.safetensors"),
    ]
