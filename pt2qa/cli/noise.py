"""Keeps messages of torch, torchao and ExecuTorch off stderr that a user can do nothing about; ``--debug`` shows them.

Each is named below; all else is printed, the warnings of the user's model included.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

LOGGED: Final = {
    "torchao": r"Failed to load \S+\.(so|dll|dylib|pyd): ",  # extensions built for another Python or GPU
    "torch.utils._pytree": r"%s is an Enum subclass and is now natively supported",  # on import of torchao
}
"""Loggers, and the messages of theirs that are dropped, as they are before their arguments are put in."""

WARNED: Final = (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, "copyreg")
"""The warning that is dropped, of copies of exported graphs: message, category and the module that is blamed."""

PRINTER: Final = b"[cpuinfo_utils.cpp:"
PRINTED: Final = re.escape(PRINTER) + rb"\d+\] (Reading file |Failed to open midr file |CPU info and manual query)"
"""Lines that are dropped: ExecuTorch counts cores by reading files of Arm phones, and says so through sys.stderr."""


@contextmanager
def without_noise() -> Iterator[Printed]:
    """Drops warnings and log messages while it lasts; gives what drops lines from a stream."""
    filters = {name: partial(_unlike, pattern) for name, pattern in LOGGED.items()}
    for name, each in filters.items():
        logging.getLogger(name).addFilter(each)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", *WARNED)
            yield Printed()
    finally:
        for name, each in filters.items():
            logging.getLogger(name).removeFilter(each)


def _unlike(pattern: str, record: logging.LogRecord) -> bool:
    return not re.match(pattern, str(record.msg))


class Printed:
    r"""What is to be printed of the pieces that are written to a stream.

    A piece is held back only while it may become a line of :data:`PRINTED`.

    >>> kept = Printed()
    >>> [kept(piece) for piece in (b"a\n[", b"cpuinfo_utils.cpp:7] ", b"Reading file x\nb", b"[x]")]
    [b'a\n', b'', b'b', b'[x]']
    """

    def __init__(self) -> None:
        self._piece = b""

    def __call__(self, data: bytes) -> bytes:
        """What is printed next."""
        *lines, piece = re.split(rb"(?<=\n)", self._piece + data)
        held = piece.startswith(PRINTER) or PRINTER.startswith(piece)
        self._piece = piece if held else b""
        return b"".join(line for line in lines if not re.match(PRINTED, line)) + (b"" if held else piece)
