"""Where a PT2E-quantized model loses accuracy, why, and what to change.

The names below are the whole public interface.  They are imported on first use, so that reading a saved report
(``pt2qa show``) needs neither torch nor a quantizer.
"""

# No `from __future__ import annotations` here: it would be what `pt2qa.annotations` gives.
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pt2qa._annotations.diff import AnnotationDiff
    from pt2qa._annotations.differences import diff_annotations
    from pt2qa._annotations.listing import annotations
    from pt2qa._annotations.report import AnnotationReport
    from pt2qa._bad_cases.case_metrics import CaseMetric
    from pt2qa._bad_cases.report import BadCases
    from pt2qa._bad_cases.search import find_bad_cases
    from pt2qa._candidates.analysis import compare_quantizers
    from pt2qa._candidates.report import CandidateReport
    from pt2qa._capture.program import Capture, capture
    from pt2qa._check.analysis import check
    from pt2qa._check.report import Finding, Findings
    from pt2qa._layers.analysis import compare_layers
    from pt2qa._layers.modules import compare_modules
    from pt2qa._layers.report import LayerReport
    from pt2qa._metrics import Metric
    from pt2qa._overlays.model_explorer import write_overlay
    from pt2qa._overlays.neighbourhood import write_neighbourhood
    from pt2qa._profile.analysis import Profiler, profile
    from pt2qa._profile.diff import ProfileDiff, diff_profiles
    from pt2qa._profile.report import Profile
    from pt2qa._profile.rows import ProfileRow
    from pt2qa._quant_analysis import QuantAnalysis
    from pt2qa._quantize.pairing import QuantizedPair, pair
    from pt2qa._quantize.quantization import quantize
    from pt2qa._reconfigure.analysis import reconfigure
    from pt2qa._reconfigure.target import Budget, Target
    from pt2qa._report.diffs.differences import diff
    from pt2qa._report.diffs.report import ReportDiff
    from pt2qa._report.events import write_tensorboard
    from pt2qa._report.gating.result import GateResult
    from pt2qa._report.gating.verdict import gate
    from pt2qa._report.html import write_html
    from pt2qa._report.rows import LayerRow, WeightRow
    from pt2qa._report.storage import load
    from pt2qa._sensitivity.analysis import sensitivity
    from pt2qa._sensitivity.report import SensitivityReport
    from pt2qa._sensitivity.rows import SensitivityRow
    from pt2qa._weights.analysis import compare_weights
    from pt2qa._weights.report import WeightReport
    from pt2qa.errors import (
        BatchError,
        CaptureError,
        FlowError,
        PairingError,
        PluginError,
        Pt2qaError,
        QuantizeError,
        ReportError,
        SelectionError,
        SimulationError,
    )
    from pt2qa.overrides.plan import Edit, OverridePlan
    from pt2qa.plugins import quantizer

__version__ = "0.1.0"

_MODULE_OF = {
    # from a float model to a pair
    "capture": "pt2qa._capture.program",
    "Capture": "pt2qa._capture.program",
    "quantizer": "pt2qa.plugins",
    "quantize": "pt2qa._quantize.quantization",
    "pair": "pt2qa._quantize.pairing",
    "QuantizedPair": "pt2qa._quantize.pairing",
    "Edit": "pt2qa.overrides.plan",
    "OverridePlan": "pt2qa.overrides.plan",
    # what a quantizer asks for
    "annotations": "pt2qa._annotations.listing",
    "diff_annotations": "pt2qa._annotations.differences",
    # analyses
    "compare_layers": "pt2qa._layers.analysis",
    "compare_modules": "pt2qa._layers.modules",
    "compare_weights": "pt2qa._weights.analysis",
    "compare_quantizers": "pt2qa._candidates.analysis",
    "find_bad_cases": "pt2qa._bad_cases.search",
    "sensitivity": "pt2qa._sensitivity.analysis",
    "Metric": "pt2qa._metrics",
    "CaseMetric": "pt2qa._bad_cases.case_metrics",
    "reconfigure": "pt2qa._reconfigure.analysis",
    "Target": "pt2qa._reconfigure.target",
    "Budget": "pt2qa._reconfigure.target",
    "check": "pt2qa._check.analysis",
    "profile": "pt2qa._profile.analysis",
    "Profiler": "pt2qa._profile.analysis",
    "diff_profiles": "pt2qa._profile.diff",
    # the whole session as one object
    "QuantAnalysis": "pt2qa._quant_analysis",
    # reports
    "load": "pt2qa._report.storage",
    "LayerReport": "pt2qa._layers.report",
    "LayerRow": "pt2qa._report.rows",
    "WeightReport": "pt2qa._weights.report",
    "WeightRow": "pt2qa._report.rows",
    "SensitivityReport": "pt2qa._sensitivity.report",
    "SensitivityRow": "pt2qa._sensitivity.rows",
    "BadCases": "pt2qa._bad_cases.report",
    "Reconfiguration": "pt2qa._reconfigure.report",
    "AnnotationReport": "pt2qa._annotations.report",
    "AnnotationDiff": "pt2qa._annotations.diff",
    "Findings": "pt2qa._check.report",
    "CandidateReport": "pt2qa._candidates.report",
    "Finding": "pt2qa._check.report",
    # reports for other eyes
    "write_html": "pt2qa._report.html",
    "write_tensorboard": "pt2qa._report.events",
    "write_overlay": "pt2qa._overlays.model_explorer",
    "write_neighbourhood": "pt2qa._overlays.neighbourhood",
    # an old report and a new one
    "diff": "pt2qa._report.diffs.differences",
    "ReportDiff": "pt2qa._report.diffs.report",
    "gate": "pt2qa._report.gating.verdict",
    "GateResult": "pt2qa._report.gating.result",
    "Profile": "pt2qa._profile.report",
    "ProfileDiff": "pt2qa._profile.diff",
    "ProfileRow": "pt2qa._profile.rows",
    # errors
    "Pt2qaError": "pt2qa.errors",
    "CaptureError": "pt2qa.errors",
    "BatchError": "pt2qa.errors",
    "PluginError": "pt2qa.errors",
    "QuantizeError": "pt2qa.errors",
    "PairingError": "pt2qa.errors",
    "SimulationError": "pt2qa.errors",
    "SelectionError": "pt2qa.errors",
    "ReportError": "pt2qa.errors",
    "FlowError": "pt2qa.errors",
}

__all__ = [
    "AnnotationDiff",
    "AnnotationReport",
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
    "annotations",
    "capture",
    "check",
    "compare_layers",
    "compare_modules",
    "compare_quantizers",
    "compare_weights",
    "diff",
    "diff_annotations",
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


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'pt2qa' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return __all__
