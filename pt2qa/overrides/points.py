"""Reads a quantizer's annotations from a graph as plain data, and writes them back.

A *point* is something that can be annotated: the edge from one node to a reader, or a node's own output.  Each has a
spec: torchao's own object, or :class:`Shares` and :class:`Derives` if torchao's refers to other points.

torchao makes one observer for a group of points that share one scale.  The group's first point must have a spec that is
not a reference, and every reference must lead to an existing point; otherwise torchao fails, or follows a cycle until
Python's stack overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2qa._graph.annotation import rounds, specs_of
from pt2qa._graph.handles import OpName, name_of, op_of, part_name, parts_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import FakeTensor, pytree
from pt2qa._graph.internals.torchao import maker_of
from pt2qa._simulator import op_rules
from pt2qa._simulator.products import keyword_numbers
from pt2qa.errors import QuantizeError

OUTPUT = "output"
"""The op of a graph's output."""

Point = tuple[str, str]
"""fx names of the node that produces a value and of its reader; the second is empty for the node's own output."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Has the scale of another point: torchao's ``SharedQuantizationSpec``."""

    point: Point


@dataclass(frozen=True, slots=True)
class Derives:
    """Has a scale that is computed from those of other points: torchao's ``DerivedQuantizationSpec``."""

    spec: Any
    points: tuple[Point, ...]


Specs = Mapping[Point, Any]
"""Every point that has a spec, in the order in which torchao visits them."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """What an edit needs to know about a node; other nodes are given by their fx names, as it is by ``key``.

    Attributes:
        name: as reports show it; for a constant, the qualified name of its attribute.
        owner: name of the captured op that it is, or is part of; empty for constants and what prepare inserted.
        op: its type; ``input``, and ``output`` for the graph's output, which quantizers may annotate like an op.
        constant: whether its value is computed once, from constants; but an op that reads a rounded constant runs with
            each batch, see ``_as_lowered`` in :mod:`pt2qa.overrides.annotations`.
        moves: whether its result consists of values of its one input, all or some of them.
        is_parameter: for a constant, whether it comes from a Parameter.
        is_tensor: whether its value is one tensor, so that an observer can follow it.
        inputs: its positional inputs, with the number of the argument.
        reads: every value that it reads, including keyword arguments and repeats, after the number of the argument.
        readers: the nodes that read it; the graph's output is one if the graph returns it.
    """

    key: str
    name: str
    owner: str
    op: str
    constant: bool
    moves: bool
    is_parameter: bool
    is_tensor: bool
    dtype: str
    inputs: Mapping[str, int]
    reads: tuple[tuple[int, str], ...]
    readers: tuple[str, ...]


def read_nodes(graph_module: GraphModule, names: Mapping[int, OpName]) -> dict[str, GraphNode]:
    """The nodes of a graph by fx name, in graph order."""
    parameters = {name for name, _ in graph_module.named_parameters(remove_duplicate=False)}
    parts = parts_of(graph_module.graph)
    nodes: dict[str, GraphNode] = {}
    for node in graph_module.graph.nodes:
        reads = _reads(node)
        inputs: dict[str, int] = {}
        # torchao observes only positional arguments, including those in lists.
        for number, source in reads:
            if number < len(node.args):
                inputs.setdefault(source, number)
        sources = [nodes[source.name] for source in node.all_input_nodes if source.name in nodes]
        name, owner = _name(node, names)
        constant = node.op == "get_attr" or (
            node.op != "output" and bool(sources) and all(source.constant for source in sources)
        )
        if constant and node.op != "get_attr":
            name = sources[0].name
        elif owner and node.op == "call_function":
            name = part_name(name, node, parts[node])
        nodes[node.name] = GraphNode(
            key=node.name,
            name=name,
            owner=owner,
            op="input" if node.op == "placeholder" else op_of(node.target),
            constant=constant,
            moves=len(node.all_input_nodes) == 1 and op_rules.only_moves(node.target),
            is_parameter=str(node.target) in parameters
            if node.op == "get_attr"
            else constant and any(source.is_parameter for source in sources),
            is_tensor=isinstance(node.meta.get(VALUE), FakeTensor),
            dtype="" if node.op == "output" else dtype_of(node),
            inputs=inputs,
            reads=reads,
            readers=tuple(user.name for user in node.users),
        )
    return nodes


def read_specs(graph_module: GraphModule) -> dict[Point, Any]:
    """Every annotated point of a graph with its spec."""
    return {
        (node.name, "") if source is None else (source.name, node.name): _read(spec)
        for node in graph_module.graph.nodes
        for source, spec in specs_of(node)
    }


def write_specs(graph_module: GraphModule, before: Specs, after: Specs) -> None:
    """Changes the annotations of a graph from ``before`` to ``after``; edits ``graph_module`` in place."""
    from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec

    from pt2qa._graph.internals import flow_quantizer

    nodes = {node.name: node for node in graph_module.graph.nodes}

    def edge(point: Point) -> Node | tuple[Node, Node]:
        source, reader = point
        return (nodes[source], nodes[reader]) if reader else nodes[source]

    def own(spec: Any) -> Any:
        if isinstance(spec, Shares):
            return SharedQuantizationSpec(edge(spec.point))
        return replace(spec.spec, derived_from=list(map(edge, spec.points))) if isinstance(spec, Derives) else spec

    changed = [point for point in dict.fromkeys((*before, *after)) if before.get(point) is not after.get(point)]
    flow_quantizer.write_specs({edge(point): own(after.get(point)) for point in changed})


def own_spec(spec: Any) -> Any:
    """torchao's own object for a spec that is not a reference."""
    return spec.spec if isinstance(spec, Derives) else spec


def is_quantized(spec: Any, node: GraphNode) -> bool:
    """Whether a spec that is not a reference rounds the value of a node."""
    return rounds(own_spec(spec), constant=node.constant)


@dataclass(frozen=True, slots=True)
class SpecFacts:
    """The content of a spec.

    ``scheme`` is empty if the spec has none, ``axis`` -1 if the whole tensor has one scale, and the range None if the
    observer uses that of the dtype.  ``observer`` is the class of the observer, or of the fake-quantize with its
    observer's in brackets; empty if the scale is fixed or derived.  ``options`` are the arguments bound to it, or the
    fixed scale and zero point, or the function that derives the scale.
    """

    dtype: str
    scheme: str
    axis: int
    quant_min: int | None
    quant_max: int | None
    dynamic: bool
    derived: bool
    observer: str
    options: str


def spec_facts(spec: Any) -> SpecFacts:
    """The content of a spec that is not a reference."""
    own = own_spec(spec)
    scheme = str(getattr(own, "qscheme", None) or "").removeprefix("torch.")
    axis = getattr(own, "ch_axis", None)
    maker = observer_class(own)
    bound = maker_of(own)[1]
    inner = getattr(bound.get("observer"), "__name__", "")
    fixed = {
        name: value
        for name in ("scale", "zero_point", "derive_qparams_fn")
        if (value := getattr(own, name, None)) is not None
    }
    return SpecFacts(
        dtype=str(getattr(own, "dtype", type(own).__name__)).removeprefix("torch."),
        scheme=scheme,
        axis=axis if scheme.startswith("per_channel") and axis is not None else -1,
        quant_min=getattr(own, "quant_min", None),
        quant_max=getattr(own, "quant_max", None),
        dynamic=bool(getattr(own, "is_dynamic", False)),
        derived=isinstance(spec, Derives),
        observer="" if maker is None else f"{maker.__name__}({inner})" if inner else maker.__name__,
        options=_options({**bound, **fixed}),
    )


def _options(keywords: Mapping[str, Any]) -> str:
    """Arguments as ``eps=1e-05, reduce_range=True``; of a function or class its name, without its address."""
    named = {
        name: getattr(value, "__qualname__", type(value).__name__) if callable(value) else value
        for name, value in keywords.items()
        if name != "observer"
    }
    return ", ".join(f"{name}={value}" for name, value in sorted(named.items()))


def spec_text(spec: Any) -> str:
    """A spec as dtype, scheme, range and observer: ``int8 per_tensor_affine -128..127 Histogram``."""
    facts = spec_facts(spec)
    words = [facts.dtype, facts.scheme, f"{facts.quant_min}..{facts.quant_max}" if facts.quant_min is not None else ""]
    words += ["dynamic" if facts.dynamic else "", "derived" if facts.derived else ""]
    return " ".join(filter(None, (*words, facts.observer.removesuffix("Observer"))))


def dtype_of(node: Node) -> str:
    """The dtype of a node's value; for several outputs each one once, with commas; empty if unknown."""
    values = pytree.tree_leaves(node.meta.get(VALUE))
    found = [str(value.dtype).removeprefix("torch.") for value in values if isinstance(value, torch.Tensor)]
    return ", ".join(dict.fromkeys(found))


def observer_class(spec: Any) -> type[Any] | None:
    """The class of a spec's observer or fake-quantize; None if it has none."""
    maker, _ = maker_of(spec)
    return maker if isinstance(maker, type) else None


def _name(node: Node, names: Mapping[int, OpName]) -> tuple[str, str]:
    if node.op == "get_attr":
        return str(node.target), ""
    if name := name_of(node, names):
        return name, name
    return (node.name if node.op in ("placeholder", "output") else f"{op_of(node.target)} (no handle, {node.name})"), ""


def _reads(node: Node) -> tuple[tuple[int, str], ...]:
    numbers = keyword_numbers(node.target)
    keywords = ((numbers.get(name, len(node.args)), argument) for name, argument in node.kwargs.items())
    found: list[tuple[int, str]] = []
    for number, argument in (*enumerate(node.args), *keywords):
        sources: list[Node] = []
        map_arg(argument, sources.append)
        found += [(number, source.name) for source in sources]
    return tuple(found)


def _read(spec: Any) -> Any:
    from torchao.quantization.pt2e.quantizer import DerivedQuantizationSpec, SharedQuantizationSpec

    if isinstance(spec, SharedQuantizationSpec):
        return Shares(_point(spec.edge_or_node))
    if isinstance(spec, DerivedQuantizationSpec):
        return Derives(spec, tuple(map(_point, spec.derived_from)))
    return spec


def _point(edge_or_node: Any) -> Point:
    if isinstance(edge_or_node, Node):
        return edge_or_node.name, ""
    source, reader = edge_or_node
    return source.name, reader.name


COMPARED = ("dtype", "is_dynamic", "quant_min", "quant_max", "qscheme", "ch_axis", "scale", "zero_point")
"""The fields that torchao compares before two points of one value share an observer (``_union_input_edge_with``)."""


def root_of(specs: Specs, point: Point) -> Point | None:
    """The point at the end of a chain of shared specs; None if the chain is broken or circular."""
    seen: set[Point] = set()
    while point in specs and point not in seen:
        spec = specs[point]
        if not isinstance(spec, Shares):
            return point
        seen.add(point)
        point = spec.point
    return None


def rounds_at(specs: Specs, point: Point, nodes: Mapping[str, GraphNode]) -> bool:
    """Whether a point's resolved spec rounds its value."""
    root = root_of(specs, point)
    return root is not None and is_quantized(specs[root], nodes[point[0]])


def groups_of(specs: Specs) -> dict[Point, Point]:
    """For each point, the first one that has the same scale, by reference or as the same value with an equal spec.

    Source:
        ``_get_edge_or_node_to_group_id`` in ``torchao/quantization/pt2e/prepare.py``.
    """
    parents = {point: point for point in specs}

    def find(point: Point) -> Point:
        while parents[point] != point:
            parents[point] = point = parents[parents[point]]
        return point

    alike: dict[Any, Point] = {}
    for point, spec in specs.items():
        if isinstance(spec, Shares) and spec.point in parents:
            parents[find(point)] = find(spec.point)
        root = root_of(specs, point)
        if root is not None:
            asks = (point[0], *(getattr(own_spec(specs[root]), name, None) for name in COMPARED))
            parents[find(point)] = find(alike.setdefault(asks, point))
    first: dict[Point, Point] = {}
    return {point: first.setdefault(find(point), point) for point in specs}


def remove(specs: Specs, gone: Collection[Point], describe: Callable[[Point], str]) -> dict[Point, Any]:
    """The specs without some points; those that shared with them share among themselves.

    If the point with a group's spec is removed, the first remaining point of the group gets the spec.  A point that
    derives its scale from a removed one derives it from another of that group.
    """
    gone = set(gone)
    kept = {point: spec for point, spec in specs.items() if point not in gone}
    roots = {point: root_of(specs, point) for point in specs}
    anchors = {root: root for root in roots.values() if root is not None and root in kept}
    for point, spec in list(kept.items()):
        root = roots[point]
        if isinstance(spec, Derives):
            kept[point] = replace(spec, points=tuple(_source(p, point, kept, roots, describe) for p in spec.points))
        if not isinstance(spec, Shares):
            continue
        if root is None:
            if spec.point in gone:
                raise QuantizeError(
                    f"{describe(point)} shares its scale with {describe(spec.point)}, which leads to no scale of its "
                    "own: the quantizer's shared specs form a cycle or end nowhere, which this edit cannot repair"
                )
        elif root not in anchors:
            anchors[root] = point
            kept[point] = specs[root]
        elif spec.point in gone:
            kept[point] = Shares(anchors[root])
    return kept


def replace_own(
    specs: Specs, own: Iterable[Point], change: Callable[[Any], Any], describe: Callable[[Point], str]
) -> dict[Point, Any]:
    """The specs with some points changed, which still share among themselves, and the other points as they are."""
    own = list(own)
    rest = remove(specs, own, describe)
    changed: dict[Point, Any] = {}
    first: dict[Point, Point] = {}
    for point in own:
        if (root := root_of(specs, point)) is not None:
            changed[point] = Shares(first[root]) if root in first else change(specs[root])
            first.setdefault(root, point)
    return {point: changed.get(point, rest.get(point)) for point in specs if point in changed or point in rest}


def _source(
    source: Point,
    derived: Point,
    kept: dict[Point, Any],
    roots: dict[Point, Point | None],
    describe: Callable[[Point], str],
) -> Point:
    """A point to derive from: the same one, or an earlier one with the same scale."""
    if source in kept:
        return source
    for point in kept:
        if point == derived:
            break
        if source in roots and roots[point] is not None and roots[point] == roots[source]:
            return point
    raise QuantizeError(
        f"{describe(derived)} derives its scale from {describe(source)}, which this edit removes; "
        "name the op that reads it in the edit, too"
    )
