"""``pt2qa profile`` and ``pt2qa compare``: the values of one model; several quantizers of one model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pt2qa.cli.group import (
    OutputFile,
    csv_option,
    debug_option,
    flow_argument,
    limit_option,
    main,
    quantizers_option,
    sort_option,
    width_option,
)
from pt2qa.cli.reading import deliver


@main.command()
@flow_argument
@click.option("-q", "--quantizer", "spec", metavar="SPEC", help="Quantize it first.  [default: the float model]")
@click.option(
    "--side", type=click.Choice(["reference", "quantized"]), help="Which graph, with -q.  [default: reference]"
)
@click.option("-o", "file", metavar="FILE", type=OutputFile(path_type=Path), help="Also write the profile.")
@click.option("--histograms/--no-histograms", default=True, show_default=True, help="Also compute quantiles and peaks.")
@sort_option
@limit_option
@csv_option
@width_option
@debug_option
def profile(
    flow: str,
    spec: str | None,
    side: Any,
    file: Path | None,
    histograms: bool,
    sort: str,
    limit: int | None,
    csv_file: str | None,
    width: int | None,
) -> None:
    """Print the values that every op reads and produces: range, mean, quantiles, zeros, NaN, clamped values.

    The function is the same as for pt2qa analyze; its batches are measured.

    \b
      pt2qa profile flow.py:flow
      pt2qa profile flow.py:flow -q xnnpack --side quantized -o quantized.safetensors
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    import pt2qa
    from pt2qa.cli.flow import load_flow

    if side is not None and spec is None:
        raise click.UsageError("--side chooses a graph of a quantized model: give -q too", click.get_current_context())
    given = load_flow(flow)
    subject: Any = pt2qa.capture(given.model, given.args, given.kwargs, dynamic_shapes=given.dynamic_shapes)
    if spec is not None:
        subject = pt2qa.quantize(subject, spec, given.batches)
    report = pt2qa.profile(subject, given.batches, side=side, histograms=histograms)
    deliver(report, sort, limit, csv_file, width, file)


@main.command()
@flow_argument
@quantizers_option
@click.option("-o", "file", metavar="FILE", type=OutputFile(path_type=Path), help="Also write the report.")
@sort_option
@limit_option
@csv_option
@width_option
@debug_option
def compare(
    flow: str,
    specs: Sequence[str],
    file: Path | None,
    sort: str,
    limit: int | None,
    csv_file: str | None,
    width: int | None,
) -> None:
    """Quantize a model in several ways and compare them, as a whole and layer by layer.

    The function is the same as for pt2qa analyze. The float model runs once for all candidates. The exit code is 1 if
    no candidate has an SQNR, for example on data that is not finite.

    \b
      pt2qa compare flow.py:flow
      pt2qa compare flow.py:flow -q xnnpack -q xnnpack:per_channel=false -q x86:mode=dynamic
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    import pt2qa
    from pt2qa.cli.flow import load_flow
    from pt2qa.plugins import available, resolve

    chosen = tuple(dict.fromkeys(specs)) or tuple(sorted(available()))
    for spec in chosen:
        resolve(spec)
    given = load_flow(flow)
    capture = pt2qa.capture(given.model, given.args, given.kwargs, dynamic_shapes=given.dynamic_shapes)
    report = pt2qa.compare_quantizers(capture, chosen, given.batches)
    deliver(report, sort, limit, csv_file, width, file)
    if report.best is None:
        click.echo(f"pt2qa: no candidate has an SQNR: {report.summary().splitlines()[0]}", err=True)
        click.get_current_context().exit(1)
