"""The command line: each command's output, and every expected error as one line on stderr with exit code 2."""

from __future__ import annotations

import errno
import io
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import click
import numpy as np
import pytest
from click.testing import CliRunner

import pt2qa
from pt2qa import Target
from pt2qa._report.notes import Note
from pt2qa._report.rows import columns_of
from pt2qa.cli import main
from pt2qa.cli.program import Lasting
from pt2qa.errors import QuantizeError
from pt2qa.overrides import Edit, OverridePlan
from pt2qa.report import (
    BadCases,
    Candidate,
    CandidateReport,
    CandidateRow,
    CaseRow,
    Environment,
    FigureRow,
    LayerReport,
    LayerRow,
    Ranking,
    SetApart,
    StoredCase,
    WeightReport,
    load,
)
from tests.report.html.samples import budget, diagnosis

HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")
VALUES = {"int": 1, "float": 0.5, "bool": True, "text": "dq", "shape": (2, 3)}
ROW = LayerRow(**{column.name: VALUES[column.type] for column in columns_of(LayerRow)} | {"zero_point": nan})
LAYERS = LayerReport(
    rows=tuple(replace(ROW, handle=i, name=f"fc{i}/linear", sqnr=40.0 - i, isolated_sqnr=30.0 + i) for i in range(25)),
    outputs=(replace(ROW, name="output", sqnr=16.0),),
    modules=(),
    unpaired=(),
    notes=(),
    batches=2,
    samples=8,
    quantizer="xnnpack",
    model="Net",
    environment=HERE,
)
WEIGHTS = WeightReport((), (), notes=(), quantizer="xnnpack", model="Net", environment=HERE)
DIAGNOSIS = replace(
    diagnosis(),
    rows=(),
    figures=(FigureRow("now", 38.4, "output", 38.4, 3, 20.1, 1.0, 8),),
    verdict="Nothing to do: 38.4 dB.",
    next_command="",
    environment=HERE,
)
CASES = BadCases(
    rows=(CaseRow("sqnr", "output", 1, 8.25, 0, 1, 1),),
    rankings=(Ranking("sqnr", "output", "smallest", 8, 21.5, 0, 0),),
    labels=(),
    cases=(StoredCase(0, 1, 1, 1, '{"tensor": 0, "dtype": "float32"}'),),
    inputs={"0/1/0": np.ones((1, 2), np.float32)},
    batch_axis=0,
    notes=(),
    steps=2,
    samples=8,
    quantizer="xnnpack",
    model="Net",
    environment=HERE,
)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *args: CliRunner().invoke(main, [str(arg) for arg in args], prog_name="pt2qa")


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "layers.safetensors"
    LAYERS.save(path)
    return path


def failed_with(result, message):
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(rf"pt2qa: {message}\n", result.stderr), result.stderr
    return True


@pytest.mark.parametrize(
    "command",
    [[], ["show"], ["quantizers"], ["analyze"], ["deploy"], ["record-inputs"], ["sensitivity"], ["conformance"]],
)
def test_help_teaches_with_an_example(run, command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "    pt2qa " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_no_command_shows_the_help(run):
    result = run()
    assert result.exit_code == 2
    assert "pt2qa analyze flow.py" in result.output


def test_the_flow_file_of_the_help_is_a_flow(run, tmp_path, monkeypatch):
    from pt2qa.cli.flow import load_flow

    monkeypatch.setattr(sys, "path", list(sys.path))
    text = run("--help").stdout
    code = text[text.index("    # flow.py") : text.index("    pt2qa quantizers")]
    (tmp_path / "flow.py").write_text(textwrap.dedent(code), encoding="utf-8")
    flow = load_flow(f"{tmp_path / 'flow.py'}:flow")
    assert flow.model(*flow.args).shape == (4, 16)
    assert len(flow.batches) == 8


def test_version_states_the_stack(run):
    result = run("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"pt2qa .+ \(torch 2\.\S+, torchao \S+, executorch \S+\)\n", result.stdout)


def test_show_prints_the_report(run, report):
    assert run("show", report).stdout == LAYERS.text(width=100) + "\n"
    shown = run("show", report, "--sort", "graph", "--limit", "3", "--width", "60")
    assert shown.exit_code == 0
    assert shown.stdout == LAYERS.text(sort="graph", limit=3, width=60) + "\n"
    assert run("show", report, "--limit", "0").stdout == LAYERS.text(limit=None, width=100) + "\n"


@pytest.mark.parametrize("typed", ["isolated dB", "Isolated", "isolated_sqnr"])
def test_rows_are_sorted_by_what_stands_above_a_column(run, report, typed):
    assert run("show", report, "--sort", typed).stdout == LAYERS.text(sort="isolated_sqnr", width=100) + "\n"
    found = run("diff", report, report, "--by", f"outputs.{typed}")
    assert found.stdout == run("diff", report, report, "--by", "outputs.isolated_sqnr").stdout
    assert found.exit_code == 0


def test_show_writes_csv(run, report, tmp_path):
    result = run("show", report, "--csv", tmp_path / "layers.csv")
    assert result.stdout == LAYERS.text(width=100) + "\n"
    assert result.stderr == f"wrote {tmp_path / 'layers.csv'}\nNext:\npt2qa html {report} -o report.html\n"
    assert (tmp_path / "layers.csv").read_text(encoding="utf-8") == LAYERS.csv(extended=True)
    assert run("show", report, "--csv", "-").stdout == LAYERS.csv(extended=True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show"], r"Missing argument 'REPORT'\. \(see pt2qa show --help\)"),
        (["show", "gone.safetensors"], r"gone\.safetensors: no such file; give a file that report\.save\(\) wrote"),
        (["show", "."], r"\.: is a folder; give one report in it, .*"),
        (["show", "REPORT", "--sort", "cosin"], r"cannot sort by 'cosin': did you mean 'cosine'\? expected worst, .*"),
        (["show", "REPORT", "--limit", "-1"], r"Invalid value for '--limit': -1 is not .* \(see pt2qa show --help\)"),
        (["show", "REPORT", "--csv", "gone/x.csv"], r"cannot write gone/x\.csv: the folder .* does not exist; .*"),
        (["show", __file__], r".*test_cli\.py: not a report file, or damaged: .*"),
        (["shw"], r"No such command 'shw'\. Did you mean 'show'\? \(see pt2qa --help\)"),
        (["analyse", "--help"], r"No such command 'analyse'\. Did you mean 'analyze'\? \(see pt2qa --help\)"),
        (["zzz"], r"No such command 'zzz'\. \(see pt2qa --help\)"),
        (["--frob"], r"No such option '--frob'\. \(see pt2qa --help\)"),
        (["show", "--limti", "x"], r"No such option '--limti'\. Did you mean '--limit'\? \(see pt2qa show --help\)"),
        (["analyze", "flow.py:flow"], r"Missing option '-o'\. \(see pt2qa analyze --help\)"),
    ],
)  # fmt: skip
def test_an_expected_error_is_one_line(run, report, args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*(report if arg == "REPORT" else arg for arg in args))
    assert result.exit_code == 2
    assert re.fullmatch(rf"pt2qa: {message}\n", result.stderr), result.stderr


@pytest.mark.parametrize("args", [["--debug", "show", "gone"], ["show", "gone", "--debug"], ["show", "--debug"]])
def test_debug_shows_the_traceback_before_the_line(run, args):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.splitlines()[-1].startswith("pt2qa: ")


def test_show_prints_every_kind_of_report(run, tmp_path):
    CASES.save(tmp_path / "cases.safetensors")
    result = run("show", tmp_path / "cases.safetensors", "--sort", "value", "--csv", tmp_path / "cases.csv")
    assert result.stdout == CASES.text(sort="value", width=100) + "\n"
    assert (tmp_path / "cases.csv").read_text().splitlines()[1] == "sqnr,output,1,8.25,0,1,1,,-1,-1,,,,nan,nan"


def test_show_prints_the_code_of_a_reconfiguration_alone(run, report, tmp_path):
    searched = replace(load(Path(__file__).parent / "report/v0_2_0/reconfiguration.safetensors"), code="x = 1\n")
    searched.save(tmp_path / "reconfiguration.safetensors")
    assert run("show", tmp_path / "reconfiguration.safetensors", "--code").stdout == "x = 1\n"
    replace(DIAGNOSIS, code="y = 2\n").save(tmp_path / "diagnosis.safetensors")
    assert run("show", tmp_path / "diagnosis.safetensors", "--code").stdout == "y = 2\n"
    result = run("show", report, "--code")
    assert result.exit_code == 2
    assert "--code: this layers report has no code; reconfigurations have it" in result.stderr


def test_show_needs_no_torch(report):
    code = (
        "import sys; from pt2qa.cli import main\n"
        "main(['show', sys.argv[1]], standalone_mode=False)\n"
        "print(*{'torch', 'torchao', 'executorch', 'pandas'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(report)], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["Next:", f"pt2qa html {report} -o report.html", ""]
    assert "Net, quantized by xnnpack" in done.stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
@pytest.mark.parametrize(("environment", "kept"), [({}, True), ({"MALLOC_ARENA_MAX": "4"}, False)])
def test_the_command_keeps_freed_memory_unless_the_environment_sets_the_allocator(environment, kept):
    code = (
        "import atexit, sys; from pathlib import Path; from pt2qa.cli import main\n"
        "def resident(): return int(Path('/proc/self/statm').read_text().split()[1]) * 4096 >> 20\n"
        "def measure():\n"
        "    before = resident(); data = b'x' * (128 << 20); del data\n"
        "    print(resident() - before, file=sys.stderr)\n"
        "atexit.register(measure)\n"
        "main(['--version'])"
    )
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=unset | environment
    )
    assert (int(done.stderr) > 120) is kept


@dataclass(frozen=True)
class Plugin:
    name: ClassVar[str] = "xnnpack"
    summary: ClassVar[str] = "int8 for XNNPACK, the kernels that ExecuTorch runs on Arm and x86 processors"
    per_channel: bool = True
    mode: str = "static"
    module: str | None = None

    def build(self, graph, *, qat):
        raise NotImplementedError


@dataclass(frozen=True)
class Bare:
    name: ClassVar[str] = "x86"
    summary: ClassVar[str] = "int8 for x86"

    def build(self, graph, *, qat):
        raise NotImplementedError


@pytest.fixture
def plugins(monkeypatch):
    """Stand-ins for the installed plug-ins: their entry points alone, so that no function is replaced.

    Whatever is first imported meanwhile keeps the functions that it imports.
    """
    found = {"xnnpack": Plugin(), "x86": Bare()}

    def entry_points(group):
        return [
            SimpleNamespace(name=name, value=name, dist=None, load=lambda plugin=plugin: plugin)
            for name, plugin in found.items()
        ]

    monkeypatch.setattr("pt2qa.plugins.registry.entry_points", entry_points)
    return found


def test_quantizers_lists_names_summaries_and_options(run, plugins):
    assert run("quantizers", "--width", "70").stdout.splitlines() == [
        "name     summary                                    options",
        "-------  -----------------------------------------  ----------------",
        "x86      int8 for x86                               none",
        "xnnpack  int8 for XNNPACK, the kernels that         per_channel=true",
        "         ExecuTorch runs on Arm and x86 processors  mode=static",
        "                                                    module=none",
    ]


def test_quantizers_prints_what_a_backend_takes(run):
    lines = run("quantizers", "--spec", "xnnpack").stdout.splitlines()
    assert "conv2d (dynamic): weight int8, per channel (axis 0), symmetric, -127..127" in lines
    assert "cat: one scale for all inputs and the output" in lines
    assert "linear (weight only): weight float16" in run("quantizers", "--spec", "x86").stdout
    missing = run("quantizers", "--spec", "xnpack")
    assert missing.exit_code == 2
    assert "did you mean 'xnnpack'" in missing.stderr


def test_quantizers_says_when_a_backend_has_no_spec(run, plugins):
    result = run("quantizers", "--spec", "x86")
    assert result.exit_code == 2
    assert "the quantizer x86 does not state what its backend takes" in result.stderr


def test_quantizers_says_when_there_is_none(run, plugins):
    plugins.clear()
    result = run("quantizers")
    assert result.exit_code == 0
    assert result.stdout == "no quantizer is installed: no package has an entry point in the group pt2qa.quantizers\n"


class StandIn(str):
    """In the place of a pair: the spec of its quantizer."""

    def as_deployed(self):
        return self


@pytest.fixture
def library(monkeypatch, plugins):
    """Stand-ins for the functions that analyze calls; they write down what they were given."""
    calls = SimpleNamespace(captured=[], quantized=[], broken=(), diagnosed=[], repairs=[], overrides=[])

    def capture(model, args, kwargs=None, *, dynamic_shapes=None, strict=False):
        calls.captured.append((args, kwargs, dynamic_shapes))
        return "capture"

    def quantize(capture, spec, batches, overrides=None):
        if spec in calls.broken:
            raise QuantizeError(f"nothing to quantize\nfor {spec}")
        calls.quantized.append((capture, spec, len(batches)))
        calls.overrides.append(overrides)
        return StandIn(spec)

    def diagnose(pair, batches, *, metric, target, deployed, repairs, mask):
        calls.repairs.append(repairs)
        calls.diagnosed.append((pair, len(batches), metric, target, deployed))
        return replace(DIAGNOSIS, quantizer=pair)

    fakes = {
        "capture": capture,
        "quantize": quantize,
        "diagnose": diagnose,
        "compare_layers": lambda pair, batches, mask: replace(LAYERS, quantizer=pair),
        "compare_weights": lambda pair: replace(WEIGHTS, quantizer=pair),
    }
    for name, fake in fakes.items():
        # In the dict, since asking the package for the name would import the real one.
        monkeypatch.setitem(vars(pt2qa), name, fake)
    return calls


@pytest.fixture
def flow(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "flow.py"
    file.write_text(
        "import torch\nx = torch.zeros(4, 2)\n"
        "given = dict(model=torch.nn.Linear(2, 3), example_inputs={'input': x}, batches=[{'input': x}] * 3)\n"
        "def score(model): return float(model(x).sum())\n"
        "def flow(): return given | dict(evaluation=[{'input': x}])\n"
        "def same(): return given\n"
        "def watched(): return flow() | dict(metric=score)\n"
        "def scored(): return flow() | dict(metric=score, target=0.7)\n"
        "def once(): return torch.nn.Linear(2, 3), x, iter([x])\n",
        encoding="utf-8",
    )
    return f"{file}:flow"


def test_analyze_runs_every_quantizer_and_writes_two_reports_each(run, library, flow, tmp_path):
    folder = tmp_path / "new" / "reports"
    result = run("analyze", flow, "-o", folder)
    assert result.exit_code == 0, result.output
    ((args, kwargs, shapes),) = library.captured
    assert (args, list(kwargs), shapes) == ((), ["input"], None)
    assert library.quantized == [("capture", "x86", 3), ("capture", "xnnpack", 3)]
    files = [f"{name}-{what}.safetensors" for name in ("x86", "xnnpack") for what in ("diagnosis", "layers", "weights")]
    assert sorted(file.name for file in folder.iterdir()) == files
    assert result.stderr.splitlines()[: len(files)] == [f"wrote {folder / file}" for file in files]
    assert load(folder / "x86-layers.safetensors").quantizer == "x86"
    assert "Net, quantized by xnnpack: 25 layers" in result.stdout


def test_the_diagnosis_is_printed_first_and_the_next_command_last(run, library, searches, flow, tmp_path):
    result = run("analyze", flow, "-q", "x86", "-o", tmp_path / "r")
    assert result.stdout.startswith("Diagnosis of Net, quantized by x86")
    gate = f"pt2qa gate {tmp_path / 'r' / 'x86-layers.safetensors'} --require 'sqnr>=38'"
    assert result.stderr.splitlines()[-2:] == ["Next:", gate]
    assert library.diagnosed == [("x86", 1, None, None, False)]
    scored = flow.replace(":flow", ":scored")
    run("analyze", scored, "-q", "x86", "-o", tmp_path, "--deployed", "--target", "sqnr>=9")
    assert library.diagnosed[1] == ("x86", 1, None, Target(9.0), True)
    run("analyze", flow.replace(":flow", ":watched"), "-q", "x86", "-o", tmp_path)
    assert library.diagnosed[2][2].__name__ == "score"
    without = run("analyze", flow, "-q", "x86", "-o", tmp_path, "--no-diagnosis")
    assert "Diagnosis" not in without.stdout
    assert "Next:" not in without.output
    assert len(library.diagnosed) == 3


PLANNED = OverridePlan((Edit("float", ("fc1/linear",)),)).to_json()


@pytest.mark.parametrize(
    ("options", "plan", "data", "step"),
    [
        (
            "",
            PLANNED,
            "same",
            "pt2qa analyze {flow} -q xnnpack --overrides {stem}-diagnosis-plan.json -o {folder}-next",
        ),
        ("module=fc1", "", "same", "pt2qa analyze {flow} -q xnnpack:module=fc1 -o {folder}-next"),
        (
            "",
            "",
            "other",
            "pt2qa analyze {flow} -q xnnpack -o",
        ),
    ],
)
def test_the_next_command_quantizes_as_the_diagnosis_did(
    run, library, flow, tmp_path, monkeypatch, options, plan, data, step
):
    def diagnose(pair, batches, **given):
        kept = sys.modules["pt2qa_flow_flow"].given["batches"] if data == "same" else [1]
        plugin = Plugin(**dict(option.split("=") for option in options.split(",") if option))
        return replace(DIAGNOSIS, plan_json=plan, code="pass\n").with_evidence(
            SimpleNamespace(recipe=SimpleNamespace(plugin=plugin, data=SimpleNamespace(batches=kept))), {}
        )

    monkeypatch.setitem(vars(pt2qa), "diagnose", diagnose)
    folder = tmp_path / "r"
    *_, advice, head, last = run("analyze", flow, "-q", "xnnpack", "-o", folder).stderr.splitlines()
    assert head == "Next:"
    assert advice.startswith("wrote") == (data == "same")
    assert last.startswith(step.format(flow=flow, folder=folder, stem=folder / "xnnpack"))
    assert (folder / "xnnpack-diagnosis-quantizer.py").read_text(encoding="utf-8") == "pass\n"
    if plan:
        saved = folder / "xnnpack-diagnosis-plan.json"
        assert OverridePlan.load(saved).to_json() == plan
        assert run("analyze", flow, "-q", "xnnpack", "-o", tmp_path / "next", "--overrides", saved).exit_code == 0
        assert library.overrides[-1].edits == (Edit("float", ("fc1/linear",)),)


def test_the_next_command_without_a_cause_searches(run, library, flow, tmp_path, monkeypatch):
    found = replace(DIAGNOSIS, rows=(), next_command="search on").with_evidence(None, {}, 21)
    monkeypatch.setitem(vars(pt2qa), "diagnose", lambda pair, batches, **given: found)
    last = run("analyze", flow, "-q", "x86", "-o", tmp_path).stderr.splitlines()[-1]
    assert last == f"pt2qa analyze {flow} -q x86 --target 21 -o {tmp_path}-next"


def test_what_a_target_hides_that_is_met_is_measured_in_dB_next(run, library, flow, tmp_path, monkeypatch):
    call = "pt2qa.diagnose(pair, batches)"
    found = replace(DIAGNOSIS, rows=(), met=1, next_command=call).with_evidence(None, {})
    monkeypatch.setitem(vars(pt2qa), "diagnose", lambda pair, batches, **given: found)
    lines = run("analyze", flow, "-q", "x86", "-o", tmp_path).stderr.splitlines()
    assert lines[-1] == f"pt2qa analyze {flow} -q x86 --target 'sqnr>=41' -o {tmp_path}-next"
    assert not any(call in line for line in lines)


def test_a_plan_that_met_the_target_is_the_next_step(run, library, searches, flow, tmp_path):
    last = run("analyze", flow, "-q", "x86", "-o", tmp_path, "--target", "30").stderr.splitlines()[-1]
    assert last == f"pt2qa analyze {flow} -q x86 --overrides {tmp_path}/x86-plan.json -o {tmp_path}-next"


def test_every_command_ends_with_a_command_to_type(run):
    """Its program and options exist; what it names was given."""
    from pt2qa.cli.outcome import _NEXT

    missing = set(main.commands) - set(_NEXT) - {"analyze", "fix"}  # which say what follows from their reports
    assert not missing
    for steps in _NEXT.values():
        for step in steps:
            program, name, *rest = shlex.split(re.sub(r"{\w+}", "x", step))
            if program == "pt2qa":
                command = main.commands[name]
                known = {spelled for each in command.get_params(click.Context(command)) for spelled in each.opts}
                assert {option for option in rest if option.startswith("-")} <= known, step


def test_what_cannot_be_diagnosed_is_analyzed(run, library, flow, tmp_path, monkeypatch):
    def diagnose(pair, batches, **given):
        raise QuantizeError("no output is a\nfloating-point tensor")

    monkeypatch.setitem(vars(pt2qa), "diagnose", diagnose)
    result = run("analyze", flow, "-q", "x86", "-o", tmp_path / "r")
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == "pt2qa: no diagnosis: no output is a floating-point tensor"
    assert (tmp_path / "r" / "x86-layers.safetensors").exists()


def test_analyze_prints_as_show_does_and_writes_tables_and_a_page(run, library, flow, tmp_path):
    given = ("--sort", "isolated dB", "--limit", "2", "--width", "70", "--csv", "--html")
    result = run("analyze", flow, "-q", "x86", "-o", tmp_path / "r", *given)
    assert result.exit_code == 0, result.output
    assert replace(LAYERS, quantizer="x86").text(sort="isolated_sqnr", limit=2, width=70) in result.stdout
    assert (tmp_path / "r" / "x86-layers.csv").read_text(encoding="utf-8") == LAYERS.csv(extended=True)
    assert (tmp_path / "r" / "x86-layers-outputs.csv").exists()
    assert (tmp_path / "r" / "x86-diagnosis-figures.csv").exists()
    assert not list((tmp_path / "r").glob("*weights*.csv"))  # whose tables are empty
    page = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!")
    gate = f"pt2qa gate {tmp_path / 'r' / 'x86-layers.safetensors'} --require"
    assert f"<pre>{gate}" in page
    assert result.stderr.splitlines()[-3] == f"wrote {tmp_path / 'r' / 'report.html'}"


def test_the_error_budget_of_the_diagnosis_is_kept(run, library, flow, tmp_path, monkeypatch):
    found = DIAGNOSIS.with_evidence(None, {"budget": budget()})
    monkeypatch.setitem(vars(pt2qa), "diagnose", lambda pair, batches, **given: found)
    result = run("analyze", flow, "-q", "x86", "-o", tmp_path, "--html")
    assert load(tmp_path / "x86-error-budget.safetensors") == budget()
    assert "Error budget" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "error budget of Net" not in result.stdout


def test_analyze_runs_the_quantizers_asked_for_once_each(run, library, flow, tmp_path):
    spec = "xnnpack:mode=dynamic,per_channel=false"
    result = run("analyze", flow, "-q", spec, "--quantizer", "x86", "-q", spec, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert [call[1] for call in library.quantized] == [spec, "x86"]
    assert (tmp_path / "xnnpack-mode=dynamic-per_channel=false-weights.safetensors").exists()


def test_a_quantizer_that_fails_does_not_stop_the_next(run, library, flow, tmp_path):
    library.broken = ("x86",)
    result = run("analyze", flow, "-o", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "pt2qa: x86: nothing to quantize for x86"
    assert "quantized by xnnpack" in result.stdout
    library.broken = ("x86", "xnnpack")
    result = run("analyze", flow, "-o", tmp_path, "--debug")
    assert [line for line in result.stderr.splitlines() if line.startswith("pt2qa: ")] == [
        "pt2qa: x86: nothing to quantize for x86",
        "pt2qa: xnnpack: nothing to quantize for xnnpack",
    ]
    assert result.stderr.count("Traceback") == 2


@dataclass(frozen=True)
class Plan:
    edits: tuple[int, ...] = (1,)

    def save(self, path):
        path.write_text("{}")


@dataclass(frozen=True)
class Searched:
    """Stands in for a Reconfiguration."""

    met: int
    plan: Plan = Plan()
    verdict: str = "30 dB were asked for,\n27 were reached"

    def text(self, **options):
        return f"searched: {self.verdict}"

    def save(self, path):
        path.write_text("reconfiguration")

    def save_code(self, path):
        path.write_text("code")


@pytest.fixture
def searches(monkeypatch):
    """Stand-ins for the analyses that options ask for."""
    calls = SimpleNamespace(k=[], targets=[], given=[], met=1)

    def find_bad_cases(pair, batches, *, k, mask, classes):
        calls.k.append(k)
        return replace(CASES, quantizer=pair)

    def reconfigure(pair, batches, *, target, sensitivity, mask):
        calls.targets.append(target)
        calls.given.append(sensitivity)
        return Searched(calls.met)

    monkeypatch.setitem(vars(pt2qa), "find_bad_cases", find_bad_cases)
    monkeypatch.setitem(vars(pt2qa), "reconfigure", reconfigure)
    monkeypatch.setitem(vars(pt2qa), "sensitivity", lambda pair, batches, mask: replace(WEIGHTS, model="Ranked"))
    return calls


def test_analyze_writes_what_its_options_ask_for(run, library, searches, flow, tmp_path):
    options = ("--bad-cases", "5", "--sensitivity", "--target", "sqnr>=30")
    result = run("analyze", flow, "-q", "x86", "-o", tmp_path / "reports", *options)
    assert result.exit_code == 0, result.output
    ends = ("diagnosis", "layers", "weights", "bad-cases", "sensitivity", "reconfiguration")
    names = [*(f"x86-{end}.safetensors" for end in ends), "x86-plan.json", "x86-quantizer.py"]
    assert result.stderr.splitlines()[: len(names)] == [f"wrote {tmp_path / 'reports' / name}" for name in names]
    assert all((tmp_path / "reports" / name).exists() for name in names)
    assert isinstance(load(tmp_path / "reports" / "x86-bad-cases.safetensors"), BadCases)
    for part in ("Net, quantized by x86: 25 layers", "1 bad case of 8 samples", "Ranked, quantized by", "searched: 30"):
        assert part in result.stdout
    assert (searches.k, searches.targets) == ([5], [Target(30.0)])
    assert searches.given[0].model == "Ranked"


@pytest.mark.parametrize(("options", "repairs"), [((), ()), (("--repairs",), None)])
def test_repairs_are_measured_if_they_are_asked_for(run, library, flow, tmp_path, options, repairs):
    assert run("analyze", flow, "-q", "x86", "-o", tmp_path, *options).exit_code == 0
    assert library.repairs == [repairs]


def test_a_target_may_be_a_number_and_needs_no_sensitivity(run, library, searches, flow, tmp_path):
    assert run("analyze", flow, "-q", "x86", "-o", tmp_path, "--target", "30").exit_code == 0
    assert (searches.targets, searches.given, searches.k) == ([Target(30.0)], [None], [])


@pytest.mark.parametrize(
    ("option", "at_least", "name"),
    [([], 0.7, "score"), (["--target", "0.8"], 0.8, "score"), (["--target", "sqnr>=30"], 30.0, "sqnr")],
)
def test_a_number_is_a_target_for_the_metric_of_the_flow(
    run, library, searches, flow, tmp_path, option, at_least, name
):
    result = run("analyze", flow.replace(":flow", ":scored"), "-q", "x86", "-o", tmp_path, *option)
    assert result.exit_code == 0, result.output
    (target,) = searches.targets
    assert (target.at_least, target.name, target.metric is None) == (at_least, name, name == "sqnr")


def test_a_model_is_measured_on_the_evaluation_batches(run, library, flow, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setitem(
        vars(pt2qa), "compare_layers", lambda pair, batches, mask: measured.append(len(batches)) or LAYERS
    )
    assert "pt2qa: calibration" not in run("analyze", flow, "-q", "x86", "-o", tmp_path).stderr
    same = run("analyze", flow.replace(":flow", ":same"), "-o", tmp_path)
    assert same.stderr.count("pt2qa: calibration and measurement use the same data, which hides errors on other") == 1
    assert measured == [1, 3, 3]
    assert [call[2] for call in library.quantized] == [3, 3, 3]


def test_a_target_that_is_not_met_is_exit_code_1(run, library, searches, flow, tmp_path):
    searches.met = 0
    result = run("analyze", flow, "-o", tmp_path, "--target", "30")
    assert result.exit_code == 1
    assert [line for line in result.stderr.splitlines() if "target is not met" in line] == [
        f"pt2qa: {name}: the target is not met: 30 dB were asked for, 27 were reached" for name in ("x86", "xnnpack")
    ]
    assert (tmp_path / "xnnpack-plan.json").exists()


@pytest.mark.parametrize(
    ("side", "batches", "code", "line"),
    [
        (
            "quantized",
            4,
            1,
            "Quantization fails on 1 of 4 batches: NaN in the quantized model alone, first at log (batch",
        ),
        ("batch", 1, 1, "The input data contain NaN or infinities in 1 of 1 batch: NaN in the input log (batch"),
        ("batch", 4, 0, ""),
    ],
)
def test_numbers_that_nobody_may_rely_on_are_exit_code_1(
    run, library, flow, tmp_path, monkeypatch, side, batches, code, line
):
    found = replace(LAYERS, batches=batches, set_apart=(SetApart(0, 8, 3, side, "NaN", "log"),))
    monkeypatch.setitem(vars(pt2qa), "compare_layers", lambda pair, batches, mask: found)
    result = run("analyze", flow, "-q", "x86", "-o", tmp_path)
    assert result.exit_code == code
    assert any(said.startswith(f"pt2qa: x86: {line}") for said in result.stderr.splitlines()) == bool(line)
    assert (tmp_path / "x86-weights.safetensors").exists()


def test_candidates_of_which_none_has_an_sqnr_are_exit_code_1(run, library, flow, tmp_path, monkeypatch):
    found = SetApart(0, 8, 3, "batch", "NaN", "x")
    row = CandidateRow(-1, "output", "", "output", {"x86": nan})
    candidate = Candidate("x86", "x86", nan, 1, 1, 1, 1, 8)
    nothing = CandidateReport(
        (row,),
        (candidate,),
        notes=(),
        batches=1,
        samples=8,
        model="Net",
        environment=LAYERS.environment,
        set_apart=(found,),
    )
    monkeypatch.setitem(vars(pt2qa), "compare_quantizers", lambda *given, mask, as_deployed: nothing)
    result = run("compare", flow, "-q", "x86", "-o", tmp_path / "candidates.safetensors")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[1] == (
        "pt2qa: no candidate has an SQNR: The input data contain NaN or infinities in 1 of 1 batch: NaN in the input x "
        "(batch 0, sample 3)."
    )
    assert load(tmp_path / "candidates.safetensors").set_apart == (found,)
    better = replace(nothing, candidates=(replace(candidate, sqnr=30.0),))
    monkeypatch.setitem(vars(pt2qa), "compare_quantizers", lambda *given, mask, as_deployed: better)
    assert run("compare", flow, "-q", "x86").exit_code == 0


def test_an_analysis_that_fails_leaves_the_reports_before_it(run, library, searches, flow, tmp_path, monkeypatch):
    def fails(pair, batches, *, k, mask, classes):
        raise QuantizeError("no output is a tensor")

    monkeypatch.setitem(vars(pt2qa), "find_bad_cases", fails)
    result = run("analyze", flow, "-q", "x86", "-o", tmp_path, "--bad-cases", "1")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "pt2qa: x86: no output is a tensor"
    assert (tmp_path / "x86-layers.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bad-cases", "0"], r"Invalid value for '--bad-cases': 0 is not in the range x>=1\. \(see .*\)"),
        (["--sort", "isoltd"], r"cannot sort by 'isoltd': did you mean 'isolated_sqnr'\? expected worst, .*"),
        (["--overrides", __file__], r".*: is not valid JSON .*; expected an override plan"),
        (["--target", "good"], r"target: got 'good', expected decibels such as 30, 'sqnr>=30', or .*"),
    ],
)
def test_analyze_refuses_options_before_it_captures(run, library, searches, flow, tmp_path, options, message):
    assert failed_with(run("analyze", flow, "-q", "x86", "-o", tmp_path, *options), message)
    assert library.captured == []


def test_analyze_refuses_before_it_captures(run, library, flow, plugins, tmp_path):
    message = r"no quantizer is named 'tpu'\. Installed: x86, xnnpack"
    assert failed_with(run("analyze", flow, "-q", "x86", "-q", "tpu", "-o", tmp_path), message)
    assert failed_with(run("analyze", "gone.py:flow", "-o", tmp_path), r"gone\.py: no such file; .*")
    once = flow.replace(":flow", ":once")
    assert failed_with(run("analyze", once, "-o", tmp_path), r".*which can be read only once, .*; return a list.*")
    file = flow.removesuffix(":flow")
    assert failed_with(run("analyze", flow, "-o", file), rf"cannot create the folder {re.escape(file)}: .*")
    plugins.clear()
    assert failed_with(run("analyze", flow, "-o", tmp_path), r"no quantizer is installed and none was given .*")
    assert library.captured == []


# -- what is printed, and what is kept ---------------------------------------------------------------------------------


def python(*args, **options):
    return subprocess.run(
        [sys.executable, "-m", "pt2qa", *map(str, args)], check=False, stderr=subprocess.PIPE, text=True, **options
    )


class Gone(io.RawIOBase):
    """A stdout whose reader has gone."""

    def writable(self):
        return True

    def write(self, data):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_stream_that_takes_no_more_keeps_the_first_error_and_drops_the_rest():
    lasting = Lasting(Gone())
    with io.TextIOWrapper(io.BufferedWriter(lasting), write_through=True) as stream:
        assert stream.write("one") == 3
        stream.flush()
        assert stream.write("two") == 3
    assert isinstance(lasting.error, BrokenPipeError)


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_stderr_has_what_the_model_says_and_no_noise_of_libraries(debug, tmp_path):
    (tmp_path / "loud.py").write_text(
        "import logging, sys, warnings\n"
        "import torch\n"
        "x = torch.zeros(1, 2)\n"
        "def flow():\n"
        "    import torchao.quantization.pt2e\n"  # which is loud itself
        "    logging.getLogger('torchao').warning('Failed to load /a/_C.so: no such file')\n"
        "    logging.getLogger('torchao').warning('Failed to load the weights')\n"
        "    for module in ('copyreg', 'mine'):\n"
        "        text = '`isinstance(treespec, LeafSpec)` is deprecated'\n"
        "        warnings.warn_explicit(text, FutureWarning, f'{module}.py', 1, module)\n"
        "    print('[cpuinfo_utils.cpp:72] Out of memory', file=sys.stderr)\n"
        "    return torch.nn.Linear(2, 1).eval(), x, [x]\n",
        encoding="utf-8",
    )
    done = python("check", f"{tmp_path / 'loud.py'}:flow", *debug, stdout=subprocess.DEVNULL)
    assert done.returncode == 0
    mine = [
        "Failed to load the weights",
        "mine.py:1: FutureWarning: `isinstance(treespec, LeafSpec)` is deprecated",
        "[cpuinfo_utils.cpp:72] Out of memory",
    ]
    noise = ["Failed to load /a/_C.so: no such file", "copyreg.py:1: FutureWarning"]
    if debug:
        assert all(line in done.stderr for line in [*mine, *noise])
    else:
        assert done.stderr.splitlines()[:-2] == mine


def test_python_is_told_no_noise_of_libraries_either():
    code = (
        "import torch, pt2qa, logging, warnings\n"
        "model, x = torch.nn.Linear(4, 3).eval(), torch.rand(2, 4)\n"
        "pair = pt2qa.quantize(pt2qa.capture(model, x), 'x86', [x], progress=False)\n"
        "pt2qa.compare_layers(pair, [x])\n"
        "logging.getLogger('torchao').warning('Failed to load the weights')\n"
        "text = '`isinstance(treespec, LeafSpec)` is deprecated'\n"
        "warnings.warn_explicit(text, FutureWarning, 'mine.py', 1, 'mine')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        "Failed to load the weights",
        "mine.py:1: FutureWarning: `isinstance(treespec, LeafSpec)` is deprecated",
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_analyze_keeps_every_report_where_stdout_is_full(run, library, searches, flow, tmp_path, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as left:
            main.main(["analyze", flow, "-o", str(tmp_path / "r"), "--bad-cases", "1"], prog_name="pt2qa")
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    assert left.value.code == 2
    ends = ("diagnosis", "layers", "weights", "bad-cases")
    assert sorted(file.name for file in (tmp_path / "r").iterdir()) == sorted(
        f"{name}-{end}.safetensors" for name in ("x86", "xnnpack") for end in ends
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("options", [[], ["--csv", "-"], ["--csv", "rows.csv"]])
def test_a_full_stdout_is_one_line_and_exit_code_2(report, options, tmp_path):
    with open("/dev/full", "w") as full:
        done = python("show", report, *options, stdout=full, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "pt2qa: cannot write to stdout: No space left on device"
    assert "Traceback" not in done.stderr
    assert (tmp_path / "rows.csv").exists() == ("rows.csv" in options)


@pytest.mark.parametrize("command", ["show", "--help", "gate"])
def test_a_reader_that_leaves_is_no_error(command, report):
    read, write = os.pipe()
    os.close(read)
    missed = [report, "--require", "sqnr>=99"] if command == "gate" else [report]
    with os.fdopen(write, "w") as pipe:
        done = python(command, *missed, stdout=pipe)
    assert done.returncode == (1 if command == "gate" else 0)
    assert done.stderr.startswith("Next:\n") == (command != "--help")
    assert "pt2qa:" not in done.stderr


def test_what_the_encoding_of_stdout_lacks_is_escaped(report):
    done = python("show", report, stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii:strict"})
    assert done.returncode == 0
    assert "Net, quantized by xnnpack" in done.stdout


def test_ctrl_c_is_exit_code_130_and_keeps_what_was_finished(run, library, flow, tmp_path, monkeypatch):
    def interrupted(pair):
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(pt2qa), "compare_weights", interrupted)
    result = run("analyze", flow, "-o", tmp_path / "r")
    assert result.exit_code == 130
    files = [tmp_path / "r" / f"x86-{what}.safetensors" for what in ("diagnosis", "layers")]
    assert result.stderr.splitlines() == [*(f"wrote {file}" for file in files), "pt2qa: interrupted"]
    assert load(tmp_path / "r" / "x86-layers.safetensors").quantizer == "x86"


def test_a_partial_analysis_is_kept_ends_the_command_and_is_exit_code_130(run, library, flow, tmp_path, monkeypatch):
    note = Note("covers the 2 batches that were finished", "interrupted")
    monkeypatch.setitem(vars(pt2qa), "compare_layers", lambda pair, batches, mask: replace(LAYERS, notes=(note,)))
    result = run("analyze", flow, "-o", tmp_path / "r", "--no-diagnosis")
    assert result.exit_code == 130
    assert [file.name for file in (tmp_path / "r").iterdir()] == ["x86-layers.safetensors"]
    assert note in result.stdout
    assert load(tmp_path / "r" / "x86-layers.safetensors").notes == (note,)
    assert run("show", tmp_path / "r" / "x86-layers.safetensors").exit_code == 0


def test_what_failed_before_ctrl_c_is_said(run, library, flow, tmp_path, monkeypatch):
    def interrupted(pair):
        raise KeyboardInterrupt

    library.broken = ("x86",)
    monkeypatch.setitem(vars(pt2qa), "compare_weights", interrupted)
    result = run("analyze", flow, "-o", tmp_path)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-2:] == ["pt2qa: x86: nothing to quantize for x86", "pt2qa: interrupted"]


def test_an_interrupt_within_code_from_text_is_exit_code_130(tmp_path):
    # After it Python ends a process started with -m by the signal, handled or not.
    (tmp_path / "flow.py").write_text("def flow():\n    exec('raise KeyboardInterrupt')\n", encoding="utf-8")
    done = python("check", f"{tmp_path / 'flow.py'}:flow", stdout=subprocess.PIPE)
    assert done.stderr.splitlines()[-1] == "pt2qa: interrupted"
    assert done.returncode == 130


@pytest.fixture
def listening():
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("swallowed", [False, True])
def test_ctrl_c_counts_though_something_swallows_or_turns_it(run, report, monkeypatch, swallowed, listening):
    def pressed(path):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if not swallowed:
                raise ImportError("partially initialized module") from None
        return LAYERS

    monkeypatch.setattr("pt2qa.report.load", pressed)
    result = run("show", report)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "pt2qa: interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("args", [["show", "REPORT", "--csv", "REPORT"], ["diff", "REPORT", "REPORT", "-o", "REPORT"]])
@pytest.mark.parametrize("spelled", ["{0}", "{1}/./{2}", "link"])
def test_no_command_overwrites_what_it_reads(run, report, args, spelled):
    (report.parent / "link").symlink_to(report)
    other = spelled.format(report, report.parent, report.name) if spelled != "link" else report.parent / "link"
    before = report.read_bytes()
    option = args[-2]
    given = [*(str(report) if arg == "REPORT" else arg for arg in args[:-1]), other]
    message = rf"{option}: would overwrite .*, which is read here; give it another name"
    assert failed_with(run(*given), message)
    assert report.read_bytes() == before


@pytest.mark.parametrize(
    "args",
    [
        ["html", "REPORT", "-o", "REPORT"],
        ["gate", "REPORT", "--require", "sqnr>=1", "--junit", "REPORT"],
        ["gate", "new", "--baseline", "REPORT", "--max-drop", "1", "--junit", "REPORT"],
        ["check", "FLOW", "-o", "FILE"],
        ["profile", "FLOW", "-o", "FILE"],
        ["profile", "FLOW", "--csv", "FILE"],
        ["compare", "FLOW", "-o", "FILE"],
        ["record-inputs", "FLOW", "-o", "FILE"],
    ],
)
def test_every_command_with_an_output_keeps_its_inputs(run, report, flow, args):
    file = flow.removesuffix(":flow")
    known = {"REPORT": str(report), "FLOW": flow, "FILE": file}
    result = run(*(known.get(arg, arg) for arg in args))
    assert failed_with(result, r"--?\w+: would overwrite .*, which is read here; give it another name")


def test_no_file_is_written_twice(run, report, tmp_path):
    result = run("diff", report, report, "-o", tmp_path / "x", "--csv", tmp_path / "x")
    assert failed_with(result, rf"-o: would overwrite {tmp_path / 'x'}, which --csv writes; give it another name")
    assert not (tmp_path / "x").exists()
