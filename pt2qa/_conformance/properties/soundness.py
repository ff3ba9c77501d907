"""An annotation is sound: shared scales resolve, observers are on float tensors, and the backend takes it."""

from __future__ import annotations

from torch import Tensor

from pt2qa._check.context import require
from pt2qa._check.rules.specs import broken_shares
from pt2qa._conformance.layout import place_of, some
from pt2qa._conformance.properties.property import Outcome, annotated_in, failed, holds, passed
from pt2qa._conformance.trial import Trial
from pt2qa._graph.internals.nodes import VALUE
from pt2qa.overrides.broken_lines import broken_lines
from pt2qa.overrides.points import Derives, Shares
from pt2qa.overrides.sharing import rounds_at

NO_SPEC = "no spec given: pass spec=, or give the plug-in or the quantizer an attribute spec"


@holds("specs that share or derive a scale lead to a spec that comes before them")
def shared_specs(trial: Trial) -> Outcome:
    """As the check's rule ``broken-share``; and no edge is annotated that does not exist."""
    annotations = annotated_in(trial).annotations
    specs, nodes = annotations.specs, annotations.graph.nodes
    faults = [f"{found.name}: {found.why}" for found in broken_shares(annotations)]
    faults += [
        f"{place_of(annotations, (source, reader))} is annotated, but {nodes[reader].name} does not read that value"
        for source, reader in specs
        if reader and source not in nodes[reader].inputs
    ]
    if faults:
        return failed(some(faults))
    shared = sum(isinstance(spec, Shares | Derives) for spec in specs.values())
    return passed(f"{shared} of {len(specs)} specs refer to another one, all of them to a scale")


@holds("nothing but float tensors is observed")
def float_tensors(trial: Trial) -> Outcome:
    annotated = annotated_in(trial)
    annotations = annotated.annotations
    specs, nodes = annotations.specs, annotations.graph.nodes
    values = {node.name: node.meta.get(VALUE) for node in annotated.graph.graph.nodes}
    faults = []
    for point in specs:
        value = values.get(point[0])
        if not rounds_at(specs, point, nodes):
            continue
        if not isinstance(value, Tensor) and not nodes[point[0]].constant:
            faults.append(f"{place_of(annotations, point)} is not one tensor")
        elif isinstance(value, Tensor) and not value.is_floating_point():
            faults.append(f"{place_of(annotations, point)} is {str(value.dtype).removeprefix('torch.')}")
    return failed(some(faults)) if faults else passed(f"{len(specs)} specs, all at float tensors")


@holds("what is annotated is what the backend takes, line by line of its spec")
def backend_spec(trial: Trial) -> Outcome:
    spec = require(trial.quantizer.spec, NO_SPEC)
    annotations = annotated_in(trial).annotations
    if broken := broken_lines(annotations, spec):
        return failed(some([f"{line.name}: {line}" for line in broken]))
    named = sum(bool(spec.rows(op.op)) for op in annotations.ops.values())
    require(named, f"the spec of {spec.name} has no line for any op that is annotated")
    return passed(f"{named} of {len(annotations.ops)} annotated ops have lines, and fit them")
