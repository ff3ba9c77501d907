"""Bad cases come back from their file, print, sort, and a damaged file says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from math import nan

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pt2qa._bad_cases.report import check_structure
from pt2qa.errors import ReportError
from pt2qa.report import BadCases, CaseRow, Environment, LabelCounts, Ranking, StoredCase, load

HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")
BROKEN = "NaN or infinite in the quantized model only"
NAMED = {"dict": [["n", {"value": 3}], ["z", {"tensor": 1, "dtype": "complex64"}]]}
STRUCTURE = json.dumps({"tuple": [{"tensor": 0, "dtype": "bfloat16"}, NAMED]})


@pytest.fixture
def cases() -> BadCases:
    """Two rankings of one output, one with a broken sample, and a batch as a whole."""
    return BadCases(
        rows=(
            CaseRow("sqnr", "output", 1, nan, 3, 1, 25, BROKEN),
            CaseRow("sqnr", "output", 2, 8.25, 0, 4, 4),
            CaseRow("atol", "output.boxes", 1, 0.53125, 7, -1, 56),
        ),
        rankings=(
            Ranking("sqnr", "output", "smallest", 62, 21.5, 1, 1, "the reference is all zero"),
            Ranking("atol", "output.boxes", "largest", 8, 0.25, 0, 0),
            Ranking("flips", "output", "largest", 64, 0.03125, 0, 0),
        ),
        labels=(LabelCounts("output", 64, 48, 46, 3, 1),),
        cases=(
            StoredCase(3, 1, 25, 8, STRUCTURE),
            StoredCase(0, 4, 4, 8, STRUCTURE),
            StoredCase(7, -1, 56, 1, json.dumps({"tensor": 0, "dtype": "float32"})),
        ),
        inputs={
            "3/1/0": np.ones((1, 2), np.float32),
            "3/1/1": np.zeros((1, 2), np.float32),
            "0/4/0": np.full((1, 2), 2, np.float32),
            "0/4/1": np.array([[1, -1]], np.float32),
            "7/-1/0": np.arange(16, dtype=np.float32).reshape(8, 2),
        },
        batch_axis=0,
        notes=("stopped at batch 8, OSError: disk gone",),
        steps=8,
        samples=64,
        quantizer="xnnpack",
        model="Detector",
        environment=HERE,
    )


@pytest.mark.parametrize("width", [100, 60])
def test_the_text(cases, golden, width):
    text = cases.text(width=width)
    assert max(map(len, text.splitlines())) <= width
    golden(f"bad_cases_{width}", text)


def test_a_file_gives_back_what_was_saved(cases, tmp_path):
    cases.save(tmp_path / "cases.safetensors")
    loaded = load(tmp_path / "cases.safetensors")
    assert repr(replace(loaded, inputs={}, cases=(), rows=())) == repr(replace(cases, inputs={}, cases=(), rows=()))
    assert repr(loaded.rows) == repr(cases.rows)
    assert loaded.cases == cases.cases
    assert loaded.inputs.keys() == cases.inputs.keys()
    assert all((loaded.inputs[name] == array).all() for name, array in cases.inputs.items())


def test_the_inputs_are_batches_of_the_models_dtypes(cases):
    torch = pytest.importorskip("torch")
    x, named = cases.batch(cases.rows[1])
    assert (x.dtype, x.shape, x[7, 1].item()) == (torch.bfloat16, (8, 2), 2)
    assert named["n"] == 3
    assert named["z"].dtype == torch.complex64
    assert named["z"].tolist() == [1 - 1j] * 8
    assert cases.batch(cases.rows[2]).shape == (8, 2)
    cases.batch(cases.rows[2]).zero_()
    assert cases.inputs["7/-1/0"].any()


def test_batches_come_once_each_and_the_worst_first(cases):
    firsts = [batch[0][0, 0].item() if isinstance(batch, tuple) else "whole" for batch in cases.batches()]
    assert firsts == [1, "whole", 2]
    assert len(cases.batches("sqnr")) == 2
    assert len(cases.batches(output="output.boxes")) == 1
    with pytest.raises(ReportError, match=r"no ranking by 'l1' of None; there are: sqnr of output, atol of output\.bo"):
        cases.batches("l1")
    with pytest.raises(ReportError, match="the report has no cases"):
        replace(cases, rows=()).batch()


def test_columns_and_orders(cases):
    assert list(cases.to_pandas().columns) == ["metric", "output", "rank", "value", "batch", "sample", "index"]
    assert list(cases.to_pandas(extended=True).columns)[7:10] == ["note", "first_wrong", "worst_position"]
    assert cases.csv().splitlines()[2] == "sqnr,output,2,8.25,0,4,4"
    assert cases.worst() == cases.rows[:2]
    assert cases.worst("atol") == cases.rows[2:]
    places = [line.split()[:2] for line in cases.table("graph", width=100).splitlines()[3:]]
    assert places == [["sqnr", "output"], ["sqnr", "output"], ["atol", "output.boxes"]]
    assert cases.table("value", None, 100).splitlines()[-1].split()[:4] == ["sqnr", "nan", "output", "1"]
    with pytest.raises(ReportError, match=r"cannot sort by 'valu': did you mean 'value'\?"):
        cases.text(sort="valu")


def test_no_case_at_all_is_said(cases):
    empty = replace(cases, rows=(), cases=(), inputs={}, rankings=cases.rankings[2:])
    assert "flips of output: no bad case." in empty.text(width=100)
    assert empty.summary().splitlines()[-1] == "No case was kept."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"3/1/0": None}, r"the input tensor '3/1/0' is missing|field 'inputs/3/1/0' is missing"),
        ({"3/1/0": np.ones(2)}, r"the input tensor '3/1/0' is float64 of shape \(2,\), expected float32"),
        ({"3/1/1": np.ones(3, np.float32)}, r"the input tensor '3/1/1' is float32 of shape \(3,\), expected float32"),
    ],
)
def test_a_damaged_file_is_one_error(cases, tmp_path, change, message):
    path = tmp_path / "cases.safetensors"
    cases.save(path)
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        header = dict(file.metadata())
    tensors = load_file(path)
    for name, array in change.items():
        tensors.pop(f"inputs/{name}")
        if array is not None:
            tensors[f"inputs/{name}"] = array
    save_file(tensors, path, header)
    with pytest.raises(ReportError, match=rf"cases\.safetensors: ({message})"):
        load(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cases": ()}, r"the input tensor '0/4/0' belongs to no case"),
        ({"cases": (), "inputs": {}}, r"the inputs of sample 1 of batch 3 are not in the report"),
    ],
)
def test_rows_and_inputs_must_belong_together(cases, fields, message):
    with pytest.raises(ReportError, match=message):
        replace(cases, **fields)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ("{", "is damaged"),
        ('{"tensor": 0}', "expected a tensor, a value, a tuple, a list or a dict"),
        ('{"value": [1]}', "expected a tensor, a value"),
        ('{"dict": [["x"]]}', "expected pairs of name and value"),
        ('{"tensor": 0, "dtype": "save"}', "unknown dtype 'save'"),
        ("[" * 100000, "is damaged"),
    ],
)
def test_a_structure_is_checked(structure, message):
    with pytest.raises(ReportError, match=message):
        check_structure(structure, (0, 0), {})


def test_reading_needs_no_torch(cases, tmp_path):
    cases.save(tmp_path / "cases.safetensors")
    code = (
        "import sys; from pt2qa.report import load\n"
        "print(load(sys.argv[1]).text(width=100))\n"
        "assert not {'torch', 'pandas'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "cases.safetensors")], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"repeats": 2**40},
            r"case \(3, 1\): 1099511627776 repeats of its inputs would take 8796093022208 bytes, expect",
        ),
        ({"structure": '{"list": [' * 65 + '{"value": 1}' + "]}" * 65}, "nested more than 64 deep"),
    ],
)
def test_inputs_beyond_all_bounds_are_refused_before_they_are_made(cases, changes, message):
    with pytest.raises(ReportError, match=message):
        replace(cases, cases=(replace(cases.cases[0], **changes), *cases.cases[1:]))
