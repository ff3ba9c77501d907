"""Text that a terminal, a table or a page shows as it is: names may come from a file, and a file from anywhere."""

from __future__ import annotations


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
