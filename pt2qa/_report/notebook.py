"""A report in a notebook: static HTML and SVG in the notebook's own colours, without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite, isnan, log10
from typing import Any, Final

from pt2qa._printable import clean, clean_lines
from pt2qa._report.columns import cell
from pt2qa._report.drawing import Drawing, drawings, short
from pt2qa._report.formats import number

ROWS: Final = 20
"""Rows of a table that are shown, the worst first."""
CHARTS: Final = 4

WIDTH, HEIGHT, LEFT, STEP = 640, 180, 44, 20
# Seen on white and on black.
COLOURS: Final = ("#3b82d6", "#e0702a", "#2a9d78", "#9468cc", "#b58a1a", "#808a96")
_GRAY: Final = "#888888"


def notebook_html(report: Any) -> str:
    """What Jupyter shows for a report: its sentences, charts and the worst rows."""
    said = [f"<p>{_text(line)}</p>" for line in report.lines()]
    steps = [
        f"<p><b>{_text(step.what)}</b> <code>{_text(step.name)}</code> {_text(step.gain)}<br>{_text(step.remedy)}</p>"
        for step in report.advice() or ()
    ]
    charts = [_figure(each) for each in drawings(report)[:CHARTS]]
    title = f"<p><b>{_text(report.heading)}</b> {_text(report.subject())}</p>"
    return "\n".join(["<div>", title, *said, *steps, *charts, _table(report), "</div>"])


def _text(text: str) -> str:
    return escape(clean_lines(text)).replace("\n", "<br>")


def _table(report: Any) -> str:
    ordered = report.worst_first("rows")[0]
    columns = report.shown()
    head = "".join(f"<th>{_text(each.title)}</th>" for each in columns)
    body = "".join(
        f"<tr>{''.join(_cell(each.show(cell(row, each.name)), cell(row, each.name)) for each in columns)}</tr>\n"
        for row in ordered[:ROWS]
    )
    more = f"<p>{ROWS} of {len(ordered)} rows</p>" if len(ordered) > ROWS else ""
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>{more}" if ordered else ""


def _cell(text: str, value: Any) -> str:
    shown = "–" if isinstance(value, float) and isnan(value) else _text(text)
    return f'<td align="right">{shown}</td>' if isinstance(value, (int, float)) else f"<td>{shown}</td>"


def _figure(drawing: Drawing) -> str:
    drawn, height = {"points": _points, "bars": _bars, "histogram": _histogram, "heat": _heat}[drawing.kind](drawing)
    labels = [series.label for series in drawing.series if drawing.kind != "heat"]
    legend = " ".join(
        f'<font color="{colour}">■</font> {_text(label)}'
        for label, colour in zip(labels, COLOURS, strict=False)
        if label
    )
    return (
        f"<p><b>{_text(drawing.title)}</b><br><small>{_text(drawing.about)}</small><br>{legend}</p>\n"
        f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" fill="currentColor" '
        f'font-size="11" font-family="sans-serif">{"".join(drawn)}</svg>'
    )


def _points(drawing: Drawing) -> tuple[list[str], int]:
    dashed = () if drawing.line is None else (0.0, drawing.line)
    values = [y for series in drawing.series for y in (*series.ys, *dashed) if isfinite(y)]
    places = [x for series in drawing.series for x in series.xs if isfinite(x)]
    x = _scale(places, LEFT, WIDTH - 8)
    y = _scale(values, HEIGHT - 16, 12)
    drawn = list(_axis(values, y))
    if drawing.line is not None:
        drawn.append(_line(y(drawing.line), "4 3"))
    for colour, series in zip(COLOURS, drawing.series, strict=False):
        for index, (at, value) in enumerate(zip(series.xs, series.ys, strict=True)):
            if isfinite(at) and isfinite(value):
                name = drawing.names[index] if drawing.names else f"{number(at)}"
                tip = _text(f"{name}: {number(value)} {drawing.y}".strip())
                circle = f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="2.5" fill="{colour}">'
                drawn.append(f"{circle}<title>{tip}</title></circle>")
    return [*drawn, _label(WIDTH / 2, HEIGHT - 2, drawing.x or "layers, in graph order", "middle")], HEIGHT


def _bars(drawing: Drawing) -> tuple[list[str], int]:
    ends = [sum(parts) for parts in zip(*(series.ys for series in drawing.series), strict=True)]
    x = _scale([0.0, *ends], WIDTH * 0.45, WIDTH - 64)
    drawn = []
    for row, name in enumerate(drawing.names):
        top, end = 2 + row * STEP, 0.0
        drawn.append(_label(WIDTH * 0.45 - 6, top + 13, short(name), "end"))
        for colour, series in zip(COLOURS, drawing.series, strict=False):
            left, right = sorted((x(end), x(end + series.ys[row])))
            drawn.append(_box(left, top + 2, right - left, STEP - 6, colour))
            end += series.ys[row]
        drawn.append(_label(x(max(end, 0.0)) + 5, top + 13, drawing.texts[row], "start"))
    return drawn, 4 + STEP * len(drawing.names)


def _histogram(drawing: Drawing) -> tuple[list[str], int]:
    edges = drawing.series[0].xs
    levels = [[log10(1 + count) for count in series.ys] for series in drawing.series]
    x = _scale([edges[0], edges[-1]], LEFT, WIDTH - 8)
    y = _scale([0.0, *(level for each in levels for level in each)], HEIGHT - 20, 12)
    drawn = [_label(x(edges[0]), HEIGHT - 4, number(edges[0]), "start")]
    drawn.append(_label(x(edges[-1]), HEIGHT - 4, number(edges[-1]), "end"))
    drawn.append(_label(WIDTH / 2, HEIGHT - 4, "values in a bin, log", "middle"))
    for colour, each in zip(COLOURS, levels, strict=False):
        steps = (f"L{x(edges[i]):.1f} {y(level):.1f}H{x(edges[i + 1]):.1f}" for i, level in enumerate(each))
        path = f"M{x(edges[0]):.1f} {y(0.0):.1f}{''.join(steps)}V{y(0.0):.1f}"
        drawn.append(f'<path d="{path}" fill="none" stroke="{colour}"/>')
    return drawn, HEIGHT


def _heat(drawing: Drawing) -> tuple[list[str], int]:
    shade = _scale(drawing.range or (), 1.0, 0.06)
    left, wide = WIDTH * 0.45, WIDTH * 0.55 / len(drawing.series)
    drawn = []
    for row, name in enumerate(drawing.names):
        top = 2 + row * STEP
        drawn.append(_label(left - 6, top + 13, short(name), "end"))
        for place, series in enumerate(drawing.series):
            if isfinite(series.ys[row]):
                tip = _text(f"{series.label} {name}: {number(series.ys[row])} {drawing.y}")
                box = _box(left + place * wide, top, wide - 0.5, STEP - 1, COLOURS[1], max(0.06, shade(series.ys[row])))
                drawn.append(f"{box[:-2]}><title>{tip}</title></rect>")
    bottom = 2 + STEP * len(drawing.names)
    for place in {0, len(drawing.series) - 1}:
        drawn.append(_label(left + (place + 0.5) * wide, bottom + 12, drawing.series[place].label, "middle"))
    return drawn, bottom + 16


def _scale(values: Sequence[float], start: float, end: float) -> Any:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return lambda value: start + (value - low) / ((high - low) or 1.0) * (end - start)


def _axis(values: Sequence[float], y: Any) -> Iterator[str]:
    for value in dict.fromkeys((min(values, default=0.0), max(values, default=1.0))):
        yield _line(y(value), "")
        yield _label(LEFT - 6, y(value) + 4, number(value), "end")


def _line(y: float, dash: str) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRAY}" stroke-dasharray="{dash}"/>'


def _box(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1.0) -> str:
    shade = "" if opacity == 1.0 else f' fill-opacity="{opacity:.2f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"{shade}/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(clean(text))}</text>'
