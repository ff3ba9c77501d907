"""The program around the commands: what Ctrl-C does, and a stdout that takes no more.

It imports nothing of weight, so that Ctrl-C is heard from the start; the commands come in when it runs.
"""

from __future__ import annotations

import errno
import io
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn, TextIO

INTERRUPTED: Final = 130
"""The exit code of Ctrl-C, as shells have it: 128 and the number of the signal."""

FAILED: Final = 2

_AGAIN: Final = 0.02
"""Seconds after which an interrupt that fell into a destructor, where no error can leave, is given again."""


class Interrupts:
    """Whether Ctrl-C was pressed, whatever became of the exception."""

    # No dataclass: importing those takes longer than all else here, and nobody listens for Ctrl-C meanwhile.
    def __init__(self) -> None:
        self.pressed = False

    def hear(self, number: int, frame: FrameType | None) -> NoReturn:
        """The handler of SIGINT."""
        self.pressed = True
        raise KeyboardInterrupt


class Lasting(io.RawIOBase):
    """A stream that goes on when nobody reads it any more: it keeps the first error, and drops what comes after it.

    Printing must not end an analysis whose reports are still to be written.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self.error: OSError | None = None

    def write(self, data: Any) -> int | None:
        """Hand data on, or drop them."""
        if self.error is None:
            try:
                return self._raw.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """That of the stream."""
        return self._raw.fileno()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._raw.isatty()


class Program:
    """The command ``pt2qa``: click's group of commands, which it loads, with the exit codes that click has not.

    130 after Ctrl-C, wherever it falls, and though the reports of what was finished are written; 2 where stdout takes
    no more, as on a full disk.  That a reader has gone, as ``| head -1`` does, is no error.
    """

    name = "pt2qa"

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:
        """Run the command line; arguments as of :meth:`click.Command.main`."""
        if not extra.get("standalone_mode", True):
            return _commands().main(args, **extra)
        with _heard() as interrupts, _lasting() as stdout:
            code = _code(interrupts, args, extra)
            if sys.stdout is not None:
                sys.stdout.flush()
            if stdout is not None and stdout.error is not None and stdout.error.errno != errno.EPIPE and code == 0:
                _say(f"cannot write to stdout: {stdout.error.strerror or stdout.error}")
                code = FAILED
        sys.exit(code)

    def __call__(self, *args: Any, **extra: Any) -> Any:
        """Run the command line as the whole process, which listens to Ctrl-C no more when all is done."""
        try:
            return self.main(*args, **extra)
        finally:
            if extra.get("standalone_mode", True) and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    @property
    def commands(self) -> Any:
        """The commands by name, as of a click group."""
        return _commands().commands


def _commands() -> Any:
    from pt2qa.cli.commands import main

    return main


def _code(interrupts: Interrupts, args: Sequence[str] | None, extra: dict[str, Any]) -> int:
    """Run the commands; how it ended."""
    code: Any = 0
    try:
        _commands().main(args, **extra)
    except SystemExit as left:
        code = left.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:
        # What was interrupted may end in any error: an import that an interrupt broke off fails when it is tried again.
        if not interrupts.pressed:
            raise
    if interrupts.pressed or code == INTERRUPTED:
        _say("interrupted")
        return INTERRUPTED
    return code if isinstance(code, int) else 0 if code is None else 1


def _say(what: str) -> None:
    if sys.stderr is not None:
        print(f"pt2qa: {what}", file=sys.stderr)


@contextmanager
def _heard() -> Iterator[Interrupts]:
    interrupts = Interrupts()
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    # A shell has background jobs ignore Ctrl-C; who embeds this has a handler of his own; only the main thread has one.
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        if isinstance(found.exc_value, KeyboardInterrupt):
            threading.Timer(_AGAIN, signal.raise_signal, [signal.SIGINT]).start()
        else:
            hook(found)

    signal.signal(signal.SIGINT, interrupts.hear)
    sys.unraisablehook = unraisable
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


@contextmanager
def _lasting() -> Iterator[Lasting | None]:
    """stdout and stderr that last; the one of stdout, or None where stdout is no file."""
    before = sys.stdout, sys.stderr
    (sys.stdout, out), (sys.stderr, _) = map(_wrapped, before)
    try:
        yield out
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def _wrapped(stream: TextIO | Any) -> tuple[Any, Lasting | None]:
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if not isinstance(raw, io.FileIO):
        return stream, None
    stream.flush()
    lasting = Lasting(raw)
    # What an encoding lacks is escaped: no report is lost for a letter.
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    text = io.TextIOWrapper(
        io.BufferedWriter(lasting), encoding=stream.encoding, errors=errors, line_buffering=bool(stream.line_buffering)
    )
    return text, lasting
