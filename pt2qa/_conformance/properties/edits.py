"""Override plans have the stated effect on the quantizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pt2qa._conformance.layout import some
from pt2qa._conformance.properties.flow import pair_or_skip
from pt2qa._conformance.properties.property import Outcome, Property, failed, passed
from pt2qa._conformance.trial import Annotated, Failure, Trial
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.program import Site
from pt2qa.errors import QuantizeError
from pt2qa.overrides import Annotations, Edit

MOST = 4
"""Number of ops per model to leave in float, one at a time: each costs one more quantization of the model."""

Places = Counter[tuple[str, str]]


def _edits(trial: Trial) -> Outcome:
    pair = pair_or_skip(trial)
    if not isinstance(pair, QuantizedPair):
        return pair
    assert isinstance(trial.annotated, Annotated)
    annotations = trial.annotated.annotations
    ops = [op.name for op in annotations.ops.values() if "float" in op.levels]
    tried = ops[:: -(-len(ops) // MOST)] if ops else []
    faults = [fault for op in tried if (fault := _leave_in_float(trial, pair, annotations, op))]
    if faults:
        return failed(some(faults))
    return passed(f"{len(tried)} of {len(ops)} ops, each left in float by itself: its own sites went, and no others")


def _leave_in_float(trial: Trial, pair: QuantizedPair, annotations: Annotations, op: str) -> str:
    """What is wrong after an op was left in float; empty if nothing is."""
    edit = Edit("float", (op,))
    try:
        edited = annotations.with_edits([edit])
    except QuantizeError as error:
        return str(error)
    expected = _places(pair.sites[index] for index in edited.sites_on(pair.sites))
    if not expected:
        return ""
    after = trial.quantize(edit)
    if isinstance(after, Failure):
        return f"{edit}: {after.why}"
    found = _places(after.sites)
    wrong = [f"{_listed(found - expected)} quantized"] if found - expected else []
    wrong += [f"{_listed(expected - found)} in float"] if expected - found else []
    return f"{edit}: unexpectedly {' and '.join(wrong)}" if wrong else ""


def _places(sites: Iterable[Site]) -> Places:
    return Counter((site.kind, site.name) for site in sites)


def _listed(places: Places) -> str:
    return ", ".join(f"{kind} of {name}" for kind, name in places)


EDITS = Property("edits", "leaving one op in float changes the sites around that op, and no others", _edits)
