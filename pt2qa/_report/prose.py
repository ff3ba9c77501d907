"""Values as text, wrapped lines, and lists that say how much they leave out.  Only here does pt2qa round."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from math import isfinite, isnan
from typing import Final

from pt2qa._grouping import grouped
from pt2qa._printable import clean

_ELLIPSIS: Final = "…"


def decibel(value: float) -> str:
    """One decimal: a different calibration batch changes more than 0.1 dB."""
    return _rounded(value, 1)


def share(value: float) -> str:
    """A fraction of 0..1 as percent; a nonzero value never reads as zero.

    >>> share(0.0421), share(1e-9)
    ('4.21', '<0.01')
    """
    return "<0.01" if 0 < value < 0.00005 else _rounded(100 * value, 2)


def cosine(value: float) -> str:
    """Five decimals: healthy int8 layers differ in the fourth."""
    return _rounded(value, 5)


def number(value: float) -> str:
    return f"{value:.4g}" if isfinite(value) else str(value)


def blank(value: float) -> str:
    """A number; empty if there is none."""
    return "" if isnan(value) else number(value)


def megabytes(size: int) -> str:
    """Bytes as megabytes.

    >>> megabytes(3_500_000)
    '3.5'
    """
    return number(size / 1e6)


def whole(value: int) -> str:
    return str(value)


def index(value: int) -> str:
    """An index or axis; -1 is none."""
    return str(value) if value >= 0 else "-"


def shape(value: tuple[int, ...]) -> str:
    """A shape as usually written.

    >>> shape((1, 3, 8, 8)), shape(())
    ('1x3x8x8', 'scalar')
    """
    return "x".join(map(str, value)) if value else "scalar"


def exact(value: float, unit: str = "") -> str:
    """Six digits and the unit, for a number compared with a limit: 19.96 dB is not 20 dB."""
    return f"{value:.6g} {unit}".rstrip()


def absent(_: float) -> str:
    """Of a column without a number in any row: tables leave it out."""
    return "nan"


def shorten(text: str, width: int) -> str:
    """Text shortened in the middle to a width, since names differ at both ends.

    >>> shorten("features.17.conv.1.0/conv2d", 16)
    'feature…0/conv2d'
    """
    if len(text) <= width:
        return text
    tail = width // 2
    return text[: width - tail - 1] + _ELLIPSIS + text[len(text) - tail :]


def shorten_names(names: Sequence[str], width: int) -> tuple[str, ...]:
    """Names of ops or modules, each shortened to a width with its numbers kept, since blocks differ by them.

    The modules that all longer names have in common go first, then modules keep their first letters, from the left.

    >>> shorten_names(["model.layers.1.attn.q_proj/linear", "model.layers.12.attn.q_proj/linear", "lm_head/linear"], 24)
    ('…1.attn.q_proj/linear', '…12.attn.q_proj/linear', 'lm_head/linear')
    >>> shorten_names(["model.layers.1.attn.q_proj/linear", "model.layers.12.attn.q_proj/linear"], 20)
    ('…1.a.q_proj/linear', '…12.a.q_proj/linear')
    """
    paths = {tuple(name.split(".")) for name in names if len(name) > width and " " not in name}
    shared = [*itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))]
    prefix = "".join(f"{part}." for part, *_ in shared) if len(paths) > 1 else ""
    return tuple(
        name if len(name) <= width else shorten(_abbreviated(_without(name, prefix), width), width) for name in names
    )


def _without(name: str, prefix: str) -> str:
    return _ELLIPSIS + name.removeprefix(prefix) if len(prefix) > 1 and name.startswith(prefix) else name


def _abbreviated(name: str, width: int) -> str:
    """``m.l.12.attn.q_proj/linear``: modules by their first letters, from the left, as far as needed."""
    *modules, last = name.split(".")
    for at, module in enumerate(modules):
        if len(name) <= width or " " in name:
            break
        modules[at] = module if module.lstrip(_ELLIPSIS).isdigit() else module[: 1 + module.startswith(_ELLIPSIS)]
        name = ".".join([*modules, last])
    return name


def _rounded(value: float, digits: int) -> str:
    if not abs(value) < 1e6:
        return number(value)
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, digits) + 0.0:.{digits}f}"


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
    groups = grouped((reason or "no reason given", name) for name, reason in found)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [
        f"{reason}: {len(names)}, such as {names[0]}" if len(names) > 1 else f"{names[0]}: {reason}"
        for reason, names in ordered
    ]


def sections(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)
