"""Names as models have them, from ONNX, Keras and JIT, in every script: each kind of report, in every view."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._printable import clean
from pt2qa._report.html import html_page
from pt2qa._report.html.page import graph_data
from pt2qa._report.plot import notebook_html
from pt2qa._report.rows import columns_of, tables_of
from pt2qa._report.storage import kinds
from pt2qa.report import LayerReport
from tests.report.html.test_page import Page
from tests.soak.fuzz import use
from tests.soak.samples import sample

CALLED = (
    "/conv1/Conv",
    "/",
    "a//b/",
    "block1_conv1/BiasAdd:0",
    "a b",
    "größe",
    "שלום",
    "\u202eright",
    "😀",
    "x" * 300,
    "<script>alert(1)</script>",
    "it's",
    "name@1",
    "user@host",
    "one, two",
    "{n}",
    "$a$b$",
    "%s%n",
    "0",
    "-1",
    "output",
    "act (2)",
)
"""Names of modules that torch exports."""

WRITTEN = ("a\nb", "a\r\nb", "a\0b", "e\u0301", 'q"uote', "back\\slash", "$\\frac$", "class", "\ud800", "ﬁ")
"""Names that torch's code for a graph cannot hold; files can."""

NAMES = CALLED + WRITTEN


def renamed(report: Any) -> Any:
    """A report whose every text is one of the names, or has one in it."""
    changes: dict[str, Any] = {"model": NAMES[0], "quantizer": NAMES[10], "notes": NAMES}
    for table, row_type in tables_of(type(report)).items():
        rows, made = getattr(report, table), []
        fixed = {"structure", "dtype", "metric", "worst", "fingerprint"}
        texts = [each.name for each in columns_of(row_type) if each.type == "text" and not each.choices]
        for number, name in enumerate(NAMES if rows else ()):
            row = rows[number % len(rows)]
            said = {"name": f"{name}/conv2d", "inputs": f"{NAMES[number - 1]}/conv2d, x" if number else "x"}
            if hasattr(row, "custom"):
                said["custom"] = {f"{each}/{name}": 1.0 for each, name in zip("abc", CALLED[:3], strict=True)}
            cells = {text: said.get(text, name) for text in texts if text not in fixed}
            made.append(replace(row, **cells | {key: said[key] for key in said if key == "custom"}))
        # Those of bad cases and profiles belong to the arrays of the report.
        changes[table] = tuple(made[: len(rows)] if table in ("cases", "rankings") else made)
    known = {name: value for name, value in changes.items() if name in {f.name for f in fields(report)}}
    if report.kind == "bad-cases":
        known["rows"] = tuple(map(replace_case, known["rows"], report.rows * len(NAMES)))
    if report.kind in ("diff", "annotation-diff", "profile-diff", "conformance"):
        known.pop("quantizer", None)
    return replace(report, **known)


def replace_case(row: Any, like: Any) -> Any:
    return replace(row, batch=like.batch, sample=like.sample)


@pytest.mark.parametrize("kind", [kind.kind for kind in kinds()])
def test_every_kind_is_shown_in_every_view(kind: str) -> None:
    report = renamed(sample(next(each for each in kinds() if each.kind == kind)))
    use(report, report, random.Random(0), every=True)
    page = Page(html_page(report))
    assert page.open == []
    assert len(page.of("script")) == 6
    assert "<script" not in notebook_html(report)
    shown = [text for section in page.data for table in section["tables"] for text in values_of(table)]
    if "name" in {column.name for column in columns_of(report.row_type())}:
        if report.groups() is None:
            assert {clean(row.name) for row in report.on_page("rows")} <= set(shown)
        read = list(csv.DictReader(io.StringIO(report.csv(extended=True))))
        assert len(read) == len(report.rows)


def values_of(table: dict[str, Any]) -> Iterator[str]:
    return (clean(str(value)) for column in table["columns"] for value in column["values"])


@pytest.mark.parametrize("kind", [kind.kind for kind in kinds()])
def test_every_kind_is_read_as_it_was_written(kind: str, tmp_path: Path) -> None:
    report = renamed(sample(next(each for each in kinds() if each.kind == kind)))
    report.save(tmp_path / "report.safetensors")
    assert repr(pt2qa.load(tmp_path / "report.safetensors").rows) == repr(report.rows)


def test_a_graph_has_each_op_once_and_the_edges_of_names_with_commas() -> None:
    ops = [f"{name}/conv2d" for name in NAMES]
    row = sample(LayerReport).rows[0]
    rows = tuple(
        replace(row, name=op, module=name, handle=number, inputs=", ".join(ops[max(number - 2, 0) : number]))
        for number, (op, name) in enumerate(zip(ops, NAMES, strict=True))
    )
    found = graph_data(replace(sample(LayerReport), rows=rows), [])
    assert found is not None
    assert sorted(number for each in leaves(found["modules"]) for number in each["rows"]) == list(range(len(rows)))
    expected = {(number - back, number) for number in range(len(rows)) for back in (1, 2) if number >= back}
    assert {tuple(edge) for edge in found["edges"]} == expected


def test_a_module_called_like_a_second_call_is_another_one() -> None:
    row = sample(LayerReport).rows[0]
    calls = ("act", "b", "act", "act (2)")
    rows = tuple(
        replace(row, name=f"{module}/op_{number}", module=module, handle=number, inputs="")
        for number, module in enumerate(calls)
    )
    found = graph_data(replace(sample(LayerReport), rows=rows), [])
    assert found is not None
    assert [each["label"] for each in leaves(found["modules"])] == [
        "act/op_0",
        "b/op_1",
        "act (2)/op_2",
        "act (2)/op_3",
    ]


def test_modules_may_be_nested_as_deep_as_a_file_says() -> None:
    row = replace(sample(LayerReport).rows[0], module="a." * 3000 + "a")
    assert graph_data(replace(sample(LayerReport), rows=(row,)), []) is not None


def leaves(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "rows" in part:
        yield part
    for layer in part.get("layers", ()):
        for each in layer:
            yield from leaves(each)


def test_junit_is_xml_and_has_every_name() -> None:
    report = renamed(sample(LayerReport))
    result = pt2qa.gate(report, require=["rows.isolated_sqnr>=1000"])
    assert not result.passed
    root = ElementTree.fromstring(result.junit())
    assert root.find("testsuite") is not None
    assert clean(NAMES[0]) in "".join(root.itertext())


class Named(nn.Module):
    """A layer under each name, one after the other; each is added to what it read."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.called = names
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.called:
            layer = self.get_submodule(name)
            x = x + torch.relu(layer(x))
        return x


@cache
def measured() -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    capture = pt2qa.capture(Named(CALLED).eval(), x)
    return capture, pt2qa.quantize(capture, "xnnpack", [x], progress=False), x


def test_ops_are_called_as_their_modules_are() -> None:
    capture, _, _ = measured()
    assert {f"{name}/linear" for name in CALLED if name != "name@1"} < {each.name for each in capture.names.values()}


@pytest.mark.parametrize(
    "analyse",
    [
        lambda pair, x: pt2qa.compare_layers(pair, [x], progress=False),
        lambda pair, x: pt2qa.compare_weights(pair),
        lambda pair, x: pt2qa.sensitivity(pair, [x], progress=False),
    ],
    ids=["layers", "weights", "sensitivity"],
)
def test_overlays_and_drawings_of_a_model_with_such_names(
    analyse: Callable[[Any, Tensor], Any], tmp_path: Path
) -> None:
    capture, pair, x = measured()
    report = analyse(pair, x)
    assert Page(html_page(report)).open == []
    assert len(report.text(limit=None).splitlines()) > len(CALLED)
    column = "value" if report.kind == "sensitivity" else "sqnr"
    pt2qa.write_overlay(report, capture, tmp_path / "overlay.json", column=column)
    assert len(json.loads((tmp_path / "overlay.json").read_text())["results"]) >= len(CALLED) - 1
    for name in ("/conv1/Conv/linear", "<script>alert(1)</script>/linear", "\u202eright/linear"):
        pt2qa.write_neighbourhood(report, capture, tmp_path / "around.dot", around=name, column=column)
        assert f'label="{clean(name)}' in (tmp_path / "around.dot").read_text()


@pytest.mark.parametrize("name", WRITTEN, ids=ascii)
def test_a_name_that_pythons_source_cannot_hold_is_named_by_capture(name: str) -> None:
    with pytest.raises(pt2qa.CaptureError, match="Python code, which cannot hold the names"):
        pt2qa.capture(Named((name,)).eval(), torch.zeros(2, 4))
