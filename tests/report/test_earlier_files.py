"""Files that an earlier version wrote: schema 1, without a checksum, without the fields that came later."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import pt2qa
from pt2qa._report.storage import kinds

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
"""What the analyses of 0.1.0 wrote of a small model: ``first`` by its first code, ``last`` by its last."""

OWN_KINDS = [kind for kind in kinds() if kind.report_type.__module__.startswith("pt2qa.")]

LAYERS_OF_THE_FIRST_DAY = Path(__file__).parent / "v0_1_0" / "first" / "layers.safetensors"
READ = [path for path in V0_1_0 if path != LAYERS_OF_THE_FIRST_DAY]


@pytest.mark.parametrize("path", READ, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_of_0_1_0_is_read_with_the_values_that_it_has(path: Path, tmp_path: Path) -> None:
    report = pt2qa.load(path)
    assert report.kind == path.stem
    assert len(str(report).splitlines()) > 3
    pt2qa.write_html([report], tmp_path / "page.html")
    report.save(tmp_path / "again.safetensors")
    assert str(pt2qa.load(tmp_path / "again.safetensors")) == str(report)


@pytest.mark.parametrize(
    ("kind", "table", "column"),
    [
        ("layers", "rows", "sqnr"),
        ("layers", "rows", "isolated_sqnr"),
        ("weights", "rows", "sqnr"),
        ("sensitivity", "rows", "value"),
        ("profile", "rows", "outlier_ratio"),
        ("bad-cases", "rankings", "nonfinite"),
        ("deployed", "rows", "deployed_sqnr"),
        ("diagnosis", "rows", "gain"),
        ("error-budget", "rows", "noise_share"),
        ("graphs", "rows", "sqnr"),
    ],
)
def test_numbers_of_0_1_0_are_those_in_the_file(kind: str, table: str, column: str) -> None:
    path = Path(__file__).parent / "v0_1_0" / "last" / f"{kind}.safetensors"
    read = [getattr(row, column) for row in getattr(pt2qa.load(path), table)]
    np.testing.assert_array_equal(read, load_file(path)[f"{table}/{column}"])


def test_files_of_0_1_0_have_every_kind_and_say_their_version() -> None:
    text = {path: safe_open(path, "np").metadata() for path in V0_1_0}
    assert {each["pt2qa.version"] for each in text.values()} == {"0.1.0"}
    assert {path.stem for path in V0_1_0 if path.parent.name == "last"} == {
        kind.name for kind in kinds() if kind.report_type.__module__.startswith("pt2qa.")
    }


V0_2_0 = sorted((Path(__file__).parent / "v0_2_0").glob("*.safetensors"))
"""What the analyses of 0.2.0 wrote of a small model; two of three batches count in some."""


@pytest.mark.parametrize("path", V0_2_0, ids=lambda path: path.stem)
def test_a_file_of_0_2_0_is_read_and_shown(path: Path, tmp_path: Path) -> None:
    report = pt2qa.load(path)
    assert report.kind == path.stem
    pt2qa.write_html([report], tmp_path / "page.html")
    report.save(tmp_path / "again.safetensors")
    assert str(pt2qa.load(tmp_path / "again.safetensors")) == str(report)
    if getattr(report, "sums", None):
        assert len(pt2qa.merge([report, report]).rows) == len(report.rows) or report.kind == "bad-cases"


def test_files_of_0_2_0_have_every_kind_and_say_their_version() -> None:
    assert {path.stem for path in V0_2_0} == {kind.name for kind in OWN_KINDS}
    assert {safe_open(path, "np").metadata()["pt2qa.version"] for path in V0_2_0} == {"0.2.0"}


def test_layers_of_the_first_day_of_0_1_0_are_refused_in_words() -> None:
    with pytest.raises(pt2qa.ReportError) as caught:
        pt2qa.load(LAYERS_OF_THE_FIRST_DAY)
    assert str(caught.value) == (
        f"{LAYERS_OF_THE_FIRST_DAY}: field 'rows/part_of' is missing; "
        "the file is damaged, or an early state of pt2qa 0.1.0 wrote it, write the report again"
    )


def test_the_page_on_stability_has_every_kind_with_its_schema() -> None:
    page = (Path(__file__).parents[2] / "docs" / "stability.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\d+) \|", page, re.MULTILINE))
    assert rows == {kind.name: str(kind.schema) for kind in OWN_KINDS}
