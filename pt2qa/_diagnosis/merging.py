"""From the noise of sites to an error budget: of one run, and of several merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import nan, sqrt
from typing import Any, NamedTuple

from pt2qa._diagnosis.projected import SiteNoises, together
from pt2qa._report.notes import joined_notes
from pt2qa._report.sums import pack, settings_of, unpack
from pt2qa.errors import ReportError

_ALIKE = (
    *("outputs", "method", "projections", "signal", "batches", "samples"),
    *("notes", "set_apart", "input_ranges"),
)
"""The fields of :class:`SiteNoises` that a budget has, too."""


class RowSums(NamedTuple):
    """What a row adds up over batches: its noise, and the variance of that, due to the random projections."""

    site: int = 0
    mechanism: str = ""
    noise: float = 0.0
    variance: float = 0.0


def split(rows: Iterable[Any], noises: SiteNoises) -> dict[str, Any]:
    """The fields of a budget that follow from the noise of its sites; ``rows`` say which those are."""
    places = list(rows)
    sums = [
        RowSums(row.site, row.mechanism, noises.noise[key], noises.variance[key])
        for row in places
        for key in [(row.site, row.mechanism)]
    ]

    def share(noise: float) -> float:
        return noise / noises.measured if noises.measured else nan if noise else 0.0

    return {
        "rows": tuple(
            replace(row, noise=own.noise, noise_share=share(own.noise), error=share(sqrt(own.variance)))
            for row, own in zip(places, sums, strict=True)
        ),
        "noise": noises.measured,
        "sums": pack(noises.settings, rows=sums),
        **{name: getattr(noises, name) for name in _ALIKE},
    }


def merged(reports: Sequence[Any], metrics: Mapping[str, Any]) -> Any:
    first = reports[0]
    found = together([_noises_of(report, first.rows) for report in reports])
    notes = joined_notes([report.notes for report in reports])
    return replace(first, **split(first.rows, replace(found, notes=notes)))


def _noises_of(report: Any, rows: Sequence[Any]) -> SiteNoises:
    """The noises that a budget was made of; its sums must have these rows."""
    sums = unpack(report.sums, "rows", RowSums())
    if [(each.site, each.mechanism) for each in sums] != [(row.site, row.mechanism) for row in rows]:
        raise ReportError("cannot merge: a report's sums do not match its rows. Run pt2qa.error_budget again.")
    return SiteNoises(
        noise={(each.site, each.mechanism): each.noise for each in sums},
        variance={(each.site, each.mechanism): each.variance for each in sums},
        measured=report.noise,
        settings=settings_of(report.sums),
        flops={},
        **{name: getattr(report, name) for name in _ALIKE},
    )
