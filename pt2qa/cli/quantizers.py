"""``pt2qa quantizers``, ``annotations`` and ``conformance``: which there are, what they annotate, if they behave."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import pt2qa
from pt2qa._printable import near_names
from pt2qa.cli import options, outcome
from pt2qa.cli.flow import load_flow
from pt2qa.cli.group import main, plan_in
from pt2qa.errors import PluginError

if TYPE_CHECKING:
    from pt2qa.plugins import BackendSpec

_SUMMARY_WIDTH: Final = 24


@main.command()
@click.option("--spec", "chosen", metavar="NAME", help="Print what this quantizer's backend takes, line by line.")
@options.width
def quantizers(chosen: str | None, width: int | None) -> None:
    """List the installed quantizers and their options.

    \b
    An option follows the name, in analyze's -q and in pt2qa.quantize:
      pt2qa analyze flow.py -q xnnpack:per_channel=false -o reports
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from tabulate import tabulate

    from pt2qa._report.table import screen_width
    from pt2qa.plugins import available, unavailable

    if chosen is not None:
        from pt2qa.plugins import resolve, spec_of

        spec = spec_of(resolve(chosen))
        if spec is None:
            raise click.UsageError(f"the quantizer {chosen} does not state what its backend takes")
        click.echo(str(spec))
        return
    found, broken = available(), unavailable()
    if not found and not broken:
        click.echo("no quantizer is installed: no package has an entry point in the group pt2qa.quantizers")
        return
    for reason in broken.values():
        click.echo(reason, err=True)
    if not found:
        return
    listed: list[dict[str, Any]] = [
        {"name": name, "summary": plugin.summary, "options": _options(plugin)} for name, plugin in sorted(found.items())
    ]
    outcome.found()["reports"].append({"kind": "quantizers", "tables": {"rows": listed}})
    taken = max(map(len, found)) + max(len(line) for each in listed for line in each["options"]) + 4
    room = max(_SUMMARY_WIDTH, screen_width(width) - taken)
    rows = [(each["name"], textwrap.fill(each["summary"], room), "\n".join(each["options"])) for each in listed]
    click.echo(tabulate(rows, headers=("name", "summary", "options"), disable_numparse=True))


def _options(plugin: Any) -> list[str]:
    """A plug-in's options with their values, as -q takes them."""
    values = {option.name: getattr(plugin, option.name) for option in fields(plugin)}
    plain = {name: str(value).lower() if value in (None, True, False) else value for name, value in values.items()}
    return [f"{name}={value}" for name, value in plain.items()] or ["none"]


@main.command("annotations")
@options.flow
@options.quantizer
@click.option("--qat", is_flag=True, help="As for quantization-aware training.")
@click.option("--calibrate", is_flag=True, help="Also quantize, and show what the converted model does.")
@options.overrides
@options.file
@options.prints_report
def list_annotations(
    flow: str,
    spec: str,
    qat: bool,
    calibrate: bool,
    overrides: Path | None,
    file: Path | None,
    printing: options.Printing,
) -> None:
    """List what a quantizer annotates: inputs, weights and output of every op.

    The function is the same as for pt2qa analyze. Its batches are run only with --calibrate. The report also has how
    many ops of each type are quantized, and the calls of each module.

    \b
      pt2qa annotations flow.py -q xnnpack
      pt2qa annotations flow.py -q x86 --calibrate --limit 0 -o annotations.safetensors
      pt2qa annotations flow.py -q xnnpack --overrides reports/xnnpack-plan.json
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    if qat and calibrate:
        raise click.UsageError("--calibrate quantizes without training: leave out --qat")
    plan = plan_in(overrides)
    given = load_flow(flow).fitted() if calibrate else load_flow(flow)
    capture = given.capture()
    if calibrate:
        report = pt2qa.annotations(pt2qa.quantize(capture, spec, given.batches, overrides=plan))
    else:
        report = pt2qa.annotations(capture, spec, qat=qat, overrides=plan)
    printing.deliver(report, file)


@main.command()
@click.argument("quantizer", metavar="QUANTIZER")
@click.option("--models", metavar="NAME,...", help="Small models to check it on.  [default: all]")
@click.option("--properties", metavar="NAME,...", help="Properties to check.  [default: all]")
@click.option("--qat", is_flag=True, help="Prepare for quantization-aware training.")
@click.option(
    "--spec",
    metavar="QUANTIZER",
    help="Check the annotations against what this quantizer's backend supports.  [default: its own]",
)
@options.file
@options.prints_report
def conformance(
    quantizer: str,
    models: str | None,
    properties: str | None,
    qat: bool,
    spec: str | None,
    file: Path | None,
    printing: options.Printing,
) -> None:
    """Check that a quantizer behaves correctly, on small models of one pattern each.

    QUANTIZER is a plug-in, with options or without, or module:object: a torchao Quantizer, its class, a plug-in, or a
    function without arguments that returns one of these. A class or function makes a new quantizer for each model.

    \b
      pt2qa conformance xnnpack:per_channel=false
      pt2qa conformance my_package.quantizers:MyQuantizer --models linear,conv_relu
      pt2qa conformance my_package.quantizers:MyQuantizer --spec xnnpack

    The exit code is 1 if a property failed, or if the quantizer annotates nothing and so has shown nothing.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa.plugins import available
    from pt2qa.testing import check_quantizer

    name, colon, rest = quantizer.partition(":")
    known = not colon or "=" in rest or name in available()
    tested = quantizer if known else _imported(name, rest)
    report = check_quantizer(
        tested,
        models=_split(models),
        properties=_split(properties),
        qat=qat,
        spec=None if spec is None else _spec_of(spec),
    )
    printing.deliver(report, file)
    if not report.passed:
        raise click.exceptions.Exit(1)


def _spec_of(quantizer: str) -> BackendSpec:
    """What a plug-in's backend takes, or a spec of one's own as module:object."""
    from pt2qa.plugins import BackendSpec, available, resolve, spec_of

    name, _, rest = quantizer.partition(":")
    named = _imported(name, rest) if rest and name not in available() else resolve(quantizer)
    spec = named if isinstance(named, BackendSpec) else spec_of(named)
    if spec is None:
        stating = [known for known, plugin in available().items() if spec_of(plugin) is not None]
        raise PluginError(f"--spec: {quantizer} does not state what its backend takes; {', '.join(stating)} do")
    return spec


def _split(names: str | None) -> Sequence[str] | None:
    return None if names is None else [name.strip() for name in names.split(",")]


def _imported(module: str, name: str) -> Any:
    """An object of a module, which may be in the current folder, as for ``python -m``."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise PluginError(f"{module}:{name}: cannot import {module!r}: {type(error).__name__}: {error}") from error
    if not hasattr(found, name):
        known = [each for each in vars(found) if not each.startswith("_")]
        raise PluginError(f"{module} has no {name!r}; it has {near_names(name, known)}")
    return getattr(found, name)
