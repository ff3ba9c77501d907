"""For authors of quantizers: checks whether a quantizer behaves.

:func:`check_quantizer` checks a set of properties on small models, each with one pattern, and returns a report;
:class:`QuantizerConformance` does the same as a pytest class.
"""

from __future__ import annotations

from pt2qa._conformance.conformance import QuantizerConformance, check_quantizer
from pt2qa._conformance.models import MODELS
from pt2qa._conformance.nets import ConformanceModel
from pt2qa._conformance.properties import PROPERTIES, Property
from pt2qa._conformance.properties.property import Outcome, does_not_apply, failed, passed, skipped
from pt2qa._conformance.report import ConformanceReport, ConformanceRow, ModelCoverage
from pt2qa._conformance.trial import Trial

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
