"""Taking points away from groups that share a scale leaves no reference without an end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pt2qa.errors import QuantizeError
from pt2qa.overrides.points import Derives, Point, Shares, remove, replace_own, root_of

A, B, C, D, E = ((name, "") for name in "abcde")


def describe(point: Point) -> str:
    return point[0]


def test_the_first_that_stays_carries_the_spec() -> None:
    specs = {A: "int8", B: Shares(A), C: Shares(B), D: Shares(A)}
    assert remove(specs, [A], describe) == {B: "int8", C: Shares(B), D: Shares(B)}


def test_what_shared_by_way_of_a_point_that_goes_shares_with_the_root() -> None:
    specs = {A: "int8", B: Shares(A), C: Shares(B)}
    assert remove(specs, [B], describe) == {A: "int8", C: Shares(A)}


def test_other_groups_stay_as_they_are() -> None:
    specs = {A: "int8", B: Shares(A), C: "uint8", D: Shares(C)}
    assert remove(specs, [A, B], describe) == {C: "uint8", D: Shares(C)}


@pytest.mark.parametrize(
    "specs",
    [
        {A: Shares(B), B: Shares(A), C: Shares(A)},
        {A: Shares(A), C: Shares(A)},
        {B: Shares(E), A: Shares(B), C: Shares(A)},
    ],
    ids=["circle", "itself", "breaks off"],
)
def test_a_chain_without_an_end_is_named(specs: dict[Point, Any]) -> None:
    assert root_of(specs, C) is None
    with pytest.raises(QuantizeError, match=r"[bc] shares its scale with a, which leads to no scale of its own"):
        remove(specs, [A], describe)


def test_such_a_chain_is_left_alone_where_no_edit_touches_it() -> None:
    specs = {A: Shares(B), B: Shares(A), C: "int8"}
    assert remove(specs, [C], describe) == {A: Shares(B), B: Shares(A)}


def test_a_derived_scale_finds_another_point_of_the_group() -> None:
    specs = {A: "int8", B: Shares(A), D: Derives("int32", (A,))}
    assert remove(specs, [A], describe)[D] == Derives("int32", (B,))


def test_a_derived_scale_without_source_is_an_error() -> None:
    specs = {A: "int8", D: Derives("int32", (A,)), B: Shares(A)}
    with pytest.raises(QuantizeError, match="d derives its scale from a, which this edit removes"):
        remove(specs, [A], describe)


def test_changed_points_go_on_sharing_among_themselves() -> None:
    specs = {A: "int8", B: Shares(A), C: Shares(A), D: Shares(C)}
    changed = replace_own(specs, [A, C], lambda spec: f"wide {spec}", describe)
    assert changed == {A: "wide int8", B: "int8", C: Shares(A), D: Shares(B)}


points = st.integers(0, 9).map(lambda number: (str(number), ""))


@st.composite
def shared(draw: st.DrawFn) -> dict[Point, Any]:
    """Specs as a quantizer that works leaves them: every reference goes to an earlier point."""
    specs: dict[Point, Any] = {}
    for number in range(draw(st.integers(1, 10))):
        earlier = [None, *specs]
        target = draw(st.sampled_from(earlier))
        specs[str(number), ""] = f"spec {number}" if target is None else Shares(target)
    return specs


@given(shared(), st.sets(points))
def test_whatever_goes_what_stays_keeps_its_spec_and_its_partners(specs: dict[Point, Any], gone: set[Point]) -> None:
    after = remove(specs, gone & specs.keys(), describe)
    assert list(after) == [point for point in specs if point not in gone]
    for point in after:
        old, new = root_of(specs, point), root_of(after, point)
        assert new is not None
        assert after[new] == specs[old]  # type: ignore[index]
        spec = after[point]
        assert not isinstance(spec, Shares) or list(after).index(spec.point) < list(after).index(point)
        partners = {other for other in after if root_of(specs, other) == old}
        assert partners == {other for other in after if root_of(after, other) == new}
