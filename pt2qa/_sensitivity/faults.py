"""Batches whose outputs give no number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pt2qa._report.set_apart import SetApart
from pt2qa._sensitivity.metrics import paired_leaves
from pt2qa._simulator.accumulate import empty_batch, first_fault
from pt2qa._simulator.nonfinite import unlike
from pt2qa._simulator.simulator import Simulator


def fault_of(
    simulator: Simulator, values: Sequence[Any], number: int, samples: int, reference: Any, quantized: Any
) -> SetApart | None:
    """Why a batch is to be set apart, from the outputs of both models; None if they give a number."""
    pairs = paired_leaves(reference, quantized)
    broken = next(filter(None, (unlike(ref, quant) for ref, quant in pairs)), None)
    if broken is not None:
        what, side, _ = broken
        found = first_fault(simulator, values, number, samples)
        return found or SetApart(number, samples, -1, side, what, "post_process")
    return None if pairs else replace(empty_batch(number), samples=samples)
