"""Tensors without memory of their own, such as torchao's ``quantize_`` puts in place of weights: refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from pt2qa._graph.internals.torch import is_traceable_wrapper_subclass
from pt2qa.errors import CaptureError, Pt2qaError


def refuse_subclasses(given: nn.Module | ExportedProgram, error: type[Pt2qaError] = CaptureError) -> None:
    """Refuses a model, graph or program whose parameters or buffers are tensor subclasses.

    Their ops dispatch to kernels of their own: there is no quantize op to analyse, and no memory to read.
    """
    found = [(name, type(value)) for name, value in _held(given) if is_traceable_wrapper_subclass(value)]
    if not found:
        return
    name, kind = found[0]
    others = f" ({len(found) - 1} more like it)" if len(found) > 1 else ""
    raise error(
        f"{name} is a tensor subclass, {kind.__module__}.{kind.__qualname__}{others}, as torchao's quantize_ puts in "
        "place of weights. pt2qa analyses what prepare_pt2e and convert_pt2e quantize. Pass the float model, before "
        "quantize_, or compare the outputs alone: pt2qa.sqnr(float_model(x), model(x))."
    )


def _held(given: nn.Module | ExportedProgram) -> Iterator[tuple[str, Any]]:
    if isinstance(given, ExportedProgram):
        yield from given.state_dict.items()
        yield from given.constants.items()
    else:
        yield from given.named_parameters()
        yield from given.named_buffers()
