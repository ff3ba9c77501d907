"""The structure check: what will go wrong when a model is quantized, and how to mend it."""

from __future__ import annotations

from pt2qa.checks.analysis import check
from pt2qa.checks.rules import RULES
from pt2qa.checks.subject import Subject, UnavailableError

__all__ = ["RULES", "Subject", "UnavailableError", "check"]
