"""Two annotations are compared place by place."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa.errors import SelectionError
from pt2qa.report import AnnotationReport
from tests.models import images
from tests.overrides.flows import captured, plain
from tests.overrides.nets import NETS
from tests.test_pairing import made_elsewhere


def test_one_quantizer_and_itself_are_equal() -> None:
    capture, _ = captured("mobile")
    diff = pt2qa.diff_annotations("xnnpack", "xnnpack", capture=capture)
    assert diff.equal
    assert not diff
    rows = pt2qa.annotations(capture, "xnnpack").rows
    assert diff.equal_quantized == sum(row.quantized for row in rows)
    assert diff.equal_quantized + diff.equal_float == len(rows)


def test_two_settings_differ_in_what_was_set() -> None:
    capture, _ = captured("residual")
    diff = pt2qa.diff_annotations("xnnpack", "xnnpack:per_channel=false", capture=capture)
    assert diff
    assert [(row.name, row.role, row.status) for row in diff.rows] == [
        ("conv1/conv2d", "weight", "changed"),
        ("conv2/conv2d", "weight", "changed"),
        ("fc/linear", "weight", "changed"),
    ]
    assert {row.what for row in diff.rows} == {
        "scheme per_channel_symmetric -> per_tensor_symmetric; axis 0 -> none; "
        "observer PerChannelMinMaxObserver -> MinMaxObserver"
    }
    assert (diff.a, diff.b) == ("xnnpack", "xnnpack:per_channel=false")


def test_places_that_one_side_leaves_in_float_are_its_own() -> None:
    capture, _ = captured("residual")
    plan = OverridePlan((Edit("float", ("fc/linear",)),))
    plain_one, edited = pt2qa.annotations(capture, "xnnpack"), pt2qa.annotations(capture, "xnnpack", overrides=plan)
    diff = pt2qa.diff_annotations(plain_one, edited)
    assert {(row.name, row.role, row.status) for row in diff.rows if row.status == "only in a"} == {
        ("fc/linear", "weight", "only in a"),
        ("fc/linear", "output", "only in a"),
    }
    made = next(row for row in diff.rows if row.role == "output")
    assert made.what == "int8 per_tensor_affine -128..127 HistogramObserver, and float32 in b"
    back = pt2qa.diff_annotations(edited, plain_one)
    assert {(row.name, row.role) for row in back.rows} == {(row.name, row.role) for row in diff.rows}
    assert {row.status for row in back.rows if row.role in ("weight", "output")} == {"only in b"}


def test_a_model_that_was_saved_and_loaded_has_the_same_annotation() -> None:
    """Names of nodes differ; names of ops do not."""
    capture, batch = captured("residual")
    file = io.BytesIO()
    torch.export.save(capture.program, file)
    file.seek(0)
    loaded = replace(capture, program=torch.export.load(file))
    diff = pt2qa.diff_annotations(
        pt2qa.annotations(capture, "x86"), pt2qa.annotations(pt2qa.capture(NETS["residual"]()[0], batch), "x86")
    )
    assert diff.equal
    assert diff.notes == ()
    assert pt2qa.diff_annotations(pt2qa.annotations(loaded, "x86"), pt2qa.annotations(capture, "x86")).equal


def test_another_model_is_noted_and_its_places_are_counted() -> None:
    one, two = pt2qa.annotations(captured("residual")[0], "x86"), pt2qa.annotations(captured("two_users")[0], "x86")
    diff = pt2qa.diff_annotations(one, two)
    assert diff.notes[0].startswith("the two models differ in ops or parameters: their fingerprints are ")
    assert diff.model == "Residual and TwoUsers"
    lost = next(row for row in diff.rows if row.name == "mean" and row.role == "output")
    assert lost.status == "only in a"
    assert lost.what.endswith(", and b has no such place")
    assert any(row.name == "conv/conv2d" and row.status == "only in b" for row in diff.rows)


def test_a_graph_from_elsewhere_is_compared_by_what_it_holds() -> None:
    capture, _ = captured("residual")
    theirs = pt2qa.pair(capture.module(), made_elsewhere(capture, images())[1])
    diff = pt2qa.diff_annotations(theirs, plain("residual", "xnnpack"))
    assert diff.equal
    assert diff.notes[0].startswith("one side is a converted graph from elsewhere: what was asked for")
    other = pt2qa.diff_annotations(theirs, plain("residual", "x86"))
    assert all("observer" not in row.what.lower() for row in other.rows)
    assert "dtype int8 -> uint8; range -128..127 -> 0..255" in {row.what for row in other.rows}


def test_a_quantizer_needs_a_model() -> None:
    with pytest.raises(SelectionError, match="b: got 'x86', expected an AnnotationReport or a pair") as raised:
        pt2qa.diff_annotations(plain("residual", "x86"), "x86")
    assert "pt2qa.diff_annotations(a, b, capture=capture)" in str(raised.value)


def test_reports_of_either_side_are_taken_as_they_are() -> None:
    report: AnnotationReport = pt2qa.annotations(plain("residual", "x86"))
    observed = replace(report.rows[0], observer="MinMaxObserver")
    diff = pt2qa.diff_annotations(report, replace(report, rows=(observed, *report.rows[1:])))
    assert [row.what for row in diff.rows] == ["observer HistogramObserver -> MinMaxObserver"]
