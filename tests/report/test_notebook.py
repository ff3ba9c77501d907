"""Notebooks show a report's sentences, charts and worst rows without scripts; matplotlib draws the charts."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

import pt2qa
from pt2qa._report.charts import drawings, stacked
from pt2qa.errors import ReportError
from pt2qa.report import Report
from tests.flows import residual_pair
from tests.report.html import samples

EVERY = [*samples.every(), samples.diagnosis()]


class Elements(HTMLParser):
    """Each element must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))
        if tag not in {"br", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def pyplot() -> Any:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'pt2qa[plot]'")
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


@pytest.mark.parametrize("report", EVERY, ids=lambda report: type(report).__name__)
def test_it_is_static_and_escaped(report: Report) -> None:
    text = report._repr_html_()
    elements = Elements(text)
    assert elements.open == []
    assert not {"script", "style", "svg", "b onclick"} & {tag for tag, _ in elements.found}
    given = [each for _, attrs in elements.found for each in attrs]
    assert not any(key.startswith("on") or key == "href" for key, _ in given)
    assert all(str(value).startswith("data:image/png;base64,") for key, value in given if key == "src")
    assert 'alert("1")' not in text


def test_the_worst_rows_come_first_and_a_missing_number_is_a_dash() -> None:
    text = samples.layers()._repr_html_()
    names = re.findall(r"<tr><td>(.*?)</td>", text)
    assert names[0] == "blocks.3/conv2d"
    assert '<td align="right">–</td>' in text
    assert text.count("<img") == 3
    assert 'alt="Isolated SQNR along the graph"' in text


def test_without_matplotlib_it_says_what_charts_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    text = samples.layers()._repr_html_()
    assert "<img" not in text
    assert "Charts need matplotlib: <code>pip install 'pt2qa[plot]'</code>" in text
    assert "matplotlib" not in samples.findings()._repr_html_()


def test_a_layer_report_draws_histograms_if_there_are_profiles() -> None:
    kinds = [each.chart["kind"] for each in drawings(samples.layers(), samples.profiles())]
    assert kinds == ["along"] * 3 + ["histogram"]


def test_charts_become_axes(pyplot: Any) -> None:
    report = samples.layers()
    axes = report.plot("Isolated SQNR along the graph")
    assert (axes.get_title(), axes.get_ylabel()) == ("Isolated SQNR along the graph", "dB")
    assert axes.get_lines()[0].get_ydata()[3] == 8.125
    assert axes.get_lines()[-1].get_ydata()[0] == 20.0
    assert axes.get_xticklabels()[3].get_text() == "blocks.3/conv2d"
    _, given = pyplot.subplots()
    assert samples.sensitivity().plot(ax=given) is given
    assert [patch.get_width() for patch in given.patches] == [0.7, 0.25, 0.05]
    histogram = report.plot("blocks.3/conv2d: isolated 8.1 dB", others=samples.profiles())
    assert [text.get_text() for text in histogram.get_legend().get_texts()] == ["reference", "quantized"]
    assert len(samples.reconfiguration().plot().get_lines()) == 2


def test_the_histogram_of_a_weight_is_a_chart_of_its_own(pyplot: Any) -> None:
    report = pt2qa.compare_weights(residual_pair())
    axes = report.plot("conv2/conv2d, weight")
    assert axes.get_title() == "conv2/conv2d, weight"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["float", "dequantized"]
    assert [patch.get_data().values.sum() for patch in axes.patches] == [64, 64]
    assert report.plot().get_title() == "conv1/conv2d, weight"


def test_stacked_bars_lie_end_to_end(pyplot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    charts = stacked("Noise", "", ["rounding", "clamping"], [("conv", [0.25, 0.5], "75 %")])
    monkeypatch.setattr(type(samples.sensitivity()), "charts", lambda self, others: charts)
    report = samples.sensitivity()
    assert [(patch.get_x(), patch.get_width()) for patch in report.plot().patches] == [(0.0, 0.25), (0.25, 0.5)]
    assert report._repr_html_().count("<img") == 1
    low, high = samples.budget().plot().get_xlim()
    assert (low, high) == pytest.approx((-0.875 * 1.15, 0.875 * 1.15))


def test_what_cannot_be_plotted_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReportError, match="this Findings has no chart to plot; to_pandas"):
        samples.findings().plot()
    with pytest.raises(ReportError, match="has no chart 'Isolated SQNR along graph': did you mean 'Isolated"):
        samples.layers().plot("Isolated SQNR along graph")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    with pytest.raises(ReportError, match=r"matplotlib is not installed: pip install 'pt2qa\[plot\]'"):
        samples.layers().plot()
