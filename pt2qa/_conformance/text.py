"""A conformance report as text: how often each property held, and each failure with its reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pt2qa._conformance.rows import ConformanceRow
from pt2qa._report.formats import whole
from pt2qa._report.prose import counted, listed, sections, wrap
from pt2qa._report.ranking import ranked
from pt2qa._report.table import View, draw, table, with_column

if TYPE_CHECKING:
    from pt2qa._conformance.report import ConformanceReport

_WORST_FIRST: Final = ("failed", "passed", "does not apply", "skipped")
_ROWS: Final = (
    View("property", "property", str, 0),
    View("model", "model", str, 0, shrinks_to=16),
    View("outcome", "outcome", str, 5),
    View("why", "why", str, 0, shrinks_to=16),
)


@dataclass(frozen=True, slots=True)
class _Count:
    property: str
    passed: int
    failed: int
    idle: int
    skipped: int


_COUNTS: Final = (
    View("property", "property", str, 0),
    View("passed", "passed", whole, 3),
    View("failed", "failed", whole, 0),
    View("idle", "does not\napply", whole, 1),
    View("skipped", "skipped", whole, 2),
)


def conformance_text(report: ConformanceReport, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide; ``limit`` is for the failures of each property."""
    by_name = sorted(report.rows, key=lambda row: row.property) if sort == "name" else report.rows
    counts, _ = draw(_COUNTS, _counts(tuple(by_name)), width)
    return sections(
        [
            wrap(_title(report), width, indent="  "),
            counts,
            *(_failures(name, rows, limit, width) for name, rows in _failed(tuple(by_name))),
            listed(
                f"Not annotated at all ({len(_bare(report))})", [", ".join(_bare(report))] * bool(_bare(report)), width
            ),
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in conformance_summary(report)),
        ]
    )


def conformance_table(report: ConformanceReport, sort: str, limit: int | None, width: int) -> str:
    """The rows as a table, failures first where ``sort`` is ``worst``, and below it what it leaves out."""
    if sort == "graph":
        return table(_ROWS, report.rows, None, limit, width)
    if sort == "worst":
        return table(_ROWS, sorted(report.rows, key=lambda row: _WORST_FIRST.index(row.outcome)), None, limit, width)
    by = "property" if sort == "name" else sort
    rows = ranked(ConformanceRow, report.rows, by, ties="model")
    return table(with_column(ConformanceRow, _ROWS, by) if by == "seconds" else _ROWS, rows, by, limit, width)


def conformance_summary(report: ConformanceReport) -> list[str]:
    """What it comes to, in sentences."""
    failures = Counter(row.property for row in report.failures)
    outcomes = Counter(row.outcome for row in report.rows)
    if failures:
        properties = ", ".join(f"{name} ({count})" for name, count in failures.most_common())
        verdict = f"Fails in {counted(len(failures), 'property', 'properties')}: {properties}."
    elif outcomes["passed"]:
        verdict = "Passes: nothing failed."
    else:
        verdict = "Shows nothing: no property could be looked at, as the quantizer annotates none of the models."
    return [
        verdict,
        f"Counts: {outcomes['passed']} passed, {outcomes['failed']} failed, {outcomes['does not apply']} do not "
        f"apply, {outcomes['skipped']} skipped, in {report.seconds:.0f} s.",
    ]


def _title(report: ConformanceReport) -> str:
    models = len({row.model for row in report.rows})
    properties = len({row.property for row in report.rows})
    return f"{report.quantizer}: {counted(properties, 'property', 'properties')} on {counted(models, 'model')}"


def _counts(rows: tuple[ConformanceRow, ...]) -> list[_Count]:
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(row.property, Counter())[row.outcome] += 1
    return [
        _Count(name, count["passed"], count["failed"], count["does not apply"], count["skipped"])
        for name, count in found.items()
    ]


def _failed(rows: tuple[ConformanceRow, ...]) -> list[tuple[str, list[ConformanceRow]]]:
    found: dict[str, list[ConformanceRow]] = {}
    for row in rows:
        if row.outcome == "failed":
            found.setdefault(row.property, []).append(row)
    order = list(dict.fromkeys(row.property for row in rows))
    return sorted(found.items(), key=lambda item: order.index(item[0]))


def _failures(name: str, rows: list[ConformanceRow], limit: int | None, width: int) -> str:
    """The failures of one property; models that fail alike stand together."""
    lines = [wrap(f"FAILED {name} ({len(rows)}):", width)]
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row.why, []).append(row.model)
    for why, models in list(groups.items())[:limit]:
        lines.append(wrap(f"  {', '.join(models)}: {why}", width, indent="    "))
    left = 0 if limit is None else max(0, len(groups) - limit)
    return "\n".join([*lines, *([f"  and {left} more"] if left else [])])


def _bare(report: ConformanceReport) -> list[str]:
    return [each.model for each in report.coverage if not each.annotated]
