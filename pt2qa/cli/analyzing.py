"""``pt2qa analyze``: quantizes a flow's model and reports its errors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pt2qa.cli.group import (
    DEBUG,
    Failure,
    flow_argument,
    main,
    measured_on,
    quantizers_of,
    quantizers_option,
    say,
    say_wrote,
)
from pt2qa.cli.printing import stop_if_interrupted
from pt2qa.errors import Pt2qaError, ReportError

if TYPE_CHECKING:
    from pt2qa.cli.flow import Flow


@main.command()
@flow_argument
@quantizers_option
@click.option(
    "-o", "folder", required=True, metavar="DIR", type=click.Path(path_type=Path), help="Folder for the reports."
)
@click.option(
    "--bad-cases", "bad_cases", metavar="K", type=click.IntRange(1), help="Also find the K samples that lose most."
)
@click.option(
    "--sensitivity",
    "ranks_sites",
    is_flag=True,
    help="Also rank activations and weights by the noise that each one makes.",
)
@click.option(
    "--deployed", "deploys", is_flag=True, help="Also lower the model, and compare the kernels that ship with it."
)
@click.option(
    "--target",
    metavar="'sqnr>=30'",
    help="Also search for a configuration whose output has this SQNR, in dB, or for plain 30 this much of the flow's "
    "metric.  [default: the flow's target]",
)
def analyze(
    flow: str,
    specs: Sequence[str],
    folder: Path,
    bad_cases: int | None,
    ranks_sites: bool,
    deploys: bool,
    target: str | None,
) -> None:
    """Quantize a model and report its error by layer and by weight.

    The function takes no arguments and returns (model, example_inputs, batches): the float model in eval mode; a
    tensor, a tuple of positional inputs or a dict of keyword inputs; and a list or DataLoader of batches of the same
    form. If the loader's items are not inputs, but for example (image, label), return a function from an item to the
    inputs as a fourth value. The function may also return a dict with these names (model, example_inputs, batches,
    inputs_of), and any of:

    \b
      evaluation      other batches to measure on; batches then only calibrate
      metric          a function of a model that returns a number, larger is better
      target          the metric to reach, or dB without a metric, as --target; or a pt2qa.Target
      dynamic_shapes  as for torch.export

    \b
      pt2qa analyze flow.py:flow -o reports
      pt2qa analyze flow.py:flow -q x86 -q xnnpack:per_channel=false -o reports
      pt2qa analyze flow.py:flow -q xnnpack -o reports --bad-cases 5 --sensitivity --target 'sqnr>=30'

    For each quantizer, the command writes DIR/<quantizer>-layers.safetensors and -weights.safetensors. --bad-cases adds
    -bad-cases.safetensors with the samples' inputs, --sensitivity adds -sensitivity.safetensors, --deployed adds
    -deployed.safetensors (see pt2qa deploy), and --target adds -reconfiguration.safetensors, -plan.json, the edits that
    pt2qa.quantize takes as overrides, and -quantizer.py, code that quantizes so in any export flow. If a target is not
    met, the best configuration found is written, stderr says so, and the exit code is 1. It is also 1 if quantization
    gives NaN or infinities, or if no batch has a number. After Ctrl-C it is 130, and the reports of finished
    work are written.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa.cli.flow import load_flow

    chosen = quantizers_of(specs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"cannot create the folder {folder}: {error.strerror or error}") from error
    given = load_flow(flow)
    wanted = given.target_of(target)
    analyses = functools.partial(
        _analyses, batches=measured_on(given), k=bad_cases, ranks_sites=ranks_sites, deploys=deploys, target=wanted
    )
    _analyze_each(given, chosen, folder, analyses)


def _analyze_each(
    flow: Flow, specs: Sequence[str], folder: Path, analyses: Callable[[Any], Iterable[tuple[str, Any]]]
) -> None:
    """Analyze with one quantizer after another; if one fails, the others still run."""
    import pt2qa

    capture = flow.capture()
    failed: list[Failure] = []
    reasons: list[str] = []
    for spec in specs:
        try:
            for what, report in analyses(pt2qa.quantize(capture, spec, flow.batches)):
                _keep(report, what, folder, spec)
                if what in ("layers", "deployed"):
                    found = [f"{spec}: {line}" for line in unusable(report)]
                    reasons += [line for line in found if line not in reasons]
                if what == "reconfiguration" and not report.met:
                    reasons.append(f"{spec}: the target is not met: {report.verdict}")
        except Pt2qaError as error:
            debug = click.get_current_context().meta[DEBUG]
            failed.append(Failure(error, f"{spec}: {error}", debug=debug))
        except KeyboardInterrupt:
            for failure in failed:
                failure.show()
            raise
    say(*reasons)
    for failure in failed[:-1]:
        failure.show()
    if failed:
        raise failed[-1]
    if reasons:
        raise click.exceptions.Exit(1)


def unusable(report: Any) -> list[str]:
    """Why a report is unusable: quantization fails on a batch, or no batch has a number."""
    from pt2qa._report.set_apart import about_faults, failures

    found = report.set_apart
    nothing_left = found and len(found) == report.batches
    return about_faults(found, report.batches)[:1] if failures(found) or nothing_left else []


def _analyses(
    pair: Any, batches: Any, k: int | None, ranks_sites: bool, deploys: bool, target: Any
) -> Iterator[tuple[str, Any]]:
    """Each report with its kind, as soon as it is made; if one fails, those before it are kept."""
    import pt2qa

    yield "layers", pt2qa.compare_layers(pair, batches)
    yield "weights", pt2qa.compare_weights(pair)
    if k is not None:
        yield "bad-cases", pt2qa.find_bad_cases(pair, batches, k=k)
    if deploys:
        yield "deployed", pt2qa.compare_deployed(pair, batches)
    ranked = pt2qa.sensitivity(pair, batches) if ranks_sites else None
    if ranked is not None:
        yield "sensitivity", ranked
    if target is not None:
        yield "reconfiguration", pt2qa.reconfigure(pair, batches, target=target, sensitivity=ranked)


def _keep(report: Any, what: str, folder: Path, spec: str) -> None:
    """Write a report, then print it; the long one of weights is not printed.

    Raises:
        KeyboardInterrupt: the analysis was interrupted, and the report covers the finished part.
    """
    # xnnpack:mode=dynamic,per_channel=false becomes xnnpack-mode=dynamic-per_channel=false.
    stem = re.sub(r"[^\w.=-]+", "-", spec)
    path = folder / f"{stem}-{what}.safetensors"
    report.save(path)
    say_wrote(path)
    if what == "reconfiguration":
        plan = folder / f"{stem}-plan.json"
        report.plan.save(plan)
        say_wrote(plan)
        code = folder / f"{stem}-quantizer.py"
        report.save_code(code)
        say_wrote(code)
    if what != "weights":
        click.echo(f"{report}\n")
    stop_if_interrupted(report)
