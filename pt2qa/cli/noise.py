"""Keeps lines of ExecuTorch off stderr that a user can do nothing about; ``--debug`` shows them."""

from __future__ import annotations

import re
from typing import Final

PRINTER: Final = b"[cpuinfo_utils.cpp:"
PRINTED: Final = re.escape(PRINTER) + rb"\d+\] (Reading file |Failed to open midr file |CPU info and manual query)"
"""Lines that are dropped: ExecuTorch counts cores by reading files of Arm phones, and says so through sys.stderr."""


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
