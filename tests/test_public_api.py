"""The front door: its names, and that it opens without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pt2qa

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
    "Finding",
    "Findings",
    "FlowError",
    "GateResult",
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
    "QuantizedPair",
    "Reconfiguration",
    "ReportDiff",
    "ReportError",
    "SelectionError",
    "SensitivityReport",
    "SensitivityRow",
    "SimulationError",
    "Target",
    "WeightReport",
    "WeightRow",
    "__version__",
    "capture",
    "check",
    "compare_layers",
    "compare_modules",
    "compare_quantizers",
    "compare_weights",
    "diff",
    "diff_profiles",
    "find_bad_cases",
    "gate",
    "load",
    "pair",
    "profile",
    "quantize",
    "quantizer",
    "reconfigure",
    "sensitivity",
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
    assert name == "__version__" or (value.__doc__ and not isinstance(value, type(sys)))


def test_functions_stay_functions_whatever_was_imported_first() -> None:
    """A submodule of the same name as a function would take its place."""
    code = "import pt2qa; pt2qa.quantize; pt2qa.compare_layers; assert callable(pt2qa.capture) and callable(pt2qa.pair)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        AttributeError, match=r"module 'pt2qa' has no attribute 'compare_layer'; it has .*compare_layers"
    ):
        pt2qa.compare_layer  # noqa: B018


def test_importing_pt2qa_imports_no_torch() -> None:
    code = "import sys, pt2qa; pt2qa.load; assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
