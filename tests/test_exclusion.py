"""torch.export switches oneDNN off for the whole process: exports and runs take turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pt2qa
from pt2qa._exclusion import computes, exports


def in_threads(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_runs_go_on_side_by_side() -> None:
    both = threading.Barrier(2, timeout=10)
    passed: list[int] = []
    run = computes(lambda: passed.append(both.wait()))
    in_threads(run, run)
    assert sorted(passed) == [0, 1]


@pytest.mark.parametrize("other", [computes, exports])
def test_nothing_runs_beside_an_export(other: Callable[..., Callable[[], None]]) -> None:
    busy: list[str] = []
    seen: list[list[str]] = []

    def work(name: str) -> Callable[[], None]:
        def working() -> None:
            busy.append(name)
            time.sleep(0.02)
            seen.append(list(busy))
            busy.remove(name)

        return working

    in_threads(*[exports(work("export")), other(work("other"))] * 5)
    assert len(seen) == 10
    assert all(names == ["export"] for names in seen if "export" in names)


def test_a_thread_may_enter_again() -> None:
    inner = exports(computes(exports(lambda: "done")))
    assert computes(inner)() == "done"


def test_an_error_gives_the_turn_back() -> None:
    @exports
    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    passed: list[str] = []
    in_threads(computes(lambda: passed.append("run")))
    assert passed == ["run"]


def test_numbers_are_the_same_beside_another_thread_that_quantizes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.Flatten(2)).eval()
    batches = [torch.randn(4, 3, 32, 32) for _ in range(3)]
    pair = pt2qa.quantize(pt2qa.capture(model, batches[0]), "xnnpack", batches, progress=False)

    def numbers() -> list[tuple[float, float]]:
        report = pt2qa.compare_layers(pair, batches, progress=False)
        return [(row.mse, row.quant_mean) for row in report.rows]

    expected, done = numbers(), threading.Event()

    def quantize_again_and_again() -> None:
        while not done.is_set():
            small = torch.randn(1, 3, 8, 8)
            pt2qa.quantize(pt2qa.capture(nn.Conv2d(3, 4, 3).eval(), small), "xnnpack", [small], progress=False)

    other = threading.Thread(target=quantize_again_and_again)
    other.start()
    try:
        found = [numbers() for _ in range(4)]
    finally:
        done.set()
        other.join()
    assert found == [expected] * 4
