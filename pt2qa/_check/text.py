"""Findings as text: grouped by rule, errors first, with what to do."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from pt2qa._report.prose import by_reason, counted, listed, sections, wrap
from pt2qa._report.ranking import ranked
from pt2qa._report.table import View, table, with_column

if TYPE_CHECKING:
    from pt2qa._check.report import Finding, Findings

SEVERITIES: Final = ("error", "warning", "note")
"""The worst first."""


def findings_text(report: Findings, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide."""
    return sections(
        [
            wrap(f"Check of {_subject(report)}: {', '.join(counted_severities(report))}", width, indent="  "),
            *(_group(report, rule, list(rows), limit, width) for rule, rows in _groups(report, sort)),
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in findings_summary(report)),
        ]
    )


def findings_table(report: Findings, sort: str, limit: int | None, width: int) -> str:
    """The findings as a table, and below it what it leaves out."""
    from pt2qa._check.report import Finding

    as_given = sort in {"worst", "graph"}
    rows = tuple(report.rows) if as_given else ranked(Finding, report.rows, sort, ties="rule")
    views = _VIEWS if as_given else with_column(Finding, _VIEWS, sort)
    return table(views, rows, None if as_given else sort, limit, width)


def findings_summary(report: Findings) -> list[str]:
    """What was looked at, what was not, and why not."""
    clear = sum(rule.outcome == "clear" for rule in report.rules)
    idle = [rule for rule in report.rules if rule.outcome == "not applied"]
    silenced = sum(rule.silenced for rule in report.rules)
    looked = f"Looked at {', '.join(report.checked) or 'nothing'}. {counted(clear, 'rule')} found nothing"
    lines = [f"{looked}, {len(idle)} not applied, {counted(silenced, 'finding')} silenced."]
    lines += [f"Not applied, {reason}." for reason in by_reason((rule.rule, rule.reason) for rule in idle)]
    failed = (f"{rule.rule}: {rule.reason}" for rule in report.rules if rule.outcome == "failed")
    return [*lines, *(f"Failed, please report it: {text}" for text in failed)]


def counted_severities(report: Findings) -> list[str]:
    """``1 error``, ``2 warnings``, ``0 notes``."""
    return [counted(report.count(severity), severity) for severity in SEVERITIES]


_VIEWS: Final = (
    View("severity", "severity", str, 0),
    View("rule", "rule", str, 0),
    View("name", "name", str, 0, shrinks_to=20),
    View("source", "source", str, 2, shrinks_to=12),
    View("why", "why", str, 0, shrinks_to=20),
    View("fix", "fix", str, 1, shrinks_to=20),
)


def _subject(report: Findings) -> str:
    return f"{report.model} with {report.quantizer}" if report.quantizer else report.model


def _groups(report: Findings, sort: str) -> list[tuple[str, list[Finding]]]:
    from pt2qa._check.report import Finding

    groups = [(rule, list(rows)) for rule, rows in groupby(report.rows, key=lambda row: row.rule)]
    if sort in {"worst", "graph"}:
        return groups
    return [(rule, list(ranked(Finding, rows, sort, ties="rule"))) for rule, rows in groups]


def _group(report: Findings, rule: str, rows: list[Finding], limit: int | None, width: int) -> str:
    """The findings of one rule: what it is about, the places, what to do."""
    title = next((outcome.title for outcome in report.rules if outcome.rule == rule), "unknown to this report")
    shown = rows if limit is None else rows[:limit]
    lines = [wrap(f"{rows[0].severity.upper()} {rule} ({len(rows)}): {title}", width, indent="  ")]
    one_fix = len({row.fix for row in rows}) == 1
    for (why, fix), alike in groupby(shown, key=lambda row: (row.why, row.fix)):
        places = ", ".join(_place(row) for row in alike)
        lines.append(wrap(f"  {places}: {why}" if places else f"  {why}", width, indent="    "))
        lines += [] if one_fix else [wrap(f"    -> {fix}", width, indent="       ")]
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more")
    lines += [wrap(f"  -> {rows[0].fix}", width, indent="     ")] if one_fix else []
    return "\n".join(lines)


def _place(row: Finding) -> str:
    return f"{row.name} ({row.source})" if row.name and row.source else row.name or row.source
