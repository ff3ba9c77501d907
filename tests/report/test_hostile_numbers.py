"""Numbers that no analysis makes, but a file may hold, end in nan or a ReportError."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite, isnan
from typing import Any

import pytest

from pt2qa._decibels import decibels
from pt2qa.errors import ReportError
from pt2qa.report import AnnotationReport, Profile, SensitivityReport
from tests.soak.samples import sample


@pytest.mark.parametrize("zero_point", [0.5, inf, 1e19])
def test_a_zero_point_that_is_no_integer_has_no_data_frame(zero_point: float) -> None:
    report: Any = sample(AnnotationReport)
    report = replace(report, rows=(replace(report.rows[0], zero_point=zero_point),))
    with pytest.raises(ReportError, match=r"zero_point: got .*, expected a whole number of 64 bits, or nan"):
        report.to_pandas()


def test_what_is_no_sum_of_squares_has_no_sqnr() -> None:
    assert isnan(decibels(-1.0, 1.0))
    assert isnan(decibels(1.0, -1.0))
    report: Any = sample(SensitivityReport)
    assert isnan(replace(report, signal=-1.0).measured_sqnr)


def test_ends_that_are_not_finite_leave_a_histogram_its_bins() -> None:
    report: Any = sample(Profile)
    row = next(row for row in report.rows if report.counted(row).contiguous()[1].sum())
    edges, counts = report.histogram(replace(row, min=-inf, max=inf), bins=4)
    assert all(map(isfinite, edges))
    assert counts.sum() == pytest.approx(report.counted(row).contiguous()[1].sum())
