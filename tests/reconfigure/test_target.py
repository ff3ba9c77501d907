"""Targets and budgets as users write them."""

from __future__ import annotations

import pytest

import pt2qa
from pt2qa._trials.treatment import Budget, Target, read_target


@pytest.mark.parametrize("given", [30, 30.0, "sqnr>=30", "sqnr >= 30 dB", "sqnr>=3e1", Target(30.0)], ids=repr)
def test_a_target_is_decibels_a_text_or_a_target(given: object) -> None:
    assert read_target(given) == Target(30.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["sqnr>30", "accuracy>=0.9", "", True, None], ids=repr)
def test_anything_else_is_refused(given: object) -> None:
    with pytest.raises(pt2qa.SelectionError, match=r"expected decibels such as 30, 'sqnr>=30'"):
        read_target(given)  # type: ignore[arg-type]


def test_a_budget_is_a_share() -> None:
    with pytest.raises(pt2qa.SelectionError, match="macs: got 20, expected a share from 0 to 1"):
        Budget(macs=20)
