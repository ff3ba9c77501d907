"""``pt2qa sensitivity``, ``pt2qa annotations`` and ``pt2qa conformance``: the Python functions from a shell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import pt2qa
from pt2qa._report.html.page import html_page
from pt2qa._sensitivity.metrics import METRICS
from pt2qa.cli import main
from pt2qa.report import AnnotationReport, ConformanceReport, Profile, SensitivityReport, load

FLOW = """
import torch
def flow():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    batches = [torch.randn(4, 8) for _ in range(2)]
    return dict(model=model, example_inputs=batches[0], batches=batches, evaluation=[torch.randn(4, 8)])
"""

QUANTIZERS = """
from torchao.quantization.pt2e.quantizer import Quantizer
class Nothing(Quantizer):
    def annotate(self, model):
        return model
    def validate(self, model):
        pass
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    Path("flow.py").write_text(FLOW, encoding="utf-8")
    Path("own_quantizers.py").write_text(QUANTIZERS, encoding="utf-8")
    return lambda *args: CliRunner().invoke(main, args, prog_name="pt2qa")


def test_sites_are_ranked_on_the_evaluation_batches(run: Any) -> None:
    options = ("--method", "exact", "--metric", "KL", "--group", "module", "-o", "s.safetensors", "--sort", "graph")
    result = run("sensitivity", "flow.py:flow", "-q", "xnnpack", *options)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("wrote s.safetensors\nNext:\npt2qa ")
    report = load("s.safetensors")
    assert isinstance(report, SensitivityReport)
    assert (report.method, report.metric, report.group, report.batches) == ("exact", "kl", "module", 1)
    assert result.stdout == report.text(sort="graph", width=120) + "\n"
    again = run("sensitivity", "flow.py:flow", "-q", "xnnpack", *options[:6], "--resume", "s.safetensors")
    assert again.exit_code == 0
    assert again.stdout == report.text(width=120) + "\n"


def test_profiles_give_the_page_histograms_of_both_sides(run: Any) -> None:
    asked = ("-q", "xnnpack", "-o", "out", "--no-diagnosis", "--profiles", "--html")
    assert run("analyze", "flow.py", *asked).exit_code == 0
    profiles = [load(f"out/xnnpack-profile-{side}.safetensors") for side in ("reference", "quantized")]
    assert [each.side for each in profiles if isinstance(each, Profile)] == ["reference", "quantized"]
    layers = load("out/xnnpack-layers.safetensors")
    charts = [each for each in layers.charts([layers, *profiles]) if each["kind"] == "histogram"]
    assert {layers.rows[each["row"]].name for each in charts} == {row.name for row in layers.rows}
    assert all([side["side"] for side in each["series"]] == ["reference", "quantized"] for each in charts)
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert page == html_page([load(f"out/xnnpack-{each}.safetensors") for each in ("layers", "weights")] + profiles)


def test_commands_measure_what_the_kernels_compute_unless_the_flow_asks_for_the_converted_graph(run: Any) -> None:
    flow = FLOW.replace("evaluation=", "as_deployed=False, evaluation=")
    asked, figures = {"": FLOW, "converted": flow}, {}
    for name, text in asked.items():
        Path("flow.py").write_text(text, encoding="utf-8")
        for command in ("sensitivity", "repair", "compare"):
            result = run(command, "flow.py:flow", "-q", "xnnpack:mode=dynamic", "-o", "report.safetensors")
            assert result.exception is None or isinstance(result.exception, SystemExit), result.output
            report: Any = load("report.safetensors")
            if command == "compare":
                figures[name] = report.candidates[0].sqnr
            else:
                assert report.quantizer == "xnnpack:mode=dynamic" + ("" if name else ", as deployed")
    assert figures[""] > figures["converted"] + 0.5
    Path("flow.py").write_text(flow.replace("as_deployed=False", "as_deployed='yes'"), encoding="utf-8")
    result = run("sensitivity", "flow.py:flow", "-q", "xnnpack")
    assert result.exit_code == 2
    assert "as_deployed: got str, expected True or False" in result.stderr


def test_what_follows_a_repair_depends_on_whether_it_helps(run: Any) -> None:
    loud = "    model[0].weight.data[0] *= 100; model[2].weight.data[:, 0] /= 100\n"
    Path("loud.py").write_text(FLOW.replace("    batches =", f"{loud}    batches ="), encoding="utf-8")
    following = {}
    for flow in ("loud.py:flow", "flow.py:flow"):
        result = run("repair", flow, "-q", "xnnpack", "--method", "equalization")
        following[flow] = result.exit_code, result.stderr[result.stderr.index("Next:") :].splitlines()
    assert following == {
        "loud.py:flow": (0, ["Next:", "pt2qa repair loud.py:flow -q xnnpack --plan plan.json"]),
        "flow.py:flow": (1, ["Next:", "pt2qa analyze flow.py:flow -q xnnpack -o reports"]),
    }


def test_every_metric_of_sensitivity_is_offered() -> None:
    (option,) = [each for each in main.commands["sensitivity"].params if each.name == "metric"]
    assert tuple(option.type.choices) == METRICS


def test_an_analysis_goes_on_from_its_own_kind_of_report_alone(run: Any) -> None:
    run("annotations", "flow.py:flow", "-q", "xnnpack", "-o", "a.safetensors")
    result = run("sensitivity", "flow.py:flow", "-q", "xnnpack", "--resume", "a.safetensors")
    assert result.exit_code == 2
    assert "--resume goes on from a sensitivity report; it holds AnnotationReport" in result.stderr


@pytest.mark.parametrize(
    ("options", "basis"), [((), "annotated"), (("--calibrate",), "annotated and converted"), (("--qat",), "annotated")]
)
def test_annotations_are_listed_before_and_after_calibration(run: Any, options: tuple[str, ...], basis: str) -> None:
    result = run("annotations", "flow.py:flow", "-q", "xnnpack", *options, "-o", "a.safetensors")
    assert result.exit_code == 0, result.output
    report = load("a.safetensors")
    assert isinstance(report, AnnotationReport)
    assert report.basis == basis
    assert result.stdout == report.text(width=120) + "\n"


def test_annotations_are_those_of_a_plan(run: Any) -> None:
    pt2qa.OverridePlan((pt2qa.Edit("float", ("0/linear",)),)).save("plan.json")
    result = run("annotations", "flow.py:flow", "-q", "xnnpack", "--overrides", "plan.json", "--csv", "-")
    assert result.exit_code == 0, result.output
    weights = [line for line in result.stdout.splitlines() if "weight" in line]
    assert ["float32" in weights[0], "int8" in weights[1]] == [True, True]


def test_training_needs_more_than_calibration(run: Any) -> None:
    result = run("annotations", "flow.py:flow", "-q", "xnnpack", "--qat", "--calibrate")
    assert result.exit_code == 2
    assert "--calibrate quantizes without training: leave out --qat" in result.stderr


def test_a_quantizer_that_behaves_is_exit_code_0(run: Any) -> None:
    options = ("--models", "linear, conv_relu", "--properties", "prepare,convert", "-o", "c.safetensors")
    result = run("conformance", "xnnpack:per_channel=false", *options)
    assert result.exit_code == 0, result.output
    report = load("c.safetensors")
    assert isinstance(report, ConformanceReport)
    assert {row.model for row in report.rows} == {"linear", "conv_relu"}
    assert report.quantizer == "xnnpack:per_channel=false"


@pytest.mark.parametrize("spec", ["xnnpack", "pt2qa_xnnpack.spec:SPEC"])
def test_a_quantizer_is_held_against_the_spec_that_is_named(run: Any, spec: str) -> None:
    result = run("conformance", "x86", "--models", "linear", "--properties", "backend_spec", "--spec", spec)
    assert result.exit_code == 1, result.output
    assert 'the spec of XNNPACK says "linear (static): input int8' in " ".join(result.stdout.split())


def test_what_states_no_spec_is_an_error(run: Any) -> None:
    result = run("conformance", "x86", "--models", "linear", "--spec", "own_quantizers:Nothing")
    assert result.exit_code == 2
    assert "--spec: own_quantizers:Nothing does not state what its backend takes; x86, xnnpack do" in result.stderr


def test_a_quantizer_of_your_own_that_shows_nothing_is_exit_code_1(run: Any) -> None:
    result = run("conformance", "own_quantizers:Nothing", "--models", "linear", "--properties", "prepare")
    assert result.exit_code == 1
    assert "Shows nothing" in result.stdout


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("own_quantizers:Nothin", "pt2qa: own_quantizers has no 'Nothin'; it has Nothing"),
        ("no_such_module:Nothing", "no_such_module:Nothing: cannot import 'no_such_module': ModuleNotFoundError: "),
        ("xnnpak", "no quantizer is named 'xnnpak'; did you mean 'xnnpack'?"),
        ("xnnpack:per_chanel=false", "did you mean 'per_channel'?"),
    ],
)
def test_a_quantizer_that_cannot_be_found_is_named(run: Any, spec: str, message: str) -> None:
    result = run("conformance", spec, "--models", "linear")
    assert result.exit_code == 2
    assert message in result.stderr
