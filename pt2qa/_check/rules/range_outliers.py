"""Sites where a few large values take the range that all others need."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.rules.unused_range import LEAST_RANGE_USE
from pt2qa._check.site_rows import DB_PER_BIT, clamp_cost, site_rows
from pt2qa._decibels import LOW_SQNR
from pt2qa._report.formats import decibel, share
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Sites below 20 dB though the data reaches across their range and the clamp costs less than a bit."""
    for row in site_rows(context):
        if row.range_use >= LEAST_RANGE_USE and row.rounding_sqnr < LOW_SQNR and not clamp_cost(row) > DB_PER_BIT:
            # Of rounding alone: signal / (scale**2 / 12) is the ratio that the dB state.
            steps = (10 ** (row.rounding_sqnr / 10) / 12) ** 0.5
            yield Found(
                row.name,
                f"the data spans {share(row.range_use)} % of its range, and its root mean square is "
                f"{steps:.1f} steps: rounding leaves {decibel(row.rounding_sqnr)} dB",
                value=-row.rounding_sqnr,
            )


RULE = Rule(
    id="range-outliers",
    severity="warning",
    title="ranges that a few values need and the others do not",
    why="The range fits the data, but most values are so much smaller than the largest that they have a handful of "
    f"integers. Listed below {LOW_SQNR:.0f} dB, where the noise of rounding has more than 1 % of the signal's power.",
    fix='keep the ops that read it in float or give them more bits (pt2qa.Edit("float", (name,)), "int16" where the '
    "backend has it), or cut the outliers off in the model before it is trained",
    needs=("pair", "layers"),
    find=find,
)
