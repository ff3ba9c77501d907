"""Sites whose clamp costs more than their rounding."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.site_rows import DB_PER_BIT, VISIBLE_NOISE, clamp_cost, site_rows
from pt2qa._report.formats import decibel, number, share
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Sites below 30 dB whose noise is more than a bit above that of rounding alone, because values are clamped."""
    for row in site_rows(context):
        cost = clamp_cost(row)
        if row.saturation > 0 and cost > DB_PER_BIT and row.rounding_sqnr < VISIBLE_NOISE:
            beyond = f"{row.ref_min:.3g}..{row.ref_max:.3g}, up to {number(row.excess_lsb)} steps beyond its range"
            yield Found(
                row.name,
                f"{share(row.saturation)} % of its values are clamped ({beyond}), which takes it from "
                f"{decibel(row.rounding_sqnr + cost)} to {decibel(row.rounding_sqnr)} dB",
                value=cost,
            )


RULE = Rule(
    id="saturation",
    severity="warning",
    title="values beyond the range that calibration chose",
    why="Values outside the range are clamped to its ends. Listed where the noise of that is more than a bit (6 dB) "
    f"above the noise of rounding, and the two leave less than {VISIBLE_NOISE:.0f} dB.",
    fix="if calibration did not reach such values, calibrate on data like this; if it did, its observer cut them off, "
    'and one that keeps them costs finer steps: pt2qa.Edit("observer", (name,), observer="minmax")',
    needs=("pair", "layers"),
    find=find,
)
