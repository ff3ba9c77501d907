"""The program around the commands: handles Ctrl-C, and a stdout that can no longer be written to.

It imports nothing heavy, so that Ctrl-C works from the start; it imports the commands when it runs.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from pt2qa import _interrupts
from pt2qa._interrupts import INTERRUPTED, Interrupts


class Lasting(io.RawIOBase):
    """A stream that survives a reader that has gone: it keeps the first error and discards everything after it.

    Printing must not end an analysis whose reports are still to be written.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self.error: OSError | None = None

    def write(self, data: Any) -> int | None:
        """Forward data, or discard it."""
        left = bytes(data) if self.error is None else b""
        while left:
            try:
                left = left[self._raw.write(left) or 0 :]
            except OSError as error:
                self.error = error
                break
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
    """The command ``pt2qa``: loads and runs click's group of commands, with additional exit codes.

    130 after Ctrl-C, at any time, even if the reports of finished work were written; 2 if stdout cannot be written to,
    for example on a full disk.  A reader that has gone, as after ``| head -1``, is not an error.
    """

    name = "pt2qa"

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:
        """Run the command line; arguments as for :meth:`click.Command.main`."""
        if not extra.get("standalone_mode", True):
            return _commands().main(args, **extra)
        return self._whole(args, extra)

    def _whole(self, args: Sequence[str] | None, extra: dict[str, Any], first: Callable[[], object] = bool) -> Any:
        with _heard() as interrupts:
            try:
                first()
                code = self._run(interrupts, args, extra)
            except KeyboardInterrupt:
                # It fell into what is imported before the commands.
                interrupts.over = True
                _say("interrupted")
                code = INTERRUPTED
        sys.exit(code)

    def _run(self, interrupts: Interrupts, args: Sequence[str] | None, extra: dict[str, Any]) -> int:
        """Run the commands with streams that survive; returns the exit code."""
        from pt2qa import _noise

        with _lasting() as stdout:
            is_loud = "--debug" in (sys.argv[1:] if args is None else args)
            (_noise.show if is_loud else _noise.drop)()
            code = _code(interrupts, args, extra)
            if sys.stdout is not None:
                sys.stdout.flush()
            if stdout is not None and stdout.error is not None and stdout.error.errno != errno.EPIPE and code == 0:
                _say(f"cannot write to stdout: {stdout.error.strerror or stdout.error}")
                code = 2
        return code

    def __call__(self, args: Sequence[str] | None = None, **extra: Any) -> Any:
        """Run the command line as the whole process, which ignores Ctrl-C once everything is done."""
        if not extra.get("standalone_mode", True) or threading.current_thread() is not threading.main_thread():
            return self.main(args, **extra)
        # Registered before the libraries register theirs, so that it runs after them.
        left: list[object] = []
        atexit.register(_leave, left)
        try:
            return self._whole(args, extra, keep_freed_memory)
        except SystemExit as leaving:
            left.append(leaving.code)
            raise
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    @property
    def commands(self) -> Any:
        """The commands by name, as in a click group."""
        return _commands().commands


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next values of this process, unless the environment sets its allocator.

    By default glibc returns values of many megabytes to the system as soon as they are freed, and an analysis spends up
    to a fifth of its time on asking for their pages again.  Other C libraries have no ``mallopt``.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: values up to 256 MiB are kept, and 512 MiB at the end of the heap.  The second
    # alone would be worse than neither: either ends glibc's own adjustment of both.
    if mallopt is not None and mallopt(-3, 256 << 20):
        mallopt(-1, 512 << 20)


def _commands() -> Any:
    # They import what they need when they run: ``pt2qa show`` must not wait for torch.
    from pt2qa.cli import (  # noqa: F401 - each adds its commands
        analyzing,
        checking,
        measuring,
        reading,
        serving,
        starting,
    )
    from pt2qa.cli.group import main

    return main


def _leave(left: list[object]) -> None:
    """Ends an interrupted process with the exit code.

    Once a KeyboardInterrupt has passed through ``exec`` of source text, CPython ends a process started with ``-m`` by
    SIGINT, even if the exception was handled: ``unhandled_keyboard_interrupt`` in its ``Modules/main.c``.
    """
    if left == [INTERRUPTED]:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(INTERRUPTED)


def _code(interrupts: Interrupts, args: Sequence[str] | None, extra: dict[str, Any]) -> int:
    code: Any = 0
    try:
        _commands().main(args, **extra)
    except SystemExit as left:
        code = left.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:
        # An interrupt may surface as any error: an import that was broken off fails when it is tried again.
        if not interrupts.pressed:
            raise
    # One that fell into a destructor is raised again, perhaps only now.
    interrupts.over = True
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
    # Shells make background jobs ignore Ctrl-C; an embedding program has its own handler; only the main thread has one.
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        if isinstance(found.exc_value, KeyboardInterrupt):
            interrupts.wait()  # it fell into a destructor, which cannot raise errors
        else:
            hook(found)

    _interrupts.heard = interrupts
    signal.signal(signal.SIGINT, interrupts.hear)
    sys.unraisablehook = unraisable
    try:
        yield interrupts
    finally:
        interrupts.over, interrupts.waiting = True, False
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


@contextmanager
def _lasting() -> Iterator[Lasting | None]:
    """Replaces stdout and stderr by streams that survive; returns that of stdout, or None if stdout is not a file."""
    before = sys.stdout, sys.stderr
    (sys.stdout, out), (sys.stderr, _) = _wrapped(sys.stdout), _wrapped(sys.stderr)
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
    # Characters that the encoding lacks are escaped, so that no report is lost because of one.
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    text = io.TextIOWrapper(
        io.BufferedWriter(lasting), encoding=stream.encoding, errors=errors, line_buffering=bool(stream.line_buffering)
    )
    return text, lasting
