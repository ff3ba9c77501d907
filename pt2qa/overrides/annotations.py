"""A quantizer's annotations of a model, before and after edits: facts, without running anything."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.fx import GraphModule

from pt2qa._graph.handles import OpName
from pt2qa._grouping import grouped
from pt2qa._printable import did_you_mean
from pt2qa._simulator.products import constant_role
from pt2qa._simulator.program import Site
from pt2qa.errors import QuantizeError, SelectionError
from pt2qa.overrides import edits as kinds
from pt2qa.overrides.plan import Edit
from pt2qa.overrides.points import (
    OUTPUT,
    GraphNode,
    Point,
    SpecFacts,
    Specs,
    groups_of,
    read_nodes,
    read_specs,
    root_of,
    rounds_at,
    spec_facts,
    spec_text,
)
from pt2qa.plugins import QuantizerPlugin, describe
from pt2qa.plugins.registry import fusable_of, levels_of, unsupported_reason

EdgeKind = Literal["activation", "weight", "bias"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One annotation that requires a rounded value.

    Attributes:
        source: the op whose output is rounded; for an input its name, for a weight the qualified name of its attribute.
        reader: the op whose input annotation this is, ``output`` for the model's output; empty if it is the source's
            output annotation.
        kind: ``activation``, ``weight`` or ``bias``.
        spec: dtype, scheme, range and observer.
    """

    source: str
    reader: str
    kind: EdgeKind
    spec: str


@dataclass(frozen=True, slots=True)
class AnnotatedOp:
    """An op of the annotated graph.

    Attributes:
        name: as reports show it.
        op: its type, such as ``conv2d``.
        levels: the kinds of edit, apart from ``fuse``, that it can take and that the plug-in considers worth trying.
    """

    name: str
    op: str
    levels: tuple[str, ...]


@dataclass(frozen=True)
class Annotations:
    """A quantizer's annotations of one model.

    Attributes:
        specs: each annotated point with its spec, in the order in which torchao visits them.
        graph: the graph that they belong to, and what the backend does not support.
        ops: the ops that the quantizer annotates, by name, before any edit.
        known: every op name of the model; some are not in the graph that is quantized.
    """

    specs: Mapping[Point, Any] = field(repr=False)
    graph: kinds.AnnotatedGraph = field(repr=False)
    ops: Mapping[str, AnnotatedOp]
    known: frozenset[str] = field(repr=False)

    @functools.cached_property
    def edges(self) -> frozenset[Edge]:
        """Every quantized edge and output, without specs that round nothing, such as a float bias."""
        return frozenset(edge for point in self.specs if (edge := self.edge(point)) is not None)

    def with_edits(self, edits: Iterable[Edit]) -> Annotations:
        """The annotations after more edits, applied in order.

        Raises:
            SelectionError: an edit names an op that the model does not have.
            PluginError: the backend does not support an edit.
            QuantizeError: an edit changes nothing, or cannot be made in this graph.
        """
        specs = self._specs_after(edits)
        return replace(self, specs=specs, graph=replace(self.graph, nodes=_as_lowered(self.graph.nodes, specs)))

    def _specs_after(self, edits: Iterable[Edit]) -> Mapping[Point, Any]:
        specs = self.specs
        for edit in edits:
            specs = kinds.apply_edit(edit, [self._keys(op, edit) for op in edit.ops], specs, self.graph)
        return specs

    def can_take(self, edit: Edit) -> bool:
        """Whether an edit changes something and can be made in this graph; nothing is lowered to find out."""
        with contextlib.suppress(QuantizeError):
            self._specs_after([edit])
            return True
        return False

    def after(self, *edits: Edit) -> Annotations | None:
        """The same as :meth:`with_edits`; None if an edit changes nothing or cannot be made."""
        try:
            return self.with_edits(edits)
        except QuantizeError:
            return None

    def points_at(self, sites: Sequence[Site]) -> dict[int, tuple[Point, ...]]:
        """For each site of a pair of this quantizer and capture, by index, the points that require it.

        An activation's site may be required by the op that produces the value and by those that read it; a weight's
        site by the op that reads it; after some edits, a site by none.
        """
        same_value = Counter(site.name for site in sites if site.source != site.result)
        found: dict[int, tuple[Point, ...]] = {}
        for site in sites:
            if site.source == site.result:
                constants = self.points_by_name[1].get(site.name, ())
                points = [point for _, point in constants if self._role(point) == site.kind]
            else:
                points = list(self.points_by_name[0].get(site.name, ()))
                if same_value[site.name] > 1:
                    points = [point for point in points if self._is_for(point, site)]
            found[site.index] = tuple(points)
        return found

    def sites_on(self, sites: Sequence[Site]) -> set[int]:
        """The indices of the sites of a pair that stay quantized with these annotations; see :func:`sites_on`."""
        return sites_on(sites, self)

    def readers_of(self, sites: Sequence[Site]) -> dict[int, frozenset[str]]:
        """For each activation's site that only some readers require, by index, the names of these.

        All other ops read the value as it was.  If the op that produces the value requires a site, all have it.
        """
        nodes = self.graph.nodes
        return {
            index: frozenset(nodes[reader].name for _, reader in points)
            for index, points in self.points_at(sites).items()
            if sites[index].source != sites[index].result and points and all(reader for _, reader in points)
        }

    def facts(self, point: Point) -> SpecFacts:
        """The spec of a point after its references are resolved."""
        root = root_of(self.specs, point)
        assert root is not None, f"{self.graph.describe(point)} has no spec of its own"
        return spec_facts(self.specs[root])

    @functools.cached_property
    def groups(self) -> Mapping[Point, Point]:
        """For each point, the first one that has the same scale."""
        return groups_of(self.specs)

    @functools.cached_property
    def shared(self) -> Mapping[Point, Set[str]]:
        """For each point, the values that have the same scale, which depends on all of them."""
        values: dict[Point, set[str]] = defaultdict(set)
        for point, first in self.groups.items():
            values[first].add(point[0])
        return {point: values[first] for point, first in self.groups.items()}

    def has_scales_of(self, before: Annotations) -> bool:
        """Whether what is rounded here has the scales that it has with other annotations of the model.

        Where points of one group have other observers, torchao takes that of the first.
        """
        firsts = {first: before.groups.get(point) for point, first in self.groups.items()}
        return all(before.shared.get(point) == values for point, values in self.shared.items()) and all(
            old is not None and self.resolved(new) == before.resolved(old) for new, old in firsts.items()
        )

    def resolved(self, point: Point) -> SpecFacts | None:
        """The same as :meth:`facts`; None where references lead to no spec."""
        return None if root_of(self.specs, point) is None else self.facts(point)

    @functools.cached_property
    def points_by_name(self) -> tuple[Mapping[str, Sequence[Point]], Mapping[str, Sequence[tuple[int, Point]]]]:
        """The points that require rounded values: by the op or input that makes them; by the op that reads a constant.

        Those of constants come after the number of the argument.
        """
        values: dict[str, list[Point]] = defaultdict(list)
        constants: dict[str, list[tuple[int, Point]]] = defaultdict(list)
        for point in self.specs:
            if self.unspecified(point) is None:
                continue
            source = self.graph.nodes[point[0]]
            if source.constant:
                for reader, argument in self._readers(point):
                    constants[reader].append((argument, point))
                # Before some edit, it may have been the value of an op that reads a rounded constant.
                if source.owner:
                    values[source.owner].append(point)
            else:
                values[self.value_name(point)].append(point)
        return values, constants

    def value_name(self, point: Point) -> str:
        """The name in reports of the value at a point.

        QAT keeps a batch norm until convert folds it into the convolution before it, which then names the value.
        """
        source = self.graph.nodes[point[0]]
        before = [self.graph.nodes[key] for key in source.inputs if not self.graph.nodes[key].constant]
        if self.graph.qat and source.op in kinds.BATCH_NORMS and len(before) == 1 and before[0].op.startswith("conv"):
            return before[0].name
        return source.name

    @functools.cached_property
    def _keys_of(self) -> dict[str, list[str]]:
        """fx names by the name of an op; the parts of a decomposed op are also listed under its name."""
        listed = (node for node in self.graph.nodes.values() if not node.constant or node.owner)
        return dict(grouped((name, node.key) for node in listed for name in {node.name, node.owner} - {""}))

    def _keys(self, op: str, edit: Edit) -> Sequence[str]:
        if op in self._keys_of:
            return self._keys_of[op]
        if op in self.known:
            # Folded into another op, such as a batch norm into its convolution, which must be named too.
            if edit.kind != "fuse" and any(other in self._keys_of for other in edit.ops):
                return ()
            raise SelectionError(
                f"{edit}: {op} is not in the graph that is quantized: it was folded into the op before it, is in a "
                "nested graph, or nothing reads it. Name the op that it belongs to"
            )
        near = did_you_mean(op, sorted(self.known | self._keys_of.keys()))
        raise SelectionError(f"{edit}: the model has no op {op!r}{near} Reports list the names of all ops")

    def edge(self, point: Point) -> Edge | None:
        """The edge of a point; None if it rounds nothing, or if its value does not exist."""
        found = self.unspecified(point)
        root = root_of(self.specs, point)
        return found if found is None or root is None else replace(found, spec=spec_text(self.specs[root]))

    def unspecified(self, point: Point) -> Edge | None:
        """The same without the spec."""
        source, reader = point
        node = self.graph.nodes[source]
        exists = source in self.graph.nodes[reader].inputs if reader else node.is_tensor or node.constant
        if not exists or not rounds_at(self.specs, point, self.graph.nodes):
            return None
        name = self.graph.nodes[reader].name if reader else ""
        return Edge(node.name, name, self._role(point), "")

    def _role(self, point: Point) -> EdgeKind:
        source = self.graph.nodes[point[0]]
        if not source.constant:
            return "activation"
        reading = point[1] or next(iter(source.readers), "")
        position = -1
        while reading:
            node = self.graph.nodes[reading]
            position = node.inputs.get(source.key, -1)
            if not node.constant:
                break
            source, reading = node, next(iter(node.readers), "")
        return constant_role(self.graph.nodes[reading].op if reading else "", position, source.is_parameter)

    def _readers(self, point: Point) -> list[tuple[str, int]]:
        """Names of the ops that read a quantized constant, each with the number of the argument."""
        source, reader = point
        found: list[tuple[str, int]] = []
        open_keys = [(source, key) for key in ([reader] if reader else self.graph.nodes[source].readers)]
        while open_keys:
            read, key = open_keys.pop()
            node = self.graph.nodes[key]
            if node.constant:
                open_keys.extend((key, user) for user in node.readers)
            else:
                found.append((node.name, node.inputs.get(read, -1)))
        return found

    def _is_for(self, point: Point, site: Site) -> bool:
        """Whether a site was made for a point, if one value has several."""
        facts = self.facts(point)
        fits = facts.dtype == site.params.dtype and facts.dynamic == site.params.dynamic
        reader = self.graph.nodes[point[1]] if point[1] else None
        # A site names the ops that read it, not the graph's output.
        return fits and (reader is None or reader.op == OUTPUT or not site.readers or reader.name in site.readers)


def read_annotations(
    graph_module: GraphModule, plugin: QuantizerPlugin, names: Mapping[int, OpName], *, qat: bool
) -> Annotations:
    """The annotations of a graph after the quantizer's ``annotate``."""
    specs = read_specs(graph_module)
    nodes = _as_lowered(read_nodes(graph_module, names), specs)
    annotated = dict.fromkeys(reader or source for source, reader in specs)
    by_key = {node.name: node for node in graph_module.graph.nodes}
    refusals = {
        (kind, key): reason
        for kind in ("dynamic", "int8", "int16", "observer")
        for key in annotated
        if (reason := unsupported_reason(plugin, kind, by_key[key]))
    }
    graph = kinds.AnnotatedGraph(nodes, refusals, fusable_of(plugin), describe(plugin), qat)
    ops = {
        nodes[key].name: AnnotatedOp(nodes[key].name, nodes[key].op, _levels(key, specs, graph, levels_of(plugin)))
        for key in annotated
        if not nodes[key].constant
    }
    return Annotations(specs, graph, ops, frozenset(name.name for name in names.values()))


def sites_on(sites: Sequence[Site], annotations: Annotations) -> set[int]:
    """The indices of the sites of a pair that stay quantized with given annotations.

    An activation's site stays if any point, the op that produces the value or one that reads it, still requires it; a
    weight's site stays if the op that reads it still requires it.

    Args:
        sites: of a pair made by the same quantizer from the same capture, such as ``pair.sites``.
        annotations: that quantizer's annotations of the capture, after edits.

    >>> sites_on(pair.sites, pt2qa.overrides.annotations_of(capture, "xnnpack")) == set(range(len(pair.sites)))
    True
    """
    return {index for index, points in annotations.points_at(sites).items() if points or sites[index].nested}


def fusions_in(annotations: Annotations) -> tuple[Edit, ...]:
    """The ``fuse`` edits that are possible in an annotated model, in graph order.

    Args:
        annotations: of a capture, as :func:`pt2qa.overrides.annotations_of` returns them.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU6()).eval()
    >>> annotated = pt2qa.overrides.annotations_of(pt2qa.capture(model, torch.zeros(1, 1, 4, 4)), "xnnpack")
    >>> [edit.ops for edit in fusions_in(annotated)]
    [('0/conv2d', '1/hardtanh')]
    """
    nodes = annotations.graph.nodes
    pairs = annotations.graph.fusable or ()
    edits = [
        Edit("fuse", (nodes[reader].name, node.name))
        for node in nodes.values()
        for reader in node.inputs
        if (nodes[reader].op, node.op) in pairs and not node.constant
    ]
    # Others have more readers, or nothing is rounded in between.
    return tuple(edit for edit in edits if annotations.can_take(edit))


def _as_lowered(nodes: Mapping[str, GraphNode], specs: Specs) -> dict[str, GraphNode]:
    """The nodes, with ``constant`` set as in the program that these specs lead to.

    A value that is computed only from constants is a constant, named after what it was computed from.  But an op that
    reads a rounded constant is an ordinary op, so that reports show its error.
    """
    found: dict[str, GraphNode] = {}
    rounded: set[str] = set()
    for key, node in nodes.items():
        if node.op == OUTPUT:
            found[key] = node
            continue
        sources = list(dict.fromkeys(source for _, source in node.reads))
        fixed = all(found[source].constant for source in sources) if sources else node.constant
        reads_rounded = fixed and any(
            source in rounded or rounds_at(specs, (source, key), nodes) or rounds_at(specs, (source, ""), nodes)
            for source in sources
        )
        constant = fixed and (node.moves or not reads_rounded)
        name = node.name
        if fixed and sources:
            name = found[sources[0]].name if constant else node.owner or name
        if constant and reads_rounded:
            rounded.add(key)
        same = constant == node.constant and name == node.name
        found[key] = node if same else replace(node, constant=constant, name=name)
    return found


def _levels(
    key: str, specs: Mapping[Point, Any], graph: kinds.AnnotatedGraph, offered: Iterable[str]
) -> tuple[str, ...]:
    own = kinds.points_of(key, specs)
    observed = any(kinds.can_observe(point, specs, graph) for point in own)
    possible = {
        "float": any(rounds_at(specs, point, graph.nodes) for point in own),
        "dynamic": kinds.has_static_weight(key, specs, graph),
        "int16": observed,
        "observer": observed,
    }
    allowed = ("float",) if graph.qat else tuple(possible)
    return tuple(kind for kind in offered if kind in allowed and possible[kind] and not graph.refusals.get((kind, key)))


def observing(annotations: Annotations, observer: str) -> tuple[Edit, ...]:
    """One edit: another observer for all activations that it can observe; none if all have it."""
    ops = tuple(name for name, op in annotations.ops.items() if "observer" in op.levels)
    if not ops:
        return ()
    edit = Edit("observer", ops, observer)
    return () if annotations.after(edit) is None else (edit,)
