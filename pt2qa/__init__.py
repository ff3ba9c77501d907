"""Where a PT2E-quantized model loses accuracy, why, and what to change.

The names below are the whole public interface.  They are imported on first use, so that reading a saved report
(``pt2qa show``) needs neither torch nor a quantizer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pt2qa.bad_cases import CaseMetric, find_bad_cases
    from pt2qa.compare import compare_layers, compare_weights
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
    from pt2qa.metrics import Metric
    from pt2qa.overrides.plan import Edit, OverridePlan
    from pt2qa.pairing import QuantizedPair, pair
    from pt2qa.plugins import quantizer
    from pt2qa.quant_analysis import QuantAnalysis
    from pt2qa.quantization import quantize
    from pt2qa.reconfiguration import Budget, Target, reconfigure
    from pt2qa.report import (
        BadCases,
        LayerReport,
        LayerRow,
        SensitivityReport,
        SensitivityRow,
        WeightReport,
        WeightRow,
        load,
    )
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
    # analyses
    "compare_layers": "pt2qa.compare",
    "compare_weights": "pt2qa.compare",
    "find_bad_cases": "pt2qa.bad_cases",
    "sensitivity": "pt2qa.sensitivities",
    "Metric": "pt2qa.metrics",
    "CaseMetric": "pt2qa.bad_cases",
    "reconfigure": "pt2qa.reconfiguration",
    "Target": "pt2qa.reconfiguration",
    "Budget": "pt2qa.reconfiguration",
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
    "BadCases",
    "BatchError",
    "Budget",
    "Capture",
    "CaptureError",
    "CaseMetric",
    "Edit",
    "FlowError",
    "LayerReport",
    "LayerRow",
    "Metric",
    "OverridePlan",
    "PairingError",
    "PluginError",
    "Pt2qaError",
    "QuantAnalysis",
    "QuantizeError",
    "QuantizedPair",
    "Reconfiguration",
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
    "compare_layers",
    "compare_weights",
    "find_bad_cases",
    "load",
    "pair",
    "quantize",
    "quantizer",
    "reconfigure",
    "sensitivity",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'pt2qa' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return __all__
