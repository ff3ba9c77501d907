"""The command line: ``pt2qa show``, ``pt2qa quantizers``, ``pt2qa analyze``.

Commands import what they need when they run: ``pt2qa show`` must not wait for torch.
"""

from __future__ import annotations

import re
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pt2qa.errors import Pt2qaError, ReportError

if TYPE_CHECKING:
    from pt2qa.flow import Flow

_DEBUG: Final = "pt2qa.debug"
_SUMMARY_WIDTH: Final = 24


class Failure(click.ClickException):
    """An expected error on its way out: one line on stderr, exit code 2; with ``--debug`` the traceback before it."""

    exit_code = 2

    def __init__(self, error: Exception, message: str, *, debug: bool) -> None:
        super().__init__(" ".join(message.split()))
        self.error = error
        self.debug = debug

    def show(self, file: Any = None) -> None:
        """Print the error; click calls this before it leaves."""
        if self.debug:
            click.echo("".join(traceback.format_exception(self.error)), file=file, err=True, nl=False)
        click.echo(f"pt2qa: {self.message}", file=file, err=True)


class Commands(click.Group):
    """A group whose expected errors are :class:`Failure`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments; what is wrong with them is a :class:`Failure`."""
        # Looked for before parsing, since parsing may be what fails; so it counts wherever it stands.
        debug = "--debug" in args
        with _failing(debug):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[_DEBUG] = debug
        return context

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an expected error is a :class:`Failure`."""
        with _failing(ctx.meta[_DEBUG]):
            return super().invoke(ctx)


@contextmanager
def _failing(debug: bool) -> Iterator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        raise Failure(error, f"{error.format_message()}{hint}", debug=debug) from error
    except Pt2qaError as error:
        raise Failure(error, str(error), debug=debug) from error


def _version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from pt2qa.report import Environment

        here = Environment.here("")
        stack = f"torch {here.torch}, torchao {here.torchao}, executorch {here.executorch}"
        click.echo(f"pt2qa {here.pt2qa} ({stack})")
        context.exit()


_debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")

_width_option = click.option(
    "--width",
    type=click.IntRange(min=40),
    metavar="N",
    help="Columns of the screen, 40 or more.  [default: the terminal's, or 100]",
)


@click.group(name="pt2qa", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show versions and exit."
)
@_debug_option
def main() -> None:
    """Find where a PT2E-quantized model loses accuracy.

    Write a file that returns your model, example inputs and batches, analyze it, look at the report:

    \b
      # flow.py
      import torch
      def flow():
          model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).eval()
          batches = [torch.randn(4, 8) for _ in range(8)]
          return model, batches[0], batches

    \b
      pt2qa quantizers
      pt2qa analyze flow.py:flow -q xnnpack -o reports
      pt2qa show reports/xnnpack-layers.safetensors --sort graph

    SQNR, in dB, is the signal's power over the error's: 20 dB is 1 % noise, and 6 dB is one bit. "Isolated" is a
    layer's own error, on the float model's inputs; plain SQNR includes all error from upstream.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are


@main.command()
@click.argument("report", type=click.Path(path_type=Path))
@click.option(
    "--sort", default="worst", show_default=True, metavar="worst|graph|name|COLUMN", help="Order of the rows."
)
@click.option(
    "--limit", default=20, show_default="20", type=click.IntRange(0), metavar="N", help="Rows of a table; 0 for all."
)
@click.option("--csv", "csv_file", metavar="FILE", help="Also write all rows, in graph order, as CSV; - for CSV alone.")
@_width_option
@_debug_option
def show(report: Path, sort: str, limit: int, csv_file: str | None, width: int | None) -> None:
    """Print a report file.

    \b
      pt2qa show reports/xnnpack-layers.safetensors
      pt2qa show reports/xnnpack-layers.safetensors --sort saturation --limit 5
      pt2qa show reports/xnnpack-weights.safetensors --csv weights.csv
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa.report import load

    loaded = load(report)
    if csv_file == "-":
        click.echo(loaded.csv(extended=True), nl=False)
        return
    click.echo(loaded.text(sort=sort, limit=limit or None, width=width))
    if csv_file is not None:
        loaded.to_csv(csv_file, extended=True)
        click.echo(f"wrote {csv_file}", err=True)


@main.command()
@_width_option
@_debug_option
def quantizers(width: int | None) -> None:
    """List the quantizers that are installed, with their options and defaults.

    \b
    An option follows the name, in analyze's -q and in pt2qa.quantize:
      pt2qa analyze flow.py:flow -q xnnpack:per_channel=false -o reports
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from tabulate import tabulate

    from pt2qa.plugins import available
    from pt2qa.report.table import screen_width

    found = available()
    if not found:
        click.echo("no quantizer is installed: no package has an entry point in the group pt2qa.quantizers")
        return
    options = {name: _options(plugin) for name, plugin in found.items()}
    taken = max(map(len, found)) + max(len(line) for lines in options.values() for line in lines) + 4
    room = max(_SUMMARY_WIDTH, screen_width(width) - taken)
    rows = [
        (name, "\n".join(textwrap.wrap(plugin.summary, room)), "\n".join(options[name]))
        for name, plugin in sorted(found.items())
    ]
    click.echo(tabulate(rows, headers=("name", "summary", "options"), disable_numparse=True))


def _options(plugin: Any) -> list[str]:
    if not is_dataclass(plugin) or not fields(plugin):
        return ["none"]
    return [f"{option.name}={_spelled(getattr(plugin, option.name))}" for option in fields(plugin)]


def _spelled(value: Any) -> str:
    """An option's value as -q takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@main.command()
@click.argument("flow", metavar="FLOW.py:function")
@click.option(
    "-q",
    "--quantizer",
    "specs",
    multiple=True,
    metavar="SPEC",
    help="Name, or name:option=value,...; repeatable.  [default: all that are installed]",
)
@click.option(
    "-o", "folder", required=True, metavar="DIR", type=click.Path(path_type=Path), help="Folder for the reports."
)
@click.option(
    "--bad-cases", "bad_cases", metavar="K", type=click.IntRange(1), help="Also find the K samples that lose most."
)
@click.option(
    "--sensitivity", "ranks_sites", is_flag=True, help="Also rank activations and weights by the noise each one makes."
)
@click.option(
    "--target", metavar="'sqnr>=30'", help="Also search a configuration whose output has this SQNR, in dB; 30 will do."
)
@_debug_option
def analyze(
    flow: str, specs: Sequence[str], folder: Path, bad_cases: int | None, ranks_sites: bool, target: str | None
) -> None:
    """Quantize a model and report its error by layer and by weight.

    The function takes nothing and returns (model, example_inputs, batches): the float model in eval mode; a tensor, a
    tuple of positional inputs or a dict of keyword inputs; and a list or DataLoader of batches of the same form, which
    calibrate and then measure. Where items are not inputs, such as (image, label), return a function from an item to
    the inputs as fourth. A dict with these names (model, example_inputs, batches, inputs_of) may also hold
    dynamic_shapes, as torch.export takes them.

    \b
      pt2qa analyze flow.py:flow -o reports
      pt2qa analyze flow.py:flow -q x86 -q xnnpack:per_channel=false -o reports
      pt2qa analyze flow.py:flow -q xnnpack -o reports --bad-cases 5 --sensitivity --target 'sqnr>=30'

    Each quantizer makes DIR/<quantizer>-layers.safetensors and -weights.safetensors; --bad-cases adds
    -bad-cases.safetensors with the samples' inputs, --sensitivity adds -sensitivity.safetensors, and --target adds
    -reconfiguration.safetensors and -plan.json, the edits that pt2qa.quantize takes as overrides. Where a target cannot
    be met, the best that was found is written, stderr says so, and the exit code is 1.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa.flow import load_flow
    from pt2qa.plugins import available, resolve

    chosen = tuple(dict.fromkeys(specs)) or tuple(sorted(available()))
    if not chosen:
        raise click.UsageError("no quantizer is installed and none was given with -q", click.get_current_context())
    for spec in chosen:
        resolve(spec)
    wanted = Wanted(bad_cases, ranks_sites, None if target is None else _target(target))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"cannot create the folder {folder}: {error.strerror or error}") from error
    _analyze_each(load_flow(flow), chosen, folder, wanted)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What analyze does beyond layers and weights.

    Args:
        bad_cases: how many to keep; None for no search.
        sensitivity: whether to rank sites.
        target: of a reconfiguration; None for none.
    """

    bad_cases: int | None
    sensitivity: bool
    target: float | str | None


def _target(text: str) -> float | str:
    """A target that can be read; refused before anything runs."""
    try:
        return float(text)
    except ValueError:
        from pt2qa.reconfiguration.target import read_target

        read_target(text)
        return text


def _analyze_each(flow: Flow, specs: Sequence[str], folder: Path, wanted: Wanted) -> None:
    """Analyze with one quantizer after another; one that fails does not keep the others from running."""
    import pt2qa

    capture = pt2qa.capture(flow.model, flow.args, flow.kwargs, dynamic_shapes=flow.dynamic_shapes)
    failed: list[Failure] = []
    missed: list[str] = []
    for spec in specs:
        try:
            for what, report in _analyses(pt2qa.quantize(capture, spec, flow.batches), flow, wanted):
                _keep(report, what, folder, spec)
                if what == "reconfiguration" and not report.met:
                    missed.append(f"{spec}: the target is not met: {report.verdict}")
        except Pt2qaError as error:
            debug = click.get_current_context().meta[_DEBUG]
            failed.append(Failure(error, f"{spec}: {error}", debug=debug))
    for line in missed:
        click.echo(f"pt2qa: {' '.join(line.split())}", err=True)
    for failure in failed[:-1]:
        failure.show()
    if failed:
        raise failed[-1]
    if missed:
        click.get_current_context().exit(1)


def _analyses(pair: Any, flow: Flow, wanted: Wanted) -> Iterator[tuple[str, Any]]:
    """What each report is, and the report, as soon as it is made: one that fails leaves those before it."""
    import pt2qa

    yield "layers", pt2qa.compare_layers(pair, flow.batches)
    yield "weights", pt2qa.compare_weights(pair)
    if wanted.bad_cases is not None:
        yield "bad-cases", pt2qa.find_bad_cases(pair, flow.batches, k=wanted.bad_cases)
    ranked = None
    if wanted.sensitivity:
        ranked = pt2qa.sensitivity(pair, flow.batches)
        yield "sensitivity", ranked
    if wanted.target is not None:
        yield "reconfiguration", pt2qa.reconfigure(pair, flow.batches, target=wanted.target, sensitivity=ranked)


def _keep(report: Any, what: str, folder: Path, spec: str) -> None:
    """Print a report, but for the long one of weights, and write it."""
    if what != "weights":
        click.echo(f"{report}\n")
    stem = _file_stem(spec)
    path = folder / f"{stem}-{what}.safetensors"
    report.save(path)
    click.echo(f"wrote {path}", err=True)
    if what == "reconfiguration":
        plan = folder / f"{stem}-plan.json"
        report.plan.save(plan)
        click.echo(f"wrote {plan}", err=True)


def _file_stem(spec: str) -> str:
    """A quantizer spec as part of a file name.

    >>> _file_stem("xnnpack:mode=dynamic,per_channel=false")
    'xnnpack-mode=dynamic-per_channel=false'
    """
    return re.sub(r"[^\w.=-]+", "-", spec)


if __name__ == "__main__":
    main()
