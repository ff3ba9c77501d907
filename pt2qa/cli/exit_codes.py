"""Exit codes beside 0 and 1."""

from __future__ import annotations

from typing import Final

INTERRUPTED: Final = 130
"""The exit code of Ctrl-C, as in shells: 128 plus the number of the signal."""

FAILED: Final = 2
"""Nothing was found out: bad usage, or stdout that cannot be written to."""
