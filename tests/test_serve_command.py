"""``pt2qa serve``: a page on this machine alone, whose figures come from the engine."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pt2qa
from pt2qa._reconfigure.session import Session
from pt2qa._report.html import page
from pt2qa.cli.server import LARGEST, Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
JSON = {"Content-Type": "application/json"}


def session() -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    batches = [torch.randn(16, 8) for _ in range(2)]
    pair = pt2qa.quantize(pt2qa.capture(model, batches[0]), "xnnpack", batches, progress=False)
    right = model(batches[0]).argmax(1)

    def accuracy(quantized: Any) -> float:
        return 100 * float((quantized(batches[0]).argmax(1) == right).float().mean())

    return Session(pair, batches, metric=accuracy)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(session()) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def asked(
    server: Server, name: str, body: str | None = None, headers: dict[str, str] | None = None, **other: Any
) -> tuple[int, Any, Any]:
    """Status, headers and body, as JSON or text, of the answer to a GET, or to a POST if there is a body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    method = other.get("method", "GET" if body is None else "POST")
    connection.request(method, other.get("path", server.path + name), body, headers or {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, json.loads(text) if "json" in str(answer.headers["Content-Type"]) else text


def test_it_listens_on_the_loopback_alone_at_a_secret_path(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{22}/", server.address)
    status, headers, text = asked(server, "")
    assert status == 200
    assert "Sequential" in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none';")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    for path in ("/", "/measure", "/other/", f"/{server.path[1:-2]}/", "/%C3%A9/", server.path[:-1] + "x/"):
        status, _, found = asked(server, "", path=path)
        assert (status, found) == (403, {"error": "open the address that pt2qa serve printed, with its whole path"})


def test_a_page_of_another_site_gets_nothing(server: Server) -> None:
    for name, wrong in (("Host", "evil.example"), ("Host", f"evil.example:{server.server_port}"), ("Host", "")):
        status, _, found = asked(server, "", headers={name: wrong})
        assert status == 403
        assert found["error"].startswith(f"Host is {wrong!r}, expected '127.0.0.1:")
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{server.server_port}"):
        status, _, found = asked(server, "measure", "[]", {**JSON, "Origin": origin})
        assert status == 403
        assert found["error"].startswith(f"Origin is {origin!r}, expected 'http://127.0.0.1:")
    status, _, found = asked(server, "measure", "[]", {"Content-Type": "text/plain"})
    assert (status, found["error"]) == (415, "Content-Type is 'text/plain', expected 'application/json'")
    own = f"http://localhost:{server.server_port}"
    assert asked(server, "measure", "[]", {**JSON, "Origin": own})[0] == 200


def test_bad_requests_are_told_what_is_wrong(server: Server) -> None:
    for name, body, status, told in (
        ("measure", "[", 400, "the body is not JSON: "),
        ("measure", "\xff", 400, "the body is not JSON: "),
        ("measure", "[" * 100_000, 400, "the body is not JSON: "),
        ("measure", "{}", 400, "settings: got {}, expected a list"),
        ("measure", '[{"place": 0, "set": "range of input", "low": NaN, "high": 1}]', 400, "setting {'place': 0"),
        ("../../etc/passwd", "[]", 404, "there is no '../../etc/passwd'; expected measure or plan"),
        ("plan.json", "[]", 404, "there is no 'plan.json'; expected measure or plan"),
    ):
        got, _, found = asked(server, name, body, JSON)
        assert (got, found["error"][: len(told)]) == (status, told)
    assert asked(server, "measure")[0] == 404, "figures are asked for by POST"
    assert asked(server, "measure", "[]", {**JSON, "Content-Length": str(LARGEST + 1)})[0] == 413
    assert asked(server, "measure", "[]", {**JSON, "Content-Length": "-1"})[0] == 413
    assert asked(server, "", method="DELETE")[0] == 501


def test_a_fault_of_the_server_is_an_error_of_500_and_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server.session, "measured", lambda settings: 1 / 0)
    status, _, found = asked(server, "measure", "[]", JSON)
    assert (status, found) == (500, {"error": "unexpected ZeroDivisionError: division by zero"})
    told = ""
    while "ZeroDivisionError: division by zero" not in told:  # the traceback comes after the answer
        told += capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error(server: Server) -> None:
    with pytest.raises(pt2qa.Pt2qaError, match=rf"cannot listen on port {server.server_port} of 127.0.0.1: "):
        Server(server.session, server.server_port)


def test_the_plan_holds_what_was_set(server: Server) -> None:
    settings = json.dumps([{"place": 0, "set": "float"}])
    status, _, found = asked(server, "measure", settings, JSON)
    assert (status, found["how"]) == (200, "simulated")
    status, _, exported = asked(server, "plan", settings, JSON)
    plan = pt2qa.OverridePlan.from_json(exported["plan"])
    assert [edit.kind for edit in plan.edits] == ["float"]
    assert exported["converted"]["outputs"] == found["outputs"]
    assert exported["converted"]["value"] == found["value"]


def in_browser(server: Server, monkeypatch: pytest.MonkeyPatch, folder: Path, actions: str) -> str:
    """The page after a user's actions."""
    plain = page.rendered

    def rendered(*given: Any, **parts: Any) -> str:
        return plain(*given, **parts).replace("</body>", f"<script>{actions}</script></body>")

    monkeypatch.setattr(page, "rendered", rendered)
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    more = ["--disable-background-networking", "--virtual-time-budget=20000", f"--user-data-dir={folder / 'user'}"]
    run = subprocess.run(
        [*command, *more, "--dump-dom", server.address], capture_output=True, text=True, timeout=90, check=True
    )
    assert "CONSOLE" not in run.stderr, run.stderr
    return run.stdout


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed")
def test_in_a_browser_one_sets_a_place_and_saves_the_plan(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actions = """
        const ready = new MutationObserver(() => {
          const { measured, exported, ready } = document.documentElement.dataset;
          if (!ready || exported) return;
          const select = document.querySelector("#places select");
          if (measured === "1" && select.value === "") {
            select.value = "float";
            select.dispatchEvent(new Event("change"));
          }
          if (measured === "2") document.getElementById("export").click();
        });
        ready.observe(document.documentElement, { attributeFilter: ["data-ready", "data-measured"] });"""
    dom = in_browser(server, monkeypatch, tmp_path, actions)
    noisiest = max(range(len(server.session.facts)), key=lambda number: server.session.facts[number]["noise"])
    expected = server.session.measured([{"place": noisiest, "set": "float"}])["outputs"][0]["sqnr"]
    assert dom.count(f"<b>{expected:.1f} dB</b>") == 2, "now, and converted"
    assert 'class="changed"' in dom
    exported = re.search(r'data-exported="([^"]*)"', dom)
    assert exported is not None
    plan = pt2qa.OverridePlan.from_json(exported[1].replace("&quot;", '"'))
    assert plan.edits == (pt2qa.Edit("float", tuple(server.session.facts[noisiest]["name"].split(" + "))),)
    assert re.search(r'<p id="failed" hidden="">', dom)


FLOW = """
import torch
def flow():
    torch.manual_seed(0)
    data = [torch.randn(4, 8) for _ in range(3)]
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval(), data[0], data
"""


def test_the_command_prints_the_address_serves_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    command = [sys.executable, "-W", "ignore", "-m", "pt2qa", "serve", "flow.py", "-q", "xnnpack"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:(\d+)(/[\w-]+/) shows Sequential, quantized by xnnpack", line)
        assert found is not None, line + str(process.stderr and process.stderr.read())
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
        connection.request("POST", f"{found[2]}measure", "[]", JSON)
        assert json.loads(connection.getresponse().read())["how"] == "simulated"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("interrupted\n")
    assert "Traceback" not in errors
