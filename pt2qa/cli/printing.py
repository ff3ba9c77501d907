"""The options of commands that print a report, and how they print it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pt2qa.cli.group import OutputFile, say_wrote, width_option

if TYPE_CHECKING:
    from pt2qa._report.base import Report

_OPTIONS: Final = (
    click.option(
        "--sort", default="worst", show_default=True, metavar="worst|graph|name|COLUMN", help="Order of the rows."
    ),
    click.option(
        "--limit",
        type=click.IntRange(0),
        metavar="N",
        help="Rows of a table, or findings of a rule; 0 for all.  [default: 20 rows, 5 findings]",
    ),
    click.option(
        "--csv",
        "csv_file",
        metavar="FILE",
        type=OutputFile(),
        help="Also write all rows, in graph order, as CSV; - for CSV alone.",
    ),
    width_option,
)


@dataclass(frozen=True, slots=True)
class Printing:
    """How a command prints a report: the values of the options that :func:`prints_report` adds."""

    sort: str
    limit: int | None
    csv_file: str | None
    width: int | None

    def deliver(self, report: Report, file: Path | None = None) -> None:
        """Writes a report to the files that were asked for, and then prints it, as text or CSV."""
        if self.csv_file not in (None, "-"):
            report.to_csv(self.csv_file, extended=True)
            say_wrote(self.csv_file)
        if file is not None:
            report.save(file)
            say_wrote(file)
        if self.csv_file == "-":
            click.echo(report.csv(extended=True), nl=False)
        else:
            limited = {} if self.limit is None else {"limit": self.limit or None}
            click.echo(report.text(sort=self.sort, width=self.width, **limited))
        stop_if_interrupted(report)


def prints_report(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :class:`Printing`, which it takes as ``printing``."""

    @functools.wraps(function)
    def command(sort: str, limit: int | None, csv_file: str | None, width: int | None, **given: Any) -> None:
        function(printing=Printing(sort, limit, csv_file, width), **given)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def stop_if_interrupted(report: Any) -> None:
    """Raises KeyboardInterrupt for the report of an analysis that was interrupted: one of its notes says so."""
    if any(note.startswith("interrupted") for note in getattr(report, "notes", ())):
        raise KeyboardInterrupt
