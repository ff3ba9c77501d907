"""What all commands share: their group, its errors, and common options."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final

import click

from pt2qa._interrupts import INTERRUPTED
from pt2qa._printable import clean, clean_lines, did_you_mean
from pt2qa.cli import outcome
from pt2qa.errors import FlowError, Pt2qaError, ReportError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEBUG: Final = "pt2qa.debug"
JSON: Final = "pt2qa.json"

_JSON_OPTION: Final = click.Option(
    ["--json"],
    is_flag=True,
    expose_value=False,
    callback=lambda context, _, asked: context.meta.update({JSON: asked}),
    help="Print one JSON document on stdout, and the text for people on stderr.",
)
_DEBUG_OPTION: Final = click.Option(
    ["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error, and all that torch prints."
)


class Failure(click.ClickException):
    """An expected error: one line on stderr, exit code 2; with ``--debug``, preceded by the traceback."""

    exit_code = 2

    def __init__(self, error: Exception, message: str, *, debug: bool) -> None:
        super().__init__(clean(" ".join(message.split())))
        self.error = error
        self.debug = debug

    def show(self, file: Any = None) -> None:
        """Print the error; click calls this before it exits."""
        if self.debug:
            lines = clean_lines("".join(traceback.format_exception(self.error)))
            click.echo(lines, file=file, err=True, nl=False)
        click.echo(f"pt2qa: {self.message}", file=file, err=True)


class InputFile(click.Path):
    """A file that a command reads, or ``FLOW.py:function`` in one."""

    name = "input"


class OutputFile(click.Path):
    """A file that a command writes; ``-`` is stdout."""

    name = "output"


class Command(click.Command):
    """A command with ``--debug`` that never overwrites a file that it reads, and never writes a file twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [_JSON_OPTION, _DEBUG_OPTION]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; with ``--json``, what it prints for people goes to stderr."""
        if not ctx.meta.get(JSON):
            return self._run(ctx)
        code = 0
        try:
            with redirect_stdout(sys.stderr):
                self._run(ctx)
        except click.exceptions.Exit as leaving:
            code = leaving.exit_code
        if os.environ.get("RANK", "0") == "0":
            click.echo(outcome.text_of(str(self.name), code))
        return ctx.exit(code)

    def _run(self, ctx: click.Context) -> Any:
        """Run the command, unless one of its outputs is one of its inputs, or another output."""
        taken = {_real(path): "which is read here" for _, path in self._files(ctx, InputFile)}
        for option, path in self._files(ctx, OutputFile):
            if why := taken.get(_real(path)):
                raise ReportError(f"{option}: would overwrite {path}, {why}; give it another name")
            taken[_real(path)] = f"which {option} writes"
        try:
            done = super().invoke(ctx)
        except click.exceptions.Exit as leaving:
            if leaving.exit_code == 1 and not outcome.found()["next"]:  # findings
                say_next(outcome.following(str(self.name), ctx.params))
            raise
        say_next(outcome.following(str(self.name), ctx.params))
        return done

    def _files(self, ctx: click.Context, kind: type[click.Path]) -> Iterator[tuple[str, str]]:
        """Options and the files that they name; a pipe or a device can be written to twice."""
        for parameter in self.params:
            given = ctx.params.get(parameter.name or "") if isinstance(parameter.type, kind) else None
            for value in given if isinstance(given, tuple) else (given,):
                path = file_of(str(value))
                if value not in (None, "-") and (os.path.isfile(path) or not os.path.exists(path)):
                    yield parameter.opts[0], path


def file_of(where: str) -> str:
    """The file in ``FLOW.py:function``, or in ``FLOW.py``."""
    return where if os.path.exists(where) else re.sub(r"(?<=.):\w*\Z", "", where)


def _real(path: str) -> str:
    return os.path.normcase(os.path.realpath(path))


class Commands(click.Group):
    """A group whose expected errors are :class:`Failure`."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_DEBUG_OPTION)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        """Parse the arguments; errors in them become a :class:`Failure`."""
        # Looked up before parsing, because parsing itself may fail; so --debug may be anywhere on the command line.
        debug = "--debug" in args
        with _failing(debug):
            extra.setdefault("default_map", defaults_in(Path.cwd(), self.commands))
            context = super().make_context(info_name, args, *rest, **extra)
        context.meta[DEBUG] = debug
        return context

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; expected errors become a :class:`Failure`."""
        with _failing(ctx.meta[DEBUG]):
            return super().invoke(ctx)


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
    _check_keys(file, "", set(every), {key for each in keys.values() for key in each})
    _check_keys(file, "", set(given) - set(every), keys)
    found = {}
    for name, known in keys.items():
        own = given.get(name, {})
        _check_keys(file, f".{name}", own, known)
        values = {key: value for key, value in every.items() if key in known} | own
        found[name] = {str(known[key].name): _value(known[key], value) for key, value in values.items()}
    return found


def _keys(command: click.Command) -> dict[str, click.Parameter]:
    return {text.lstrip("-"): each for each in command.params for text in (*each.opts, *each.secondary_opts)}


def _value(parameter: click.Parameter, value: Any) -> Any:
    """What click takes: several values for an option that is repeatable."""
    several = isinstance(parameter, click.Option) and parameter.multiple
    return [value] if several and not isinstance(value, list) else value


def _check_keys(file: Path, table: str, given: Any, known: Any) -> None:
    for key in given:
        if key not in known:
            raise FlowError(f"{file}: [tool.pt2qa{table}] has {key!r}{did_you_mean(key, known)}")


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
    except KeyboardInterrupt:
        raise click.exceptions.Exit(INTERRUPTED) from None
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        # Exit code 1 means "findings" or "missed"; a crash must not look like one of these.
        message = f"unexpected {type(error).__name__}: {error}; --debug shows where"
        raise Failure(error, message, debug=debug) from error


def _version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from pt2qa._report.rows import Environment

        here = Environment.here("")
        stack = f"torch {here.torch}, torchao {here.torchao}, executorch {here.executorch}"
        click.echo(f"pt2qa {here.pt2qa} ({stack})")
        context.exit()


def say(*lines: str) -> None:
    """Says something on stderr, each text as one line."""
    for line in lines:
        click.echo(f"pt2qa: {' '.join(line.split())}", err=True)


def say_next(*commands: str) -> None:
    """Ends what a command prints, on stderr, with what to type next, as it is typed."""
    if any(commands):
        outcome.found()["next"] += filter(None, commands)
        click.echo("\n".join(["Next:", *filter(None, commands)]), err=True)


def plan_in(file: Path | None) -> Any:
    """The override plan in a file; None without one."""
    from pt2qa.overrides import OverridePlan

    return None if file is None else OverridePlan.load(file)


def write(path: str | Path | None, save: Callable[[Path], object]) -> None:
    """Writes a file, if one is asked for, and names it on stderr: stdout is the report's."""
    if path is not None:
        save(Path(path))
        outcome.found()["wrote"].append(str(path))
        click.echo(f"wrote {path}", err=True)


@click.group(name="pt2qa", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show versions and exit."
)
def main() -> None:
    """Find where a PT2E-quantized model loses accuracy.

    Write a file with a function that returns your model, example inputs and batches, or let pt2qa init write it; fix
    the model, or analyze it and look at the report:

    \b
      # flow.py
      import torch
      def flow():
          model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).eval()
          batches = [torch.randn(4, 8) for _ in range(8)]
          return model, batches[0], batches

    \b
      pt2qa quantizers
      pt2qa fix flow.py -q xnnpack -o fixed
      pt2qa analyze flow.py -q xnnpack -o reports
      pt2qa show reports/xnnpack-layers.safetensors --sort graph

    SQNR, in dB, is the power of the signal over that of the error: 20 dB is 1 % noise, and 6 dB is one bit. "Isolated"
    is a layer's own error, on the float model's inputs; plain SQNR includes all error from upstream.
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are


def apart_if_possible(function: Callable[..., Any], apart: bool) -> Any:
    """What a function returns with ``apart``, or without it if the model cannot be passed to another process."""
    from pt2qa._deployed.apart import RefusedError

    try:
        return function(apart=apart)
    except RefusedError as error:
        say(f"lowered in this process, which ends where native code crashes: {error}")
        return function()
