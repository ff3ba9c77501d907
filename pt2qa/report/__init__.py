"""Reports: what an analysis found, as frozen facts that print, save and load.  Free of torch.

Rows and reports are in :mod:`pt2qa.report.rows` and :mod:`pt2qa.report.model`; files in :mod:`pt2qa.report.storage`.
"""

from __future__ import annotations

from pt2qa.report.annotation_diff import AnnotationDiff
from pt2qa.report.annotation_report import AnnotationReport
from pt2qa.report.annotation_rows import AnnotationCoverage, AnnotationDiffRow, AnnotationRow, ModuleCalls
from pt2qa.report.bad_cases import BadCases, CaseRow, LabelCounts, Ranking, StoredCase
from pt2qa.report.base import Report
from pt2qa.report.candidates import Candidate, CandidateReport, CandidateRow
from pt2qa.report.conformance import ConformanceReport
from pt2qa.report.conformance_rows import ConformanceRow, ModelCoverage
from pt2qa.report.differences import diff
from pt2qa.report.findings import Finding, Findings, RuleOutcome
from pt2qa.report.gate_result import GateCheck, GateResult
from pt2qa.report.gating import gate
from pt2qa.report.model import LayerReport, WeightReport
from pt2qa.report.profile_diff import ProfileDiff, diff_profiles
from pt2qa.report.profile_report import Profile
from pt2qa.report.profile_rows import ProfileOnly, ProfileRow, ProfileShift
from pt2qa.report.reconfiguration import CurvePoint, EditRow, Reconfiguration, Stage
from pt2qa.report.report_diff import Change, DiffRow, ReportDiff
from pt2qa.report.rows import UNQUANTIZED, Environment, LayerRow, Unpaired, WeightRow
from pt2qa.report.sensitivity_report import SensitivityReport
from pt2qa.report.sensitivity_rows import SensitivityBatch, SensitivityPart, SensitivityRow
from pt2qa.report.storage import load, register, save

__all__ = [
    # reports
    "LayerReport",
    "WeightReport",
    "BadCases",
    "SensitivityReport",
    "Reconfiguration",
    "Findings",
    "CandidateReport",
    "ReportDiff",
    "Profile",
    "ProfileDiff",
    "AnnotationReport",
    "AnnotationDiff",
    "ConformanceReport",
    # their rows
    "LayerRow",
    "WeightRow",
    "CaseRow",
    "Ranking",
    "LabelCounts",
    "StoredCase",
    "SensitivityRow",
    "SensitivityPart",
    "SensitivityBatch",
    "EditRow",
    "CurvePoint",
    "Stage",
    "Finding",
    "RuleOutcome",
    "Candidate",
    "CandidateRow",
    "DiffRow",
    "Change",
    "ProfileRow",
    "ProfileShift",
    "ProfileOnly",
    "AnnotationRow",
    "ModuleCalls",
    "AnnotationCoverage",
    "AnnotationDiffRow",
    "ConformanceRow",
    "ModelCoverage",
    "Unpaired",
    "Environment",
    "UNQUANTIZED",
    # two of them
    "diff_profiles",
    # files
    "load",
    "save",
    # an old report and a new one
    "diff",
    "gate",
    "GateCheck",
    "GateResult",
    # a new kind of report
    "Report",
    "register",
]
