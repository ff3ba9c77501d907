"""Plans: what they hold, and files that say so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pt2qa import Edit, OverridePlan, QuantizeError, ReportError

PLAN = OverridePlan(
    (
        Edit("float", ("layer1.0.conv1/conv2d", "layer1.0.relu/relu")),
        Edit("fuse", ("stem.0/conv2d", "stem.2/hardtanh")),
        Edit("observer", ("fc/linear",), "minmax"),
        Edit("range", ("x",), scale=0.1, zero_point=-3),
        Edit("bias", ("fc/linear",), values="AACAPwAAAMA="),
        Edit("shift", ("ln/layer_norm", "fc/linear"), values="AACAPwAAAMA="),
        Edit("smooth", ("ln/layer_norm", "fc/linear"), values="AACAPwAAAEE="),
        Edit("round", ("fc/linear",), values="AYD/fw=="),
    ),
    quantizer="xnnpack:per_channel=false",
    model="ResNet",
)


def changed(**fields: Any) -> str:
    """The plan's JSON with other fields; None takes one away."""
    content = {**json.loads(PLAN.to_json()), **fields}
    return json.dumps({key: value for key, value in content.items() if value is not None})


def test_a_file_gives_the_plan_back(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert OverridePlan.load(tmp_path / "plan.json") == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_values_as_numbers() -> None:
    expected = [[1.0, -2.0], [1.0, -2.0], [1.0, 8.0], [1, -128, -1, 127]]
    assert [edit.numbers.tolist() for edit in PLAN.edits[-4:]] == expected


def test_a_plan_reads_as_text() -> None:
    assert str(PLAN).splitlines() == [
        "8 edits for ResNet on xnnpack:per_channel=false",
        "  float: layer1.0.conv1/conv2d, layer1.0.relu/relu",
        "  fuse: stem.0/conv2d + stem.2/hardtanh",
        "  observer minmax: fc/linear",
        "  range 0.1, -3: x",
        "  bias of 2 channels: fc/linear",
        "  shift of 2 channels: ln/layer_norm, fc/linear",
        "  smooth of 2 channels: ln/layer_norm, fc/linear",
        "  round of 4 weights: fc/linear",
    ]


def test_plans_need_no_torch() -> None:
    code = "import sys; from pt2qa import Edit, OverridePlan; OverridePlan((Edit('float', ('a',)),)).to_json()"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("flot", ("a",)),
            "kind: got 'flot', expected one of float, fuse, dynamic, int8, int8_weight, int16, observer, range, bias, ",
        ),
        (("float", "a"), "ops: got 'a', expected a tuple of op names"),
        (("float", ("a", 3)), r"ops: got \('a', 3\), expected a tuple of op names"),
        (("float", ()), "expected the name of at least one op"),
        (("fuse", ("a",)), "expected the names of two ops"),
        (("fuse", ("a", "a")), "expected the names of two ops"),
        (("observer", ("a",)), "observer: got '', expected minmax, histogram, moving_average"),
        (("observer", ("a",), "max"), "observer: got 'max', expected minmax"),
        (("float", ("a",), "minmax"), "observer: got 'minmax', expected none: only observer edits take one"),
        (("range", ("a",)), "scale: got 0.0, expected a positive number"),
        (("range", ("a",), "", 1e300), "scale: got 1e\\+300, expected a number that float32 can represent"),
        (("range", ("a",), "", 1.0, 0.5), "zero_point: got 0.5, expected an integer"),
        (("range", ("a",), "", "1"), "scale: got '1', expected a positive number"),
        (("float", ("a",), "", 1.0), "scale: got 1.0, expected none: only range edits take one"),
        (
            ("float", ("a",), "", 0.0, 0, "AACAPw=="),
            "expected none: only bias, shift, scale, smooth, round edits take one",
        ),
        (("bias", ("a", "b"), "", 0.0, 0, "AACAPw=="), "expected the name of one op"),
        (("bias", ("a",)), "expected finite numbers, one for each channel"),
        (("bias", ("a",), "", 0.0, 0, "AADAfw=="), "expected finite numbers"),
        (("bias", ("a",), "", 0.0, 0, "AACAP"), "expected numbers in base64"),
        (("bias", ("a",), "", 0.0, 0, "AAA="), "expected numbers in base64"),
        (("shift", ("a",), "", 0.0, 0, "AACAPw=="), "expected ops that write channels and ops that read them"),
        (("smooth", ("a",), "", 0.0, 0, "AACAPw=="), "expected ops that write channels and ops that read them"),
        (("scale", ("a", "b"), "", 0.0, 0, "AAAAAA=="), "expected positive numbers"),
        (("smooth", ("a", "b"), "", 0.0, 0, "AACAvw=="), "expected positive numbers"),
    ],
)
def test_an_edit_checks_its_fields(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        Edit(*arguments)


def test_a_plan_checks_its_fields() -> None:
    with pytest.raises(QuantizeError, match=r"edits: got .*expected a tuple of Edit"):
        OverridePlan([Edit("float", ("a",))])  # type: ignore[arg-type]
    with pytest.raises(QuantizeError, match="model: got 3, expected a string"):
        OverridePlan((), model=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("[1]", "is not an override plan"),
        (changed(format="report"), "expected the field 'format' to be 'pt2qa override plan'"),
        (changed(version=2), "field 'version' holds 2; this pt2qa reads version 1"),
        (changed(model=None), "field 'model' is missing"),
        (changed(model=1), "model: got 1, expected a string"),
        (changed(extra=1), "field 'extra' is not one of"),
        (changed(edits={}), "field 'edits' holds {}, expected a list"),
        (changed(edits=[1]), r"field 'edits\[0\]' holds 1, expected an object"),
        (changed(edits=[{"kind": "float"}]), r"field 'edits\[0\].ops' is missing"),
        (changed(edits=[{"kind": "float", "ops": "a"}]), r"field 'edits\[0\].ops' holds 'a', expected a list"),
        (changed(edits=[{"kind": [], "ops": ["a"]}]), r"field 'edits\[0\]': edit: kind: got \[\]"),
        (changed(edits=[{"kind": "float", "ops": ["a"], "why": 1}]), r"field 'edits\[0\].why' is not one of"),
        (changed(edits=[{"kind": "observer", "ops": ["a"], "observer": []}]), r"observer: got \[\]"),
        (changed(edits=[{"kind": "float", "ops": ["a"], "scale": 1}]), r"field 'edits\[0\].scale' is not one of"),
        (changed(edits=[{"kind": "range", "ops": ["a"], "scale": None}]), r"field 'edits\[0\]': edit 'range': scale"),
    ],
)
def test_a_damaged_file_is_named_with_its_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=message) as raised:
        OverridePlan.load(path)
    assert str(path) in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"cannot read .*none\.json: No such file"):
        OverridePlan.load(tmp_path / "none.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportError, match="it is not text"):
        OverridePlan.load(tmp_path / "bytes")
