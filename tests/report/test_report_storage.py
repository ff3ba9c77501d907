"""A report file comes back as it was, or says in one error which file and which field is wrong."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import pt2qa._report.storage as storage
from pt2qa._report.atomic import locked, write_atomic
from pt2qa._report.rows import Environment, column
from pt2qa.errors import ReportError
from pt2qa.report import Report, load, register

SCHEMA = storage._KINDS["layers"].schema


def content(path):
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118 - not a dict


def same(one, other):
    """Equality in which nan equals nan: repr gives every float in full."""
    return type(one) is type(other) and repr(asdict(one)) == repr(asdict(other))


@pytest.fixture
def saved(layers, tmp_path):
    path = tmp_path / "layers.safetensors"
    layers.save(path)
    return path


@pytest.mark.parametrize("name", ["layers", "weights", "empty"])
def test_load_gives_back_what_save_was_given(name, request, tmp_path):
    report = request.getfixturevalue(name)
    report.save(tmp_path / "report.safetensors")
    assert same(load(tmp_path / "report.safetensors"), report)
    assert [file.name for file in tmp_path.iterdir()] == ["report.safetensors"]


def test_custom_metrics_and_their_order_come_back(layers, layer, tmp_path):
    rows = (layer(custom={"z": 1.0, "a/b": 2.0, "größe": 3.0}),)
    report = replace(layers, rows=rows, outputs=(), modules=())
    report.save(tmp_path / "r.safetensors")
    assert list(load(tmp_path / "r.safetensors").rows[0].custom.items()) == list(rows[0].custom.items())


def test_a_metric_whose_name_is_no_utf_8_comes_back(layers, layer, tmp_path):
    path = tmp_path / "r.safetensors"
    rows = (layer(custom={"\ud800": 1.0, "b": 2.0}),)
    replace(layers, rows=rows, outputs=(), modules=()).save(path)
    assert load(path).rows[0].custom == {"\ud800": 1.0, "b": 2.0}
    rows = (layer(custom={"\ud800": 1.0, "\\ud800": 2.0}),)
    with pytest.raises(ReportError, match="another metric has the same name in a file; rename it"):
        replace(layers, rows=rows, outputs=(), modules=()).save(path)


def test_numbers_are_columns_and_the_rest_is_json(saved):
    tensors, text = content(saved)
    assert tensors["rows/sqnr"].dtype == np.float64
    assert tensors["rows/sqnr"].shape == (26,)
    assert tensors["rows/handle"].dtype == np.int64
    assert json.loads(text["rows/shape"])[0] == [8, 32, 14, 14]
    assert json.loads(text["environment"])["fingerprint"] == "3f2a"
    assert text["pt2qa.kind"] == "layers"
    assert text["pt2qa.schema"] == str(SCHEMA)


def test_a_loaded_report_outlives_its_file(saved, layers):
    report = load(str(saved))
    saved.write_bytes(b"x" * saved.stat().st_size)
    assert same(report, layers)


def test_every_missing_field_is_named(saved):
    tensors, text = content(saved)
    names = [name for name in (*tensors, *text) if not name.startswith("pt2qa.")]
    assert len(names) > 90
    for name in names:
        save_file({k: v for k, v in tensors.items() if k != name}, saved, {k: v for k, v in text.items() if k != name})
        with pytest.raises(ReportError) as caught:
            load(saved)
        assert str(caught.value) == (f"{saved}: field {name!r} is missing; the file is damaged, save the report again")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("rows/sqnr", np.zeros(26, np.float32), "holds float32 of shape (26,), expected one column of float64"),
        ("rows/handle", np.zeros(26, np.float64), "holds float64 of shape (26,), expected one column of int64"),
        ("rows/mse", np.zeros((26, 1)), "holds float64 of shape (26, 1), expected one column of float64"),
        ("rows/cosine", np.zeros(25), "holds 25 values, but 'rows/handle' holds 26"),
        ("rows/op", '["conv2d"]', "holds 1 values, but 'rows/handle' holds 26"),
        ("rows/name", "[1, 2]", "holds [1, 2], expected a list of texts"),
        ("rows/observed_at", '["dq", "qd"]', 'holds ["dq", "qd"], expected a list of dq or raw'),
        ("rows/shape", "[[1, -2]]", "holds [[1, -2]], expected a list of shapes"),
        ("rows/shape", "[[true]]", "holds [[true]], expected a list of shapes"),
        ("rows/custom", '["a", "a"]', 'holds ["a", "a"], expected a list of different texts'),
        ("unpaired/side", '["left", "right"]', "expected a list of reference or quantized"),
        ("notes", '{"a": "b"}', 'holds {"a": "b"}, expected a list of texts'),
        ("notes", "[", "is not valid JSON"),
        ("notes", "[" * 100_000, "is not valid JSON"),
        ("batches", "2.5", "holds 2.5, expected a whole number"),
        ("batches", "true", "holds true, expected a whole number"),
        ("batches", "1" + "0" * 400, "expected a whole number"),
        ("batches", "1" * 5000, "is not valid JSON"),
        ("batches", "-1", "holds -1, expected numbers from 0 up to 9007199254740992"),
        ("samples", str(2**60), "holds 1152921504606846976, expected numbers from 0 up to 9007199254740992"),
        ("pt2qa.schema", "1" * 20, "says '11111111111111111111', expected a whole number from 1"),
        ("model", "null", "holds null, expected text"),
        ("environment", '{"torch": "2"}', "expected texts named torch, torchao, executorch, pt2qa, fingerprint"),
        ("extra", np.zeros(1), "is not a field of this kind of report"),
        ("remark", '"hello"', "is not a field of this kind of report"),
        ("pt2qa.schema", "one", "says 'one', expected a whole number from 1"),
    ],
)
def test_a_damaged_field_is_named(saved, name, value, problem):
    tensors, text = content(saved)
    (tensors if isinstance(value, np.ndarray) else text)[name] = value
    save_file(tensors, saved, text)
    with pytest.raises(ReportError) as caught:
        load(saved)
    message = str(caught.value)
    assert message.startswith(f"{saved}: field {name!r} ")
    assert problem in message
    assert "\n" not in message


def test_a_row_that_cannot_be_is_named(saved):
    tensors, text = content(saved)
    save_file(tensors | {"rows/zero_point": np.full(26, 0.5)}, saved, text)
    with pytest.raises(ReportError, match=r"field 'rows' holds an invalid row \(zero_point of 'x': got 0\.5, expec"):
        load(saved)


def test_custom_metrics_that_differ_between_tables_are_named(layers, layer, tmp_path):
    path = tmp_path / "r.safetensors"
    replace(layers, rows=(layer(custom={"a": 1.0}),), outputs=(layer(custom={"a": 1.0}),), modules=()).save(path)
    tensors, text = content(path)
    del tensors["outputs/custom/a"]
    save_file(tensors, path, text | {"outputs/custom": "[]"})
    with pytest.raises(ReportError, match=r"r\.safetensors: row .*: custom metrics differ"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pt2qa.schema": str(SCHEMA + 1), "pt2qa.version": "9.9"},
            rf"field 'pt2qa.schema' says {SCHEMA + 1}, written by pt2qa 9\.9; this is pt2qa .*, which reads up to "
            rf"{SCHEMA}; update pt2qa",
        ),
        (
            {"pt2qa.kind": "holograms", "pt2qa.version": "9.9"},
            r"field 'pt2qa.kind' says 'holograms', written by pt2qa 9\.9; this .* knows .*layers.*; update pt2qa",
        ),
    ],
)
def test_a_newer_pt2qas_file_says_update(saved, changes, message):
    tensors, text = content(saved)
    save_file(tensors, saved, text | changes)
    with pytest.raises(ReportError, match=message):
        load(saved)


def test_an_older_schema_says_analyse_again(saved, monkeypatch):
    monkeypatch.setattr(storage._KINDS["layers"], "schema", 9)
    monkeypatch.setattr(storage._KINDS["layers"], "oldest", 9)
    with pytest.raises(
        ReportError, match=rf"field 'pt2qa.schema' says {SCHEMA}, .* which reads 9; analyse the model again"
    ):
        load(saved)


def test_no_flipped_bit_goes_unnoticed(saved, layers):
    whole = saved.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    generator = np.random.default_rng(0)
    places = {*generator.integers(0, 8 * header, 400).tolist(), *generator.integers(0, 8 * len(whole), 200).tolist()}
    places |= {8 * (header + place) for place in range(0, len(whole) - header, 97)}
    kept = 0
    for place in sorted(places):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        saved.write_bytes(data)
        with suppress(ReportError):
            assert same(load(saved), layers), f"bit {place} was flipped"
            kept += 1
    assert kept < 5  # the hexadecimal digits of an escape in JSON have two spellings


def test_a_number_that_was_changed_is_noticed(saved):
    tensors, text = content(saved)
    assert len(text["pt2qa.checksum"]) == 64
    save_file(tensors | {"rows/sqnr": tensors["rows/sqnr"] + 1}, saved, text)
    with pytest.raises(ReportError) as caught:
        load(saved)
    assert str(caught.value) == (
        f"{saved}: field 'pt2qa.checksum' does not match the contents of the file; the file is damaged, save the "
        "report again"
    )


def test_the_checksum_does_not_depend_on_the_order_in_a_file(saved, layers):
    tensors, text = content(saved)
    save_file(dict(reversed(tensors.items())), saved, dict(reversed(text.items())))
    assert same(load(saved), layers)


def test_a_file_from_before_there_were_checksums_loads(saved, layers):
    tensors, text = content(saved)
    del text["pt2qa.checksum"]
    save_file(tensors, saved, text)
    assert same(load(saved), layers)


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"hello\n" * 50, b"PK\3\4" + bytes(100), bytes(range(256)) * 9, b"\xff" * 64]
)
def test_what_is_no_safetensors_file_is_refused(data, tmp_path):
    path = tmp_path / "report.safetensors"
    path.write_bytes(data)
    with pytest.raises(
        ReportError, match=r"report\.safetensors: not a report file, or damaged: its safetensors header"
    ):
        load(path)


@pytest.mark.parametrize("kept", [0.001, 0.1, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused(saved, kept):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ReportError, match=r"layers\.safetensors: not a report file, or damaged"):
        load(saved)


def test_a_foreign_safetensors_file_is_refused_before_its_weights_are_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(3, np.float32)}, path)
    with pytest.raises(ReportError, match=r"a safetensors file, but not a pt2qa report: it has no field 'pt2qa\.kind'"):
        load(path)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ReportError, match="not a pt2qa report"):
        load(path)


def test_a_tensor_of_a_type_that_numpy_lacks_is_refused(saved):
    data = saved.read_bytes()
    assert b'"rows/sqnr":{"dtype":"F64"' in data
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    entry = header["rows/sqnr"]
    entry["dtype"], entry["shape"] = "BF16", [entry["shape"][0] * 4]
    text = json.dumps(header).encode()
    saved.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ReportError, match=r"layers\.safetensors: .*rows/sqnr"):
        load(saved)


def test_no_such_file_and_a_folder_are_refused(tmp_path, saved):
    with pytest.raises(ReportError, match=r"gone\.safetensors: no such file; give a file that report\.save\(\) wrote"):
        load(tmp_path / "gone.safetensors")
    with pytest.raises(ReportError, match=r"is a folder; give one report in it, such as layers\.safetensors"):
        load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=r"is a folder; give one report in it, but it holds no \.safetensors file"):
        load(tmp_path / "empty")


def fail_with(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize("step", ["replace", "fsync"])
@pytest.mark.parametrize("old", [b"old", None], ids=["over a file", "new file"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(layers, tmp_path, monkeypatch, step, old):
    path = tmp_path / "report.safetensors"
    if old is not None:
        path.write_bytes(old)
    monkeypatch.setattr(os, step, fail_with(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ReportError, match=r"cannot write .*report\.safetensors: No space left on device"):
        layers.save(path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == (
        {} if old is None else {"report.safetensors": old}
    )


def test_an_interrupted_save_leaves_nothing_behind(layers, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        layers.save(tmp_path / "report.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_saving_into_a_missing_folder_or_onto_a_folder_is_refused(layers, tmp_path):
    with pytest.raises(ReportError, match=r"cannot write .*: the folder .*gone does not exist; create it first"):
        layers.save(tmp_path / "gone" / "report.safetensors")
    assert not (tmp_path / "gone").exists()
    with pytest.raises(ReportError, match="it is a folder; give the name of a file in it"):
        layers.save(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="permissions and links as POSIX has them")
def test_saving_respects_the_umask_and_follows_links(layers, tmp_path):
    target, link = tmp_path / "target.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(target)
    mask = os.umask(0o027)
    try:
        layers.save(link)
    finally:
        os.umask(mask)
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert same(load(link), layers)


@pytest.mark.skipif(os.name != "posix", reason="permissions as POSIX has them")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444])
def test_a_file_that_is_replaced_keeps_its_permissions(layers, weights, tmp_path, mode):
    target, link = tmp_path / "report.safetensors", tmp_path / "link.safetensors"
    layers.save(target)
    link.symlink_to(target)
    target.chmod(mode)
    for path, report in ((target, weights), (link, layers)):
        report.save(path)
        assert stat.S_IMODE(target.stat().st_mode) == mode
        assert load(target).kind == report.kind
    assert link.is_symlink()


def test_saving_again_replaces_the_file(layers, weights, tmp_path):
    path = tmp_path / "report.safetensors"
    layers.save(path)
    weights.save(path)
    assert same(load(path), weights)


@dataclass(frozen=True, slots=True)
class Cases(Report):
    """A kind of report as a later issue may add it: tensors beside a text."""

    title: str
    inputs: dict[str, npt.NDArray[np.generic]]

    def text(self, *, sort="worst", limit=20, width=None):
        return self.title

    def to_pandas(self, *, extended=False):
        raise NotImplementedError

    def csv(self, *, extended=False):
        return ""


@pytest.fixture
def kinds(monkeypatch):
    monkeypatch.setattr(storage, "_KINDS", dict(storage._KINDS))


def test_a_new_kind_with_tensors_needs_no_change_in_the_loader(kinds, tmp_path):
    path = tmp_path / "cases.safetensors"
    report = Cases("two", {"b": np.arange(6, dtype=np.int8).reshape(2, 3).T, "a": np.array(1.5, np.float32)})
    with pytest.raises(TypeError, match="Cases is not a registered kind of report"):
        report.save(path)
    register("cases", schema=4)(Cases)
    report.save(path)
    back = load(path)
    assert isinstance(back, Cases)
    assert str(back) == "two"
    assert list(back.inputs) == ["b", "a"]
    for key, array in report.inputs.items():
        assert back.inputs[key].dtype == array.dtype
        np.testing.assert_array_equal(back.inputs[key], array)
    tensors, text = content(path)
    del tensors["inputs/a"]
    save_file(tensors, path, text)
    with pytest.raises(ReportError, match="field 'inputs/a' is missing"):
        load(path)


@dataclass(frozen=True, slots=True)
class Line:
    """A row that had a name first, and a count and a metric later."""

    name: str
    count: Annotated[int, column(since=2)] = 7


@dataclass(frozen=True, slots=True)
class Lines(Report):
    rows: tuple[Line, ...]
    environment: Environment
    title: Annotated[str, column(since=2)] = "untitled"


def test_files_of_an_older_schema_load_with_the_defaults_of_later_fields(kinds, tmp_path):
    path = tmp_path / "lines.safetensors"
    register("lines", schema=2, oldest=1)(Lines)
    report = Lines((Line("a", 1), Line("b", 2)), Environment.here(""), "two")
    report.save(path)
    assert load(path) == report
    tensors, text = content(path)
    del tensors["rows/count"]
    del text["title"]
    del text["pt2qa.checksum"]
    save_file(tensors, path, text)
    with pytest.raises(ReportError, match="field 'rows/count' is missing"):
        load(path)
    save_file(tensors, path, text | {"pt2qa.schema": "1"})
    assert load(path) == replace(report, rows=(Line("a"), Line("b")), title="untitled")
    register("lines", schema=3, oldest=2)(Lines)
    with pytest.raises(ReportError, match=r"says 1, .* which reads 2 to 3; analyse the model again"):
        load(path)


def test_a_later_field_needs_a_default(kinds):
    @dataclass(frozen=True)
    class Odd:
        name: Annotated[str, column(since=2)]

    with pytest.raises(TypeError, match="name: a field since schema 2 needs a default"):
        register("odd", schema=2, oldest=1)(Odd)


def test_a_kind_is_registered_once_and_only_with_fields_that_files_hold(kinds):
    with pytest.raises(ValueError, match=r"report kind 'layers' is taken by pt2qa\._layers\.report\.LayerReport"):
        register("layers", schema=1)(Cases)
    register("cases", schema=1)(Cases)
    register("cases", schema=1)(Cases)

    @dataclass(frozen=True)
    class Odd:
        path: Path

    Odd.__annotations__["path"] = Path
    with pytest.raises(TypeError, match=r"Odd\.path: a report file cannot hold"):
        register("odd", schema=1)(Odd)


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, b"words")
    assert os.read(reader, 100) == b"words"
    os.close(reader)
    assert pipe.is_fifo()


def abandoned(folder, name="report.safetensors"):
    return folder / f".{name}.{'0a' * 8}.tmp"


def test_what_a_killed_process_left_is_removed_by_the_next_that_writes_the_file(layers, tmp_path):
    path = tmp_path / "report.safetensors"
    for name in ("report.safetensors", "other.safetensors"):
        abandoned(tmp_path, name).write_bytes(b"half")
    (tmp_path / ".report.safetensors.mine.tmp").write_bytes(b"mine")
    layers.save(path)
    assert same(load(path), layers)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f".other.safetensors.{'0a' * 8}.tmp",
        ".report.safetensors.mine.tmp",
        "report.safetensors",
    ]


@pytest.mark.skipif(os.name != "posix", reason="locks as POSIX has them")
def test_what_another_process_is_writing_is_left_to_it(layers, tmp_path):
    import fcntl

    writing = abandoned(tmp_path)
    with writing.open("wb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        layers.save(tmp_path / "report.safetensors")
        assert writing.exists()
    layers.save(tmp_path / "report.safetensors")
    assert not writing.exists()


@pytest.mark.skipif(os.name != "posix", reason="locks as POSIX has them")
def test_a_file_system_without_locks_can_be_written_to_and_nothing_there_is_taken_for_abandoned(
    layers, tmp_path, monkeypatch
):
    monkeypatch.setattr("fcntl.flock", fail_with(OSError(errno.ENOTSUP, "Operation not supported")))
    abandoned(tmp_path).write_bytes(b"half")
    layers.save(tmp_path / "report.safetensors")
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == [abandoned(tmp_path).name, "report.safetensors"]


def test_a_lock_that_cannot_be_made_is_an_error(tmp_path):
    with (
        pytest.raises(ReportError, match=r"cannot write .*lock: No such file or directory"),
        locked(tmp_path / "x/lock"),
    ):
        pass


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444])
def test_a_report_keeps_the_permissions_of_the_file_that_it_replaces(layers, tmp_path, mode):
    path, link = tmp_path / "layers.safetensors", tmp_path / "link.safetensors"
    layers.save(path)
    link.symlink_to(path)
    path.chmod(mode)
    for target in (path, link):
        layers.save(target)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert load(path) == layers
    assert link.is_symlink()
