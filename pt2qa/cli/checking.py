"""``pt2qa check``, ``deploy``, ``reduce``, ``record-inputs``, ``fix``: what is wrong with a model or its kernels."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import floor, isfinite, isnan
from pathlib import Path
from typing import Any

import click

import pt2qa
from pt2qa._check.report import SEVERITIES
from pt2qa._diagnosis.report import explained
from pt2qa._report.atomic import make_folder, write_atomic
from pt2qa._report.base import Report, write_text
from pt2qa._report.notes import stop_if_interrupted
from pt2qa._report.prose import number, wrap
from pt2qa._report.table import screen_width
from pt2qa.cli import options, outcome
from pt2qa.cli.analyzing import unusable
from pt2qa.cli.flow import Flow, load_flow, measured_on
from pt2qa.cli.group import apart_if_possible, main, say, say_next, write
from pt2qa.cli.patching import patch_of
from pt2qa.errors import DeploymentError, FlowError, Pt2qaError, ReportError


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
    if spec is not None and loaded.overrides is not None:
        say("annotations are checked without the overrides of the flow; --calibrate also checks the model with them")
    findings = pt2qa.check(loaded.model, loaded.args, kwargs=loaded.kwargs, quantizer=spec, **shapes, **asked)
    pair = None
    if calibrate and findings.error_count:
        say("not calibrated, because of the errors below")
    elif calibrate:
        if loaded.mask is not None:
            say("check ignores the mask: it checks ops at all positions, padding included")
        pair = loaded.quantized(str(spec))
        findings = pt2qa.check(pair, model=loaded.model, batches=measured_on(loaded), **asked).joined(findings)
    if text is not None:
        reports: list[Report] = [findings]
        if spec is not None:
            try:
                reports.append(pt2qa.annotations(*((loaded.capture(), spec) if pair is None else (pair,))))
            except Pt2qaError as error:
                say(f"{text} lacks the configuration of the ops: {error}")
        write(text, partial(write_text, reports=reports))
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
    from pt2qa._deployed.deployment import lines_from_backend

    click.echo("\n".join(lines_from_backend(path, "inspect")))
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
    help="Print what a program holds (weights, biases, scales, limits by kernel), and exit. No model is run.",
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
@options.apart
@options.prints_report
def deploy(
    flow: str,
    spec: str,
    folder: Path,
    deployed: Path | None,
    program: Path | None,
    backends: tuple[str, ...],
    apart: bool,
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
    package (.pt2), or of a device (see pt2qa record-inputs), and the values that an ETDump (.etdp) has. The exit code
    is 1 if quantization gives NaN or infinities, or if no batch has a number.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    if deployed is not None and program is not None:
        raise click.UsageError("give --deployed, a program made elsewhere, or --program, one of pt2qa, not both")
    if len(backends) > 1 and (deployed is not None or program is not None):
        raise click.UsageError("give one --backend with --deployed or --program: several lower the model anew")
    make_folder(folder)
    given = _flow_for(flow, spec, backends[0] if backends else None)
    pair = given.quantized(spec)
    common: dict[str, Any] = {"mask": given.mask, "backend": backends[0] if backends else None}
    batches, file = measured_on(given), folder / "deployed.safetensors"
    report: Report
    compare: Callable[..., Report]
    if len(backends) > 1:
        file = folder / "runtimes.safetensors"
        click.get_current_context().params["runtimes"] = file  # for what is said to type next
        compare = partial(pt2qa.compare_runtimes, pair, batches, backends, metric=given.metric, mask=given.mask)
        report = apart_if_possible(compare, apart)
    elif deployed is not None:
        from pt2qa._deployed.recorded import RECORDED

        metric = None if deployed.suffix in RECORDED else given.metric
        compare = partial(pt2qa.compare_deployed, pair, batches, metric=metric, deployed=deployed, **common)
        report = apart_if_possible(compare, apart)
    else:
        function: Any = lowered if program is None else pt2qa.compare_deployed
        folder = folder / "program" if program is None else program
        compare = partial(function, pair, batches, program=folder, metric=given.metric, **common)
        report = apart_if_possible(compare, apart)
    replace(printing, file=file).deliver(report)
    if reasons := unusable(report):
        say(*reasons)
        raise click.exceptions.Exit(1)


def _flow_for(where: str, spec: str, backend: str | None) -> Flow:
    """A flow, without the dynamic scales of the quantizer's own kernels where another backend runs the model."""
    given = load_flow(where).fitted()
    own = backend is None or backend.partition(":")[0] == spec.partition(":")[0]
    return given if own else replace(given, as_deployed=False)


def lowered(pair: Any, batches: Any, program: Path, *, backend: str | None, **given: Any) -> Any:
    """The comparison with the program in a folder of the command, which replaces another's; it is kept if it can be."""
    from pt2qa._deployed.deployment import OtherProgramError, backend_for

    saved = program if backend_for(pair, backend).saves else None
    compare = partial(pt2qa.compare_deployed, pair, batches, backend=backend, program=saved, **given)
    try:
        return compare()
    except OtherProgramError:
        say(f"{program} was lowered from another model or by other versions, and is replaced")
        shutil.rmtree(program)
        return compare()


@main.command()
@options.flow
@options.quantizer
@options.folder
@click.option(
    "--fault",
    type=click.Choice(("kernel", "lowering", "nonfinite", "rounding")),
    default="kernel",
    show_default=True,
    help="What to look for: a kernel that differs from the converted graph, a model that the backend refuses, NaN or "
    "infinity from finite values, or the region whose rounding costs most.",
)
@click.option("-b", "--backend", metavar="SPEC", help="What lowers and runs it.  [default: the quantizer's]")
@options.apart
def reduce(flow: str, spec: str, folder: Path, fault: Any, backend: str | None, apart: bool) -> None:
    """Cut the smallest part that shows a fault out of a quantized model, as a script that runs without pt2qa.

    FLOW.py is the same as for analyze; its first evaluation batch is run, or its first batch. DIR/part has the part
    with its weights and inputs, and run.py, which shows the fault with the backend alone: attach it to a report.

    \b
      pt2qa reduce flow.py -q xnnpack -o reduced
      pt2qa reduce flow.py -q xnnpack --fault lowering -o reduced
      python reduced/part/run.py
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    if (part := folder / "part").exists():
        raise click.UsageError(f"{part} is there already, from an earlier run: give another folder with -o")
    make_folder(folder)
    given = _flow_for(flow, spec, backend)
    pair = given.quantized(spec)
    found = apart_if_possible(
        partial(pt2qa.reduce, pair, next(iter(measured_on(given))), fault, backend=backend), apart
    )
    found.save(part)
    click.echo(str(found))


@main.command("record-inputs")
@options.flow
@options.output("-o", "file", required=True, help="The file to write.")
@click.option(
    "--program",
    type=click.Path(path_type=Path),
    help="What the device will run, such as model.pte: also prints the commands that run it there with these inputs, "
    "and writes what they need beside FILE.",
)
def record_inputs(flow: str, file: Path, program: Path | None) -> None:
    """Write the inputs that a device must run, for a backend that cannot run here.

    FLOW.py is the same as for analyze; its evaluation batches are written, if it has any, as pt2qa deploy runs
    them. The file has the tensors batch0.input0, batch0.input1 ...; its metadata
    entry pt2qa, in JSON, has their names, and those of the outputs to write. Run the model on the device, write
    batch0.output0, batch0.output1 ... to a safetensors file, if possible with the same metadata, and compare:

    \b
      pt2qa record-inputs flow.py -o inputs.safetensors
      pt2qa record-inputs flow.py -o inputs.safetensors --program model.pte
      pt2qa deploy flow.py -q xnnpack -o deploy --deployed outputs.safetensors

    help(pt2qa.record_inputs) shows a script that runs a .pte file and writes its outputs.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    given = load_flow(flow).fitted()
    write(file, partial(pt2qa.record_inputs, given.capture(), given.evaluation))
    if program is not None:
        from pt2qa._deployed.deployment import lines_from_backend

        click.echo("\n".join(lines_from_backend(program, "record", file)))


@main.command()
@options.flow
@options.quantizer
@options.folder
@click.option(
    "--target",
    metavar="'sqnr>=30'",
    help="Also leave ops in float until this SQNR in dB or, as a plain number, the flow's metric is reached.  "
    "[default: the flow's target]",
)
@options.backend
@options.width
def fix(flow: str, spec: str, folder: Path, target: str | None, backend: str | None, width: int | None) -> None:
    """Find what costs accuracy, apply what helps, and prove it on the kernels.

    The function is the same as for pt2qa analyze. The model is quantized and diagnosed, repairs included; what was
    measured to help is applied; with a target that is not met, ops are left in float until it is. The result is lowered
    and run, and measured by the metric of the function, if it has one.

    \b
      pt2qa fix flow.py -q xnnpack -o fixed
      pt2qa fix flow.py -q xnnpack -o fixed --target 'sqnr>=30'

    \b
      DIR/quantizer.py     quantizes the model so, in any export flow
      DIR/plan.json        the edits, for --overrides of other commands
      DIR/flow.patch       for git apply: the flow with the plan, where its function returns a dict or a tuple
      DIR/program          the lowered model, if the backend can write it
      DIR/report.html      all reports as one page; each is also DIR/NAME.safetensors

    The exit code is 1 if a target is not met, if a kernel computes something else than the converted graph, if
    quantization gives NaN or infinities, or if no batch has a number.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa._report.html import html_page

    make_folder(folder)
    given = _flow_for(flow, spec, backend)
    done = _Fix(flow, given, measured_on(given), given.target_of(target), folder, width)
    first = given.quantized(spec)
    pair = done.applied(first)
    profiles = done.compared(first, pair)
    done.keep("bad-cases", given.bad_cases(pair, 8), shown=False)
    kernels = done.on_kernels(pair, backend)
    done.write_code(pair)
    reasons = done.shortcomings()
    name, report = ("layers", done.reports["layers"]) if kernels is None else ("deployed", kernels)
    measured = kernels is not None and not isnan(kernels.value)
    value, step = (report.value, 1e-3) if measured else (report.sqnr, 1.0)
    patch = str(folder / "flow.patch")
    steps = [["git", "apply", patch]] if patch in outcome.found()["wrote"] else []
    if isfinite(value):
        least = f"{'value' if measured else 'sqnr'}>={step * floor(value / step):g}"
        steps.append(["pt2qa", "gate", str(folder / f"{name}.safetensors"), "--require", least])
    commands = [*map(shlex.join, steps)]
    diagnosis = replace(done.reports["diagnosis"], next_command="\n".join(commands))
    shown = list({**done.reports, "diagnosis": diagnosis}.values())
    write(folder / "report.html", partial(write_atomic, content=html_page(shown, profiles)))
    say(*reasons)
    say_next(*commands)
    if reasons:
        raise click.exceptions.Exit(1)


class _Fix:
    """What was found and written so far."""

    def __init__(self, where: str, flow: Flow, batches: Any, target: Any, folder: Path, width: int | None) -> None:
        self.where, self.flow, self.batches, self.target = where, flow, batches, target
        self.folder, self.width = folder, width
        self.reports: dict[str, Any] = {}

    def applied(self, pair: Any) -> Any:
        """The pair with all that helps, and with a target, with the ops in float that it takes."""
        metric = self.flow.metric if self.target is None else None
        found = pt2qa.diagnose(
            pair, self.batches, metric=metric, target=self.target, repairs=None, mask=self.flow.mask, verify_code=False
        )
        self.keep("diagnosis", found, shown=False)
        causes = [line for row in found.rows for line in explained(row, found.unit)]
        self.tell(*found.lines(), *causes, *(f"Note: {note}" for note in found.notes))
        reached = found.met != 0
        try:
            pair, reached = found.pair, found.search_target is None
        except ReportError:
            say("the model stays as it was quantized: nothing was found that can be applied to it")
        if self.target is not None and not reached:
            # The diagnosis has fitted what is free.
            searched = pt2qa.reconfigure(
                pair, self.batches, target=self.target, repairs=(), mask=self.flow.mask, verify_code=False
            )
            self.keep("reconfiguration", searched)
            pair = searched.pair
        return pair

    def compared(self, first: Any, pair: Any) -> list[Any]:
        """Keeps what the layers lose, and what the edits changed; returns the profiles for the page's histograms."""
        batches, mask = self.batches, self.flow.mask
        layers = pt2qa.compare_layers(pair, batches, mask=mask)
        self.keep("layers", layers, shown=False)
        found: list[Any] = [pt2qa.profile(pair, batches, side=each, mask=mask) for each in ("reference", "quantized")]
        if pair is not first:
            found.append(replace(pt2qa.profile(first, batches, side="quantized", mask=mask), side="before"))
            before = pt2qa.compare_layers(first, batches, mask=mask)
            stop_if_interrupted(before.notes)
            self.keep("changes", pt2qa.diff(before, layers), shown=False)
        for each in found:
            stop_if_interrupted(each.notes)
        return found

    def on_kernels(self, pair: Any, backend: str | None) -> Any:
        """The comparison with the kernels; None, and why, where the model cannot be lowered and run here."""
        flow, program = self.flow, self.folder / "program"
        try:
            report = lowered(pair, self.batches, program, backend=backend, metric=flow.metric, mask=flow.mask)
        except DeploymentError as error:
            say(f"not run on kernels: {error}")
            return None
        self.keep("deployed", report, shown=False)
        self.tell(*report.summary().splitlines()[:2])
        if report.metric:
            values = [f"{row.name} {number(row.value)}" for row in report.stages if not isnan(row.value)]
            self.tell(f"{report.metric}: {' -> '.join(values)}")
        return report

    def tell(self, *lines: str) -> None:
        for line in lines:
            click.echo(wrap(line, screen_width(self.width), indent="     "))

    def keep(self, name: str, report: Any, shown: bool = True) -> None:
        self.reports[name] = report
        outcome.found()["reports"].append(report)
        write(self.folder / f"{name}.safetensors", report.save)
        if shown:
            click.echo(f"{report.text(width=self.width)}\n")
        stop_if_interrupted(getattr(report, "notes", ()))

    def write_code(self, pair: Any) -> None:
        from pt2qa._quantize.plain_flow import plain_flow
        from pt2qa.plugins import describe

        made = plain_flow(pair, about=f"{pair.model}, quantized by {pair.quantizer} with what pt2qa fix applied.")
        write(self.folder / "quantizer.py", partial(write_atomic, content=made.code))
        say(f"{self.folder / 'quantizer.py'}, executed and compared with the pair: {made.verified}")
        if pair.recipe.data is None or pair.recipe.data.batches is not self.flow.batches:
            say("calibrate on the data that the diagnosis names, as was done here: those of the flow alone do not fit")
        write(
            self.folder / "plan.json",
            pt2qa.OverridePlan(pair.recipe.edits, describe(pair.recipe.plugin), pair.model).save,
        )
        if reason := self._why_no_patch(pair):
            say(f"no flow.patch: {reason}")

    def _why_no_patch(self, pair: Any) -> str:
        """Writes a patch of the flow after which it quantizes so; else says why there is none."""
        if not pair.recipe.edits:
            return "no edit helps, so the plan is empty"
        if pair.recipe.data is None or pair.recipe.data.batches is not self.flow.batches:
            return "the remedy is other calibration data, which only you can put into the flow"
        if pair.quantizer != self.reports["diagnosis"].quantizer:
            return f"the remedy is another option of the quantizer: -q {pair.quantizer}"
        try:
            made = patch_of(self.where, self.folder / "plan.json")
        except FlowError as error:
            return str(error)
        write(self.folder / "flow.patch", partial(write_atomic, content=made))
        return ""

    def shortcomings(self) -> list[str]:
        """Why the exit code is 1."""
        searched, kernels = self.reports.get("reconfiguration"), self.reports.get("deployed")
        found = unusable(self.reports["layers"])
        found += [] if searched is None or searched.met else [f"the target is not met: {searched.verdict}"]
        if kernels is not None and kernels.suspects:
            found.append(f"{len(kernels.suspects)} kernels compute something else than the converted graph")
        return found
