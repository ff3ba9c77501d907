"""Runs tests in forks of a process that has torch and its tools loaded, with one module of the library changed."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Literal

import pytest

ROOT = Path(__file__).parents[2]
Verdict = Literal["killed", "survived", "slow"]
OPTIONS = (
    *("-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "-m", "not zoo and not conformance"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of plug-ins that are loaded already
)


def warm() -> None:
    """Loads what every test needs and no mutant changes; an export brings in the rest of torch."""
    warnings.simplefilter("ignore")
    import executorch.backends.xnnpack.quantizer.xnnpack_quantizer as xnnpack
    import pandas  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    torch.ones(1, requires_grad=True).sum().backward()  # before an export: see tests/conftest.py
    x = torch.ones(1, 4)
    graph = torch.export.export(torch.nn.Linear(4, 2).eval(), (x,)).module()
    quantizer = xnnpack.XNNPACKQuantizer().set_global(xnnpack.get_symmetric_quantization_config())
    prepared = prepare_pt2e(graph, quantizer)
    prepared(x)
    convert_pt2e(prepared)
    if any(name == "pt2qa" or name.startswith("pt2qa.") for name in sys.modules):
        raise AssertionError("the library is loaded already: no mutant of it would be")


class Changed(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Finds one file's module with another source."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self.name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        return importlib.util.spec_from_loader(name, self, origin=self.path) if name == self.name else None

    def get_filename(self, name: str) -> str:
        return str(ROOT / self.path)

    def get_data(self, path: str) -> bytes:
        return self.source.encode()


def in_fork(run: Callable[[], int], seconds: float) -> Verdict:
    """What becomes of a run in a child: it is killed by a failing test or a crash, or survives."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        with contextlib.suppress(BaseException):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os._exit(int(run()))
        os._exit(70)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if status == 0 else "killed"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "slow"


def trial(path: str, source: str, tests: Sequence[str], seconds: float) -> Verdict:
    """Whether tests notice that a file has this source."""

    def run() -> int:
        sys.meta_path.insert(0, Changed(path, source))
        return int(pytest.main(["-x", *OPTIONS, *tests]))

    return in_fork(run, seconds)


class Lines:
    """A plug-in that notes which lines of the library each test runs, and how long it takes; of passing tests alone."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, list[int]]] = {}
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.here: dict[str, set[int]] = {}
        self.wanted: dict[CodeType, set[int] | None] = {}
        self.library = f"{ROOT / 'pt2qa'}{os.sep}"

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self.wanted:
            own = code.co_filename.startswith(self.library)
            name = code.co_filename[len(str(ROOT)) + 1 :]
            self.wanted[code] = self.here.setdefault(name, set()) if own else None
        lines = self.wanted[code]
        if lines is None:
            return None
        lines.add(frame.f_lineno)

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.here, self.wanted = {}, {}
        begun = time.monotonic()
        sys.settrace(self._call)
        yield
        sys.settrace(None)
        self.seconds[item.nodeid] = time.monotonic() - begun
        self.found[item.nodeid] = {name: sorted(lines) for name, lines in self.here.items() if lines}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def lines_of(tests: Sequence[str], seconds: float) -> dict[str, Any]:
    """Of each test: the lines of the library that it runs, and its seconds; and the tests that fail as things are."""
    path = ROOT / "build" / f"mutants-{os.getpid()}.json"
    path.parent.mkdir(exist_ok=True)

    def run() -> int:
        plugin = Lines()
        pytest.main([*OPTIONS, *tests], plugins=[plugin])
        path.write_text(json.dumps({"lines": plugin.found, "seconds": plugin.seconds, "failed": plugin.failed}))
        return 0

    if in_fork(run, seconds) != "survived":
        raise RuntimeError(f"the tests {' '.join(tests)} did not run to their end")
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return found
