"""What each kind of edit does to the specs of a graph's points.  Every function returns new specs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pt2qa._graph.internals.torchao import maker_of
from pt2qa.errors import PluginError, QuantizeError
from pt2qa.overrides.plan import BEFORE_CALIBRATION, OBSERVERS, Edit
from pt2qa.overrides.points import (
    Derives,
    GraphNode,
    Point,
    Specs,
    groups_of,
    observer_class,
    own_spec,
    remove,
    replace_own,
    root_of,
    rounds_at,
)

BATCH_NORMS = ("batch_norm", "_native_batch_norm_legit_no_training")


@dataclass(frozen=True, slots=True)
class AnnotatedGraph:
    """What edits need to know about a graph besides its specs.

    Nodes are by fx name, in graph order; refusals are reasons by kind of edit and fx name.  If ``fusable`` is None, ops
    of any two types may be fused.
    """

    nodes: Mapping[str, GraphNode]
    refusals: Mapping[tuple[str, str], str]
    fusable: tuple[tuple[str, str], ...] | None
    quantizer: str
    qat: bool

    def describe(self, point: Point) -> str:
        """The name of a point in errors."""
        source, reader = point
        name = self.nodes[source].name if source in self.nodes else source
        if not reader:
            return f"the output of {name}"
        return f"{name}, as {self.nodes[reader].name if reader in self.nodes else reader} reads it,"


def apply_edit(edit: Edit, keys: list[Sequence[str]], specs: Specs, graph: AnnotatedGraph) -> dict[Point, Any]:
    """The specs after one edit; ``keys`` are for each op that it names the fx names of its nodes."""
    if graph.qat and edit.kind not in ("float", "fuse"):
        raise QuantizeError(
            f"{edit}: with qat=True only 'float' and 'fuse' edits are possible, because training has its own observers"
        )
    if edit.kind in (*BEFORE_CALIBRATION, "bias", "round"):
        # They change parameters; annotations stay as they are.
        return dict(specs)
    if edit.kind == "fuse":
        first, second = (found[-1] for found in keys)
        after = _fuse(edit, first, second, specs, graph)
    else:
        nodes = [key for found in keys for key in found]
        after = _KINDS[edit.kind](edit, nodes, specs, graph)
    if after == specs:
        raise QuantizeError(
            f"{edit}: changes nothing: {graph.quantizer} annotates nothing there that this edit could change"
        )
    return after


def points_of(node: str, specs: Specs) -> list[Point]:
    """The points in a node's own annotation."""
    return [point for point in specs if (point[1] or point[0]) == node]


def is_activation(point: Point, specs: Specs, graph: AnnotatedGraph) -> bool:
    """Whether a point is a quantized activation."""
    return not graph.nodes[point[0]].constant and rounds_at(specs, point, graph.nodes)


def has_static_weight(node: str, specs: Specs, graph: AnnotatedGraph) -> bool:
    """Whether an op reads a quantized constant and a quantized activation whose scale comes from calibration."""
    own = [point for point in points_of(node, specs) if point[1]]
    weights = [point for point in own if graph.nodes[point[0]].constant]
    return bool(weights) and any(
        is_activation(point, specs, graph) and not getattr(_own_spec(point, specs), "is_dynamic", False)
        for point in own
    )


def can_observe(point: Point, specs: Specs, graph: AnnotatedGraph) -> bool:
    """Whether an activation's scale comes from an observer of the whole tensor."""
    spec = _own_spec(point, specs)
    return (
        is_activation(point, specs, graph)
        and dataclasses.is_dataclass(spec)
        and observer_class(spec) is not None
        and not getattr(spec, "is_dynamic", False)
        and getattr(spec, "qscheme", None) in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    )


# -- float and fuse ----------------------------------------------------------------------------------------------------


def _float(edit: Edit, nodes: list[str], specs: Specs, graph: AnnotatedGraph) -> dict[Point, Any]:
    own = {point for node in nodes for point in points_of(node, specs)}
    own |= {point for node in nodes for point in _constants(node, set(nodes), specs, graph)}
    return remove(specs, own, graph.describe)


def _constants(node: str, named: Collection[str], specs: Specs, graph: AnnotatedGraph) -> Iterator[Point]:
    """Points on the path from a constant to an op, if no op that stays quantized reads the constant."""
    for source in graph.nodes[node].inputs:
        readers = graph.nodes[source].readers
        if graph.nodes[source].constant and all(r in named or not points_of(r, specs) for r in readers):
            yield from points_of(source, specs)
            yield from _constants(source, {*named, source}, specs, graph)


def _fuse(edit: Edit, first: str, second: str, specs: Specs, graph: AnnotatedGraph) -> dict[Point, Any]:
    one, two = graph.nodes[first], graph.nodes[second]
    if graph.fusable is not None and (one.op, two.op) not in graph.fusable:
        pairs = ", ".join(f"{a} + {b}" for a, b in graph.fusable) or "none"
        raise PluginError(
            f"{edit}: {graph.quantizer} has no kernel for {one.op} + {two.op}; pairs that it can fuse: {pairs}"
        )
    end = _behind_batch_norm(one, graph)
    if end.key not in two.inputs:
        readers = ", ".join(graph.nodes[reader].name for reader in end.readers) or "nothing"
        raise QuantizeError(f"{edit}: {two.name} does not read {one.name}, which is read by {readers}")
    others = [graph.nodes[reader].name for reader in end.readers if reader != second]
    if others:
        raise QuantizeError(
            f"{edit}: {', '.join(others)} read{'s' if len(others) == 1 else ''} the output of {one.name}, too, so it "
            "must exist and cannot be fused away"
        )
    between = [point for point in ((end.key, ""), (end.key, second)) if point in specs]
    roots = [root for point in between if (root := root_of(specs, point)) is not None]
    if not roots:
        raise QuantizeError(
            f"{edit}: changes nothing: the output of {one.name} is not quantized on its way to {two.name}"
        )
    after = remove(specs, between, graph.describe)
    if (second, "") in after:
        return after
    given = {**after, (second, ""): specs[roots[0]]}
    order = {key: place for place, key in enumerate(graph.nodes)}
    return dict(sorted(given.items(), key=lambda item: (order[item[0][1] or item[0][0]], not item[0][1])))


def _behind_batch_norm(node: GraphNode, graph: AnnotatedGraph) -> GraphNode:
    """The batch norm that belongs to an op, which QAT keeps in the graph; else the op itself."""
    readers = [graph.nodes[reader] for reader in node.readers]
    return readers[0] if len(readers) == 1 and readers[0].op in BATCH_NORMS else node


# -- other specs -------------------------------------------------------------------------------------------------------


def _dynamic(edit: Edit, nodes: list[str], specs: Specs, graph: AnnotatedGraph) -> dict[Point, Any]:
    from torchao.quantization.pt2e.observer import PlaceholderObserver

    leading = [node for node in nodes if has_static_weight(node, specs, graph)]
    followers = [node for node in nodes if node not in leading and points_of(node, specs)]
    _check_refusals(edit, leading, graph)
    for node in followers:
        if not set(graph.nodes[node].inputs) & {*leading, *followers}:
            raise PluginError(
                f"{edit}: {graph.nodes[node].name} has no weights, and only ops with weights take dynamic scales for "
                "their inputs. Leave it out, or name it together with the op whose output it reads"
            )

    def dynamic(spec: Any) -> Any:
        maker = PlaceholderObserver.with_args(**_epsilon(spec))
        return dataclasses.replace(spec, is_dynamic=True, observer_or_fake_quant_ctr=maker)

    own = [point for node in leading for point in points_of(node, specs)]
    inputs = [point for point in own if point[1] and is_activation(point, specs, graph)]
    lost = [point for point in own if not point[1] or isinstance(specs[point], Derives)]
    lost += [point for node in followers for point in points_of(node, specs)]
    fixed = [point for point in inputs if observer_class(_own_spec(point, specs)) is None]
    if fixed:
        raise QuantizeError(f"{edit}: {graph.describe(fixed[0])} has a fixed scale, which does not depend on the data")
    return remove(replace_own(specs, inputs, dynamic, graph.describe), lost, graph.describe)


def _int16(edit: Edit, nodes: list[str], specs: Specs, graph: AnnotatedGraph) -> dict[Point, Any]:
    _check_refusals(edit, nodes, graph)
    own = [
        point
        for node in nodes
        for point in points_of(node, specs)
        if can_observe(point, specs, graph) and _own_spec(point, specs).dtype is not torch.int16
    ]

    def wider(spec: Any) -> Any:
        lowest = -32767 if spec.qscheme is torch.per_tensor_symmetric else -32768
        return dataclasses.replace(spec, dtype=torch.int16, quant_min=lowest, quant_max=32767)

    return replace_own(specs, own, wider, graph.describe)


EPS = 1e-9
"""The smallest scale that observers of ``int8`` and ``int8_weight`` edits give, so that values may have any unit."""


def _int8(edit: Edit, nodes: list[str], specs: Specs, graph: AnnotatedGraph) -> dict[Point, Any]:
    _check_refusals(edit, nodes, graph)
    eight = [point for point in specs if _is_eight_bit(point, specs, graph)]
    affine = any(getattr(_own_spec(point, specs), "qscheme", None) is torch.per_tensor_affine for point in eight)
    change, after = functools.partial(_observed_whole, affine=affine), dict(specs)
    for node in nodes:
        values = _moved_with(node, graph)
        after = replace_own(after, (point for point in eight if point[0] in values), change, graph.describe)
    return after


def _int8_weight(edit: Edit, nodes: list[str], specs: Specs, graph: AnnotatedGraph) -> dict[Point, Any]:
    _check_refusals(edit, nodes, graph)
    weights = [point for node in nodes for point in points_of(node, specs) if _is_weight(point, specs, graph)]
    for point, spec in specs.items():
        if isinstance(spec, Derives) and set(spec.points) & {*weights} and "channel" not in str(spec.spec.qscheme):
            raise QuantizeError(f"{edit}: {graph.describe(point)} derives its one scale from that of the weight")
    return replace_own(specs, weights, lambda spec: _weight_by_channel(), graph.describe)


def _moved_with(node: str, graph: AnnotatedGraph) -> set[str]:
    """The value of a node, and those that have its scale because ops between them only move values."""
    found, left = set[str](), [node]
    while left:
        key = left.pop()
        if key not in found and not graph.nodes[key].constant:
            found.add(key)
            own = graph.nodes[key]
            left += own.inputs if _moves(own) else ()
            left += (reader for reader in own.readers if _moves(graph.nodes[reader]))
    return found


def _moves(node: GraphNode) -> bool:
    return node.moves or node.op == "cat"


def _is_eight_bit(point: Point, specs: Specs, graph: AnnotatedGraph) -> bool:
    """Whether a point is an activation with one scale in eight bits that no batch changes."""
    spec = _own_spec(point, specs)
    return (
        is_activation(point, specs, graph)
        and getattr(spec, "dtype", None) in (torch.int8, torch.uint8)
        and not getattr(spec, "is_dynamic", False)
        and getattr(spec, "qscheme", None) in (None, torch.per_tensor_affine, torch.per_tensor_symmetric)
    )


def _observed_whole(spec: Any, *, affine: bool) -> Any:
    """All integers of the dtype, and an observer of all values; ``affine``: whether the backend takes zero points."""
    from torchao.quantization.pt2e.observer import MinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationSpec

    limits = torch.iinfo(spec.dtype)
    scheme = torch.per_tensor_affine if affine or spec.dtype is torch.uint8 else torch.per_tensor_symmetric
    return QuantizationSpec(spec.dtype, MinMaxObserver.with_args(eps=EPS), limits.min, limits.max, scheme)


def _is_weight(point: Point, specs: Specs, graph: AnnotatedGraph) -> bool:
    """Whether a point is the rounded weight of an op with output channels."""
    source, reader = point
    node = graph.nodes[reader or source]
    own = bool(reader) and node.op in _WEIGHTED and node.inputs.get(source) == 1
    return own and graph.nodes[source].constant and rounds_at(specs, point, graph.nodes)


_WEIGHTED = ("conv1d", "conv2d", "conv3d", "linear")
"""Ops whose output channels are the first axis of their weights."""


def _weight_by_channel() -> Any:
    from torchao.quantization.pt2e.observer import PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationSpec

    made = PerChannelMinMaxObserver.with_args(eps=EPS)
    return QuantizationSpec(torch.int8, made, -127, 127, torch.per_channel_symmetric, 0)


def _observer(edit: Edit, nodes: list[str], specs: Specs, graph: AnnotatedGraph) -> dict[Point, Any]:
    from torchao.quantization.pt2e import observer

    maker = getattr(observer, OBSERVERS[edit.observer])
    _check_refusals(edit, nodes, graph)
    # One value has one observer, whichever points require it; torchao takes the first one that it finds.
    sources = {point[0] for node in nodes for point in points_of(node, specs)}
    roots = {
        root_of(specs, point)
        for point in specs
        if point[0] in sources
        and can_observe(point, specs, graph)
        and observer_class(_own_spec(point, specs)) is not maker
    }
    return {
        point: dataclasses.replace(spec, observer_or_fake_quant_ctr=maker.with_args(**_epsilon(spec)))
        if point in roots
        else spec
        for point, spec in specs.items()
    }


def _range(edit: Edit, nodes: list[str], specs: Specs, graph: AnnotatedGraph) -> dict[Point, Any]:
    from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec

    _check_refusals(edit, nodes, graph)
    groups = groups_of(specs)
    wanted = {groups[point] for point in specs if point[0] in nodes and can_observe(point, specs, graph)}
    roots = {root_of(specs, point) for point, group in groups.items() if group in wanted}
    after = dict(specs)
    for root in roots:
        assert root is not None, "an observed point has a spec"
        spec = specs[root]
        limits = limits_of(spec)
        if not limits[0] <= edit.zero_point <= limits[1]:
            raise QuantizeError(
                f"{edit}: {graph.describe(root)} has the integers {limits[0]}..{limits[1]}, without this zero point"
            )
        after[root] = FixedQParamsQuantizationSpec(spec.dtype, edit.scale, edit.zero_point, *limits, spec.qscheme)
    return after


def limits_of(spec: Any) -> tuple[int, int]:
    """The integers of a spec; those of the dtype if it has none."""
    limits = torch.iinfo(spec.dtype)
    low, high = getattr(spec, "quant_min", None), getattr(spec, "quant_max", None)
    return limits.min if low is None else low, limits.max if high is None else high


_KINDS: Mapping[str, Callable[[Edit, list[str], Specs, AnnotatedGraph], dict[Point, Any]]] = {
    "float": _float,
    "dynamic": _dynamic,
    "int8": _int8,
    "int8_weight": _int8_weight,
    "int16": _int16,
    "observer": _observer,
    "range": _range,
}


def _check_refusals(edit: Edit, nodes: list[str], graph: AnnotatedGraph) -> None:
    for node in nodes:
        if reason := graph.refusals.get((edit.kind, node)):
            raise PluginError(f"{edit}: {graph.nodes[node].name}: {reason}")


def _own_spec(point: Point, specs: Specs) -> Any:
    root = root_of(specs, point)
    return None if root is None else own_spec(specs[root])


def _epsilon(spec: Any) -> dict[str, Any]:
    """The quantizer's lower limit for scales (``eps``), which another observer must keep."""
    _, keywords = maker_of(spec)
    return {"eps": keywords["eps"]} if "eps" in keywords else {}
