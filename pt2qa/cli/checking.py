"""``pt2qa check``, ``deploy`` and ``record-inputs``: what goes wrong with a model, and on the kernels that ship."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import pt2qa
from pt2qa._check.report import SEVERITIES
from pt2qa._report.atomic import make_folder
from pt2qa._report.base import Report, write_text
from pt2qa.cli import options, outcome
from pt2qa.cli.analyzing import unusable
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
    outcome.found()["reports"].append(findings)
    click.echo(findings.text(limit=limit or None, width=width))
    worse = SEVERITIES[: SEVERITIES.index(fail_on) + 1] if fail_on in SEVERITIES else ()
    if any(findings.count(severity) for severity in worse):
        raise click.exceptions.Exit(1)


def _inspect(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Prints what a file holds, and ends."""
    if path is None:
        return
    from pt2qa._deployed.deployment import inspected

    click.echo("\n".join(inspected(path)))
    context.exit()


@main.command()
@options.flow
@options.quantizer
@options.folder
@options.source(
    "--inspect",
    is_eager=True,
    expose_value=False,
    callback=_inspect,
    help="Print what a program holds (weights, biases, scales, limits by kernel), and exit. Nothing is run.",
)
@options.source("--deployed", help="Compare this program, or outputs recorded on a device, instead of lowering.")
@click.option(
    "--program",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder of the lowered program.  [default: DIR/program, if the backend can write it]",
)
@click.option(
    *("-b", "--backend", "backends"),
    multiple=True,
    metavar="SPEC",
    help="What lowers and runs the quantized model: NAME, or NAME:option=value,...; repeatable.  [default: the "
    "quantizer's]",
)
@options.prints_report
def deploy(
    flow: str,
    spec: str,
    folder: Path,
    deployed: Path | None,
    program: Path | None,
    backends: tuple[str, ...],
    printing: options.Printing,
) -> None:
    """Lower a quantized model, run it here, and compare its kernels with the converted graph.

    FLOW.py is the same as for analyze; its evaluation batches are run, if it has any. The report says
    which stage adds the output's error (eager, capture, prepared, converted, deployed), and which kernels differ from
    the converted graph.

    \b
      pt2qa deploy flow.py -q xnnpack -o deploy
      pt2qa deploy flow.py -q x86 --backend x86:isa=avx2 -o deploy
      pt2qa deploy flow.py -q xnnpack -b xnnpack -b onnxruntime -o deploy
      pt2qa deploy flow.py -q xnnpack -o deploy --deployed model.pte
      pt2qa deploy --inspect model.pte
      pt2qa deploy flow.py -q xnnpack -o deploy --deployed outputs.safetensors
      pt2qa gate deploy/deployed.safetensors --require 'sqnr>=30' --require 'suspect_values<=0'

    Several backends run the same graph, and DIR/runtimes.safetensors says op by op which of them differ. For one, the
    report is DIR/deployed.safetensors. A second run reuses DIR/program, or replaces it if the converted graph or a
    version changed since. With --deployed, only outputs are compared, with those of a .pte file, of an AOTInductor
    package (.pt2), or of a device (see pt2qa record-inputs). The exit code is 1 if quantization gives NaN or
    infinities, or if no batch has a number.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    if deployed is not None and program is not None:
        raise click.UsageError("give --deployed, a program made elsewhere, or --program, one of pt2qa, not both")
    if len(backends) > 1 and (deployed is not None or program is not None):
        raise click.UsageError("give one --backend with --deployed or --program: several lower the model anew")
    make_folder(folder)
    given = load_flow(flow).fitted()
    pair = pt2qa.quantize(given.capture(), spec, given.batches)
    common: dict[str, Any] = {"mask": given.mask, "backend": backends[0] if backends else None}
    batches, file = measured_on(given), folder / "deployed.safetensors"
    report: Report
    if len(backends) > 1:
        file = folder / "runtimes.safetensors"
        report = pt2qa.compare_runtimes(pair, batches, backends, metric=given.metric, mask=given.mask)
    elif deployed is not None or program is not None:
        metric = None if deployed is not None and deployed.suffix == ".safetensors" else given.metric
        report = pt2qa.compare_deployed(pair, batches, metric=metric, deployed=deployed, program=program, **common)
    else:
        report = lowered(pair, batches, folder / "program", metric=given.metric, **common)
    printing.deliver(report, file)
    if reasons := unusable(report):
        say(*reasons)
        raise click.exceptions.Exit(1)


def lowered(pair: Any, batches: Any, program: Path, *, backend: str | None, **given: Any) -> Any:
    """The comparison with the program in a folder of the command, which replaces another's; it is kept if it can be."""
    from pt2qa._deployed.deployment import OtherProgramError, backend_for

    saved = program if backend_for(pair, backend).saves else None
    compare = functools.partial(pt2qa.compare_deployed, pair, batches, backend=backend, program=saved, **given)
    try:
        return compare()
    except OtherProgramError:
        say(f"{program} was lowered from another model or by other versions, and is replaced")
        shutil.rmtree(program)
        return compare()


@main.command("record-inputs")
@options.flow
@options.output("-o", "file", required=True, help="The file to write.")
def record_inputs(flow: str, file: Path) -> None:
    """Write the inputs that a device must run, for a backend that cannot run here.

    FLOW.py is the same as for analyze; its evaluation batches are written, if it has any, as pt2qa deploy runs
    them. The file has the tensors batch0.input0, batch0.input1 ...; its metadata
    entry pt2qa, in JSON, has their names, and those of the outputs to write. Run the model on the device, write
    batch0.output0, batch0.output1 ... to a safetensors file, if possible with the same metadata, and compare:

    \b
      pt2qa record-inputs flow.py -o inputs.safetensors
      pt2qa deploy flow.py -q xnnpack -o deploy --deployed outputs.safetensors

    help(pt2qa.record_inputs) shows a script that runs a .pte file and writes its outputs.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    given = load_flow(flow).fitted()
    write(file, functools.partial(pt2qa.record_inputs, given.capture(), given.evaluation))
