"""Notes of reports that programs read as well as people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, get_args

NoteKind = Literal["interrupted", "of sums", "overrides", "kernels", "no spec"]
KINDS: Final = frozenset(get_args(NoteKind))


class Note(str):
    """A note with a kind; it reads as its text.  A note that no code asks for is a plain text.

    Args:
        text: what people read.
        kind: ``interrupted``: the report covers what was finished.  ``of sums``: :func:`pt2qa.merge` makes it anew.
            ``overrides`` and ``kernels``: how the pair was made, and how its kernels differ from it.  ``no spec``: what
            the backend takes is not known.

    >>> note = Note("interrupted: covers the 2 batches that were finished", "interrupted")
    >>> note.kind, note.partition(":")[0]
    ('interrupted', 'interrupted')
    """

    kind: NoteKind

    def __new__(cls, text: str, kind: NoteKind) -> Note:
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __getnewargs__(self) -> tuple[str, NoteKind]:  # type: ignore[override]  # what __new__ takes, for copies
        return str(self), self.kind


def kind_of(note: str) -> NoteKind | None:
    """The kind of a note; None of a plain text."""
    return note.kind if isinstance(note, Note) else None


def notes_without(kind: NoteKind, notes: Iterable[str]) -> list[str]:
    return [note for note in notes if kind_of(note) != kind]


def stop_if_interrupted(notes: Iterable[str]) -> None:
    """Raises KeyboardInterrupt if one of a report's notes says that its analysis was interrupted."""
    if any(kind_of(note) == "interrupted" for note in notes):
        raise KeyboardInterrupt


def joined_notes(notes: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The notes of all reports; one that not all have, or of an interruption, says which reports it is of."""
    joined = []
    for number, own in enumerate(notes, 1):
        for note in own:
            kind = kind_of(note)
            shared = all(note in each for each in notes) and kind != "interrupted"
            said = note if shared else f"report {number} of {len(notes)}: {note}"
            joined.append(said if kind is None else Note(said, kind))
    return tuple(dict.fromkeys(joined))
