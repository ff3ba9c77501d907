"""Report texts: golden files for whole reports, and what each part must say."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from math import inf, isnan, nan

import pytest

from pt2qa._layers.verdict import clamped_share, growth
from pt2qa._printable import clean
from pt2qa._report.prose import cosine, decibel, index, number, share, shorten, shorten_names
from pt2qa.errors import ReportError
from pt2qa.report import Unpaired


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


def test_a_long_list_of_unpaired_ops_has_a_line_for_each_kind(layers):
    """A transformer's report began with 15 lines of one check of tensors."""
    checks = [Unpaired(n, f"block.{n}/_assert_tensor_metadata_{n}", "reference", "nothing reads it") for n in range(15)]
    norms = [
        Unpaired(n, f"bn{n}/batch_norm", "reference", f"folded into conv{n}/conv2d, which is compared after it")
        for n in range(20, 23)
    ]
    other = Unpaired(30, "size", "reference", "nothing reads it")
    text = replace(layers, unpaired=(*checks, *norms, other)).text(width=100)
    section = text.partition("Unpaired (19):\n")[2].partition("\n\n")[0]
    assert " ".join(section.split()) == (
        "15 _assert_tensor_metadata (reference), such as block.0/_assert_tensor_metadata_0: nothing reads it "
        "3 batch_norm (reference), such as bn20/batch_norm: folded into conv20/conv2d, which is compared after it "
        "size (reference): nothing reads it"
    )


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


@pytest.fixture
def clamped(layers):
    """The same, with a layer whose clamp adds noise."""
    row = replace(layers.rows[7], sqnr=13.0, rounding_sqnr=14.0, mse=3e-4, excess_lsb=40.5)
    return replace(layers, rows=(*layers.rows[:7], row, *layers.rows[8:]))


def test_the_summary_of_a_bad_model_states_what_its_rows_prove(clamped):
    _, isolated, noise, about_clamp, counts, advice = clamped.summary().splitlines()
    assert isolated == (
        "Isolated SQNR of 24 quantized values: lowest 8.2 dB (features.7.conv.1.0/conv2d), median 30.0 dB; "
        "1 below 20 dB."
    )
    assert noise == (
        "The noise grows by more than 1 % of the signal's power at 1 op, in 1 case by the op's own quantization, most "
        "at features.7.conv.1.0/conv2d: from 35.5 dB in what it reads to 13.0 dB."
    )
    assert about_clamp == (
        "Values are clamped at features.7.conv.1.0/conv2d, which causes 68 % of the error there, with values up to "
        "40.5 steps beyond its range: the range does not fit this data."
    )
    assert counts == (
        "Counts: 1 value with most of the error from clamping, 1 row without a number, 2 unpaired, 1 note."
    )
    assert advice == (
        "What each layer costs the output is not measured here: pt2qa.diagnose finds the causes, and measures "
        "what their remedies give."
    )


def test_a_healthy_models_report_names_nobody(layers):
    good = replace(layers, rows=layers.rows[1:7], outputs=(replace(layers.outputs[0], sqnr=35.0),))
    assert good.summary().splitlines() == [
        "The output has an SQNR of 35.0 dB, not below 20 dB.",
        "Isolated SQNR of 6 quantized values: lowest 26.0 dB, median 28.0 dB; 0 below 20 dB.",
        "Counts: 0 values with most of the error from clamping, 0 rows without a number, 2 unpaired, 1 note.",
        "Nothing stands out: no output is below 20 dB, and no quantized value by itself.",
    ]


def test_a_layer_that_costs_the_output_nothing_is_not_named(layers):
    good = replace(layers, outputs=(replace(layers.outputs[0], sqnr=35.0),))
    assert "features" not in good.summary()
    assert "lowest 8.2 dB, median 30.0 dB; 1 below 20 dB." in good.summary()
    assert "Nothing stands out" not in good.summary()


def test_no_layer_is_named_where_all_of_them_are_healthy_by_themselves(layers):
    healthy = replace(layers, rows=layers.rows[1:7])
    assert "features" not in healthy.summary()
    assert healthy.summary().splitlines()[2] == "No op increases the noise by more than 1 % of the signal's power."
    assert replace(healthy, outputs=()).summary().splitlines()[0] == "No model output was compared."


def test_a_layer_is_named_only_where_its_noise_is_large_beside_the_outputs(clamped):
    worse = replace(clamped, outputs=(replace(clamped.outputs[0], sqnr=5.0),))
    lines = worse.summary().splitlines()
    assert lines[1] == "Isolated SQNR of 24 quantized values: lowest 8.2 dB, median 30.0 dB; 1 below 20 dB."
    assert lines[2] == (
        "The noise grows by more than 1 % of the signal's power at 1 op, in 1 case by the op's own quantization."
    )
    assert "features" not in worse.summary()


def test_noise_that_an_op_only_passes_on_is_not_its_own(clamped):
    rows = [replace(row, isolated_sqnr=30.0) if row.handle == 7 else row for row in clamped.rows]
    passed_on = replace(clamped, rows=tuple(rows), outputs=(replace(clamped.outputs[0], sqnr=15.0),))
    assert passed_on.summary().splitlines()[2] == (
        "The noise grows by more than 1 % of the signal's power at 1 op, in 0 cases by the op's own quantization."
    )
    cumulative = replace(clamped, rows=tuple(replace(row, isolated_sqnr=nan) for row in clamped.rows))
    assert cumulative.summary().splitlines()[2] == (
        "The noise grows by more than 1 % of the signal's power at 1 op, most at features.7.conv.1.0/conv2d: from "
        "35.5 dB in what it reads to 13.0 dB."
    )


def test_a_value_that_no_op_reads_as_it_is_is_never_named(layers):
    inside = replace(layers.rows[12], isolated_sqnr=3.0, sqnr=2.0)
    report = replace(layers, rows=(*layers.rows[:12], inside, *layers.rows[13:]))
    assert inside.name not in report.summary()
    assert report.summary() == layers.summary()


def test_a_float_value_is_named_after_the_op_whose_quantization_it_shows(layers, layer):
    sigmoid = layer(
        name="score/sigmoid",
        op="sigmoid",
        observed_at="raw",
        isolated_sqnr=3.0,
        rounding_sqnr=nan,
        answers_for="score/conv1d",
        input_sqnr=30.0,
        sqnr=4.0,
    )
    report = replace(layers, rows=(*layers.rows, sigmoid))
    assert "lowest 3.0 dB (score/conv1d, read after score/sigmoid)" in report.summary()
    beside = replace(layers, rows=(*layers.rows, replace(sigmoid, answers_for="")))
    assert beside.summary() == layers.summary()


def test_reports_of_older_files_are_told_without_what_they_lack(clamped):
    lacking = {"answers_for": "", "input_sqnr": nan, "excess_lsb": nan}
    old = replace(clamped, rows=tuple(replace(row, **lacking) for row in clamped.rows))
    _, isolated, about_clamp, counts, _ = old.summary().splitlines()
    assert isolated == "Isolated SQNR of 24 quantized values: lowest 8.2 dB, median 30.0 dB; 1 below 20 dB."
    assert about_clamp == (
        "Values are clamped at features.7.conv.1.0/conv2d, which causes 68 % of the error there: "
        "the range does not fit this data."
    )
    assert counts.startswith("Counts: 1 value with most of the error from clamping, ")


def test_a_few_values_clipped_by_less_than_a_step_are_no_matter(layer):
    # 3 of 40 values clipped by 0.6 steps: 0.027 steps² beside the 1/12 of rounding.
    noise = 0.02**2 * (1 / 12 + 3 / 40 * 0.6**2)
    row = layer(scale=0.02, mse=noise, sqnr=30.0, rounding_sqnr=30.0, saturation=3 / 40, excess_lsb=0.6)
    assert clamped_share(row) == pytest.approx(0.027 / (1 / 12 + 0.027))
    assert clamped_share(replace(row, saturation=0.0, excess_lsb=0.4)) == 0.0
    assert isnan(clamped_share(replace(row, rounding_sqnr=nan)))
    upstream = replace(row, mse=100 * noise, sqnr=10.0)
    assert clamped_share(upstream) == pytest.approx(clamped_share(row) / 100)


def test_noise_grows_against_the_signal(layer):
    assert growth(layer(sqnr=10.0, input_sqnr=20.0)) == pytest.approx(0.09)
    assert growth(layer(sqnr=10.0, input_sqnr=inf)) == pytest.approx(0.1)
    assert growth(layer(sqnr=20.0, input_sqnr=10.0)) == pytest.approx(-0.09)
    assert isnan(growth(layer(sqnr=10.0)))


def test_weights_tell_dead_channels_and_what_stays_float(weights, weight):
    lowest, dead, counts = weights.summary().splitlines()
    assert lowest == (
        "Channel SQNR of 3 quantized weights: lowest 0.0 dB (features.1/conv2d, weight, channel 17); 1 below 20 dB."
    )
    assert dead == (
        "2 dead channels, all zeros once quantized, in 1 weight (most: features.1/conv2d, 2): their "
        "per-channel scales are too large. pt2qa.check lists those that contributed at least one LSB to the output."
    )
    assert counts == "Counts: 2 not quantized, 0 rows without a number, 0 unpaired, 1 note."
    text = weights.text(width=100)
    assert "Not quantized (2):\n  classifier.1/linear, bias (float32)\n" in text
    assert "norm/layer_norm, weight (float32): an op that xnnpack has no kernel for" in text
    undefined = replace(weights, rows=(weight(worst_channel_sqnr=nan, note="no channels"),))
    assert undefined.summary().splitlines()[0] == "No weight has a channel SQNR."


def test_dead_channels_are_told_by_what_made_them(weights, weight):
    shared = weight(name="head/linear", axis=-1, dead_channels=5, worst_channel_sqnr=0.0)
    _, one_scale, own_scale, _ = replace(weights, rows=(*weights.rows, shared)).summary().splitlines()
    assert one_scale.startswith(
        "5 dead channels, all zeros once quantized, in 1 weight (most: head/linear, 5): these weights "
        "have one scale for all channels"
    )
    assert own_scale.startswith("2 dead channels, all zeros once quantized, in 1 weight (most: features.1/conv2d, 2)")
    assert "quantize per channel" not in one_scale + own_scale


def test_healthy_weights_are_not_named(weight, weights):
    healthy = replace(weights, rows=(weight(), weight(name="b", worst_channel_sqnr=35.0)))
    assert healthy.summary().splitlines()[0] == "Channel SQNR of 2 quantized weights: lowest 31.2 dB; 0 below 20 dB."


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


def test_names_of_thirty_equal_blocks_differ_at_a_third_of_their_width():
    ops = ("self_attn.q_proj/linear", "self_attn.o_proj/linear", "mlp.down_proj/linear", "input_layernorm/rms_norm")
    names = [f"model.model.layers.{block}.{op}" for block in range(32) for op in ops] + ["model.lm_head/linear"]
    assert shorten_names(names, 100) == tuple(names)
    for width in (36, 30, 24, 20):
        short = shorten_names(names, width)
        assert max(map(len, short)) <= width
        assert len({*short}) == len(names), width
        blocks = [re.findall(r"\d+", name) for name in short[:-1]]
        assert blocks == [[str(block)] for block in range(32) for _ in ops], width
    assert short[0] == "…0.s.q_proj/linear"


def test_a_name_alone_keeps_its_numbers_and_prose_is_not_taken_for_one():
    assert shorten_names(["encoder.layers.11.ffn.fc2/linear", "x"], 20) == ("e.l.11.f.fc2/linear", "x")
    assert shorten_names(["values beyond 3.5 are clamped to 3.5 here"], 20) == (
        shorten("values beyond 3.5 are clamped to 3.5 here", 20),
    )
    assert shorten_names(["one_module_of_a_very_long_name/linear"], 20) == (
        shorten("one_module_of_a_very_long_name/linear", 20),
    )


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


def test_a_metric_with_a_control_character_in_its_name_takes_the_width_that_it_is_shown_with(layers):
    rows = tuple(replace(row, custom={"00000\x1e0": 0.0}) for row in layers.rows)
    outputs = tuple(replace(row, custom={"00000\x1e0": 0.0}) for row in layers.outputs)
    report = replace(layers, rows=rows, outputs=outputs, modules=())
    text = report.text(width=40)
    assert "00000?0" in text
    assert max(map(len, text.splitlines())) <= 40


def test_widths_are_in_characters(weights):
    wide = replace(weights, rows=(replace(weights.rows[0], name="层" * 12, attr="重"), *weights.rows[1:]))
    assert max(map(len, wide.text(width=40).splitlines())) <= 40
