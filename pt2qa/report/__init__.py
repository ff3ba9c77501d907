"""Reports: what an analysis found, as frozen facts that print, save and load.  Free of torch.

A folder holds one kind of report: its rows, its class, its text.  What all share lies beside them: files
(:mod:`pt2qa.report.storage`), columns, tables, formats.
"""

from __future__ import annotations

from pt2qa.report.bad_cases.report import BadCases, CaseRow, LabelCounts, Ranking, StoredCase
from pt2qa.report.base import Report
from pt2qa.report.candidates.report import Candidate, CandidateReport, CandidateRow
from pt2qa.report.conformance.report import ConformanceReport
from pt2qa.report.conformance.rows import ConformanceRow, ModelCoverage
from pt2qa.report.diffs.differences import diff
from pt2qa.report.diffs.report import Change, DiffRow, ReportDiff
from pt2qa.report.findings.report import Finding, Findings, RuleOutcome
from pt2qa.report.gating.result import GateCheck, GateResult
from pt2qa.report.gating.verdict import gate
from pt2qa.report.inventory.diff import AnnotationDiff
from pt2qa.report.inventory.report import AnnotationReport
from pt2qa.report.inventory.rows import AnnotationCoverage, AnnotationDiffRow, AnnotationRow, ModuleCalls
from pt2qa.report.layers.report import LayerReport, WeightReport
from pt2qa.report.profiles.diff import ProfileDiff, diff_profiles
from pt2qa.report.profiles.report import Profile
from pt2qa.report.profiles.rows import ProfileOnly, ProfileRow, ProfileShift
from pt2qa.report.reconfiguration import CurvePoint, EditRow, Reconfiguration, Stage
from pt2qa.report.rows import UNQUANTIZED, Environment, LayerRow, Unpaired, WeightRow
from pt2qa.report.sensitivities.report import SensitivityReport
from pt2qa.report.sensitivities.rows import SensitivityBatch, SensitivityPart, SensitivityRow
from pt2qa.report.set_apart import SetApart
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
    "SetApart",
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
