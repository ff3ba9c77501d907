"""What any report may contain: rows that can be compared, its environment, and nodes without a partner."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

from pt2qa import __version__
from pt2qa._report.columns import column
from pt2qa._report.prose import LISTED

_ORDINAL: Final = re.compile(r"(_\d+)?(:\w+)?$| \(.*\)$")
"""What distinguishes ops of one kind: a name's ordinal, the part of a decomposed op, a node without a handle."""


class Row:
    """A row of a report: equal to another if all fields are, where NaN equals NaN.

    Fields of a dataclass are compared with ``==``; before Python 3.13, one and the same NaN was equal to itself.

    >>> from pt2qa.report import StageRow
    >>> StageRow("eager", float("nan"), 40.0) == StageRow("eager", float("nan"), 40.0)
    True
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(_compared(self))


def _compared(value: Any) -> Any:
    """A value in which NaN is something that equals itself."""
    if isinstance(value, Row):
        return tuple(_compared(getattr(value, each.name)) for each in fields(value))  # type: ignore[arg-type]
    if isinstance(value, dict):
        return tuple((name, _compared(each)) for name, each in sorted(value.items()))
    return "nan" if isinstance(value, float) and value != value else value


@dataclass(frozen=True, slots=True)
class Environment:
    """Origin of a report: package versions as pip reports them, and the model's fingerprint.

    Args:
        torch, torchao, executorch, pt2qa: versions, or ``"not installed"``.
        fingerprint: identifies the float model (its graph and parameters); empty if nothing was fingerprinted.

    >>> Environment.here("3f2a").fingerprint
    '3f2a'
    """

    torch: str
    torchao: str
    executorch: str
    pt2qa: str
    fingerprint: str

    @classmethod
    def here(cls, fingerprint: str) -> Environment:
        """The installed versions, read from package metadata: nothing is imported."""
        return cls(installed("torch"), installed("torchao"), installed("executorch"), __version__, fingerprint)


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A node of one graph that has no partner in the other, and why.

    Args:
        handle: the node's handle; -1 if it has none.
        name: readable, e.g. ``layer1.0.bn1/batch_norm``.
        side: the graph it is in; ``a`` or ``b`` where :func:`pt2qa.compare_graphs` compared two.
        reason: why it has no partner, e.g. ``folded into layer1.0.conv1``.
    """

    handle: int
    name: Annotated[str, column(key=True)]
    side: Literal["reference", "quantized", "deployed", "a", "b"]
    reason: str


def installed(package: str) -> str:
    """The installed version of a package, which is not imported, or ``"not installed"``."""
    # Imported here because importlib.metadata pulls in email and zipfile, which reading a report does not need.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def unpaired_entries(unpaired: Sequence[Unpaired]) -> list[str]:
    """One line for each node without a partner; in a long list, one for each kind of op and side.

    >>> checks = [Unpaired(n, f"layer.{n}/_assert_{n}", "reference", "nothing reads it") for n in range(6)]
    >>> unpaired_entries(checks)
    ['6 _assert (reference), such as layer.0/_assert_0: nothing reads it']
    """
    groups: dict[tuple[str, str], list[Unpaired]] = {}
    for number, each in enumerate(unpaired):
        kind = _ORDINAL.sub("", each.name.rpartition("/")[2]) if len(unpaired) > LISTED else str(number)
        groups.setdefault((kind, each.side), []).append(each)
    entries = []
    for (kind, side), (first, *others) in groups.items():
        what = f"{1 + len(others)} {kind} ({side}), such as {first.name}" if others else f"{first.name} ({side})"
        entries.append(f"{what}: {first.reason or 'no reason given'}")
    return entries
