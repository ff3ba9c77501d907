"""Batches whose outputs give no number, and whose fault that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pt2qa._report.set_apart import SetApart
from pt2qa._sensitivity.metrics import paired_leaves
from pt2qa._simulator.accumulate import empty_batch, first_fault
from pt2qa._simulator.nonfinite import unlike
from pt2qa._simulator.simulator import Simulator


def without_number(
    simulator: Simulator, values: Sequence[Any], reference: Any, quantized: Any, batch: int, samples: int
) -> SetApart | None:
    """Why the outputs of a batch, as the user sees them, give no number; None where they do."""
    pairs = paired_leaves(reference, quantized)
    if not pairs:
        return replace(empty_batch(batch), samples=samples)
    broken = next(filter(None, (unlike(ref, quant) for ref, quant in pairs)), None)
    if broken is None:
        return None
    what, side, _ = broken
    fault = first_fault(simulator, values, batch, samples)
    return fault or SetApart(batch, samples, -1, side, what, "post_process")
