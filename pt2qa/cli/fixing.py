"""``pt2qa fix``: diagnoses a flow's model, applies what helps, lowers the result, and measures it on its kernels."""

from __future__ import annotations

import shlex
from functools import partial
from math import floor, isfinite, isnan
from pathlib import Path
from typing import Any

import click

import pt2qa
from pt2qa._diagnosis.report import explained
from pt2qa._report.atomic import make_folder, write_atomic
from pt2qa._report.formats import number
from pt2qa._report.notes import stop_if_interrupted
from pt2qa._report.prose import wrap
from pt2qa._report.table import screen_width
from pt2qa.cli import options, outcome
from pt2qa.cli.analyzing import unusable
from pt2qa.cli.checking import lowered
from pt2qa.cli.flow import Flow, load_flow, measured_on
from pt2qa.cli.group import main, say, say_next, write
from pt2qa.errors import DeploymentError, ReportError


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
      DIR/program          the lowered model, if the backend can write it
      DIR/report.html      all reports as one page; each is also DIR/NAME.safetensors

    The exit code is 1 if a target is not met, if a kernel computes something else than the converted graph, if
    quantization gives NaN or infinities, or if no batch has a number.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    make_folder(folder)
    given = load_flow(flow).fitted()
    done = _Fix(given, measured_on(given), given.target_of(target), folder, width)
    pair = done.applied(pt2qa.quantize(given.capture(), spec, given.batches))
    done.keep("layers", pt2qa.compare_layers(pair, done.batches, mask=given.mask), shown=False)
    done.keep("bad-cases", pt2qa.find_bad_cases(pair, done.batches, k=8, mask=given.mask), shown=False)
    kernels = done.on_kernels(pair, backend)
    done.write_code(pair)
    done.write_page()
    reasons = done.shortcomings()
    say(*reasons)
    name, report = ("layers", done.reports["layers"]) if kernels is None else ("deployed", kernels)
    measured = kernels is not None and not isnan(kernels.value)
    value, step = (report.value, 1e-3) if measured else (report.sqnr, 1.0)
    if isfinite(value):
        least = f"{'value' if measured else 'sqnr'}>={step * floor(value / step):g}"
        say_next(shlex.join(["pt2qa", "gate", str(folder / f"{name}.safetensors"), "--require", least]))
    if reasons:
        raise click.exceptions.Exit(1)


class _Fix:
    """What was found and written so far."""

    def __init__(self, flow: Flow, batches: Any, target: Any, folder: Path, width: int | None) -> None:
        self.flow, self.batches, self.target, self.folder, self.width = flow, batches, target, folder, width
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

        made = plain_flow(pair, about=f"{pair.model}, quantized by {pair.quantizer} with what pt2qa fix applied.")
        write(self.folder / "quantizer.py", partial(write_atomic, content=made.code))
        say(f"{self.folder / 'quantizer.py'}, executed and compared with the pair: {made.verified}")
        if pair.recipe.data is None or pair.recipe.data.batches is not self.flow.batches:
            say("calibrate on data like the evaluation data, as was done here: the batches of the flow are unlike them")
        write(self.folder / "plan.json", pt2qa.OverridePlan(pair.recipe.edits, pair.quantizer, pair.model).save)

    def write_page(self) -> None:
        from pt2qa._report.html import write_html

        write(self.folder / "report.html", partial(write_html, list(self.reports.values())))

    def shortcomings(self) -> list[str]:
        """Why the exit code is 1."""
        searched, kernels = self.reports.get("reconfiguration"), self.reports.get("deployed")
        found = unusable(self.reports["layers"])
        found += [] if searched is None or searched.met else [f"the target is not met: {searched.verdict}"]
        if kernels is not None and kernels.suspects:
            found.append(f"{len(kernels.suspects)} kernels compute something else than the converted graph")
        return found
