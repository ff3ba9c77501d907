"""Every sentence of a layer report's verdict, from rows made by hand, and the numbers that decide which is said."""

from __future__ import annotations

import math
from math import inf, nan
from typing import Any

import pytest

import pt2qa
from pt2qa._layers.rows import folded, opened
from pt2qa._layers.sums import Compared, RowSums, Totals, _reach, tables
from pt2qa._layers.verdict import clamped_share, growth, output_sqnr, ranked_by, summary_of
from pt2qa._metrics import ErrorSums, NoiseSums
from pt2qa._report.table import ranked
from pt2qa.report import Environment, LayerReport, LayerRow, SetApart, Unpaired

KNOWN: dict[str, Any] = {
    "handle": 0,
    "module": "",
    "op": "conv2d",
    "observed_at": "dq",
    "dtype": "int8",
    "scale": 0.01,
    "zero_point": 0.0,
    "shape": (2, 3),
    "sqnr": 30.0,
    "isolated_sqnr": 35.0,
    "rounding_sqnr": 40.0,
    "mse": 0.01,
    "cosine": 0.9991,
    "l1": 0.01,
    "atol": 0.125,
    "max_lsb": 5.0,
    "saturation": 0.0,
    "ref_min": -1.5,
    "quant_min": -1.25,
    "ref_max": 2.5,
    "quant_max": 2.25,
    "ref_mean": 0.125,
    "quant_mean": 0.0625,
    "input_sqnr": 30.0,
    "excess_lsb": 0.0,
}


def row(name: str, **changes: Any) -> LayerRow:
    return LayerRow(**{**KNOWN, "name": name, "answers_for": name, **changes})


def output(sqnr: float, name: str = "output", **changes: Any) -> LayerRow:
    return row(name, op="output", observed_at="raw", answers_for="", sqnr=sqnr, isolated_sqnr=nan, **changes)


X = row("x", sqnr=40.0, isolated_sqnr=40.0, input_sqnr=inf)
CONV = row("conv", sqnr=12.0, isolated_sqnr=12.5, input_sqnr=40.0)
RELU = row("relu", sqnr=11.0, isolated_sqnr=30.0, input_sqnr=12.0)
FC = row("fc", sqnr=10.0, isolated_sqnr=25.0, input_sqnr=11.0)
HARD = row("hard", sqnr=11.5, isolated_sqnr=45.0, input_sqnr=11.5, rounding_sqnr=12.0, saturation=0.1, excess_lsb=7.25)
BAD = [X, CONV, RELU, FC, HARD]
LOW = "The output has an SQNR of 10.0 dB, below 20 dB: noise above 1 % of the signal's power."
ASK = (
    "What each layer costs the output is not measured here: pt2qa.diagnose finds the causes, and measures what their "
    "remedies give."
)
NO_CLAMPS = "Counts: 0 values with most of the error from clamping, 0 rows without a number, 0 unpaired, 0 notes."


def said(rows: list[LayerRow], outputs: list[LayerRow], found: tuple[SetApart, ...] = ()) -> list[str]:
    return summary_of(rows, outputs, 0, 0, found)


def test_a_healthy_model() -> None:
    rows = [row(name, isolated_sqnr=sqnr) for name, sqnr in (("a", 35.0), ("b", 25.0), ("c", 40.0), ("d", 50.0))]
    assert summary_of(rows, [output(20.0)], 2, 1, ()) == [
        "The output has an SQNR of 20.0 dB, not below 20 dB.",
        "Isolated SQNR of 4 quantized values: lowest 25.0 dB, median 35.0 dB; 0 below 20 dB.",
        "Counts: 0 values with most of the error from clamping, 0 rows without a number, 2 unpaired, 1 note.",
        "Nothing stands out: no output is below 20 dB, and no quantized value by itself.",
    ]


def test_a_bad_model() -> None:
    assert said(BAD, [output(10.0)]) == [
        LOW,
        "Isolated SQNR of 5 quantized values: lowest 12.5 dB (conv), median 30.0 dB; 1 below 20 dB.",
        "The noise grows by more than 1 % of the signal's power at 3 ops, in 1 case by the op's own quantization, most "
        "at conv: from 40.0 dB in what it reads to 12.0 dB.",
        "Values are clamped at hard, which causes 89 % of the error there, with values up to 7.25 steps beyond its "
        "range: the range does not fit this data.",
        "Counts: 1 value with most of the error from clamping, 0 rows without a number, 0 unpaired, 0 notes.",
        ASK,
    ]
    assert [growth(each) for each in BAD] == pytest.approx(
        [1e-4, 10**-1.2 - 1e-4, 10**-1.1 - 10**-1.2, 10**-1.0 - 10**-1.1, 0.0]
    )


def test_outputs() -> None:
    def first(*outputs: LayerRow) -> str:
        return said([X], list(outputs))[0]

    assert first() == "No model output was compared."
    assert first(output(nan)) == "The output has no SQNR (nan)."
    assert first(output(nan, note="all zero"), output(nan, "b")) == "The worst output, output, has no SQNR (all zero)."
    assert first(output(inf)) == "The output is identical to the reference's."
    both = first(output(inf), output(nan, "b", note="all zero"), output(nan, "c"))
    assert both == "Without an SQNR: b (all zero), c (nan). The worst output, output, is identical to the reference's."
    assert first(output(25.0), output(19.9, "b")) == (
        "The worst output, b, has an SQNR of 19.9 dB, below 20 dB: noise above 1 % of the signal's power."
    )
    assert output_sqnr([output(25.0), output(19.9, "b"), output(nan, "c")]) == 19.9
    assert math.isnan(output_sqnr([]))


def test_outputs_of_one_value_show_nothing_of_what_is_before_them() -> None:
    equal = {"ref_min": 3.0, "ref_max": 3.0}
    outputs = [output(25.0, **equal), output(25.0, "b", shape=(1, 1), **equal), output(25.0, "c", shape=(2,), **equal)]
    assert said([X], outputs)[1:3] == [
        f"{name} is 3 everywhere in the reference, so it shows no error of what is before it."
        for name in ("output", "c")
    ]


def test_layers_without_an_isolated_number() -> None:
    def second(*rows: LayerRow) -> str:
        return said(list(rows), [output(30.0)])[1]

    assert second() == "No layer was compared."
    unmeasured = row("a", isolated_sqnr=nan)
    cumulative = "Isolated SQNR was not measured; SQNR is cumulative and includes the error from upstream."
    infinite = row("b", isolated_sqnr=nan, nonfinite=True)
    assert second(unmeasured, infinite) == cumulative
    none = "No layer has an isolated SQNR: its values are not finite, or all zero in the reference."
    assert second(infinite, row("c", isolated_sqnr=nan, sqnr=nan)) == none
    # Values that stay in float and that nobody reads as they are say nothing.
    assert second(row("a", observed_at="raw", answers_for="")).startswith("Counts: ")
    assert second(row("a", observed_at="raw", answers_for="conv")).startswith("Isolated SQNR of 1 quantized value: ")
    assert second(row("a"), unmeasured).startswith("Isolated SQNR of 1 quantized value: lowest 35.0 dB, median 35.0 dB")
    assert [ranked_by(rows) for rows in ([], [unmeasured], [unmeasured, X])] == ["sqnr", "sqnr", "isolated_sqnr"]


def test_the_lowest_value_is_named_only_where_it_weighs_and_is_the_ops_own() -> None:
    def named(isolated: float, sqnr: float, **changes: Any) -> bool:
        return (
            "(a)"
            in said([row("a", isolated_sqnr=isolated, sqnr=isolated, input_sqnr=inf, **changes)], [output(sqnr)])[1]
        )

    assert named(13.0, 10.0)
    assert not named(13.1, 10.0)  # more than 3 dB above the output's
    assert named(19.9, 19.9)
    assert not named(20.0, 19.9)
    assert not named(19.9, 20.0)
    # Half of the growth, and a little less.
    half = 10 * math.log10(2)
    grown = {"sqnr": 10.0, "input_sqnr": inf}
    for isolated, own in ((10 + half - 0.01, True), (10 + half + 0.01, False)):
        said_of = said([row("a", **{**grown, "isolated_sqnr": isolated})], [output(12.0)])
        assert ("(a)" in said_of[1]) is own
        assert ("in 1 case by" in said_of[2]) is own
    # What does not grow is nobody's own.
    assert "(a)" not in said([row("a", sqnr=10.0, input_sqnr=10.0, isolated_sqnr=10.0)], [output(10.0)])[1]


def test_growth_is_told_of_those_that_are_known_and_from_what_it_grows() -> None:
    def third(*rows: LayerRow, sqnr: float = 10.0) -> str:
        return said(list(rows), [output(sqnr)])[2]

    unknown = row("a", sqnr=12.0, isolated_sqnr=30.0, input_sqnr=nan)
    assert third(unknown).startswith("Counts: ")
    assert (
        third(row("a", sqnr=20.0, input_sqnr=inf))
        == "No op increases the noise by more than 1 % of the signal's power."
    )
    grows = "The noise grows by more than 1 % of the signal's power"
    most = f"{grows} at 1 op, in 1 case by the op's own quantization, most at"
    exact = row("a", sqnr=12.0, isolated_sqnr=12.0, input_sqnr=inf)
    assert third(exact) == f"{most} a: from exact values to 12.0 dB."
    other = row("a", sqnr=12.0, isolated_sqnr=12.0, input_sqnr=inf, answers_for="conv")
    assert third(other) == f"{most} conv, read after a: from exact values to 12.0 dB."
    nobodys = row("a", sqnr=12.0, isolated_sqnr=12.0, input_sqnr=inf, answers_for="")
    assert third(nobodys) == f"{most} a: from exact values to 12.0 dB."
    assert third(exact, sqnr=5.0) == f"{most[:-9]}."  # what grows here is less than half of the output's noise
    first, second = (
        row("a", sqnr=12.0, isolated_sqnr=12.0, input_sqnr=inf),
        row("b", sqnr=10.5, isolated_sqnr=10.5, input_sqnr=inf),
    )
    assert "at 2 ops, in 2 cases by" in third(first, second)
    assert "most at b: from exact values to 10.5 dB" in third(first, second)
    # Where isolated errors were not measured, nobody is said to be the cause.
    cumulative = [row(each.name, sqnr=each.sqnr, isolated_sqnr=nan, input_sqnr=inf) for each in (first, second)]
    assert third(*cumulative) == (
        "The noise grows by more than 1 % of the signal's power at 2 ops, most at b: from exact values to 10.5 dB."
    )


def test_clamps_are_told_where_they_weigh() -> None:
    def clamps(*rows: LayerRow, sqnr: float = 10.0) -> list[str]:
        return [each for each in said(list(rows), [output(sqnr)]) if each.startswith("Values are clamped")]

    assert len(clamps(HARD)) == 1
    assert clamps(row("hard", **{**OF_HARD, "rounding_sqnr": 13.1, "sqnr": 13.0})) == []
    assert len(clamps(row("hard", **{**OF_HARD, "rounding_sqnr": 13.0, "sqnr": 13.0}))) == 1
    assert clamps(HARD, sqnr=20.0) == []
    worse = row("worse", **{**OF_HARD, "rounding_sqnr": 11.5, "excess_lsb": nan})
    assert clamps(HARD, worse) == [
        "Values are clamped at worse, which causes 100 % of the error there: the range does not fit this data."
    ]


OF_HARD = {name: getattr(HARD, name) for name in ("sqnr", "rounding_sqnr", "saturation", "excess_lsb", "input_sqnr")}


def test_the_share_of_clamping_is_what_is_beyond_rounding() -> None:
    # 10 ** -0.05 of the error is there with the reference's values, of which scale² / 12 is rounding.
    assert clamped_share(HARD) == pytest.approx(10**-0.05 - 0.01**2 / 12 / 0.01)
    coarse = row("a", **{**OF_HARD, "scale": 0.2, "mse": 0.01})
    assert clamped_share(coarse) == pytest.approx(10**-0.05 - 0.2**2 / 12 / 0.01)
    assert clamped_share(row("a", **{**OF_HARD, "rounding_sqnr": 0.0})) == 1.0
    assert clamped_share(row("a", **{**OF_HARD, "scale": 1.0})) == 0.0
    assert clamped_share(row("a", **{**OF_HARD, "saturation": 0.0})) > 0.8
    assert clamped_share(row("a", **{**OF_HARD, "excess_lsb": 0.5})) > 0.8
    assert clamped_share(row("a", **{**OF_HARD, "saturation": 0.0, "excess_lsb": 0.5})) == 0.0
    for unknown in ({"mse": 0.0}, {"mse": nan}, {"rounding_sqnr": nan}, {"scale": nan}):
        assert math.isnan(clamped_share(row("a", **{**OF_HARD, **unknown})))


def test_counts_leave_out_clamps_where_rounding_was_not_measured() -> None:
    unmeasured = row("a", rounding_sqnr=nan)
    silent = row("b", rounding_sqnr=nan, isolated_sqnr=nan)
    counts = [each for each in said([unmeasured, silent], [output(30.0)]) if each.startswith("Counts")]
    assert counts == ["Counts: 1 row without a number, 0 unpaired, 0 notes."]
    half = row("c", **{**OF_HARD, "rounding_sqnr": 11.5, "scale": math.sqrt(0.5 * 12 * 0.01)})
    assert clamped_share(half) == pytest.approx(0.5)
    assert NO_CLAMPS in said([row("c", **{**OF_HARD, "scale": 0.25})], [output(30.0)])


def test_advice() -> None:
    def last(rows: list[LayerRow], outputs: list[LayerRow], found: tuple[SetApart, ...] = ()) -> str:
        return said(rows, outputs, found)[-1]

    failed = SetApart(3, 8, 1, "quantized", "infinite", "log")
    apart = SetApart(0, 8, 1, "batch", "NaN", "x")
    fine, silent = output(30.0), row("a", isolated_sqnr=nan, sqnr=nan)
    assert last([], [fine]).startswith("Counts: ")
    assert last([X], [output(10.0)], (apart, failed)) == (
        "Look at log first: quantization makes values there that are not finite."
    )
    assert last([X], [output(19.9)], (apart,)) == ASK
    assert last([silent], [output(nan)]) == "No verdict: no layer and no output has a number."
    assert last([X, silent], [fine]) == (
        "No output is below 20 dB, and no quantized value by itself; nothing is known of 1 row without a number."
    )
    assert last([X], [fine, output(nan, "b")], (apart, apart)) == (
        "No output is below 20 dB, and no quantized value by itself; nothing is known of 2 batches and 1 row without a "
        "number."
    )
    low = row("a", isolated_sqnr=19.9)
    assert last([low], [fine]).startswith("Counts: ")
    assert last([low], [fine], (apart,)) == "Nothing is known of 1 batch."
    assert last([row("a", isolated_sqnr=20.0)], [fine]).startswith("Nothing stands out: ")
    raw = row("a", isolated_sqnr=15.0, observed_at="raw", answers_for="")
    assert last([raw], [fine]).startswith("Nothing stands out: ")
    cumulative = row("a", isolated_sqnr=nan)
    assert last([cumulative], [fine]) == "Nothing stands out: no output is below 20 dB."


# -- the report --------------------------------------------------------------------------------------------------------


def report(rows: list[LayerRow], outputs: list[LayerRow], **fields: Any) -> LayerReport:
    known: dict[str, Any] = {
        "modules": (),
        "unpaired": (),
        "notes": ("a note",),
        "batches": 2,
        "samples": 16,
        "quantizer": "xnnpack",
        "model": "Net",
        "environment": Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a"),
    }
    return LayerReport(tuple(rows), tuple(outputs), **{**known, **fields})


def test_a_report_is_graded_by_its_outputs() -> None:
    apart = SetApart(0, 8, 1, "batch", "NaN", "x")
    failed = SetApart(3, 8, 1, "quantized", "infinite", "log")
    assert report([X], []).grade() == "plain"
    assert report([X], [], set_apart=(failed,)).grade() == "bad"
    assert report([X], [output(20.0)]).grade() == "good"
    assert report([X], [output(19.9)]).grade() == "bad"
    assert report([X], [output(30.0), output(nan, "b")]).grade() == "warning"
    assert report([X], [output(30.0)], set_apart=(apart,)).grade() == "warning"
    assert report([X], [output(30.0)], set_apart=(failed,)).grade() == "bad"


def test_a_report_says_what_it_is_and_in_which_order() -> None:
    found = report(
        BAD,
        [output(10.0), output(nan, "b", cosine=nan, note="all zero")],
        set_apart=(SetApart(1, 8, 0, "batch", "NaN", "x"),),
    )
    of = "Net, quantized by xnnpack: 5 layers, 2 batches (16 samples)"
    assert found._title("worst") == f"{of}, smallest isolated SQNR first"
    assert found._title("graph") == f"{of}, in graph order"
    cumulative = report([row("a", isolated_sqnr=nan)], [output(10.0)], quantizer="")
    assert cumulative._title("worst").endswith(": 1 layer, 2 batches (16 samples), smallest SQNR first")
    assert repr(found) == "<LayerReport of Net, xnnpack: 5 rows, output SQNR 10 dB>"
    assert repr(cumulative) == "<LayerReport of Net: 1 rows, output SQNR 10 dB>"
    assert found.sqnr == 10.0
    assert found.batches_apart == 1
    (before,) = found._before()
    assert list(before.entries) == [  # type: ignore[union-attr]
        "output: SQNR 10.0 dB, cosine 0.99910, max error 0.125",
        "b: SQNR nan dB, cosine nan, max error 0.125 (all zero)",
    ]
    assert [each.name for each in found.worst(3)] == ["conv", "fc", "relu"]
    assert [each.name for each in found.worst(2, "sqnr")] == ["fc", "relu"]
    assert found.summary().splitlines()[2:] == summary_of(BAD, found.outputs, 0, 1, found.set_apart)


def test_a_report_lists_what_has_no_number_and_no_counterpart() -> None:
    module = row("m", op="Block", sqnr=30.0, isolated_sqnr=22.5)
    other = row("n", op="Block", sqnr=31.0, isolated_sqnr=21.5)
    silent = row("a", isolated_sqnr=nan, note="all zero")
    found = report(
        [X, silent], [output(30.0)], modules=(module, other), unpaired=(Unpaired(3, "bn", "reference", "folded"),)
    )
    text = found.text(width=140)
    assert "Without a number (1):\n  a: all zero" in text
    assert "Unpaired (1):" in text
    assert "Notes (1):\n  a note" in text
    table = text.partition("Modules, each run whole")[2].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table if line.startswith(("m", "n "))][-2:] == ["n", "m"]
    header = "".join(table[:4])
    assert all(part in header for part in ("SQNR", "isolated", "max err", "cosine"))
    assert "saturation" not in header


def test_custom_metrics_have_one_direction() -> None:
    rows = [row("a", custom={"mine": 1.0}), row("b", custom={"mine": 3.0}), row("c", custom={"mine": 2.0})]
    assert [each.name for each in report(rows, []).worst(3, "mine")] == ["b", "c", "a"]
    assert [each.name for each in report(rows, [], larger_is_worse=("mine",)).worst(3, "mine")] == ["b", "c", "a"]
    assert [each.name for each in report(rows, [], smaller_is_worse=("mine",)).worst(3, "mine")] == ["a", "c", "b"]
    with pytest.raises(pt2qa.ReportError, match="custom metric 'mine': said to be worse when smaller and when larger"):
        report(rows, [], smaller_is_worse=("mine",), larger_is_worse=("mine", "other"))


# -- parts of recurrent ops --------------------------------------------------------------------------------------------


def test_parts_of_one_op_fold_into_the_worst_where_the_first_stands() -> None:
    def worst_first(rows: Any, by: str) -> Any:
        return ranked(LayerRow, rows, by)

    parts = [
        row(f"lstm/{n}", part_of="lstm", step=step, sqnr=sqnr)
        for n, (step, sqnr) in enumerate([(0, 30.0), (-1, 9.0), (1, 8.0)])
    ]
    alone = row("gru/0", part_of="gru", step=0)
    rows, lines = folded([X, *parts[:2], FC, parts[2], alone], "sqnr", worst_first)
    assert [each.name for each in rows] == ["x", "lstm (2 steps)", "fc", "gru/0"]
    assert rows[1].sqnr == 8.0
    assert lines == (
        "lstm (2 steps) stands for 3 rows; its numbers are those of the worst by sqnr, lstm/2, step 1: "
        'report.opened("lstm") or pt2qa show --open lstm shows each',
    )
    _, of_all_steps = folded(parts[:2], "sqnr", worst_first)
    assert "the worst by sqnr, lstm/1: report.opened" in of_all_steps[0]
    shown, lines = folded(opened([X, *parts, alone], "lstm"), "sqnr", worst_first)
    assert ([each.name for each in shown], lines) == (["x", "lstm/0", "lstm/1", "lstm/2", "gru/0"], ())
    assert opened([*parts, alone], "lstm")[-1].part_of == "gru"
    with pytest.raises(pt2qa.ReportError, match="cannot open 'lst': expected a decomposed op, lstm"):
        opened(parts, "lst")
    with pytest.raises(pt2qa.ReportError, match="none: capture decomposed no recurrent op"):
        opened([X], "lstm")


# -- rows of sums ------------------------------------------------------------------------------------------------------


def test_the_use_of_a_range_and_what_is_beyond_it() -> None:
    def reach(ref_min: float, ref_max: float, **changes: Any) -> tuple[float, float]:
        return _reach(
            Compared("x", **{"scale": 0.5, "low": -4.0, "high": 3.0, **changes}),
            ErrorSums(1, ref_min=ref_min, ref_max=ref_max),
        )

    assert reach(-1.0, 1.0) == (4 / 7, 0.0)
    assert reach(-3.0, 1.0) == (6 / 7, 2.0)
    assert reach(-1.0, 2.75) == (5 / 7, 2.5)
    assert reach(-5.0, 3.0) == (1.0, 6.0)
    assert reach(3.0, 4.0) == (0.0, 5.0)
    assert reach(-0.6, 1.4) == (4 / 7, 0.0)  # rounded to -1 and 3
    for unknown in ({"scale": nan}, {"scale": 0.0}, {"low": 3.0}, {"high": nan}):
        assert all(map(math.isnan, reach(-1.0, 1.0, **unknown)))
    assert all(map(math.isnan, reach(-inf, 1.0)))
    assert all(map(math.isnan, reach(-1.0, inf)))
    assert all(map(math.isnan, _reach(Compared("x", scale=0.5, low=-4.0, high=3.0), ErrorSums())))


def test_tables_have_rows_of_what_was_seen_and_the_worst_of_what_each_reads() -> None:
    def totals(signal: float, noise: float) -> Totals:
        return Totals(ErrorSums(4, signal, noise), dtype="float32", shape=(2, 2))

    none = Totals()
    sums = [
        RowSums(Compared("x", sources=()), totals(100.0, 1.0), totals(100.0, 10.0)),
        RowSums(Compared("hidden", table="", sources=(0,)), totals(100.0, 2.0), none),
        RowSums(Compared("y", sources=(0, 1)), totals(100.0, 4.0), none),
        RowSums(Compared("unseen", sources=(2,)), none, none),
        RowSums(Compared("refused", problem="shapes differ", note="n"), none, none),
        RowSums(Compared("late", sources=(4, 0)), none, totals(100.0, 1.0)),
        RowSums(Compared("output", table="outputs"), none, none),
        RowSums(Compared("m", table="modules"), totals(100.0, 1.0), none),
    ]
    found = tables(sums, only_apart=False)
    assert [each.name for each in found["rows"]] == ["x", "y", "refused", "late"]
    assert [each.name for each in found["outputs"]] == ["output"]
    assert [each.name for each in found["modules"]] == ["m"]
    x, y, refused, late = found["rows"]
    assert (x.sqnr, x.input_sqnr, x.dtype, x.shape) == (20.0, inf, "float32", (2, 2))
    assert (y.input_sqnr, refused.note) == (pytest.approx(10 * math.log10(50)), "n; shapes differ")
    assert math.isnan(late.input_sqnr)
    assert late.shape == ()
    unseen = late.ref_min, late.quant_min, late.ref_max, late.quant_max, late.ref_mean, late.quant_mean, late.saturation
    assert all(map(math.isnan, (*unseen, late.mse, late.l1, late.atol, late.cosine, late.max_lsb, late.range_use)))
    assert (x.handle, x.step, x.part_of, x.answers_for, x.inputs, x.observed_at) == (-1, -1, "", "", "", "raw")
    assert all(map(math.isnan, (x.scale, x.zero_point, x.max_lsb)))
    apart = tables(sums, only_apart=True)
    assert apart["rows"][0].sqnr == 10.0
    assert apart["rows"][3].sqnr == 20.0


def test_what_is_not_finite_alone_is_said() -> None:
    sums = ErrorSums(4, 100.0, 1.0)
    alone = Totals(sums, isolated=NoiseSums(100.0, nan, 4), shape=(4,))
    (found,) = tables([RowSums(Compared("x"), alone, Totals())], only_apart=False)["rows"]
    assert (found.note, found.nonfinite) == ("NaN or infinite when run by itself", True)
    assert alone.nonfinite
    assert Totals(sums, rounding=NoiseSums(100.0, nan, 4)).nonfinite
    assert not Totals(sums).nonfinite
    excluded = Totals(ErrorSums(4, 100.0, 1.0, excluded=1), shape=(4,))
    (found,) = tables([RowSums(Compared("x"), excluded, Totals())], only_apart=False)["rows"]
    assert found.nonfinite
    broken = Totals(ErrorSums(4, 100.0, 1.0, nonfinite=2), isolated=NoiseSums(100.0, nan, 4), shape=(4,))
    (found,) = tables([RowSums(Compared("x", note="known"), broken, Totals())], only_apart=False)["rows"]
    assert found.note == f"known; {broken.sums.reason}"
