"""Analyses that fail by design, for the tests of the campaign.  They load no torch."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Found:
    """An outcome as the campaign reads it."""

    failures: dict[str, tuple[str, str]]
    refusals: dict[str, str]
    counts: dict[str, int]


def crashes(genome: Any, only: tuple[str, ...]) -> Found:
    """As native code does."""
    if genome == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return Found({}, {}, {"pairs": 1})


class Reader:
    """A worker without a process: it fails on every model whose genes hold an op."""

    def __init__(self, op: str) -> None:
        self.op = op

    def run(self, genome: Any, only: Any = ()) -> Found:
        bad = any(gene.op == self.op for gene in genome.genes.values())
        return Found({"layers": ("Wrong: #", "trace")} if bad else {}, {}, {})
