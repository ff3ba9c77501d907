"""Reports: what an analysis found, as frozen facts that print, save and load.  Free of torch.

Rows and reports are in :mod:`pt2qa.report.rows` and :mod:`pt2qa.report.model`; files in :mod:`pt2qa.report.storage`.
"""

from __future__ import annotations

from pt2qa.report.bad_cases import BadCases, CaseRow, LabelCounts, Ranking, StoredCase
from pt2qa.report.base import Report
from pt2qa.report.model import LayerReport, WeightReport
from pt2qa.report.reconfiguration import CurvePoint, EditRow, Reconfiguration, Stage
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
    "Unpaired",
    "Environment",
    "UNQUANTIZED",
    # files
    "load",
    "save",
    # a new kind of report
    "Report",
    "register",
]
