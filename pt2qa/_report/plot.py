"""Charts as matplotlib axes, and a report in a notebook, which has no scripts; matplotlib is an extra."""

from __future__ import annotations

import io
import warnings
from base64 import b64decode, b64encode
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, Final

from pt2qa._printable import clean, clean_lines, question
from pt2qa._report.charts import Drawing, drawings, of_rows
from pt2qa._report.prose import few, shorten, shorten_names
from pt2qa._report.rows import cell
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 100
LONGEST = 44
"""Characters of a name beside a chart."""
NAMES_SHOWN = 40
"""Points that are named on an axis; of more, every so many."""
ROOM = 1.15
"""Length of an axis, in longest bars: the number of a bar is written behind it."""


ROWS: Final = 20
"""Rows of a table that are shown, the worst first."""
CHARTS: Final = 4


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


def draw(drawing: Drawing, ax: Axes) -> Axes:
    """Draw a chart on axes, and return them."""
    ax.set_title(_text(drawing.title))
    kinds = {
        "along": _along,
        "curve": _curve,
        "bars": _bars,
        "histogram": _histogram,
        "heat": _heat,
        "samples": _samples,
    }
    kinds[drawing.chart["kind"]](drawing.chart, drawing.rows, ax)
    if ax.get_legend_handles_labels()[1]:
        ax.legend()
    return ax


def _size(drawing: Drawing) -> tuple[float, float]:
    lines = drawing.chart.get("bars") or drawing.chart.get("ops")
    return 9.0, 1.2 + 0.25 * len(lines) if lines else 4.0


def _text(text: str) -> str:
    """What matplotlib shows as it is: a pair of dollars would be a formula."""
    return clean(text).replace("$", r"\$")


def _name(name: str) -> str:
    return _text(shorten_names([name], LONGEST)[0])


def _some(count: int) -> range:
    """The places that are named on an axis."""
    return range(0, count, -(-count // NAMES_SHOWN) or 1)


def _lines(chart: dict[str, Any], rows: Sequence[Any], xs: Sequence[float], ax: Axes) -> None:
    for key, label in chart["series"]:
        ys = [float(cell(row, key)) for row in rows]
        ax.plot(xs, ys, ".-", linewidth=0.8, label=_text(label) if len(chart["series"]) > 1 else "")


def _along(chart: dict[str, Any], rows: Sequence[Any], ax: Axes) -> None:
    _lines(chart, rows, range(len(rows)), ax)
    ax.axhline(chart["line"], linestyle="--", linewidth=0.8, color="gray")
    shown = _some(len(rows))
    ax.set_xticks(list(shown), [_name(rows[i].name) for i in shown], rotation=90, fontsize="x-small")
    ax.set_ylabel(_text(chart["unit"]))


def _curve(chart: dict[str, Any], rows: Sequence[Any], ax: Axes) -> None:
    _lines(chart, rows, [100 * float(cell(row, chart["x"])) for row in rows], ax)
    ax.set_xlabel(_text(chart["x_title"]))


def _bars(chart: dict[str, Any], rows: Sequence[Any], ax: Axes) -> None:
    bars = chart["bars"]
    places, ends = range(len(bars)), [0.0] * len(bars)
    for number, label in enumerate(chart.get("series", [""])):
        lengths = [bar.get("parts", [bar["value"]])[number] for bar in bars]
        ax.barh(places, lengths, left=ends, label=_text(label))
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for place, (end, bar) in enumerate(zip(ends, bars, strict=True)):
        ax.annotate(_text(bar["text"]), (max(end, 0.0), place), xytext=(3, 0), textcoords="offset points", va="center")
    ax.set_yticks(list(places), [_name(bar["label"]) for bar in bars])
    ax.invert_yaxis()
    ax.set_xlabel(_text(chart["about"]), fontsize="x-small", wrap=True)
    # Margins would end at the bars: each part of a stacked bar is an edge that matplotlib's view sticks to.
    ax.set_xlim(ROOM * min(0.0, *ends), ROOM * max(0.0, *ends) or 1.0)


def _histogram(chart: dict[str, Any], rows: Sequence[Any], ax: Axes) -> None:
    for series in chart["series"]:
        ax.stairs(series["counts"], chart["edges"], label=_text(series["side"]))
    ax.set_yscale("symlog", linthresh=1.0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("value")
    ax.set_ylabel("values in a bin")


def _heat(chart: dict[str, Any], rows: Sequence[Any], ax: Axes) -> None:
    numbers = [[nan if at is None else float(cell(rows[at], chart["column"])) for at in ats] for ats in chart["places"]]
    values = [[value if isfinite(value) else nan for value in line] for line in numbers]
    low, high = chart["range"]
    picture = ax.imshow(values, vmin=low, vmax=high, aspect="auto", cmap="Reds_r", interpolation="nearest")
    figure = ax.get_figure()
    assert figure is not None, "axes are on a figure"
    figure.colorbar(picture, ax=ax, label="dB")
    shown = _some(len(chart["blocks"]))
    ax.set_xticks(list(shown), [_text(chart["blocks"][i]) for i in shown])
    ax.set_yticks(range(len(chart["ops"])), list(map(_name, chart["ops"])), fontsize="x-small")
    ax.set_xlabel("block")


def _samples(chart: dict[str, Any], rows: Sequence[Any], ax: Axes) -> None:
    samples = chart["samples"]
    for left, each in enumerate(samples):
        if "png" in each:
            from matplotlib.image import imread

            pixels = imread(io.BytesIO(b64decode(each["png"])))
            ax.imshow(pixels, cmap="gray", extent=(left + 0.05, left + 0.95, 0, 1), interpolation="nearest")
        elif "line" in each:
            ax.plot([left + 0.05 + 0.9 * at / (len(each["line"]) - 1) for at in range(len(each["line"]))], each["line"])
        else:
            ax.text(left + 0.05, 0.5, _text(each["text"]), fontsize="xx-small", wrap=True)
    ax.set(xlim=(0, len(samples)), ylim=(0, 1), aspect="equal", yticks=[])
    ax.set_xticks(
        [left + 0.5 for left in range(len(samples))],
        ["\n".join(_text(shorten(line, 24)) for line in (each["label"], *each["lines"])) for each in samples],
        fontsize="xx-small",
    )


def notebook_html(report: Any) -> str:
    """What Jupyter shows for a report: its sentences, charts and the worst rows."""
    # Imported here: reading and printing reports need no template engine.
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    drawn, able = drawings(report)[:CHARTS], find_spec("matplotlib") is not None
    # Embedded: GitHub and notebooks that are not trusted show such pictures, and no SVG.
    pictures = [
        (each.chart, width, b64encode(data).decode()) for each in drawn if able for data, width, _ in [png(each)]
    ]
    templates = Environment(
        loader=PackageLoader("pt2qa._report.html", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: escape(clean_lines(str(value))).replace("\n", Markup("<br>")),
    )
    return templates.get_template("notebook.html.jinja").render(
        report=report,
        rows=report.worst_first("rows")[0],
        most=ROWS,
        cell=cell,
        pictures=pictures,
        unable=bool(drawn) and not able,
    )
