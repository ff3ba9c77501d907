"""The graphs of one model: as pt2qa captures it, and as the variants of ``torch.export`` return it.

Properties about how a graph was made use the output of ``torch.export``, since that is what users of a quantizer have.
:func:`pt2qa.capture` would remove the very differences that these properties test.
"""

from __future__ import annotations

import functools
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.export import ExportedProgram

from pt2qa._capture.program import Capture, capture
from pt2qa._conformance.model import MODULE, ConformanceModel
from pt2qa._graph.handles import OpName, assign_handles


@dataclass(frozen=True)
class Plain:
    """A graph as ``torch.export`` returned it, not normalised, with op names shared by the model's other graphs."""

    capture: Capture
    names: dict[int, OpName] = field(repr=False)


class Programs:
    """The graphs of one model, each made on first use."""

    def __init__(self, model: ConformanceModel) -> None:
        self.model = model
        self._made: dict[tuple[str, str, bool], Plain] = {}

    @functools.cached_property
    def captured(self) -> Capture:
        model = self.model
        return capture(
            model.build(), model.batches()[0], dynamic_shapes=model.dynamic_shapes, decompose=model.decompose
        )

    def exported(self, *, strict: bool, spelling: str = MODULE) -> Plain:
        """The model as ``torch.export.export`` returns it."""
        return self._once("exported", spelling, strict, lambda: self._export(self.model.build(spelling), strict))

    def re_exported(self, *, strict: bool) -> Plain:
        """The graph module of the exported program, exported again."""
        program = self.exported(strict=strict).capture.program
        module = functools.partial(program.module, check_guards=False)
        return self._once("re_exported", MODULE, strict, lambda: self._export(module(), strict))

    def saved(self, *, strict: bool) -> Plain:
        """The exported program, saved and loaded."""
        return self._once("saved", MODULE, strict, lambda: self._save_and_load(strict))

    def _once(self, form: str, spelling: str, strict: bool, make: Callable[[], ExportedProgram]) -> Plain:
        key = form, spelling, strict
        if key not in self._made:
            program = make()
            assign_handles(program)
            made = Capture(program, self.model.batches()[0], {}, strict, self.model.name)
            first = key == ("exported", MODULE, False)
            wanted = made.names if first else self.exported(strict=False).names
            self._made[key] = Plain(made, same_names(made.names, wanted))
        return self._made[key]

    def _export(self, module: torch.nn.Module, strict: bool) -> ExportedProgram:
        shapes = self.model.dynamic_shapes
        return torch.export.export(module, self.model.batches()[0], dynamic_shapes=shapes, strict=strict)

    def _save_and_load(self, strict: bool) -> ExportedProgram:
        file = io.BytesIO()
        torch.export.save(self.exported(strict=strict).capture.program, file)
        file.seek(0)
        return torch.export.load(file)


def same_names(names: dict[int, OpName], wanted: dict[int, OpName]) -> dict[int, OpName]:
    """The names of a graph's ops in another graph of the same model, by handle.

    Ops are matched by graph order or, if the graphs differ in size, by kind and ordinal.
    """
    if len(names) == len(wanted):
        return dict(zip(names, wanted.values(), strict=True))
    known = dict(zip(_ordinals(wanted), wanted.values(), strict=True))
    return {
        handle: known.get(place, name) for (handle, name), place in zip(names.items(), _ordinals(names), strict=True)
    }


def _ordinals(names: dict[int, OpName]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    places = []
    for name in names.values():
        places.append((name.op, counts[name.op]))
        counts[name.op] += 1
    return places


@functools.lru_cache(maxsize=64)
def programs_of(model: ConformanceModel) -> Programs:
    """The graphs of a model, shared by all quantizers that are checked."""
    return Programs(model)
