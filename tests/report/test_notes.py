"""What kind a note is, not how it reads, decides what is done."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import pt2qa
from pt2qa._report.notes import Note, joined_notes, kind_of, notes_without, stop_if_interrupted
from pt2qa.errors import ReportError
from tests.report.test_earlier_files import V0_2_0
from tests.report.test_report_storage import content

CUT = Note("das Ende fehlt", "interrupted")


def test_a_note_is_its_text_with_a_kind_and_stays_so_in_copies() -> None:
    for copied in (CUT, copy.deepcopy(CUT), pickle.loads(pickle.dumps(CUT))):
        assert (copied, kind_of(copied)) == ("das Ende fehlt", "interrupted")
    assert kind_of("interrupted: a plain text") is None


@pytest.mark.parametrize("path", V0_2_0, ids=lambda path: path.stem)
def test_a_file_of_every_kind_keeps_the_kinds_of_notes(path: Path, tmp_path: Path) -> None:
    report = pt2qa.load(path)
    replace(report, notes=("interrupted", CUT)).save(tmp_path / "file.safetensors")
    assert [*map(kind_of, pt2qa.load(tmp_path / "file.safetensors").notes)] == [None, "interrupted"]


@pytest.mark.parametrize("note", ['{"kind": "other", "text": "a"}', '{"kind": "of sums", "text": 1}', '{"text": "a"}'])
def test_a_file_with_notes_of_another_form_is_refused(note: str, tmp_path: Path) -> None:
    pt2qa.load(V0_2_0[0]).save(path := tmp_path / "file.safetensors")
    tensors, text = content(path)
    save_file(tensors, path, text | {"notes": f"[{note}]"})
    with pytest.raises(ReportError, match=r"field 'notes' holds .*, expected a list of texts"):
        pt2qa.load(path)


def test_the_kind_alone_ends_a_command() -> None:
    stop_if_interrupted(["interrupted: a plain text"])
    with pytest.raises(KeyboardInterrupt):
        stop_if_interrupted([CUT])


def test_joined_notes_keep_their_kind_and_say_whose_an_interruption_is() -> None:
    joined = joined_notes([("alike", CUT), ("alike", CUT)])
    assert joined == ("alike", "report 1 of 2: das Ende fehlt", "report 2 of 2: das Ende fehlt")
    assert [*map(kind_of, joined)] == [None, "interrupted", "interrupted"]
    assert notes_without("interrupted", joined) == ["alike"]
