"""What every report can do.  A kind of report overrides the methods below :class:`Report`'s public ones;
everything else follows from its fields.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pt2qa._printable import clean, clean_lines, question
from pt2qa._report.atomic import write_atomic
from pt2qa._report.charts import Runs
from pt2qa._report.prose import counted, listed, sections, wrap
from pt2qa._report.rows import (
    Column,
    Count,
    Environment,
    Unpaired,
    column_called,
    columns_of,
    custom_column,
    custom_names,
    derived_of,
    numbers_of,
    shown_columns,
    tables_of,
    unpaired_entries,
)
from pt2qa._report.set_apart import DataHealth, InputRange, SetApart, about_data, apart_entries, failures
from pt2qa._report.storage import save
from pt2qa._report.table import ORDERS, csv_text, frame, order_of, ranked, screen_width, table, with_column
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

Grade = Literal["good", "bad", "warning", "plain"]
FILE_WIDTH: Final = 120
"""Characters in a line of a text file."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A title and its entries; a text shows the first ones and counts the rest."""

    title: str
    entries: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """An additional table of a text; ``by`` is the column it is sorted by, and a limit of None shows all rows."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""
    by: str | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Findings that belong together; a page shows them collapsed.

    The rows have ``name``, ``source``, ``why`` and ``fix``; the group has a ``fix`` if it is the same for all.
    """

    name: str
    severity: str
    title: str
    rows: tuple[Any, ...]
    fix: str


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, for the first screen of a page: what is wrong, where, and what the remedy gave when measured.

    ``name`` is empty for the whole model, ``source``, the line of the user's code, if it is not known.
    """

    what: str
    name: str
    source: str
    why: tuple[str, ...]
    remedy: str
    gain: str


Block = str | Listing | Table

UNDIAGNOSED: Final = (
    "What each layer costs the output is not measured here: pt2qa.diagnose finds the causes, and measures what their "
    "remedies give."
)
"""What a report of single values says of a poor model, on its own; a page with the diagnosis leaves it out."""


class Report:
    """Facts that an analysis found.  Frozen; printing it gives text that fits the terminal.

    ``print(report)`` shows it, ``report.save(path)`` saves it, ``pt2qa.load(path)`` loads it.  A kind of report
    is a frozen dataclass under :func:`pt2qa.report.register`, whose field ``rows`` holds rows of one class.

    Attributes:
        kind: its name in files, such as ``layers``.
        schema, oldest: the version of its fields, and the oldest that is still read.
        heading: its name on pages, such as ``Layers``; derived from the kind if not set.
        usual_measures: the columns that say how good a row is; the first one measured is used. A column of another
            table is written ``table.column``.
        ties: the column that decides between rows that are equally bad.
        verdict: one sentence, after what is wrong with the data, if the kind has a field for it.
        code: text to paste, if the kind has a field for it.
        next_command: what to type next, if the kind has a field for it.
        served: tables that a page does not show as tables: they are internal, or shown as a list.
        titles: what pages write above tables, in their order, where the fields' own names and order would not do.
        chartless: what a page says in a row, if none of its rows has a chart.
        inherited_since: the schemas that introduced fields of a base.
        one_run: the fields in which reports must agree to be merged.
        merges_in: the module whose ``merged(reports, metrics)`` makes one report of several, from their field ``sums``.
        instead_of_merging: for kinds that do not add up, what to do instead.
    """

    __slots__ = ()

    kind: ClassVar[str]
    schema: ClassVar[int]
    oldest: ClassVar[int]
    heading: ClassVar[str]
    usual_measures: ClassVar[tuple[str, ...]] = ()
    ties: ClassVar[str] = "sqnr"
    served: ClassVar[frozenset[str]] = frozenset({"unpaired"})
    titles: ClassVar[Mapping[str, str]] = {}
    chartless: ClassVar[str] = ""
    inherited_since: ClassVar[Mapping[str, int]] = {}
    one_run: ClassVar[tuple[str, ...]] = ("model", "quantizer")
    merges_in: ClassVar[str] = ""
    instead_of_merging: ClassVar[str] = ""
    rows: tuple[Any, ...]

    # -- for people ----------------------------------------------------------------------------------------------------

    def text(self, *, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The whole report as ``print`` shows it: header, tables, and finally what to look at.

        Args:
            sort: ``worst``, ``graph``, ``name`` or a column, by its name or its header.
            limit: rows a table shows; None for all.
            width: of the screen, in characters; None: the terminal's, or 100 without one.

        Raises:
            ReportError: there is no such column, or the limit is negative.
        """
        sort, columns = self.order(sort), screen_width(width)
        above = [self._title(sort), "\n".join(self._data()), *self._ran(), *self._lead(), *self._before()]
        below = [*self._after(limit), "\n".join(self._summary())]
        head, foot = ([_laid_out(part, columns) for part in parts] for parts in (above, below))
        return clean_lines(sections([*head, self._body(sort, limit, columns), *foot]))

    def table(self, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The rows as a table: ``worst`` first, in ``graph`` order, by ``name`` or by any column.

        Arguments and errors are those of :meth:`text`.
        """
        return clean_lines(self._table(self.order(sort), limit, screen_width(width)))

    def summary(self) -> str:
        """What is wrong with the data, then what to look at, in sentences that state their thresholds."""
        return "\n".join(map(clean, [*self._faults(), *self._summary()]))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return clean(self._headline())

    def _repr_html_(self) -> str:
        """What Jupyter shows: sentences, charts and the worst rows."""
        from pt2qa._report.plot import notebook_html

        return notebook_html(self)

    def plot(self, chart: str | None = None, *, ax: Axes | None = None, others: Sequence[Report] = ()) -> Axes:
        """Draw a chart of the page with matplotlib, from the extra ``plot``.

        Args:
            chart: its title, as on the page; None for the first.  Those of single rows, such as the histogram of a
                weight, come last.
            ax: axes to draw on; None for a new figure.
            others: further reports that the chart may read, such as the profiles of a layer report's histograms.

        Returns:
            the axes.

        Raises:
            ReportError: matplotlib is not installed, the report has no chart, or none of that title.
        """
        from pt2qa._report.plot import plot

        return plot(self, chart, ax, others)

    # -- for programs --------------------------------------------------------------------------------------------------

    def to_pandas(self, *, extended: bool = False, part: str = "rows") -> pandas.DataFrame:
        """The rows as a data frame, in graph order.

        Args:
            extended: adds the columns beyond the fixed ones.
            part: another table of the report, by the name of its field.

        Raises:
            ReportError: there is no such table.
        """
        return frame(self.row_type(part), getattr(self, part), extended=extended)

    def csv(self, *, extended: bool = False, part: str = "rows") -> str:
        """The columns of :meth:`to_pandas` as CSV text, numbers in full precision."""
        return csv_text(self.row_type(part), getattr(self, part), extended=extended)

    def to_csv(self, path: str | os.PathLike[str], *, extended: bool = False, part: str = "rows") -> None:
        """Write :meth:`csv` to a UTF-8 file atomically.

        Raises:
            ReportError: the folder does not exist, or the disk refuses.
        """
        write_atomic(path, self.csv(extended=extended, part=part))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to one ``.safetensors`` file that :func:`pt2qa.load` reads.

        Raises:
            ReportError: the folder does not exist, or the disk refuses.
        """
        save(self, path)

    @classmethod
    def row_type(cls, part: str = "rows") -> type[Any]:
        """The class of the rows in a table.

        Raises:
            ReportError: there is no such table.
        """
        tables = tables_of(cls)
        check_name(f"{cls.__name__} has no table", part, tables)
        return tables[part]

    def order(self, sort: str) -> str:
        """``sort`` for rows of this report, with the name of a column that is given by its header.

        Raises:
            ReportError: rows cannot be sorted so.
        """
        return order_of(sort, self.columns())

    def columns(self, part: str = "rows") -> tuple[Column, ...]:
        """The columns of a table as they apply to this report, the user's metrics last."""
        row_type = self.row_type(part)
        return self._with_custom((*columns_of(row_type), *derived_of(row_type)), part)

    def shown(self, part: str = "rows") -> tuple[Column, ...]:
        """The :meth:`columns` that tables show by default, in order."""
        return self._with_custom(shown_columns(self.row_type(part)), part)

    def _with_custom(self, columns: Iterable[Column], part: str) -> tuple[Column, ...]:
        custom = map(custom_column, custom_names(getattr(self, part)))
        return tuple(map(self.meant, (*columns, *custom)))

    def column(self, name: str, part: str = "rows") -> Column:
        """One of :meth:`columns`.

        Raises:
            ReportError: there is no such table or column.
        """
        known = {each.name: each for each in self.columns(part)}
        check_name(f"{type(self).__name__}.{part} has no column", name, known)
        return known[name]

    def numbers(self) -> dict[str, Column]:
        """The numbers of the whole report, by name."""
        return {each.name: self.meant(each) for each in numbers_of(type(self))}

    # -- what a kind may override --------------------------------------------------------------------------------------

    def grade(self) -> Grade:
        """Whether the result is good, bad, in between, or neutral."""
        found: Sequence[SetApart] = getattr(self, "set_apart", ())
        # A failing candidate does not make the other candidates worse.
        if any(not each.candidate for each in failures(found)):
            return "bad"
        return "warning" if found else "plain"

    def subject(self) -> str:
        """The model, and the quantizer."""
        parts = (getattr(self, "model", ""), getattr(self, "quantizer", ""))
        return " · ".join(part for part in parts if part)

    def lines(self) -> Sequence[str]:
        """What a page says above the report's tables; the first line is the verdict, or what is wrong with its data."""
        faults, said = self._faults(), [*self._lead(), *self._summary()]
        return [*faults, *said, *self._ran(), *([] if faults else self._data())]

    def charts(self, others: Sequence[Report]) -> list[dict[str, Any]]:
        """Charts of a page with these reports, as :mod:`pt2qa._report.charts` makes them."""
        return []

    def on_page(self, part: str) -> Sequence[Any]:
        """The rows of a table that a page shows."""
        rows: Sequence[Any] = getattr(self, part)
        return rows

    def with_rows(self, rows: Sequence[Any]) -> Report:
        """The same report with some of its rows alone, to be shown."""
        return replace(self, rows=tuple(rows))  # type: ignore[type-var]

    def groups(self) -> tuple[Group, ...] | None:
        """Findings that a page shows instead of tables; None if it shows tables."""
        return None

    def advice(self) -> tuple[Step, ...] | None:
        """What to do, most important first: the first screen of a page; None if the kind gives no advice."""
        return None

    def events(self, step: int, per_channel: bool, others: Sequence[Report]) -> Runs:
        """What TensorBoard shows, by the name of the run; ``others`` are the reports that are written together.

        Raises:
            ReportError: the kind has nothing to show in TensorBoard.
        """
        raise ReportError(
            f"got {type(self).__name__}; TensorBoard shows layer, weight and deployed reports, and profiles"
        )

    def _headline(self) -> str:
        return f"<{type(self).__name__} of {self.subject()}: {counted(len(self.rows), 'row')}>"

    @property
    def health(self) -> DataHealth | None:
        """What data was used, what was set apart and why, and what is outside the calibrated range.

        None for reports that ran on none.
        """
        return None

    def _title(self, sort: str) -> str:
        """The first lines of the text."""
        return f"{self.heading} of {self.subject()}: {counted(len(self.rows), 'row')}, {self._how(sort)}"

    def _lead(self) -> Sequence[str]:
        """Sentences between title and tables."""
        return ()

    def _ran(self) -> Sequence[str]:
        """What ran, above the tables of a text and below the verdict of a page."""
        return ()

    def _before(self) -> Iterable[Block]:
        """What comes before the table of rows."""
        return ()

    def _tabled(self) -> Sequence[Any]:
        """The rows shown in the table of a text."""
        return self.rows

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        """The table of rows, or what a text shows instead."""
        return self._table(sort, limit, width)

    def _after(self, limit: int | None) -> Iterator[Block]:
        """What comes between the table of rows and the summary."""
        yield from self._set_apart()
        yield from self._unpaired()
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        """What to look at, in sentences."""
        return ()

    def _worst_by(self) -> str | None:
        """The column that says which row is worst; None if rows are not ranked."""
        return next((name for name in self.usual_measures if "." not in name), None)

    def meant(self, column: Column, key: Sequence[str] = ()) -> Column:
        """A column with the unit and direction that this report's data give it, or those of the row with a key."""
        return column

    # -- shared by kinds -----------------------------------------------------------------------------------------------

    def _data(self) -> list[str]:
        """The health of the data, in sentences; what is wrong with it is not said again where a verdict has said it."""
        health = self.health
        if health is None or not health.batches or (hasattr(self, "verdict") and not health.is_sound):
            return []
        return about_data(health)

    def _faults(self) -> list[str]:
        """The same where something is wrong with it; sound data stand in texts and on pages, and in no verdict."""
        return [] if self.health is None or self.health.is_sound else self._data()

    def worst_first(self, part: str) -> tuple[Sequence[Any], str | None]:
        """The rows of a table in the order of a page, and the column that ranks them, or None."""
        if part == "rows":
            return self._ordered("worst")
        # A table of the same rows as `rows`, such as those of modules, is ranked by the same column.
        by = self._worst_by() if self.row_type(part) is self.row_type() else None
        rows = self.on_page(part)
        return (rows, None) if by is None else (self.ranked(rows, by, part), by)

    def ranked(self, rows: Sequence[Any], by: str, part: str = "rows") -> tuple[Any, ...]:
        """Rows of a table, worst by a column first; those without a number last."""
        columns = self.columns(part)
        return ranked(self.row_type(part), rows, column_called(by, columns), ties=self.ties, custom=columns)

    def _ordered(self, sort: str) -> tuple[Sequence[Any], str | None]:
        """The sorted rows, and the column they are sorted by, or None."""
        by = {"worst": self._worst_by(), "graph": None}.get(sort, sort)
        rows = self._tabled()
        return (rows, None) if by is None else (self.ranked(rows, by), by)

    def _columns_for(self, sort: str) -> tuple[Column, ...]:
        """The columns of a table in a sort order; the one it is sorted by is always shown."""
        return self.shown() if sort in ORDERS else with_column(self.shown(), self.column(sort))

    def _table(self, sort: str, limit: int | None, width: int) -> str:
        rows, by = self._ordered(sort)
        return table(self._columns_for(sort), rows, by, limit, width)

    def _how(self, sort: str, worst: str = "worst first") -> str:
        return {"worst": worst, "graph": "in graph order"}.get(sort, f"by {sort}")

    def _notes(self) -> Iterator[Listing]:
        notes: Sequence[str] = getattr(self, "notes", ())
        yield Listing(f"Notes ({len(notes)})", notes)

    def _set_apart(self, title: str = "Set apart") -> Iterator[Listing]:
        found: Sequence[SetApart] = getattr(self, "set_apart", ())
        yield Listing(f"{title} ({len(found)})", apart_entries(found))

    def _unpaired(self) -> Iterator[Listing]:
        unpaired: Sequence[Unpaired] = getattr(self, "unpaired", ())
        yield Listing(f"Unpaired ({len(unpaired)})", unpaired_entries(unpaired))


# Without slots, so that a kind can hold what files do not store, such as a pair, and its copies do, too.
@dataclass(frozen=True, repr=False, kw_only=True)
class ModelReport(Report):
    """What every kind of report in pt2qa says besides its rows.

    A kind without a quantizer or a model makes that an empty class variable: its files have no such field.

    Args:
        notes: what else the reader must know.
        quantizer: the plug-in's name, or the class of a quantizer without one; empty without a quantizer.
        model: the model's class name.
        environment: versions, and the model's fingerprint.
    """

    notes: tuple[str, ...]
    quantizer: str = ""
    model: str = ""
    environment: Environment


@dataclass(frozen=True, repr=False, kw_only=True)
class DataReport(ModelReport):
    """What every kind says that ran a model on data.

    Attributes:
        counts_set_apart: whether ``batches`` and ``samples`` include what is set apart.

    Args:
        batches, samples: how much was run; 0 where no data were given, or a file of an earlier version does not say.
        set_apart: batches excluded from all numbers: empty ones, and those with NaN or infinities.
        input_ranges: how many values of the inputs lie outside the calibrated ranges.
    """

    counts_set_apart: ClassVar[bool] = True

    batches: Count = 0
    samples: Count = 0
    set_apart: tuple[SetApart, ...] = ()
    input_ranges: tuple[InputRange, ...] = ()

    @property
    def health(self) -> DataHealth:
        # A batch on which one of several candidates fails counts for the others.
        apart = tuple(each for each in self.set_apart if not each.candidate)
        batches = self.batches + (0 if self.counts_set_apart else len(apart))
        left_out = {each.batch: each.samples for each in apart} if self.counts_set_apart else {}
        return DataHealth(batches, self.samples - sum(left_out.values()), apart, self.input_ranges)


def write_text(path: str | os.PathLike[str], reports: Iterable[Report]) -> None:
    """Write reports with all their rows to one text file, one after the other."""
    text = "\n\n\n".join(report.text(limit=None, width=FILE_WIDTH) for report in reports)
    write_atomic(path, f"{text}\n")


def data_read(batches: int, samples: int) -> str:
    """How much data was run.

    >>> data_read(1, 8)
    '1 batch (8 samples)'
    """
    return f"{counted(batches, 'batch', 'batches')} ({counted(samples, 'sample')})"


def check_name(what: str, name: str, names: Iterable[str], hint: str = "") -> None:
    """Reject an unknown name."""
    known = tuple(names)
    if name not in known:
        meant = f"{question(name, known)} ".lstrip()
        expected = f"expected {', '.join(known)}" if known else "it has none"
        raise ReportError(f"{what} {name!r}: {meant}{hint}{expected}")


def _laid_out(part: Block, width: int) -> str:
    if isinstance(part, str):
        return "\n".join(wrap(line, width, indent="  ") for line in part.splitlines())
    if isinstance(part, Listing):
        return listed(part.title, part.entries, width)
    drawn = table(part.columns, part.rows, part.by, part.limit, width)
    return f"{part.title}:\n{drawn}" if part.title else drawn
