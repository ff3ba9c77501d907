"""The report of a reconfiguration: the edits, what they cost and bring, and what was measured in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from pt2qa._report.base import Report
from pt2qa._report.export import csv_text, frame
from pt2qa._report.formats import number, share, whole
from pt2qa._report.prose import counted, listed, sections, wrap
from pt2qa._report.ranking import ranked
from pt2qa._report.rows import EXTENDED, Environment
from pt2qa._report.storage import register
from pt2qa._report.table import View, screen_width, table, with_column
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    import pandas

    from pt2qa.overrides.plan import OverridePlan

Part = Literal["rows", "curve", "stages"]


@dataclass(frozen=True, slots=True)
class EditRow:
    """One edit of the quantizer's configuration.

    Args:
        name: the op it is about, the first of its region.
        kind: ``fuse``, ``float``, ``int16``, ``dynamic`` or ``observer``.
        macs: share of the model's multiply-accumulates that it takes out of int8.
        gain: noise that goes with it from the output that was the worst by then, as a share of what that output had at
            the start, 0..1, as estimated; edits that were chosen together share it.  Of edits that cost nothing, what
            all of them were measured to take from the worst output.
        sites: how many quantized values and weights go with it.
        ops: all ops that it is about, with commas between them.
    """

    name: str
    kind: str
    macs: float
    gain: float
    sites: int
    ops: str = field(metadata=EXTENDED)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Quality against cost after so many edits, in the order of the search.

    Args:
        name: the edit that was added last.
        edits: how many there are.
        macs: share of the model's multiply-accumulates in float.
        bytes: share of the bytes of the weights in float.
        predicted: SQNR of the worst output from the sum of the sites' noise, in dB; nan for a metric of the user's.
        measured: the same, or the user's metric, on the simulator; nan where the search did not need it.
    """

    name: str
    edits: int
    macs: float
    bytes: float
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Stage:
    """What was measured at a stage.

    Args:
        name: ``before``, ``simulated`` (sites switched in the simulator) or ``converted`` (prepared, calibrated and
            converted again); of several outputs each has a row of its own, such as ``before: output.boxes``.
        quality: of the worst output, or of that output, in dB; else in the unit of the target.
        macs: share of the model's multiply-accumulates in float.
        sites: how many sites are quantized.
    """

    name: str
    quality: float
    macs: float
    sites: int


EDIT_VIEWS: Final = (
    View("name", "edit at", str, 0, shrinks_to=24),
    View("kind", "kind", str, 0),
    View("macs", "float MACs\n%", share, 0),
    View("gain", "noise gone\n%", share, 1),
    View("sites", "sites\noff", whole, 2),
)
CURVE_VIEWS: Final = (
    View("edits", "edits", whole, 0),
    View("name", "last edit", str, 1, shrinks_to=24),
    View("macs", "float MACs\n%", share, 0),
    View("bytes", "float bytes\n%", share, 2),
    View("predicted", "predicted", number, 3),
    View("measured", "measured", number, 0),
)
STAGE_VIEWS: Final = (
    View("name", "stage", str, 0),
    View("quality", "quality", number, 0),
    View("macs", "float MACs\n%", share, 0),
    View("sites", "sites\non", whole, 0),
)
_CURVE_POINTS: Final = 12
"""Points of the curve that a text shows."""


@register("reconfiguration", schema=1)
@dataclass(frozen=True, repr=False)
class Reconfiguration(Report):
    """A quantizer configuration that was searched, applied and measured.

    Args:
        rows: the edits of the plan, in the order of the search.
        curve: quality against cost along the search.
        stages: before, simulated, and converted.
        target: the target in words.
        met: 1 where the converted model reaches the target within the budget, else 0.
        verdict: one sentence.
        evaluations: configurations that were scored.
        plan_json: the override plan.
        code: the plan in the quantizer's own calls.
        notes: what else the reader must know.
        quantizer: the plug-in's name, or the class of a quantizer without one.
        model: the model's class name.
        environment: versions, and the model's fingerprint.
    """

    rows: tuple[EditRow, ...]
    curve: tuple[CurvePoint, ...]
    stages: tuple[Stage, ...]
    target: str
    met: int
    verdict: str
    evaluations: int
    plan_json: str
    code: str
    notes: tuple[str, ...]
    quantizer: str
    model: str
    environment: Environment

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
                "this reconfiguration holds no pair: it was loaded from a file, or was interrupted. Make it with "
                "pt2qa.quantize(capture, quantizer, calibration, overrides=report.plan)."
            )
        return pair

    def with_pair(self, pair: Any) -> Reconfiguration:
        """The same report, holding the pair that was made; files do not hold it."""
        object.__setattr__(self, "_pair", pair)
        return self

    def table(self, sort: str = "graph", limit: int | None = 20, width: int | None = None) -> str:
        """The edits as a table: in the order of the search (``graph``), or by a column.

        Raises:
            ReportError: there is no such column, or the limit is negative.
        """
        by = {"graph": None, "worst": "gain"}.get(sort, sort)
        rows = self.rows if by is None else ranked(EditRow, self.rows, by, ties="gain")
        views = EDIT_VIEWS if sort in {"worst", "graph", "name"} else with_column(EditRow, EDIT_VIEWS, sort)
        return table(views, rows, by, limit, screen_width(width))

    def text(self, *, sort: str = "graph", limit: int | None = 20, width: int | None = None) -> str:
        """The whole report as text; arguments and errors as in :meth:`table`."""
        columns = screen_width(width)
        title = f"{self.model}, quantized by {self.quantizer}: {counted(len(self.rows), 'edit')} for {self.target}"
        curve = _thinned(self.curve, len(self.rows))
        left = len(self.curve) - len(curve)
        return sections(
            [
                wrap(title, columns, indent="  "),
                self.table("graph" if sort == "worst" else sort, limit, columns) if self.rows else "No edit.",
                "Quality against cost:\n" + table(CURVE_VIEWS, curve, None, None, columns) if curve else "",
                f"{counted(left, 'more point')}: report.to_pandas(part='curve')" if left else "",
                table(STAGE_VIEWS, self.stages, None, None, columns),
                listed(f"Notes ({len(self.notes)})", self.notes, columns),
                wrap(f"{counted(self.evaluations, 'configuration')} scored.", columns),
                wrap(self.verdict, columns, indent="  "),
            ]
        )

    def to_pandas(self, *, extended: bool = False, part: Part = "rows") -> pandas.DataFrame:
        """The edits, or another part: ``curve`` or ``stages``; ``extended`` adds the ops of an edit."""
        types: dict[str, Any] = {"rows": EditRow, "curve": CurvePoint, "stages": Stage}
        return frame(types[part], getattr(self, part), extended=extended)

    def csv(self, *, extended: bool = False) -> str:
        """The edits as CSV text, numbers in full precision."""
        return csv_text(EditRow, self.rows, extended=extended)

    def _headline(self) -> str:
        return f"<Reconfiguration of {self.model}, {self.quantizer}: {len(self.rows)} edits, {self.verdict}>"


def _thinned(curve: tuple[CurvePoint, ...], edits: int) -> tuple[CurvePoint, ...]:
    """The points that were measured, and some between them."""
    if len(curve) <= _CURVE_POINTS:
        return curve
    step = -(-len(curve) // _CURVE_POINTS)
    return tuple(
        point
        for number, point in enumerate(curve)
        if point.measured == point.measured or number % step == 0 or point.edits == edits
    )
