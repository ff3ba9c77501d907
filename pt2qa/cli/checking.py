"""``pt2qa check``: finds what will go wrong with a flow's model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import pt2qa
from pt2qa._check.report import SEVERITIES
from pt2qa._report.base import Report, write_text
from pt2qa.cli import as_json, options
from pt2qa.cli.flow import load_flow, measured_on
from pt2qa.cli.group import main, say, write
from pt2qa.errors import Pt2qaError


@main.command()
@options.flow
@click.option(
    "-q",
    "--quantizer",
    "specs",
    multiple=True,
    metavar="SPEC",
    help="Also check what this quantizer annotates: name[:option=value,...].",
)
@click.option("--calibrate", is_flag=True, help="Also quantize, and check the numbers on the flow's batches; needs -q.")
@click.option("--cpu", type=click.Choice(["vnni", "no-vnni"]), help="The CPU to run on.  [default: this one]")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "note", "never"]),
    default="error",
    show_default=True,
    help="Exit with 1 for findings of this severity or a worse one.",
)
@click.option("--rule", "rules", multiple=True, metavar="ID", help="Run this rule only; repeatable.")
@click.option(
    "--silence", multiple=True, metavar="ID[:PATTERN]", help="Hide a rule's findings on these names; repeatable."
)
@options.file
@options.output(
    "--text",
    help="Also write one text file: all findings and, with -q, the configuration of every op and all modules' calls.",
)
@click.option("--limit", default=5, show_default=True, type=click.IntRange(0), help="Findings of a rule; 0 for all.")
@options.width
def check(
    flow: str,
    specs: Sequence[str],
    calibrate: bool,
    fail_on: str,
    file: Path | None,
    text: Path | None,
    limit: int,
    width: int | None,
    **asked: Any,
) -> None:
    """Find problems before you quantize a model, and how to fix them.

    FLOW.py is the same as for analyze. Without -q, only the model is checked; with -q, also what the quantizer
    annotates, which takes seconds; with --calibrate, also scales, weights and values on the evaluation batches.

    \b
      pt2qa check flow.py
      pt2qa check flow.py -q xnnpack --text model_check_result.txt
      pt2qa check flow.py -q x86 --calibrate --cpu no-vnni --fail-on warning -o findings.safetensors
      pt2qa check flow.py -q xnnpack --silence 'fixed-batch' --silence 'unfused-pair:features.*'

    The exit code is 1 if there are findings to fail on, 2 if the command line is wrong, otherwise 0.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa.plugins import resolve

    if len(specs) > 1:
        raise click.UsageError("-q: give one quantizer; check the others in separate calls")
    spec = specs[0] if specs else None
    if calibrate and spec is None:
        raise click.UsageError("--calibrate needs a quantizer: -q")
    if spec is not None:
        resolve(spec)
    loaded = load_flow(flow).fitted() if calibrate else load_flow(flow)
    asked["rules"] = asked["rules"] or None
    shapes = {"dynamic_shapes": loaded.dynamic_shapes}
    findings = pt2qa.check(loaded.model, loaded.args, kwargs=loaded.kwargs, quantizer=spec, **shapes, **asked)
    pair = None
    if calibrate and findings.error_count:
        say("not calibrated, because of the errors below")
    elif calibrate:
        if loaded.mask is not None:
            say("check ignores the mask: it checks ops at all positions, padding included")
        pair = pt2qa.quantize(loaded.capture(), spec, loaded.batches)
        findings = pt2qa.check(pair, model=loaded.model, batches=measured_on(loaded), **asked).joined(findings)
    if text is not None:
        reports: list[Report] = [findings]
        if spec is not None:
            try:
                reports.append(pt2qa.annotations(*((loaded.capture(), spec) if pair is None else (pair,))))
            except Pt2qaError as error:
                say(f"{text} lacks the configuration of the ops: {error}")
        write(text, functools.partial(write_text, reports=reports))
    write(file, findings.save)
    as_json.found()["reports"].append(findings)
    click.echo(findings.text(limit=limit or None, width=width))
    worse = SEVERITIES[: SEVERITIES.index(fail_on) + 1] if fail_on in SEVERITIES else ()
    if any(findings.count(severity) for severity in worse):
        raise click.exceptions.Exit(1)
