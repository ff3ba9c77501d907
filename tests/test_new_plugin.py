"""``pt2qa new-plugin`` writes a package that pip installs, pt2qa finds, and whose tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pt2qa.cli import main
from pt2qa.cli.starting import FILES

ROOT = Path(__file__).parent.parent
FLOW = """
import torch

def flow():
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU()).eval(), (x,), [x]
"""


def written(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["new-plugin", *arguments])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin") / "tiny"
    done = written("tiny_npu", "-o", str(folder))
    assert done.exit_code == 0, done.output
    assert done.stderr.count("wrote ") == len(FILES)
    return folder


def test_it_is_formatted_and_free_of_findings(package: Path) -> None:
    for check in (["check", "--select", "E,W,F,I,B,UP"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--line-length", "120", "--isolated", "."]
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_installed_found_and_run_and_its_tests_pass(package: Path, tmp_path: Path) -> None:
    """The tests of some models and properties; `docs/write_a_plugin.md` says how to run all."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*pip, str(package)], check=True, capture_output=True, text=True)
    paths = [str(ROOT), str(ROOT / "quantizers"), str(site)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", "-m", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "tiny_npu  int8 convolutions and linears for tiny_npu" in run("pt2qa", "quantizers")
    assert "linear: fused with the relu after it" in run("pt2qa", "quantizers", "--spec", "tiny_npu")
    (tmp_path / "flow.py").write_text(FLOW)
    said = run("pt2qa", "deploy", "flow.py:flow", "-q", "tiny_npu:relu=false", "-o", "out")
    assert "own kernels: linear" in said
    assert "The kernels are right" in said
    chosen = "kernels or (conv_relu and not conv_relu6) or shared_conv"
    assert " passed" in run("pytest", "-q", "-p", "no:cacheprovider", str(package / "tests"), "-k", chosen)


@pytest.mark.parametrize("name", ["My-Npu", "class", "2nd", "a b", "../up"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    done = written(name)
    assert done.exit_code == 2
    assert f"got {name!r}, expected a name of small letters, digits and _, such as mynpu" in done.output


def test_the_name_of_an_installed_plugin_and_a_folder_with_files_are_refused(tmp_path: Path) -> None:
    assert "'x86' is installed already: choose another name" in written("x86").output
    (tmp_path / "mine").write_text("")
    assert (
        f"{tmp_path} exists and is not empty: give another folder with -o" in written("b", "-o", str(tmp_path)).output
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]
