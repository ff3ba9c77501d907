"""Runs of the reference with the value of one site alone replaced, whole model by whole model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from pt2qa._exclusion import computes
from pt2qa._sensitivity.roundings import Rounding
from pt2qa._simulator.program import Program, Site
from pt2qa._simulator.simulator import Body, Simulator


@computes
def outputs_with(simulator: Simulator, values: Sequence[Any], site: Site, rounding: Rounding) -> Any | None:
    """The graph's outputs with one value of the reference rounded; None if that does not change the value."""
    program = simulator.program
    if isinstance(body := simulator.off[site.source], Body):

        def called(*values: Any) -> Any:
            found = outputs_with(body.simulator, values, body.own(site), rounding)
            return body(*values) if found is None else found

        changed = copy.copy(simulator)
        changed.off = list(simulator.off)
        changed.off[site.source] = called
        return changed.run(values, on=False)
    if site.result not in program.producers:
        before = simulator.off[site.source]
        changed = copy.copy(simulator)
        changed.off = list(simulator.off)
        with torch.no_grad():
            changed.off[site.source] = rounding(before)
        return None if changed.off[site.source] is before else changed.run(values, on=False)
    replaced, instead = _steps_of(program, site), None
    walk = simulator.walk(values, on=False)
    with torch.no_grad():
        while True:
            try:
                step, value = walk.send(instead)
            except StopIteration as end:
                return end.value
            instead = rounding(value) if step.index in replaced else None
            if instead is value and instead is not None:
                return None


def _steps_of(program: Program, site: Site) -> set[int]:
    copies = {step.index for step in program.steps if step.duplicate_of == site.result}
    return {program.producers[site.result], *copies}
