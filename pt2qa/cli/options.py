"""Options and arguments that several commands take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pt2qa.cli.group import FlowFile, InputFile, OutputFile


def _known_quantizer(context: click.Context, parameter: click.Parameter, spec: str) -> str:
    from pt2qa.plugins import resolve

    resolve(spec)
    return spec


def _known_quantizers(context: click.Context, parameter: click.Parameter, specs: Sequence[str]) -> tuple[str, ...]:
    """The quantizers that were given, each once, or all that are installed."""
    from pt2qa.plugins import available, resolve

    chosen = tuple(dict.fromkeys(specs)) or tuple(sorted(available()))
    if not chosen:
        raise click.UsageError("no quantizer is installed and none was given with -q")
    for spec in chosen:
        resolve(spec)
    return chosen


width = click.option(
    "--width",
    type=click.IntRange(min=40),
    metavar="N",
    help="Columns of the screen, 40 or more.  [default: the terminal's, or 100]",
)
file = click.option(
    "-o", "file", metavar="FILE", type=OutputFile(path_type=Path), help="Also write the report to a file."
)
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
    callback=_known_quantizers,
    help="Name, or name:option=value,...; repeatable.  [default: all installed ones]",
)
quantizer = click.option(
    *("-q", "--quantizer", "spec"),
    required=True,
    metavar="SPEC",
    callback=_known_quantizer,
    help="Name, or name:option=value,...",
)
backend = click.option(
    "--backend",
    metavar="SPEC",
    help="What lowers and runs the quantized model: NAME, or NAME:option=value,...  [default: the quantizer's]",
)
overrides = click.option(
    "--overrides",
    metavar="PLAN.json",
    type=InputFile(path_type=Path),
    help="Quantize with the edits of this plan, which an earlier analyze wrote.",
)
flow = click.argument("flow", metavar="FLOW.py[:function]", type=FlowFile())
