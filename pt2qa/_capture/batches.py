"""Whether a batch fits a captured program.

Graphs with fixed sizes compute nonsense for other sizes, or fail deep inside, because ``view`` and ``expand`` contain
the captured numbers.  torch's own check, ``_guards_fn``, is a node that stays in the graph through prepare and convert,
and its message does not say what to do.  So graphs are made without it, and batches are checked here.
"""

from __future__ import annotations

import math
import reprlib
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from pt2qa._capture.inputs import leaf_names, refusal
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree, size_expression
from pt2qa.errors import BatchError


def check_inputs(program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Refuses inputs that do not have the number, names, nesting, dtypes and shapes of the captured ones.

    A dynamic dimension accepts every size in its range; dimensions that were captured as one must be equal.
    """
    kwargs = _in_captured_order(program, args, {} if kwargs is None else kwargs)
    leaves = leaf_names(args, kwargs)
    _check_nesting(program, args, kwargs)
    known: dict[Any, tuple[int, str]] = {}
    later: list[tuple[Any, int, str]] = []
    for node, (leaf, value) in zip(_inputs(program), leaves, strict=True):
        name = f"{leaf} ({node.target})"
        expected = node.meta.get(VALUE)
        if isinstance(expected, Tensor):
            _check_tensor(name, value, expected)
            for axis, (size, captured) in enumerate(zip(value.shape, expected.shape, strict=True)):
                if isinstance(captured, torch.SymInt):
                    later.append((size_expression(captured), int(size), f"{name} has size {size} in dimension {axis}"))
        elif not isinstance(expected, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            _check_constant(name, value, expected)
    # Plain symbols first: derived sizes such as 2*s0 are then checked with their values.
    for expression, size, what in sorted(later, key=lambda entry: not entry[0].is_Symbol):
        _check_size(program, expression, size, what, known)


def _inputs(program: ExportedProgram) -> list[Node]:
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [placeholders[name] for name in names]


def _in_captured_order(program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    spec = program.call_spec.in_spec
    assert spec is not None
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


def _check_nesting(program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    captured = program.call_spec.in_spec
    given = pytree.tree_structure((args, kwargs))
    assert captured is not None
    if given != captured:
        for i, (a, b) in enumerate(zip(given.child(0).children(), captured.child(0).children(), strict=True)):
            if a != b:
                raise BatchError(f"args[{i}] is {_nesting(a)}; captured with {_nesting(b)}.")
        for name, a, b in zip(kwargs, given.child(1).children(), captured.child(1).children(), strict=True):
            if a != b:
                raise BatchError(f"kwargs[{name!r}] is {_nesting(a)}; captured with {_nesting(b)}.")


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
    program: ExportedProgram, expression: Any, size: int, what: str, known: dict[Any, tuple[int, str]]
) -> None:
    value = expression.subs({symbol: bound for symbol, (bound, _) in known.items()})
    if value.is_number:
        if int(value) != size:
            others = "; ".join(text for symbol, (_, text) in known.items() if symbol in expression.free_symbols)
            raise BatchError(f"{what}; expected {int(value)} ({expression}), because {others}.")
        return
    allowed = program.range_constraints.get(expression)
    # As in torch: a range that starts at 2 only means that sizes 0 and 1 were not traced separately.
    if allowed is not None and not (size <= allowed.upper and (size >= allowed.lower or allowed.lower <= 2)):
        raise BatchError(f"{what}; captured for sizes from {allowed.lower} to {_upper(allowed.upper)}.")
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


def _upper(bound: Any) -> str:
    return "any" if not bound.is_number or bound == math.inf or not bound.is_finite else str(bound)


def _shape(value: Tensor) -> str:
    return str([size if isinstance(size, int) else str(size) for size in value.shape]).replace("'", "")
