"""The comparison with the deployed program, on XNNPACK: every number against a computation by hand."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim

import pt2qa
import pt2qa_xnnpack.lowering
from pt2qa.report import DeployedReport
from pt2qa_xnnpack.internals import runtime
from tests.models import images, residual


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    shapes = {"x": {0: torch.export.Dim("batch", max=8)}}
    return pt2qa.quantize(pt2qa.capture(residual(), images(4), dynamic_shapes=shapes), "xnnpack", [images(4)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pair: pt2qa.QuantizedPair) -> Path:
    """The lowered program."""
    path = tmp_path_factory.mktemp("deployed") / "residual"
    pt2qa.compare_deployed(pair, [images(2)], program=path)
    return path


@pytest.fixture(scope="module")
def report(pair: pt2qa.QuantizedPair, folder: Path) -> DeployedReport:
    """Two batches of different size."""
    return pt2qa.compare_deployed(pair, [images(4, seed=1), images(3, seed=2)], program=folder)


def sqnr(signal: Tensor, other: Tensor) -> float:
    a, b = signal.double().numpy(), other.double().numpy()
    noise = float(((a - b) ** 2).sum())
    return float("inf") if noise == 0 else 10 * float(np.log10((a**2).sum() / noise))


def run_nodes(graph: torch.fx.GraphModule, x: Tensor, instead: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every value of a graph, each computed from the values of ``instead`` where there is one."""
    found: dict[str, Tensor] = {}

    class Nodes(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> object:
            found[node.name] = super().run_node(node)
            return instead.get(node.name, found[node.name])

    with torch.no_grad():
        Nodes(graph).run(x)
    return found


def test_stages_are_the_outputs_of_each_program(
    pair: pt2qa.QuantizedPair, folder: Path, report: DeployedReport
) -> None:
    data = [images(4, seed=1), images(3, seed=2)]
    program = runtime().load_program(folder / "model.pte")
    method = program.load_method("forward")
    with torch.no_grad():
        outputs = {
            "eager": torch.cat([residual()(x) for x in data]),
            "capture": torch.cat([pair.float_graph(x) for x in data]),
            "prepared": torch.cat([pair.reference(x) for x in data]),
            "converted": torch.cat([pair.quantized(x) for x in data]),
            "deployed": torch.cat([method.execute([x])[0] for x in data]),
        }
    assert [row.name for row in report.stages] == list(outputs)
    before = outputs["eager"]
    for row in report.stages[1:]:
        assert row.sqnr == pytest.approx(sqnr(outputs["eager"], outputs[row.name]), abs=1e-3)
        assert row.step_sqnr == pytest.approx(sqnr(before, outputs[row.name]), abs=1e-3)
        before = outputs[row.name]
    assert report.sqnr == report.stages[-1].sqnr
    (output,) = report.outputs
    assert output.deployed_sqnr == pytest.approx(sqnr(outputs["prepared"], outputs["deployed"]), abs=1e-3)
    assert output.cumulative_sqnr == pytest.approx(sqnr(outputs["converted"], outputs["deployed"]), abs=1e-3)


def test_each_row_is_the_converted_graph_on_the_deployed_inputs(
    pair: pt2qa.QuantizedPair, folder: Path, report: DeployedReport
) -> None:
    """The observed program is run without pt2qa, and each region of the converted graph on what it returned."""
    positions = json.loads((folder / "xnnpack.json").read_text())["positions"]
    nodes = {node.name: node for node in pair.quantized.graph.nodes}
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in positions}
    observed = runtime().load_program(folder / "observed.pte")
    for x in (images(4, seed=1), images(3, seed=2)):
        outputs = observed.load_method("forward").execute([x])
        deployed = {name: outputs[place] for name, place in positions.items()}
        plain, isolated = run_nodes(pair.quantized, x, {}), run_nodes(pair.quantized, x, deployed)
        for name, values in found.items():
            values.append((isolated[name], deployed[name], plain[name]))
    assert len(report.rows) == len(positions) == 6
    for row, name in zip(report.rows, positions, strict=True):
        scale, zero_point = nodes[name].args[1:3]
        isolated, deployed_values, converted = (torch.cat(parts) for parts in zip(*found[name], strict=True))
        steps = (isolated.int() - deployed_values.int()).abs()
        assert row.isolated_max_lsb == int(steps.max()), row.name
        assert row.isolated_differing == pytest.approx(float((steps > 0).double().mean()))
        real = [(value.double() - zero_point) * scale for value in (isolated, deployed_values, converted)]
        assert row.isolated_sqnr == pytest.approx(sqnr(real[0], real[1]), abs=1e-3)
        assert row.cumulative_sqnr == pytest.approx(sqnr(real[2], real[1]), abs=1e-3)
        assert row.scale == pytest.approx(scale)


def test_converted_numbers_are_those_of_the_layer_report(pair: pt2qa.QuantizedPair, report: DeployedReport) -> None:
    layers = pt2qa.compare_layers(pair, [images(4, seed=1), images(3, seed=2)])
    known = {(row.name, row.observed_at): row.sqnr for row in layers.rows}
    for row in report.rows:
        assert row.quantized_sqnr == pytest.approx(known[row.name, row.observed_at], abs=1e-3)


def test_a_healthy_model_accuses_no_op(report: DeployedReport) -> None:
    assert not report.suspects
    assert report.stage == "converted"
    assert report.grade() == "good"
    assert "The kernels are right" in report.summary()
    assert report.lines()[0].startswith("The deployed output is ")  # on a page, what ran comes after the verdict
    assert set(report.facts) < set(report.lines())


def test_ops_inside_kernels_and_left_to_portable_kernels_are_shown(report: DeployedReport) -> None:
    assert {(op.name, op.reason) for op in report.unpaired} == {
        ("conv1/conv2d", "part of the kernel that writes relu/relu"),
        ("add", "part of the kernel that writes relu/relu_1"),
    }
    assert [row.name for row in report.rows if not row.delegated] == ["mean"]
    assert report.facts == ("2 XNNPACK delegates; outside, in portable kernels: mean (1)",)


def test_the_report_is_saved_and_loaded(report: DeployedReport, tmp_path: Path) -> None:
    report.save(tmp_path / "deployed.safetensors")
    loaded = pt2qa.load(tmp_path / "deployed.safetensors")
    assert loaded.rows == report.rows
    assert loaded.text(limit=None) == report.text(limit=None)
    assert loaded.csv(part="outputs") == report.csv(part="outputs")
    assert list(report.to_pandas().columns) == [
        *("handle", "name", "module", "op", "observed_at", "dtype", "scale", "delegated", "isolated_max_lsb"),
        *("isolated_differing", "isolated_sqnr", "cumulative_sqnr", "quantized_sqnr", "deployed_sqnr"),
    ]
    assert list(report.to_pandas(part="stages").columns) == ["name", "step_sqnr", "sqnr", "value"]


def test_a_saved_program_costs_no_lowering(
    pair: pt2qa.QuantizedPair, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pt2qa_xnnpack.lowering, "lower")
    assert pt2qa.compare_deployed(pair, [images(2)], program=folder).rows


def test_a_program_of_another_model_is_refused(folder: Path) -> None:
    other = pt2qa.quantize(pt2qa.capture(residual(), images(4)), "xnnpack:per_channel=false", [images(4)])
    with pytest.raises(pt2qa.DeploymentError, match=r"lowered from something else \(graph '\w+', now '\w+'\)"):
        pt2qa.compare_deployed(other, [images(4)], program=folder)


def test_a_folder_that_holds_no_program_is_refused(pair: pt2qa.QuantizedPair, tmp_path: Path) -> None:
    with pytest.raises(pt2qa.DeploymentError, match=r"not a lowered program of pt2qa \(FileNotFoundError"):
        pt2qa.compare_deployed(pair, [images(4)], program=tmp_path)


def test_a_damaged_program_is_refused(pair: pt2qa.QuantizedPair, folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "xnnpack.json").write_text("{}")
    with pytest.raises(pt2qa.DeploymentError, match="not a program that pt2qa saved"):
        pt2qa.compare_deployed(pair, [images(4)], program=copied)
    shutil.copy(folder / "xnnpack.json", copied)
    (copied / "model.pte").write_bytes(b"nothing")
    with pytest.raises(pt2qa.DeploymentError, match="ExecuTorch could not load the program"):
        pt2qa.compare_deployed(pair, [images(4)], program=copied)


def test_no_batch_is_an_error(pair: pt2qa.QuantizedPair) -> None:
    with pytest.raises(pt2qa.BatchError, match="no batch to compare on"):
        pt2qa.compare_deployed(pair, [])


def test_a_program_alone_gives_the_same_outputs(
    pair: pt2qa.QuantizedPair, folder: Path, report: DeployedReport
) -> None:
    alone = pt2qa.compare_deployed(pair, [images(4, seed=1), images(3, seed=2)], deployed=folder / "model.pte")
    assert alone.stages == report.stages
    (output,), (expected,) = alone.outputs, report.outputs
    assert (output.quantized_sqnr, output.deployed_sqnr) == (expected.quantized_sqnr, expected.deployed_sqnr)
    assert output.cumulative_sqnr == expected.cumulative_sqnr


def test_a_quantizer_object_runs_on_the_backend_of_its_class() -> None:
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer

    config = xnnpack_quantizer.get_symmetric_quantization_config(is_per_channel=True)
    own = xnnpack_quantizer.XNNPACKQuantizer().set_global(config)
    capture, batches = pt2qa.capture(nn.Sequential(nn.Linear(3, 2)).eval(), torch.ones(1, 3)), [torch.ones(1, 3)]
    of_object, of_name = (pt2qa.quantize(capture, quantizer, batches) for quantizer in (own, "xnnpack"))
    found, expected = (pt2qa.compare_deployed(pair, batches) for pair in (of_object, of_name))
    assert (found.backend, found.rows) == (expected.backend, expected.rows)
    # Its rules of the check apply as well.
    ids = {"xnnpack-portable-op", "xnnpack-turned-image"}
    assert ids <= {outcome.rule for outcome in pt2qa.check(of_object).rules}


def test_a_quantizer_without_a_backend_names_both_other_ways() -> None:
    from torchao.quantization.pt2e.quantizer.arm_inductor_quantizer import (
        ArmInductorQuantizer,
        get_default_arm_inductor_quantization_config,
    )

    quantizer = ArmInductorQuantizer().set_global(get_default_arm_inductor_quantization_config())
    pair = pt2qa.quantize(
        pt2qa.capture(nn.Sequential(nn.Linear(3, 2)).eval(), torch.ones(1, 3)), quantizer, [torch.ones(1, 3)]
    )
    text = r"'ArmInductorQuantizer' names no backend.*backend='onnxruntime'.*x86, xnnpack.*record-inputs"
    with pytest.raises(pt2qa.DeploymentError, match=text):
        pt2qa.compare_deployed(pair, [torch.ones(1, 3)])


def test_the_saved_program_gives_the_same_without_pt2qa(
    pair: pt2qa.QuantizedPair, folder: Path, report: DeployedReport, tmp_path: Path
) -> None:
    """A process that imports executorch alone."""
    data = [images(4, seed=1), images(3, seed=2)]
    torch.save({"inputs": data, "reference": [pair.reference(x).detach() for x in data]}, tmp_path / "data.pt")
    script = """
import sys, torch
from executorch.runtime import Runtime
data = torch.load(sys.argv[1], weights_only=True)
program = Runtime.get().load_program(open(sys.argv[2], "rb").read())
method = program.load_method("forward")  # the program must outlive it
found = torch.cat([method.execute([x])[0] for x in data["inputs"]]).double()
wanted = torch.cat(data["reference"]).double()
assert not any(name.startswith("pt2qa") for name in sys.modules)
print(float(10 * torch.log10((wanted**2).sum() / ((wanted - found) ** 2).sum())))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "data.pt"), str(folder / "model.pte")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[-1]) == pytest.approx(report.outputs[0].deployed_sqnr, abs=1e-3)


class Sizes(nn.Module):
    """Returns sizes and numbers beside its tensor, one of them first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[int, Tensor, dict[str, float]]:
        return x.shape[0], self.fc(x), {"width": x.shape[1], "gain": 3.5}


# Integers of seven bits: a CPU without VNNI adds pairs of products of eight bits in sixteen.
@pytest.mark.parametrize(("quantizer", "dynamic"), [("xnnpack", True), ("x86:reduce_range=true", False)])
def test_outputs_that_are_no_tensors_are_not_compared(quantizer: str, dynamic: bool, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 64).reshape(4, 16)
    sizes = {"x": {0: Dim("batch", min=2, max=64)}} if dynamic else None
    capture = pt2qa.capture(Sizes().eval(), x, dynamic_shapes=sizes)
    made = pt2qa.quantize(capture, quantizer, [x], progress=False)
    batches = [x, x[:3]] if dynamic else [x]
    report = pt2qa.compare_deployed(made, batches, progress=False)
    assert [row.name for row in report.outputs] == ["output[1]"]
    assert report.sqnr > 20
    pt2qa.record_inputs(made, batches, tmp_path / "inputs.safetensors", progress=False)
    with safe_open(tmp_path / "inputs.safetensors", "pt") as file:
        told = json.loads(file.metadata()["pt2qa"])
    assert [[output["name"] for output in batch["outputs"]] for batch in told] == [["output[1]"]] * len(batches)
    outputs = {f"batch{number}.output0": made.quantized(batch)[1] for number, batch in enumerate(batches)}
    save_file(outputs, tmp_path / "outputs.safetensors")
    recorded = pt2qa.compare_deployed(made, batches, deployed=tmp_path / "outputs.safetensors")
    assert [row.name for row in recorded.outputs] == ["output[1]"]


def test_a_metric_is_measured_of_every_model_that_runs(pair: pt2qa.QuantizedPair, folder: Path) -> None:
    """It sees what each model returns, the program through ExecuTorch alone, and as the model returns it."""
    x = images(4, seed=3)
    seen: list[Tensor] = []

    def largest(model: Any) -> float:
        seen.append(model(x=x))
        return seen[-1].max().item()

    report = pt2qa.compare_deployed(pair, [images(4)], program=folder, metric=largest)
    method = runtime().load_program(folder / "model.pte").load_method("forward")
    with torch.no_grad():
        expected = [residual()(x), pair.reference(x), pair.quantized(x), method.execute([x])[0]]
    assert [row.name for row in report.stages if not math.isnan(row.value)] == [
        *("eager", "prepared", "converted", "deployed")
    ]
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    assert report.value == report.stages[-1].value == expected[-1].max().item()
    assert "and largest:" in report.text()
    gated = pt2qa.report.gate(report, require=[f"value>={report.value + 1}"])
    assert not gated.passed


def test_a_metric_sees_sizes_and_nested_outputs() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"rows": x.shape[0], "scores": (self.fc(x), x + 1)}

    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    pair = pt2qa.quantize(pt2qa.capture(Sized().eval(), x), "xnnpack", [x], progress=False)
    found: list[dict[str, Any]] = []

    def rows(model: Any) -> float:
        found.append(model(x))
        return float(found[-1]["rows"])

    report = pt2qa.compare_deployed(pair, [x], metric=rows, progress=False)
    assert [row.value for row in report.stages if row.name != "capture"] == [4.0] * 4
    assert torch.allclose(found[-1]["scores"][1], x + 1, atol=0.01)


def test_recorded_outputs_have_no_metric(pair: pt2qa.QuantizedPair, tmp_path: Path) -> None:
    with pytest.raises(pt2qa.DeploymentError, match="recorded outputs cannot be run, so metric= has no model"):
        pt2qa.compare_deployed(pair, [images(4)], deployed=tmp_path / "out.safetensors", metric=lambda model: 1.0)


def test_ctrl_c_in_a_metric_keeps_what_was_compared(pair: pt2qa.QuantizedPair, folder: Path) -> None:
    def interrupted(model: Any) -> float:
        raise KeyboardInterrupt

    report = pt2qa.compare_deployed(pair, [images(4)], program=folder, metric=interrupted)
    assert (report.batches, report.metric) == (1, "")
    assert math.isnan(report.value)
    assert "interrupted: no metric was measured" in report.notes
    assert "metric" not in report.text().partition("Outputs")[0]
