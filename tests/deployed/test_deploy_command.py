"""``pt2qa deploy``, ``pt2qa record-inputs`` and ``pt2qa analyze --deployed`` on a flow file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import save_file

import pt2qa
import pt2qa_xnnpack.lowering
from pt2qa.cli import main
from pt2qa.report import DeployedReport
from tests.models import Linears

FLOW = """
import torch
from tests.models import Linears
def flow():
    torch.manual_seed(0)
    return Linears().eval(), torch.zeros(4, 16), [torch.randn(4, 16) for _ in range(2)]
"""


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="pt2qa", env={"COLUMNS": "100"})


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    before = list(sys.path)
    file = tmp_path_factory.mktemp("flow") / "flow.py"
    file.write_text(FLOW, encoding="utf-8")
    yield f"{file}:flow"
    sys.path[:] = before


@pytest.fixture(scope="module")
def first(flow: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder that the command wrote, and what it said."""
    folder = tmp_path_factory.mktemp("deploy") / "new"
    return folder, run("deploy", flow, "-q", "xnnpack", "-o", folder)


def test_deploy_lowers_compares_prints_and_keeps_everything(first: tuple[Path, Result]) -> None:
    folder, result = first
    assert result.exit_code == 0, result.output
    assert sorted(each.name for each in folder.iterdir()) == ["deployed.safetensors", "program"]
    report = pt2qa.load(folder / "deployed.safetensors")
    assert isinstance(report, DeployedReport)
    assert f"{report.text(width=100)}\n" == result.stdout
    gate = f"pt2qa gate {folder / 'deployed.safetensors'} --require 'suspect_values<=0'"
    assert result.stderr.splitlines()[-3:] == [f"wrote {folder / 'deployed.safetensors'}", "Next:", gate]


def test_inspect_prints_what_a_program_holds_and_needs_no_flow(first: tuple[Path, Result], tmp_path: Path) -> None:
    folder, _ = first
    result = run("deploy", "--inspect", folder / "program" / "model.pte")
    assert result.exit_code == 0, result.output
    assert "model.pte: delegates: " in result.stdout
    assert "FullyConnected: qint8 (4, 16), scale " in result.stdout
    (tmp_path / "model.tflite").write_bytes(b"x")
    result = run("deploy", "--inspect", tmp_path / "model.tflite")
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "no installed backend reads such a file. Expected .etdp, .onnx, .pt2, .pte" in said


def test_a_second_run_lowers_nothing(
    first: tuple[Path, Result], flow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, result = first
    monkeypatch.delattr(pt2qa_xnnpack.lowering, "lower")
    again = run("deploy", flow, "-q", "xnnpack", "-o", tmp_path, "--program", folder / "program")
    assert again.exit_code == 0, again.output
    assert again.stdout == result.stdout


def test_the_program_of_another_graph_is_replaced_in_the_commands_own_folder_alone(
    first: tuple[Path, Result], flow: str, tmp_path: Path
) -> None:
    spec = "xnnpack:per_channel=false"
    program = shutil.copytree(first[0] / "program", tmp_path / "made" / "program")
    before = (program / "model.pte").read_bytes()
    refused = run("deploy", flow, "-q", spec, "-o", tmp_path / "made", "--program", program)
    assert refused.exit_code == 2
    assert "lowered from something else" in refused.stderr
    assert (program / "model.pte").read_bytes() == before
    result = run("deploy", flow, "-q", spec, "-o", tmp_path / "made")
    assert result.exit_code == 0, result.output
    assert "program was lowered from another model or by other versions, and is replaced" in result.stderr
    assert (program / "model.pte").read_bytes() != before


def test_the_gate_reads_stages_and_suspects(first: tuple[Path, Result]) -> None:
    report = first[0] / "deployed.safetensors"
    assert run("gate", report, "--require", "sqnr>=20", "--require", "suspect_values<=0").exit_code == 0
    assert run("gate", report, "--require", "rows.isolated_max_lsb<=1").exit_code == 0
    assert run("gate", report, "--require", "sqnr>=300").exit_code == 1


def test_outputs_of_recorded_inputs_are_compared(first: tuple[Path, Result], flow: str, tmp_path: Path) -> None:
    inputs, outputs = tmp_path / "inputs.safetensors", tmp_path / "outputs.safetensors"
    result = run("record-inputs", flow, "-o", inputs)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"wrote {inputs}" in result.stderr.splitlines()
    ran = run("record-inputs", flow, "-o", inputs, "--program", first[0] / "program" / "model.pte")
    assert ran.exit_code == 0, ran.output
    assert [line.partition(" ")[0] for line in ran.stdout.splitlines()] == ["example_runner", "example_runner", "pt2qa"]
    assert (tmp_path / "model.bpte").is_file()
    torch.manual_seed(0)
    model = Linears().eval()
    with safe_open(inputs, "pt") as file, torch.no_grad():
        found = {f"batch{n}.output0": model(file.get_tensor(f"batch{n}.input0")) for n in range(2)}
        save_file(found, outputs, file.metadata())
    done = run("deploy", flow, "-q", "xnnpack", "-o", tmp_path / "made", "--deployed", outputs)
    assert done.exit_code == 0, done.output
    report = pt2qa.load(tmp_path / "made" / "deployed.safetensors")
    assert isinstance(report, DeployedReport)
    assert report.sqnr == float("inf")
    assert report.backend == "recorded outputs"


def test_options_that_exclude_each_other_and_files_that_are_not_there(flow: str, tmp_path: Path) -> None:
    both = run("deploy", flow, "-q", "xnnpack", "-o", tmp_path, "--deployed", "model.pte", "--program", tmp_path / "p")
    assert both.exit_code == 2
    assert "give --deployed, a program made elsewhere, or --program" in both.stderr
    gone = run("deploy", flow, "-q", "xnnpack", "-o", tmp_path, "--deployed", tmp_path / "gone.pte")
    assert gone.exit_code == 2
    assert gone.stderr.splitlines()[-1].startswith(f"pt2qa: {tmp_path / 'gone.pte'}: no such file. Expected .pte")
    other = run("deploy", flow, "-q", "nobody", "-o", tmp_path)
    assert other.exit_code == 2
    assert "no quantizer is named 'nobody'" in other.stderr


def test_another_backend_is_held_against_the_converted_graph(flow: str, tmp_path: Path) -> None:
    for backend in ("x86", "xnnpack"):
        out = tmp_path / backend
        result = run("deploy", flow, "-q", "xnnpack:mode=dynamic", "-b", backend, "-o", out)
        assert result.exit_code == 0, result.output
        report = pt2qa.load(out / "deployed.safetensors")
        assert isinstance(report, pt2qa.DeployedReport)
        assert report.quantizer == "xnnpack:mode=dynamic" + (", as deployed" if backend == "xnnpack" else "")
        assert report.suspects == ()


def test_analyze_also_deploys(flow: str, tmp_path: Path) -> None:
    result = run("analyze", flow, "-q", "xnnpack", "-o", tmp_path, "--deployed")
    assert result.exit_code == 0, result.output
    assert isinstance(pt2qa.load(tmp_path / "xnnpack-deployed.safetensors"), DeployedReport)
    assert "on ExecuTorch with XNNPACK" in result.stdout


def test_numbers_that_nobody_may_rely_on_are_exit_code_1(flow: str, tmp_path: Path) -> None:
    """The device returns NaN."""
    outputs = tmp_path / "outputs.safetensors"
    save_file({f"batch{n}.output0": torch.full((4, 4), float("nan")) for n in range(2)}, outputs)
    result = run("deploy", flow, "-q", "xnnpack", "-o", tmp_path, "--deployed", outputs)
    assert result.exit_code == 1, result.output
    assert "NaN" in result.stderr.partition("Next:")[0].splitlines()[-1]


def test_the_session_writes_a_deployed_report(first: tuple[Path, Result], flow: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    capture = pt2qa.capture(Linears().eval(), torch.zeros(4, 16))
    data = [torch.randn(4, 16) for _ in range(2)]
    pair = pt2qa.quantize(capture, "xnnpack", data)
    session = pt2qa.QuantAnalysis(pair, data, out_dir=tmp_path, progress=False)
    made = session.compare_deployed(program=first[0] / "program")
    assert f"{made.text(width=100)}\n" == first[1].stdout
    assert list(session.reports()) == ["deployed"]
