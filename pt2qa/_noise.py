"""Drops messages of torch and torchao that a user can do nothing about, once pt2qa is used; all else is shown."""

from __future__ import annotations

import logging
import re
import warnings
from functools import cache, partial
from typing import Final

LOGGED: Final = {
    "torchao": r"Failed to load \S+\.(so|dll|dylib|pyd): ",  # extensions built for another Python or GPU
    "torch.utils._pytree": r"%s is an Enum subclass and is now natively supported",  # on import of torchao
}
"""Loggers, and the messages of theirs that are dropped, as they are before their arguments are put in."""

WARNED: Final = (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, "copyreg")
"""The warning that is dropped, of copies of exported graphs: message, category and the module that is blamed."""


def _unlike(pattern: str, record: logging.LogRecord) -> bool:
    return not re.match(pattern, str(record.msg))


_FILTERS: Final = {name: partial(_unlike, pattern) for name, pattern in LOGGED.items()}


@cache
def drop() -> None:
    """Drops them from now on, once."""
    for name, each in _FILTERS.items():
        logging.getLogger(name).addFilter(each)
    warnings.filterwarnings("ignore", *WARNED)


def show() -> None:
    """Shows them from now on."""
    drop()
    for name, each in _FILTERS.items():
        logging.getLogger(name).removeFilter(each)
    warnings.filterwarnings("default", *WARNED)
