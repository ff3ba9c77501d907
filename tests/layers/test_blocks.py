"""Equal blocks side by side."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from click.testing import CliRunner

from pt2qa._layers.blocks import blocks_of, heat_maps
from pt2qa._report.plot import notebook_html
from pt2qa.cli import main
from pt2qa.errors import ReportError
from pt2qa.report import LayerReport, LayerRow
from tests.report.html import samples

ROW = samples.layers().rows[0]


def row(name: str, isolated: float) -> LayerRow:
    return replace(ROW, name=name, isolated_sqnr=isolated, inputs="")


def decoder(blocks: int = 6, prefix: str = "model.layers") -> list[LayerRow]:
    """Of each block an attention, an MLP and a float op; block 3 has the worst MLP, block 1 an attention of two."""
    rows = [row("model.embed/embedding", 40.0)]
    for block in range(blocks):
        rows.append(row(f"{prefix}.{block}.attn.q/linear", 30.0 + block))
        if block == 1:
            rows.append(row(f"{prefix}.{block}.attn.q/linear", 25.0))
        rows.append(row(f"{prefix}.{block}.mlp/linear_1", 9.0 if block == 3 else 35.0))
        rows.append(row(f"{prefix}.{block}/add", inf))
    return rows


@pytest.fixture
def report() -> LayerReport:
    return replace(samples.layers(), rows=tuple(decoder()))


def test_rows_of_equal_blocks_make_a_grid() -> None:
    (found,) = blocks_of(decoder(), "isolated_sqnr")
    assert (found.prefix, found.numbers) == ("model.layers", (0, 1, 2, 3, 4, 5))
    assert found.ops == ("attn.q/linear", "mlp/linear_1")
    assert found.identical == 1
    names = [[decoder()[place].name for place in places if place is not None] for places in found.places]
    assert names[1] == [f"model.layers.{block}.mlp/linear_1" for block in range(6)]
    assert decoder()[found.places[0][1] or 0].isolated_sqnr == 25.0, "of two rows of one name the worse"


def test_the_number_with_the_most_blocks_counts() -> None:
    nested = [row(f"stages.{stage}.blocks.{block}/linear", 30.0) for stage in range(4) for block in range(6)]
    assert {each.prefix for each in blocks_of(nested, "isolated_sqnr")} == {
        f"stages.{stage}.blocks" for stage in range(4)
    }
    whole = [row(f"0.{block}.fc/linear", 30.0) for block in range(5)]
    assert [each.prefix for each in blocks_of(whole, "isolated_sqnr")] == ["0"]
    sequential = [row(f"{block}.fc/linear", 30.0) for block in range(5)]
    assert [each.prefix for each in blocks_of(sequential, "isolated_sqnr")] == [""]


@pytest.mark.parametrize(
    "rows",
    [
        decoder(3),
        [row(f"features.{n}/op{n}", 30.0) for n in range(8)],
        [row(f"layers.{n}/linear", nan) for n in range(8)],
        [row(f"layers.{n}/linear", inf) for n in range(8)],
        [row(f"layer{n}.conv2d_{n}/conv2d", 30.0) for n in range(8)],
        [],
    ],
    ids=["three", "unlike", "without numbers", "identical", "names with digits", "none"],
)
def test_what_is_no_list_of_equal_blocks_has_no_picture(rows: list[LayerRow]) -> None:
    assert blocks_of(rows, "isolated_sqnr") == ()
    assert heat_maps(rows, "isolated_sqnr", "SQNR") == []


def test_the_table_names_the_worst_block_of_each_op(report: LayerReport) -> None:
    text = report.by_block(width=100)
    assert text.splitlines()[0] == "isolated_sqnr by op, model.layers 0 to 5. 1 op more: identical in every block."
    lines = [line.split() for line in text.splitlines()[4:]]
    assert lines == [
        ["mlp/linear_1", "6", "9.0", "3", "35.0", "35.0"],
        ["attn.q/linear", "6", "25.0", "1", "32.5", "35.0"],
    ]


def test_by_block_says_what_it_needs(report: LayerReport) -> None:
    with pytest.raises(ReportError, match="Net has no 4 numbered blocks whose ops are alike"):
        replace(report, rows=tuple(decoder(3))).by_block()
    with pytest.raises(ReportError, match="by='atol': expected a column in dB"):
        report.by_block("atol")


def test_the_command_prints_the_same(report: LayerReport, tmp_path: Path) -> None:
    file = tmp_path / "layers.safetensors"
    report.save(file)
    printed = CliRunner().invoke(main, ["show", str(file), "--by-block", "--width", "100"])
    assert printed.stdout == report.by_block(width=100) + "\n"


def test_notebooks_and_matplotlib_draw_it(report: LayerReport) -> None:
    (chart,) = [each for each in report.charts(()) if each["kind"] == "heat"]
    assert chart["title"] == "Isolated SQNR, model.layers 0 to 5"
    assert "darkest: 9.0 dB, lightest: 35.0 dB and more" in chart["about"]
    assert notebook_html(report).count(f'<img alt="{chart["title"]}"') == 1
    axes = report.plot(chart["title"])
    (shades,) = axes.get_images()
    assert shades.get_array().shape == (2, 6)
    assert shades.get_array()[1, 3] == 9.0
    assert [each.get_text() for each in axes.get_yticklabels()] == ["attn.q/linear", "mlp/linear_1"]
