"""The page holds every number of its reports, escapes every name, and asks no network for anything."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pt2qa._report.charts import drawings, stacked
from pt2qa._report.html import html_page, write_html
from pt2qa._report.prose import decibel, shape
from pt2qa._report.rows import cell
from pt2qa.errors import ReportError
from pt2qa.report import Environment, LayerReport, Profile, WeightReport
from tests.report.html import samples

LIMIT = 5_000_000
SPECIAL = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """What a browser makes of the text: elements with their attributes, and text by the element around it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def prose(self) -> str:
        return " ".join(text for tag, text in self.texts if tag not in {"script", "style"})

    @property
    def data(self) -> list[dict[str, Any]]:
        packed = next(text for tag, text in self.texts if tag == "script")
        found: dict[str, dict[str, Any]] = json.loads(gzip.decompress(base64.b64decode(packed)))
        return [found[f"report-{number}"] for number in range(1, len(found) + 1)]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(html_page(samples.every()))


def table_of(section: dict[str, Any], name: str) -> dict[str, Any]:
    return next(table for table in section["tables"] if table["name"] == name)


def same(held: Any, value: Any) -> bool:
    if isinstance(value, tuple):
        return held in (shape(value), ", ".join(map(str, value)))  # sizes, or names
    held = SPECIAL.get(held, held) if isinstance(value, float) else held
    return held == value or (isinstance(value, float) and isnan(value) and isnan(held))


def test_every_element_is_closed_and_every_link_leads_somewhere(page: Page) -> None:
    assert page.open == []
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert {str(link["href"])[1:] for link in page.of("a")} <= ids


def test_the_page_asks_the_network_for_nothing(page: Page) -> None:
    assert not any(key in {"src", "action", "srcset"} for _, attributes in page.elements for key in attributes)
    assert all(str(link["href"]).startswith("#") for link in page.of("a"))
    assert page.of("link") == []
    policy = next(str(each["content"]) for each in page.of("meta") if "http-equiv" in each)
    assert policy.startswith("default-src 'none';")
    styles = "".join(text for tag, text in page.texts if tag == "style")
    assert "url(" not in styles
    assert "@import" not in styles
    scripts = "".join(text for tag, text in page.texts if tag == "script")
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|importScripts|sendBeacon)\b", scripts)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", scripts)


def test_names_are_escaped_in_the_text_and_in_the_data(page: Page) -> None:
    assert [each.get("type") for each in page.of("script")] == ["text/plain", None, None, None, None, None]
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert samples.EVIL in page.prose
    names = next(column for column in table_of(page.data[0], "rows")["columns"] if column["key"] == "name")
    assert names["values"][7] == samples.EVIL
    assert "2 ops & 1 more <fell> back" in page.prose


@pytest.mark.parametrize("report", samples.every(), ids=lambda report: type(report).__name__)
def test_every_number_is_there_in_full_precision(report: Any) -> None:
    (section,) = Page(html_page(report)).data
    for table in section["tables"]:
        rows = report.values if isinstance(report, Profile) else getattr(report, table["name"])
        assert table["size"] == len(rows)
        for column in table["columns"]:
            assert all(same(held, cell(row, column["key"])) for held, row in zip(column["values"], rows, strict=True))


def test_a_table_has_every_column_that_pandas_has(page: Page) -> None:
    table = table_of(page.data[0], "rows")
    assert {column["key"] for column in table["columns"]} == set(samples.layers().to_pandas(extended=True).columns)
    shown = [column["key"] for column in table["columns"] if column["shown"]]
    assert shown[:2] == ["name", "op"]
    assert {"sqnr", "isolated_sqnr", "rounding_sqnr"} < set(shown)
    assert "ref_min" not in shown


def test_numbers_are_rounded_as_in_printed_tables(page: Page) -> None:
    columns = {column["key"]: column for column in table_of(page.data[0], "rows")["columns"]}
    assert columns["sqnr"]["texts"] == [decibel(row.sqnr) for row in samples.layers().rows]
    assert columns["name"]["texts"] is None
    assert (columns["sqnr"]["low"], columns["cosine"]["low"]) == (20.0, None)
    curve = {column["key"]: column for column in table_of(page.data[4], "curve")["columns"]}
    assert curve["macs"]["texts"] == ["0.00", "25.00", "50.00"]


def test_the_verdict_comes_first_and_says_whether_it_is_good() -> None:
    text = html_page([samples.profiles()[0], samples.layers(), samples.findings(), samples.reconfiguration()])
    summary = text[text.index('class="verdicts"') : text.index('class="report"')]
    assert re.findall(r'<li class="(\w+)">', summary) == ["bad", "bad", "good", "plain"]
    assert summary.index("The output has") < summary.index("The target is met") < summary.index("no NaN")
    assert re.findall(r'id="(report-\d)"', text) == ["report-2", "report-3", "report-4", "report-1"]
    assert "The output has an SQNR of 15.5 dB, below 20 dB" in summary
    assert "1 error, 2 warnings, 0 notes." in summary
    good = replace(samples.layers(), outputs=(replace(samples.layers().outputs[0], sqnr=20.0),))
    assert '<li class="good">' in html_page(good)
    assert '<li class="plain">' in html_page(replace(good, outputs=()))


def test_charts_show_what_was_measured(page: Page) -> None:
    measured = ["sqnr", "isolated_sqnr", "rounding_sqnr"]
    assert [chart["series"] for chart in page.data[0]["charts"] if chart["kind"] == "along"] == [
        [[key, key]] for key in measured
    ]
    plain = replace(samples.layers(), rows=tuple(replace(r, isolated_sqnr=float("nan")) for r in samples.layers().rows))
    (section,) = Page(html_page(plain)).data
    assert [chart["series"][0][0] for chart in section["charts"]] == ["sqnr", "rounding_sqnr"]
    assert [bar["value"] for bar in page.data[2]["charts"][0]["bars"]] == [0.7, 0.25, 0.05]
    assert [bar["label"] for bar in page.data[3]["charts"][0]["bars"]] == ["b", "a"]
    (curve,) = page.data[4]["charts"]
    assert [key for key, _ in curve["series"]] == ["predicted", "measured"]


def test_tables_are_worst_first_and_columns_are_described(page: Page) -> None:
    table = table_of(page.data[0], "rows")
    assert (table["by"], table["worst"][0], table["worst"][-1]) == ("isolated_sqnr", 3, 5)
    assert sorted(table["worst"]) == list(range(table["size"]))
    columns = {column["key"]: column for column in table["columns"]}
    assert columns["scale"]["about"] == "real value of one integer step; nan without one."
    assert (columns["sqnr"]["worse"], columns["max_lsb"]["worse"]) == ("smaller", "larger")
    assert table_of(page.data[4], "curve")["worst"] is None


def test_the_graph_has_modules_in_layers_and_edges_between_ops() -> None:
    report = samples.residual()
    graph = Page(html_page(report)).data[0]["graph"]
    assert labels(graph["modules"]) == [
        ["stem/conv2d"],
        [[["fc1/linear"], ["relu"], ["fc2/linear"], ["add"]]],
        ["head/linear"],
    ]
    assert graph["modules"]["layers"][1][0]["label"] == "block"
    assert graph["edges"] == [[0, 1], [1, 2], [2, 3], [0, 4], [3, 4], [4, 5]]


def test_parts_side_by_side_are_in_the_order_of_what_they_read() -> None:
    inputs = {"a.in": "", "a.q": "a.in", "a.k": "a.in", "a.of_k": "a.k", "a.of_q": "a.q", "a.out": "a.of_q, a.of_k"}
    graph = Page(html_page(chained(inputs))).data[0]["graph"]
    assert labels(graph["modules"]) == [[[["in/op"], ["q/op", "k/op"], ["of_q/op", "of_k/op"], ["out/op"]]]]


def test_a_module_that_is_called_twice_is_drawn_for_each_call() -> None:
    inputs = {"a.one": "", "b.one": "a.one", "a.two": "b.one", "c.one": "a.two"}
    graph = Page(html_page(chained(inputs))).data[0]["graph"]
    assert labels(graph["modules"]) == [["a.one/op"], ["b.one/op"], ["a (2).two/op"], ["c.one/op"]]
    assert graph["edges"] == [[0, 1], [1, 2], [2, 3]]


def test_a_report_of_some_ops_takes_the_edges_from_the_layers() -> None:
    layers = samples.residual()
    (site, *_) = samples.sensitivity().rows
    rows = tuple(replace(site, name=row.name, module=row.module, handle=-row.handle) for row in layers.rows[:4:3])
    some = replace(samples.sensitivity(), rows=rows)
    graph = Page(html_page([layers, some])).data[1]["graph"]
    assert (labels(graph["modules"]), graph["edges"]) == ([["stem/conv2d"], ["block.fc2/linear"]], [[0, 1]])


def test_edges_go_forward_whatever_a_file_says() -> None:
    graph = Page(html_page(chained({"a.one": "b.two", "b.two": "a.one", "a.three": "b.two, a.three"}))).data[0]["graph"]
    assert labels(graph["modules"]) == [["a.one/op"], ["b.two/op"], ["a (2).three/op"]]
    assert graph["edges"] == [[0, 1], [1, 2]]


def test_without_inputs_a_graph_is_in_graph_order() -> None:
    layers = samples.layers()
    graph = Page(html_page(replace(layers, rows=layers.rows[:3]))).data[0]["graph"]
    assert graph["edges"] == []
    assert labels(graph["modules"]) == [[[["0/conv2d"], ["1/linear"], ["2/linear"]]]]
    assert Page(html_page(samples.findings())).data[0]["graph"] is None


def chained(inputs: dict[str, str]) -> LayerReport:
    """A report of modules with one op each, that read those modules."""
    read = {name: ", ".join(f"{each}/op" for each in given.split(", ") if each) for name, given in inputs.items()}
    row = samples.residual().rows[0]
    rows = tuple(
        replace(row, handle=i, name=f"{module}/op", module=module, inputs=given)
        for i, (module, given) in enumerate(read.items())
    )
    return replace(samples.residual(), rows=rows)


def labels(module: dict[str, Any]) -> list[list[Any]]:
    """The layers of a module: ops by label, modules by their layers."""
    return [[part["label"] if "rows" in part else labels(part) for part in layer] for layer in module["layers"]]


def test_a_stacked_bar_has_parts() -> None:
    (chart,) = stacked("Noise", "", ["rounding", "clamping"], [("conv", [0.25, 0.5], "75 %")])
    assert chart["bars"] == [{"label": "conv", "value": 0.75, "parts": [0.25, 0.5], "text": "75 %"}]
    assert stacked("Noise", "", ["rounding"], []) == []


def test_an_error_budget_is_drawn_by_module_and_mechanism_and_adds_up_to_all_noise() -> None:
    for report in (samples.budget(), samples.budget(modules=40)):
        for chart in report.charts(()):
            assert chart["series"] == ["activation rounding", "activation clamping", "interactions"]
            assert sum(bar["value"] for bar in chart["bars"]) == pytest.approx(1.0)
            assert all(bar["value"] == pytest.approx(sum(bar["parts"])) for bar in chart["bars"])
    modules, mechanisms = samples.budget().charts(())
    assert [(bar["label"], bar["parts"]) for bar in modules["bars"]] == [
        ("blocks.2", [0.75, 0.125, 0.0]),
        ("blocks.1", [0.5, 0.125, 0.0]),
        ("blocks.0", [0.25, 0.125, 0.0]),
        ("interactions", [0.0, 0.0, -0.875]),
    ]
    assert [bar["text"] for bar in mechanisms["bars"]] == ["150.00 %", "37.50 %", "-87.50 %"]
    assert [bar["label"] for bar in samples.budget(modules=40).charts(())[0]["bars"]][-2:] == [
        "25 other modules",
        "interactions",
    ]
    assert replace(samples.budget(), noise=0.0).charts(()) == []
    assert Page(html_page(samples.budget())).data[0]["graph"]["modules"]["label"] == ""


def test_what_to_do_is_the_first_screen() -> None:
    found = samples.diagnosis()
    text = html_page([samples.layers(), found])
    prose = Page(text).prose
    assert text.index('class="first bad"') < text.index('id="summary"') < text.index('id="report-2"')
    assert 'href="#report-2"' not in text[text.index('id="summary"') : text.index('id="report-2"')]
    assert 'id="summary"' not in html_page(found)
    assert [table["title"] for table in Page(text).data[1]["tables"]] == ["Causes", "Measured"]
    assert text.index('id="report-2"') < text.index('id="report-1"')
    first = prose[: prose.index("Summary")]
    assert "The output has 6.8 dB" in first
    assert first.index("unfused-activation") < first.index("narrow-calibration")
    assert all(said in first for said in (samples.EVIL, "net.py:12", "+9 dB, for free", found.next_command))
    assert 'class="first good"' in html_page(replace(found, rows=(), met=1, next_command=""))


def test_what_to_run_is_left_out_where_it_was_run() -> None:
    said = "pt2qa.diagnose finds the causes"
    assert said in html_page(samples.layers())
    assert said not in html_page([samples.layers(), samples.diagnosis()])
    assert said in html_page([samples.layers(), replace(samples.diagnosis(), model="Other")])


def test_findings_are_grouped_by_rule(page: Page) -> None:
    assert "quantizer-fails (1): the quantizer fails" in page.prose
    assert "unfused-pair (2): pairs rounded in between" in page.prose
    assert page.prose.count("rounded before relu") == 2
    assert [each["class"] for each in page.of("div") if each.get("class") == "fix"] == ["fix", "fix"]


def test_histograms_lie_on_the_grid_and_lose_no_value() -> None:
    reference, quantized = samples.profiles()
    data = Page(html_page([samples.layers(), reference, quantized])).data
    (chart,) = [each for each in data[0]["charts"] if each["kind"] == "histogram"]
    assert chart["title"] == "blocks.3/conv2d: isolated 8.1 dB"
    assert chart["grid"] == {"dtype": "int8", "scale": 0.025, "low": -128, "high": 127, "zero_point": -20}
    edges = np.array(chart["edges"])
    integers = edges / samples.SCALE + samples.ZERO_POINT
    np.testing.assert_allclose(integers % 1, 0.5, atol=1e-9)
    assert len(edges) <= 170
    assert edges[0] <= reference.rows[0].min
    assert edges[-1] >= reference.rows[0].max
    by_side = {each["side"]: np.array(each["counts"]) for each in chart["series"]}
    assert {side: round(float(counts.sum())) for side, counts in by_side.items()} == {
        "reference": 20_000,
        "quantized": 20_000,
    }
    values = np.random.default_rng(0).normal(0.0, 1.2, 20_000)
    exact, _ = np.histogram(values, edges)
    assert np.abs(by_side["reference"] - exact).sum() < 0.02 * 20_000


def test_histograms_are_of_this_model_alone() -> None:
    reference, _ = samples.profiles()
    kinds = [chart["kind"] for chart in Page(html_page([samples.layers(), reference])).data[0]["charts"]]
    assert kinds == ["along"] * 3 + ["histogram"]
    for other in (
        replace(reference, model="Other"),
        replace(reference, quantizer="x86"),
        replace(reference, environment=replace(reference.environment, fingerprint="77")),
        replace(reference, histograms={}),
        replace(reference, side="before", model="Other"),
    ):
        assert [chart["kind"] for chart in Page(html_page([samples.layers(), other])).data[0]["charts"]] == [
            "along"
        ] * 3


def test_the_values_before_edits_are_those_of_another_quantizer_too_and_have_no_section() -> None:
    reference, quantized = samples.profiles()
    before = replace(quantized, side="before", quantizer="xnnpack:per_channel=false")
    (section,) = Page(html_page([samples.layers()], [reference, quantized, before])).data
    (chart,) = [each for each in section["charts"] if each["kind"] == "histogram"]
    assert [each["side"] for each in chart["series"]] == ["reference", "quantized", "before"]


def test_each_row_has_its_histogram_and_the_section_those_of_the_worst() -> None:
    made = samples.layers()
    names = [row.name for row in made.rows]
    profile = samples.profiles(*names)[0]
    charts = [each for each in Page(html_page([made, profile])).data[0]["charts"] if each["kind"] == "histogram"]
    assert [(each["table"], names[each["row"]]) for each in charts] == [
        ("rows", row.name) for row in made.worst(len(names))
    ]
    assert [each["whole"] for each in charts] == 8 * [True] + 4 * [False]
    assert [each.title for each in drawings(made, [profile])][3:] == [each["title"] for each in charts[:8]]


def test_the_environment_is_shown_once_with_its_reports() -> None:
    other = replace(samples.layers(), environment=Environment("2.14.0", "1", "2", "3", "beef"))
    prose = Page(html_page([*samples.every(), other])).prose
    assert (prose.count("3f2a"), prose.count("beef")) == (1, 1)


def test_two_thousand_ops_with_both_profiles_stay_small(tmp_path: Path) -> None:
    """Each op with an input, a weight, a bias and an output, and numbers that do not compress."""
    random = np.random.default_rng(0)
    numbers = ("min", "max", "mean", "variance", "q0_1", "q1", "q50", "q99", "q99_9", "zeros", "outlier_ratio", "scale")
    profile = samples.profiles()[0]
    rows = tuple(
        replace(
            profile.rows[0],
            name=f"blocks.{i // 4}/linear",
            role=("input", "weight", "bias", "output")[i % 4],
            value=i,
            **dict(zip(numbers, random.uniform(size=len(numbers)).tolist(), strict=True)),
        )
        for i in range(8000)
    )
    profiles = [replace(profile, rows=rows, histograms={}, side=side) for side in ("reference", "quantized")]
    write_html([samples.layers(2000), *profiles], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < LIMIT


def test_empty_reports_make_a_page(empty: LayerReport) -> None:
    page = Page(
        html_page([empty, WeightReport((), (), notes=(), quantizer="xnnpack", model="Net", environment=samples.HERE)])
    )
    assert [(each["tables"], each["charts"], each["graph"]) for each in page.data] == [([], [], None)] * 2
    assert "No model output was compared." in page.prose


def test_what_cannot_be_written_says_why(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="a page needs at least one report, got none"):
        write_html([], tmp_path / "report.html")
    with pytest.raises(ReportError, match="does not exist; create it first"):
        write_html(samples.layers(), tmp_path / "nowhere" / "report.html")
