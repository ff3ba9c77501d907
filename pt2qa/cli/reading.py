"""Commands on report files: ``show``, ``html``, ``diff``, ``gate``, ``merge``.  Only the last one imports torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pt2qa._printable import clean_lines
from pt2qa.cli import options, outcome
from pt2qa.cli.group import InputFile, main, write
from pt2qa.errors import ReportError


@main.command()
@click.argument("report", type=InputFile(path_type=Path))
@click.option("--open", "opened", multiple=True, metavar="OP", help="Show the steps of a recurrent op; repeatable.")
@click.option("--by-block", is_flag=True, help="Show each op of equal blocks once: its worst block, and the median.")
@click.option("--code", "prints_code", is_flag=True, help="Print the code of a reconfiguration or a diagnosis.")
@options.prints_report
def show(report: Path, opened: Sequence[str], by_block: bool, prints_code: bool, printing: options.Printing) -> None:
    """Print a report file.

    \b
      pt2qa show reports/xnnpack-layers.safetensors
      pt2qa show reports/xnnpack-layers.safetensors --sort saturation --limit 5
      pt2qa show reports/xnnpack-layers.safetensors --by-block
      pt2qa show reports/xnnpack-weights.safetensors --csv weights.csv
      pt2qa show reports/xnnpack-reconfiguration.safetensors --code > quantizer.py
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa._layers.report import LayerReport
    from pt2qa.report import load

    loaded: Any = load(report)
    if prints_code:
        code = getattr(loaded, "code", "")
        if not code:
            raise ReportError(f"{report}: --code: this {loaded.kind} report has no code; reconfigurations have it")
        click.echo(clean_lines(code), nl=False)
        return
    if (opened or by_block) and not isinstance(loaded, LayerReport):
        raise ReportError(f"{report}: {'--open' if opened else '--by-block'} is for layer reports")
    for name in opened:
        loaded = loaded.opened(name)
    if by_block:
        click.echo(loaded.by_block(width=printing.width))
        return
    printing.show(loaded)


@main.command()
@click.argument("reports", metavar="REPORT...", nargs=-1, required=True, type=InputFile(path_type=Path))
@options.output("-o", "file", required=True, help="The page to write.")
def html(reports: Sequence[Path], file: Path) -> None:
    """Write report files as one HTML page that opens offline.

    The page starts with the verdict; each report follows with charts, sortable tables and notes. Profiles of the
    reference and of the quantized model add histograms of the worst layers to a layer report.

    \b
      pt2qa html reports/*.safetensors -o report.html
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa._report.html import write_html
    from pt2qa.report import load

    write(file, functools.partial(write_html, [load(report) for report in reports]))


@main.command()
@click.argument("reports", metavar="REPORT...", nargs=-1, required=True, type=InputFile(path_type=Path))
@options.saves_report
def merge(reports: Sequence[Path], printing: options.Printing) -> None:
    """Merge reports of parts of the data into one.

    Its numbers are those of one run over all batches, in the order of the files. The files must come from one model,
    quantized and analysed with the same arguments.

    \b
      pt2qa merge shards/*/xnnpack-layers.safetensors -o layers.safetensors
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    import pt2qa

    printing.show(pt2qa.merge([pt2qa.load(report) for report in reports]))


@main.command()
@click.argument("old", type=InputFile(path_type=Path))
@click.argument("new", type=InputFile(path_type=Path))
@click.option(
    "--by", metavar="COLUMN", help="What to compare: a column, or table.column.  [default: by kind of report]"
)
@click.option(
    "--tolerance",
    type=float,
    metavar="X",
    help="Changes up to this are ignored, in the column's unit.  [default: 0.1 dB; 0 if the column is not in dB]",
)
@options.saves_report
def diff(old: Path, new: Path, printing: options.Printing, **asked: Any) -> None:
    """Show what changed between two report files of one kind.

    Rows are matched by name: worse, better, unchanged, new, gone. Versions, the model, the quantizer and the amount of
    data are compared too.

    \b
      pt2qa diff main/layers.safetensors layers.safetensors
      pt2qa diff main/layers.safetensors layers.safetensors --by cosine --tolerance 0.001
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa import report

    printing.show(report.diff(report.load(old), report.load(new), **asked))


@main.command()
@click.argument("reports", metavar="REPORT...", nargs=-1, required=True, type=InputFile(path_type=Path))
@click.option("--by", metavar="COLUMN", help="What to compare, as in pt2qa diff.")
@options.output("--html", "page", help="Also write it as an HTML page.")
@options.saves_report
def history(reports: Sequence[Path], by: str | None, page: Path | None, printing: options.Printing) -> None:
    """Show how report files of one kind changed from build to build, oldest first.

    Of a folder, its report of the layers is read. Builds are called by their folder, or by the file where a folder has
    several. For each: the number of the whole report, how many rows got worse and better, the row that lost most, and
    what else changed, such as a version; then what changed from the first to the last, worst first.

    \b
      pt2qa history reports/*/
      pt2qa history builds/*/xnnpack-layers.safetensors
      pt2qa history builds/*/deployed.safetensors --by outputs.deployed_sqnr --html history.html
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa import report
    from pt2qa._report.html import write_html

    layers = [[*path.glob("*layers.safetensors")] for path in reports]
    reports = [each[0] if len(each) == 1 else path for path, each in zip(reports, layers, strict=True)]
    folders = [path.resolve().parent.name for path in reports]
    alone = len({*folders}) == len(folders)
    found = {(name if alone else str(path)): report.load(path) for name, path in zip(folders, reports, strict=True)}
    made = report.history(found, by=by)
    write(page, functools.partial(write_html, [made]))
    printing.show(made)


@main.command()
@click.argument("report", type=InputFile(path_type=Path))
@click.option(
    "--require",
    multiple=True,
    metavar="'sqnr>=20'",
    help="A requirement: [PATTERN:][TABLE.]METRIC, then >=, >, <=, < or ==, then a number; repeatable.",
)
@options.source("--baseline", metavar="OLD", help="A report to compare with.")
@click.option(
    "--max-drop",
    type=float,
    metavar="X",
    help="How much worse than in the baseline the outputs and each row may be, in dB or their own unit.",
)
@click.option("--by", metavar="COLUMN", help="Which column to compare with the baseline, as in pt2qa diff.")
@options.output("--junit", help="Also write the checks as JUnit XML.")
@click.option("--github", is_flag=True, help="Also print failed checks as annotations for GitHub Actions.")
@options.width
def gate(
    report: Path, baseline: Path | None, junit: Path | None, github: bool, width: int | None, **asked: Any
) -> None:
    """Fail if a report does not meet its requirements.

    \b
      pt2qa gate layers.safetensors --require 'sqnr>=20' --require 'rows.isolated_sqnr>=10'
      pt2qa gate layers.safetensors --require 'layer1.*:sqnr>=15 dB' --junit gate.xml
      pt2qa gate layers.safetensors --baseline main/layers.safetensors --max-drop 1.0 --github
      pt2qa gate findings.safetensors --require 'error_count==0'

    A metric alone is a number of the whole report. TABLE.METRIC must hold in every row of the table, PATTERN:METRIC in
    the rows with matching names; * matches any text. A missing number fails the check.

    The exit code is 1 if a check fails, 2 if the command line is wrong, otherwise 0.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa import report as reports
    from pt2qa._report.atomic import write_atomic

    old = None if baseline is None else reports.load(baseline)
    result = reports.gate(reports.load(report), baseline=old, **asked)
    write(junit, functools.partial(write_atomic, content=result.junit()))
    outcome.found()["reports"].append(result)
    click.echo(result.text(width=width))
    if github and not (result.passed and not result.warnings):
        click.echo(result.github())
    if not result.passed:
        raise click.exceptions.Exit(1)
