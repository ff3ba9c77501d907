"""A report in a notebook: static HTML without scripts, with charts that matplotlib draws."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from importlib.util import find_spec
from math import isnan
from typing import Any, Final

from pt2qa._printable import clean_lines
from pt2qa._report.charts import Drawing, drawings
from pt2qa._report.columns import cell
from pt2qa._report.plot import png

ROWS: Final = 20
"""Rows of a table that are shown, the worst first."""
CHARTS: Final = 4


def notebook_html(report: Any) -> str:
    """What Jupyter shows for a report: its sentences, charts and the worst rows."""
    said = [f"<p>{_text(line)}</p>" for line in report.lines()]
    steps = [
        f"<p><b>{_text(step.what)}</b> <code>{_text(step.name)}</code> {_text(step.gain)}<br>{_text(step.remedy)}</p>"
        for step in report.advice() or ()
    ]
    title = f"<p><b>{_text(report.heading)}</b> {_text(report.subject())}</p>"
    return "\n".join(["<div>", title, *said, *steps, *_charts(report), _table(report), "</div>"])


def _text(text: str) -> str:
    return escape(clean_lines(text)).replace("\n", "<br>")


def _charts(report: Any) -> list[str]:
    drawn = drawings(report)[:CHARTS]
    if drawn and find_spec("matplotlib") is None:
        return ["<p>Charts need matplotlib: <code>pip install 'pt2qa[plot]'</code></p>"]
    return [_picture(each) for each in drawn]


def _picture(drawing: Drawing) -> str:
    data, width, _ = png(drawing)
    # Embedded: GitHub and notebooks that are not trusted show such pictures, and no SVG.
    picture = (
        f'<img alt="{_text(drawing.title)}" width="{width}" src="data:image/png;base64,{b64encode(data).decode()}">'
    )
    return f"<p><small>{_text(drawing.chart['about'])}</small><br>{picture}</p>"


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
