"""``pt2qa profile``: a flow's model, or its quantized pair, as a table and as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pt2qa.cli import main
from pt2qa.report import Profile, load

FLOW = """
import torch
def flow():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).eval()
    batches = [torch.randn(4, 8) for _ in range(2)]
    return model, batches[0], batches
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    Path("flow.py").write_text(FLOW)
    return lambda *args: CliRunner().invoke(main, ["profile", "flow.py:flow", *args], prog_name="pt2qa")


def test_the_float_model_is_profiled(run: Any) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Profile of Sequential, float: 5 tensors, 2 batches (8 samples)")
    assert "Quantiles are read from histograms" in result.output


def test_a_side_of_the_quantized_pair_is_profiled_and_written(run: Any) -> None:
    result = run("-q", "xnnpack", "--side", "quantized", "--no-histograms", "--sort", "graph", "-o", "q.safetensors")
    assert result.exit_code == 0, result.output
    report = load("q.safetensors")
    assert isinstance(report, Profile)
    assert (report.side, report.quantizer, report.histograms) == ("quantized", "xnnpack", {})
    assert report.text(sort="graph", width=120) in result.output
    shown = CliRunner().invoke(main, ["show", "q.safetensors", "--sort", "graph", "--width", "120"])
    assert shown.stdout in result.stdout


def test_a_side_without_a_quantizer_is_refused(run: Any) -> None:
    result = run("--side", "quantized")
    assert result.exit_code == 2
    assert "--side needs a quantized model: give -q" in result.output


def test_the_deployed_side_is_profiled_and_its_program_kept(run: Any) -> None:
    result = run("-q", "xnnpack", "--side", "deployed", "--program", "lowered", "-o", "d.safetensors")
    assert result.exit_code == 0, result.output
    assert "Profile of Sequential, deployed, quantized by xnnpack" in result.output
    assert load("d.safetensors").side == "deployed"
    assert Path("lowered/model.pte").is_file()


@pytest.mark.parametrize("option", ["--program", "--backend"])
def test_options_of_the_deployed_side_are_refused_for_others(run: Any, option: str) -> None:
    refused = run("-q", "xnnpack", option, "xnnpack")
    assert refused.exit_code == 2
    assert f"{option} needs --side deployed" in refused.output


def test_the_deployed_side_takes_a_backend_with_options(run: Any) -> None:
    result = run("-q", "xnnpack", "--side", "deployed", "--backend", "x86:isa=mmx")
    assert result.exit_code == 2
    assert "isa: got 'mmx', expected" in result.output
