"""The options of commands that print a report, and how they print it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pt2qa._report.notes import stop_if_interrupted
from pt2qa.cli import as_json, options
from pt2qa.cli.group import OutputFile, say_wrote

if TYPE_CHECKING:
    from pt2qa._report.base import Report

_SORT: Final = click.option(
    "--sort", default="worst", show_default=True, metavar="worst|graph|name|COLUMN", help="Order of the rows."
)
_LIMIT: Final = click.option(
    "--limit",
    type=click.IntRange(0),
    metavar="N",
    help="Rows of a table, or findings of a rule; 0 for all.  [default: 20 rows, 5 findings]",
)
_CSV: Final = click.option(
    "--csv",
    "csv_file",
    metavar="FILE",
    type=OutputFile(),
    help="Also write all rows, in graph order, as CSV; - for CSV alone.",
)


@dataclass(frozen=True, slots=True)
class Printing:
    """How a command prints a report: the values of the options that :func:`prints_report` adds."""

    sort: str
    limit: int | None
    csv_file: str | None
    width: int | None

    def deliver(self, report: Report, file: Path | None = None) -> None:
        """Shows what an analysis made, and ends the command if that was interrupted."""
        self.show(report, file)
        stop_if_interrupted(getattr(report, "notes", ()))

    def show(self, report: Report, file: Path | None = None) -> None:
        """Writes a report to the files that were asked for, and then prints it, as text or CSV."""
        as_json.found()["reports"].append(report)
        if self.csv_file not in (None, "-"):
            report.to_csv(self.csv_file, extended=True)
            say_wrote(self.csv_file)
        if file is not None:
            report.save(file)
            say_wrote(file)
        if self.csv_file == "-":
            click.echo(report.csv(extended=True), nl=False)
        else:
            click.echo(self.text(report))

    def text(self, report: Report) -> str:
        """A report as text."""
        limited = {} if self.limit is None else {"limit": self.limit or None}
        return report.text(sort=self.sort, width=self.width, **limited)


def prints_report(
    function: Callable[..., None], added: Sequence[Callable[..., Any]] = (_SORT, _LIMIT, _CSV, options.width)
) -> Callable[..., None]:
    """Gives a command the options of :class:`Printing`, which it takes as ``printing``."""

    @functools.wraps(function)
    def command(sort: str, limit: int | None, width: int | None, csv_file: str | None = None, **given: Any) -> None:
        function(printing=Printing(sort, limit, csv_file, width), **given)

    for option in reversed(added):
        command = option(command)
    return command


prints_reports: Final = functools.partial(prints_report, added=(_SORT, _LIMIT, options.width))
"""The same for a command that prints several reports, which no one CSV file can hold."""
