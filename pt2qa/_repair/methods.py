"""The methods of repair, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pt2qa._repair.biases import Biases
from pt2qa._repair.guard import Method
from pt2qa._repair.ranges import Ranges
from pt2qa._repair.rounding import Rounding
from pt2qa._repair.shifting import Shifting
from pt2qa._repair.smoothing import Smoothing
from pt2qa.errors import SelectionError

METHODS: Final[Mapping[str, type[Method]]] = {
    each.name: each for each in (Shifting, Smoothing, Ranges, Rounding, Biases)
}
ON_REQUEST: Final = ("rounding",)
"""Methods that take long or make large plans, and are used only where they are named."""


def methods_named(names: Sequence[str] | None, argument: str) -> list[type[Method]]:
    """The methods of some names, or all but those on request, in order; errors name the ``argument``."""
    if names is None:
        return [method for name, method in METHODS.items() if name not in ON_REQUEST]
    if isinstance(names, str) or not set(names) <= set(METHODS):
        raise SelectionError(f"{argument}: got {names!r}, expected a list of {', '.join(METHODS)}.")
    return [method for name, method in METHODS.items() if name in names]
