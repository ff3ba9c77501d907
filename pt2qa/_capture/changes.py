"""What normalisation did to a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal[
    "add of zero",
    "attention",
    "dead code",
    "nested region",
    "op source",
    "padding",
    "partial write",
    "recurrent op",
    "scalar",
    "shared module",
]
"""Passes of capture, by what they rewrite."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that a pass changed.  No change alters what the program computes.

    Attributes:
        rule: which pass.
        name: the op or module that was changed.
        what: what was done, as a sentence without its subject.
        left: why nothing was done; empty if something was.
    """

    rule: Rule
    name: str
    what: str
    left: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.name}: {self.what}"
