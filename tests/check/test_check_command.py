"""``pt2qa check`` and ``pt2qa compare`` on a real flow file: what they print, write, and exit with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pt2qa.cli import main
from pt2qa.report import CandidateReport, Findings, load

FLOW = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, training):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout()
        self.spare = nn.Linear(4, 4)
        self.train(training)

    def forward(self, x):
        return self.drop(self.fc(x))


def flow(training=False):
    torch.manual_seed(0)
    return Net(training), torch.randn(2, 4), [torch.randn(2, 4) for _ in range(2)]


def training():
    return flow(True)
"""


@pytest.fixture
def flow(tmp_path: Path) -> Path:
    file = tmp_path / "net.py"
    file.write_text(FLOW, encoding="utf-8")
    return file


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_healthy_model_exits_with_0(flow: Path) -> None:
    result = run("check", f"{flow}:flow")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Check of Net: 0 errors")


def test_errors_exit_with_1_and_are_written(flow: Path, tmp_path: Path) -> None:
    file = tmp_path / "findings.safetensors"
    result = run("check", f"{flow}:training", "-q", "x86", "-o", file, "--width", "80")
    assert result.exit_code == 1
    assert "ERROR train-mode (1)" in result.stdout
    assert "drop: Dropout is in training mode" in result.stdout
    assert f"wrote {file}" in result.stderr
    written = load(file)
    assert isinstance(written, Findings)
    assert written.of("train-mode")
    assert run("show", file).stdout.startswith("Check of Net")


def test_one_text_file_has_the_findings_and_the_configuration_of_every_op(flow: Path, tmp_path: Path) -> None:
    file = tmp_path / "model_check_result.txt"
    result = run("check", f"{flow}:flow", "-q", "xnnpack", "--text", file)
    assert result.exit_code == 0, result.output
    text = file.read_text()
    assert "Check of Net with xnnpack: 0 errors" in text
    assert "annotated by xnnpack, not converted yet" in text
    assert re.search(r"fc/linear +int8 +int8/0 +int8 +HistogramObserver", text)
    assert "Never called: spare." in text
    result = run("check", f"{flow}:training", "-q", "xnnpack", "--text", file)
    assert "ERROR train-mode" in file.read_text()
    assert "lacks the configuration of the ops: 4 modules are in training mode" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--fail-on", "warning"], 1),
        (["--fail-on", "warning", "--silence", "module-never-called:spare"], 0),
        (["--fail-on", "never"], 0),
        (["--rule", "train-mode", "--fail-on", "note"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_fails_is_the_users_choice(flow: Path, options: list[str], code: int) -> None:
    result = run("check", f"{flow}:flow", *options)
    assert result.exit_code == code, result.output


def test_calibrating_adds_the_rules_on_numbers(flow: Path) -> None:
    quick = run("check", f"{flow}:flow", "-q", "x86", "--cpu", "no-vnni")
    whole = run("check", f"{flow}:flow", "-q", "x86", "--cpu", "no-vnni", "--calibrate")
    looked = [re.search(r"Looked at ([^.]*)\.", " ".join(result.stdout.split())) for result in (quick, whole)]
    assert "layers" not in looked[0][1]  # type: ignore[index]  # the search finds the line, or the test fails here
    assert "layers" in looked[1][1]  # type: ignore[index]
    assert "model" in looked[1][1]  # type: ignore[index]


def test_errors_keep_it_from_calibrating(flow: Path) -> None:
    result = run("check", f"{flow}:training", "-q", "x86", "--calibrate")
    assert result.exit_code == 1
    assert "not calibrated, because of the errors below" in result.stderr


def test_mistakes_in_the_call_exit_with_2(flow: Path) -> None:
    result = run("check", f"{flow}:flow", "--calibrate")
    assert result.exit_code == 2
    assert "--calibrate needs a quantizer: -q" in result.stderr
    result = run("check", f"{flow}:flow", "--rule", "train-mod")
    assert result.exit_code == 2
    assert "did you mean 'train-mode'?" in result.stderr


def test_compare_prints_and_writes_the_candidates(flow: Path, tmp_path: Path) -> None:
    file = tmp_path / "candidates.safetensors"
    result = run("compare", f"{flow}:flow", "-q", "x86", "-q", "x86:mode=dynamic", "-o", file)
    assert result.exit_code == 0, result.output
    assert "Net: 2 candidates on 2 batches (4 samples), the best first" in result.stdout
    written = load(file)
    assert isinstance(written, CandidateReport)
    assert [candidate.name for candidate in written.candidates] == ["x86", "x86:mode=dynamic"]


def test_a_quantizer_that_does_not_exist_or_a_second_one_is_a_mistake_in_the_call(flow: Path) -> None:
    result = run("check", f"{flow}:flow", "-q", "nosuch", "--fail-on", "never")
    assert result.exit_code == 2
    assert "no quantizer is named 'nosuch'" in result.stderr
    result = run("check", f"{flow}:flow", "-q", "x86", "-q", "xnnpack")
    assert result.exit_code == 2
    assert "-q: give one quantizer" in result.stderr


def test_calibrating_loses_no_finding(flow: Path) -> None:
    options = ["-q", "x86", "--rule", "strict-differs", "--rule", "aliased-inputs"]
    quick, whole = (run("check", f"{flow}:flow", *options, *more) for more in ([], ["--calibrate"]))
    assert "2 rules found nothing, 0 not applied" in " ".join(quick.stdout.split())
    assert "2 rules found nothing, 0 not applied" in " ".join(whole.stdout.split())


def test_a_crash_is_no_finding(flow: Path) -> None:
    flow.write_text(FLOW.replace("torch.randn(2, 4) for _", "torch.full((2, 4), float('nan')) for _"), encoding="utf-8")
    result = run("compare", f"{flow}:flow", "-q", "xnnpack")
    assert result.exit_code == 2
    assert "calibration batch 0 (counted from 0) holds NaN" in result.stderr
