"""``[tool.pt2qa]`` in ``pyproject.toml`` gives commands defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pt2qa.cli import main
from pt2qa.cli.group import defaults_in
from pt2qa.errors import FlowError
from tests.report.html import samples


def defaults(folder: Path, text: str) -> dict[str, dict[str, Any]]:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    (folder / "below").mkdir(exist_ok=True)
    return defaults_in(folder / "below", dict(main.commands))


def test_a_table_for_all_commands_and_one_for_each(tmp_path: Path) -> None:
    every = "[tool.pt2qa]\nquantizer = 'xnnpack'\nwidth = 80\n"
    found = defaults(tmp_path, f"{every}[tool.pt2qa.analyze]\nflow = 'f.py'\no = 'out'\nquantizer = ['x86']\n")
    assert found["analyze"] == {"specs": ["x86"], "width": 80, "flow": "f.py", "folder": "out"}
    assert found["repair"] == {"spec": "xnnpack", "width": 80}
    assert found["compare"] == {"specs": ["xnnpack"], "width": 80}
    assert found["html"] == {}
    assert defaults(tmp_path, "[tool.other]\nx = 1\n")["analyze"] == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.pt2qa]\nwidht = 80", r"pyproject\.toml: \[tool\.pt2qa\] has 'widht'; did you mean 'width' or 'what'\?"),
        ("[tool.pt2qa.anlyze]\nwidth = 80", r"\[tool\.pt2qa\] has 'anlyze'; did you mean 'analyze'\?"),
        ("[tool.pt2qa.gate]\nbaselin = 'x'", r"\[tool\.pt2qa\.gate\] has 'baselin'; did you mean 'baseline'\?"),
        ("[tool", r"cannot read .*pyproject\.toml: "),
    ],
)
def test_what_it_does_not_know_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        defaults(tmp_path, text)


def test_the_command_line_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text("[tool.pt2qa.show]\nlimit = 1\nreport = 'layers.safetensors'\n", encoding="utf-8")
    report = samples.layers()
    report.save("layers.safetensors")

    def run(*args: str) -> click.testing.Result:
        return CliRunner().invoke(main, ["show", "--width", "100", *args], prog_name="pt2qa")

    assert run().stdout == report.text(limit=1, width=100) + "\n"
    assert run("--limit", "2").stdout == report.text(limit=2, width=100) + "\n"
    Path("pyproject.toml").write_text("[tool.pt2qa.show]\nlimit = 'many'\n", encoding="utf-8")
    assert "Invalid value for '--limit': 'many' is not a valid integer" in run("layers.safetensors").stderr
