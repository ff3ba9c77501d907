"""The methods of repair, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pt2qa._repair.biases import Biases
from pt2qa._repair.equalization import Equalization
from pt2qa._repair.guard import Method
from pt2qa._repair.ranges import Ranges
from pt2qa._repair.rounding import LimitedRounding, Rounding
from pt2qa._repair.shifting import Shifting
from pt2qa.errors import SelectionError

METHODS: Final[Mapping[str, type[Method]]] = {
    each.name: each for each in (Shifting, Equalization, Ranges, Rounding, Biases)
}
DEFAULT: Final[Sequence[type[Method]]] = (Shifting, Equalization, Ranges, LimitedRounding, Biases)
QUICK: Final[Sequence[type[Method]]] = (Shifting, Equalization, Ranges, Biases)
"""The default of a diagnosis, where repairs are one step among others."""
UNTIL_MET: Final[Sequence[type[Method]]] = (*QUICK, LimitedRounding)
"""The default of a search, which ends where its target is met: what makes a large plan comes last."""

_EARLIER: Final = {"smoothing": "equalization"}
"""Names that methods had."""


def methods_named(
    names: Sequence[str] | None, argument: str, default: Sequence[type[Method]] = DEFAULT
) -> Sequence[type[Method]]:
    """The methods of some names, or the default, in order; errors name the ``argument``."""
    if names is None:
        return default
    asked = set() if isinstance(names, str) else {_EARLIER.get(name, name) for name in names}
    if isinstance(names, str) or not asked <= set(METHODS):
        raise SelectionError(f"{argument}: got {names!r}, expected a list of {', '.join(METHODS)}.")
    return [method for name, method in METHODS.items() if name in asked]
