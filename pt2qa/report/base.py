"""What every report can do, whatever it holds."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pt2qa.report.atomic import write_atomic

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
        from pt2qa.report.storage import save

        save(self, path)

    def __str__(self) -> str:
        return self.text()
