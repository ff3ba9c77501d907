"""Overlays put each number on the node that it belongs to, in the colour that it deserves."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import pt2qa
from pt2qa._capture.program import Capture
from pt2qa._graph.handles import handle_of
from pt2qa._overlays.overlays import COLOURS
from pt2qa.errors import ReportError, SelectionError
from pt2qa.report import LayerReport
from tests.models import images, residual
from tests.report.html import samples


@pytest.fixture(scope="module")
def capture() -> Capture:
    return pt2qa.capture(residual(), images())


@pytest.fixture(scope="module")
def pair(capture: Capture) -> pt2qa.QuantizedPair:
    return pt2qa.quantize(capture, "xnnpack", [images()])


@pytest.fixture(scope="module")
def layers(pair: pt2qa.QuantizedPair) -> LayerReport:
    return pt2qa.compare_layers(pair, [images()])


@pytest.fixture
def overlay(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def write(*args: Any, **kwargs: Any) -> dict[str, Any]:
        pt2qa.write_overlay(*args, tmp_path / "nodes.json", **kwargs)
        data: dict[str, Any] = json.loads((tmp_path / "nodes.json").read_text())
        return data

    return write


@pytest.fixture
def dot(tmp_path: Path) -> Callable[..., str]:
    def write(*args: Any, **kwargs: Any) -> str:
        pt2qa.write_neighbourhood(*args, tmp_path / "around.dot", **kwargs)
        return (tmp_path / "around.dot").read_text()

    return write


def test_every_number_is_on_the_node_of_its_handle(capture, layers, overlay):
    nodes = {handle_of(node): node.name for node in capture.program.graph.nodes}
    assert overlay(layers, capture)["results"] == {
        nodes[row.handle]: {"value": row.sqnr} for row in layers.rows if isfinite(row.sqnr)
    }
    isolated = overlay(layers, capture, column="isolated_sqnr")["results"]
    assert isolated == {
        nodes[row.handle]: {"value": row.isolated_sqnr} for row in layers.rows if isfinite(row.isolated_sqnr)
    }


def test_a_program_that_was_saved_and_loaded_gets_the_same_overlay(capture, layers, overlay):
    file = io.BytesIO()
    torch.export.save(capture.program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert overlay(layers, loaded) == overlay(layers, capture)
    assert set(overlay(layers, loaded)["results"]) <= {node.name for node in loaded.graph.nodes}


def test_decibels_have_thresholds_and_other_numbers_a_gradient_from_good_to_bad(capture, layers, overlay):
    data = overlay(layers, capture)
    assert [each["value"] for each in data["thresholds"]] == [10, 20, 30, 40, 1000]
    assert [each["bgColor"] for each in data["thresholds"]] == list(COLOURS)
    assert "gradient" not in data
    errors = overlay(layers, capture, column="max_lsb")["gradient"]
    assert [each["stop"] for each in errors] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [each["bgColor"] for each in errors] == list(COLOURS[::-1])
    assert overlay(layers, capture, column="cosine")["gradient"][0]["bgColor"] == COLOURS[0]


def test_of_several_rows_of_an_op_the_worst_counts(capture, layers, overlay):
    good = next(row for row in layers.rows if row.op == "conv2d")
    twice = replace(layers, rows=(good, replace(good, sqnr=3.0, max_lsb=99.0), replace(good, sqnr=nan)))
    assert list(overlay(twice, capture)["results"].values()) == [{"value": 3.0}]
    assert list(overlay(twice, capture, column="max_lsb")["results"].values()) == [{"value": 99.0}]


def test_weights_and_sensitivities_have_overlays_too(capture, pair, overlay):
    weights = pt2qa.compare_weights(pair)
    found = overlay(weights, capture)["results"]
    assert {"conv2d", "conv2d_1", "linear"} <= set(found)
    sites = pt2qa.sensitivity(pair, [images()], method="exact")
    data = overlay(sites, capture, column="value")
    nodes = {handle_of(node): node.name for node in capture.program.graph.nodes}
    smallest: dict[str, float] = {}
    for row in sites.rows:
        if not isnan(row.value) and row.value != inf:
            smallest[nodes[row.handle]] = min(row.value, smallest.get(nodes[row.handle], inf))
    assert {name: each["value"] for name, each in data["results"].items()} == smallest
    assert "thresholds" in data


def test_what_does_not_fit_is_refused(capture, layers, overlay, tmp_path):
    with pytest.raises(ReportError, match=r"no column of numbers 'sqnrr': did you mean 'sqnr'\?"):
        overlay(layers, capture, column="sqnrr")
    with pytest.raises(ReportError, match="no column of numbers 'op'"):
        overlay(layers, capture, column="op")
    with pytest.raises(ReportError, match="got Findings, which has no numbers of ops"):
        overlay(samples.findings(), capture)
    other = pt2qa.capture(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2)).eval(), images())
    with pytest.raises(
        ReportError, match=r"not about this graph: handle \d+ is \S+ in the report and \S+ in the graph"
    ):
        overlay(layers, other)
    with pytest.raises(ReportError, match="no row of the report has both a number 'sqnr' and an op of this graph"):
        overlay(replace(layers, rows=()), capture)
    with pytest.raises(ReportError, match="does not exist; create it first"):
        pt2qa.write_overlay(layers, capture, tmp_path / "nowhere" / "nodes.json")


def boxes(text: str) -> dict[str, str]:
    """What is said of each op of a drawing."""
    return {found[1]: found[2] for found in re.finditer(r'label="([^"\\]*)[^"]*", (.*)\];', text)}


def test_the_neighbourhood_is_what_lies_within_some_arrows(capture, layers, dot):
    alone = dot(layers, capture, around="conv2/conv2d", hops=0)
    assert list(boxes(alone)) == ["conv2/conv2d"]
    assert "->" not in alone
    near = dot(layers, capture, around="conv2/conv2d", hops=1)
    conv = next(node for node in capture.program.graph.nodes if node.name == "conv2d_1")
    handles = {handle_of(conv), *map(handle_of, conv.users)}
    handles |= {handle_of(node) for node in conv.all_input_nodes} - {None}
    assert set(boxes(near)) == {capture.names[handle].name for handle in handles if handle is not None}
    arrows = {(int(a), int(b)) for a, b in re.findall(r"n(\d+) -> n(\d+);", near)}
    assert arrows == {
        (handle_of(node), handle_of(user))
        for node in capture.program.graph.nodes
        for user in node.users
        if {handle_of(node), handle_of(user)} <= handles
    }
    assert "penwidth=3" in boxes(near)["conv2/conv2d"]
    assert "dashed" not in boxes(near)["conv2/conv2d"]
    assert "dashed" in boxes(near)["relu/relu"]
    everything = dot(layers, capture, hops=99)
    assert "dashed" not in everything
    assert len(boxes(everything)) == len(capture.names)


def test_the_worst_op_is_the_centre_and_bad_ones_are_red(capture, layers, dot):
    rows = tuple(replace(row, sqnr=5.0 if row.op == "linear" else 45.0) for row in layers.rows if row.op != "mean")
    drawn = boxes(dot(replace(layers, rows=rows), capture, hops=1))
    assert COLOURS[0] in drawn["fc/linear"]
    assert "penwidth=3" in drawn["fc/linear"]
    assert "#ffffff" in drawn["mean"]
    drawn = boxes(dot(replace(layers, rows=rows), capture))
    assert {box.split('"')[1] for box in drawn.values()} == {COLOURS[0], COLOURS[-1], "#ffffff"}


def test_other_numbers_are_coloured_by_their_place(capture, layers, dot):
    rows = [replace(row, mse=float(i)) for i, row in enumerate(layers.rows)]
    rows[1] = replace(rows[1], mse=inf)
    drawn = boxes(dot(replace(layers, rows=tuple(rows)), capture, column="mse", hops=99))
    assert COLOURS[-1] in drawn[rows[0].name]
    assert COLOURS[0] in drawn[rows[1].name]
    assert COLOURS[0] in drawn[rows[-1].name]
    equal = replace(layers, rows=tuple(replace(row, mse=1.0) for row in layers.rows))
    assert COLOURS[2] in boxes(dot(equal, capture, column="mse", hops=0))[rows[0].name]


def test_svg_without_graphviz_says_what_to_install(capture, layers, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReportError, match=r"'dot' is not on the PATH; install Graphviz .* or give a path .* \.dot"):
        pt2qa.write_neighbourhood(layers, capture, tmp_path / "around.svg")
    failing = tmp_path / "dot"
    failing.write_text("#!/bin/sh\necho no fonts >&2\nexit 3\n")
    failing.chmod(0o755)
    with pytest.raises(ReportError, match=r"around\.svg: dot failed: no fonts"):
        pt2qa.write_neighbourhood(layers, capture, tmp_path / "around.svg")
    assert not (tmp_path / "around.svg").exists()


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_svg_shows_every_op(capture, layers, tmp_path):
    pt2qa.write_neighbourhood(layers, capture, tmp_path / "around.svg", hops=99)
    root = ElementTree.parse(tmp_path / "around.svg").getroot()
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {name.name for name in capture.names.values()} <= texts


def test_wrong_arguments_are_refused(capture, layers, tmp_path):
    for path, got in (("around.png", ".png"), ("around", "no ending")):
        with pytest.raises(ReportError, match=rf"ends in \.dot or \.svg, got {got}"):
            pt2qa.write_neighbourhood(layers, capture, tmp_path / path)
    with pytest.raises(SelectionError, match=r"no op 'conv2/conv2'; near names: conv2/conv2d"):
        pt2qa.write_neighbourhood(layers, capture, tmp_path / "around.dot", around="conv2/conv2")
    with pytest.raises(SelectionError, match="hops: got -1, expected 0 or more"):
        pt2qa.write_neighbourhood(layers, capture, tmp_path / "around.dot", hops=-1)
