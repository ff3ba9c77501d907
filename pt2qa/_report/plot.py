"""Charts as matplotlib axes; matplotlib is an extra."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from importlib import import_module
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from pt2qa._near_names import question
from pt2qa._printable import clean
from pt2qa._report.drawing import Drawing, drawings, of_rows, short
from pt2qa._report.prose import few
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 100
NAMES_SHOWN = 40
"""Points that are named on an axis; of more, every so many."""
ROOM = 1.15
"""Length of an axis, in longest bars: the number of a bar is written behind it."""


def imported_extra(module: str, extra: str) -> Any:
    """A module of a package that an extra of pt2qa installs."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ReportError(f"{package} is not installed: pip install 'pt2qa[{extra}]'") from error


def plot(report: Any, chart: str | None, ax: Axes | None, others: Sequence[Any]) -> Axes:
    """What ``report.plot`` does; charts of single rows, such as a weight's histogram, come last."""
    known = {each.title: each for each in (*drawings(report, others), *(drawn for _, drawn in of_rows(report)))}
    if not known:
        raise ReportError(f"this {type(report).__name__} has no chart to plot; to_pandas() gives its numbers")
    title = next(iter(known)) if chart is None else chart
    if title not in known:
        name = type(report).__name__
        raise ReportError(f"{name} has no chart {title!r}: {question(title, known)} It has {few(list(known))}")
    drawing = known[title]
    if ax is None:
        ax = imported_extra("matplotlib.pyplot", "plot").subplots(figsize=_size(drawing), layout="constrained")[1]
    return draw(drawing, ax)


def png(drawing: Drawing) -> tuple[bytes, int, int]:
    """A chart as a picture: its bytes, and its width and height in pixels."""
    # Not of pyplot, which keeps its figures and may open windows.
    figure = imported_extra("matplotlib.figure", "plot").Figure(figsize=_size(drawing), layout="constrained", dpi=DPI)
    draw(drawing, figure.add_subplot())
    held = io.BytesIO()
    with warnings.catch_warnings():
        # Names may be in any script; what the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        # The places of ticks, where an axis ends near the largest float.
        warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)
        figure.savefig(held, format="png")
    width, height = (int(DPI * inches) for inches in figure.get_size_inches())
    return held.getvalue(), width, height


def _size(drawing: Drawing) -> tuple[float, float]:
    return 9.0, 1.2 + 0.25 * len(drawing.names) if drawing.kind in ("bars", "heat") else 4.0


def draw(drawing: Drawing, ax: Axes) -> Axes:
    {"points": _points, "bars": _bars, "histogram": _histogram, "heat": _heat}[drawing.kind](drawing, ax)
    ax.set_title(_text(drawing.title))
    ax.set_xlabel(_text(drawing.x))
    ax.set_ylabel("" if drawing.kind == "heat" else _text(drawing.y))
    if drawing.kind != "heat" and any(series.label for series in drawing.series):
        ax.legend()
    return ax


def _text(text: str) -> str:
    """What matplotlib shows as it is: a pair of dollars would be a formula."""
    return clean(text).replace("$", r"\$")


def _name(name: str) -> str:
    return _text(short(name))


def _points(drawing: Drawing, ax: Axes) -> None:
    for series in drawing.series:
        ax.plot(series.xs, series.ys, ".-", linewidth=0.8, label=_text(series.label))
    if drawing.line is not None:
        ax.axhline(drawing.line, linestyle="--", linewidth=0.8, color="gray")
    if drawing.names:
        every = -(-len(drawing.names) // NAMES_SHOWN)
        shown = range(0, len(drawing.names), every)
        ax.set_xticks(list(shown), [_name(drawing.names[i]) for i in shown], rotation=90, fontsize="x-small")


def _bars(drawing: Drawing, ax: Axes) -> None:
    places = range(len(drawing.names))
    ends = [0.0] * len(drawing.names)
    for series in drawing.series:
        ax.barh(places, series.ys, left=ends, label=_text(series.label))
        ends = [end + length for end, length in zip(ends, series.ys, strict=True)]
    for place, (end, text) in enumerate(zip(ends, drawing.texts, strict=True)):
        ax.annotate(_text(text), (max(end, 0.0), place), xytext=(3, 0), textcoords="offset points", va="center")
    ax.set_yticks(list(places), list(map(_name, drawing.names)))
    ax.invert_yaxis()
    # Margins would end at the bars: each part of a stacked bar is an edge that matplotlib's view sticks to.
    ax.set_xlim(ROOM * min(0.0, *ends), ROOM * max(0.0, *ends) or 1.0)


def _histogram(drawing: Drawing, ax: Axes) -> None:
    for series in drawing.series:
        ax.stairs(series.ys, series.xs, label=_text(series.label))
    ax.set_yscale("symlog", linthresh=1.0)
    ax.set_ylim(bottom=0)


def _heat(drawing: Drawing, ax: Axes) -> None:
    columns = zip(*(series.ys for series in drawing.series), strict=True)
    values = [[value if isfinite(value) else nan for value in row] for row in columns]
    assert drawing.range is not None, "a heat map has a range"
    low, high = drawing.range
    picture = ax.imshow(values, vmin=low, vmax=high, aspect="auto", cmap="Reds_r", interpolation="nearest")
    figure = ax.get_figure()
    assert figure is not None, "axes are on a figure"
    figure.colorbar(picture, ax=ax, label=drawing.y)
    every = -(-len(drawing.series) // NAMES_SHOWN)
    shown = range(0, len(drawing.series), every)
    ax.set_xticks(list(shown), [_text(drawing.series[i].label) for i in shown])
    ax.set_yticks(range(len(drawing.names)), list(map(_name, drawing.names)), fontsize="x-small")
