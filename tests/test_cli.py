"""The command line: each command's output, and every expected error as one line on stderr with exit code 2."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from math import nan
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from click.testing import CliRunner

import pt2qa
from pt2qa.cli import main
from pt2qa.errors import PluginError, QuantizeError
from pt2qa.report import Environment, LayerReport, LayerRow, WeightReport, load
from pt2qa.report.columns import columns_of

HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")
VALUES = {"int": 1, "float": 0.5, "text": "dq", "shape": (2, 3)}
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
WEIGHTS = WeightReport((), (), (), "xnnpack", "Net", HERE)


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


@pytest.mark.parametrize("command", [[], ["show"], ["quantizers"], ["analyze"]])
def test_help_teaches_with_an_example(run, command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "    pt2qa " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_no_command_shows_the_help(run):
    result = run()
    assert result.exit_code == 2
    assert "pt2qa analyze flow.py:flow" in result.output


def test_the_flow_file_of_the_help_is_a_flow(run, tmp_path, monkeypatch):
    from pt2qa.flow import load_flow

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


def test_show_writes_csv(run, report, tmp_path):
    result = run("show", report, "--csv", tmp_path / "layers.csv")
    assert result.stdout == LAYERS.text(width=100) + "\n"
    assert result.stderr == f"wrote {tmp_path / 'layers.csv'}\n"
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
        (["show", __file__], r".*test_cli\.py: damaged, or not a report file: .*"),
        (["shw"], r"No such command 'shw'.* \(see pt2qa --help\)"),
        (["--frob"], r"No such option '?--frob'?.* \(see pt2qa --help\)"),
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


def test_show_needs_no_torch(report):
    code = (
        "import sys; from pt2qa.cli import main\n"
        "main(['show', sys.argv[1]], standalone_mode=False)\n"
        "print(*{'torch', 'torchao', 'executorch', 'pandas'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(report)], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
    assert "Net, quantized by xnnpack" in done.stdout


@dataclass(frozen=True)
class Plugin:
    name: ClassVar[str] = "xnnpack"
    summary: ClassVar[str] = "int8 for XNNPACK, the kernels that ExecuTorch runs on Arm and x86 processors"
    per_channel: bool = True
    mode: str = "static"
    module: str | None = None


@dataclass(frozen=True)
class Bare:
    name: ClassVar[str] = "x86"
    summary: ClassVar[str] = "int8 for x86"


@pytest.fixture
def plugins(monkeypatch):
    """Stand-ins for the installed plug-ins."""
    module = ModuleType("pt2qa.plugins")
    found = {"xnnpack": Plugin(), "x86": Bare()}

    def resolve(spec):
        if spec.split(":")[0] not in found:
            raise PluginError(f"no quantizer {spec!r};\nexpected one of {', '.join(found)}")
        return found[spec.split(":")[0]]

    module.available = lambda: found
    module.resolve = resolve
    monkeypatch.setitem(sys.modules, "pt2qa.plugins", module)
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


def test_quantizers_says_when_there_is_none(run, plugins):
    plugins.clear()
    result = run("quantizers")
    assert result.exit_code == 0
    assert result.stdout == "no quantizer is installed: no package has an entry point in the group pt2qa.quantizers\n"


@pytest.fixture
def library(monkeypatch, plugins):
    """Stand-ins for the functions that analyze calls; they write down what they were given."""
    calls = SimpleNamespace(captured=[], quantized=[], broken=())

    def capture(model, args, kwargs=None, *, dynamic_shapes=None, strict=False):
        calls.captured.append((args, kwargs, dynamic_shapes))
        return "capture"

    def quantize(capture, spec, batches):
        if spec in calls.broken:
            raise QuantizeError(f"nothing to quantize for {spec}")
        calls.quantized.append((capture, spec, len(batches)))
        return spec

    fakes = {
        "capture": capture,
        "quantize": quantize,
        "compare_layers": lambda pair, batches: replace(LAYERS, quantizer=pair),
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
        "def flow(): return torch.nn.Linear(2, 3), {'input': x}, [{'input': x}] * 3\n"
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
    files = [f"{name}-{what}.safetensors" for name in ("x86", "xnnpack") for what in ("layers", "weights")]
    assert sorted(file.name for file in folder.iterdir()) == files
    assert result.stderr.splitlines() == [f"wrote {folder / file}" for file in files]
    assert load(folder / "x86-layers.safetensors").quantizer == "x86"
    assert "Net, quantized by xnnpack: 25 layers" in result.stdout


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


def test_analyze_refuses_before_it_captures(run, library, flow, plugins, tmp_path):
    message = r"no quantizer 'tpu'; expected one of xnnpack, x86"
    assert failed_with(run("analyze", flow, "-q", "x86", "-q", "tpu", "-o", tmp_path), message)
    assert failed_with(run("analyze", "gone.py:flow", "-o", tmp_path), r"gone\.py: no such file; .*")
    once = flow.replace(":flow", ":once")
    assert failed_with(
        run("analyze", once, "-o", tmp_path), r".*which can be gone through only once, .*; return a list.*"
    )
    file = flow.removesuffix(":flow")
    assert failed_with(run("analyze", flow, "-o", file), rf"cannot create the folder {re.escape(file)}: .*")
    plugins.clear()
    assert failed_with(run("analyze", flow, "-o", tmp_path), r"no quantizer is installed and none was given .*")
    assert library.captured == []
