"""Internals of executorch, told by their attributes: it takes seconds to import."""

from __future__ import annotations

from typing import Any

from pt2qa._graph.internals.torch import OpOverload


def aten_op(target: Any) -> Any:
    """The op of torch that an op of an edge program wraps and calls; any other target as it is."""
    wrapped = None if isinstance(target, OpOverload) else getattr(target, "_op", None)
    return wrapped if isinstance(wrapped, OpOverload) else target


def is_delegate(target: Any) -> bool:
    """Whether a node calls a part of the graph that a backend took; in Python, its ops run instead."""
    return getattr(target, "__name__", "") == "executorch_call_delegate"
