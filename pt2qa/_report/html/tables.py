"""A report's tables as the page holds them: every column with its values in full precision, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, Final

from pt2qa._bad_cases import text as bad_cases_text
from pt2qa._bad_cases.report import CaseRow
from pt2qa._candidates.report import CandidateRow
from pt2qa._layers import text as layer_text
from pt2qa._profile import diff_text as profile_diff_text
from pt2qa._profile import text as profile_text
from pt2qa._profile.report import Profile
from pt2qa._profile.rows import ProfileRow, ProfileShift
from pt2qa._reconfigure.report import CURVE_VIEWS, EDIT_VIEWS, STAGE_VIEWS, CurvePoint, EditRow, Stage
from pt2qa._report.base import Report
from pt2qa._report.columns import Column, cell, columns_of, custom_names, row_type_of
from pt2qa._report.diffs.measures import unit_of
from pt2qa._report.formats import decibel, number, shape, share, whole
from pt2qa._report.rows import LayerRow, WeightRow
from pt2qa._report.table import View, with_column
from pt2qa._sensitivity.rows import SensitivityRow
from pt2qa._weights import text as weight_text

SENSITIVITY_VIEWS: Final = (
    View("rank", "rank", whole, 0),
    View("name", "name", str, 0),
    View("kind", "kind", str, 0),
    View("op", "op", str, 0),
    View("dtype", "dtype", str, 0),
    View("value", "value", number, 0),
    View("error", "±", number, 0),
    View("noise_share", "noise\n%", share, 0),
    View("flops_share", "flops\n%", share, 0),
)

_NAME: Final = View("name", "name", str, 0)

_FIRST: Final[dict[type[Any], tuple[View, ...]]] = {
    LayerRow: layer_text.VIEWS,
    WeightRow: weight_text.VIEWS,
    CaseRow: bad_cases_text.VIEWS,
    ProfileRow: profile_text.VIEWS,
    ProfileShift: profile_diff_text.VIEWS,
    SensitivityRow: SENSITIVITY_VIEWS,
    CandidateRow: (_NAME, View("op", "op", str, 0)),
    EditRow: EDIT_VIEWS,
    CurvePoint: CURVE_VIEWS,
    Stage: STAGE_VIEWS,
}
"""By class of rows the columns that a table shows at once, in this order; all others are there on request."""


def table_data(report: Report, field: str, title: str) -> dict[str, Any]:
    """One table of a report, column by column.

    Args:
        report: it.
        field: the report's field that holds the rows.
        title: what stands above the table.

    Returns:
        ``name`` (the field), ``title``, ``size`` (number of rows) and ``columns``: ``key`` as in pandas and CSV,
        ``title``, ``number`` (whether it sorts by value), ``shown`` (at once, or on request), ``low`` (below it a value
        is marked, or null), ``values``, and ``texts``, null where they are the values.
    """
    # As in printed tables, a profile shows each value once, at the op that makes it.
    rows = report.values if isinstance(report, Profile) else getattr(report, field)
    row_type = row_type_of(type(report), field)
    return {"name": field, "title": title, "size": len(rows), "columns": _columns(report, row_type, rows)}


def plain(value: Any) -> Any:
    """A cell as JSON holds it: what is not finite becomes the text ``nan``, ``inf`` or ``-inf``, a shape its text."""
    if isinstance(value, tuple):
        return shape(value)
    return value if not isinstance(value, float) or isfinite(value) else str(value)


def _columns(report: Report, row_type: type[Any], rows: Sequence[Any]) -> list[dict[str, Any]]:
    first = _FIRST.get(row_type, ())
    known = {view.column for view in first}
    others = [column for column in columns_of(row_type) if column.name not in known]
    show = decibel if row_type is CandidateRow else number
    custom = [View(name, name, show, 0) for name in custom_names(rows)]
    views = [*first, *custom, *(_view(row_type, column) for column in others)]
    shown = known | {view.column for view in custom}
    if not first:
        shown |= {column.name for column in others if not column.extended}
    return [_column(report, view, rows, view.column in shown) for view in views]


def _view(row_type: type[Any], column: Column) -> View:
    """The column as printed tables show it where they are sorted by it."""
    if column.type == "shape":
        return View(column.name, column.name, shape, 0)
    return _NAME if column.name == "name" else with_column(row_type, (_NAME,), column.name)[1]


def _column(report: Report, view: View, rows: Sequence[Any], shown: bool) -> dict[str, Any]:
    show = decibel if view.show is number and unit_of(report, view.column) == "dB" else view.show
    cells = [cell(row, view.column) for row in rows]
    values = [plain(value) for value in cells]
    texts = [show(value) for value in cells]
    return {
        "key": view.column,
        "title": " ".join(view.header.split()),
        "number": bool(cells) and all(isinstance(value, (int, float)) for value in cells),
        "shown": shown and set(texts) != {"nan"},
        "low": layer_text.LOW_SQNR if show is decibel else None,
        "values": values,
        "texts": None if texts == values else texts,
    }
