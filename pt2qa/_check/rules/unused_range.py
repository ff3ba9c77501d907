"""Sites whose data stays in a small part of the range that calibration chose."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.site_rows import VISIBLE_NOISE, site_rows
from pt2qa._report.formats import decibel, share
from pt2qa.plugins import Found, Rule

LEAST_RANGE_USE = 0.45
"""Share of the range below which more than one bit is lost: one-sided values under a symmetric scale use 127/255."""


def find(context: CheckContext) -> Iterator[Found]:
    """Sites below 30 dB that use well under half of their integers."""
    for row in site_rows(context):
        if 0 < row.range_use < LEAST_RANGE_USE and row.rounding_sqnr < VISIBLE_NOISE:
            bits = -math.log2(row.range_use)
            yield Found(
                row.name,
                f"the data spans {share(row.range_use)} % of its range, which costs {bits:.1f} bits and leaves "
                f"{decibel(row.rounding_sqnr)} dB",
                value=bits,
            )


RULE = Rule(
    id="unused-range",
    severity="warning",
    title="ranges that are too wide for the data",
    why="Integers that no value reaches are lost: each halving of the range that is used costs a bit, 6 dB. Listed "
    f"where more than one bit is lost and rounding leaves less than {VISIBLE_NOISE:.0f} dB.",
    fix="look for what made the range wide: an outlier among the calibration data, a scale shared with the input of "
    "the op, or an activation that is rounded before its ReLU6 instead of with it",
    needs=("pair", "layers"),
    find=find,
)
