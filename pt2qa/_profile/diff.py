from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from operator import attrgetter
from typing import ClassVar, Final

from pt2qa._grouping import grouped
from pt2qa._profile.histogram import Histogram, transport
from pt2qa._profile.report import Profile, ProfileOnly, ProfileRow, ProfileShift, each_once, place_of
from pt2qa._report.base import Block, Listing, ModelReport, Report, data_read
from pt2qa._report.prose import counted, few, number, share
from pt2qa._report.rows import Count
from pt2qa._report.storage import register
from pt2qa._report.table import ranked
from pt2qa.errors import ReportError

MOVED: Final = 0.1
"""Standard deviations that values move on average, above which they are said to have moved."""

SHIFTED: Final = 0.1
"""Share of a range by which its ends, mean or standard deviation move, above which a tensor is said to have moved."""

WIDER: Final = 1.5
"""Ratio of ranges above which one is said to be wider."""


@register("profile-diff", schema=2)
@dataclass(frozen=True, slots=True, repr=False)
class ProfileDiff(ModelReport):
    """How the values of profile ``b`` differ from those of profile ``a``.

    Tables and texts show each pair of values once, the largest move first.

    What :func:`pt2qa.diff_profiles` returns.  Its other fields are those of :class:`pt2qa.report.ModelReport`.

    Args:
        rows: one for each row of b that is also in a, in graph order.
        only: rows in only one of the two.
        a, b: what was profiled.
        a_batches, a_samples, b_batches, b_samples: how much each profile covers.
    """

    heading: ClassVar[str] = "Two profiles"
    ties: ClassVar[str] = "largest_shift"
    quantizer: ClassVar[str] = ""  # type: ignore[misc]  # each side has its own

    rows: tuple[ProfileShift, ...]
    only: tuple[ProfileOnly, ...]
    a: str
    b: str
    a_batches: Count
    a_samples: Count
    b_batches: Count
    b_samples: Count

    @property
    def values(self) -> tuple[ProfileShift, ...]:
        """One row for each pair of values, in graph order: at the op that produces it, else at the first reader."""
        return each_once(self.rows, attrgetter("a_value", "b_value"))

    def _headline(self) -> str:
        return f"<ProfileDiff of {self.a} and {self.b}: {len(self.rows)} rows, {len(self.only)} in one only>"

    def _title(self, sort: str) -> str:
        worst = "moved most first" if self._worst_by() == "distance" else "largest shift first"
        pairs = f"{counted(len(self.values), 'tensor')}, each once, {self._how(sort, worst)}"
        a, b = data_read(self.a_batches, self.a_samples), data_read(self.b_batches, self.b_samples)
        return f"Difference of two profiles: {pairs}\na: {self.a}, {a}\nb: {self.b}, {b}"

    def _tabled(self) -> tuple[ProfileShift, ...]:
        return self.values

    def _worst_by(self) -> str:
        return "distance" if any(not isnan(row.distance) for row in self.rows) else "largest_shift"

    def _ordered(self, sort: str) -> tuple[Sequence[ProfileShift], str | None]:
        """A value that is not finite has no distance, and is worst."""
        rows, by = Report._ordered(self, sort)
        return (sorted(rows, key=lambda row: row.b_nonfinite <= row.a_nonfinite) if sort == "worst" else rows), by

    def _after(self, limit: int | None) -> Iterator[Block]:
        for side in "ab":
            found = [f"{row.name}, {place_of(row.role, row.argument)}" for row in self.only if row.side == side]
            yield Listing(f"Only in {side} ({len(found)})", found)
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        rows, by = self.values, self._worst_by()
        if not rows:
            return ["The two profiles have no rows in common."]
        limit, unit = (MOVED, "σ") if by == "distance" else (SHIFTED, "of its range")
        return list(_about_shifts(rows, by, limit, unit)) or [
            f"Nothing stands out: no tensor moved by more than {limit:g} {unit}, and no range is {WIDER:g} × as wide."
        ]


def diff_profiles(a: Profile, b: Profile) -> ProfileDiff:
    """What changed from one profile to another: reference to quantized, or calibration to validation data.

    Rows are matched by name, role and argument.  A value that one side quantizes in several ways and the other in one
    is compared with that one.

    Args:
        a: the profile to measure from; its ranges and standard deviations are the units.
        b: the profile to compare with it.

    Returns:
        One row for each value that both profiles have; what only one has is in ``only``.

    Raises:
        ReportError: one of the two is not a profile.

    >>> calibration, validation = (pt2qa.profile(capture, [data], progress=False) for data in (x, 3 * x))
    >>> moved = pt2qa.diff_profiles(calibration, validation).rows[0]
    >>> moved.name, round(moved.outside, 2)
    ('input', 0.69)
    """
    for side, profile in (("a", a), ("b", b)):
        if not isinstance(profile, Profile):
            raise ReportError(f"{side}: got {type(profile).__name__}, expected a Profile, as pt2qa.profile returns it")
    in_a, in_b = (grouped(((row.name, row.role, row.argument), row) for row in each.rows) for each in (a, b))
    rows = [
        _shift(a, in_a[key][min(number, len(in_a[key]) - 1)], b, row)
        for key, found in in_b.items()
        if key in in_a
        for number, row in enumerate(found)
    ]
    alone = [ProfileOnly("a", row.name, row.role, row.argument) for key in in_a if key not in in_b for row in in_a[key]]
    alone += [
        ProfileOnly("b", row.name, row.role, row.argument) for key in in_b if key not in in_a for row in in_b[key]
    ]
    notes = []
    if a.environment.fingerprint != b.environment.fingerprint:
        notes.append(f"two models: fingerprints {a.environment.fingerprint} and {b.environment.fingerprint}")
    if not (a.histograms and b.histograms):
        notes.append("no distances: profile both with histograms=True")
    return ProfileDiff(
        rows=tuple(rows),
        only=tuple(alone),
        a=a.title,
        b=b.title,
        a_batches=a.batches,
        a_samples=a.samples,
        b_batches=b.batches,
        b_samples=b.samples,
        notes=tuple(notes),
        model=b.model,
        environment=b.environment,
    )


def _shift(a: Profile, left: ProfileRow, b: Profile, right: ProfileRow) -> ProfileShift:
    # A value without a range has no unit of measure.
    span = left.max - left.min if left.max > left.min else nan
    shifts = {f"{of}_shift": (getattr(right, of) - getattr(left, of)) / span for of in ("min", "max", "mean", "std")}
    sides = {
        f"{side}_{of}": getattr(row, of)
        for side, row in (("a", left), ("b", right))
        for of in ("dtype", "min", "max", "mean", "std", "nonfinite", "value")
    }
    counted = (a.counted(left), b.counted(right)) if a.histograms and b.histograms else None
    return ProfileShift(
        **{of: getattr(right, of) for of in ("name", "module", "op", "role", "argument")},
        distance=nan if counted is None else _distance(*counted, left.std),
        outside=_outside(left, right, None if counted is None else counted[1]),
        largest_shift=max((abs(shift) for shift in shifts.values() if not isnan(shift)), default=nan),
        range_ratio=(right.max - right.min) / span,
        handle=left.handle,
        **shifts,
        **sides,
    )


def _distance(left: Histogram, right: Histogram, unit: float) -> float:
    """The Wasserstein-1 distance in this unit; a constant that moved is infinitely far."""
    moved = transport(left, right)
    if unit > 0 or isnan(moved):
        return moved / unit if unit > 0 else nan
    return inf if moved > 0 else 0.0


def _outside(left: ProfileRow, right: ProfileRow, counted: Histogram | None) -> float:
    """Share of the finite values on the right that lie outside the range on the left."""
    if right.min >= left.min and right.max <= left.max:
        return 0.0
    if right.min > left.max or right.max < left.min:
        return 1.0
    if counted is None or not counted.total:
        return nan
    inside = counted.spread([max(left.min, right.min), min(left.max, right.max)], right.min, right.max)
    return 1.0 - float(inside[0]) / counted.total


def _about_shifts(rows: Sequence[ProfileShift], by: str, limit: float, unit: str) -> Iterator[str]:
    """What to look at, given each pair of values once."""
    if more := [row for row in rows if row.b_nonfinite > row.a_nonfinite]:
        first = more[0]
        yield (
            f"More NaN or infinities in b: {counted(len(more), 'tensor')}; first in the graph: {first.title}, "
            f"{first.b_nonfinite} against {first.a_nonfinite}."
        )
    elif left_out := [row for row in rows if row.a_nonfinite or row.b_nonfinite]:
        first = left_out[0]
        yield (
            f"NaN or infinities, which are left out: {counted(len(left_out), 'tensor')}; first in the graph: "
            f"{first.title}, {first.b_nonfinite} in b against {first.a_nonfinite}."
        )
    if absent := [row for row in rows if isnan(row.a_mean) or isnan(row.b_mean)]:
        yield f"Not compared, no finite value in one of the two: {few([row.title for row in absent])}."
    if moved := [row for row in ranked(ProfileShift, rows, by, ties="largest_shift") if getattr(row, by) > limit]:
        most = moved[0]
        # Start with the first one in the graph: what follows is computed from it.
        first = next(row for row in rows if getattr(row, by) > limit)
        begins = "" if first is most else f"; first in the graph: {first.title}"
        yield (
            f"Moved by more than {limit:g} {unit}: {len(moved)} of {counted(len(rows), 'tensor')} (most: "
            f"{most.title}, {number(getattr(most, by))}{begins})."
        )
    if wider := [row for row in ranked(ProfileShift, rows, "range_ratio", ties="name") if row.range_ratio > WIDER]:
        most = wider[0]
        beyond = "" if isnan(most.outside) else f", {share(most.outside)} % of b outside"
        yield (
            f"Ranges more than {WIDER:g} × as wide in b: {counted(len(wider), 'tensor')} (most: {most.title}, "
            f"{number(most.range_ratio)} ×{beyond}): scales from a would clamp them."
        )
    if narrower := [row for row in rows if 0 < row.range_ratio < 1 / WIDER]:
        most = min(narrower, key=lambda row: row.range_ratio)
        yield (
            f"Ranges more than {WIDER:g} × as wide in a: {counted(len(narrower), 'tensor')} (most: {most.title}, "
            f"{number(1 / most.range_ratio)} ×): clamped in b, or not reached by its data."
        )
    if dead := [row for row in rows if row.a_std > 0 and row.b_std == 0]:
        yield f"Constant in b and not in a: {', '.join(row.title for row in dead[:3])}{' …' if len(dead) > 3 else ''}."
