"""The parts of a recurrent op as one row, and one by one."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from pt2qa._layers.rows import folded
from pt2qa.cli import main
from pt2qa.errors import ReportError
from pt2qa.report import load


@pytest.fixture
def recurrent(layers, layer):
    """An embedding, an LSTM of three steps, and a decoder."""
    parts = [layer(handle=1, name="rnn/linear", op="linear", isolated_sqnr=41.0, sqnr=40.0, part_of="rnn/lstm")]
    for step in range(3):
        made = [
            layer(handle=2 + 2 * step, name=f"rnn/linear_{step + 1}", op="linear", isolated_sqnr=38.0 - step),
            layer(handle=3 + 2 * step, name=f"rnn/tanh{f'_{step}' if step else ''}", op="tanh", isolated_sqnr=inf),
        ]
        parts += [replace(row, module="rnn", sqnr=35.0 - step, part_of="rnn/lstm", step=step) for row in made]
    first = layer(handle=0, name="encoder/embedding", op="embedding", isolated_sqnr=inf, sqnr=inf)
    last = layer(handle=9, name="decoder/linear", op="linear", isolated_sqnr=36.5)
    return replace(layers, rows=(first, *parts, last), modules=(), unpaired=(), notes=(), model="LSTMModel")


def test_a_recurrent_op_is_one_row_with_the_numbers_of_its_worst_part(recurrent, golden):
    golden("layers-recurrent", recurrent.text(width=100))
    rows, stand_for = folded(recurrent.rows, "isolated_sqnr", recurrent.ranked)
    assert [row.name for row in rows] == ["encoder/embedding", "rnn/lstm (3 steps)", "decoder/linear"]
    assert rows[1] == replace(recurrent.rows[6], name="rnn/lstm (3 steps)")
    assert stand_for == (
        "rnn/lstm (3 steps) stands for 7 rows; its numbers are those of the worst by isolated_sqnr, rnn/linear_3, "
        'step 2: report.opened("rnn/lstm") or pt2qa show --open rnn/lstm shows each',
    )


def test_the_worst_part_is_the_worst_by_the_column_that_rows_are_sorted_by(recurrent):
    rows = [replace(row, mse=1.0) if row.name == "rnn/tanh" else row for row in recurrent.rows]
    table = replace(recurrent, rows=tuple(rows)).table("mse", width=160)
    assert "by mse, rnn/tanh, step 0: " in table
    assert table.splitlines()[3].split()[:4] == ["rnn/lstm", "(3", "steps)", "1"]
    for sort in ("graph", "name"):
        assert "by isolated_sqnr, rnn/linear_3, step 2: " in recurrent.table(sort, width=160)


def test_an_opened_report_shows_each_part_and_a_file_keeps_them(recurrent, tmp_path, golden):
    golden("layers-recurrent-opened", recurrent.opened("rnn/lstm").table("graph", width=100))
    recurrent.save(tmp_path / "layers.safetensors")
    again = load(tmp_path / "layers.safetensors")
    assert again.csv(extended=True) == recurrent.csv(extended=True)
    frame = again.to_pandas(extended=True)
    assert list(frame["step"]) == [-1, -1, 0, 0, 1, 1, 2, 2, -1]
    assert len(frame) == len(again.rows) == 9


def test_summaries_and_rankings_name_the_part(recurrent):
    low = {"isolated_sqnr": 16.0, "sqnr": 15.0, "input_sqnr": 30.0}
    rows = [replace(row, **low) if row.name == "rnn/linear_3" else row for row in recurrent.rows]
    low = replace(recurrent, rows=tuple(rows))
    assert "Isolated SQNR of 9 quantized values: lowest 16.0 dB (rnn/linear_3), " in low.summary()
    assert recurrent.worst(1)[0].name == "rnn/linear_3"


def test_a_part_without_a_number_is_never_the_worst(recurrent):
    rows = [replace(row, isolated_sqnr=nan) if row.name == "rnn/linear_3" else row for row in recurrent.rows]
    assert "by isolated_sqnr, rnn/linear_2, step 1: " in replace(recurrent, rows=tuple(rows)).table(width=160)


def test_one_row_alone_stays_as_it_is(recurrent):
    alone = replace(recurrent, rows=recurrent.rows[6:7])
    assert "rnn/linear_3" in alone.table()
    assert "stands for" not in alone.table()


def test_only_what_was_taken_apart_can_be_opened(recurrent, layers):
    with pytest.raises(ReportError, match="cannot open 'lstm': expected a decomposed op, rnn/lstm"):
        recurrent.opened("lstm")
    with pytest.raises(ReportError, match=r"cannot open 'lstm': .* none: capture decomposed no recurrent op"):
        layers.opened("lstm")


def test_the_command_line_opens_too(recurrent, weights, tmp_path):
    from click.testing import CliRunner

    for name, report in (("layers", recurrent), ("weights", weights)):
        report.save(tmp_path / f"{name}.safetensors")
    closed, opened, wrong = (
        CliRunner().invoke(main, ["show", str(tmp_path / f"{name}.safetensors"), *options])
        for name, options in (("layers", []), ("layers", ["--open", "rnn/lstm"]), ("weights", ["--open", "rnn/lstm"]))
    )
    assert "rnn/lstm (3 steps)" in closed.output
    assert "rnn/tanh_2" in opened.output
    assert wrong.exit_code == 2
    assert "--open is for layer reports" in wrong.output
