"""What the user's data does at each site: the rows of a layer report, one for each value."""

from __future__ import annotations

import math

from pt2qa._check.context import CheckContext, UnavailableError
from pt2qa._layers.rows import LayerRow

VISIBLE_NOISE = 30.0
"""dB of rounding alone below which a site is worth a look: the noise has more than 0.1 % of the signal's power.

8 bits give a value that is spread evenly over the range 50 dB, and what convolutions and activations make of pictures
about 40; each site of a healthy MNIST CNN, ResNet-18, speech encoder and x86 EfficientNet-Lite0 stays above 34.
"""

DB_PER_BIT = 20 * math.log10(2)
"""6.02 dB: what one bit more or less does to rounding noise."""


def site_rows(context: CheckContext) -> tuple[LayerRow, ...]:
    """The rows of static sites with one scale, except for ops that pass on another row's values."""
    found: dict[tuple[float, ...], LayerRow] = {}
    for row in context.layers.rows:
        if row.observed_at == "dq" and row.scale > 0 and not math.isnan(row.zero_point):
            key = (row.scale, row.zero_point, row.ref_min, row.ref_max, row.rounding_sqnr)
            found.setdefault(key if not any(map(math.isnan, key)) else (*key, row.handle), row)
    return tuple(found.values())


def given_rows(context: CheckContext) -> tuple[LayerRow, ...]:
    """The rows of :func:`site_rows`; none if no data was given, or it could not be run."""
    try:
        return site_rows(context)
    except UnavailableError:
        return ()


def clamp_cost(row: LayerRow) -> float:
    """How far the noise of rounding and clamping exceeds that of rounding alone, ``scale**2 / 12``, in dB.

    A row holds ratios: the signal's mean square is ``mse * 10**(sqnr / 10)``, from the cumulative error.
    """
    signal = row.mse * 10 ** (row.sqnr / 10)
    noise = signal / 10 ** (row.rounding_sqnr / 10)
    return 10 * math.log10(12 * noise / row.scale**2) if 0 < noise < math.inf else math.nan
