"""An annotation is sound, is what the backend takes, and is what the quantizer declares."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from pt2qa._check.context import require
from pt2qa._check.rules.specs import broken_shares
from pt2qa._conformance.properties.property import Outcome, annotated_in, failed, holds, passed
from pt2qa._conformance.trial import Annotated, Failure, Trial, place_of, some
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa.overrides.broken_lines import broken_lines
from pt2qa.overrides.points import Derives, Shares, rounds_at
from pt2qa.plugins import DoesNotApplyError, op_type

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


Pattern = tuple[str, ...]
"""Op kinds, each reading the one before: ``("conv2d", "relu")``."""

_CLASSES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "hardtanh",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.LSTM: "lstm",
    nn.GRU: "gru",
}
"""The ops that ``torch.export`` makes of classes, where the names differ."""


@holds("what the quantizer declares to annotate is annotated")
def declared(trial: Trial) -> Outcome:
    patterns = patterns_of(trial.quantizer.plugin(), trial.quantizer.build(trial.capture.module()))
    require(patterns, "the quantizer declares no patterns by declared_patterns, get_supported_operators() or its parts")
    annotated = trial.annotated
    if isinstance(annotated, Failure):
        raise DoesNotApplyError("annotate fails: see prepare")
    matches = [(pattern, chain) for pattern in patterns for chain in _matches(annotated, pattern)]
    require(matches, "the model shows none of the declared patterns")
    faults = [fault for pattern, chain in matches if (fault := _fault(annotated, pattern, chain))]
    if faults:
        return failed(some(faults))
    return passed(f"{len(matches)} places show a declared pattern, and are annotated so")


def patterns_of(*owners: Any) -> tuple[Pattern, ...]:
    """What a plug-in and its quantizer declare, as op kinds.

    ``declared_patterns`` of either, a sequence of sequences of op kinds; else torchao's
    ``get_supported_operators()``; else, for a composed quantizer, what its parts declare, or the ``partition_types()``
    of the ``pattern`` that each part matches.
    """
    found: list[Pattern] = []
    for owner in owners:
        own = getattr(owner, "declared_patterns", None)
        found += _declared_by(owner) if own is None else [tuple(map(str, pattern)) for pattern in own]
    return tuple(dict.fromkeys(found))


def _declared_by(quantizer: Any) -> Iterable[Pattern]:
    if hasattr(quantizer, "get_supported_operators"):
        for config in quantizer.get_supported_operators():
            yield from (tuple(map(_op, pattern)) for pattern in config.operators)
    if hasattr(getattr(quantizer, "pattern", None), "partition_types"):
        yield tuple(map(_op, quantizer.pattern.partition_types()))
    for part in getattr(quantizer, "quantizers", ()):
        yield from patterns_of(part)


def _op(declared: Any) -> str:
    if isinstance(declared, type):
        return _CLASSES.get(declared, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", declared.__name__).lower())
    return op_of(declared)


def _matches(annotated: Annotated, pattern: Pattern) -> list[list[Node]]:
    """Chains of ops on float tensors, each read only by the next."""
    chains = []
    for node in annotated.graph.graph.nodes:
        chain = [node]
        while len(chain) < len(pattern) and len(chain[-1].users) == 1:
            chain.append(next(iter(chain[-1].users)))
        kinds = tuple(op_type(each) if each.op == "call_function" else "" for each in chain)
        values = [each.meta.get(VALUE) for each in chain]
        if kinds == pattern and all(isinstance(value, Tensor) for value in values) and values[0].is_floating_point():
            chains.append(chain)
    return chains


def _fault(annotated: Annotated, pattern: Pattern, chain: list[Node]) -> str:
    annotations, layout = annotated.annotations, annotated.layout
    first, last = (annotations.graph.nodes[node.name].name for node in (chain[0], chain[-1]))
    places = {point: place_of(annotations, point) for point in annotations.specs}
    rounded = {point: place for point, place in places.items() if place in layout}
    text = f"{' + '.join(pattern)} is declared, but at {first}"
    if not any((reader or source) == chain[0].name for source, reader in rounded):
        return f"{text} nothing is annotated"
    pairs = [(before.name, after.name) for before, after in itertools.pairwise(chain)]
    within = [point for source, reader in pairs for point in ((source, reader), (source, "")) if point in rounded]
    return f"{text}, {rounded[within[0]]} is rounded: it is not fused with {last}" if within else ""
