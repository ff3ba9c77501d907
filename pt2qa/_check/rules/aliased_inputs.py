"""Example inputs that share memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from torch import Tensor

from pt2qa._capture.inputs import as_call, leaf_names, share_memory
from pt2qa._check.context import CheckContext
from pt2qa.errors import CaptureError
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Pairs of example inputs, and inputs that are parameters of the model, by the name of the second."""
    args, kwargs = _inputs(context)
    inputs = [(name, value) for name, value in leaf_names(args, kwargs) if isinstance(value, Tensor)]
    for (first, a), (second, b) in combinations(inputs, 2):
        if share_memory(a, b):
            yield Found(second, f"is one tensor with {first}" if a is b else f"shares memory with {first}")
    state = context.program.state_dict.items() if context.given == "program" else context.model.state_dict().items()
    for owned, tensor in state:
        for name, value in inputs:
            if isinstance(tensor, Tensor) and share_memory(tensor, value):
                yield Found(name, f"shares memory with the model's {owned}")


def _inputs(context: CheckContext) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if context.given == "program":
        # Not those of a copy, which shares nothing.
        examples = context.value.example_inputs
        if examples is None:
            raise DoesNotApplyError("to programs without example inputs")
        return examples  # type: ignore[no-any-return]
    if context.given != "model":
        raise DoesNotApplyError("to what was captured with inputs that are not known any more")
    if context.args is None and context.kwargs is None:
        raise DoesNotApplyError("for a model with example inputs: pt2qa.check(model, args)")
    try:
        return as_call(context.args, context.keywords)
    except CaptureError as error:
        raise DoesNotApplyError(f"to inputs that capture refuses: {error}") from error


RULE = Rule(
    id="aliased-inputs",
    severity="error",
    title="example inputs that share memory",
    why="torch.export takes tensors that are one, such as h = c = zeros, for one input: the program reads one of them "
    "in the place of both, and its outputs are wrong without a word.",
    fix="give each input a tensor of its own: pass h.clone()",
    find=find,
)
