"""What a remedy must gain: the formulas in :mod:`pt2qa._diagnosis.worth`, by hand."""

from __future__ import annotations

import math

import pytest

from pt2qa._diagnosis.worth import FAULT, HALF, LEAST, MACS, Worth, error


def test_the_error_of_decibels() -> None:
    assert [error(20.0), error(0.0), error(-20.0), error(math.inf)] == [0.1, 1.0, 10.0, 0.0]
    assert error(math.nan) == error(-7000.0) == math.inf
    assert error(-6000.0) == 1e300


def pays(before: float, after: float, cost: float = 0.0, *, is_fault: bool = False, **worth: float) -> bool:
    """Whether going from one error to another is worth a row."""
    sqnr = -20 * math.log10(before)
    return Worth(**worth).pays(sqnr, -20 * math.log10(after) - sqnr, cost, is_fault=is_fault)


def test_a_row_removes_a_hundredth_of_the_output_and_half_of_that_if_it_is_a_fault() -> None:
    assert (LEAST, MACS, FAULT) == (0.01, 0.1, 0.5)
    assert pays(0.1, 0.0899)
    assert not pays(0.1, 0.0901)
    assert pays(0.1, 0.0949, is_fault=True)
    assert not pays(0.1, 0.0951, is_fault=True)
    assert pays(0.1, 0.0799, least=0.02)
    assert not pays(0.1, 0.0801, least=0.02)


def test_what_leaves_int8_removes_more_in_proportion() -> None:
    assert pays(0.1, 0.0399, 0.5)  # 0.01 + 0.5 * 0.1
    assert not pays(0.1, 0.0401, 0.5)
    assert pays(0.1, 0.0849, 0.1, is_fault=True)
    assert not pays(0.1, 0.0851, 0.1, is_fault=True)
    assert pays(0.1, 0.0699, 0.5, macs=0.04)
    assert not pays(0.1, 0.0701, 0.5, macs=0.04)


def test_a_fault_that_makes_half_of_all_noise_is_worth_a_row_however_small() -> None:
    assert pytest.approx(3.0103, abs=1e-4) == HALF
    worth = Worth()
    assert worth.pays(80.0, HALF, 1.0, is_fault=True)
    assert not worth.pays(80.0, HALF - 1e-6, 0.0, is_fault=True)
    assert not worth.pays(80.0, HALF, 0.0, is_fault=False)


def test_any_gain_is_worth_it_where_the_model_has_no_number() -> None:
    for is_fault in (False, True):
        assert Worth().pays(math.nan, 0.1, 1.0, is_fault=is_fault)
        assert not Worth().pays(math.nan, 0.0, 0.0, is_fault=is_fault)
        assert not Worth().pays(math.nan, -1.0, 0.0, is_fault=is_fault)
        assert Worth().pays(80.0, math.inf, 1.0, is_fault=is_fault)


def test_what_is_left_counts_with_its_cost() -> None:
    assert Worth().after(20.0, 0.5) == pytest.approx(0.15)
    assert Worth(macs=0.4).after(40.0, 0.5) == pytest.approx(0.21)
