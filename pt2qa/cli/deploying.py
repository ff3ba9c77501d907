"""``pt2qa deploy`` and ``pt2qa record-inputs``: the kernels that ship, here or on a device."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import click

import pt2qa
from pt2qa._report.atomic import make_folder
from pt2qa.cli import options
from pt2qa.cli.analyzing import unusable
from pt2qa.cli.flow import load_flow, measured_on
from pt2qa.cli.group import main, say, write


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
@options.backend
@options.prints_report
def deploy(
    flow: str,
    spec: str,
    folder: Path,
    deployed: Path | None,
    program: Path | None,
    backend: str | None,
    printing: options.Printing,
) -> None:
    """Lower a quantized model, run it here, and compare its kernels with the converted graph.

    FLOW.py is the same as for analyze; its evaluation batches are run, if it has any. The report says
    which stage adds the output's error (eager, capture, prepared, converted, deployed), and which kernels differ from
    the converted graph.

    \b
      pt2qa deploy flow.py -q xnnpack -o deploy
      pt2qa deploy flow.py -q x86 --backend x86:isa=avx2 -o deploy
      pt2qa deploy flow.py -q xnnpack -o deploy --deployed model.pte
      pt2qa deploy --inspect model.pte
      pt2qa deploy flow.py -q xnnpack -o deploy --deployed outputs.safetensors
      pt2qa gate deploy/deployed.safetensors --require 'sqnr>=30' --require 'suspect_values<=0'

    The report is DIR/deployed.safetensors. A second run reuses DIR/program, or replaces it if the converted graph or a
    version changed since. With --deployed, only outputs are compared, with those of a .pte file, of an AOTInductor
    package (.pt2), or of a device (see pt2qa record-inputs). The exit code is 1 if quantization gives NaN or
    infinities, or if no batch has a number.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa._deployed.deployment import OtherProgramError, backend_for

    if deployed is not None and program is not None:
        raise click.UsageError("give --deployed, a program made elsewhere, or --program, one of pt2qa, not both")
    make_folder(folder)
    given = load_flow(flow).fitted()
    pair = pt2qa.quantize(given.capture(), spec, given.batches)
    own = deployed is None and program is None and backend_for(pair, backend).saves
    compare = functools.partial(
        pt2qa.compare_deployed,
        pair,
        measured_on(given),
        mask=given.mask,
        backend=backend,
        deployed=deployed,
        program=folder / "program" if own else program,
    )
    try:
        report = compare()
    except OtherProgramError:
        if not own:
            raise
        say(f"{folder / 'program'} was lowered from another model or by other versions, and is replaced")
        shutil.rmtree(folder / "program")
        report = compare()
    printing.deliver(report, folder / "deployed.safetensors")
    if reasons := unusable(report):
        say(*reasons)
        raise click.exceptions.Exit(1)


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
