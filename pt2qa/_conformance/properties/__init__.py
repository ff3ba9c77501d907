"""What holds for a quantizer that behaves."""

from __future__ import annotations

from pt2qa._conformance.properties.converted import calibrated, convert, edits, pairing, prepare, simulator, sqnr
from pt2qa._conformance.properties.invariance import order, re_export, reuse, saved, spelling, strict
from pt2qa._conformance.properties.property import Property
from pt2qa._conformance.properties.soundness import backend_spec, declared, float_tensors, shared_specs

PROPERTIES: dict[str, Property] = {
    each.name: each
    for each in (
        *(declared, prepare, calibrated, convert, simulator, pairing, shared_specs, float_tensors, backend_spec),
        *(spelling, strict, re_export, saved, order, reuse, edits, sqnr),
    )
}
"""By name, in the order in which they are checked."""

__all__ = ["PROPERTIES", "Property"]
