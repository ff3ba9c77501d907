"""In a browser the page draws, sorts, filters and changes its colours, and the console stays empty."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import parse_qs

import pytest

from pt2qa import write_html
from pt2qa.report import Reconfiguration, Report
from tests.report.html import samples

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    "--allow-file-access-from-files",
    *("--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--window-size=1200,900"),
    # Virtual time ends when the page has nothing more to do: the data are unpacked after it has loaded.
    "--virtual-time-budget=10000",
)
WHEN_DRAWN = "new MutationObserver(() => {%s}).observe(document.documentElement, { attributeFilter: ['data-ready'] });"
FRAME = """<body><iframe style="width: %dpx; height: 900px; border: 0" src="%s" onload="setInterval(() =>
    (document.body.dataset.ready = frames[0].document.documentElement.dataset.ready))"></iframe></body>"""
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed"),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """From the part of the address after #, and what a user does, to what the scripts made of the page."""
    folder = tmp_path_factory.mktemp("browser")
    page = folder / "report.html"

    def dump(
        address: str,
        actions: str = "",
        options: Sequence[str] = (),
        reports: Sequence[Report] = tuple(samples.every()),
        width: int = 0,
    ) -> str:
        assert CHROMIUM is not None
        write_html(reports, page)
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("</body>", f"<script>{WHEN_DRAWN % actions}</script></body>"), encoding="utf-8")
        user = f"--user-data-dir={folder / 'user'}"
        url = f"{page.as_uri()}#{address}"
        if width:  # a window has 500 pixels or more
            frame = folder / "frame.html"
            frame.write_text(FRAME % (width, html.escape(url)), encoding="utf-8")
            url = frame.as_uri()
        command = [CHROMIUM, *OPTIONS, *options, user, "--dump-dom", url]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "CONSOLE" not in run.stderr, run.stderr
        assert 'data-ready="true"' in run.stdout
        return run.stdout

    return dump


def column(dom: str, number: int) -> list[str]:
    """The cells of one column of the first table."""
    body = re.search(r"<tbody>(.*?)</tbody>", dom, re.DOTALL)
    assert body is not None
    rows = re.findall(r"<tr data-row[^>]*>(.*?)</tr>", body[1], re.DOTALL)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)[number] for row in rows]


def test_everything_is_drawn(opened: Callable[..., str]) -> None:
    dom = opened("")
    names = column(dom, 0)
    assert (len(names), names[:2]) == (12, ["blocks.3/conv2d", "blocks.11/linear"])
    assert any("&lt;/script&gt;" in name for name in names)
    assert "<b onclick" not in dom
    figures = re.findall(r"<figure.*?</figure>", dom, re.DOTALL)
    assert len(figures) == 13
    assert all("<svg" in figure and ("<path" in figure or "<rect" in figure) for figure in figures)
    assert "NaN" not in "".join(figures)
    assert 'data-theme="light"' in dom
    assert re.search(r'<p id="failed" hidden="">', dom)


def test_equal_blocks_are_a_heat_map_that_leads_to_rows(opened: Callable[..., str]) -> None:
    rows = [
        replace(row, handle=10 * block + op, name=f"layers.{block}.{row.name}", isolated_sqnr=20.0 + 10 * op + block)
        for block in range(6)
        for op, row in enumerate(samples.residual().rows)
    ]
    ops = len(samples.residual().rows)
    over = "{clientX: box.left + 5, clientY: box.top + 5, bubbles: true}"
    actions = f"""
        const cell = document.querySelectorAll("figure.heat rect.cell")[{ops}], box = cell.getBoundingClientRect();
        cell.dispatchEvent(new MouseEvent("mousemove", {over}));
        document.body.dataset.tip = document.getElementById("tip").textContent;
        cell.dispatchEvent(new MouseEvent("click", {over}));"""
    dom = opened("", actions, reports=[replace(samples.layers(), rows=tuple(rows))])
    assert dom.count('class="cell"') == 6 * ops
    tip = re.search(r'data-tip="([^"]*)"', dom)
    assert tip is not None
    assert tip[1].startswith("layers.")
    assert tip[1].endswith(" dB")
    assert dom.count('<tr class="detail"') == 1, "a click shows all columns of the row"


def test_it_sorts_and_what_has_no_number_comes_last(opened: Callable[..., str]) -> None:
    numbers = column(opened("sort=isolated_sqnr&theme=dark"), 5)
    assert numbers[0] == "8.1"
    assert numbers[-2:] == ["inf", "–"]
    assert [float(number) for number in numbers[:-2]] == sorted(float(number) for number in numbers[:-2])
    dom = opened("sort=isolated_sqnr&order=desc&theme=dark")
    assert column(dom, 5) == ["inf", *reversed(numbers[:-2]), "–"]
    assert 'aria-sort="descending"' in dom
    assert 'data-theme="dark"' in dom


def test_it_filters_by_words_and_limits(opened: Callable[..., str]) -> None:
    dom = opened("filter=conv+sqnr%3C40")
    assert column(dom, 0) == ["blocks.3/conv2d", "blocks.6/conv2d", "blocks.9/conv2d"]
    assert "3 of 12 rows" in dom
    dom = opened("table=report-3.rows&filter=weight&all=1")
    assert "1 of 3 rows" in dom
    assert "noise_share" in dom


def test_it_follows_the_mouse_and_the_keyboard(opened: Callable[..., str]) -> None:
    actions = """
        const first = document.querySelector(".tables");
        const click = key => first.querySelector(`th[data-key="${key}"] button`).click();
        click("cosine");
        click("sqnr");
        click("sqnr");
        const search = first.querySelector("input[type=search]");
        search.value = "linear";
        search.dispatchEvent(new Event("input"));
        document.getElementById("theme").click();
        const chart = document.querySelector("figure svg");
        const place = chart.getBoundingClientRect();
        const mouse = { bubbles: true, clientX: place.right - 20, clientY: place.top + 50 };
        chart.querySelector("rect").dispatchEvent(new MouseEvent("mousemove", mouse));
    """
    dom = opened("", actions)
    assert column(dom, 0)[:2] == ["blocks.1/linear", "blocks.2/linear"]
    assert "8 of 12 rows" in dom
    assert 'data-theme="dark"' in dom
    tip = re.search(r'<div id="tip"[^>]*>(.*?)</div>', dom, re.DOTALL)
    assert tip is not None
    assert tip[1].split("\n") == ["blocks.11/linear", "sqnr: 17.5 dB"]


def test_what_one_does_is_in_the_address_which_opens_the_same(opened: Callable[..., str]) -> None:
    actions = """
        const first = document.querySelector(".tables");
        first.querySelector('th[data-key="sqnr"] button').click();
        first.querySelector('th[data-key="sqnr"] button').click();
        document.body.dataset.focus = document.activeElement.textContent;
        const search = first.querySelector("input[type=search]");
        search.value = "conv sqnr<40";
        search.dispatchEvent(new Event("input"));
        const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        first.querySelector("tr[data-row][tabindex='0']").focus();
        press("ArrowDown");
        press("Enter");
        document.body.dataset.address = location.hash;
    """
    dom = opened("theme=dark", actions)
    address = re.search(r'data-address="#([^"]*)"', dom)
    assert address is not None
    wanted = html.unescape(address[1])
    row = column(dom, 0)[1]
    assert parse_qs(wanted) == {
        "table": ["report-1.rows"],
        "sort": ["sqnr"],
        "order": ["desc"],
        "filter": ["conv sqnr<40"],
        "row": [row],
        "theme": ["dark"],
    }
    assert re.findall(r'data-focus="([^"]*)"', dom) == ["SQNR dB"], (
        "the title stays focused where the table is drawn anew"
    )
    again = opened(wanted)
    assert column(again, 0) == column(dom, 0)
    assert "3 of 12 rows" in again
    detail = re.search(r'<tr class="detail">(.*?)</tr>', again, re.DOTALL)
    assert detail is not None
    assert f"<dd>{row}</dd>" in detail[1]


def test_an_address_without_a_table_is_for_one_that_has_its_column(opened: Callable[..., str]) -> None:
    dom = opened("sort=isolated_sqnr&filter=conv", reports=[samples.diagnosis(), samples.layers()])
    bodies = re.findall(r"<tbody>(.*?)</tbody>", dom, re.DOTALL)
    assert "<tr data-row" in bodies[0], "the causes are all there"
    assert "4 of 12 rows" in dom
    assert 'aria-sort="ascending"' in dom


def test_an_op_of_the_graph_leads_to_its_row_with_all_its_numbers(opened: Callable[..., str]) -> None:
    actions = """
        const graph = document.querySelector(".graph details");
        graph.open = true;
        graph.addEventListener("toggle", () => setTimeout(() => {
          graph.querySelectorAll(".controls button")[0].click();
          [...graph.querySelectorAll(".boxes button")].find(box => box.title.startsWith("blocks.5/linear")).click();
        }));
    """
    dom = opened("", actions)
    assert re.search(r'<button[^>]*title="blocks.3/conv2d"[^>]*><i style="background: rgb', dom)
    assert "no number\nnote: the reference is zero" in dom
    detail = re.search(r'<tr class="detail">(.*?)</tr>', dom, re.DOTALL)
    assert detail is not None
    assert "blocks.5/linear" in detail[1]
    assert re.search(r"<dt[^>]*>note</dt><dd>the reference is zero</dd>", detail[1])


def test_a_row_shows_what_it_reads_and_makes_and_what_other_reports_say_of_its_op(opened: Callable[..., str]) -> None:
    made = samples.residual()
    profiles = samples.profiles(*(row.name for row in made.rows))
    others = [edits(), replace(edits(), model="Other")]
    dom = opened("row=block/add&table=report-1.rows", reports=[made, *others, *profiles])
    detail = re.search(r'<tr class="detail">(.*?)</tr>', dom, re.DOTALL)
    assert detail is not None
    titles = [title.partition(":")[0] for title in re.findall(r"<figure[^>]*><figcaption><h3>(.*?)</h3>", detail[1])]
    assert titles == ["input stem/conv2d", "input block.fc2/linear", "block/add"]
    assert detail[1].count('<i class="s0"></i>reference') == 3
    assert detail[1].count('<i class="s1"></i>quantized') == 3
    lines = re.findall(r"<li><a [^>]*>(.*?)</a>(.*?)</li>", detail[1])
    assert [heading for heading, _ in lines] == [
        "Reconfiguration, Net · xnnpack, All rows",
        "Profile, Net · xnnpack, reference",
        "Profile, Net · xnnpack, quantized",
    ]
    assert lines[0][1] == ": kind float, float MACs % 25.00, noise gone % 50.00, sites off 2"
    assert "--profiles" not in detail[1]


def test_a_row_without_a_histogram_says_what_makes_one(opened: Callable[..., str]) -> None:
    dom = opened(
        "row=block/add", "document.querySelector('ul.elsewhere a').click();", [], [samples.residual(), edits()]
    )
    details = re.findall(r'<tr class="detail">(.*?)</tr>', dom, re.DOTALL)
    assert "pt2qa analyze --profiles --html" in details[0]
    assert len(details) == 2, "the line of another report leads to its row"
    assert "--profiles" not in details[1]


def edits() -> Reconfiguration:
    """An edit of two ops."""
    made = samples.reconfiguration()
    return replace(made, rows=(replace(made.rows[0], name="block.fc1/linear", ops="block.fc1/linear, block/add"),))


def test_edges_are_drawn_between_what_one_sees(opened: Callable[..., str]) -> None:
    actions = """
        const graph = document.querySelector(".graph details");
        graph.open = true;
        graph.addEventListener("toggle", () => setTimeout(() => {
          const edges = () => [...graph.querySelectorAll(".edge")].map(edge => {
            const label = box => graph.querySelector(`[data-box="${box}"] .label`).textContent;
            return `${label(edge.dataset.from)} ${label(edge.dataset.to)}`;
          });
          const seen = [edges().join(), ...["fold all", "unfold all"].map(text => {
            [...graph.querySelectorAll(".controls button")].find(button => button.textContent === text).click();
            return edges().join();
          })];
          document.body.append(`edges: ${seen.join("; ")}.`);
        }));
    """
    dom = opened("", actions, reports=[samples.residual()])
    unfolded = "stem/conv2d fc1/linear,fc1/linear relu,relu fc2/linear,stem/conv2d add,fc2/linear add,add head/linear"
    assert f"edges: {unfolded}; stem/conv2d ▸ block,▸ block head/linear; {unfolded}." in dom


MEASURED = """
    document.querySelectorAll("details").forEach(each => (each.open = true));
    const light = text => {
      const parts = text.match(/[\\d.]+/g).map(Number).slice(0, 3).map(each => each / 255);
      const [r, g, b] = parts.map(each => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = each => {
      const { backgroundColor } = getComputedStyle(each);
      return /, 0\\)$/.test(backgroundColor) ? behind(each.parentElement) : backgroundColor;
    };
    const contrast = each => {
      const [a, b] = [getComputedStyle(each).color, behind(each)].map(light);
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    };
    const read = [...document.querySelectorAll("h1, h2, h2 small, p, li, a, th, td, dt, dd, .about, .count, button")];
    const shown = read.filter(each => each.textContent.trim() && each.textContent !== "–" && each.checkVisibility());
    const least = Math.min(...shown.map(contrast));
    parent.document.body.dataset.measured = [innerWidth, document.documentElement.scrollWidth, shown.length, least];
"""
"""How wide the window and the page are, and the smallest contrast of a text with what is behind it, as WCAG has it."""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_fits_its_window_and_can_be_read(opened: Callable[..., str], width: int, theme: str) -> None:
    reports = [*samples.every(), *samples.profiles()]
    address = f"theme={theme}&row=blocks.3/conv2d&table=report-1.rows"
    found = re.search(r'data-measured="([^"]*)"', opened(address, MEASURED, reports=reports, width=width))
    assert found is not None
    window, page, texts, contrast = map(float, found[1].split(","))
    assert (window, page <= window, texts > 300, contrast >= 4.5) == (width, True, True, True), found[1]


def test_a_call_is_copied(opened: Callable[..., str]) -> None:
    # What the page shows at the click: two seconds later, which virtual time may reach, the button says "copy" again.
    actions = """
        const button = document.querySelector(".first .copied button");
        button.click();
        document.body.dataset.copied = `${button.textContent}: ${getSelection()}`;
    """
    dom = opened("", actions, (), [samples.diagnosis()])
    assert re.search(r"data-copied=.(copied|selected: press Ctrl\+C): pt2qa show 'a b.safetensors'", dom)


def test_it_is_dark_where_the_system_is(opened: Callable[..., str]) -> None:
    assert 'data-theme="dark"' in opened("", options=["--blink-settings=preferredColorScheme=0"])
