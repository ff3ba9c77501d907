"""Files that an earlier version wrote: schema 1, without a checksum, without the fields that came later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import pt2qa
from pt2qa._report.catalogue import KINDS

FILES = sorted((Path(__file__).parent / "schema1").glob("*.safetensors"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_schema_1_is_read_and_shown(path: Path, tmp_path: Path) -> None:
    report = pt2qa.load(path)
    assert "Residual" in repr(report)
    assert len(str(report).splitlines()) > 3
    assert len(report.to_pandas()) > 0
    pt2qa.write_html([report], tmp_path / "page.html")
    assert "Residual" in (tmp_path / "page.html").read_text()
    report.save(tmp_path / "again.safetensors")
    assert str(pt2qa.load(tmp_path / "again.safetensors")) == str(report)


def test_there_is_a_file_of_every_kind_that_the_version_had() -> None:
    assert len({type(pt2qa.load(path)) for path in FILES}) == 11


RENAMED = sorted((Path(__file__).parent / "before_renames").glob("*.safetensors"))
"""One file of every kind, from the last version that called ``outlier_ratio`` ``peak`` and ``nonfinite`` ``broken``."""


@pytest.mark.parametrize("path", RENAMED, ids=lambda path: path.stem)
def test_a_file_with_former_names_is_read_and_shown(path: Path, tmp_path: Path) -> None:
    report = pt2qa.load(path)
    assert report.kind == path.stem.replace("_", "-")
    assert len(str(report).splitlines()) > 3
    report.save(tmp_path / "again.safetensors")
    assert str(pt2qa.load(tmp_path / "again.safetensors")) == str(report)


def test_what_was_renamed_keeps_its_value() -> None:
    read = {path.stem: pt2qa.load(path) for path in RENAMED}
    assert {row.outlier_ratio for row in read["profile"].rows} == {0.5}
    assert {row.nonfinite for row in read["bad-cases"].rankings} == {0}
    assert {(row.a_nonfinite, row.b_nonfinite) for row in read["profile-diff"].rows} == {(1, 1)}
    assert read["diff"].of == "kind"


V0_1_0 = sorted((Path(__file__).parent / "v0_1_0").glob("*/*.safetensors"))
"""What the analyses of 0.1.0 wrote of a small model: ``first`` by the first code of that version, ``last`` by the last."""


@pytest.mark.parametrize("path", V0_1_0, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_of_0_1_0_is_read_with_the_values_that_it_has(path: Path, tmp_path: Path) -> None:
    report = pt2qa.load(path)
    assert report.kind == path.stem
    assert len(str(report).splitlines()) > 3
    for name, values in load_file(path).items():
        table, _, column = name.partition("/")
        if isinstance(rows := getattr(report, table, None), tuple) and rows and hasattr(rows[0], column):
            read: list[Any] = [getattr(row, column) for row in rows]
            if values.ndim == 1 and len(read) == len(values) and isinstance(read[0], int | float):
                np.testing.assert_array_equal(read, values, err_msg=name)
    pt2qa.write_html([report], tmp_path / "page.html")
    report.save(tmp_path / "again.safetensors")
    assert str(pt2qa.load(tmp_path / "again.safetensors")) == str(report)


def test_files_of_0_1_0_have_every_kind_and_say_their_version() -> None:
    text = {path: safe_open(path, "np").metadata() for path in V0_1_0}
    assert {each["pt2qa.version"] for each in text.values()} == {"0.1.0"}
    assert {path.stem for path in V0_1_0 if path.parent.name == "last"} == KINDS
