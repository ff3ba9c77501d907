"""``flow.patch`` of ``pt2qa fix``: applied by git, the flow quantizes with the plan."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import pt2qa
from pt2qa.cli import main
from pt2qa.cli.flow import load_flow
from pt2qa.cli.patching import patch_of

PLAN = pt2qa.OverridePlan((pt2qa.Edit("float", ("0/linear",)),), quantizer="xnnpack", model="Sequential")
HEAD = """import torch
from torch import nn

def parts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), [torch.randn(4, 8) for _ in range(3)]

"""
WRITTEN = {
    "a dict by lines": '''def flow():
    """Größe, in bytes as in characters."""
    model, batches = parts()
    return {
        "model": model,
        "example_inputs": batches[0],  # größer
        "batches": (batches),
    }
''',
    "a dict by lines with a comment at its end": """def flow():
    model, batches = parts()
    return {
        "model": model,
        "example_inputs": batches[0],
        "batches": batches,  # that calibrate
    }
""",
    "a dict in one line": """def flow():
    model, batches = parts()
    return dict(flow="ä") and {"model": model, "example_inputs": batches[0], "batches": batches}
""",
    "a dict that is unpacked": """def flow():
    model, batches = parts()
    both = {"model": model, "example_inputs": batches[0]}
    return {**both, "batches": batches}
""",
    "a tuple": """def flow():
    model, batches = parts()
    return model, batches[0], batches
""",
    "a tuple in brackets of four, without a newline at the end": """def flow():
    model, batches = parts()
    return (
        model, (batches[0]),
        batches, lambda item: item)""",
    "two return statements, and one of a function inside": """def flow():
    model, batches = parts()
    def inputs_of(item):
        return item
    if len(batches) > 99:
        return model, batches[0], batches
    return {"model": model, "example_inputs": batches[0], "batches": batches, "inputs_of": inputs_of}
""",
    "another plan": """def flow():
    model, batches = parts()
    return {"model": model, "overrides": "old.json", "example_inputs": batches[0], "batches": batches}
""",
}
WRITTEN["a dict in one line"] = WRITTEN["a dict in one line"].replace('dict(flow="ä") and ', "")


@pytest.fixture(autouse=True)
def _path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def git(*args: str, cwd: Path) -> None:
    subprocess.run(["git", *args], cwd=cwd, check=True, capture_output=True, timeout=60)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("below", ["", "sub/"])
def test_git_applies_it_and_the_flow_then_has_the_plan(text: str, newline: str, below: str, tmp_path: Path) -> None:
    git("init", "-q", cwd=tmp_path)
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    (folder / "fixed").mkdir()
    PLAN.save(folder / "fixed" / "plan.json")
    PLAN.save(folder / "old.json")
    flow = folder / "flow.py"
    flow.write_bytes((HEAD + text).replace("\n", newline).encode())
    made = patch_of(str(flow), folder / "fixed" / "plan.json")
    (folder / "flow.patch").write_bytes(made.encode())
    git("apply", "flow.patch", cwd=folder)
    after = flow.read_bytes().decode()
    assert '"overrides": "fixed/plan.json"' in after
    assert after.count("\r\n") == (after.count("\n") if newline == "\r\n" else 0)
    changed = [line for line in made.splitlines() if line.startswith(("+", "-")) and line[:3] not in ("+++", "---")]
    assert len(changed) <= 6, "only what is returned"
    loaded = load_flow(str(flow))
    assert loaded.overrides == PLAN
    pair = loaded.quantized("xnnpack")
    assert pair.recipe is not None
    assert pair.recipe.edits == PLAN.edits


UNLIKE = {
    "flow has 0 def statements in the file, expected one": "flow = parts\n",
    "flow has no return statement": "def flow():\n    raise ValueError\n",
    "flow returns parts(), expected a dict or a tuple that is written there": "def flow():\n    return parts()\n",
    "flow returns None, expected a dict or a tuple that is written there": "def flow():\n    return\n",
    "flow returns (*parts(), 3), expected a dict or a tuple": "def flow():\n    return *parts(), 3\n",
    "flow returns (a, b, c), expected a dict or a tuple": "def flow():\n    return (a,  # one\n        b, c)\n",
    "flow returns {}, expected a dict or a tuple": "def flow():\n    return {}\n",
}


@pytest.mark.parametrize(("told", "text"), UNLIKE.items(), ids=UNLIKE)
def test_a_flow_that_is_written_otherwise_is_left_alone(told: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(HEAD + text)
    with pytest.raises(pt2qa.FlowError) as caught:
        patch_of(str(tmp_path / "flow.py"), tmp_path / "plan.json")
    assert str(caught.value).startswith(told)


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="pt2qa", env={"COLUMNS": "100"})


LOUD = (
    HEAD
    + """
def flow():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    with torch.no_grad():
        model[0].weight[3] *= 60  # a loud channel
    data = [torch.randn(16, 16) for _ in range(6)]
    return {
        "model": model,
        "example_inputs": data[0],
        "batches": data[:3],
        "evaluation": data[3:],
    }
"""
)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_fix_writes_it_and_the_patched_flow_gives_what_fix_measured(tmp_path: Path) -> None:
    git("init", "-q", cwd=tmp_path)
    flow, fixed = tmp_path / "flow.py", tmp_path / "fixed"
    flow.write_text(LOUD)
    result = run("fix", flow, "-q", "xnnpack", "-o", fixed)
    assert result.exit_code == 0, result.output
    assert f"git apply {fixed / 'flow.patch'}" in result.stderr.splitlines()
    before = run("analyze", flow, "-q", "xnnpack", "-o", tmp_path / "before", "--no-diagnosis")
    git("apply", str(fixed / "flow.patch"), cwd=tmp_path)
    after = run("analyze", flow, "-q", "xnnpack", "-o", tmp_path / "after", "--no-diagnosis")
    assert before.exit_code == after.exit_code == 0, after.output
    sqnr = [
        pt2qa.load(tmp_path / name).sqnr
        for name in ("before/xnnpack-layers.safetensors", "after/xnnpack-layers.safetensors")
    ]
    assert sqnr[1] == pytest.approx(pt2qa.load(fixed / "layers.safetensors").sqnr, abs=1e-9)
    assert sqnr[1] > sqnr[0] + 1
    other = run("analyze", flow, "-q", "x86", "-o", tmp_path / "other", "--no-diagnosis")
    assert "the overrides of the flow are for xnnpack, and are not applied to x86" in other.stderr
    assert other.exit_code == 0, other.output
    compared = run("compare", flow, "-q", "xnnpack")
    assert "the overrides of the flow are left out: quantizers are compared as they are" in compared.stderr


def test_why_there_is_no_patch(tmp_path: Path) -> None:
    flow = tmp_path / "flow.py"
    flow.write_text(LOUD.replace("return {", "return dict() | {"))
    result = run("fix", flow, "-q", "xnnpack", "-o", tmp_path / "fixed")
    assert "no flow.patch: flow returns dict() | {" in result.stderr
    assert not (tmp_path / "fixed" / "flow.patch").exists()


def test_overrides_of_a_flow_are_a_plan_or_its_file(tmp_path: Path) -> None:
    for given, told in (
        ("3", "overrides: got int, expected a pt2qa.OverridePlan, or the file of one"),
        ("'no.json'", "cannot read"),
    ):
        (tmp_path / "flow.py").write_text(HEAD + WRITTEN["another plan"].replace('"old.json"', given))
        with pytest.raises(pt2qa.Pt2qaError, match=told):
            load_flow(str(tmp_path / "flow.py"))
