"""Requirements as users write them: ``sqnr>=20``, ``rows.isolated_sqnr>=10``, ``layer1.*:sqnr>=15``.

The grammar; brackets mark optional parts, and spaces are allowed between parts::

    [PATTERN:][TABLE.]METRIC SIGN NUMBER [dB]        SIGN is >=, >, <=, < or ==

Without pattern and table the metric is a number of the whole report.  A table is a field of the report that holds rows
(``rows``, ``outputs``); each of its rows must meet the requirement.  A pattern selects rows by name, with ``*`` for
any text, in the table ``rows`` if none is given.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pt2qa.errors import SelectionError

_SIGNS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_TEXT: Final = re.compile(
    r"\s*((?P<pattern>\S|\S.*\S)\s*:\s*)?"
    r"((?P<table>[^\W\d]\w*)\.)?(?P<metric>[^\W\d][\w-]*(\.[\w-]+)*)"
    rf"\s*(?P<sign>{'|'.join(_SIGNS)})"
    r"\s*(?P<value>[-+]?(inf|\d+(\.\d+)?([eE][-+]?\d+)?))\s*(?P<unit>dB)?\s*"
)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A limit on a number.

    Args:
        metric: the name of the number.
        sign: ``>=``, ``>``, ``<=``, ``<`` or ``==``.
        value: the limit.
        unit: ``dB`` if it was written, else empty.
        table: the field of the report whose rows have the number; empty: the whole report, or with a pattern ``rows``.
        pattern: which rows, by name; empty: all.
    """

    metric: str
    sign: str
    value: float
    unit: str = ""
    table: str = ""
    pattern: str = ""

    @property
    def subject(self) -> str:
        """The part left of the sign, as written.

        >>> read_requirement("layer1.*: sqnr >= 15").subject
        'layer1.*:sqnr'
        """
        table = f"{self.table}." if self.table else ""
        return f"{self.pattern}:{table}{self.metric}" if self.pattern else f"{table}{self.metric}"

    def holds(self, number: float) -> bool:
        """Whether a number meets the requirement; nan never does."""
        return _SIGNS[self.sign](number, self.value)

    def matches(self, name: str) -> bool:
        """Whether the requirement applies to the row of this name.

        >>> read_requirement("layer1.*:sqnr>=15").matches("layer1.0.conv1/conv2d")
        True
        """
        pattern = ".*".join(map(re.escape, self.pattern.split("*")))
        return not self.pattern or re.fullmatch(pattern, name, re.DOTALL) is not None


def parsed(text: str) -> Requirement | None:
    """The requirement in a text; None if it is not one.

    >>> parsed("sqnr >= 30 dB")
    Requirement(metric='sqnr', sign='>=', value=30.0, unit='dB', table='', pattern='')
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    optional = {name: found[name] or "" for name in ("unit", "table", "pattern")}
    return Requirement(found["metric"], found["sign"], float(found["value"]), **optional)


def read_requirement(text: str) -> Requirement:
    """The requirement in a text.

    Raises:
        SelectionError: the text is not a requirement.

    >>> read_requirement("sqnr=>30")
    Traceback (most recent call last):
    pt2qa.errors.SelectionError: requirement: got 'sqnr=>30', expected a metric, one of >= <= == > <, and a number, ...
    """
    requirement = parsed(text)
    if requirement is None:
        raise SelectionError(
            f"requirement: got {text!r}, expected a metric, one of {' '.join(_SIGNS)}, and a number, "
            "such as 'sqnr>=20', 'rows.isolated_sqnr>=10' or 'layer1.*:sqnr>=15'."
        )
    return requirement
