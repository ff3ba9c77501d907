"""Requirements are read strictly: what is not one is refused with examples, and nan meets none."""

from __future__ import annotations

from math import inf, nan

import pytest

from pt2qa._report.gating.verdict import Requirement, parsed, read_requirement
from pt2qa.errors import SelectionError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sqnr>=20", Requirement("sqnr", ">=", 20.0)),
        ("  sqnr  >  -1.5e-3  dB ", Requirement("sqnr", ">", -1.5e-3, "dB")),
        ("sqnr>=20dB", Requirement("sqnr", ">=", 20.0, "dB")),
        ("error_count==0", Requirement("error_count", "==", 0.0)),
        ("output_sqnr==inf", Requirement("output_sqnr", "==", inf)),
        ("rows.isolated_sqnr>=10", Requirement("isolated_sqnr", ">=", 10.0, table="rows")),
        ("rows.top-1 < 3", Requirement("top-1", "<", 3.0, table="rows")),
        ("rows.my.p99.9>=2", Requirement("my.p99.9", ">=", 2.0, table="rows")),
        ("layer1.*:sqnr>=15", Requirement("sqnr", ">=", 15.0, pattern="layer1.*")),
        ("fc/linear : rows.mse<=1e-3", Requirement("mse", "<=", 1e-3, table="rows", pattern="fc/linear")),
        ("x:y:sqnr<5", Requirement("sqnr", "<", 5.0, pattern="x:y")),
        ("output[1]:outputs.sqnr>=9", Requirement("sqnr", ">=", 9.0, table="outputs", pattern="output[1]")),
    ],
)
def test_a_requirement_is_read(text: str, expected: Requirement) -> None:
    assert read_requirement(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "sqnr", "sqnr>=", ">=20", "sqnr=>20", "sqnr=20", "sqnr!=20", "sqnr>=20%", "sqnr>=nan", "sqnr>=20 db"),
        *("sqnr>=20,5", "sqnr>=.5", "sqnr>=20 and mse<1", ":sqnr>=20", "a b>=2", "rows.>=2", "1sqnr>=2"),
    ],
)
def test_anything_else_is_refused_with_examples(text: str) -> None:
    assert parsed(text) is None
    with pytest.raises(
        SelectionError, match=r"requirement: got '.*', expected a metric, one of >= <= == > <, and a num"
    ):
        read_requirement(text)


@pytest.mark.parametrize(
    ("sign", "below", "equal", "above"),
    [
        (">=", False, True, True),
        (">", False, False, True),
        ("<=", True, True, False),
        ("<", True, False, False),
        ("==", False, True, False),
    ],
)
def test_signs_mean_what_they_say_and_nan_meets_none(sign: str, below: bool, equal: bool, above: bool) -> None:
    requirement = Requirement("sqnr", sign, 20.0)
    assert [requirement.holds(number) for number in (19.999, 20.0, 20.001)] == [below, equal, above]
    assert requirement.holds(nan) is False
    assert requirement.holds(inf) is above
    assert requirement.holds(-inf) is below


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("", "anything", True),
        ("layer1.*", "layer1.0.conv1/conv2d", True),
        ("layer1.*", "layer10.conv1/conv2d", False),
        ("*/conv2d", "layer1.0.conv1/conv2d", True),
        ("*/conv2d", "layer1.0.conv1/conv2d_1", False),
        ("output[1]", "output[1]", True),
        ("output[1]", "output1", False),
        ("fc", "fc/linear", False),
        ("*", "", True),
    ],
)
def test_a_star_stands_for_any_text_and_nothing_else_is_special(pattern: str, name: str, matches: bool) -> None:
    assert Requirement("sqnr", ">=", 1.0, pattern=pattern).matches(name) is matches
