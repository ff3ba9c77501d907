"""Which lines of the library each test runs, kept in files, since to find them takes as long as all tests."""

from __future__ import annotations

import bisect
import difflib
import functools
import hashlib
import os
import pickle
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest
from tqdm import tqdm

from tests.mutants.worker import OPTIONS, POLL, ROOT, Fork

LONGEST = 3600
"""Seconds that the tests of one folder may take."""


@dataclass
class Lines:
    """Of the tests of one folder or file: their names, how long each takes, which fail, and which run each line.

    A plug-in of pytest while they run.
    """

    library: dict[str, str]
    """The source of each module at that time."""
    tests: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    runs: dict[str, dict[int, array[int]]] = field(default_factory=dict)
    """By module and line, the numbers of the tests."""

    def collect(self, tests: str) -> None:
        tracer = coverage.Coverage(data_file=None, config_file=False, include=[f"{ROOT / 'pt2qa'}/*"])
        with tracer.collect():
            pytest.main([*OPTIONS, tests], plugins=[Switch(tracer, self)])
        numbers = {name: number for number, name in enumerate(self.tests)}
        data = tracer.get_data()
        for path in data.measured_files():
            lines = self.runs.setdefault(str(Path(path).relative_to(ROOT)), {})
            for line, names in data.contexts_by_lineno(path).items():
                lines[line] = array("H", sorted(numbers[name] for name in names if name))

    @property
    def passed(self) -> dict[str, float]:
        """The seconds of each test that passes."""
        return {test: taken for test, taken in zip(self.tests, self.seconds, strict=True) if test not in self.failed}

    def of(self, path: str, line: int | None) -> dict[str, float]:
        """The seconds of each test that passes and runs a line of a module; of any line where it is None."""
        lines = self.runs.get(path, {})
        if line is None:
            numbers = {number for tests in lines.values() for number in tests}
        else:
            numbers = set(lines.get(_line_then(self.library.get(path, ""), (ROOT / path).read_text(), line), ()))
        running = {self.tests[each] for each in numbers}
        return {test: taken for test, taken in self.passed.items() if test in running}


@dataclass
class Switch:
    tracer: Any
    found: Lines

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        begun = time.monotonic()
        self.tracer.switch_context(item.nodeid)
        yield
        self.tracer.switch_context("")
        self.found.tests.append(item.nodeid)
        self.found.seconds.append(time.monotonic() - begun)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.found.failed.add(report.nodeid)


@functools.cache
def _line_then(before: str, now: str, line: int) -> int:
    """The number that a line of a source had in the source of before; that of the line above it where it is new."""
    pairs = _same_lines(before, now)
    last = bisect.bisect_right(pairs, (line, len(before))) - 1
    return pairs[last][1] if last >= 0 else line


@functools.cache
def _same_lines(before: str, now: str) -> list[tuple[int, int]]:
    matcher = difflib.SequenceMatcher(None, now.splitlines(), before.splitlines(), autojunk=False)
    return [(a + at + 1, b + at + 1) for a, b, size in matcher.get_matching_blocks() for at in range(size)]


def lines_of(all_tests: list[str], folder: Path, processes: int) -> dict[str, Lines]:
    """By folder or file of tests; those of which no file has changed since the last time are read."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {tests: folder / f"{tests.replace('/', '.')}-{_digest(ROOT / tests)}.pickle" for tests in all_tests}
    waiting = [tests for tests in all_tests if not files[tests].exists()]
    library = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "pt2qa").rglob("*.py")}
    running: dict[str, Fork] = {}
    bar = tqdm(total=len(waiting), desc="lines")
    while waiting or running:
        while waiting and len(running) < processes:
            tests = waiting.pop()
            running[tests] = Fork(functools.partial(_kept, tests, library, files[tests]), LONGEST)
        time.sleep(POLL)
        for tests, fork in list(running.items()):
            if (verdict := fork.verdict()) is not None:
                del running[tests]
                bar.update()
                if verdict != "survived":
                    raise RuntimeError(f"the tests {tests} did not run to their end")
    bar.close()
    return {tests: pickle.loads(path.read_bytes()) for tests, path in files.items()}


def _kept(tests: str, library: dict[str, str], path: Path) -> int:
    found = Lines(library)
    found.collect(tests)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(found))
    part.replace(path)
    return 0


def _digest(path: Path) -> str:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:16]
