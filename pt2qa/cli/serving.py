"""``pt2qa serve``: a page on this machine where one tries edits of a quantized model, live."""

from __future__ import annotations

from pathlib import Path

import click

from pt2qa.cli import options
from pt2qa.cli.flow import load_flow, measured_on
from pt2qa.cli.group import main, plan_in, say


@main.command()
@options.flow
@options.quantizer
@options.overrides
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of 127.0.0.1.  [default: a free one]")
def serve(flow: str, spec: str, overrides: Path | None, port: int) -> None:
    """Try edits of a quantized model in a browser, and see what each one gives.

    The function is the same as for pt2qa analyze. The page lists the places of the model that are quantized, with their
    share of the output's noise. Each can be set to float, to another observer or to another range; the page then shows
    the output's SQNR and the metric of the function: simulated, or quantized again where the simulator cannot know the
    scales. It saves what was chosen as a plan for --overrides of other commands and pt2qa.quantize.

    \b
      pt2qa serve flow.py -q xnnpack

    The server listens on this machine alone, until Ctrl-C, and answers only to the address that it prints.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa._reconfigure.session import Session
    from pt2qa.cli.server import Server

    given = load_flow(flow).fitted()
    batches = measured_on(given)
    pair = given.quantized(spec, plan_in(overrides))
    with Server(Session(pair, batches, metric=given.metric, mask=given.mask), port) as server:
        say(*pair.notes)
        click.echo(f"{server.address} shows {pair.model}, quantized by {pair.quantizer}; Ctrl-C ends it")
        server.serve_forever()
