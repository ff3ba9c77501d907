"""An annotation is sound: shared scales resolve, observers are on float tensors, and the backend takes it."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from pt2qa._conformance.layout import place_of, some
from pt2qa._conformance.properties.property import Outcome, Property, annotated_or_skip, does_not_apply, failed, passed
from pt2qa._conformance.trial import Annotated, Trial
from pt2qa._graph.internals.nodes import VALUE
from pt2qa.overrides.broken_lines import broken_lines
from pt2qa.overrides.points import Derives, Point, Shares, is_quantized
from pt2qa.overrides.sharing import root_of


def _shared_specs(trial: Trial) -> Outcome:
    annotated = annotated_or_skip(trial)
    if isinstance(annotated, Outcome):
        return annotated
    faults = [*_broken_chains(annotated), *_shared_before_own(annotated), *_no_edges(annotated)]
    if faults:
        return failed(some(faults))
    shared = sum(isinstance(spec, Shares | Derives) for spec in annotated.annotations.specs.values())
    return passed(f"{shared} of {len(annotated.annotations.specs)} specs refer to another one, all of them to a scale")


def _broken_chains(annotated: Annotated) -> list[str]:
    specs = annotated.annotations.specs
    faults = []
    for point, spec in specs.items():
        if isinstance(spec, Derives):
            missing = [each for each in spec.points if root_of(specs, each) is None]
            faults += [
                f"{_place(annotated, point)} derives its scale from {_place(annotated, each)}, which has none"
                for each in missing
            ]
        elif root_of(specs, point) is None:
            faults.append(_chain(annotated, point))
    return faults


def _chain(annotated: Annotated, point: Point) -> str:
    specs = annotated.annotations.specs
    seen = [point]
    while isinstance(spec := specs.get(seen[-1]), Shares) and spec.point not in seen:
        seen.append(spec.point)
    text = " shares with ".join(_place(annotated, each) for each in seen)
    if isinstance(spec, Shares):
        return f"{text} shares with {_place(annotated, spec.point)}: a circle"
    return f"{text}, which is not annotated"


def _shared_before_own(annotated: Annotated) -> list[str]:
    """Groups whose first member refers to a later one: torchao creates the observer at the first, and finds no spec."""
    specs = annotated.annotations.specs
    groups: dict[Point, list[Point]] = defaultdict(list)
    for point in specs:
        if (root := root_of(specs, point)) is not None:
            groups[root].append(point)
    return [
        f"{_place(annotated, members[0])} comes first in its group, and shares with {_place(annotated, root)}, which "
        "comes later: the first member needs a spec of its own"
        for root, members in groups.items()
        if members[0] != root
    ]


def _no_edges(annotated: Annotated) -> list[str]:
    nodes = annotated.annotations.graph.nodes
    return [
        f"{_place(annotated, (source, reader))} is annotated, but {nodes[reader].name} does not read that value"
        for source, reader in annotated.annotations.specs
        if reader and source not in nodes[reader].inputs
    ]


def _float_tensors(trial: Trial) -> Outcome:
    annotated = annotated_or_skip(trial)
    if isinstance(annotated, Outcome):
        return annotated
    specs, nodes = annotated.annotations.specs, annotated.annotations.graph.nodes
    values = {node.name: node.meta.get(VALUE) for node in annotated.graph.graph.nodes}
    faults = []
    for point in specs:
        root, value = root_of(specs, point), values.get(point[0])
        if root is None or not is_quantized(specs[root], nodes[point[0]]):
            continue
        if not isinstance(value, Tensor) and not nodes[point[0]].constant:
            faults.append(f"{_place(annotated, point)} is not one tensor")
        elif isinstance(value, Tensor) and not value.is_floating_point():
            faults.append(f"{_place(annotated, point)} is {str(value.dtype).removeprefix('torch.')}")
    return failed(some(faults)) if faults else passed(f"{len(specs)} specs, all at float tensors")


def _backend_spec(trial: Trial) -> Outcome:
    spec = trial.quantizer.spec
    if spec is None:
        return does_not_apply(NO_SPEC)
    annotated = annotated_or_skip(trial)
    if isinstance(annotated, Outcome):
        return annotated
    broken = broken_lines(annotated.annotations, spec)
    if broken:
        return failed(some([f"{line.name}: {line}" for line in broken]))
    named = sum(bool(spec.rows(op.op)) for op in annotated.annotations.ops.values())
    if not named:
        return does_not_apply(f"the spec of {spec.name} has no line for any op that is annotated")
    return passed(f"{named} of {len(annotated.annotations.ops)} annotated ops have lines, and fit them")


NO_SPEC = "no spec given: pass spec=, or give the plug-in or the quantizer an attribute spec"


def _place(annotated: Annotated, point: Point) -> str:
    return place_of(annotated.annotations, point)


SHARED_SPECS = Property(
    "shared_specs", "specs that share or derive a scale lead to a spec that comes before them", _shared_specs
)
FLOAT_TENSORS = Property("float_tensors", "nothing but float tensors is observed", _float_tensors)
BACKEND_SPEC = Property(
    "backend_spec", "what is annotated is what the backend takes, line by line of its spec", _backend_spec
)
