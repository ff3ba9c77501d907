"""``--json``: every command prints one document of one form, with the numbers of its reports."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pt2qa.cli import main
from tests.report.html import samples

PAGE = (Path(__file__).parents[1] / "docs" / "json.md").read_text(encoding="utf-8")
DOCUMENT, REPORT = (
    {name for names in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", names)}
    for table in PAGE.split("A report is an object:")
)
"""The keys that the page has."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    samples.layers().save("layers.safetensors")
    return lambda *args: CliRunner().invoke(main, [*args, "--json"], prog_name="pt2qa")


def test_every_command_takes_it() -> None:
    assert all(any("--json" in each.opts for each in command.params) for command in main.commands.values())


def test_a_report_has_all_numbers_and_rows(run: Any) -> None:
    result, report = run("show", "layers.safetensors"), samples.layers()
    document = json.loads(result.stdout)
    (found,) = document["reports"]
    assert (set(document), set(found)) == (DOCUMENT, REPORT)
    assert (document["command"], document["exit_code"], document["wrote"]) == ("show", 0, [])
    assert document["next"] == ["pt2qa html layers.safetensors -o report.html"]
    assert (found["kind"], found["model"], found["summary"]) == ("layers", report.model, report.summary())
    assert found["numbers"]["sqnr"] == pytest.approx(report.sqnr, abs=0, nan_ok=True)
    rows = list(csv.DictReader(io.StringIO(report.csv(extended=True))))
    assert len(found["tables"]["rows"]) == len(rows) == len(report.rows)
    for row, line in zip(found["tables"]["rows"], rows, strict=True):
        assert line.keys() <= row.keys()
        assert row["name"] == line["name"]
        assert float(line["sqnr"] or "nan") == pytest.approx(float(row["sqnr"] or "nan"), abs=0, nan_ok=True)
    assert report.text() in result.stderr


def test_numbers_that_json_lacks_are_null_and_texts(run: Any) -> None:
    report = samples.layers()
    replace(report, rows=(replace(report.rows[0], sqnr=nan, isolated_sqnr=inf),)).save("odd.safetensors")
    (row,) = json.loads(run("show", "odd.safetensors").stdout)["reports"][0]["tables"]["rows"]
    assert (row["sqnr"], row["isolated_sqnr"]) == (None, "inf")


def test_a_gate_that_misses_is_a_document_with_its_exit_code(run: Any) -> None:
    result = run("gate", "layers.safetensors", "--require", "sqnr>=999", "--junit", "gate.xml")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["exit_code"], document["wrote"]) == (1, 1, ["gate.xml"])
    (found,) = document["reports"]
    assert found["numbers"] == {"passed": False}
    assert [check["what"] for check in found["tables"]["checks"]] == ["sqnr"]


def test_commands_without_a_report_name_what_they_wrote(run: Any) -> None:
    document = json.loads(run("html", "layers.safetensors", "-o", "report.html").stdout)
    assert (document["reports"], document["wrote"]) == ([], ["report.html"])
    (listed,) = json.loads(run("quantizers").stdout)["reports"]
    assert {"x86", "xnnpack"} <= {row["name"] for row in listed["tables"]["rows"]}


def test_an_error_prints_no_document(run: Any) -> None:
    result = run("show", "gone.safetensors")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "gone.safetensors: no such file" in result.stderr
