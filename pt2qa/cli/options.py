"""Options and arguments that several commands take, and how commands print a report."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pt2qa._report.notes import stop_if_interrupted
from pt2qa.cli import outcome
from pt2qa.cli.group import InputFile, OutputFile, write

if TYPE_CHECKING:
    from pt2qa._report.base import Report


def _known(context: click.Context, parameter: click.Parameter, given: str | Sequence[str]) -> str | tuple[str, ...]:
    """The quantizer that was given; of several each once, or all that are installed."""
    from pt2qa.plugins import available, resolve

    installed = (name for name, plugin in sorted(available().items()) if not getattr(plugin, "missing", str)())
    chosen = (given,) if isinstance(given, str) else tuple(dict.fromkeys(given)) or tuple(installed)
    if not chosen:
        raise click.UsageError("no quantizer is installed and none was given with -q")
    for spec in chosen:
        resolve(spec)
    return given if isinstance(given, str) else chosen


width = click.option(
    "--width",
    type=click.IntRange(min=40),
    metavar="N",
    help="Columns of the screen, 40 or more.  [default: the terminal's, or 100]",
)


def source(*names: str, **given: Any) -> Callable[..., Any]:
    """An option that names a file to read."""
    return click.option(*names, **{"metavar": "FILE", "type": InputFile(path_type=Path), **given})


def output(*names: str, **given: Any) -> Callable[..., Any]:
    """An option that names a file to write."""
    return click.option(*names, **{"metavar": "FILE", "type": OutputFile(path_type=Path), **given})


file = output("-o", "file", help="Also write the report to a file.")
folder = click.option(
    *("-o", "folder"),
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder to write to; created if missing.",
)
quantizers = click.option(
    *("-q", "--quantizer", "specs"),
    multiple=True,
    metavar="SPEC",
    callback=_known,
    help="Name, or name:option=value,...; repeatable.  [default: all installed ones]",
)
quantizer = click.option(
    *("-q", "--quantizer", "spec"),
    required=True,
    metavar="SPEC",
    callback=_known,
    help="Name, or name:option=value,...",
)
backend = click.option(
    "--backend",
    metavar="SPEC",
    help="What lowers and runs the quantized model: NAME, or NAME:option=value,...  [default: the quantizer's]",
)
apart = click.option(
    "--apart/--no-apart",
    default=hasattr(os, "fork"),
    show_default=True,
    help="Lower and run in a process of its own, so that an op of which native code dies is named.",
)
overrides = source(
    "--overrides", metavar="PLAN.json", help="Quantize with the edits of this plan, which an earlier analyze wrote."
)
flow = click.argument("flow", metavar="FLOW.py[:function]", type=InputFile())

_SORT: Final = click.option(
    "--sort", default="worst", show_default=True, metavar="worst|graph|name|COLUMN", help="Order of the rows."
)
_LIMIT: Final = click.option(
    "--limit",
    type=click.IntRange(0),
    metavar="N",
    help="Rows of a table, or findings of a rule; 0 for all.  [default: 20 rows, 5 findings]",
)
_CSV: Final = output(
    *("--csv", "csv_file"), type=OutputFile(), help="Also write all rows, in graph order, as CSV; - for CSV alone."
)


@dataclass(frozen=True, slots=True)
class Printing:
    """How a command prints a report: the values of the options that :func:`prints_report` adds."""

    sort: str
    limit: int | None
    width: int | None
    csv_file: str | None = None
    file: Path | None = None

    def deliver(self, report: Report) -> None:
        """Shows what an analysis made, and ends the command if that was interrupted."""
        self.show(report)
        stop_if_interrupted(getattr(report, "notes", ()))

    def show(self, report: Report) -> None:
        """Writes a report to the files that were asked for, and then prints it, as text or CSV."""
        outcome.found()["reports"].append(report)
        if self.csv_file != "-":
            write(self.csv_file, functools.partial(report.to_csv, extended=True))
        write(self.file, report.save)
        if self.csv_file == "-":
            click.echo(report.csv(extended=True), nl=False)
        else:
            click.echo(self.text(report))

    def text(self, report: Report) -> str:
        """A report as text."""
        limited = {} if self.limit is None else {"limit": self.limit or None}
        return report.text(sort=self.sort, width=self.width, **limited)


def prints_report(
    function: Callable[..., None], added: Sequence[Callable[..., Any]] = (_SORT, _LIMIT, _CSV, width)
) -> Callable[..., None]:
    """Gives a command the options of :class:`Printing`, which it takes as ``printing``."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        ways = {each.name: given.pop(each.name) for each in fields(Printing) if each.name in given}
        function(printing=Printing(**ways), **given)

    for option in reversed(added):
        command = option(command)
    return command


saves_report: Final = functools.partial(prints_report, added=(_SORT, _LIMIT, _CSV, width, file))
"""The same for a command that can write the report to a file, too."""
prints_reports: Final = functools.partial(prints_report, added=(_SORT, _LIMIT, width))
"""The same for a command that prints several reports, which no one CSV file can hold."""
