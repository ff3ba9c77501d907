"""Example inputs and batches: their form, names and device, and whether they are what a program was captured with.

Graphs with fixed sizes compute nonsense for other sizes, or fail deep inside, because ``view`` and ``expand`` contain
the captured numbers.  torch's own check, ``_guards_fn``, is a node that stays in the graph through prepare and convert,
and its message does not say what to do.  So graphs are made without it, and batches are checked here.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from pt2qa._graph.handles import user_inputs
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import is_traceable_wrapper_subclass, pytree, size_expression
from pt2qa.errors import BatchError, CaptureError

Values = TypeVar("Values")


def as_call(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs, of a tuple, one tensor or a dict."""
    if isinstance(args, Mapping):
        if kwargs is not None:
            raise CaptureError(
                "args is a dict, which means keyword inputs, and kwargs is given too. ",
                "Pass positional inputs as a tuple in args, or everything in one dict.",
            )
        args, kwargs = (), dict(args)
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, tuple):
        reason = refusal("args", args)
        if reason is not None:
            raise CaptureError(*reason)
        hint = "Pass tuple(args)." if isinstance(args, list) else "Pass (value,) for one input that is not a tensor."
        raise CaptureError(
            f"args is of type {type(args).__name__}; expected a tuple of positional inputs, a tensor, or a dict of "
            "keyword inputs. ",
            hint,
        )
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        given = f"a dict with the keys {[*kwargs]}" if isinstance(kwargs, dict) else f"of type {type(kwargs).__name__}"
        raise CaptureError(f"kwargs is {given}; expected a dict of input names and values.")
    return args, kwargs


def leaf_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every leaf of nested inputs with its name, such as ``args[1]`` or ``kwargs['state'][0]``."""
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
    return [(("args", "kwargs")[path[0].idx] + pytree.keystr(path[1:]), value) for path, value in leaves]  # type: ignore[attr-defined]


def refusal(name: str, value: object) -> tuple[str, str] | None:
    """Why a value cannot be an input, and what to pass instead, as sentences; None if it can."""
    if isinstance(value, np.ndarray):
        what = f"a NumPy array of shape {list(value.shape)} and dtype {value.dtype}"
        return f"{name} is {what}; expected a tensor. ", "Pass torch.from_numpy(...) of it."
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        return f"{name} is of type {type(value).__qualname__}, a tensor subclass; expected a plain tensor.", ""
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        what = f"{name} has the layout {layout}; expected a dense tensor, as quantization takes it. "
        return what, "Pass its to_dense()."
    return None


def without_gradients(value: Tensor) -> Tensor:
    """The tensor, with its memory if possible, for a run that records no gradients of it.

    torch does not allow a tensor from inference mode in a run that records gradients.
    """
    if value.is_inference():
        value = value.clone()
    return value.detach() if value.requires_grad or isinstance(value, nn.Parameter) else value


def detached(values: Any) -> Any:
    """A copy of values, nested or not, that keeps none of their memory alive and that nothing else writes to."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), values)


def refuse_unusable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name, value in leaf_names(args, kwargs):
        reason = refusal(f"example input {name}", value)
        if reason is not None:
            raise CaptureError(*reason)


def refuse_aliases(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses example inputs that share memory with each other, or with a parameter or buffer of the model.

    If one tensor is passed twice, ``torch.export`` turns it into one input; if a parameter is passed as an input, it
    confuses the two.  The program then silently reads the wrong one.
    """
    inputs = [(name, value) for name, value in leaf_names(args, kwargs) if isinstance(value, Tensor)]
    for (first, a), (second, b) in combinations(inputs, 2):
        if share_memory(a, b):
            what = "are the same tensor" if a is b else "share memory"
            raise CaptureError(
                f"example inputs {first} and {second} {what}; expected separate tensors, because torch.export would "
                "make one input of both. ",
                f"Pass {second}.clone().",
            )
    state: list[tuple[str, Tensor]] = [(f"parameter {name!r}", value) for name, value in model.named_parameters()]
    state += [(f"buffer {name!r}", value) for name, value in model.named_buffers()]
    for (what, own), (leaf, value) in product(state, inputs):
        if share_memory(own, value):
            raise CaptureError(
                f"example input {leaf} shares memory with the model's {what}; expected a separate tensor, because "
                "torch.export would take one for the other. ",
                f"Pass {leaf}.detach().clone().",
            )


def share_memory(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if any(t.layout is not torch.strided or not t.numel() or t.device.type == "meta" for t in (a, b)):
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.dtype != b.dtype:
        return True
    used = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool)
    used.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(used.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def common_device(values: Iterable[Any]) -> torch.device | None:
    """The one device that all tensors lie on; None if there is no tensor, or if they lie on several."""
    found = {value.device for value in values if isinstance(value, Tensor)}
    return found.pop() if len(found) == 1 else None


def device_of(model: nn.Module) -> torch.device | None:
    return common_device([*model.parameters(), *model.buffers()])


def moved(values: Values, device: torch.device | None) -> Values:
    """Nested values with all tensors on a device, except for meta tensors; ``None`` leaves them where they are."""
    if device is None:
        return values
    found: Values = pytree.tree_map_only(Tensor, lambda each: each if each.is_meta else each.to(device), values)
    return found


def check_inputs(program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Refuses inputs that do not have the number, names, nesting, dtypes and shapes of the captured ones.

    A dynamic dimension accepts every size in its range; dimensions that were captured as one must be equal.
    """
    checked_inputs(program.call_spec.in_spec, user_inputs(program), args, kwargs or {}, program.range_constraints)


def checked_inputs(
    spec: pytree.TreeSpec | None,
    nodes: Sequence[Node],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ranges: Mapping[Any, Any],
) -> list[Any]:
    """The values of inputs in the order of a graph's placeholders, checked as :func:`check_inputs` does.

    ``spec`` is that of positional and keyword inputs, None if the graph does not say; ``ranges`` are by dynamic size.
    """
    if spec is not None:
        kwargs = _in_captured_order(spec, args, kwargs)
        _check_nesting(spec, args, kwargs)
    leaves = leaf_names(args, kwargs)
    if len(leaves) != len(nodes):
        raise BatchError(f"the batch has {len(leaves)} inputs; the graph takes {len(nodes)}.")
    known: dict[Any, tuple[int, str]] = {}
    later: list[tuple[Any, int, str]] = []
    for node, (leaf, value) in zip(nodes, leaves, strict=True):
        name = f"{leaf} ({node.target})"
        if VALUE not in node.meta:
            continue
        expected = node.meta[VALUE]
        if isinstance(expected, Tensor):
            _check_tensor(name, value, expected)
            for axis, (size, captured) in enumerate(zip(value.shape, expected.shape, strict=True)):
                if isinstance(captured, torch.SymInt):
                    later.append((size_expression(captured), int(size), f"{name} has size {size} in dimension {axis}"))
        elif not isinstance(expected, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            _check_constant(name, value, expected)
    # Plain symbols first: derived sizes such as 2*s0 are then checked with their values.
    for expression, size, what in sorted(later, key=lambda entry: not entry[0].is_Symbol):
        _check_size(ranges, expression, size, what, known)
    return [value for _, value in leaves]


def _in_captured_order(spec: pytree.TreeSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = list(spec.child(1).context)
    positional = spec.child(0).num_children
    if len(args) != positional:
        raise BatchError(
            f"the batch has {len(args)} positional inputs; captured with {positional}"
            + (f" and the keywords {names}" if names else "")
            + ". "
            + ("Pass a dict of these. " if names and not positional else "")
            + "If a batch holds targets too, pass its inputs only (inputs_of=lambda item: item[0])."
        )
    unknown, missing = [name for name in kwargs if name not in names], [name for name in names if name not in kwargs]
    if unknown or missing:
        found = [f"unknown keywords {unknown}"] * bool(unknown) + [f"no {missing}"] * bool(missing)
        raise BatchError(f"the batch has {' and '.join(found)}; captured with the keywords {names}.")
    return {name: kwargs[name] for name in names}


def _check_nesting(captured: pytree.TreeSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = pytree.tree_structure((args, kwargs))
    if given != captured:
        names = [*(f"args[{i}]" for i in range(len(args))), *(f"kwargs[{name!r}]" for name in kwargs)]
        parts = ([*spec.child(0).children(), *spec.child(1).children()] for spec in (given, captured))
        for name, a, b in zip(names, *parts, strict=True):
            if a != b:
                raise BatchError(f"{name} is {_nesting(a)}; captured with {_nesting(b)}.")


def _check_tensor(name: str, value: Any, expected: Tensor) -> None:
    reason = refusal(name, value)
    if reason is not None:
        raise BatchError("".join(reason))
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} is {reprlib.repr(value)}; captured with a tensor of shape {_shape(expected)}.")
    if value.dtype != expected.dtype:
        raise BatchError(f"{name} has dtype {value.dtype}; captured with {expected.dtype}. Convert the batch.")
    if value.device.type != expected.device.type:
        raise BatchError(f"{name} is on {value.device}; captured on {expected.device}. Move the batch.")
    fits = value.dim() == expected.dim() and all(
        isinstance(captured, torch.SymInt) or size == captured
        for size, captured in zip(value.shape, expected.shape, strict=False)
    )
    if not fits:
        hint = ""
        if value.dim() == expected.dim():
            key = name.partition("(")[2].removesuffix(")")
            # A symbolic size must not be compared, because that would specialise it in the program.
            fixed = [i for i, size in enumerate(expected.shape) if isinstance(size, int) and size != value.shape[i]]
            dims = ", ".join(f"{i}: torch.export.Dim.AUTO" for i in fixed)
            hint = f" To allow other sizes, capture with dynamic_shapes={{{key!r}: {{{dims}}}, ...}}."
        raise BatchError(f"{name} has shape {list(value.shape)}; captured with {_shape(expected)}.{hint}")


def _check_constant(name: str, value: Any, expected: Any) -> None:
    if isinstance(value, Tensor) or type(value) is not type(expected) or value != expected:
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise BatchError(
            f"{name} is {shown}; captured with {expected!r}, which is part of the graph. Capture again with it."
        )


def _check_size(
    ranges: Mapping[Any, Any], expression: Any, size: int, what: str, known: dict[Any, tuple[int, str]]
) -> None:
    value = expression.subs({symbol: bound for symbol, (bound, _) in known.items()})
    if value.is_number:
        if int(value) != size:
            others = "; ".join(text for symbol, (_, text) in known.items() if symbol in expression.free_symbols)
            raise BatchError(f"{what}; expected {int(value)} ({expression}), because {others}.")
        return
    allowed = ranges.get(expression)
    # As in torch: a range that starts at 2 only means that sizes 0 and 1 were not traced separately.
    if allowed is not None and not (size <= allowed.upper and (size >= allowed.lower or allowed.lower <= 2)):
        upper = allowed.upper if allowed.upper.is_number and allowed.upper.is_finite else "any"
        raise BatchError(f"{what}; captured for sizes from {allowed.lower} to {upper}.")
    if value.is_Symbol:
        known[value] = (size, what)
        return
    if len(value.free_symbols) == 1:
        # torch derives sizes only as a * symbol + b.
        (symbol,) = value.free_symbols
        offset = value.subs(symbol, 0)
        solution = (size - offset) / (value.subs(symbol, 1) - offset)
        if not solution.is_integer:
            raise BatchError(f"{what}; captured for sizes of the form {expression}.")
        known[symbol] = (int(solution), what)


def _nesting(spec: pytree.TreeSpec) -> str:
    return "a single value" if spec.is_leaf() else f"nested as {spec}"


def _shape(value: Tensor) -> str:
    return str([size if isinstance(size, int) else str(size) for size in value.shape]).replace("'", "")
