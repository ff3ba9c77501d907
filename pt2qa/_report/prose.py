"""The text around the tables: wrapped lines, and lists that say how much they leave out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from pt2qa._printable import clean
from pt2qa._report.rows import Unpaired

_ORDINAL: Final = re.compile(r"(_\d+)?(:\w+)?$| \(.*\)$")
"""What distinguishes ops of one kind: a name's ordinal, the part of a decomposed op, a node without a handle."""

LISTED: Final = 5
"""Number of entries that a list shows; the rest are counted."""


def wrap(text: str, width: int, *, indent: str = "") -> str:
    """One paragraph in lines of at most ``width``; further lines are indented."""
    return "\n".join(textwrap.wrap(clean(text), width, subsequent_indent=indent, break_on_hyphens=False))


def listed(title: str, entries: Sequence[str], width: int, most: int | None = LISTED) -> str:
    """A title and its entries, one per line; entries beyond so many are counted.  Empty without entries."""
    if not entries:
        return ""
    lines = [wrap(f"{title}:", width)]
    lines += [wrap(f"  {entry}", width, indent="    ") for entry in entries[:most]]
    if most is not None and len(entries) > most:
        lines.append(f"  and {len(entries) - most} more")
    return "\n".join(lines)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun.

    >>> counted(1, "batch", "batches"), counted(3, "row")
    ('1 batch', '3 rows')
    """
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def few(names: Sequence[str], most: int = LISTED) -> str:
    """The first names in one sentence, and how many more there are.

    >>> few(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d, e and 1 more'
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def by_reason(found: Iterable[tuple[str, str]]) -> list[str]:
    """Names grouped by reason, most frequent first, each with its count and first name, or with its only one.

    >>> by_reason([("relu", "zero reference"), ("add", "zero reference")])
    ['zero reference: 2, such as relu']
    """
    groups: dict[str, list[str]] = {}
    for name, reason in found:
        groups.setdefault(reason or "no reason given", []).append(name)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [
        f"{reason}: {len(names)}, such as {names[0]}" if len(names) > 1 else f"{names[0]}: {reason}"
        for reason, names in ordered
    ]


def unpaired_entries(unpaired: Sequence[Unpaired]) -> list[str]:
    """One line for each node without a partner; in a long list, one for each kind of op and side.

    >>> from pt2qa._report.rows import Unpaired
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


def sections(parts: Iterable[str]) -> str:
    """Non-empty parts, separated by blank lines."""
    return "\n\n".join(part for part in parts if part)
