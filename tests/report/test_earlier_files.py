"""Files that an earlier version wrote."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import pt2qa
from pt2qa._report.storage import CHECKSUM, kinds
from pt2qa.report import UNQUANTIZED

OWN_KINDS = [kind for kind in kinds() if kind.__module__.startswith("pt2qa.")]

V0_2_0 = sorted((Path(__file__).parent / "v0_2_0").glob("*.safetensors"))
"""What the analyses of 0.2.0 wrote of a small model; two of three batches count in some."""


@pytest.mark.parametrize("path", V0_2_0, ids=lambda path: path.stem)
def test_a_file_of_0_2_0_is_read_and_shown(path: Path, tmp_path: Path) -> None:
    report = pt2qa.load(path)
    assert report.kind == path.stem
    assert len(str(report).splitlines()) > 3
    assert len(report.to_pandas()) == len(report.rows)
    pt2qa.write_html([report], tmp_path / "page.html")
    report.save(tmp_path / "again.safetensors")
    assert str(pt2qa.load(tmp_path / "again.safetensors")) == str(report)
    if getattr(report, "sums", None):
        assert len(pt2qa.merge([report, report]).rows) == len(report.rows) or report.kind == "bad-cases"


def test_weights_that_0_2_0_left_in_float_are_known_as_such() -> None:
    rows = pt2qa.load(V0_2_0[0].with_name("weights.safetensors")).rows
    assert [row.quantized for row in rows] == [row.note != UNQUANTIZED for row in rows]
    assert {row.attr: row.quantized for row in rows} == {"weight": True, "bias": False}


def test_places_are_names_also_where_0_2_0_wrote_them_as_one_text(tmp_path: Path) -> None:
    diagnosis = pt2qa.load(V0_2_0[0].with_name("diagnosis.safetensors"))
    places = ("a, b/conv2d", "c/linear")
    changed = replace(diagnosis, rows=tuple(replace(row, others=places) for row in diagnosis.rows))
    changed.save(tmp_path / "new.safetensors")
    assert pt2qa.load(tmp_path / "new.safetensors").rows[0].others == places
    assert set(changed.to_pandas(extended=True)["others"]) == {"a, b/conv2d, c/linear"}
    tensors, text = load_file(tmp_path / "new.safetensors"), safe_open(tmp_path / "new.safetensors", "np").metadata()
    text["rows/others"] = json.dumps(["b/conv2d, c/linear" for _ in diagnosis.rows])
    save_file(tensors, tmp_path / "old.safetensors", {**text, CHECKSUM: ""})
    assert pt2qa.load(tmp_path / "old.safetensors").rows[0].others == ("b/conv2d", "c/linear")


def test_files_of_0_2_0_have_every_kind_and_say_their_version() -> None:
    assert {path.stem for path in V0_2_0} == {kind.kind for kind in OWN_KINDS} - {"runtimes"}
    assert {safe_open(path, "np").metadata()["pt2qa.version"] for path in V0_2_0} == {"0.2.0"}


def test_the_page_on_stability_has_every_kind_with_its_schema() -> None:
    page = (Path(__file__).parents[2] / "docs" / "stability.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\d+) \|", page, re.MULTILINE))
    assert rows == {kind.kind: str(kind.schema) for kind in OWN_KINDS}
