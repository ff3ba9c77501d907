"""The examples run."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import pt2qa
from examples import digits
from pt2qa.cli import main


def test_digits_prints_and_saves_a_report_for_each_quantizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = digits.main(tmp_path / "reports", epochs=2)
    printed = capsys.readouterr().out
    assert list(reports) == ["xnnpack", "x86"]
    for name, report in reports.items():
        path = tmp_path / "reports" / f"{name}-layers.safetensors"
        assert str(pt2qa.load(path)) == str(report)
        assert str(report) in printed
        assert f"pt2qa show {path}" in printed
        assert report.sqnr > 20


def test_digits_is_a_flow_for_the_command_line(tmp_path: Path) -> None:
    where = f"{Path(digits.__file__)}:flow"
    result = CliRunner().invoke(main, ["analyze", where, "-q", "xnnpack", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "isolated" in result.stdout
    for kind in ("layers", "weights"):
        pt2qa.load(tmp_path / f"xnnpack-{kind}.safetensors")
