"""The report of what changed between two reports of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Annotated, Any, ClassVar, Final, Literal

from pt2qa._report.base import Block, ModelReport, Report, Table
from pt2qa._report.charts import along
from pt2qa._report.prose import counted, decibel, exact, few, number
from pt2qa._report.rows import Column, Row, column
from pt2qa._report.storage import register

Status = Literal["worse", "changed", "gone", "new", "better", "unchanged"]


@dataclass(frozen=True, slots=True, eq=False)
class DiffRow(Row):
    """What became of one row, or of one number of the whole report.

    Args:
        name: of the row, or of the number.
        role: what else identifies the row, such as ``weight``; for an output, which of its numbers.
        status: ``worse`` and ``better`` by more than the tolerance, ``unchanged`` within it, ``changed``: a text, or a
            yes or no, that differs, or a number that came or went; ``new`` and ``gone``: only one of the reports has
            it.
        before, after: the measure in the old and the new report; nan if there is none.
        change: ``after - before``; 0 for equal infinities; nan where a number is missing.
        loss: the same, positive where it got worse.
        note: texts before and after, or why a number is missing.
        unit: of the numbers: ``dB`` or empty.
    """

    shown: ClassVar[tuple[str, ...]] = ("name", "role", "status", "before", "after", "change", "note")

    name: Annotated[str, column(key=True, importance=0, shrinks_to=20)]
    role: Annotated[str, column(key=True, importance=3, optional=True)]
    status: Annotated[Status, column(importance=0)]
    before: Annotated[float, column(importance=2)] = nan
    after: Annotated[float, column(importance=4)] = nan
    change: Annotated[float, column(importance=5)] = nan
    loss: Annotated[float, column(extended=True)] = nan
    note: Annotated[str, column(importance=1, shrinks_to=16, optional=True, extended=True)] = ""
    unit: Annotated[str, column(extended=True)] = ""

    @property
    def place(self) -> str:
        """Name and role."""
        return f"{self.name} ({self.role})" if self.role else self.name

    @property
    def is_silent(self) -> bool:
        """Whether neither report has a number."""
        return isnan(self.before) and isnan(self.after)


@dataclass(frozen=True, slots=True)
class Change:
    """Another difference between the reports: a version, the model, the quantizer, how much data, a setting, a verdict.

    Args:
        name: what it is, e.g. ``torch``, ``fingerprint``, ``samples``.
        before, after: as text.
    """

    name: Annotated[str, column(key=True)]
    before: str
    after: str


@dataclass(frozen=True, slots=True, eq=False)
class BuildRow(Row):
    """One of several reports in time, against the one before.

    Args:
        name: of the build: its folder, or its file.
        value: the first number of the whole report that is judged, such as its SQNR; nan without one.
        moved: by how much it is larger than before; nan at the first.
        worse, better: how many rows are, by more than the tolerance.
        row: the row that lost most; empty if none did.
        loss: how much, in the unit of the measure; nan if none did.
        different: what else changed, such as a version.
        number, unit: name and unit of the number; empty without one.
    """

    name: Annotated[str, column("build", key=True, importance=0)]
    value: Annotated[float, column(importance=0)]
    moved: Annotated[float, column(importance=1)]
    worse: Annotated[int, column(importance=2)]
    better: Annotated[int, column(importance=4)]
    row: Annotated[str, column("lost most", importance=2, shrinks_to=16)]
    loss: Annotated[float, column(importance=3)]
    different: Annotated[str, column(importance=5, shrinks_to=16)]
    number: Annotated[str, column(extended=True)] = ""
    unit: Annotated[str, column(extended=True)] = ""


_ORDER: Final = ("worse", "changed", "gone", "new", "better")
"""The statuses that ``worst`` shows, in this order."""


@register("diff", schema=3, oldest=2)
@dataclass(frozen=True, slots=True, repr=False)
class ReportDiff(ModelReport):
    """What changed from an old report to a new one of the same kind, row by row.

    Tables and texts show ``worst``: what changed, largest loss first; ``graph``: all rows, in the order of the new
    report, with removed rows where they were; or all by ``name`` or a column.

    What :func:`pt2qa.diff` returns.  Its other fields are those of :class:`pt2qa.report.ModelReport`.

    Args:
        rows: one for each row of either report, in that order.
        figures: numbers of the whole report, such as the SQNR of each output.
        changes: what else differs.
        of: the kind of both reports, e.g. ``layers``.
        measure: the table and column that was compared, e.g. ``rows.isolated_sqnr``.
        worst_is: which values are the worst: ``smallest``, ``largest``, ``either`` if rows differ in that, or
            ``unknown`` for a user's metric that does not say; empty for texts, and for yes and no.
        unit: of the measure: ``dB`` or empty.
        tolerance: change up to which a number counts as unchanged, in that unit.
        builds: all reports in time, where there are more than two; see :func:`pt2qa.report.history`.
    """

    heading: ClassVar[str] = "What changed"
    ties: ClassVar[str] = "loss"

    rows: tuple[DiffRow, ...]
    figures: tuple[DiffRow, ...]
    changes: tuple[Change, ...]
    of: str
    measure: str
    worst_is: str
    unit: str
    tolerance: float
    builds: Annotated[tuple[BuildRow, ...], column(since=3)] = ()

    def having(self, status: Status) -> tuple[DiffRow, ...]:
        """The rows of one status, in order."""
        return tuple(row for row in self.rows if row.status == status)

    def _headline(self) -> str:
        counts = ", ".join(f"{len(self.having(status))} {status}" for status in ("worse", "better"))
        return f"<ReportDiff of {self.of}, {self.model}, {self.quantizer}: {counts} of {len(self.rows)} rows>"

    def _title(self, sort: str) -> str:
        measure = self.measure.removeprefix("rows.")
        ways = {
            "smallest": ", smaller is worse",
            "largest": ", larger is worse",
            "unknown": ", which does not say what is worse",
        }
        which = ways.get(self.worst_is, "")
        allowed = f", tolerance {exact(self.tolerance, self.unit)}" if self.worst_is else ""
        how = self._how(sort, "what changed, greatest loss first")
        subject = f"{self.model}, quantized by {self.quantizer}" if self.quantizer else self.model
        return f"{subject}: {self.of}, old → new: {measure}{which}{allowed}; {how}"

    def _lead(self) -> Sequence[str]:
        if not self.rows:
            return ["Neither report has a row."]
        counts = {status: len(self.having(status)) for status in (*_ORDER, "unchanged")}
        total, silent = counted(len(self.rows), "row"), len(self._silent())
        if silent == len(self.rows):
            return ["No row has a number in either report."]
        if counts["unchanged"] == len(self.rows) and not silent:
            return [f"Nothing changed in {total}."]
        counts["unchanged"] -= silent
        counts["without a number before and now"] = silent
        return [f"Of {total}: {', '.join(f'{count} {status}' for status, count in counts.items() if count)}."]

    def charts(self, others: Sequence[Report]) -> list[dict[str, Any]]:
        """Quality from build to build, in dB."""
        if not self.builds or self.builds[0].unit != "dB":
            return []
        about = f"{self.builds[0].number}, from the oldest build to the newest."
        return [along("Builds", about, [("value", "value")]) | {"table": "builds", "x_title": "builds"}]

    def _before(self) -> Iterator[Block]:
        if self.builds:
            first, *_, last = self.builds
            by = f", by {first.number}" if first.number else ""
            yield Table(self.shown("builds"), self.builds, f"Builds{by}; below, {first.name} → {last.name}")
        yield _lines("Whole report", [_figure_line(row) for row in self.figures])
        yield _lines("Also different", [f"{each.name}: {each.before} → {each.after}" for each in self.changes])

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        return self._table(sort, limit, width) if self._changed() or sort != "worst" else ""

    def _ordered(self, sort: str) -> tuple[Sequence[DiffRow], str | None]:
        return (self._changed(), None) if sort == "worst" else Report._ordered(self, sort)

    def meant(self, column: Column, key: Sequence[str] = ()) -> Column:
        if column.name not in ("before", "after", "change") or column.type == "text":
            return column
        show = decibel if self.unit == "dB" else number
        shown = (lambda value: f"{'+' * (value > 0)}{show(value)}") if column.name == "change" else show
        worse = "smaller" if column.name != "change" and self.worst_is == "smallest" else column.worse
        return replace(column, show=shown, header=f"{column.name}\n{self.unit}".rstrip(), unit=self.unit, worse=worse)

    def _summary(self) -> Sequence[str]:
        found = {
            status.capitalize(): [row.place for row in self._changed() if row.status == status]
            for status in ("worse", "gone", "new")
        }
        found["Without a number before and now"] = self._silent()
        found["Without a number now"] = [
            row.place for row in self.having("changed") if isnan(row.after) > isnan(row.before)
        ]
        return [f"{what}: {few(names)}." for what, names in found.items() if names]

    def _changed(self) -> tuple[DiffRow, ...]:
        """The rows that changed, by status, largest loss first."""
        rows = [row for row in self.rows if row.status in _ORDER]
        return tuple(
            sorted(rows, key=lambda row: (_ORDER.index(row.status), 0.0 if isnan(row.loss) else -abs(row.loss)))
        )

    def _silent(self) -> list[str]:
        """The rows without a number in either report; empty for a text measure."""
        same = self.having("unchanged") if self.worst_is else ()
        return [row.place for row in same if row.is_silent]


def _figure_line(row: DiffRow) -> str:
    show = decibel if row.unit == "dB" else number
    name = f"{row.role} of {row.name}" if row.role else row.name
    change = f"{show(row.before)} → {show(row.after)} {row.unit}".rstrip()
    return f"{name}: {change}, {row.status}{f', {row.note}' if row.note else ''}"


def _lines(title: str, entries: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {entry}" for entry in entries)]) if entries else ""
