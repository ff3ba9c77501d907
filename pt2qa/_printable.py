"""Text that a terminal, a table or a page shows as it is: names may come from a file, and a file from anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def clean(text: str) -> str:
    """Text of one line without control and escape sequences, signs that turn its direction, and lone surrogates.

    >>> clean("a" + chr(27) + "[31m")
    'a?[31m'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def clean_lines(text: str) -> str:
    """The same for text of several lines."""
    return "\n".join(map(clean, text.split("\n")))


def near_names(name: str, known: Iterable[str], most: int = 3) -> str:
    """The known names most like this one, or the first ones where none is like it.

    >>> near_names("conv9", ["stem.conv1", "conv2", "head"])
    'conv2, stem.conv1'
    >>> near_names("x", ["conv2", "head"])
    'conv2, head'
    """
    names = list(dict.fromkeys(known))
    return ", ".join(get_close_matches(name, names, n=most, cutoff=0.4) or names[:most])


def question(name: str, known: Iterable[str], most: int = 1) -> str:
    """A question after the known names most like this one; nothing where none is like it.

    >>> question("sqnrr", ["sqnr", "mse"])
    "did you mean 'sqnr'?"
    >>> question("x", ["sqnr", "mse"])
    ''
    """
    near = get_close_matches(name, list(known), n=most)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def did_you_mean(got: object, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known: near names as a question, or a full stop.

    >>> did_you_mean("per_chanel", ["mode", "per_channel"])
    "; did you mean 'per_channel'?"
    >>> did_you_mean("x", ["mode"])
    '.'
    """
    near = question(str(got), known, 3)
    return f"; {near}" if near else "."
