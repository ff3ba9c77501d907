"""Defaults of options, from ``[tool.pt2qa]`` in the nearest ``pyproject.toml``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pt2qa._near_names import did_you_mean
from pt2qa.errors import FlowError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def defaults_in(folder: Path, commands: Mapping[str, click.Command]) -> dict[str, dict[str, Any]]:
    """By command and parameter, for click: ``[tool.pt2qa]`` is for all commands, ``[tool.pt2qa.analyze]`` for one.

    A key is an option without its dashes, or the name of an argument.
    """
    file = next((path for each in (folder, *folder.parents) if (path := each / "pyproject.toml").is_file()), None)
    if file is None:
        return {}
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("pt2qa", {})
    except (OSError, ValueError) as error:
        raise FlowError(f"cannot read {file}: {error}") from error
    keys = {name: _keys(command) for name, command in commands.items()}
    every = {key: value for key, value in given.items() if not isinstance(value, dict)}
    _check(file, "", set(every), {key for each in keys.values() for key in each})
    _check(file, "", set(given) - set(every), keys)
    found = {}
    for name, known in keys.items():
        own = given.get(name, {})
        _check(file, f".{name}", own, known)
        values = {key: value for key, value in every.items() if key in known} | own
        found[name] = {str(known[key].name): _value(known[key], value) for key, value in values.items()}
    return found


def _keys(command: click.Command) -> dict[str, click.Parameter]:
    return {text.lstrip("-"): each for each in command.params for text in (*each.opts, *each.secondary_opts)}


def _value(parameter: click.Parameter, value: Any) -> Any:
    """What click takes: several values for an option that is repeatable."""
    several = isinstance(parameter, click.Option) and parameter.multiple
    return [value] if several and not isinstance(value, list) else value


def _check(file: Path, table: str, given: Any, known: Any) -> None:
    for key in given:
        if key not in known:
            raise FlowError(f"{file}: [tool.pt2qa{table}] has {key!r}{did_you_mean(key, known)}")
