"""Where a PT2E-quantized model loses accuracy, why, and what to change.

The names below are the whole public interface.  They are imported on first use, so that reading a saved report
(``pt2qa show``) needs neither torch nor a quantizer.
"""

# No `from __future__ import annotations` here: it would be what `pt2qa.annotations` gives.
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pt2qa.bad_cases import CaseMetric, find_bad_cases
    from pt2qa.checks import check
    from pt2qa.compare import compare_layers, compare_modules, compare_quantizers, compare_weights
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
    from pt2qa.export import Capture, capture
    from pt2qa.inventory import annotations, diff_annotations
    from pt2qa.metrics import Metric
    from pt2qa.overlays import write_neighbourhood, write_overlay
    from pt2qa.overrides.plan import Edit, OverridePlan
    from pt2qa.pairing import QuantizedPair, pair
    from pt2qa.plugins import quantizer
    from pt2qa.profiling import Profiler, profile
    from pt2qa.quant_analysis import QuantAnalysis
    from pt2qa.quantization import quantize
    from pt2qa.reconfiguration import Budget, Target, reconfigure
    from pt2qa.report import (
        AnnotationDiff,
        AnnotationReport,
        BadCases,
        CandidateReport,
        Finding,
        Findings,
        GateResult,
        LayerReport,
        LayerRow,
        Profile,
        ProfileDiff,
        ProfileRow,
        ReportDiff,
        SensitivityReport,
        SensitivityRow,
        WeightReport,
        WeightRow,
        diff,
        diff_profiles,
        gate,
        load,
    )
    from pt2qa.report.events import write_tensorboard
    from pt2qa.report.html import write_html
    from pt2qa.sensitivities import sensitivity

__version__ = "0.1.0"

_MODULE_OF = {
    # from a float model to a pair
    "capture": "pt2qa.export",
    "Capture": "pt2qa.export",
    "quantizer": "pt2qa.plugins",
    "quantize": "pt2qa.quantization",
    "pair": "pt2qa.pairing",
    "QuantizedPair": "pt2qa.pairing",
    "Edit": "pt2qa.overrides.plan",
    "OverridePlan": "pt2qa.overrides.plan",
    # what a quantizer asks for
    "annotations": "pt2qa.inventory",
    "diff_annotations": "pt2qa.inventory",
    # analyses
    "compare_layers": "pt2qa.compare",
    "compare_modules": "pt2qa.compare",
    "compare_weights": "pt2qa.compare",
    "compare_quantizers": "pt2qa.compare",
    "find_bad_cases": "pt2qa.bad_cases",
    "sensitivity": "pt2qa.sensitivities",
    "Metric": "pt2qa.metrics",
    "CaseMetric": "pt2qa.bad_cases",
    "reconfigure": "pt2qa.reconfiguration",
    "Target": "pt2qa.reconfiguration",
    "Budget": "pt2qa.reconfiguration",
    "check": "pt2qa.checks",
    "profile": "pt2qa.profiling",
    "Profiler": "pt2qa.profiling",
    "diff_profiles": "pt2qa.report",
    # the whole session as one object
    "QuantAnalysis": "pt2qa.quant_analysis",
    # reports
    "load": "pt2qa.report",
    "LayerReport": "pt2qa.report",
    "LayerRow": "pt2qa.report",
    "WeightReport": "pt2qa.report",
    "WeightRow": "pt2qa.report",
    "SensitivityReport": "pt2qa.report",
    "SensitivityRow": "pt2qa.report",
    "BadCases": "pt2qa.report",
    "Reconfiguration": "pt2qa.report",
    "AnnotationReport": "pt2qa.report",
    "AnnotationDiff": "pt2qa.report",
    "Findings": "pt2qa.report",
    "CandidateReport": "pt2qa.report",
    "Finding": "pt2qa.report",
    # reports for other eyes
    "write_html": "pt2qa.report.html",
    "write_tensorboard": "pt2qa.report.events",
    "write_overlay": "pt2qa.overlays",
    "write_neighbourhood": "pt2qa.overlays",
    # an old report and a new one
    "diff": "pt2qa.report",
    "ReportDiff": "pt2qa.report",
    "gate": "pt2qa.report",
    "GateResult": "pt2qa.report",
    "Profile": "pt2qa.report",
    "ProfileDiff": "pt2qa.report",
    "ProfileRow": "pt2qa.report",
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
