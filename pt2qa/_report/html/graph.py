"""The graph of modules: the ops of a table in layers, nested as the model's modules are, and the edges between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

from pt2qa._report.base import Report
from pt2qa._report.columns import cell

ORDERS: Final = ("handle", "site")
"""Columns that put the rows of a table in graph order."""

DEEPEST: Final = 100
"""Modules around an op that are told apart; what is deeper is drawn as one."""


@dataclass(frozen=True, slots=True)
class Part:
    """A module or op in a path; a module that other ops interrupt is drawn once for each call, counted from 1."""

    name: str
    is_op: bool = False
    call: int = 1

    @property
    def label(self) -> str:
        return self.name if self.call == 1 else f"{self.name} ({self.call})"


_BETWEEN: Final = ", "
"""Between the names in a column that lists them."""

Path = tuple[Part, ...]


def graph_data(report: Report, others: Sequence[Report]) -> dict[str, Any] | None:
    """The graph of a report's rows.

    The layers of a module are those of the graph that its parts make: a part stands in the layer after the last part
    that it reads from.  Where no report knows what ops read, each part is a layer of its own, in graph order.

    Returns:
        ``modules``: the top of the model; a module has a ``label`` and its ``layers``, lists of modules and ops from
        left to right; an op has a ``label`` and the numbers of its ``rows``.  ``edges``: pairs of ops, each given by
        its first row.  None if the rows are not ops of modules.
    """
    rows = report.on_page("rows")
    columns = {each.name for each in report.columns("rows")}
    by = next((name for name in ORDERS if name in columns), "")
    if not by or not {"name", "module"} <= columns or not any(cell(row, "module") for row in rows):
        return None
    inputs = _inputs([report, *others], report)
    known = {name: place for place, name in enumerate(inputs)}
    names = [str(cell(row, "name")) for row in rows]
    place = {number: (known.get(name, len(known)), cell(rows[number], by)) for number, name in enumerate(names)}
    ops: dict[str, list[int]] = {}
    for number in sorted(place, key=place.__getitem__):
        ops.setdefault(names[number], []).append(number)
    modules = {name: str(cell(rows[numbers[0]], "module")) for name, numbers in ops.items()}
    around = {name: map(Part, module.split(".", DEEPEST) if module else ()) for name, module in modules.items()}
    paths = _by_call({name: (*parts, Part(name, is_op=True)) for name, parts in around.items()})
    edges = _edges(paths, inputs)
    return {
        "modules": _module("", paths, ops, _lifted(edges, paths), ()),
        "edges": [[ops[source][0], ops[target][0]] for source, target in edges],
    }


def _by_call(paths: Mapping[str, Path], depth: int = 0) -> dict[str, Path]:
    """Paths of ops in graph order, where a module that other ops interrupt counts as called again: ``act (2)``."""
    found: dict[str, Path] = {}
    calls: Counter[Part] = Counter()
    for part, names in groupby(paths, key=lambda name: paths[name][depth]):
        calls[part] += 1
        call = replace(part, call=calls[part])
        within = {name: (*paths[name][:depth], call, *paths[name][depth + 1 :]) for name in names}
        found |= within if part.is_op else _by_call(within, depth + 1)
    return found


def _inputs(reports: Iterable[Report], report: Report) -> dict[str, list[str]]:
    """What the ops of a report's model read, by name and in graph order."""
    made_in = getattr(report, "environment", None)
    for each in reports:
        knows = "inputs" in {column.name for column in each.columns("rows")}
        if knows and getattr(each, "environment", None) == made_in and any(cell(row, "inputs") for row in each.rows):
            names = {str(cell(row, "name")): str(cell(row, "inputs")) for row in each.rows}
            most = 1 + max(name.count(_BETWEEN) for name in names)
            return {name: _listed(read, names, most) for name, read in names.items()}
    return {}


def _listed(text: str, known: Container[str], most: int) -> list[str]:
    """The known names in a list as one text; a name holds the separator at most ``most - 1`` times."""
    pieces, found, start = text.split(_BETWEEN), [], 0
    while start < len(pieces):
        tried = ((_BETWEEN.join(pieces[start:end]), end) for end in range(start + most, start, -1))
        name, start = next((each for each in tried if each[0] in known), ("", start + 1))
        found += [name] if name else []
    return found


def _edges(shown: Mapping[str, Path], inputs: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """From the nearest shown ops before each shown op to it."""
    nearest: dict[str, dict[str, None]] = {}
    found = []
    for name, read in inputs.items():
        sources = {source: None for each in read for source in nearest.get(each, ())}
        if name in shown:
            found += [(source, name) for source in sources]
            sources = {name: None}
        nearest[name] = sources
    return found


def _lifted(edges: Iterable[tuple[str, str]], paths: Mapping[str, Path]) -> dict[Path, set[tuple[Part, Part]]]:
    """The edges between the parts of each module, by its path."""
    found: dict[Path, set[tuple[Part, Part]]] = {}
    for source, target in edges:
        ours, theirs = paths[source], paths[target]
        depth = next(depth for depth, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        found.setdefault(ours[:depth], set()).add((ours[depth], theirs[depth]))
    return found


def _module(
    label: str,
    inside: Mapping[str, Path],
    ops: Mapping[str, list[int]],
    edges: Mapping[Path, set[tuple[Part, Part]]],
    path: Path,
) -> dict[str, Any]:
    """A module at a path; one with a single part is drawn as one with it."""
    parts: dict[Part, dict[str, Path]] = {}
    for name, own in inside.items():
        parts.setdefault(own[len(path)], {})[name] = own
    if path and len(parts) == 1:
        (part,) = parts
        if part.is_op:
            return _op(f"{label}/", part.name, ops)
        return _module(f"{label}.{part.label}", inside, ops, edges, (*path, part))
    drawn = {
        part: _op("", part.name, ops) if part.is_op else _module(part.label, within, ops, edges, (*path, part))
        for part, within in parts.items()
    }
    layers = _layers(list(parts), edges.get(path, set())) if edges else [[part] for part in parts]
    return {"label": label, "layers": [[drawn[part] for part in layer] for layer in layers]}


def _op(label: str, name: str, ops: Mapping[str, list[int]]) -> dict[str, Any]:
    return {"label": label + name.rpartition("/")[2], "rows": ops[name]}


def _layers(parts: Sequence[Part], edges: Iterable[tuple[Part, Part]]) -> list[list[Part]]:
    """Parts in layers; in each, from left to right by the mean place of what they read, so that few edges cross.

    Source:
        K. Sugiyama, S. Tagawa, M. Toda: Methods for visual understanding of hierarchical system structures, 1981
    """
    # Imported here: reading and printing reports need no graphs.
    import networkx

    order = {part: number for number, part in enumerate(parts)}
    graph = networkx.DiGraph()
    graph.add_nodes_from(parts)
    graph.add_edges_from(edges)
    place: dict[Part, float] = {}
    layers = []
    for generation in networkx.topological_generations(graph):
        read = {part: [place[source] for source in graph.predecessors(part)] for part in generation}
        middle = {part: sum(places) / len(places) if places else 0.5 for part, places in read.items()}
        layer = sorted(generation, key=lambda part: (middle[part], order[part]))
        place |= {part: (number + 0.5) / len(layer) for number, part in enumerate(layer)}
        layers.append(layer)
    return layers
