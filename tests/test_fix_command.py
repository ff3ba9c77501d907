"""``pt2qa fix``: from a flow to a model that is better on its kernels, and code that quantizes it so."""

from __future__ import annotations

import html
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import pt2qa
import pt2qa_xnnpack.backend
from examples import digits
from pt2qa.cli import main
from pt2qa.report import DeployedReport, Diagnosis, LayerReport, ReportDiff
from tests.report.html.test_page import Page

DEMO = f"{Path(digits.__file__)}:mistaken"
FLOW = """
import torch
from tests.models import Linears
NAMES = ("model", "example_inputs", "batches")
def flow():
    torch.manual_seed(0)
    return Linears().eval(), torch.zeros(4, 16), [torch.randn(4, 16) for _ in range(3)]
"""


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="pt2qa", env={"COLUMNS": "100"})


@pytest.fixture(autouse=True)
def _path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("fix") / "demo"
    return folder, run("fix", DEMO, "-q", "xnnpack", "-o", folder)


def test_the_demo_is_fixed_and_proved_on_the_kernels(demo: tuple[Path, Result]) -> None:
    folder, result = demo
    assert result.exit_code == 0, result.output
    diagnosis, deployed = (pt2qa.load(folder / f"{name}.safetensors") for name in ("diagnosis", "deployed"))
    assert isinstance(diagnosis, Diagnosis)
    assert isinstance(deployed, DeployedReport)
    assert diagnosis.rows[0].cause == "wide-calibration"
    values = {row.name: row.value for row in deployed.stages}
    assert diagnosis.figures[0].value < values["eager"] - 2
    assert deployed.value > values["eager"] - 1
    assert f"accuracy: eager {values['eager']:.4g} -> " in result.stdout
    assert "1. wide-calibration at pictures" in result.stdout
    assert "calibrate on the data that the diagnosis names" in result.stderr
    assert (folder / "program" / "model.pte").exists()
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"pt2qa gate {folder / 'deployed.safetensors'} --require 'value>=")
    page = (folder / "report.html").read_text()
    assert "wide-calibration" in page
    assert f"<pre>{html.escape(last, quote=False)}</pre>" in page.replace("&#39;", "'"), "what was applied is not next"


def test_the_page_shows_each_op_before_and_after(demo: tuple[Path, Result]) -> None:
    folder, _ = demo
    made = {each: pt2qa.load(folder / f"{each}.safetensors") for each in ("diagnosis", "layers", "changes")}
    diagnosis, layers, changes = made["diagnosis"], made["layers"], made["changes"]
    assert isinstance(diagnosis, Diagnosis)
    assert isinstance(layers, LayerReport)
    assert isinstance(changes, ReportDiff)
    assert {row.name: row.after for row in changes.rows} == {row.name: row.isolated_sqnr for row in layers.rows}
    (output,) = changes.figures
    assert (output.before, output.after) == (pytest.approx(diagnosis.figures[0].sqnr), layers.sqnr)
    shown = Page((folder / "report.html").read_text()).data
    (section,) = [each for each in shown if each["heading"].startswith("What changed")]
    (table,) = [each for each in section["tables"] if each["name"] == "rows"]
    assert {"before", "after"} <= {each["key"] for each in table["columns"] if each["shown"]}
    charts = [each for section in shown for each in section["charts"] if each["kind"] == "histogram"]
    (chart,) = [each for each in charts if each["title"].startswith("classify/linear: ")]
    counts = {each["side"]: np.array(each["counts"]) for each in chart["series"]}
    given = digits.mistaken()
    capture = pt2qa.capture(given["model"], given["example_inputs"], dynamic_shapes=({0: torch.export.Dim("n")},))
    plan = pt2qa.OverridePlan.load(folder / "plan.json")
    for side, batches, edits in (("before", given["batches"], None), ("quantized", given["evaluation"], plan)):
        net = pt2qa.quantize(capture, "xnnpack", batches, overrides=edits).quantized
        scores = torch.cat([net(batch) for batch in given["evaluation"]])
        exact, edges = np.histogram(scores, chart["edges"])
        apart = {each: np.abs(np.cumsum(found - exact)).sum() * (edges[1] - edges[0]) for each, found in counts.items()}
        moved = {each: float(area / scores.numel() / scores.std()) for each, area in apart.items()}  # Wasserstein-1
        other = "quantized" if side == "before" else "before"
        assert moved[side] < 0.01 < 0.1 < moved[other], (side, moved)


def test_its_code_quantizes_the_model_so(demo: tuple[Path, Result]) -> None:
    folder, _ = demo
    spec = importlib.util.spec_from_file_location("fixed_quantizer", folder / "quantizer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given = digits.mistaken()
    shapes = ({0: torch.export.Dim("pictures")},)
    net = module.quantize(given["model"], (given["example_inputs"],), given["evaluation"], dynamic_shapes=shapes)
    values = {row.name: row.value for row in pt2qa.load(folder / "deployed.safetensors").stages}
    assert given["metric"](net) == pytest.approx(values["converted"])


def test_a_target_takes_ops_out_of_int8_and_json_says_all(tmp_path: Path) -> None:
    flow = tmp_path / "flow.py"
    flow.write_text(FLOW)
    result = run("fix", flow, "-q", "xnnpack", "-o", tmp_path / "fixed", "--target", "sqnr>=45", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [each["kind"] for each in document["reports"]] == ["diagnosis", "layers", "diff", "bad-cases", "deployed"]
    assert document["reports"][-1]["numbers"]["sqnr"] > 45
    plan = pt2qa.OverridePlan.load(tmp_path / "fixed" / "plan.json")
    assert any(edit.kind == "float" for edit in plan.edits)


def test_dynamic_scales_are_those_of_the_kernels(tmp_path: Path) -> None:
    flow = FLOW.replace("[torch.randn(4, 16)", "[torch.tensor([[0.01], [1.0], [1.0], [100.0]]) * torch.randn(4, 16)")
    (tmp_path / "flow.py").write_text(flow, encoding="utf-8")
    result = run("fix", tmp_path / "flow.py", "-q", "xnnpack:mode=dynamic", "--target", "48", "-o", tmp_path / "out")
    assert result.exit_code in (0, 1), result.output
    diagnosis, deployed = (pt2qa.load(tmp_path / "out" / f"{name}.safetensors") for name in ("diagnosis", "deployed"))
    assert isinstance(diagnosis, Diagnosis)
    assert isinstance(deployed, DeployedReport)
    assert diagnosis.quantizer == "xnnpack:mode=dynamic, as deployed"
    assert "dynamic-by-row" not in {row.cause for row in diagnosis.rows}
    assert pt2qa.OverridePlan.load(tmp_path / "out" / "plan.json").quantizer == "xnnpack:mode=dynamic"
    stages = {stage.name: stage.sqnr for stage in deployed.stages}
    assert stages["deployed"] == pytest.approx(stages["converted"], abs=0.05)
    # x86 has the scales of the converted graph.
    run("fix", tmp_path / "flow.py", "-q", "xnnpack:mode=dynamic", "--backend", "x86", "-o", tmp_path / "x86")
    other = pt2qa.load(tmp_path / "x86" / "deployed.safetensors")
    assert isinstance(other, DeployedReport)
    assert (other.quantizer, other.suspects) == ("xnnpack:mode=dynamic", ())


def test_what_is_not_reached_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = tmp_path / "flow.py"
    flow.write_text(f"{FLOW}\ndef measured():\n    return dict(zip(NAMES, flow())) | {{'metric': lambda model: 0.5}}")
    monkeypatch.setattr(pt2qa_xnnpack.backend.XNNPACKBackend, "missing", lambda self: "no runtime")
    result = run("fix", f"{flow}:measured", "-q", "xnnpack", "-o", tmp_path / "fixed", "--target", "0.9")
    assert result.exit_code == 1, result.output
    assert "the target is not met: " in result.stderr
    assert (tmp_path / "fixed" / "reconfiguration.safetensors").exists()
    assert "not run on kernels: " in result.stderr
    assert not (tmp_path / "fixed" / "program").exists()
    assert (tmp_path / "fixed" / "quantizer.py").exists()


def test_nan_in_the_quantized_model_is_exit_code_1(tmp_path: Path) -> None:
    flow = tmp_path / "flow.py"
    flow.write_text("""
import torch
from torch import nn
class Log(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
    def forward(self, x):
        return self.fc(x).abs().log()  # of small values, which are rounded to 0
def flow():
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    return Log().eval(), x, [x, x + 1]
""")
    result = run("fix", flow, "-q", "xnnpack", "-o", tmp_path / "fixed")
    assert result.exit_code == 1, result.output
    assert "Quantization fails on 2 of 2 batches: infinite in the quantized model alone" in result.stderr
