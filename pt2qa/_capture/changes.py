"""What normalisation did to a program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that a pass changed.  No change alters what the program computes.

    Attributes:
        rule: which pass, such as ``dead code``.
        name: the op or module that was changed.
        what: what was done, as a sentence without its subject.
    """

    rule: str
    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.name}: {self.what}"
