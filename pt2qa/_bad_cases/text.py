"""A search for bad cases as text: what was searched, the rankings, the labels, and last what to look at."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Final

from pt2qa._report.formats import index, number, share, whole
from pt2qa._report.prose import counted, listed, sections, wrap
from pt2qa._report.ranking import ranked
from pt2qa._report.set_apart import about_faults, apart_entries
from pt2qa._report.table import View, table, with_column

if TYPE_CHECKING:
    from pt2qa._bad_cases.report import BadCases, CaseRow, LabelCounts, Ranking

UNITS: Final = {"sqnr": " dB", "kl": " nats"}
"""What to write after a number."""

VIEWS: Final = (
    View("metric", "metric", str, 0),
    View("output", "output", str, 8, shrinks_to=12),
    View("rank", "rank", whole, 0),
    View("value", "value", number, 0),
    View("batch", "batch", whole, 6),
    View("sample", "sample\nin batch", index, 5),
    View("index", "index", whole, 7),
    View("note", "note", str, 1, shrinks_to=16),
)
"""What a table shows, in this order; the least important goes first when the screen is narrow."""


def cases_text(report: BadCases, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide."""
    return sections(
        [
            wrap(_title(report, sort), width, indent="  "),
            cases_table(report, sort, limit, width),
            listed("Labels", [_label_line(counts) for counts in report.labels], width),
            listed(f"Not finite, or empty ({len(report.set_apart)})", apart_entries(report.set_apart), width),
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in cases_summary(report)),
        ]
    )


def cases_table(report: BadCases, sort: str, limit: int | None, width: int) -> str:
    """The rows as a table, and below it what it leaves out."""
    # Imported here: the module of the rows imports this one.
    from pt2qa._bad_cases.report import CaseRow

    rows = report.rows
    if sort == "graph":
        rows = tuple(sorted(rows, key=lambda row: row.index))
    elif sort == "name":
        rows = tuple(sorted(rows, key=lambda row: row.output))
    elif sort != "worst":
        rows = ranked(CaseRow, rows, sort, ties=sort)
    views: tuple[View, ...] = VIEWS if any(row.note for row in rows) else VIEWS[:-1]
    if sort not in {"worst", "graph", "name"}:
        views = with_column(CaseRow, views, sort)
    return table(views, rows, None, limit, width)


def cases_summary(report: BadCases) -> list[str]:
    """What to look at, in sentences."""
    found = [_about(report, ranking) for ranking in report.rankings]
    return [*about_faults(report.set_apart, report.steps), *found, _advice(report)]


def _title(report: BadCases, sort: str) -> str:
    how = {"worst": "worst first", "graph": "in the loader's order", "name": "by output"}.get(sort, f"by {sort}")
    read = f"{counted(report.samples, 'sample')} in {counted(report.steps, 'batch', 'batches')}"
    kept = counted(len(report.cases), "bad case")
    return f"{report.model}, quantized by {report.quantizer}: {kept} of {read}, {how}"


def _label_line(counts: LabelCounts) -> str:
    rates = [
        share(right / counts.targets) if counts.targets else "-" for right in (counts.ref_right, counts.quant_right)
    ]
    return (
        f"{counts.output}: {counted(counts.targets, 'target')}, reference right in {counts.ref_right} ({rates[0]} %), "
        f"quantized in {counts.quant_right} ({rates[1]} %); {counts.lost} lost, {counts.gained} gained"
    )


def _about(report: BadCases, ranking: Ranking) -> str:
    which = f"{ranking.metric} of {ranking.output}"
    rows = [row for row in report.rows if (row.metric, row.output) == (ranking.metric, ranking.output)]
    missing = "".join(f" {what}." for what in (_broken(ranking), _without_number(ranking)) if what)
    if not rows:
        return f"{which}: no bad case.{missing}"
    worst = rows[0]
    unit = UNITS.get(ranking.metric, "")
    what = "no number" if isnan(worst.value) else f"{number(worst.value)}{unit}"
    mean = "" if isnan(ranking.mean) else f"; the mean of {ranking.values} is {number(ranking.mean)}{unit}"
    return f"{which}: worst is {_place(worst)}, {what}{mean}.{missing}"


def _place(row: CaseRow) -> str:
    if row.sample < 0:
        return f"batch {row.batch} as a whole"
    return f"sample {row.index} (batch {row.batch}, place {row.sample})"


def _broken(ranking: Ranking) -> str:
    if not ranking.broken:
        return ""
    return f"{ranking.broken} NaN or infinite in the quantized model only, ranked worst of all"


def _without_number(ranking: Ranking) -> str:
    if not ranking.without_number:
        return ""
    return f"{ranking.without_number} without a number ({ranking.reason or 'nan'}), ranked last"


def _advice(report: BadCases) -> str:
    if not report.cases:
        return "No case was kept."
    return "Look where they lose accuracy: pt2qa.compare_layers(pair, report.batches())."
