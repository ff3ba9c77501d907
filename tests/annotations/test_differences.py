"""Two annotations are compared place by place."""

from __future__ import annotations

import functools
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import MovingAverageMinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    SharedQuantizationSpec,
)

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._annotations.report import UNKNOWN
from pt2qa._graph.handles import op_of
from pt2qa.cli import main
from pt2qa.errors import SelectionError
from pt2qa.report import AnnotationReport
from tests.check.plain_quantizer import SIGNED, PlainQuantizer
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
    assert diff.notes[0].startswith("one side is a converted graph from elsewhere: annotations, schemes")
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


def observer(**options: object) -> QuantizationSpec:
    """How int8 activations are observed."""
    maker = MovingAverageMinMaxObserver.with_args(**options)
    return QuantizationSpec(torch.int8, maker, -128, 127, torch.per_tensor_affine)


class Pools(PlainQuantizer):
    """Rounds linears and the pool between them, whose output has the scale of its input if ``shared``."""

    def __init__(self, *, shared: bool, **options: object) -> None:
        super().__init__(("linear", "max_pool1d"), inputs=observer(**options), outputs=observer(**options))
        self.shared = shared

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in super().annotate(model).graph.nodes:
            if self.shared and op_of(node.target) == "max_pool1d":
                node.meta["quantization_annotation"].output_qspec = SharedQuantizationSpec((node.args[0], node))
        return model


@functools.cache
def pooled() -> pt2qa.Capture:
    torch.manual_seed(0)
    return pt2qa.capture(nn.Sequential(nn.Linear(8, 8), nn.MaxPool1d(2), nn.Linear(4, 4)).eval(), torch.randn(2, 8))


CHANGES = {
    "options": (Pools(shared=True, eps=1e-4), "options eps=0.001 -> eps=0.0001"),
    "observer": (PlainQuantizer(("linear", "max_pool1d"), inputs=SIGNED, outputs=observer(eps=1e-3)), "observer "),
    "shared": (Pools(shared=False, eps=1e-3), "shares 0/linear -> none"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_whole_spec_is_compared_and_gated(change: str, tmp_path: Path) -> None:
    quantizer, what = CHANGES[change]
    before = pt2qa.annotations(pooled(), Pools(shared=True, eps=1e-3))
    after = pt2qa.annotations(pooled(), quantizer)
    difference = pt2qa.diff_annotations(before, after)
    assert any(what in row.what for row in difference.rows)
    assert not pt2qa.diff_annotations(before, before)

    changed = pt2qa.diff(before, after).having("changed")
    assert {(row.name, row.role.partition(",")[0]) for row in changed} == {
        (row.name, row.role) for row in difference.rows
    }
    same, other = (pt2qa.gate(report, baseline=before, max_drop=0) for report in (before, after))
    assert (same.passed, other.passed) == (True, False)
    assert [check.outcome for check in same.checks] == [f"0, {len(before.rows)} rows unchanged"]
    assert other.checks[0].measured == len(difference.rows)
    assert len(other.checks[0].where) == len(difference.rows)

    for name, report in (("before", before), ("after", after), ("difference", difference)):
        report.save(tmp_path / f"{name}.safetensors")
    files = {path.stem: str(path) for path in tmp_path.iterdir()}
    compare = ["--baseline", files["before"], "--max-drop", "100"]
    run = CliRunner().invoke
    assert run(main, ["gate", files["before"], *compare]).exit_code == 0
    assert run(main, ["gate", files["after"], *compare]).exit_code == 1
    assert run(main, ["gate", files["difference"], "--require", "differing==0"]).exit_code == 1


def test_what_a_file_of_an_older_schema_does_not_say_is_not_compared() -> None:
    now = pt2qa.annotations(pooled(), Pools(shared=True, eps=1e-3))
    old = replace(now, rows=tuple(replace(row, options=UNKNOWN, group=UNKNOWN) for row in now.rows))
    assert not pt2qa.diff_annotations(old, now)
    assert "options" not in old.rows[0].spec


def test_a_fixed_scale_is_part_of_the_spec() -> None:
    one, two = (
        PlainQuantizer(inputs=FixedQParamsQuantizationSpec(torch.uint8, scale, 0, 0, 255, torch.per_tensor_affine))
        for scale in (1 / 256, 1 / 128)
    )
    difference = pt2qa.diff_annotations(one, two, capture=pooled())
    assert any("scale=0.00390625, zero_point=0 -> scale=0.0078125" in row.what for row in difference.rows)
