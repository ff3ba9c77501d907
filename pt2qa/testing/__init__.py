"""For authors of quantizers: does a quantizer behave?

:func:`check_quantizer` looks at a set of properties on small models, each of which shows one pattern, and gives a
report; :class:`QuantizerConformance` is the same as a pytest class.
"""

from __future__ import annotations

from pt2qa.report.conformance.report import ConformanceReport
from pt2qa.report.conformance.rows import ConformanceRow, ModelCoverage
from pt2qa.testing.conformance import check_quantizer
from pt2qa.testing.conformance_class import QuantizerConformance
from pt2qa.testing.model import ConformanceModel
from pt2qa.testing.models import MODELS
from pt2qa.testing.outcome import Outcome, does_not_apply, failed, passed, skipped
from pt2qa.testing.properties import PROPERTIES, Property
from pt2qa.testing.trial import Trial

__all__ = [
    # a report, or tests
    "check_quantizer",
    "QuantizerConformance",
    "ConformanceReport",
    "ConformanceRow",
    "ModelCoverage",
    # on what
    "MODELS",
    "ConformanceModel",
    # for what
    "PROPERTIES",
    "Property",
    "Trial",
    "Outcome",
    "passed",
    "failed",
    "does_not_apply",
    "skipped",
]
