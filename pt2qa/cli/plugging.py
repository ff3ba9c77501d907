"""``pt2qa new-plugin``: writes a package with a quantizer, a backend and tests, which pass as they are."""

from __future__ import annotations

import functools
import keyword
import re
from pathlib import Path
from typing import Final

import click

from pt2qa._report.atomic import write_atomic
from pt2qa.cli.group import main, write
from pt2qa.cli.starting import rendered

FILES: Final = {
    "pyproject.toml": "pyproject.toml",
    "{package}/__init__.py": "plugin.py",
    "{package}/quantizer.py": "quantizer.py",
    "{package}/kernels.py": "kernels.py",
    "tests/test_{name}.py": "test.py",
}
"""The files of a package, and the template of each."""


@main.command("new-plugin")
@click.argument("name")
@click.option(
    *("-o", "folder"), metavar="DIR", type=click.Path(path_type=Path), help="Folder to write to.  [default: NAME]"
)
def new_plugin(name: str, folder: Path | None) -> None:
    """Write a package for a backend of your own: a quantizer, what runs its graphs, and tests, which pass as they are.

    NAME is what -q and -b then take. Put your kernels into kernels.py, and what they take into the spec.

    \b
      pt2qa new-plugin mynpu
      pip install -e mynpu
      pytest mynpu
      pt2qa deploy flow.py -q mynpu -o deploy
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa.plugins import available, backends

    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise click.BadParameter(f"got {name!r}, expected a name of small letters, digits and _, such as mynpu")
    if taken := sorted({*available(), *backends()} & {name}):
        raise click.BadParameter(f"{taken[0]!r} is installed already: choose another name")
    home = Path(name) if folder is None else folder
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise click.BadParameter(f"{home} exists and is not empty: give another folder with -o")
    parts = {"name": name, "package": f"pt2qa_{name}", "title": name.title().replace("_", "")}
    for file, template in FILES.items():
        path = home / file.format(**parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, functools.partial(write_atomic, content=rendered(f"new_plugin/{template}.jinja", **parts)))
