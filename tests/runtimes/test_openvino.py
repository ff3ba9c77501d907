"""OpenVINO's own kernels on graphs of the x86 and XNNPACK quantizers: ``make runtimes`` installs it."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._deployed.deployment import lowerable
from pt2qa.report import DeployedReport
from tests.flows import NARROW
from tests.models import images, residual
from tests.runtimes.nets import NETS, fitting, quantized
from tests.runtimes.weight_only import WeightOnly

pytest.importorskip("openvino")

DATA = [images(4, seed=1), images(3, seed=2)]
SHIPS = "openvino:precision=auto,dynamic_quantization=true"
"""What OpenVINO does of its own accord."""
SATURATED = "sums of two of its products saturate at 16 bits"


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    shapes = {"x": {0: torch.export.Dim("batch", max=8)}}
    return pt2qa.quantize(pt2qa.capture(residual(), images(4), dynamic_shapes=shapes), fitting("xnnpack"), [images(4)])


@pytest.fixture(scope="module")
def report(pair: pt2qa.QuantizedPair) -> DeployedReport:
    return pt2qa.compare_deployed(pair, DATA, backend="openvino")


def model_of(pair: pt2qa.QuantizedPair) -> Any:
    """An OpenVINO model, as a flow without pt2qa makes it of a graph whose weights are not folded."""
    from openvino import convert_model
    from openvino.tools.ovc import convert_impl, telemetry_stub, telemetry_utils

    from pt2qa_openvino.lowering import unfolded

    program = torch.export.export(unfolded(pair.quantized), (images(4),))
    with pytest.MonkeyPatch.context() as patched:
        for module in (convert_impl, telemetry_utils):  # no conversion is reported to Intel
            patched.setattr(module, "tm", telemetry_stub)
        return convert_model(program)


def test_the_model_is_that_of_convert_model(pair: pt2qa.QuantizedPair) -> None:
    from pt2qa_openvino import BACKEND
    from pt2qa_openvino.kernels import loaded

    graph = lowerable(pair).graph
    program = BACKEND.lower(graph, (images(4),), (), dynamic_shapes=None, progress=lambda _: None)
    own, expected = (
        Counter((op.get_type_name(), str(op.get_output_element_type(0))) for op in model.get_ordered_ops())
        for model in (loaded(program.model), model_of(pair))
    )
    assert own == expected
    assert ("Constant", "<Type: 'int8_t'>") in own  # the weights


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
@pytest.mark.parametrize("net", NETS)
def test_every_value_is_observed_and_all_integers_are_equal_bit_for_bit(net: str, quantizer: str) -> None:
    pair, batches = quantized(net, fitting(quantizer))
    report = pt2qa.compare_deployed(pair, batches, backend="openvino")
    assert report.backend == "OpenVINO"
    assert not [row.name for row in report.rows if row.note]
    steps = [row.isolated_max_lsb for row in report.rows if row.isolated_max_lsb == row.isolated_max_lsb]
    assert steps
    assert set(steps) == {0.0}
    assert all(row.isolated_sqnr > 120 for row in report.rows)
    assert all(row.cumulative_sqnr > 120 for row in report.outputs)
    assert "The kernels are right" in str(report)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
@pytest.mark.parametrize("net", NETS)
def test_one_graph_runs_on_several_runtimes(net: str, quantizer: str) -> None:
    """ExecuTorch does not lower graphs of the x86 quantizer, which is listed."""
    pytest.importorskip("onnxruntime")
    pair, batches = quantized(net, fitting(quantizer))
    other = "onnxruntime:int8_activations=true" if quantizer == "xnnpack" else "onnxruntime"
    report = pt2qa.compare_runtimes(pair, batches, ["xnnpack", other, "openvino"])
    ran = [runtime for runtime in report.runtimes if not runtime.note]
    assert [runtime.name for runtime in ran] == ["xnnpack", other, "openvino"][-len(ran) :]
    assert len(ran) == (3 if quantizer == "xnnpack" else 2)
    assert not report.disagreements
    assert max(row.right for row in report.rows) == len(ran)
    assert all(runtime.seconds > 0 and runtime.bytes > 0 for runtime in ran)


def test_batches_of_another_size_run_in_the_same_program(report: DeployedReport) -> None:
    assert (report.batches, report.samples) == (2, 7)


def test_what_is_computed_on_integers_is_known_op_by_op(report: DeployedReport) -> None:
    """A ReLU and the roundings are part of the kernel before them."""
    assert all(row.delegated for row in report.rows)
    expected = "kernels on integers: Convolution (2), Eltwise (1), Reduce (1), FullyConnected (1)"
    assert any(expected in fact and fact.endswith("in float: none") for fact in report.facts)


def test_without_int8_kernels_nothing_is_computed_on_integers(pair: pt2qa.QuantizedPair) -> None:
    report = pt2qa.compare_deployed(pair, DATA, backend="openvino:int8_kernels=false")
    assert not [row.name for row in report.rows if row.delegated]
    assert any("kernels on integers: none" in fact for fact in report.facts)
    assert any("int8 kernels off" in fact for fact in report.facts)
    assert not any("saturate" in fact for fact in report.facts)
    assert all(row.isolated_max_lsb == 0 for row in report.rows)


@pytest.fixture(scope="module")
def narrow() -> dict[str, list[dict[str, Any]]]:
    """What OpenVINO computes where oneDNN may not use VNNI, on any x86: in a process of its own."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("other CPUs have no such instructions")
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtimes.without_vnni"]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


def test_without_vnni_sums_of_two_products_saturate_at_16_bits(narrow: dict[str, list[dict[str, Any]]]) -> None:
    """OpenVINO alone gives what NumPy computes so, int8 inputs with 128 more; with weights of seven bits the sums."""
    assert {(case["op"], case["largest"]) for case in narrow["products"]} == {
        (op, largest) for op in ("linear", "conv2d") for largest in (127, 63)
    }
    for case in narrow["products"]:
        assert case["from_16_bits"] == 0
        assert (case["from_32_bits"] > 10_000) == (case["largest"] == 127)
        assert (case["from_32_bits"] == 0) == (case["largest"] == 63)


def test_without_vnni_the_cause_is_named_and_weights_of_seven_bits_are_the_cure(
    narrow: dict[str, list[dict[str, Any]]],
) -> None:
    """All ops that are named have this cause; with seven bits, as many kernels on integers are right bit for bit."""
    assert len(narrow["nets"]) == 12
    for eight, seven in zip(narrow["nets"][::2], narrow["nets"][1::2], strict=True):
        assert (eight["net"], eight["quantizer"], eight["bits"]) == (seven["net"], seven["quantizer"], 8)
        assert set(eight["causes"]) == {SATURATED}
        assert eight["apart"] < 60
        assert any("saturate at 16 bits; weights within -64..63 avoid it" in fact for fact in eight["facts"])
        assert seven["causes"] == []
        assert seven["max_lsb"] == 0
        assert seven["apart"] > 120
        assert seven["on_integers"] == eight["on_integers"]


def test_that_sums_saturate_is_a_fact_of_cpus_without_vnni_and_of_int8_kernels(report: DeployedReport) -> None:
    assert any("saturate" in fact for fact in report.facts) == NARROW


def test_values_of_128_levels_are_computed_in_float_with_their_limits() -> None:
    pair = pt2qa.quantize(pt2qa.capture(residual(), images(4)), "x86:reduce_range=true", [images(4)])
    report = pt2qa.compare_deployed(pair, [10 * images(4, seed=1)], backend="openvino")
    assert any("kernels on integers: none" in fact for fact in report.facts)
    assert not report.suspects
    assert report.stages[-1].step_sqnr > 120


def test_the_limit_of_a_clamp_on_integers_is_truncated() -> None:
    """OpenVINO's fault: -0.7 is -15.7 steps here, and OpenVINO clamps to -15 of them."""
    x = 3 * images(8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Hardtanh(-0.7, 2.2)).eval()
    pair = pt2qa.quantize(pt2qa.capture(model, x), fitting("xnnpack"), [x])
    report = pt2qa.compare_deployed(pair, [x], backend="openvino")
    clamp = next(row for row in report.rows if row.op == "hardtanh")
    assert 0.7 / clamp.scale % 1 > 0.5
    assert clamp.isolated_max_lsb == 1
    assert clamp.isolated_differing > 0.3
    assert report.stages[-1].step_sqnr < 50
    assert any("truncates the limits of clamps" in fact and "hardtanh (1)" in fact for fact in report.facts)
    exact = pt2qa.compare_deployed(pair, [x], backend="openvino:int8_kernels=false")
    assert all(row.isolated_max_lsb == 0 for row in exact.rows)
    assert not any("truncates" in fact for fact in exact.facts)


def test_what_openvino_takes_of_its_own_accord_is_found_to_be_bfloat16() -> None:
    from pt2qa_openvino.kernels import core

    if "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("the CPU has no bfloat16")
    pair, batches = quantized("detector", "x86")
    report = pt2qa.compare_deployed(pair, batches, backend=SHIPS)
    assert any("precision bf16, dynamic quantization in groups of 32" in fact for fact in report.facts)
    assert any(row.cause == "it is computed in bfloat16" for row in report.suspects)


def test_a_linear_with_a_float_input_is_left_in_float_unless_dynamic_quantization_is_asked_for() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    pair = pt2qa.quantize(pt2qa.capture(nn.Sequential(nn.Linear(64, 16)).eval(), x), WeightOnly(), [x])
    exact = pt2qa.compare_deployed(pair, [x], backend="openvino")
    assert exact.stages[-1].step_sqnr > 120
    found = pt2qa.compare_deployed(pair, [x], backend="openvino:dynamic_quantization=true")
    if NARROW:  # OpenVINO then does not
        assert found.stages[-1] == exact.stages[-1]
        assert any(fact.endswith("no dynamic quantization without VNNI") for fact in found.facts)
        return
    assert found.stages[-1].step_sqnr < 60
    assert found.suspects


def test_dynamic_scales_are_refused_with_what_openvino_says() -> None:
    pair = pt2qa.quantize(pt2qa.capture(residual(), images(4)), "xnnpack:mode=dynamic", [images(4)])
    with pytest.raises(pt2qa.DeploymentError, match=r"OpenVINO could not convert the model: .*choose_qparams"):
        pt2qa.compare_deployed(pair, DATA, backend="openvino")


class Kinds(nn.Module):
    """Inputs and outputs of several types: a number, one that nothing reads, one value twice, an input, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, factor: int, mask: Tensor, unused: Tensor) -> dict[str, Tensor]:
        y = self.linear(self.embedding(ids) * mask.unsqueeze(-1).float()) * factor
        kinds = {"bool": y > 0, "int": y.argmax(-1), "uint8": (y > 0).to(torch.uint8), "scalar": y.sum()}
        return {"y": y, "again": y, "ids": ids, "constant": torch.ones(3), **kinds}


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_inputs_and_outputs_of_all_types(quantizer: str) -> None:
    ids = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(0))
    args = (ids, 3, torch.ones(4, 5, dtype=torch.bool), torch.randn(2))
    torch.manual_seed(0)
    pair = pt2qa.quantize(pt2qa.capture(Kinds().eval(), args), fitting(quantizer), [args])
    report = pt2qa.compare_deployed(pair, [args], backend="openvino")
    assert len(report.outputs) == 8
    assert all(row.cumulative_sqnr > 100 for row in report.outputs)


class Largest(nn.Module):
    """The largest of each row, read by a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.amax(-1, keepdim=True))


def test_the_largest_of_rows_before_an_int8_linear_is_wrong_and_named() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    pair = pt2qa.quantize(pt2qa.capture(Largest().eval(), x), "x86", [x])
    assert [row.name for row in pt2qa.compare_deployed(pair, [x], backend="openvino").suspects] == ["amax"]
    assert pt2qa.compare_deployed(pair, [x], backend="openvino:int8_kernels=false").suspects == ()


class Brain(nn.Module):
    """bfloat16 in, inside and out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x.float()), x * 2


def test_bfloat16_is_given_and_read_as_it_is() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.manual_seed(0)
    pair = pt2qa.quantize(pt2qa.capture(Brain().eval(), x), fitting("xnnpack"), [x])
    report = pt2qa.compare_deployed(pair, [x], backend="openvino")
    assert report.suspects == ()
    assert [row.cumulative_sqnr > 100 for row in report.outputs] == [True, True]
    assert [row.dtype for row in report.outputs] == ["float32", "bfloat16"]


def test_a_fault_in_the_program_is_named_with_its_cause(tmp_path: Path) -> None:
    """The output of the convolution is in float here, so that the factor is exact."""
    pair, batches = quantized("cnn", fitting("x86"))
    folder = tmp_path / "program"
    pt2qa.compare_deployed(pair, batches, backend="openvino", program=folder)
    bias = pair.quantized.state_dict()["conv2.weight_bias"]
    right, wrong = (each.numpy().tobytes() for each in (bias, 0.5 * bias))
    for name in ("model.bin", "observed.bin"):
        weights = (folder / name).read_bytes()
        assert weights.count(right) == 1
        (folder / name).write_bytes(weights.replace(right, wrong))
    report = pt2qa.compare_deployed(pair, batches, backend="openvino", program=folder)
    assert [(row.name, row.cause) for row in report.suspects] == [
        ("conv2/conv2d", "its bias is held at 0.5 times its value")
    ]


def test_a_program_is_kept_in_a_folder_and_damage_is_refused(
    pair: pt2qa.QuantizedPair, report: DeployedReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pt2qa_openvino import lowering

    folder = tmp_path / "program"
    pt2qa.compare_deployed(pair, DATA, backend="openvino", program=folder)
    monkeypatch.setattr(lowering, "lower", None)
    again = pt2qa.compare_deployed(pair, DATA, backend="openvino", program=folder)
    assert again.facts == report.facts
    assert list(map(dataclasses.astuple, again.outputs)) == list(map(dataclasses.astuple, report.outputs))
    assert [row.isolated_max_lsb for row in again.rows] == [row.isolated_max_lsb for row in report.rows]
    (folder / "openvino.json").write_text("{}")
    with pytest.raises(pt2qa.DeploymentError, match="not a program that pt2qa saved"):
        pt2qa.compare_deployed(pair, DATA, backend="openvino", program=folder)


def test_a_file_that_was_made_elsewhere_is_compared_by_its_outputs(
    pair: pt2qa.QuantizedPair, report: DeployedReport, tmp_path: Path
) -> None:
    """What pt2qa converts gives the same values as what ``openvino.convert_model`` does, bit for bit."""
    import openvino

    openvino.save_model(model_of(pair), tmp_path / "model.xml", compress_to_fp16=False)
    made = pt2qa.compare_deployed(pair, DATA, deployed=tmp_path / "model.xml")
    assert made.backend == "OpenVINO"
    assert made.sqnr == report.sqnr
    assert made.stages[-1] == report.stages[-1]
    assert not made.rows
    assert any(fact.startswith("model.xml takes f32[?,") for fact in made.facts)


def test_a_file_with_another_signature_and_one_that_is_damaged_are_refused(
    pair: pt2qa.QuantizedPair, tmp_path: Path
) -> None:
    pt2qa.compare_deployed(pair, DATA, backend="openvino", program=tmp_path / "program")
    path = tmp_path / "program" / "model.xml"
    block, batches = quantized("block", "xnnpack")
    with pytest.raises(pt2qa.DeploymentError, match=r"the model gets f32\[4, 5, 16\]; it takes f32\[\?,3,8,8\]"):
        pt2qa.compare_deployed(block, batches, deployed=path)
    weights = path.with_suffix(".bin")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(pt2qa.DeploymentError, match=r"model\.xml: OpenVINO could not load the model: "):
        pt2qa.compare_deployed(pair, DATA, deployed=path)


def test_the_command_lists_the_kernels_of_a_file(pair: pt2qa.QuantizedPair, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from pt2qa.cli import main

    pt2qa.compare_deployed(pair, DATA, backend="openvino", program=tmp_path / "program")
    done = CliRunner().invoke(main, ["deploy", "--inspect", str(tmp_path / "program" / "model.xml")])
    assert done.exit_code == 0, done.output
    assert "kernels on integers" in done.output
    assert "FullyConnected" in done.output
