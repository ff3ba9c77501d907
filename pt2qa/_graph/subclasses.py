"""Tensors without memory of their own, such as torchao's ``quantize_`` puts in place of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from pt2qa._graph.internals.torch import is_traceable_wrapper_subclass
from pt2qa.errors import CaptureError, Pt2qaError


def subclasses_in(given: object) -> list[tuple[str, type]]:
    """The parameters and buffers of a model, graph or program that are tensor subclasses, by name."""
    return [(name, type(value)) for name, value in _held(given) if is_traceable_wrapper_subclass(value)]


def with_tensors(program: ExportedProgram) -> ExportedProgram:
    """The program with plain tensors in the place of subclasses: itself where it has none."""
    return program.run_decompositions({}) if subclasses_in(program) else program


def refuse_subclasses(given: object, error: type[Pt2qaError] = CaptureError) -> None:
    """Refuses what holds tensor subclasses, where there must be tensors with memory, read by ops that quantize."""
    if found := subclasses_in(given):
        name, kind = found[0]
        others = f" ({len(found) - 1} more like it)" if len(found) > 1 else ""
        raise error(
            f"{name} is a tensor subclass, {kind.__module__}.{kind.__qualname__}{others}, as torchao's quantize_ puts "
            "in place of weights. Capture the float model, as it was before quantize_, and pair the two: "
            "pt2qa.pair(capture, model)."
        )


def _held(given: object) -> Iterator[tuple[str, Any]]:
    if isinstance(given, ExportedProgram):
        yield from given.state_dict.items()
        yield from given.constants.items()
    elif isinstance(given, nn.Module):
        yield from given.named_parameters()
        yield from given.named_buffers()
