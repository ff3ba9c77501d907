"""``pt2qa quantizers``: lists what is installed."""

from __future__ import annotations

import textwrap
from dataclasses import fields
from typing import Any, Final

import click

from pt2qa.cli import options
from pt2qa.cli.group import main

_SUMMARY_WIDTH: Final = 24


@main.command()
@click.option("--spec", "chosen", metavar="NAME", help="Print what this quantizer's backend takes, line by line.")
@options.width
def quantizers(chosen: str | None, width: int | None) -> None:
    """List the installed quantizers and their options.

    \b
    An option follows the name, in analyze's -q and in pt2qa.quantize:
      pt2qa analyze flow.py:flow -q xnnpack:per_channel=false -o reports
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    if chosen is not None:
        click.echo(_spec(chosen))
        return
    from tabulate import tabulate

    from pt2qa._report.table import screen_width
    from pt2qa.plugins import available, unavailable

    found, broken = available(), unavailable()
    if not found and not broken:
        click.echo("no quantizer is installed: no package has an entry point in the group pt2qa.quantizers")
        return
    for reason in broken.values():
        click.echo(reason, err=True)
    if not found:
        return
    written = {name: _options(plugin) for name, plugin in found.items()}
    taken = max(map(len, found)) + max(len(line) for lines in written.values() for line in lines) + 4
    room = max(_SUMMARY_WIDTH, screen_width(width) - taken)
    rows = [
        (name, "\n".join(textwrap.wrap(plugin.summary, room)), "\n".join(written[name]))
        for name, plugin in sorted(found.items())
    ]
    click.echo(tabulate(rows, headers=("name", "summary", "options"), disable_numparse=True))


def _spec(name: str) -> str:
    """What a plug-in's backend takes, one line of its spec on each line."""
    from pt2qa.plugins import resolve, spec_of

    spec = spec_of(resolve(name))
    if spec is None:
        raise click.UsageError(f"the quantizer {name} states no spec of what its backend takes")
    return str(spec)


def _options(plugin: Any) -> list[str]:
    return [f"{option.name}={_spelled(getattr(plugin, option.name))}" for option in fields(plugin)] or ["none"]


def _spelled(value: Any) -> str:
    """An option's value as -q takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
