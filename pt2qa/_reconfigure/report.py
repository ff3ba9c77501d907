"""The report of a reconfiguration: the edits, their cost and gain, and the final measurements."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pt2qa._report.atomic import write_atomic
from pt2qa._report.base import Block, DataReport, Grade, Report, Table
from pt2qa._report.prose import counted, share
from pt2qa._report.rows import Count, Row, column
from pt2qa._report.set_apart import DataHealth
from pt2qa._report.storage import register
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    from pt2qa.overrides.plan import OverridePlan


@dataclass(frozen=True, slots=True, eq=False)
class EditRow(Row):
    """One edit of the quantizer's configuration.

    Args:
        name: the op it applies to, the first of its region.
        kind: ``fuse``, ``shift``, ``scale``, ``range``, ``round``, ``bias``, ``float``, ``int16``, ``dynamic`` or
            ``observer``.
        macs: share of the model's multiply-accumulates that it takes out of int8.
        gain: estimated noise that it removes from the worst output at that point, as a share of that output's initial
            noise, 0..1; edits that were chosen together share it.  For free edits, what all of them together were
            measured to remove from the worst output.
        sites: how many quantized values and weights it removes.
        ops: all ops it applies to, separated by commas.
    """

    name: Annotated[str, column("edit at", key=True, importance=0, shrinks_to=24)]
    kind: Annotated[str, column(key=True, importance=0)]
    macs: Annotated[float, column("float MACs\n%", show=share, importance=0)]
    gain: Annotated[float, column("noise gone\n%", show=share, importance=1)]
    sites: Annotated[int, column("sites\noff", importance=2)]
    ops: Annotated[str, column(extended=True)]


@dataclass(frozen=True, slots=True, eq=False)
class CurvePoint(Row):
    """Quality against cost after a number of edits, in search order.

    Args:
        name: the last edit added.
        edits: number of edits.
        macs: share of the model's multiply-accumulates in float.
        bytes: share of the bytes of the weights in float.
        predicted: SQNR of the worst output from the sum of the sites' noise, in dB; nan for a user's metric.
        measured: the same, or the user's metric, on the simulator; nan if the search did not need it.
    """

    shown: ClassVar[tuple[str, ...]] = ("edits", "name", "macs", "bytes", "predicted", "measured")

    name: Annotated[str, column("last edit", key=True, importance=1, shrinks_to=24)]
    edits: Annotated[int, column(importance=0)]
    macs: Annotated[float, column("float MACs\n%", show=share, importance=0)]
    bytes: Annotated[float, column("float bytes\n%", show=share, importance=2)]
    predicted: Annotated[float, column(worse="smaller", importance=3)]
    measured: Annotated[float, column(worse="smaller", importance=0)]


@dataclass(frozen=True, slots=True, eq=False)
class Stage(Row):
    """Measurements of one stage.

    Args:
        name: ``before``, ``simulated`` (sites switched in the simulator) or ``converted`` (prepared, calibrated and
            converted again); with several outputs each has its own row, such as ``before: output.boxes``.
        quality: of the worst output, or of that output, in dB; else in the unit of the target.
        macs: share of the model's multiply-accumulates in float.
        sites: number of quantized sites.
    """

    name: Annotated[str, column("stage", key=True, importance=0)]
    quality: Annotated[float, column(worse="smaller", importance=0)]
    macs: Annotated[float, column("float MACs\n%", show=share, importance=0)]
    sites: Annotated[int, column("sites\non", importance=0)]


_CURVE_POINTS: Final = 12
"""Number of curve points that a text shows."""


@register("reconfiguration", schema=3, oldest=2, since={"batches": 3, "samples": 3, "set_apart": 3, "input_ranges": 3})
@dataclass(frozen=True, repr=False)
class Reconfiguration(DataReport):
    """A quantizer configuration that was searched, applied and measured.

    What :func:`pt2qa.reconfigure` and :func:`pt2qa.repair` return.
    Its other fields are those of :class:`pt2qa.report.DataReport`.

    Args:
        rows: the edits of the plan, in search order.
        curve: quality against cost along the search.
        stages: before, simulated, and converted.
        target: the target in words.
        met: 1 where the converted model reaches the target within the budget, else 0.
        verdict: one sentence, after what is wrong with the data.
        evaluations: configurations that were scored.
        plan_json: the override plan.
        code: a Python module that quantizes the model so, ``quantizer.py``.
        code_verified: what came of executing ``code`` and comparing its outputs with the new pair's: ``equal``;
            ``equal, with ...`` and why that is needed; ``differs: ...``; ``not run: ...``.  Empty in files of schema 1.
    """

    usual_measures: ClassVar[tuple[str, ...]] = ("stages.quality",)
    ties: ClassVar[str] = "gain"
    instead_of_merging: ClassVar[str] = (
        "Call it within pt2qa.distributed(), where every decision is taken on the numbers of all data."
    )

    rows: tuple[EditRow, ...]
    curve: tuple[CurvePoint, ...]
    stages: tuple[Stage, ...]
    target: str
    met: Annotated[int, column(worse="smaller", judged=True)]
    verdict: str
    evaluations: Count
    plan_json: str
    code: str
    code_verified: Annotated[str, column(since=2)] = ""

    @property
    def health(self) -> DataHealth:
        return DataHealth(self.batches, self.samples, self.set_apart, self.input_ranges)

    @property
    def plan(self) -> OverridePlan:
        """The edits for :func:`pt2qa.quantize`'s ``overrides``."""
        from pt2qa.overrides.plan import OverridePlan

        return OverridePlan.from_json(self.plan_json)

    @property
    def pair(self) -> Any:
        """The new :class:`pt2qa.QuantizedPair`; a report that was loaded has none.

        Raises:
            ReportError: the report was loaded from a file, or nothing was converted.
        """
        pair = getattr(self, "_pair", None)
        if pair is None:
            raise ReportError(
                "this reconfiguration has no pair: it was loaded from a file, or was interrupted. Make it with "
                "pt2qa.quantize(capture, quantizer, calibration, overrides=report.plan)."
            )
        return pair

    def save_code(self, path: str | os.PathLike[str]) -> None:
        """Write :attr:`code` to a UTF-8 file atomically.

        Raises:
            ReportError: the folder does not exist, or the disk refuses.
        """
        write_atomic(path, self.code)

    def with_pair(self, pair: Any) -> Reconfiguration:
        """The same report with the new pair attached; files do not store it."""
        object.__setattr__(self, "_pair", pair)
        return self

    def grade(self) -> Grade:
        """Whether the target is met."""
        return "good" if self.met else "bad"

    def charts(self, others: Sequence[Report]) -> list[dict[str, Any]]:
        """Quality against the share of arithmetic in float, predicted and measured."""
        if not any(isfinite(point.predicted) or isfinite(point.measured) for point in self.curve):
            return []
        return [
            {
                "kind": "curve",
                "title": "Quality against cost along the search",
                "about": f"Target: {self.target}. From left to right, one edit more at each point.",
                "table": "curve",
                "x": "macs",
                "x_title": "share of the multiply-accumulates in float, %",
                "series": [
                    [name, name]
                    for name in ("predicted", "measured")
                    if not all(isnan(getattr(point, name)) for point in self.curve)
                ],
            }
        ]

    def _headline(self) -> str:
        return f"<Reconfiguration of {self.model}, {self.quantizer}: {len(self.rows)} edits, {self.verdict}>"

    def _title(self, sort: str) -> str:
        return f"{self.model}, quantized by {self.quantizer}: {counted(len(self.rows), 'edit')} for {self.target}"

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        # Search order is the order of gain per cost.
        return self._table("graph" if sort == "worst" else sort, limit, width) if self.rows else "No edit."

    def _worst_by(self) -> str:
        return "gain"

    def _after(self, limit: int | None) -> Iterator[Block]:
        curve = _thinned(self.curve, len(self.rows))
        if curve:
            yield Table(self.shown("curve"), curve, "Quality against cost")
        if left := len(self.curve) - len(curve):
            yield f"{counted(left, 'more point')}: report.to_pandas(part='curve')"
        yield Table(self.shown("stages"), self.stages)
        yield from self._set_apart()
        yield from self._notes()
        yield f"{counted(self.evaluations, 'configuration')} scored."

    def _summary(self) -> Sequence[str]:
        code = f"report.code (quantizer.py) against the new pair, bit for bit: {self.code_verified}."
        return [self.verdict, code] if self.code_verified else [self.verdict]


def _thinned(curve: tuple[CurvePoint, ...], edits: int) -> tuple[CurvePoint, ...]:
    """The measured points, and some between them."""
    if len(curve) <= _CURVE_POINTS:
        return curve
    step = -(-len(curve) // _CURVE_POINTS)
    return tuple(
        point
        for number, point in enumerate(curve)
        if point.measured == point.measured or number % step == 0 or point.edits == edits
    )
