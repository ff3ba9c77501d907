"""The examples run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

import pt2qa
from examples import digits, numeric_suite_lstm
from pt2qa.cli import main


def test_digits_is_a_flow_for_the_command_line(tmp_path: Path) -> None:
    where = f"{Path(digits.__file__)}:flow"
    result = CliRunner().invoke(main, ["analyze", where, "-q", "xnnpack", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "isolated" in result.stdout
    for kind in ("layers", "weights"):
        pt2qa.load(tmp_path / f"xnnpack-{kind}.safetensors")


def test_numeric_suite_lstm_reproduces_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights by the formula; activations of 7 bits near the tutorial's, and one bit, 6 dB, better with 8."""
    found = numeric_suite_lstm.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["SQNR,", "dB", "published", "XNNPACK", "x86", "x86,", "7", "bits"]
    assert [line.split()[:3] for line in printed[1:3]] == [["LSTM", "weights", "48.1"], ["decoder", "weight", "48.3"]]
    for figures in found.values():
        # uniform weights in steps of their maximum / 127.5
        assert figures["LSTM weights"] == pytest.approx(20 * math.log10(2 * 127.5), abs=0.1)
        assert figures["decoder weight"] == pytest.approx(20 * math.log10(2 * 127.5), abs=0.3)
    seven = found["x86, 7 bits"]
    assert seven["LSTM output"] == pytest.approx(55.4, abs=1)
    assert 37 < seven["decoder output"] < 43
    assert 37 < seven["decoder alone"] < 43
    for name in ("XNNPACK", "x86"):
        assert found[name]["LSTM output"] - seven["LSTM output"] == pytest.approx(20 * math.log10(2), abs=3)
        assert found[name]["decoder alone"] > seven["decoder alone"]
