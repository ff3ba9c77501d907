"""Runs tests in forks of a process that has torch and its tools loaded, with one module of the library changed."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
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


class Fork:
    """A run in a child process: it is killed by a failing test or a crash, survives, or takes too many seconds."""

    def __init__(self, run: Callable[[], int], seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.child = os.fork()
        if self.child == 0:
            os.setpgid(0, 0)
            with contextlib.suppress(BaseException):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.dup2(null, 2)
                os._exit(int(run()))
            os._exit(70)

    def verdict(self) -> Verdict | None:
        """What became of it; None while it runs."""
        done, status = os.waitpid(self.child, os.WNOHANG)
        if done:
            return "survived" if status == 0 else "killed"
        if time.monotonic() < self.end:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        return "slow"

    def wait(self) -> Verdict:
        while (found := self.verdict()) is None:
            time.sleep(POLL)
        return found


POLL = 0.05
"""Seconds between looks at a child."""


def trial(path: str, source: str, tests: Sequence[str], seconds: float) -> Fork:
    """Runs tests on a library of which a file has another source."""

    def run() -> int:
        sys.meta_path.insert(0, Changed(path, source))
        return int(pytest.main(["-x", *OPTIONS, *tests]))

    return Fork(run, seconds)
