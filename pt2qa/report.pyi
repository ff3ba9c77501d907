"""The public names of pt2qa.report, and the modules that they are imported from."""

import os

# reports
from ._layers.report import LayerReport as LayerReport
from ._weights.report import WeightReport as WeightReport
from ._two_graphs.report import GraphReport as GraphReport
from ._bad_cases.report import BadCases as BadCases
from ._sensitivity.report import SensitivityReport as SensitivityReport
from ._reconfigure.report import Reconfiguration as Reconfiguration
from ._check.report import Findings as Findings
from ._candidates.report import CandidateReport as CandidateReport
from ._report.diff_report import ReportDiff as ReportDiff
from ._profile.report import Profile as Profile
from ._profile.diff import ProfileDiff as ProfileDiff
from ._annotations.report import AnnotationReport as AnnotationReport, AnnotationDiff as AnnotationDiff
from ._conformance.report import ConformanceReport as ConformanceReport
from ._deployed.report import DeployedReport as DeployedReport
from ._runtimes.report import RuntimeReport as RuntimeReport
from ._diagnosis.report import Diagnosis as Diagnosis
from ._diagnosis.budget_report import ErrorBudget as ErrorBudget

# their rows
from ._layers.rows import LayerRow as LayerRow
from ._weights.report import WeightRow as WeightRow
from ._deployed.report import DeployedRow as DeployedRow, StageRow as StageRow
from ._runtimes.report import RuntimeRow as RuntimeRow, RuntimeSummary as RuntimeSummary
from ._diagnosis.report import CauseRow as CauseRow, TriedRow as TriedRow, FigureRow as FigureRow, AsideRow as AsideRow
from ._diagnosis.budget_report import BudgetRow as BudgetRow
from ._bad_cases.report import CaseRow as CaseRow, Ranking as Ranking, LabelCounts as LabelCounts
from ._bad_cases.report import StoredCase as StoredCase
from ._sensitivity.report import SensitivityRow as SensitivityRow, SensitivityPart as SensitivityPart
from ._sensitivity.report import SensitivityBatch as SensitivityBatch
from ._reconfigure.report import EditRow as EditRow, CurvePoint as CurvePoint, Stage as Stage
from ._check.report import Finding as Finding, RuleOutcome as RuleOutcome
from ._candidates.report import Candidate as Candidate, CandidateRow as CandidateRow
from ._report.diff_report import BuildRow as BuildRow, DiffRow as DiffRow, Change as Change
from ._profile.report import ProfileRow as ProfileRow, ProfileShift as ProfileShift, ProfileOnly as ProfileOnly
from ._annotations.report import AnnotationRow as AnnotationRow, ModuleCalls as ModuleCalls
from ._annotations.report import AnnotationCoverage as AnnotationCoverage, AnnotationDiffRow as AnnotationDiffRow
from ._conformance.report import ConformanceRow as ConformanceRow, ModelCoverage as ModelCoverage
from ._report.rows import Unpaired as Unpaired
from ._report.set_apart import SetApart as SetApart, InputRange as InputRange, DataHealth as DataHealth
from ._report.rows import Environment as Environment
from ._weights.report import UNQUANTIZED as UNQUANTIZED

# two of them
from ._profile.diff import diff_profiles as diff_profiles

# files
from ._report.storage import save as save

# an old report and a new one
from ._report.diff import diff as diff, history as history
from ._report.gating.verdict import gate as gate
from ._report.gating.result import GateCheck as GateCheck, GateResult as GateResult

# a new kind of report
from ._report.base import Report as Report, ModelReport as ModelReport, DataReport as DataReport
from ._report.storage import register as register
from ._report.rows import column as column, derived as derived

# files
def load(path: str | os.PathLike[str]) -> Report: ...
