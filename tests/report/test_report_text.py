"""Report texts: golden files for whole reports, and what each part must say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import inf, nan

import pytest

from pt2qa.errors import ReportError
from pt2qa.printable import clean
from pt2qa.report import Unpaired
from pt2qa.report.formats import cosine, decibel, index, number, share, shorten
from pt2qa.report.layers.text import biggest_drop


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_a_layer_report_at_several_widths(layers, golden, width):
    text = layers.text(width=width)
    golden(f"layers-{width}", text)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("sort", ["graph", "name", "mse", "range_use", "op"])
def test_a_layer_table_in_several_orders(layers, golden, sort):
    golden(f"layers-by-{sort}", layers.table(sort, limit=5, width=100))


@pytest.mark.parametrize("width", [40, 100])
def test_a_weight_report_at_several_widths(weights, golden, width):
    text = weights.text(width=width)
    golden(f"weights-{width}", text)
    assert max(map(len, text.splitlines())) <= width


def test_reports_of_nothing(empty, weights, golden):
    golden("layers-empty", empty.text(width=100))
    golden("weights-empty", replace(weights, rows=(), notes=()).text(width=100))


def test_a_report_without_isolated_errors_says_so_and_ranks_by_the_cumulative(layers, golden):
    rows = tuple(replace(row, isolated_sqnr=nan, rounding_sqnr=nan) for row in layers.rows)
    report = replace(layers, rows=rows, modules=())
    golden("layers-cumulative", report.text(limit=5, width=100))
    assert "isolated\n" not in report.table()


def test_long_lists_are_counted(layers, golden):
    report = replace(
        layers,
        rows=layers.rows[:1],
        modules=(),
        outputs=tuple(replace(layers.outputs[0], name=f"output[{i}]", sqnr=30.0 + i) for i in range(8)),
        unpaired=tuple(Unpaired(i, f"node{i}", "reference", "") for i in range(9)),
        notes=tuple(f"note {i}" for i in range(6)),
    )
    text = report.text(width=100)
    golden("layers-long-lists", text)
    assert "  and 3 more\n" in text
    assert "  and 4 more\n" in text
    assert "  and 1 more\n" in text


def test_str_fits_the_terminal_and_falls_back_to_100(layers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    assert str(layers) == layers.text(width=72)
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda fd: (_ for _ in ()).throw(OSError()))
    assert str(layers) == layers.text(width=100)


def test_a_limit_says_how_to_see_the_rest(layers):
    assert layers.table(limit=3, width=100).splitlines()[-2:] == [
        "23 more rows: report.table(limit=None) or pt2qa show --limit 0",
        "1 row without isolated_sqnr sorted last",
    ]
    assert "more row" not in layers.table(limit=None)
    assert len(layers.table(limit=None, width=160).splitlines()) == 26 + 4
    with pytest.raises(ReportError, match="limit: got -1, expected 0 or more rows, or None for all"):
        layers.table(limit=-1)


def test_a_narrow_screen_hides_the_least_important_columns_and_says_which(layers):
    wide, narrow = layers.table(width=160), layers.table(width=90)
    assert "hidden" not in wide
    assert "2 columns hidden (op, dtype): use a wider screen, width=, or --width" in narrow
    assert "isolated" in layers.table(width=40).splitlines()[0]


def test_the_column_that_rows_are_sorted_by_is_always_there(layers, layer):
    assert layers.table("cosine", width=40).splitlines()[0].split() == ["name", "cosine"]
    assert layers.table("cosine", width=60).splitlines()[0].split()[:2] == ["name", "cosine"]
    report = replace(layers, rows=(layer(custom={"drift": 2.0}),), outputs=(), modules=())
    assert "drift" in report.table(width=100).splitlines()[0]
    assert report.table("drift", width=40).splitlines()[0].split()[:2] == ["name", "drift"]


def test_names_from_a_strange_file_cannot_move_the_cursor(layers, layer):
    report = replace(layers, rows=(layer(name="a\x1b[2J\nb\tc"),))
    assert "a?[2J?b?c" in report.table()
    assert "\x1b" not in report.text()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sqnr": 13.46}, "The output has an SQNR of 13.5 dB, below 20 dB: noise above 1 % of the signal's power."),
        ({"sqnr": 31.0}, "The output has an SQNR of 31.0 dB, not below 20 dB."),
        ({"sqnr": inf}, "The output is identical to the reference's."),
        ({"sqnr": nan, "note": "the reference is zero"}, "The output has no SQNR (the reference is zero)."),
    ],
)
def test_the_summary_tells_the_outputs_sqnr(layers, changes, sentence):
    outputs = (replace(layers.outputs[0], **changes),)
    assert replace(layers, outputs=outputs).summary().splitlines()[0] == sentence


def test_the_summary_names_the_worst_layer_the_drop_and_the_counts(layers):
    _, worst, drop, counts, advice = layers.summary().splitlines()
    assert worst == (
        "Worst layer by itself: features.7.conv.1.0/conv2d, isolated SQNR 8.2 dB; 1 of 26 layers below 20 dB."
    )
    assert drop == "Biggest drop of SQNR along the graph: from 35.5 to 21.0 dB at features.7.conv.1.0/conv2d."
    assert counts == (
        "Counts: 1 layer with more than 1 % of values clamped (most: features.7.conv.1.0/conv2d, 4.21 %), "
        "1 row without a number, 2 unpaired, 1 note."
    )
    assert advice.startswith("Look at features.7.conv.1.0/conv2d first: ")
    assert advice.endswith("no layer loses more by the rounding of its own inputs, weights and output.")


def test_the_advice_follows_from_the_numbers(layers):
    healthy = replace(layers, rows=layers.rows[1:7])
    assert healthy.summary().splitlines()[-1] == (
        "No layer is below 20 dB by itself: errors add up; look where SQNR drops, in graph order."
    )
    good = replace(healthy, outputs=(replace(layers.outputs[0], sqnr=35.0),))
    assert good.summary().splitlines()[-1] == "Nothing stands out: no layer and no output is below 20 dB."
    clamped = replace(good, rows=(*good.rows, replace(good.rows[0], saturation=0.5)))
    assert clamped.summary().splitlines()[-1] == ("Look at the clamped layers: calibration did not see their range.")
    assert replace(good, outputs=()).summary().splitlines()[0] == "No model output was compared."


def test_the_biggest_drop_steps_over_rows_without_a_finite_sqnr(layer):
    rows = [layer(handle=i, sqnr=value) for i, value in enumerate((inf, 40.0, nan, 30.0, 35.0, 20.0))]
    found = biggest_drop(rows)
    assert found is not None
    assert (found[0].handle, found[1], found[2]) == (5, 35.0, 20.0)
    assert biggest_drop(rows[:2]) is None
    assert biggest_drop([rows[3], rows[4]]) is None


def test_weights_tell_dead_channels_and_what_stays_float(weights, weight):
    worst, dead, counts = weights.summary().splitlines()
    assert worst == (
        "Worst: features.1/conv2d, weight, channel 17 at 0.0 dB; 1 of 3 quantized weights with a channel below 20 dB."
    )
    assert dead == (
        "2 dead channels, all zeros once quantized, in 1 weight (most: features.1/conv2d, 2): "
        "quantize per channel, or rescale them."
    )
    assert counts == "Counts: 2 not quantized, 0 rows without a number, 0 unpaired, 1 note."
    text = weights.text(width=100)
    assert "Not quantized (2):\n  classifier.1/linear, bias (float32)\n" in text
    assert "norm/layer_norm, weight (float32): an op that xnnpack has no kernel for" in text
    undefined = replace(weights, rows=(weight(worst_channel_sqnr=nan, note="no channels"),))
    assert undefined.summary().splitlines()[0] == "No weight has a channel SQNR."


@pytest.mark.parametrize(
    ("show", "value", "expected"),
    [
        (decibel, -0.04, "0.0"),
        (decibel, 13.46, "13.5"),
        (decibel, inf, "inf"),
        (decibel, nan, "nan"),
        (share, 0.0, "0.00"),
        (share, 1e-12, "<0.01"),
        (share, 1.0, "100.00"),
        (cosine, 0.999987, "0.99999"),
        (number, 123456.0, "1.235e+05"),
        (number, -inf, "-inf"),
        (decibel, 1e300, "1e+300"),
        (index, 3, "3"),
        (index, -1, "-"),
    ],
)
def test_number_formats(show, value, expected):
    assert show(value) == expected


def test_names_are_shortened_in_the_middle():
    assert shorten("features.17.conv.1.0/conv2d", 100) == "features.17.conv.1.0/conv2d"
    assert [len(shorten("abcdefghij", width)) for width in range(2, 11)] == list(range(2, 11))
    assert clean("größe 你好") == "größe 你好"


def test_reading_and_showing_a_report_needs_neither_torch_nor_pandas(layers, tmp_path):
    layers.save(tmp_path / "r.safetensors")
    code = (
        "import sys; from pt2qa.report import load; report = load(sys.argv[1]); str(report); report.csv(); "
        "print(*{'torch', 'torchao', 'executorch', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r.safetensors")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_an_output_without_a_number_does_not_hide_behind_the_others(layers):
    silent = replace(layers.outputs[0], name="output[1]", sqnr=nan, note="3 values are NaN")
    first = replace(layers, outputs=(replace(layers.outputs[0], sqnr=47.7), silent)).summary().splitlines()[0]
    assert first.startswith(
        "Without an SQNR: output[1] (3 values are NaN). The worst output, output, has an SQNR of 47.7 dB"
    )
