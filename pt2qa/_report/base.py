"""What every report can do, whatever it holds."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pt2qa._printable import clean, clean_lines
from pt2qa._report.atomic import write_atomic
from pt2qa._report.columns import row_type_of
from pt2qa._report.export import csv_text, frame
from pt2qa._report.table import screen_width

if TYPE_CHECKING:
    import pandas


class Report(ABC):
    """Facts that an analysis found.  Frozen; printing it gives text that fits the terminal.

    ``print(report)`` shows it, ``report.save(path)`` keeps it, ``pt2qa.load(path)`` brings it back.
    """

    __slots__ = ()

    @abstractmethod
    def text(self, *, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The whole report as text: header, tables, and last what to look at.

        Args:
            sort: ``worst``, ``graph``, ``name`` or a column.
            limit: rows a table shows; None for all.
            width: columns of the screen; None asks the terminal, 100 where there is none.

        Raises:
            ReportError: there is no such column.
        """

    @abstractmethod
    def to_pandas(self, *, extended: bool = False) -> pandas.DataFrame:
        """The rows as a data frame, in graph order; ``extended`` adds the columns beyond the fixed ones."""

    @abstractmethod
    def csv(self, *, extended: bool = False) -> str:
        """The same columns as CSV text, numbers in full precision."""

    def to_csv(self, path: str | os.PathLike[str], *, extended: bool = False) -> None:
        """Write :meth:`csv` to a UTF-8 file, whole or not at all.

        Raises:
            ReportError: the folder does not exist, or the disk refuses.
        """
        write_atomic(path, self.csv(extended=extended).encode("utf-8", "backslashreplace"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to one ``.safetensors`` file that :func:`pt2qa.load` reads.

        Raises:
            ReportError: the folder does not exist, or the disk refuses.
        """
        # storage knows this class, so it cannot be imported before it.
        from pt2qa._report.storage import save

        save(self, path)

    def _headline(self) -> str:
        """What ``repr`` says."""
        return f"<{type(self).__name__}>"

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return clean(self._headline())


@dataclass(frozen=True, slots=True)
class Rendering:
    """How reports of one class become text; each function takes the report first.

    Args:
        table: from the report, the order, the number of rows (None: all) and the width to the rows as a table.
        summary: from the report to sentences that say what to look at.
        text: as ``table``, to the whole report.
    """

    table: Callable[[Any, str, int | None, int], str]
    summary: Callable[[Any], list[str]]
    text: Callable[[Any, str, int | None, int], str]


class RowReport(Report):
    """A report with rows of one class in the field ``rows``; it says by ``rendering`` how it reads."""

    __slots__ = ()

    rendering: ClassVar[Rendering]
    rows: tuple[Any, ...]

    def table(self, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The rows alone as a table: ``worst`` first, in ``graph`` order, by ``name`` or by any column.

        Args:
            sort: the order.
            limit: rows to show; None for all.
            width: columns of the screen; None asks the terminal, 100 where there is none.

        Raises:
            ReportError: there is no such column, or the limit is negative.
        """
        return clean_lines(self.rendering.table(self, sort, limit, screen_width(width)))

    def summary(self) -> str:
        """What to look at, in sentences that state their thresholds."""
        return "\n".join(map(clean, self.rendering.summary(self)))

    def text(self, *, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The whole report as text, as ``print`` shows it; arguments and errors as in :meth:`table`."""
        return clean_lines(self.rendering.text(self, sort, limit, screen_width(width)))

    def to_pandas(self, *, extended: bool = False) -> pandas.DataFrame:
        """The rows as a data frame; ``extended`` adds the columns that the row's class marks so."""
        return frame(row_type_of(type(self)), self.rows, extended=extended)

    def csv(self, *, extended: bool = False) -> str:
        """The columns of :meth:`to_pandas` as CSV text, numbers in full precision."""
        return csv_text(row_type_of(type(self)), self.rows, extended=extended)
