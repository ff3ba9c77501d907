"""One section of the page for each report: its verdict, charts, tables and notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan
from typing import Any, Final, Literal

from pt2qa._candidates.report import CandidateReport
from pt2qa._check.report import Finding, Findings
from pt2qa._check.text import counted_severities
from pt2qa._layers.report import LayerReport
from pt2qa._layers.text import LOW_SQNR
from pt2qa._profile.report import Profile
from pt2qa._reconfigure.report import Reconfiguration
from pt2qa._report.base import Report, RowReport
from pt2qa._report.diffs.measures import tables_of
from pt2qa._report.html.charts import along_graph, candidate_bars, reconfiguration_curve, sensitivity_bars
from pt2qa._report.html.histograms import layer_histograms
from pt2qa._report.html.tables import table_data
from pt2qa._report.prose import unpaired_entries
from pt2qa._report.rows import Environment
from pt2qa._report.set_apart import SetApart, failures
from pt2qa._report.storage import kind_of
from pt2qa._sensitivity.report import SensitivityReport

Verdict = Literal["good", "bad", "warning", "plain"]

_TITLES: Final = {
    "layers": "Layers",
    "weights": "Weights",
    "bad-cases": "Bad cases",
    "sensitivity": "Sensitivity",
    "reconfiguration": "Reconfiguration",
    "candidates": "Candidates",
    "findings": "Findings",
    "profile": "Profile",
    "profile-diff": "Two profiles",
    "annotations": "Annotations",
}
_LEFT_OUT: Final = frozenset({"parts", "data", "cases", "unpaired"})
"""Fields whose rows serve the report itself, or that the page shows as a list."""

_TABLES: Final = {"curve": "Curve", "stages": "Stages", "candidates": "Each candidate", "rankings": "Rankings"}


@dataclass(frozen=True, slots=True)
class Rule:
    """The findings of one rule.

    Args:
        name: its id.
        severity: of its findings.
        title: what it looks for.
        rows: the findings.
        fix: what to do, where that is the same for all; else empty.
    """

    name: str
    severity: str
    title: str
    rows: tuple[Finding, ...]
    fix: str


@dataclass(frozen=True, slots=True)
class Section:
    """What the page shows of one report.

    Args:
        id: of the element, to link to.
        title: what kind of report it is.
        model: the model's class name.
        subject: the model, and the quantizer.
        verdict: whether it is good, bad, in between, or says nothing of the kind.
        lines: what to look at, in sentences; the first is the verdict in words.
        charts: for the scripts, as :mod:`pt2qa._report.html.charts` makes them.
        tables: for the scripts, as :mod:`pt2qa._report.html.tables` makes them.
        rules: findings by rule.
        notes: what else the reader must know.
        unpaired: nodes without a partner, in words.
        code: text to paste.
        environment: versions and fingerprint; None where the report has none.
    """

    id: str
    title: str
    model: str
    subject: str
    verdict: Verdict
    lines: tuple[str, ...]
    charts: tuple[dict[str, Any], ...]
    tables: tuple[dict[str, Any], ...]
    rules: tuple[Rule, ...]
    notes: tuple[str, ...]
    unpaired: tuple[str, ...]
    code: str
    environment: Environment | None


def sections_of(reports: Sequence[Report]) -> list[Section]:
    """One for each report, in the order given."""
    for report in reports:
        kind_of(report)  # what is no report is refused before anything is drawn
    profiles = [report for report in reports if isinstance(report, Profile)]
    return [_section(f"report-{index}", report, profiles) for index, report in enumerate(reports, 1)]


def _section(ident: str, report: Report, profiles: Sequence[Profile]) -> Section:
    charts: list[dict[str, Any]] = []
    for kind, draw in _CHARTS:
        if isinstance(report, kind):
            charts += draw(report)
    if isinstance(report, LayerReport):
        charts += layer_histograms(report, profiles)
    names = [name for name in tables_of(type(report)) if name not in _LEFT_OUT and getattr(report, name)]
    shown = [] if isinstance(report, Findings) else names
    kind_name = kind_of(report).name
    return Section(
        id=ident,
        title=_TITLES.get(kind_name, kind_name.replace("-", " ").capitalize()),
        model=getattr(report, "model", ""),
        subject=_subject(report),
        verdict=_verdict(report),
        lines=_lines(report),
        charts=tuple(charts),
        tables=tuple(table_data(report, name, _title(name, len(shown))) for name in shown),
        rules=_rules(report) if isinstance(report, Findings) else (),
        notes=tuple(getattr(report, "notes", ())),
        unpaired=tuple(unpaired_entries(getattr(report, "unpaired", ()))),
        code=report.code if isinstance(report, Reconfiguration) else "",
        environment=getattr(report, "environment", None),
    )


_CHARTS: Final[tuple[tuple[type[Any], Callable[[Any], list[dict[str, Any]]]], ...]] = (
    (LayerReport, along_graph),
    (SensitivityReport, sensitivity_bars),
    (CandidateReport, candidate_bars),
    (Reconfiguration, reconfiguration_curve),
)


def _title(field: str, fields: int) -> str:
    if field == "rows":
        return "All rows" if fields > 1 else ""
    return _TABLES.get(field, field.replace("_", " ").capitalize())


def _subject(report: Report) -> str:
    model, quantizer = getattr(report, "model", ""), getattr(report, "quantizer", "")
    side = f", {report.side}" if isinstance(report, Profile) else ""
    return f"{model} · {quantizer}{side}" if quantizer else f"{model}{side}"


def _lines(report: Report) -> tuple[str, ...]:
    if isinstance(report, Reconfiguration):
        return (report.verdict,)
    if isinstance(report, Findings):
        return (f"{', '.join(counted_severities(report))}.", *report.summary().splitlines())
    return tuple(report.summary().splitlines()) if isinstance(report, RowReport) else ()


def _verdict(report: Report) -> Verdict:
    found: Sequence[SetApart] = getattr(report, "set_apart", ())
    # Of several candidates one that fails leaves the others as good as they are.
    if any(not each.candidate for each in failures(found)):
        return "bad"
    if isinstance(report, LayerReport):
        if not report.outputs:
            return "plain"
        # What has no number, an output or a batch, must not hide behind what has one.
        silent = found or any(isnan(row.sqnr) for row in report.outputs)
        return "bad" if report.sqnr < LOW_SQNR else "warning" if silent else "good"
    if isinstance(report, Findings):
        return "bad" if report.error_count else "warning" if report.warning_count else "good"
    if isinstance(report, Reconfiguration):
        return "good" if report.met else "bad"
    return "warning" if found else "plain"


def _rules(report: Findings) -> tuple[Rule, ...]:
    titles = {outcome.rule: outcome.title for outcome in report.rules}
    found = []
    for name, group in groupby(report.rows, key=lambda row: row.rule):
        rows = tuple(group)
        fixes = {row.fix for row in rows}
        fix = rows[0].fix if len(fixes) == 1 else ""
        found.append(Rule(name, rows[0].severity, titles.get(name, ""), rows, fix))
    return tuple(found)
