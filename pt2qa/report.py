"""Reports: what an analysis found, as frozen facts that can be printed, saved and loaded.  Free of torch.

Each kind of report is defined next to its analysis, such as ``pt2qa._layers.report``.  What all kinds share is in
``pt2qa._report``: files, columns, tables, formats.
"""

from __future__ import annotations

import os

from pt2qa._annotations.report import (
    AnnotationCoverage,
    AnnotationDiff,
    AnnotationDiffRow,
    AnnotationReport,
    AnnotationRow,
    ModuleCalls,
)
from pt2qa._bad_cases.report import BadCases
from pt2qa._bad_cases.rows import CaseRow, LabelCounts, Ranking, StoredCase
from pt2qa._candidates.report import Candidate, CandidateReport, CandidateRow
from pt2qa._check.report import Finding, Findings, RuleOutcome
from pt2qa._conformance.report import ConformanceReport, ConformanceRow, ModelCoverage
from pt2qa._deployed.report import DeployedReport, DeployedRow, StageRow
from pt2qa._diagnosis.budget_report import BudgetRow, ErrorBudget
from pt2qa._diagnosis.report import AsideRow, CauseRow, Diagnosis, FigureRow, TriedRow
from pt2qa._layers.report import LayerReport
from pt2qa._layers.rows import LayerRow
from pt2qa._profile.diff import ProfileDiff, diff_profiles
from pt2qa._profile.report import Profile
from pt2qa._profile.rows import ProfileOnly, ProfileRow, ProfileShift
from pt2qa._reconfigure.report import CurvePoint, EditRow, Reconfiguration, Stage
from pt2qa._report.base import DataReport, ModelReport, Report
from pt2qa._report.diff import diff, history
from pt2qa._report.diff_report import BuildRow, Change, DiffRow, ReportDiff
from pt2qa._report.gating.result import GateCheck, GateResult
from pt2qa._report.gating.verdict import gate
from pt2qa._report.rows import Environment, Unpaired, column, derived
from pt2qa._report.set_apart import DataHealth, InputRange, SetApart
from pt2qa._report.storage import read, register, save
from pt2qa._runtimes.report import RuntimeReport, RuntimeRow, RuntimeSummary
from pt2qa._sensitivity.report import SensitivityBatch, SensitivityPart, SensitivityReport, SensitivityRow
from pt2qa._two_graphs.report import GraphReport
from pt2qa._weights.report import UNQUANTIZED, WeightReport, WeightRow

__all__ = [
    # reports
    "LayerReport",
    "WeightReport",
    "GraphReport",
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
    "DeployedReport",
    "RuntimeReport",
    "Diagnosis",
    "ErrorBudget",
    # their rows
    "LayerRow",
    "WeightRow",
    "DeployedRow",
    "StageRow",
    "RuntimeRow",
    "RuntimeSummary",
    "CauseRow",
    "TriedRow",
    "FigureRow",
    "AsideRow",
    "BudgetRow",
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
    "BuildRow",
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
    "InputRange",
    "DataHealth",
    "Environment",
    "UNQUANTIZED",
    # two of them
    "diff_profiles",
    # files
    "load",
    "save",
    # an old report and a new one
    "diff",
    "history",
    "gate",
    "GateCheck",
    "GateResult",
    # a new kind of report
    "Report",
    "ModelReport",
    "DataReport",
    "register",
    "column",
    "derived",
]


def load(path: str | os.PathLike[str]) -> Report:
    """Read a report of whatever kind the file holds.

    Args:
        path: a file that ``report.save`` or a command wrote.

    Returns:
        The report, of the class that was saved.

    Raises:
        ReportError: there is no such file, it is not a report, it is damaged, or a newer pt2qa wrote it.  The text
            names the file and the field.

    >>> load("no-such-report.safetensors")
    Traceback (most recent call last):
    pt2qa.errors.ReportError: no-such-report.safetensors: no such file; give a file that report.save() wrote
    """
    report: Report = read(path)
    return report
