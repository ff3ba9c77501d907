"""A flow's ``mask`` and that of a session reach every step that measures: padding is in no number of any report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import pt2qa
from pt2qa.cli import main
from tests.padded_prompts import Running, padded, prompts, quantized, with_garbage

FLOW = """
import torch
from tests.padded_prompts import Running, padded, prompts, with_garbage

def flow():
    torch.manual_seed(0)
    axes = {0: torch.export.Dim("prompts", max=64), 1: torch.export.Dim("tokens", min=2, max=64)}
    batch = padded(prompts())
    return {
        "model": Running().eval(),
        "example_inputs": batch,
        "dynamic_shapes": {"input_ids": axes, "attention_mask": axes},
        "batches": [batch, padded(prompts()[:3])],
        "evaluation": [EVALUATION],
        "mask": "attention_mask",
    }
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Runs a command on padded prompts, then on the same with other tokens at padded positions; the two folders."""

    def both(command: str, *options: str) -> list[Path]:
        folders = []
        for name, evaluation in (("clean", "batch"), ("garbage", "with_garbage(batch)")):
            file = tmp_path / f"{name}.py"
            file.write_text(FLOW.replace("EVALUATION", evaluation))
            out = tmp_path / name
            out.mkdir(exist_ok=True)
            target = out if command in ("analyze", "deploy") else out / f"{command}.safetensors"
            found = CliRunner().invoke(main, [command, f"{file}:flow", *options, "-o", str(target)])
            assert found.exit_code == 0, found.output
            folders.append(out)
        return folders

    return both


def differences(clean: Path, garbage: Path) -> list[str]:
    """The reports of two folders that differ."""
    names = sorted(file.name for file in clean.glob("*.safetensors"))
    assert names == sorted(file.name for file in garbage.glob("*.safetensors"))
    assert names
    reports = [(name, pt2qa.load(clean / name), pt2qa.load(garbage / name)) for name in names]
    return [name for name, one, other in reports if (str(one), str(one.rows)) != (str(other), str(other.rows))]


def test_analyze(run: Any) -> None:
    options = ("--bad-cases", "2", "--sensitivity", "--target", "sqnr>=38")
    clean, garbage = run("analyze", "-q", "xnnpack", *options)
    assert differences(clean, garbage) == []
    kinds = {file.stem.removeprefix("xnnpack-") for file in clean.glob("*.safetensors")}
    assert kinds == {"diagnosis", "error-budget", "layers", "weights", "bad-cases", "sensitivity", "reconfiguration"}
    masked = pt2qa.load(clean / "xnnpack-layers.safetensors")
    torch.manual_seed(0)
    pair = pt2qa.quantize(
        quantized(Running(), "xnnpack").capture, "xnnpack", [padded(prompts()), padded(prompts()[:3])], progress=False
    )
    expected = pt2qa.compare_layers(pair, [padded(prompts())], mask="attention_mask")
    assert masked.outputs[0].sqnr == pytest.approx(expected.outputs[0].sqnr, abs=1e-9)


@pytest.mark.parametrize("command", ["profile", "sensitivity", "repair"])
def test_a_single_analysis(run: Any, command: str) -> None:
    assert differences(*run(command, "-q", "xnnpack")) == []


def test_compare(run: Any) -> None:
    assert differences(*run("compare", "-q", "xnnpack", "-q", "xnnpack:per_channel=False")) == []


def test_deploy_and_compare_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []

    def stopped(*args: Any, mask: Any = None, **options: Any) -> None:
        masks.append(mask)
        raise pt2qa.BatchError("stopped")

    monkeypatch.setattr(pt2qa, "compare_deployed", stopped)
    monkeypatch.setattr(pt2qa, "compare_graphs", stopped)
    file = tmp_path / "flow.py"
    file.write_text(FLOW.replace("EVALUATION", "batch"))
    graph = tmp_path / "graph.pt2"
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(2),)), graph)
    for command in (
        ["deploy", f"{file}:flow", "-q", "xnnpack", "-o", str(tmp_path)],
        ["compare-graphs", *[str(graph)] * 2, f"{file}:flow"],
    ):
        assert "stopped" in CliRunner().invoke(main, command).stderr
    assert masks == ["attention_mask"] * 2


def test_check_says_that_it_looks_at_all_positions(tmp_path: Path) -> None:
    file = tmp_path / "flow.py"
    file.write_text(FLOW.replace("EVALUATION", "batch"))
    found = CliRunner().invoke(main, ["check", f"{file}:flow", "-q", "xnnpack", "--calibrate", "--fail-on", "never"])
    assert "check ignores the mask: it checks ops at all positions, padding included" in found.stderr


def test_a_session_masks_every_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pair = quantized(Running(), "xnnpack")
    batches = [padded(prompts()), padded(prompts()[:3])]

    def session(name: str, batches: Any) -> pt2qa.QuantAnalysis:
        analysis = pt2qa.QuantAnalysis(pair, batches, out_dir=tmp_path / name, mask="attention_mask", progress=False)
        analysis.diagnose(verify_code=False)
        analysis.compare_per_layer()
        analysis.sensitivity()
        analysis.reconfigure(target=38.0, verify_code=False)
        analysis.auto_find_bad_case()
        return analysis

    clean, garbage = session("clean", batches), session("garbage", [with_garbage(each) for each in batches])
    assert differences(clean.out_dir, garbage.out_dir) == []
    layers = clean.run(diagnose=False)
    assert clean.bad_case is not None
    expected = pt2qa.compare_layers(pair, clean.bad_case.batches(), mask="attention_mask")
    assert layers.rows == expected.rows
