"""The public names of pt2qa.testing, and the modules that they are imported from on first use."""

# a report, or tests
from ._conformance.conformance import check_quantizer as check_quantizer, QuantizerConformance as QuantizerConformance
from ._conformance.report import ConformanceReport as ConformanceReport, ConformanceRow as ConformanceRow
from ._conformance.report import ModelCoverage as ModelCoverage

# on what
from ._conformance.models import MODELS as MODELS
from ._conformance.nets import ConformanceModel as ConformanceModel

# for what
from ._conformance.properties import PROPERTIES as PROPERTIES, Property as Property
from ._conformance.trial import Trial as Trial
from ._conformance.properties.property import Outcome as Outcome, passed as passed, failed as failed
from ._conformance.properties.property import does_not_apply as does_not_apply, skipped as skipped
