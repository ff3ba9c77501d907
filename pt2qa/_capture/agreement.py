"""Whether a captured program computes what the model computes, and whether the model agrees with itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2qa._graph.agreement import agreement_in, compare_outputs, difference
from pt2qa._graph.internals.torch import pytree
from pt2qa._report.prose import few
from pt2qa.errors import CaptureError

AGREEMENT_DB = 100.0
"""Below this, a float32 program computes something else: kernels that merely sum in another order agree to 120 dB."""


class State:
    """A copy of a model's current buffers, to restore them later."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [
            (f"{path}.{name}" if path else name, module, name, value, value.detach().clone())
            for path, module in model.named_modules()
            for name, value in module.named_buffers(recurse=False, remove_duplicate=False)
        ]

    def changed(self) -> tuple[str, ...]:
        return tuple(
            path
            for path, module, name, value, saved in self._saved
            if getattr(module, name, None) is not value or difference(value, saved, math.inf)
        )

    def restore(self) -> None:
        changed = set(self.changed())
        for path, module, name, value, saved in self._saved:
            # Tracing records gradients on a buffer that forward reaches past the module, as through a cache object.
            if value.grad_fn is not None:
                value.detach_()
            if path in changed:
                setattr(module, name, value)
                with torch.no_grad():
                    value.copy_(saved)


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a model or graph returns for copies of the inputs."""
    args, kwargs = pytree.tree_map_only(Tensor, lambda value: value.detach().clone(), (args, kwargs))
    return pytree.tree_map_only(Tensor, lambda value: value.detach().clone(), function(*args, **kwargs))


def run_eager(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        with torch.no_grad():
            return run(model, args, kwargs)
    except Exception as error:
        raise CaptureError(
            f"the model fails on its example inputs, before any export: {type(error).__name__}: {error}. ",
            "Call model(*args, **kwargs) to see where.",
        ) from error


def check_stateless(
    model: nn.Module, state: State, eager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """The buffers that the run that returned ``eager`` changed after ``state``; restores them."""
    changed = state.changed()
    found = compare_outputs(eager, run_eager(model, args, kwargs), AGREEMENT_DB) if changed else None
    state.restore()
    if found is not None:
        raise CaptureError(
            f"the model keeps state: forward changes its buffers {few([repr(name) for name in changed])}, and {found} "
            "between two runs of one input. ",
            "pt2qa compares runs of one input: take the state as an input and return the new one.",
        )
    return changed


def check_agreement(
    model: nn.Module, state: State, eager: Any, program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuses a program whose outputs are not its model's: floats to :data:`AGREEMENT_DB`, all others exactly.

    ``eager`` is what the model returned, and ``state`` are its buffers before that run.
    """
    least = agreement_in(program.graph, AGREEMENT_DB)
    with torch.no_grad():
        captured = run(program, args, kwargs)
        found = compare_outputs(eager, captured, least)
        if found is None:
            return
        own = compare_outputs(eager, run(model, args, kwargs), least)
        state.restore()
    # torch.export traces with gradients on.  Without them, torch.nn's transformer layers take another path, which
    # writes zeros where a mask covers the input.
    traced = run(model, args, kwargs)
    state.restore()
    if own is None and compare_outputs(traced, captured, least) is None:
        return
    if own is not None:
        raise CaptureError(
            f"the model is not deterministic: {own} between two runs of one input in eval mode. It is "
            "random (torch.rand, a dropout that ignores eval()) or keeps state in Python attributes. ",
            "pt2qa compares runs of one input: make forward deterministic.",
        )
    raise CaptureError(
        f"the captured program does not compute what the model computes: {found} on the example "
        "inputs. Values that forward reads from outside, branches on values and writes to views of a tensor are the "
        "usual causes. ",
        "Try the other strict=, and compare torch.export.export(model, args).module() with the model.",
    )
