"""``examples/github/action.yml``: its steps in a shell, as a runner executes them; ``gh`` is a script that tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "github" / "action.yml").read_text(encoding="utf-8"))
FLOW = """
import torch
def flow():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval()
    batches = [torch.randn(8, 16) for _ in range(2)]
    with torch.no_grad():
        model[2].weight[0, 0] = LARGEST
    return model, batches[0], batches
"""
GH = """#!/bin/sh
printf '%s\\n' "$*" >> gh-arguments.txt
[ "$2" != --paginate ] || [ ! -f comments.txt ] || cat comments.txt
"""


def run(folder: Path, branch: str, *, only: Any = None, **given: str) -> tuple[list[int], str]:
    """The exit codes of the steps that run, and what they print; after a failure, those alone that always run."""
    inputs = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | given
    event = "push" if branch == inputs["main"] else "pull_request"
    known = {f"inputs.{name}": value for name, value in inputs.items()}
    known |= {"github.token": "token", "github.event.pull_request.number": "7"}
    codes, printed = list[int](), ""
    for step in ACTION["runs"]["steps"] if only is None else [only]:
        condition = str(step.get("if", ""))
        if "github.ref_name" in condition and (branch == inputs["main"]) is ("!=" in condition):
            continue
        if "pull_request" in condition and event != "pull_request":
            continue
        if "run" not in step or (any(codes) and "always()" not in condition):
            continue
        filled = {"GITHUB_OUTPUT": str(folder / "outputs.txt")} | {
            name: re.sub(r"\$\{\{ (.+?) \}\}", lambda found: known[found[1]], value)
            for name, value in step.get("env", {}).items()
        }
        path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder,
            env={**os.environ, **filled, "PATH": path, "GITHUB_REPOSITORY": "us/nets"},
            capture_output=True,
            text=True,
        )
        codes.append(done.returncode)
        printed += done.stdout + done.stderr
    return codes, printed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, script in (("gh", GH), ("pt2qa", f'#!/bin/sh\nexec {sys.executable} -W ignore -m pt2qa "$@"\n')):
        (tmp_path / "bin" / name).write_text(script, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def test_a_model_that_got_worse_fails_and_the_comment_says_what_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "quantizers"))))
    flow = folder / "flow.py"
    flow.write_text(FLOW.replace("LARGEST", "0.1"), encoding="utf-8")
    given = {"flow": "flow.py:flow", "quantizer": "xnnpack:per_channel=false", "require": "sqnr>=5\nsamples==16\n"}
    codes, printed = run(folder, "main", **given)
    assert codes == [0, 0, 0, 0], printed
    assert list((folder / "pt2qa-main").glob("*-layers.safetensors"))
    assert not (folder / "gh-arguments.txt").exists()
    flow.write_text(FLOW.replace("LARGEST", "30.0"), encoding="utf-8")
    codes, printed = run(folder, "change", **given)
    assert codes == [0, 0, 1, 0], printed
    assert "::error title=" in printed
    comment = (folder / "pt2qa-comment.md").read_text(encoding="utf-8")
    first = "<!-- pt2qa flow.py:flow xnnpack:per_channel=false -->"
    assert comment.startswith(f"{first}\n### int8 with xnnpack:per_channel=false\n```text\nSequential")
    assert re.search(r"2/linear +worse", comment)
    assert "<summary>Diagnosis</summary>" in comment
    told = folder / "gh-arguments.txt"
    assert told.read_text(encoding="utf-8").splitlines()[1:] == ["pr comment 7 --body-file pt2qa-comment.md"]
    told.unlink()
    others = ("3 <!-- pt2qa flow.py:flow x86 -->", "4 <!-- pt2qa flow.py:flow xnnpack -->", f"5 {first}", "6 Nice.")
    (folder / "comments.txt").write_text("\n".join(others), encoding="utf-8")
    (comment_step,) = (step for step in ACTION["runs"]["steps"] if step["name"] == "Comment")
    codes, printed = run(folder, "change", only=comment_step, **given)
    assert codes == [0], printed
    assert told.read_text(encoding="utf-8").splitlines()[1:] == [
        "api --method PATCH repos/us/nets/issues/comments/5 -F body=@pt2qa-comment.md"
    ]


def test_the_first_run_has_nothing_to_compare_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "quantizers"))))
    (folder / "flow.py").write_text(FLOW.replace("LARGEST", "0.1"), encoding="utf-8")
    codes, printed = run(folder, "change", flow="flow.py:flow", quantizer="xnnpack:per_channel=false,mode=static")
    assert codes == [0, 0, 0, 0], printed
    assert (folder / "outputs.txt").read_text(encoding="utf-8") == (
        "key=pt2qa-main-flow.py-flow-xnnpack-per_channel=false-mode=static-\n"
    )
    kept = [step["with"]["key"] for step in ACTION["runs"]["steps"] if "cache" in step.get("uses", "")]
    assert kept == ["${{ steps.kept.outputs.key }}${{ github.sha }}"] * 2
    assert "4 layers, 2 batches (16 samples)" in (folder / "pt2qa-comment.md").read_text(encoding="utf-8")
