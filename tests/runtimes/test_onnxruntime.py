"""ONNX Runtime's own kernels on graphs of the x86 and XNNPACK quantizers: ``make runtimes`` installs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import pt2qa
from pt2qa.report import DeployedReport
from tests.models import images, residual
from tests.runtimes.nets import Block

pytest.importorskip("onnxruntime")

INT8 = "onnxruntime:int8_activations=true"
DATA = [images(4, seed=1), images(3, seed=2)]


def quantized(quantizer: str) -> pt2qa.QuantizedPair:
    shapes = {"x": {0: torch.export.Dim("batch", max=8)}}
    return pt2qa.quantize(pt2qa.capture(residual(), images(4), dynamic_shapes=shapes), quantizer, [images(4)])


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    return quantized("xnnpack")


@pytest.fixture(scope="module")
def report(pair: pt2qa.QuantizedPair) -> DeployedReport:
    return pt2qa.compare_deployed(pair, DATA, backend="onnxruntime")


@pytest.fixture(scope="module")
def block() -> pt2qa.QuantizedPair:
    x = torch.randn(4, 5, 16)
    return pt2qa.quantize(pt2qa.capture(Block().eval(), x), "xnnpack", [x])


def exported(pair: pt2qa.QuantizedPair, path: Path) -> Path:
    """An .onnx file, as an export flow without pt2qa makes it."""
    program = torch.export.export(pair.quantized, (images(4),), dynamic_shapes=({0: torch.export.Dim("batch", max=8)},))
    made = torch.onnx.export(program, dynamo=True, opset_version=21, verbose=False)
    assert made is not None
    made.save(path)
    return path


def test_every_value_is_observed_and_no_kernel_is_accused(report: DeployedReport) -> None:
    assert report.backend == "ONNX Runtime"
    assert len(report.rows) > 5
    assert not [row.name for row in report.rows if row.note]
    assert all(row.isolated_max_lsb <= 1 for row in report.rows)
    assert not report.suspects
    assert "The kernels are right" in str(report)


def test_batches_of_another_size_run_in_the_same_program(report: DeployedReport) -> None:
    assert (report.batches, report.samples) == (2, 7)


def test_what_is_computed_on_integers_is_known_op_by_op(pair: pt2qa.QuantizedPair) -> None:
    report = pt2qa.compare_deployed(pair, DATA, backend=INT8)
    assert {row.name for row in report.rows if not row.delegated} == {"mean"}
    assert any("kernels on integers: Transpose (2), QLinearConv (2)" in fact for fact in report.facts)
    assert not report.suspects


def test_without_optimization_nothing_is_computed_on_integers(pair: pt2qa.QuantizedPair) -> None:
    report = pt2qa.compare_deployed(pair, DATA, backend="onnxruntime:optimization=none")
    assert not [row.name for row in report.rows if row.delegated]
    assert any("kernels on integers: none" in fact for fact in report.facts)
    assert not report.suspects


def test_limits_that_the_export_leaves_out_are_told_and_found_by_experiment() -> None:
    """torch.onnx writes QuantizeLinear, which has no limits but those of its dtype."""
    report = pt2qa.compare_deployed(
        quantized("x86:reduce_range=true"), [10 * batch for batch in DATA], backend="onnxruntime"
    )
    assert any("torch.onnx leaves out the limits of integers: 0..127 of uint8" in fact for fact in report.facts)
    assert report.suspects
    assert any("clamped to 0..255, not to 0..127" in row.cause for row in report.suspects)


def test_a_model_that_does_not_load_comes_with_the_option_with_which_it_does(block: pt2qa.QuantizedPair) -> None:
    with pytest.raises(pt2qa.DeploymentError, match=f'With backend="{INT8}" it loads'):
        pt2qa.compare_deployed(block, [torch.randn(4, 5, 16)], backend="onnxruntime")


def test_a_value_that_is_rounded_before_it_is_copied_is_not_taken_for_the_op_s_own(block: pt2qa.QuantizedPair) -> None:
    report = pt2qa.compare_deployed(block, [torch.randn(4, 5, 16)], backend=INT8)
    assert {row.name: row.note for row in report.rows}["norm/layer_norm"] == (
        "ONNX Runtime rounds it where it is made, and not where the graph does"
    )
    assert not report.suspects
    assert any("QGemm" in fact for fact in report.facts)


def test_dynamic_scales_are_refused_with_what_torch_onnx_says() -> None:
    pair = quantized("xnnpack:mode=dynamic")
    with pytest.raises(pt2qa.DeploymentError, match=r"torch\.onnx could not export the model: .*choose_qparams"):
        pt2qa.compare_deployed(pair, DATA, backend="onnxruntime")


def test_a_program_is_kept_in_a_folder_and_damage_is_refused(
    pair: pt2qa.QuantizedPair, report: DeployedReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pt2qa_onnxruntime import lowering

    folder = tmp_path / "program"
    pt2qa.compare_deployed(pair, DATA, backend="onnxruntime", program=folder)
    monkeypatch.setattr(lowering, "lower", None)
    again = pt2qa.compare_deployed(pair, DATA, backend="onnxruntime", program=folder)
    assert again.facts == report.facts
    assert [dataclasses.astuple(row) for row in again.rows if row.isolated_max_lsb == 0] == [
        dataclasses.astuple(row) for row in report.rows if row.isolated_max_lsb == 0
    ]
    (folder / "onnxruntime.json").write_text("{}")
    with pytest.raises(pt2qa.DeploymentError, match="not a program that pt2qa saved"):
        pt2qa.compare_deployed(pair, DATA, backend="onnxruntime", program=folder)


def test_a_file_that_was_made_elsewhere_is_compared_by_its_outputs(
    pair: pt2qa.QuantizedPair, report: DeployedReport, tmp_path: Path
) -> None:
    made = pt2qa.compare_deployed(pair, DATA, deployed=exported(pair, tmp_path / "model.onnx"))
    assert made.backend == "ONNX Runtime"
    assert made.sqnr == pytest.approx(report.sqnr)
    assert not made.rows
    assert any(fact.startswith("model.onnx takes x tensor(float)") for fact in made.facts)


def test_a_file_with_another_signature_and_one_that_is_damaged_are_refused(
    pair: pt2qa.QuantizedPair, block: pt2qa.QuantizedPair, tmp_path: Path
) -> None:
    path = exported(pair, tmp_path / "model.onnx")
    with pytest.raises(pt2qa.DeploymentError, match=r"ONNX Runtime could not run the model: .*it takes x tensor"):
        pt2qa.compare_deployed(block, [torch.randn(4, 5, 16)], deployed=path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(pt2qa.DeploymentError, match=r"model\.onnx: ONNX Runtime could not load the model"):
        pt2qa.compare_deployed(pair, DATA, deployed=path)


def test_the_command_lists_the_kernels_of_a_file(pair: pt2qa.QuantizedPair, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from pt2qa.cli import main

    path = exported(pair, tmp_path / "model.onnx")
    done = CliRunner().invoke(main, ["deploy", "--inspect", str(path)])
    assert done.exit_code == 0, done.output
    assert "QGemm node_linear" in done.output
    assert "kernels on integers" in done.output
