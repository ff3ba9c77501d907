"""Commands that measure a flow's model: ``profile``, ``sensitivity``, ``repair``, ``compare``, ``compare-graphs``.

And ``quantizers``, ``annotations`` and ``conformance``: which there are, what they annotate, whether they behave.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import pt2qa
from pt2qa._printable import near_names
from pt2qa.cli import options, outcome
from pt2qa.cli.flow import load_flow, measured_on, own_part
from pt2qa.cli.group import InputFile, apart_if_possible, main, plan_in, say, say_next, write
from pt2qa.errors import FlowError, PluginError, ReportError

if TYPE_CHECKING:
    from pt2qa.plugins import BackendSpec


@main.command()
@options.flow
@click.option("-q", "--quantizer", "spec", metavar="SPEC", help="Quantize it first.  [default: the float model]")
@click.option(
    "--side",
    type=click.Choice(["reference", "quantized", "deployed"]),
    help="Which graph, with -q; deployed: what its kernels write.  [default: reference]",
)
@click.option(
    "--program",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --side deployed, folder of the lowered program; it is written if it does not exist.",
)
@options.backend
@options.apart
@click.option(
    "--histograms/--no-histograms", default=True, show_default=True, help="Also compute quantiles and outlier ratios."
)
@options.saves_report
def profile(flow: str, spec: str | None, apart: bool, printing: options.Printing, **asked: Any) -> None:
    """Print statistics of what every op reads and produces.

    That is range, mean, quantiles, zeros, NaN and clamped values. The function is the same as for pt2qa analyze; its
    evaluation batches are measured, if it has any, else those that calibrate.

    \b
      pt2qa profile flow.py
      pt2qa profile flow.py -q xnnpack --side quantized -o quantized.safetensors
      pt2qa profile flow.py -q xnnpack --side deployed --program lowered -o deployed.safetensors
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    if asked["side"] is not None and spec is None:
        raise click.UsageError("--side needs a quantized model: give -q")
    for option in ("program", "backend"):
        if asked[option] is not None and asked["side"] != "deployed":
            raise click.UsageError(f"--{option} needs --side deployed")
    with own_part(flow) as (given, writes):
        subject: Any = given.capture()
        if spec is not None:
            subject = given.quantized(spec, capture=subject)
        batches = given.evaluation if spec is None else measured_on(given)
        measure = partial(pt2qa.profile, subject, batches, mask=given.mask, **asked)
        report = apart_if_possible(measure, apart) if asked["side"] == "deployed" else measure()
    if writes:
        printing.deliver(report)


@main.command()
@options.flow
@options.quantizer
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="NAME",
    help="shifting, equalization, ranges, rounding or biases; repeatable.  [default: all, rounding where it is quick]",
)
@options.overrides
@options.output("--plan", help="Write the edits, for --overrides of other commands.")
@options.output("--code", help="Write a Python module that quantizes with these edits.")
@options.saves_report
def repair(
    flow: str,
    spec: str,
    methods: Sequence[str],
    overrides: Path | None,
    plan: Path | None,
    code: Path | None,
    printing: options.Printing,
) -> None:
    """Improve a quantized model at no cost at run time: the same ops and kernels, with better numbers in them.

    The function is the same as for pt2qa analyze. Repairs are fitted to the batches that calibrate, two or more, and
    measured on the evaluation batches, and by the metric of the function, if it has one; what does not help on data
    that it was not fitted to is not applied.

    \b
      pt2qa repair flow.py -q xnnpack
      pt2qa repair flow.py -q xnnpack --plan plan.json --code quantizer.py
      pt2qa analyze flow.py -q xnnpack --overrides plan.json -o reports

    The exit code is 1 if nothing helps; the notes say why.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    before = plan_in(overrides)
    given = load_flow(flow).fitted()
    pair = given.quantized(spec, before)
    report = pt2qa.repair(pair, measured_on(given), methods=methods or None, metric=given.metric, mask=given.mask)
    write(plan, report.plan.save)
    write(code, report.save_code)
    printing.deliver(report)
    if not report.met:
        say_next(shlex.join(["pt2qa", "analyze", flow, "-q", spec, "-o", "reports"]))
        raise click.exceptions.Exit(1)


@main.command()
@options.flow
@options.quantizers
@options.saves_report
def compare(flow: str, specs: Sequence[str], printing: options.Printing) -> None:
    """Compare several quantizers on one model, as a whole and layer by layer.

    The function is the same as for pt2qa analyze; its evaluation batches are measured, if it has any, else those that
    calibrate. The float model runs once for all candidates. The exit code is 1 if
    no candidate has an SQNR, for example on data that is not finite.

    \b
      pt2qa compare flow.py
      pt2qa compare flow.py -q xnnpack -q xnnpack:per_channel=false -q x86:mode=dynamic
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    with own_part(flow) as (given, writes):
        if given.overrides is not None:
            say("the overrides of the flow are left out: quantizers are compared as they are")
        how: dict[str, Any] = {"mask": given.mask, "as_deployed": given.as_deployed}
        report = pt2qa.compare_quantizers(given.capture(), specs, given.batches, measured_on(given), **how)
    if not writes:
        return
    printing.deliver(report)
    if report.best is None:
        say(f"no candidate has an SQNR: {report.summary().splitlines()[0]}")
        raise click.exceptions.Exit(1)


@main.command()
@options.flow
@options.quantizer
@click.option(
    "--method",
    type=click.Choice(["auto", "projection", "exact"]),
    default="auto",
    show_default=True,
    help="Estimate all sites at once, or run the model with each one quantized alone; auto: the cheaper.",
)
@click.option(
    "--metric",
    type=click.Choice(["sqnr", "cosine", "l1", "atol", "kl"], case_sensitive=False),
    default="sqnr",
    show_default=True,
    help="What the output loses; others than sqnr take the exact method.",
)
@click.option("--group", type=click.Choice(["region", "module"]), help="One row for all sites of each.")
@click.option(
    "--projections", type=click.IntRange(1), metavar="N", help="Random projections per batch.  [default: 4 to 64]"
)
@options.source("--resume", help="Continue from the report of an interrupted run.")
@options.overrides
@options.saves_report
def sensitivity(
    flow: str, spec: str, resume: Path | None, overrides: Path | None, printing: options.Printing, **asked: Any
) -> None:
    """Rank activations and weights by what quantizing each one alone costs the output.

    The function is the same as for pt2qa analyze; its evaluation batches are measured, if it has any, else those that
    calibrate.

    \b
      pt2qa sensitivity flow.py -q xnnpack
      pt2qa sensitivity flow.py -q xnnpack --method exact --metric kl --group module
      pt2qa sensitivity flow.py -q xnnpack -o sensitivity.safetensors

    After Ctrl-C, exit code 130, the report covers what was finished, and --resume goes on from it.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    plan = plan_in(overrides)
    before = None if resume is None else pt2qa.load(resume)
    if before is not None and not isinstance(before, pt2qa.SensitivityReport):
        raise ReportError(f"{resume}: --resume goes on from a sensitivity report; it holds {type(before).__name__}")
    with own_part(flow) as (given, writes):
        pair = given.quantized(spec, plan)
        report = pt2qa.sensitivity(pair, measured_on(given), mask=given.mask, resume=before, **asked)
    if writes:
        printing.deliver(report)


@main.command()
@click.argument("a", metavar="A.pt2", type=InputFile(path_type=Path))
@click.argument("b", metavar="B.pt2", type=InputFile(path_type=Path))
@options.flow
@options.saves_report
def compare_graphs(a: Path, b: Path, flow: str, printing: options.Printing) -> None:
    """Compare two graphs of one model, value by value, with A.pt2 as the signal.

    Both are files of torch.export.save, made from one capture. The function is the same as for pt2qa analyze; its
    evaluation batches are run, if it has any. To fail a build if the graphs differ, give the report to pt2qa gate.

    \b
      pt2qa compare-graphs converted.pt2 loaded.pt2 flow.py
      pt2qa compare-graphs old-torch.pt2 new-torch.pt2 flow.py -o graphs.safetensors
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    one, other = _exported(a), _exported(b)
    given = load_flow(flow)
    name = type(given.model).__name__
    report = pt2qa.compare_graphs(one, other, given.evaluation, model=name, mask=given.mask)
    printing.deliver(report)


def _exported(path: Path) -> Any:
    import torch

    try:
        return torch.export.load(path)
    except Exception as error:
        raise FlowError(
            f"{path}: expected a file that torch.export.save wrote ({type(error).__name__}: {error})"
        ) from error


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
    without = {name: missing for name, plugin in found.items() if (missing := getattr(plugin, "missing", str)())}
    for reason in (*broken.values(), *(f"quantizer {name!r}: {missing}" for name, missing in without.items())):
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
@options.saves_report
def list_annotations(
    flow: str, spec: str, qat: bool, calibrate: bool, overrides: Path | None, printing: options.Printing
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
        report = pt2qa.annotations(given.quantized(spec, plan, capture))
    else:
        report = pt2qa.annotations(capture, spec, qat=qat, overrides=given.plan_for(spec, plan))
    printing.deliver(report)


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
@options.saves_report
def conformance(
    quantizer: str, models: str | None, properties: str | None, qat: bool, spec: str | None, printing: options.Printing
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
    printing.deliver(report)
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
