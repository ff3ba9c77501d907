"""What files name is shown without control, escape and direction signs, wherever it is shown."""

from __future__ import annotations

import csv
import io
from dataclasses import fields, replace
from math import nan

import pytest

from pt2qa._printable import clean, clean_lines
from pt2qa._report.html import html_page
from pt2qa._report.html.page import _cleaned
from pt2qa._report.storage import kinds
from pt2qa.errors import BatchError, Pt2qaError, ReportError
from pt2qa.report import Findings, LayerReport, Report, gate, load
from tests.soak.samples import sample

EVIL = "a\x1b[31m\u202eb\ud800\tc\x00\r"
SHOWN = "a?[31m?b??c??"


def named(name: str = EVIL) -> LayerReport:
    report = sample(LayerReport)
    rows = (replace(report.rows[0], name=name, note=name, sqnr=1.0, isolated_sqnr=1.0), *report.rows[1:])
    return replace(report, rows=rows, notes=(name,), model=name, quantizer=name)


def printable(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def test_control_escape_and_direction_signs_and_lone_surrogates_become_question_marks() -> None:
    assert clean(EVIL) == SHOWN
    assert clean("größe\n") == "größe?"
    assert clean_lines("a\nb\x07\n") == "a\nb?\n"


def test_errors_are_cleaned_and_keep_their_lines() -> None:
    assert str(ReportError(f"{EVIL}\nnext")) == f"{SHOWN}\nnext"
    assert issubclass(BatchError, Pt2qaError)
    assert str(BatchError(EVIL)) == SHOWN


@pytest.mark.parametrize("kind", [kind.kind for kind in kinds()])
def test_every_kind_of_report_is_shown_in_plain_letters(kind: str) -> None:
    report = sample(next(each for each in kinds() if each.kind == kind))
    known = {field.name for field in fields(report)} & {"model", "quantizer", "verdict", "a", "b", "of", "group"}
    texts = dict.fromkeys(known, EVIL)
    report = replace(report, notes=(EVIL,), **texts)
    for text in (str(report), repr(report), report.csv(extended=True), html_page(report)):
        assert printable(text)
        text.encode("utf-8")


def test_a_layer_name_is_cleaned_in_tables_summary_csv_page_and_gate() -> None:
    report = named()
    result = gate(report, require="rows.sqnr>=30")
    assert printable(report.summary())
    for text in (report.table(), report.csv(extended=True), str(result), result.junit()):
        assert printable(text)
        assert "31m?b" in text
    assert _cleaned({"values": [EVIL, 1.5], "size": 2}) == {"values": [SHOWN, 1.5], "size": 2}


def test_a_file_with_such_names_loads_as_it_was(tmp_path) -> None:  # type: ignore[no-untyped-def]
    named().save(tmp_path / "r.safetensors")
    back = load(tmp_path / "r.safetensors")
    assert isinstance(back, LayerReport)
    assert back.rows[0].name == EVIL
    assert back.model == EVIL


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+x", "-x", "@SUM(1)", "\t=1", "\r=1", "\n=1", "\uff1d1+1"])
def test_what_a_spreadsheet_takes_for_a_formula_is_text_in_csv(name: str) -> None:
    report = named(name)
    report = replace(
        report, rows=tuple(replace(row, custom={name: 1.0}) for row in report.rows), outputs=(), modules=()
    )
    header, first, *_ = csv.reader(io.StringIO(report.csv(extended=True)))
    assert first[header.index("name")] == "'" + clean_lines(name)
    assert header[-1] == "'" + clean_lines(name)


@pytest.mark.parametrize("name", ["-0.5", "+1e-3", "-inf", "-1", "a=b", "relu", ""])
def test_numbers_and_other_names_stay_as_they_are_in_csv(name: str) -> None:
    header, first, *_ = csv.reader(io.StringIO(named(name).csv()))
    assert first[header.index("name")] == name
    assert float(first[header.index("ref_min")]) == 0.5


def test_negative_numbers_are_not_quoted_in_csv() -> None:
    report = sample(LayerReport)
    report = replace(report, rows=(replace(report.rows[0], ref_min=-1.5, mse=nan),))
    header, first = csv.reader(io.StringIO(report.csv()))
    assert first[header.index("ref_min")] == "-1.5"
    assert first[header.index("mse")] == "nan"


def test_findings_are_cleaned_in_their_own_text() -> None:
    report = sample(Findings)
    assert isinstance(report, Report)
    assert printable(replace(report, rows=tuple(replace(row, why=EVIL) for row in report.rows)).text(sort="name"))
