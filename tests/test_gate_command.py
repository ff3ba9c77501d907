"""``pt2qa diff`` and ``pt2qa gate`` on the command line: output, files, exit codes, and that neither loads torch."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from pt2qa.cli import main
from pt2qa.report import LayerReport, LayerRow, WeightReport, diff, gate, load
from tests.report.conftest import HERE, LAYER

ROWS = tuple(
    LayerRow(**{**LAYER, "handle": i, "name": f"fc{i}/linear", "isolated_sqnr": 30.0 + i, "sqnr": 25.0})
    for i in range(4)
)
OUTPUT = replace(ROWS[0], handle=-1, name="output", sqnr=24.0)
OLD = LayerReport(
    ROWS, (OUTPUT,), (), (), notes=(), batches=2, samples=8, quantizer="xnnpack", model="Net", environment=HERE
)
NEW = replace(
    OLD, rows=(ROWS[0], replace(ROWS[1], isolated_sqnr=9.0), *ROWS[2:]), outputs=(replace(OUTPUT, sqnr=18.0),)
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    OLD.save("old.safetensors")
    NEW.save("new.safetensors")
    WeightReport((), (), notes=(), quantizer="xnnpack", model="Net", environment=HERE).save("weights.safetensors")
    return lambda *args: CliRunner().invoke(main, [str(arg) for arg in args], prog_name="pt2qa")


@pytest.mark.parametrize("command", ["diff", "gate"])
def test_help_teaches_with_an_example(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"    pt2qa {command} " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_diff_prints_and_writes_what_changed(run):
    result = run("diff", "old.safetensors", "new.safetensors")
    assert (result.exit_code, result.stdout) == (0, diff(OLD, NEW).text(width=100) + "\n")
    options = ["--by", "sqnr", "--tolerance", "0.5", "--sort", "graph", "--limit", "2", "--width", "60"]
    result = run("diff", "old.safetensors", "new.safetensors", *options, "-o", "d.safetensors", "--csv", "d.csv")
    expected = diff(OLD, NEW, by="sqnr", tolerance=0.5)
    assert result.stdout == expected.text(sort="graph", limit=2, width=60) + "\n"
    assert result.stderr.startswith("wrote d.csv\nwrote d.safetensors\nNext:\npt2qa ")
    assert load("d.safetensors") == expected
    assert Path("d.csv").read_text(encoding="utf-8") == expected.csv(extended=True)
    assert run("diff", "old.safetensors", "new.safetensors", "--csv", "-").stdout == diff(OLD, NEW).csv(extended=True)


def test_gate_passes_with_0_and_misses_with_1(run):
    result = run("gate", "old.safetensors", "--require", "sqnr>=20", "--require", "rows.isolated_sqnr>=10 dB")
    assert (result.exit_code, result.stderr) == (0, "Next:\npt2qa show old.safetensors\n")
    assert result.stdout == gate(OLD, require=["sqnr>=20", "rows.isolated_sqnr>=10 dB"]).text(width=100) + "\n"
    result = run("gate", "new.safetensors", "--require", "sqnr>=20", "--width", "60")
    assert result.exit_code == 1
    assert result.stdout.startswith(
        "Missed: 1 of 1 check (Net, xnnpack, layers).\n\n  missed  sqnr >= 20 dB: output: 18 dB"
    )
    assert run("gate", "new.safetensors", "--baseline", "new.safetensors", "--max-drop", "0").exit_code == 0


def test_gate_writes_junit_and_annotations(run):
    compare = ["--baseline", "old.safetensors", "--max-drop", "1.0"]
    result = run("gate", "new.safetensors", *compare, "--junit", "gate.xml", "--github")
    expected = gate(NEW, baseline=OLD, max_drop=1.0)
    assert result.exit_code == 1
    assert result.stdout == f"{expected.text(width=100)}\n{expected.github()}\n"
    assert result.stderr.startswith("wrote gate.xml\nNext:\npt2qa ")
    assert Path("gate.xml").read_text(encoding="utf-8") == expected.junit()
    assert ElementTree.parse("gate.xml").getroot().attrib["failures"] == "2"
    passed = run("gate", "old.safetensors", *compare, "--github")
    assert passed.stdout == gate(OLD, baseline=OLD, max_drop=1.0).text(width=100) + "\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["diff", "old.safetensors"], r"Missing argument 'NEW'\. \(see pt2qa diff --help\)"),
        (["diff", "old.safetensors", "weights.safetensors"], "cannot compare a report of layers with one of w.*"),
        (["diff", "old.safetensors", "new.safetensors", "--by", "sqrn"], r".* no column 'sqrn': did you mean .*"),
        (["gate", "old.safetensors"], "nothing to check: .*"),
        (["gate", "gone.safetensors", "--require", "sqnr>=1"], r"gone\.safetensors: no such file; .*"),
        (["gate", "old.safetensors", "--require", "sqnr=>1"], "requirement: got 'sqnr=>1', expected .*"),
        (["gate", "old.safetensors", "--require", "snr>=1"], "a LayerReport has no number 'snr': did you mean .*"),
        (["gate", "old.safetensors", "--max-drop", "1"], "give a baseline and max_drop .* together.*"),
        (["gate", "old.safetensors", "--baseline", "weights.safetensors", "--max-drop", "1"], "cannot compare .*"),
        (["gate", "old.safetensors", "--max-drop", "x"], r"Invalid value for '--max-drop': 'x' is not a valid float.*"),
        (["gate", "old.safetensors", "--require", "sqnr>=1", "--junit", "gone/g.xml"], "cannot write gone/g.xml: .*"),
    ],
)  # fmt: skip
def test_a_mistake_exits_with_2(run, args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert re.fullmatch(rf"pt2qa: {message}\n", result.stderr), result.stderr


SCRIPT = """\
set -e
pt2qa() {{ "{python}" -m pt2qa "$@"; }}
pt2qa gate "$1" --require 'sqnr>=20' --baseline old.safetensors --max-drop 1.0 --junit gate.xml
echo deployed
"""


@pytest.mark.parametrize(("report", "code", "deployed"), [("old", 0, True), ("new", 1, False), ("gone", 2, False)])
def test_a_shell_script_stops_at_a_planted_regression_only(run, report, code, deployed):
    Path("deploy.sh").write_text(SCRIPT.format(python=sys.executable), encoding="utf-8")
    done = subprocess.run(["sh", "deploy.sh", f"{report}.safetensors"], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("deployed" in done.stdout) is deployed
    assert Path("gate.xml").exists() is (report != "gone")


@pytest.mark.parametrize(
    "command",
    [
        ["gate", "old.safetensors", "--require", "sqnr>=1", "--junit", "gate.xml", "--github"],
        ["diff", "old.safetensors", "new.safetensors"],
    ],
    ids=lambda command: command[0],
)
def test_neither_needs_torch(run, command):
    code = (
        "import sys; from pt2qa.cli import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "print(*{'torch', 'torchao', 'executorch', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
