"""Whatever a report holds, it comes back, fits the screen and sorts; whatever a file holds, reading it is safe."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import asdict, replace
from math import isnan
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pt2qa._report.rows import EXACT, columns_of
from pt2qa.errors import ReportError
from pt2qa.report import Environment, LayerReport, LayerRow, Unpaired, WeightReport, WeightRow, load

quick = settings(max_examples=60, deadline=None)

integers = st.integers(-(2**63), 2**63 - 1)
anything = {
    "int": integers,
    "float": st.floats(),
    "bool": st.booleans(),
    "text": st.text(st.characters()),  # lone surrogates too: JSON escapes them
    "shape": st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
}
columns = {column.name for column in columns_of(LayerRow)}
metrics = st.lists(st.text(max_size=8).filter(lambda name: name not in columns), max_size=3, unique=True)


def rows_of(row_type, names=()):
    hints = get_type_hints(row_type)
    cells = {
        column.name: st.sampled_from(get_args(hints[column.name])) if column.choices else anything[column.type]
        for column in columns_of(row_type)
    }
    if row_type is LayerRow:
        cells["zero_point"] = st.integers(-255, 255).map(float) | st.just(float("nan"))
        cells["custom"] = st.fixed_dictionaries({name: st.floats() for name in names})
    return st.lists(st.builds(row_type, **cells), max_size=4).map(tuple)


environments = st.builds(Environment, *[st.text()] * 5)
texts = st.lists(st.text(), max_size=7).map(tuple)


@st.composite
def layer_reports(draw):
    rows = rows_of(LayerRow, draw(metrics))
    counts = st.integers(0, EXACT)
    return LayerReport(
        rows=draw(rows),
        outputs=draw(rows),
        modules=draw(rows),
        unpaired=draw(rows_of(Unpaired)),
        notes=draw(texts),
        batches=draw(counts),
        samples=draw(counts),
        quantizer=draw(st.text()),
        model=draw(st.text()),
        environment=draw(environments),
        smaller_is_worse=draw(texts),
    )


weight_reports = st.builds(
    WeightReport,
    rows_of(WeightRow),
    rows_of(Unpaired),
    notes=texts,
    quantizer=st.text(),
    model=st.text(),
    environment=environments,
)
reports = layer_reports() | weight_reports


def canonical(report) -> str:
    """Text that is equal for equal reports: repr gives every float in full; a row's metrics have no order."""
    facts = asdict(report)
    for row in [*facts["rows"], *facts.get("outputs", ()), *facts.get("modules", ())]:
        row["custom"] = sorted(row.get("custom", {}).items())
    return repr(facts)


@quick
@given(reports)
def test_save_then_load_is_the_same_report(report):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "größe 1.safetensors"
        report.save(path)
        back = load(path)
    assert type(back) is type(report)
    assert canonical(back) == canonical(report)


@quick
@given(layer_reports(), st.integers(max_value=-1) | st.integers(min_value=EXACT + 1))
def test_a_count_that_cannot_be_is_refused_by_name(report, count):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.safetensors"
        replace(report, samples=count).save(path)
        with pytest.raises(ReportError, match="field 'samples'"):
            load(path)


@quick
@given(
    reports, st.integers(1, 220), st.sampled_from(["worst", "graph", "name", "mse", "note", "handle", "sqnr", "module"])
)
def test_text_fits_the_screen(report, width, sort):
    for line in report.text(sort=sort, width=width).splitlines():
        assert len(line) <= max(width, 40)


@quick
@given(layer_reports(), st.sampled_from(["isolated_sqnr", "sqnr", "cosine", "mse", "scale"]))
def test_sorting_loses_no_row_and_puts_every_nan_last(report, by):
    ranked = report.worst(len(report.rows), by=by)
    assert sorted(map(id, ranked)) == sorted(map(id, report.rows))
    undefined = [isnan(getattr(row, by)) for row in ranked]
    assert undefined == sorted(undefined)


@quick
@given(reports)
def test_csv_has_one_record_a_row_and_pandas_agrees(report):
    frame = report.to_pandas(extended=True)
    assert len(frame) == len(report.rows)
    assert report.csv(extended=True).count("\n") >= len(report.rows) + 1


@settings(max_examples=200, deadline=None)
@given(st.data())
@example(None)
def test_a_file_with_flipped_bytes_loads_or_gives_the_one_error(data):
    row = {
        column.name: {"int": 1, "float": 1.5, "bool": True, "text": "dq", "shape": (2, 3)}[column.type]
        for column in columns_of(LayerRow)
    }
    row["zero_point"] = 3.0
    report = LayerReport(
        (LayerRow(**row),),
        (),
        (),
        (Unpaired(1, "a", "reference", "b"),),
        notes=("n",),
        batches=1,
        samples=1,
        quantizer="q",
        model="m",
        environment=Environment.here(""),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.safetensors"
        report.save(path)
        content = bytearray(path.read_bytes())
        flips = {} if data is None else data.draw(
            st.dictionaries(st.integers(0, len(content) - 1), st.integers(0, 255), min_size=1, max_size=4)
        )  # fmt: skip
        for place, value in flips.items():
            content[place] = value
        path.write_bytes(content)
        # Any other exception is the failure that this looks for.
        with suppress(ReportError):
            assert str(load(path))
