"""The front door: its names, and that it opens without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mypy.api
import pytest

import pt2qa

ROOT = Path(__file__).parent.parent

NAMES = [
    "AnnotationDiff",
    "AnnotationReport",
    "annotations",
    "diff_annotations",
    "BadCases",
    "BatchError",
    "Budget",
    "CandidateReport",
    "Capture",
    "CaptureError",
    "CaseMetric",
    "Edit",
    "Diagnosis",
    "ErrorBudget",
    "Finding",
    "Findings",
    "FlowError",
    "GateResult",
    "GraphReport",
    "LayerReport",
    "LayerRow",
    "Metric",
    "OverridePlan",
    "PairingError",
    "PluginError",
    "Profile",
    "ProfileDiff",
    "ProfileRow",
    "Profiler",
    "Pt2qaError",
    "QuantAnalysis",
    "QuantizeError",
    "RankError",
    "QuantizedPair",
    "Reconfiguration",
    "Reduction",
    "ReportDiff",
    "ReportError",
    "SelectionError",
    "SensitivityReport",
    "SensitivityRow",
    "SimulationError",
    "DeploymentError",
    "DeployedReport",
    "RuntimeReport",
    "Target",
    "WeightReport",
    "WeightRow",
    "__version__",
    "capture",
    "check",
    "compare_deployed",
    "compare_graphs",
    "compare_layers",
    "compare_modules",
    "compare_quantizers",
    "compare_runtimes",
    "compare_weights",
    "diff",
    "diagnose",
    "diff_profiles",
    "distributed",
    "error_budget",
    "find_bad_cases",
    "gate",
    "load",
    "merge",
    "metrics",
    "pair",
    "profile",
    "quantize",
    "quantizer",
    "reconfigure",
    "record_inputs",
    "reduce",
    "repair",
    "sensitivity",
    "sqnr",
    "with_handles",
    "write_html",
    "write_neighbourhood",
    "write_overlay",
    "write_tensorboard",
]


def test_the_public_names_are_these() -> None:
    assert sorted(pt2qa.__all__) == sorted(NAMES)
    assert dir(pt2qa) == pt2qa.__all__


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented_and_there(name: str) -> None:
    value = getattr(pt2qa, name)
    assert name == "__version__" or value.__doc__
    assert isinstance(value, type(sys)) == (name == "metrics")


def test_functions_stay_functions_whatever_was_imported_first() -> None:
    """A submodule of the same name as a function would take its place."""
    code = "import pt2qa; pt2qa.quantize; pt2qa.compare_layers; assert callable(pt2qa.capture) and callable(pt2qa.pair)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"module 'pt2qa' has no attribute 'sqnr_of_all'; it has .*compare_layers"):
        pt2qa.sqnr_of_all  # noqa: B018


def test_importing_pt2qa_imports_no_torch() -> None:
    code = "import sys, pt2qa; pt2qa.load; assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_know_the_names_and_report_a_typo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script = tmp_path / "script.py"
    script.write_text("import pt2qa\npt2qa.compare_layer\nreveal_type(pt2qa.Reconfiguration)\n")
    # The front door and one of the modules behind it, without torch, which takes minutes.
    options = ["--config-file=", "--follow-imports=skip", "--explicit-package-bases", f"--cache-dir={tmp_path}"]
    said, _, _ = mypy.api.run([*options, "pt2qa/__init__.pyi", "pt2qa/_reconfigure/report.py", str(script)])
    about = [line.partition(": ")[2] for line in said.splitlines() if "script.py" in line]
    assert about[0].startswith('error: Module has no attribute "compare_layer"'), said
    assert "note: Revealed type is" in about[1], said
    assert "pt2qa._reconfigure.report.Reconfiguration" in about[1], said
