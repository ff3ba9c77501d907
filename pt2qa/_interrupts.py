"""Ctrl-C in the command line: a token that is read between ops.

A KeyboardInterrupt that is raised wherever Python is may fall into a callback of torch's C++, which ends the process.
So the command line only takes note of Ctrl-C, and what runs ops calls :func:`raise_if_interrupted` between them.  If
nothing asks for a while, as during an import, and after another Ctrl-C, it is raised where Python is.

In other programs nothing is installed: Python raises as it always does.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
"""The exit code after Ctrl-C, as in shells: 128 plus the number of the signal."""

GRACE: Final = 0.5
"""Seconds in which something should ask."""


class Interrupts:
    """Whether Ctrl-C was pressed, whatever happens to the exception; when the commands are over, it raises no more."""

    # Not a dataclass: importing dataclasses takes longer than all else here, and Ctrl-C would not work meanwhile.
    def __init__(self) -> None:
        self.pressed = self.over = self.waiting = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        first, self.pressed = not self.pressed, True
        if self.over:
            return
        if not first:
            self.take()
        self.wait()

    def wait(self) -> None:
        """Raise it between ops or, if nothing asks, where Python is."""
        self.waiting = True
        timer = threading.Timer(GRACE, self._again)
        timer.daemon = True
        timer.start()

    def take(self) -> None:
        self.waiting = False
        raise KeyboardInterrupt

    def _again(self) -> None:
        if self.waiting:
            send()


def send() -> None:
    """Send the main thread SIGINT, so that it wakes up if it waits for something."""
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, signal.SIGINT)
    else:
        signal.raise_signal(signal.SIGINT)


heard = Interrupts()
"""What the command line has heard; it puts its own here while it runs."""


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed and not raised yet."""
    if heard.waiting:
        heard.take()
