"""A pair with other numbers in its graph, where quantizing again would give the same ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Node

from pt2qa._graph.copies import copy_nodes
from pt2qa._quantize.late_edits import can_add_to_biases, give_biases, make_late_edits
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._quantize.quantization import override_notes
from pt2qa._report.notes import notes_without
from pt2qa.overrides import OverridePlan
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.sharing import root_of
from pt2qa.plugins import describe


def with_numbers(pair: QuantizedPair, overrides: OverridePlan) -> QuantizedPair | None:
    """What :func:`pt2qa.quantize` makes of ``overrides`` on the same calibration data, without doing so.

    Only where they add ``range`` and ``bias`` edits to those of the pair: neither changes an op, what an observer sees,
    or the weights.  The pair's graph is taken with other scales, zero points and biases, and shares everything else.
    None for other edits, where a bias is quantized, whose scale would follow, and for trained pairs.
    """
    recipe = pair.recipe
    if recipe is None or recipe.qat or any(site.kind == "bias" for site in pair.sites):
        return None
    known, added = overrides.edits[: len(recipe.edits)], overrides.edits[len(recipe.edits) :]
    if known != recipe.edits or not {edit.kind for edit in added} <= {"bias", "range"}:
        return None
    annotations = recipe.annotations.with_edits(added)
    ranges = _ranges(pair, recipe.annotations, annotations)
    reference, quantized = map(copy_nodes, (pair.reference, pair.quantized))
    biases = [edit for edit in added if edit.kind == "bias"]
    if ranges is None or not can_add_to_biases(quantized, biases, pair.names):
        return None
    copies = dict(zip(pair.quantized.graph.nodes, quantized.graph.nodes, strict=True))
    _set_ranges(pair, copies, ranges)
    quantized.recompile()
    for graph in (reference, quantized):
        give_biases(graph, biases, pair.names)
    make_late_edits(quantized, biases, pair.names)
    name = describe(recipe.plugin)
    return replace(
        pair,
        reference=reference,
        quantized=quantized,
        notes=(*notes_without("overrides", pair.notes), *override_notes(overrides, name, pair.model)),
        recipe=replace(recipe, annotations=annotations, edits=overrides.edits),
    )


def _ranges(pair: QuantizedPair, before: Annotations, after: Annotations) -> dict[int, tuple[float, int]] | None:
    """Scale and zero point by site, of those whose spec is another; None where a site would not have just these."""
    changed = {point for point, spec in after.specs.items() if spec is not before.specs[point]}
    found = {}
    for index, points in before.points_at(pair.sites).items():
        roots = {root for point in points if (root := root_of(after.specs, point)) is not None}
        if changed.isdisjoint(roots):
            continue
        site, specs = pair.sites[index], [after.specs[root] for root in changed.intersection(roots)]
        wanted = {(float(spec.scale), int(spec.zero_point)) for spec in specs}
        if len(specs) != len(roots) or len(wanted) != 1:
            return None
        if site.kind != "activation" or not isinstance(site.params.scale, float):
            return None
        [found[index]] = wanted
    return found


def _set_ranges(pair: QuantizedPair, copies: Mapping[Node, Node], ranges: Mapping[int, tuple[float, int]]) -> None:
    by_name = {node.name: copies[node] for node in pair.quantized.graph.nodes}
    for step in pair.program.steps:
        if step.site is not None and step.site in ranges:
            rounded = by_name[step.node].args[0]
            assert isinstance(rounded, Node), "a dequantize node reads the quantize node"
            for node in (rounded, *rounded.users):
                value, _, _, *others = node.args
                node.args = (value, *ranges[step.site], *others)
