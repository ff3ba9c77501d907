"""The server of ``pt2qa serve``, in a module of its own: no other command waits for what it imports."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from pt2qa.cli.outcome import plain
from pt2qa.errors import Pt2qaError

LARGEST: Final = 1 << 20
"""Bytes of a request: settings of ten thousand places have half of it."""

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(ThreadingHTTPServer):
    """Serves one session on 127.0.0.1, to those that know the address: its path is a secret."""

    daemon_threads = True

    def __init__(self, session: Any, port: int = 0) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Answers)
        except OSError as error:
            raise Pt2qaError(f"cannot listen on port {port} of 127.0.0.1: {error.strerror or error}") from error
        self.session, self.busy = session, threading.Lock()
        self.hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")]
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self.address = f"http://{self.hosts[0]}{self.path}"


class _Refused(Exception):
    """A request that is not answered: the status, and why."""


class _Answers(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # of a connection that a browser opens ahead and leaves

    def do_GET(self) -> None:
        self._answer(self._page)

    def do_POST(self) -> None:
        self._answer(self._figures)

    def _answer(self, made: Callable[[str], tuple[Any, ...]]) -> None:
        status, answer = 200, tuple[Any, ...]()
        try:
            answer = made(self._name())
        except _Refused as error:
            status, answer = error.args[0], ({"error": error.args[1]},)
        except Pt2qaError as error:
            status, answer = 400, ({"error": str(error)},)
        except Exception as error:
            status, answer = 500, ({"error": f"unexpected {type(error).__name__}: {error}"},)
            traceback.print_exc()
        with contextlib.suppress(ConnectionError):  # a page that was closed meanwhile needs no answer
            self._send(status, *answer)

    def _name(self) -> str:
        """What is asked for. A page of another site knows neither host nor path, whatever name leads it here."""
        if self.headers.get("Host") not in self.server.hosts:
            raise _Refused(403, f"Host is {self.headers.get('Host')!r}, expected {self.server.hosts[0]!r}")
        origin = self.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in self.server.hosts:
            raise _Refused(403, f"Origin is {origin!r}, expected 'http://{self.server.hosts[0]}'")
        secret, _, name = self.path[1:].partition("/")
        if not secrets.compare_digest(f"/{secret}/".encode(), self.server.path.encode()):
            raise _Refused(403, "open the address that pt2qa serve printed, with its whole path")
        return name

    def _page(self, name: str) -> tuple[Any, ...]:
        from pt2qa._report.html.page import rendered

        if name:
            raise _Refused(404, f"there is no {name!r:.80}; a page is at {self.server.address}")
        session = self.server.session
        scripts, pair = ("start.js", "tables.js", "serve.js"), session.pair
        about = plain({"places": session.facts, "metric": session.metric})
        parts = {"title": pair.model, "quantizer": pair.quantizer}
        return rendered("serve.html.jinja", scripts, about, **parts), "text/html"

    def _figures(self, name: str) -> tuple[Any, ...]:
        if name not in ("measure", "plan"):
            raise _Refused(404, f"there is no {name!r:.80}; expected measure or plan")
        if self.headers.get_content_type() != "application/json":
            raise _Refused(415, f"Content-Type is {self.headers.get_content_type()!r}, expected 'application/json'")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST:
            raise _Refused(413, f"Content-Length is {length!r:.40}, expected {LARGEST} bytes at most")
        try:
            settings = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise _Refused(400, f"the body is not JSON: {error}") from error
        session = self.server.session
        with self.server.busy:  # one at a time: the model runs on all cores
            if name == "measure":
                return (plain(session.measured(settings)),)
            plan, converted = session.exported(settings)
            return ({"plan": plan.to_json(), "converted": plain(converted)},)

    def _send(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = (body if isinstance(body, str) else json.dumps(body, allow_nan=False)).encode()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing of requests."""
