"""``pt2qa analyze``: quantizes a flow's model and reports its errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

import pt2qa
from pt2qa._report.atomic import make_folder, write_atomic
from pt2qa._report.notes import stop_if_interrupted
from pt2qa.cli import options, outcome
from pt2qa.cli.flow import Flow, measured_on, own_part
from pt2qa.cli.group import DEBUG, Failure, apart_if_possible, main, plan_in, say, say_next, write
from pt2qa.errors import Pt2qaError


@main.command()
@options.flow
@options.quantizers
@options.folder
@click.option(
    "--diagnosis/--no-diagnosis",
    "diagnoses",
    default=True,
    show_default=True,
    help="Find causes, and measure remedies.",
)
@click.option(
    "--repairs",
    is_flag=True,
    help="Also measure repairs (see pt2qa repair) in the diagnosis, which then takes about twice as long.",
)
@click.option("--bad-cases", metavar="K", type=click.IntRange(1), help="Also find the K worst samples.")
@click.option(
    "--sensitivity", "ranks_sites", is_flag=True, help="Also rank activations and weights by the noise that each adds."
)
@click.option("--profiles", is_flag=True, help="Also profile both sides; the page then shows histograms of each op.")
@click.option("--deployed", "deploys", is_flag=True, help="Also lower the model and compare the deployed kernels.")
@click.option(
    "--target",
    metavar="'sqnr>=30'",
    help="Also search for a configuration that reaches this SQNR in dB or, as a plain number, the flow's metric.  "
    "[default: the flow's target]",
)
@options.overrides
@click.option("--csv", "writes_csv", is_flag=True, help="Also write the tables of each report as CSV files.")
@click.option("--html", "writes_html", is_flag=True, help="Also write all reports as one page, DIR/report.html.")
@options.prints_reports
def analyze(
    flow: str,
    specs: Sequence[str],
    folder: Path,
    target: str | None,
    overrides: Path | None,
    printing: options.Printing,
    **asked: Any,
) -> None:
    """Quantize a model and find the causes of its error, by layer and by weight.

    The function takes no arguments and returns (model, example_inputs, batches): the float model in eval mode; a
    tensor, a tuple of positional inputs or a dict of keyword inputs; and a list or DataLoader of batches of the same
    form. If the loader's items are not inputs, but for example (image, label), return a function from an item to the
    inputs as a fourth value. The function may also return a dict with these names (model, example_inputs, batches,
    inputs_of), and any of:

    \b
      evaluation      other batches to measure on; batches then only calibrate
      targets_of      a function from an item to its integer labels, for --bad-cases
      mask            the input, or a function of a batch, that says which positions count
      metric          a function of a model that returns a number, larger is better
      target          the metric to reach, or dB without a metric, as --target; or a pt2qa.Target
      dynamic_shapes  as for torch.export
      as_deployed     False: dynamic scales are those of the converted graph, not
                      of the backend's kernels

    \b
      pt2qa analyze flow.py -o reports
      pt2qa analyze flow.py -q x86 -q xnnpack:per_channel=false -o reports
      pt2qa analyze flow.py -q xnnpack -o reports --bad-cases 5 --sensitivity --target 'sqnr>=30'
      pt2qa analyze flow.py -q xnnpack -o after --overrides reports/xnnpack-diagnosis-plan.json

    For each quantizer, the command writes DIR/<quantizer>-diagnosis.safetensors, -error-budget if the diagnosis took
    one, -layers and -weights. --bad-cases adds -bad-cases with the samples' inputs, --sensitivity adds -sensitivity,
    --profiles adds -profile-reference and -profile-quantized (see pt2qa profile), --deployed adds -deployed (see
    pt2qa deploy), and --target adds -reconfiguration. The edits that these and the diagnosis recommend are -plan.json
    and -diagnosis-plan.json, for --overrides; -quantizer.py and -diagnosis-quantizer.py apply them in any export flow.
    The diagnosis is printed first, and the command to type next last, on stderr; --sort is for the layers.

    Under torchrun, each process takes its part of the batches, and the first one writes and prints the reports of all:

    \b
      torchrun --nproc-per-node 4 -m pt2qa analyze flow.py -q xnnpack -o reports

    If a target is not met, the best configuration found is written, stderr says so, and the exit code is 1. It is also
    1 if quantization gives NaN or infinities, or if no batch has a number. After Ctrl-C it is 130, and the reports of
    finished work are written.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa._layers.rows import LayerRow
    from pt2qa._report.rows import columns_of, derived_of
    from pt2qa._report.table import order_of

    plan = plan_in(overrides)
    # An order that layers do not have is refused before anything runs.
    order_of(printing.sort, (*columns_of(LayerRow), *derived_of(LayerRow)))
    make_folder(folder)
    with own_part(flow) as (given, writes):
        wanted = given.target_of(target)
        analyses = _Analyses(given, measured_on(given), wanted, folder, writes, printing, **asked)
        _analyze_each(flow, analyses, specs, plan)


def _analyze_each(where: str, analyses: _Analyses, specs: Sequence[str], plan: Any) -> None:
    """Analyze with one quantizer after another; if one fails, the others still run."""
    flow = analyses.flow
    capture = flow.capture()
    failed: list[Failure] = []
    reasons: list[str] = []
    steps: list[str] = []
    every: list[Any] = []
    for spec in specs:
        made: dict[str, Any] = {}
        try:
            for what, report in analyses.of(flow.quantized(spec, plan, capture)):
                analyses.keep(report, what, spec)
                made[what] = report
                every.append(report)
                if what in ("layers", "deployed"):
                    found = [f"{spec}: {line}" for line in unusable(report)]
                    reasons += [line for line in found if line not in reasons]
                if what == "reconfiguration" and not report.met:
                    reasons.append(f"{spec}: the target is not met: {report.verdict}")
            step, advice = outcome.next_step(made, where, flow.batches, spec, analyses.stem(spec))
            say(*filter(None, [advice]))
            if step:
                steps.append(step)
                every[every.index(made["diagnosis"])] = replace(made["diagnosis"], next_command=step)
        except Pt2qaError as error:
            debug = click.get_current_context().meta[DEBUG]
            failed.append(Failure(error, f"{spec}: {error}", debug=debug))
        except KeyboardInterrupt:
            for failure in failed:
                failure.show()
            raise
    if every and analyses.writes and analyses.writes_html:
        from pt2qa._report.html import write_html

        write(analyses.folder / "report.html", partial(write_html, every))
    say(*reasons)
    for failure in failed[:-1]:
        failure.show()
    if failed:
        raise failed[-1]
    say_next(*steps)
    if reasons:
        raise click.exceptions.Exit(1)


def unusable(report: Any) -> list[str]:
    """Why a report cannot be relied on: quantization fails on a batch, or no batch has a number."""
    from pt2qa._report.set_apart import about_faults, failures

    found = report.set_apart
    nothing_left = found and len(found) == report.batches
    return about_faults(found, report.batches)[:1] if failures(found) or nothing_left else []


@dataclass(frozen=True)
class _Analyses:
    """What is asked for, and where reports go; of several processes, one ``writes``."""

    flow: Flow
    batches: Any
    target: Any
    folder: Path
    writes: bool
    printing: options.Printing
    diagnoses: bool
    repairs: bool
    bad_cases: int | None
    ranks_sites: bool
    profiles: bool
    deploys: bool
    writes_csv: bool
    writes_html: bool

    def of(self, pair: Any) -> Iterator[tuple[str, Any]]:
        """Each report with its kind, as soon as it is made; if one fails, those before it are kept."""
        diagnosis = self._diagnosis(pair) if self.diagnoses else None
        if diagnosis is not None:
            yield "diagnosis", diagnosis
            if "budget" in diagnosis.reports:
                yield "error-budget", diagnosis.reports["budget"]
        yield "layers", pt2qa.compare_layers(pair, self.batches, mask=self.flow.mask)
        yield "weights", pt2qa.compare_weights(pair)
        if self.profiles:
            yield "profile-reference", pt2qa.profile(pair, self.batches, mask=self.flow.mask)
            yield "profile-quantized", pt2qa.profile(pair, self.batches, side="quantized", mask=self.flow.mask)
        if self.bad_cases is not None:
            yield "bad-cases", self.flow.bad_cases(pair, self.bad_cases)
        if self.deploys:
            kernels = None if diagnosis is None else diagnosis.reports.get("deployed")
            if kernels is None:
                compare = partial(pt2qa.compare_deployed, pair, self.batches, mask=self.flow.mask)
                kernels = apart_if_possible(compare, hasattr(os, "fork"))
            yield "deployed", kernels
        ranked = pt2qa.sensitivity(pair, self.batches, mask=self.flow.mask) if self.ranks_sites else None
        if ranked is not None:
            yield "sensitivity", ranked
        if self.target is not None:
            options = {"target": self.target, "sensitivity": ranked, "mask": self.flow.mask}
            yield "reconfiguration", pt2qa.reconfigure(pair, self.batches, **options)

    def _diagnosis(self, pair: Any) -> Any:
        """The diagnosis; None if there is none, for example without an SQNR, which must not stop the analyses."""
        # A target knows the metric that it is for.
        metric = self.flow.metric if self.target is None else None
        try:
            return pt2qa.diagnose(
                pair,
                self.batches,
                metric=metric,
                target=self.target,
                deployed=self.deploys,
                repairs=None if self.repairs else (),
                mask=self.flow.mask,
            )
        except Pt2qaError as error:
            say(f"no diagnosis: {error}")
            return None

    def stem(self, spec: str) -> Path:
        # xnnpack:mode=dynamic,per_channel=false becomes xnnpack-mode=dynamic-per_channel=false.
        return self.folder / re.sub(r"[^\w.=-]+", "-", spec)

    def keep(self, report: Any, what: str, spec: str) -> None:
        """Write and print a report; a partial one of an interrupted analysis raises KeyboardInterrupt then."""
        if self.writes:
            self._write(report, what, spec)
        stop_if_interrupted(getattr(report, "notes", ()))

    def _write(self, report: Any, what: str, spec: str) -> None:
        outcome.found()["reports"].append(report)
        stem = self.stem(spec)
        write(f"{stem}-{what}.safetensors", report.save)
        if what == "reconfiguration":
            write(f"{stem}-plan.json", report.plan.save)
            write(f"{stem}-quantizer.py", report.save_code)
        if what == "diagnosis" and report.plan_json:
            write(f"{stem}-diagnosis-plan.json", report.plan.save)
        if what == "diagnosis" and report.code:
            write(f"{stem}-diagnosis-quantizer.py", partial(write_atomic, content=report.code))
        if self.writes_csv:
            self._write_csv(report, f"{stem}-{what}")
        if what not in ("weights", "error-budget", "profile-reference", "profile-quantized"):  # they are long
            printing = self.printing if what == "layers" else replace(self.printing, sort="worst")
            click.echo(f"{printing.text(report)}\n")

    def _write_csv(self, report: Any, stem: str) -> None:
        from pt2qa._report.rows import tables_of

        for part in tables_of(type(report)):
            if getattr(report, part):
                file = f"{stem}.csv" if part == "rows" else f"{stem}-{part}.csv"
                write(file, partial(report.to_csv, extended=True, part=part))
