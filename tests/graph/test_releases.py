"""Outside the tested releases of torch, torchao and executorch, pt2qa says so once, and names the contract tests."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from pt2qa._graph.internals.releases import CONTRACTS, untested

ROOT = Path(__file__).parent.parent.parent
TESTED = {"torch": "2.13.0", "torchao": "0.18.0", "executorch": "1.4.1"}


def found(**versions: str | None) -> str:
    installed = {**TESTED, **versions}

    def version_of(package: str) -> str:
        version = installed[package]
        if version is None:
            raise PackageNotFoundError(package)
        return version

    return untested(version_of)


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.14.1", "2.15.0+cu132"])
def test_tested_releases_are_not_mentioned(torch: str) -> None:
    assert found(torch=torch) == ""


def test_executorch_may_be_absent() -> None:
    assert found(executorch=None) == ""


@pytest.mark.parametrize("torch", ["2.12.1", "2.16.0", "2.16.0.dev20270101+cpu"])
def test_a_release_outside_the_range_is_named_with_the_range(torch: str) -> None:
    assert f" is not tested with torch {torch} (tested: <2.16,>=2.13). It " in found(torch=torch)


def test_all_that_are_outside_stand_in_one_text() -> None:
    text = found(torchao="0.19.0", executorch="1.3.1")
    assert "with torchao 0.19.0 (tested: <0.19,>=0.18), executorch 1.3.1 (tested: <1.6,>=1.4.1). It" in text


def test_the_contract_tests_that_it_names_exist() -> None:
    assert f"`{CONTRACTS}`" in found(torch="2.16.0")
    assert all((ROOT / path).exists() for path in CONTRACTS.split() if path.endswith(".py"))


def test_the_warning_comes_once_with_the_first_use_and_not_with_the_import_of_pt2qa() -> None:
    code = """
from importlib import metadata
of = metadata.version
metadata.version = lambda package: "2.99" if package == "torch" else of(package)
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pt2qa
    pt2qa.LayerReport
    print(sum("not tested" in str(each.message) for each in caught))
    pt2qa.capture, pt2qa.quantize, pt2qa.check
    print(sum("not tested" in str(each.message) for each in caught))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "1"], run.stderr
