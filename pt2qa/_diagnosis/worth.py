"""What a remedy must do to be worth a row, in one currency.

The currency is the error of an output: its root mean square as a share of that of the float model's output, which is
``10**(-SQNR / 20)``: 0.1 at 20 dB, 0.01 at 40 dB.  A gain of 3 dB is much at 20 dB and nothing at 50 dB, and so it is
in this unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

LEAST: Final = 0.01
"""The error that a row must remove: 1 % of the output, as MLPerf lets 8 bits cost 1 % of a metric."""

MACS: Final = 0.1
"""The error that all multiply-accumulates in float must remove; in proportion for fewer."""

FAULT: Final = 0.5
"""The share of :data:`LEAST` that the remedy of a fault must remove: of what no sound model has, whatever its size."""


HALF: Final = 10 * math.log10(2)
"""dB that are gained where half of all noise goes: worth a row, a fault's however small the error is."""


@dataclass(frozen=True, slots=True)
class Worth:
    """The two quantities, as the user sets them; both are shares of an output's root mean square, or of a metric."""

    least: float = LEAST
    macs: float = MACS

    def pays(self, before: float, gain: float, cost: float, *, is_fault: bool) -> bool:
        """Whether a gain is worth a row.

        Args:
            before: dB without the remedy.
            gain: of the remedy, in dB.
            cost: share of the multiply-accumulates that it takes out of int8.
            is_fault: whether a sound model has nothing of the kind.
        """
        if math.isnan(before) or gain == math.inf:
            return gain > 0
        if is_fault and gain >= HALF:
            return True
        removed = error(before) - error(before + gain)
        return removed >= self.least * (FAULT if is_fault else 1.0) + self.macs * cost

    def after(self, sqnr: float, cost: float) -> float:
        """The error that is left, and what the remedy costs; remedies are ranked by it."""
        return error(sqnr) + self.macs * cost


def error(sqnr: float) -> float:
    """The root mean square of an output's error, as a share of that of the output; inf if it has no number.

    >>> error(20.0), error(float("nan"))
    (0.1, inf)
    """
    return math.inf if math.isnan(sqnr) or sqnr < -6000 else 10.0 ** (-sqnr / 20)
