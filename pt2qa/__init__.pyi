"""The public names of pt2qa, and the modules that they are imported from on first use."""

import typing

if typing.TYPE_CHECKING:  # so that mypy, which takes these last, has types for all that the modules tell each other
    # from a float model to a pair
    from ._capture.program import Capture as Capture, capture as capture, with_handles as with_handles
    from .plugins import quantizer as quantizer
    from ._quantize.quantization import quantize as quantize
    from ._quantize.pairing import QuantizedPair as QuantizedPair, pair as pair
    from .overrides.plan import Edit as Edit, OverridePlan as OverridePlan

    # what a quantizer asks for
    from ._annotations.listing import annotations as annotations
    from ._annotations.differences import diff_annotations as diff_annotations

    # analyses
    from ._layers.analysis import compare_layers as compare_layers
    from ._layers.analysis import compare_modules as compare_modules
    from ._deployed.analysis import compare_deployed as compare_deployed
    from ._runtimes.analysis import compare_runtimes as compare_runtimes
    from ._deployed.recorded import record_inputs as record_inputs
    from ._deployed.reduction import Reduction as Reduction
    from ._deployed.reduction import reduce as reduce
    from ._weights.analysis import compare_weights as compare_weights
    from ._two_graphs.analysis import compare_graphs as compare_graphs
    from ._candidates.analysis import compare_quantizers as compare_quantizers
    from ._bad_cases.search import find_bad_cases as find_bad_cases
    from ._bad_cases.case_metrics import CaseMetric as CaseMetric
    from ._sensitivity.analysis import sensitivity as sensitivity
    from ._reconfigure.analysis import reconfigure as reconfigure
    from ._reconfigure.analysis import repair as repair
    from ._trials.treatment import Budget as Budget, Target as Target
    from ._check.analysis import check as check
    from ._diagnosis.analysis import diagnose as diagnose
    from ._diagnosis.budget import error_budget as error_budget
    from ._profile.analysis import Profiler as Profiler, profile as profile
    from ._profile.diff import diff_profiles as diff_profiles

    # several processes, one result
    from ._ranks import distributed as distributed

    # the numbers
    from . import metrics as metrics
    from .metrics import sqnr as sqnr
    from ._metrics import Metric as Metric

    # the whole session as one object
    from ._quant_analysis import QuantAnalysis as QuantAnalysis

    # reports
    from .report import load as load
    from ._layers.report import LayerReport as LayerReport
    from ._weights.report import WeightReport as WeightReport
    from ._two_graphs.report import GraphReport as GraphReport
    from ._deployed.report import DeployedReport as DeployedReport
    from ._runtimes.report import RuntimeReport as RuntimeReport
    from ._diagnosis.report import Diagnosis as Diagnosis
    from ._diagnosis.budget_report import ErrorBudget as ErrorBudget
    from ._layers.rows import LayerRow as LayerRow
    from ._weights.report import WeightRow as WeightRow
    from ._candidates.report import CandidateReport as CandidateReport
    from ._bad_cases.report import BadCases as BadCases
    from ._sensitivity.report import SensitivityReport as SensitivityReport, SensitivityRow as SensitivityRow
    from ._reconfigure.report import Reconfiguration as Reconfiguration
    from ._check.report import Finding as Finding, Findings as Findings
    from ._profile.report import Profile as Profile
    from ._profile.report import ProfileRow as ProfileRow
    from ._profile.diff import ProfileDiff as ProfileDiff
    from ._annotations.report import AnnotationDiff as AnnotationDiff, AnnotationReport as AnnotationReport

    # reports of parts of the data
    from ._report.merging import merge as merge

    # reports for other eyes
    from ._report.html import write_html as write_html
    from ._report.tensorboard import write_tensorboard as write_tensorboard
    from ._overlays.overlays import write_overlay as write_overlay
    from ._overlays.overlays import write_neighbourhood as write_neighbourhood

    # an old report and a new one
    from ._report.diff import diff as diff
    from ._report.diff_report import ReportDiff as ReportDiff
    from ._report.gating.verdict import gate as gate
    from ._report.gating.result import GateResult as GateResult

    # errors
    from .errors import (
        Pt2qaError as Pt2qaError,
        CaptureError as CaptureError,
        BatchError as BatchError,
        PluginError as PluginError,
        QuantizeError as QuantizeError,
        PairingError as PairingError,
        SimulationError as SimulationError,
        DeploymentError as DeploymentError,
        RankError as RankError,
        SelectionError as SelectionError,
        ReportError as ReportError,
        FlowError as FlowError,
    )

__version__: str
__all__: list[str]
