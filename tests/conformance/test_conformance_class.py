"""The pytest class: readable ids, strict expected failures, reasons for what was skipped, in another package."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pt2qa._conformance.conformance import _pytest
from pt2qa.errors import SelectionError
from pt2qa.testing import QuantizerConformance

SUITE = """
from pt2qa.testing import QuantizerConformance
from tests.conformance.quantizers import Honest, PromisesMore


class Short(QuantizerConformance):
    models = ["conv_relu", "scalars"]
    properties = ["declared", "prepare"]


class TestHonest(Short):
    def make_quantizer(self):
        return Honest()


class TestExpected(Short):
    models = ["conv_relu"]
    xfail = {("declared", "conv_relu"): "not fused yet"}

    def make_quantizer(self):
        return PromisesMore()


class TestExpectedEverywhere(Short):
    xfail = {"declared": "not fused yet"}

    def make_quantizer(self):
        return PromisesMore()


class TestGone(Short):
    models = ["conv_relu"]
    xfail = {("declared", "conv_relu"): "not fused yet"}

    def make_quantizer(self):
        return Honest()


class TestFails(Short):
    models = ["conv_relu"]

    def make_quantizer(self):
        return PromisesMore()
"""


def test_a_subclass_elsewhere_has_one_test_for_each_property_and_model(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-n", "1", "--tb=short", "-p", "no:cacheprovider", "test_theirs.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "PYTEST_ADDOPTS": "", "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = {line.partition(" - ")[0]: line for line in run.stdout.splitlines() if "test_theirs.py" in line}
    prefix = "test_theirs.py::Test{}::test_conformance[{}]"

    def line(outcome: str, suite: str, test: str) -> str:
        key = f"{outcome} {prefix.format(suite, test)}"
        assert key in lines, run.stdout
        return lines[key]

    assert "4 failed" not in run.stdout
    line("PASSED", "Honest", "declared-conv_relu")
    line("PASSED", "Honest", "prepare-scalars")
    assert "not fused yet: conv2d + relu is declared" in line("XFAIL", "Expected", "declared-conv_relu")
    line("PASSED", "Expected", "prepare-conv_relu")
    line("XFAIL", "ExpectedEverywhere", "declared-conv_relu")
    gone = line("FAILED", "Gone", "declared-conv_relu")
    assert "passed, but expected to fail (not fused yet): take it out of xfail" in gone
    assert "conv2d + relu is declared, but at conv/conv2d" in line("FAILED", "Fails", "declared-conv_relu")
    assert "does not apply: the model shows none of the declared patterns" in run.stdout
    assert "2 failed" in run.stdout


def test_it_is_not_collected_itself() -> None:
    assert not QuantizerConformance.__name__.startswith("Test")


def test_an_expected_failure_that_names_nothing_is_an_error() -> None:
    class Mine(QuantizerConformance):
        xfail = {("spelling", "conv_rel"): "why"}  # noqa: RUF012

    class Metafunc:
        fixturenames = ("conformance_property", "conformance_model")

    with pytest.raises(SelectionError, match=r"Mine.xfail: there is no model 'conv_rel'; did you mean 'conv_relu'"):
        Mine().pytest_generate_tests(Metafunc())


def test_it_says_what_a_subclass_must_have() -> None:
    class Mine(QuantizerConformance):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine needs make_quantizer\(self\), which returns the quantizer"):
        Mine().make_quantizer()


def test_without_pytest_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == "pytest":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ImportError, match=r"QuantizerConformance runs under pytest: pip install pytest, or pt2qa\[dev\]"
    ):
        _pytest()
