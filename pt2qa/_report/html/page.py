"""The page: sections, their data as JSON, styles and scripts in one file."""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from itertools import groupby
from math import isfinite
from typing import Any, Final

from pt2qa._decibels import LOW_SQNR
from pt2qa._grouping import grouped
from pt2qa._printable import clean_lines
from pt2qa._report.atomic import write_atomic
from pt2qa._report.base import UNDIAGNOSED, Grade, Report, Step
from pt2qa._report.rows import Column, Environment, cell, descriptions, tables_of, unpaired_entries
from pt2qa._report.storage import kind_of
from pt2qa.errors import ReportError

SEVERITY: Final[tuple[Grade, ...]] = ("bad", "warning", "good", "plain")
"""Grades in the order of a page's sections."""


@dataclass(frozen=True, slots=True)
class Section:
    """What the page shows for one report; the first of its lines is the verdict in words.

    ``id`` is that of the element, to link to; charts, graph and tables are data for the scripts.
    """

    id: str
    report: Report
    verdict: Grade
    lines: tuple[str, ...]
    advice: tuple[Step, ...] | None
    charts: tuple[dict[str, Any], ...]
    graph: dict[str, Any] | None
    tables: tuple[dict[str, Any], ...]


def sections_of(reports: Sequence[Report], profiles: Sequence[Report] = ()) -> list[Section]:
    """One for each report, but not for profiles: what says what to do, then by grade, worst first, then as given."""
    for report in reports:
        kind_of(report)  # anything that is not a report is rejected before drawing starts
    others = (*reports, *profiles)
    found = [_section(f"report-{index}", report, others) for index, report in enumerate(reports, 1)]
    return sorted(found, key=lambda section: (section.advice is None, SEVERITY.index(section.verdict)))


def _section(ident: str, report: Report, others: Sequence[Report]) -> Section:
    parts = dict.fromkeys((*report.titles, *tables_of(type(report))))
    shown = [name for name in parts if name not in report.served and getattr(report, name)]
    shown = [] if report.groups() is not None else shown
    told = any(
        each.advice() is not None for each in others if getattr(each, "model", "") == getattr(report, "model", "")
    )
    return Section(
        id=ident,
        report=report,
        verdict=report.grade(),
        lines=tuple(line for line in report.lines() if not told or line != UNDIAGNOSED),
        advice=report.advice(),
        charts=tuple(report.charts(others)),
        graph=graph_data(report, others) if "rows" in shown else None,
        tables=tuple(table_data(report, name, report.titles.get(name) or _title(name, len(shown))) for name in shown),
    )


def _title(field: str, fields: int) -> str:
    if field == "rows":
        return "All rows" if fields > 1 else ""
    return field.replace("_", " ").capitalize()


def table_data(report: Report, part: str, title: str) -> dict[str, Any]:
    """One table of a report by column: the columns of printed tables come first, the others on request.

    Returns:
        ``name`` (the field), ``title``, ``size`` (number of rows), ``worst`` (the rows' numbers, worst first; null if
        rows are not ranked), ``by`` (the column that ranks them, or null) and ``columns``: ``key`` as in pandas and
        CSV, ``title``, ``about`` (what it means), ``number`` (whether it sorts by value), ``shown`` (by default, or on
        request), ``worse`` (which values are), ``low`` (values below it are marked, or null), ``values``, and
        ``texts``, null if they equal the values.
    """
    rows = report.on_page(part)
    shown = {each.name: each for each in report.shown(part)}
    others = [each for each in report.columns(part) if each.name not in shown]
    about = descriptions(report.row_type(part))
    columns = [
        {**_column(each, rows, each.name in shown), "about": about.get(each.name, "")}
        for each in (*shown.values(), *others)
    ]
    ordered, by = report.worst_first(part)
    number = {id(row): index for index, row in enumerate(rows)}
    first = [number.pop(id(row)) for row in ordered if id(row) in number]
    worst = [*first, *number.values()]
    found = {"name": part, "title": title, "size": len(rows), "by": by, "columns": columns}
    return {**found, "worst": None if worst == sorted(worst) else worst}


def _column(column: Column, rows: Sequence[Any], shown: bool) -> dict[str, Any]:
    cells = [cell(row, column.name) for row in rows]
    texts = [column.show(value) for value in cells]
    # JSON lacks numbers that are not finite: they are the texts nan, inf and -inf.
    plain = [str(value) if isinstance(value, float) and not isfinite(value) else value for value in cells]
    values = texts if column.type in ("shape", "names") else plain
    return {
        "key": column.name,
        "title": column.title,
        "number": bool(cells) and all(isinstance(value, (int, float)) for value in cells),
        "shown": shown and not (texts and {*texts} <= {"nan", ""}),
        "worse": column.worse,
        "low": LOW_SQNR if column.unit == "dB" and column.worse == "smaller" else None,
        "values": values,
        "texts": None if texts == values else texts,
    }


def write_html(reports: Report | Sequence[Report], path: str | os.PathLike[str]) -> None:
    """Write reports as one HTML file that opens offline, to attach to a build or to send.

    What to do comes first, then the verdicts, then a section for each report, the worst first: charts, tables to sort
    and filter, and notes.  A layer report shows histograms of its worst layers if profiles of the same model are among
    the reports.

    Args:
        reports: any reports of :mod:`pt2qa`, of one model or of several.
        path: the file, written atomically.

    Raises:
        ReportError: there is no report, one is of an unregistered kind, or the file cannot be written.

    >>> from pt2qa.report import Environment, WeightReport
    >>> report = WeightReport((), (), notes=(), quantizer="xnnpack", model="Net", environment=Environment.here(""))
    >>> write_html(report, "/nowhere/report.html")
    Traceback (most recent call last):
    pt2qa.errors.ReportError: cannot write /nowhere/report.html: the folder /nowhere does not exist; create it first
    """
    write_atomic(path, html_page(reports))


def html_page(reports: Report | Sequence[Report], profiles: Sequence[Report] = ()) -> str:
    """The text of the page that :func:`write_html` writes; from the profiles, only histograms are drawn."""
    given = [reports] if isinstance(reports, Report) else list(reports)
    if not given:
        raise ReportError("a page needs at least one report, got none")
    sections = sections_of(given, profiles)
    models = [getattr(each.report, "model", "") for each in sections]
    data = {each.id: _data(each) for each in sections}
    return rendered(
        "page.html.jinja",
        ("start.js", "tables.js", "charts.js", "graph.js", "page.js"),
        data,
        title=", ".join(dict.fromkeys(filter(None, models))) or "Reports",
        sections=sections,
        environments=_environments(sections),
        facts=[f.name for f in fields(Environment)],
        unpaired_entries=unpaired_entries,
    )


def _data(section: Section) -> dict[str, Any]:
    report = section.report
    of = (getattr(report, "model", ""), getattr(getattr(report, "environment", None), "fingerprint", ""))
    said = {"heading": f"{report.heading}, {report.subject()}", "chartless": report.chartless, "model": " ".join(of)}
    return {"tables": section.tables, "charts": section.charts, "graph": section.graph, **said}


def rendered(template: str, scripts: Sequence[str], data: Any, **parts: Any) -> str:
    """A page from a template, with its data, styles and scripts."""
    # Imported here: reading and printing reports need no template engine.
    from jinja2 import Environment as Templates
    from jinja2 import StrictUndefined

    templates = Templates(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    packaged = {"style": _packaged("page.css"), "scripts": [_packaged(name) for name in scripts]}
    page = templates.from_string(_packaged(template)).render(data=_packed(_cleaned(data)), **packaged, **parts)
    return clean_lines(page)


def _packaged(name: str) -> str:
    return files("pt2qa._report.html").joinpath(name).read_text(encoding="utf-8")


def _packed(data: Any) -> str:
    """Compressed JSON as base64: two profiles of 2,000 ops would be 12 MB, and base64 cannot close an HTML element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")


def _cleaned(data: Any) -> Any:
    if isinstance(data, str):
        return clean_lines(data)
    if isinstance(data, dict):
        return {key: _cleaned(value) for key, value in data.items()}
    return [_cleaned(item) for item in data] if isinstance(data, list | tuple) else data


def _environments(sections: Sequence[Section]) -> list[tuple[Environment, list[Section]]]:
    """Each environment once, with the reports that were made in it."""
    made = ((getattr(section.report, "environment", None), section) for section in sections)
    return list(grouped((made_in, section) for made_in, section in made if made_in is not None).items())


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
    ops = grouped((names[number], number) for number in sorted(place, key=place.__getitem__))
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
