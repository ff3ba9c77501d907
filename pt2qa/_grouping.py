"""Values by key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> defaultdict[Key, list[Value]]:
    """The values of each key in order; a key without any has an empty list.

    >>> dict(grouped([("conv", 1), ("relu", 2), ("conv", 3)]))
    {'conv': [1, 3], 'relu': [2]}
    """
    found: defaultdict[Key, list[Value]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found
