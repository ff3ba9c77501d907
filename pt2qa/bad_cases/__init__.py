"""The samples of a data set on which the quantized model is furthest from the reference."""

from __future__ import annotations

from pt2qa.bad_cases.case_metrics import CaseMetric
from pt2qa.bad_cases.search import find_bad_cases

__all__ = ["CaseMetric", "find_bad_cases"]
