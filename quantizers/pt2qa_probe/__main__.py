"""``python -m pt2qa_probe NAME``: writes the spec of a backend, for its author to check."""

from __future__ import annotations

import click

from pt2qa import Pt2qaError


@click.command()
@click.argument("backend")
@click.argument("ops", nargs=-1)
def main(backend: str, ops: tuple[str, ...]) -> None:
    """Lowers tiny models to a BACKEND, and prints what its kernels take as a BackendSpec, in Python.

    With OPS, such as conv2d, it probes these only.

    \b
    Examples:
      python -m pt2qa_probe mynpu > spec.py
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa_probe.cases import OPS
    from pt2qa_probe.probing import Probe, code_of, named

    try:
        probe = Probe(named(backend))
        spec = probe.spec(ops or OPS)
    except Pt2qaError as error:
        raise click.ClickException(str(error)) from error
    click.echo("# Probed with tiny models; check each line:")
    for line in spec.lines:
        click.echo(f"#   {line}")
    for op, why in probe.refused.items():
        click.echo(f"# Not taken: {op} ({why})")
    click.echo(code_of(spec), nl=False)


if __name__ == "__main__":
    main(prog_name="python -m pt2qa_probe")
