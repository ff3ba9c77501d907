"""Prepare and convert with :mod:`pt2qa._graph.internals.shortcuts` against torchao's own, on a deep stack of blocks."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa._graph.internals.shortcuts import shortcuts
from pt2qa.plugins import resolve
from tests.benchmarks.bars import Result

BLOCKS = (100, 400)
TIME_BAR = 0.5
"""In torchao's own time, for the largest."""
GROWTH_BAR = 1.5
"""How much more time a block may take in the largest than in the smallest."""


class Block(nn.Module):
    """Two convolutions, a batch norm to fold, and a sum: 13 nodes, three histograms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()) + x  # type: ignore[no-any-return]


def measure_quantizing(rounds: int) -> list[Result]:
    """Time of XNNPACK's prepare and convert, both ways in the same rounds."""
    taken = {blocks: _seconds(blocks, rounds) for blocks in BLOCKS}
    few, many = BLOCKS
    own, ours = taken[many]
    return [
        Result(f"{many} blocks: torchao's prepare and convert", own, "s"),
        Result(f"{many} blocks: with shortcuts", ours / own, bar=TIME_BAR),
        Result(f"each block of {many} against {few}", ours / many / (taken[few][1] / few), bar=GROWTH_BAR),
        Result(f"each block of {many} against {few}, torchao's", own / many / (taken[few][0] / few)),
    ]


def _seconds(blocks: int, rounds: int) -> tuple[float, float]:
    x = torch.linspace(-1, 1, 8 * 16).reshape(1, 8, 4, 4)
    capture = pt2qa.capture(nn.Sequential(*(Block() for _ in range(blocks))).eval(), x)
    plugin = resolve("xnnpack")

    def flow(through: Callable[[], Any]) -> float:
        graph = copy.deepcopy(capture.module())
        quantizer = plugin.build(graph, qat=False)
        start = time.process_time()
        with through():
            prepared = prepare_pt2e(graph, quantizer)
        half = time.process_time()
        prepared(x)
        again = time.process_time()
        with through():
            convert_pt2e(prepared)
        return time.process_time() - again + half - start

    ways = (contextlib.nullcontext, shortcuts)
    times = [[flow(way) for way in ways] for _ in range(rounds + 1)][1:]
    own, ours = (min(column) for column in zip(*times, strict=True))
    return own, ours
