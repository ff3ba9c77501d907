"""What holds for a quantizer that behaves: one or two properties per file."""

from __future__ import annotations

from pt2qa._conformance.properties.declared import DECLARED
from pt2qa._conformance.properties.edits import EDITS
from pt2qa._conformance.properties.flow import CALIBRATED, CONVERT, PAIRING, PREPARE, SIMULATOR
from pt2qa._conformance.properties.invariance import RE_EXPORT, SAVED, SPELLING, STRICT
from pt2qa._conformance.properties.noise import SQNR
from pt2qa._conformance.properties.property import Property
from pt2qa._conformance.properties.repetition import ORDER, REUSE
from pt2qa._conformance.properties.soundness import BACKEND_SPEC, FLOAT_TENSORS, SHARED_SPECS

PROPERTIES: dict[str, Property] = {
    each.name: each
    for each in (
        *(DECLARED, PREPARE, CALIBRATED, CONVERT, SIMULATOR, PAIRING),
        *(SHARED_SPECS, FLOAT_TENSORS, BACKEND_SPEC),
        *(SPELLING, STRICT, RE_EXPORT, SAVED, ORDER, REUSE),
        *(EDITS, SQNR),
    )
}
"""By name, in the order in which they are checked."""

__all__ = ["PROPERTIES", "Property"]
