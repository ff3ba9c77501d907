"""Batches: from what users pass to the flat list of values that a graph takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._capture.aliases import Aliases
from pt2qa._capture.inputs import checked_inputs, common_device, moved, without_gradients
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import calling_convention, pytree
from pt2qa.errors import BatchError

Batch = Any
"""A tensor, a tuple or list of positional inputs, or a dict of keyword inputs."""


def as_call(batch: Batch, graph_module: GraphModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the positional and keyword inputs of a graph.

    A dict may also name positional inputs, by the names of forward's parameters, if it names all of them.  Tensors that
    require grad are detached, so that no run writes gradients into the caller's tensors.  Tensors are moved to the
    device of the graph's inputs, unless these lie on several.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        spec = _call_spec(graph_module)
        positional = input_names(graph_module)[: spec.child(0).num_children] if spec is not None else []
        missing = [name for name in positional if name not in batch]
        if missing:
            known = [*positional, *spec.child(1).context]
            raise BatchError(
                f"the batch is a dict with the keys {list(batch)}, without {missing}; the model takes the inputs "
                f"{known}. Name every input, or pass a tuple of positional inputs."
            )
        args = tuple(batch[name] for name in positional)
        kwargs = {name: value for name, value in batch.items() if name not in positional}
    else:
        args = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    device = common_device(node.meta.get(VALUE) for node in graph_module.graph.find_nodes(op="placeholder"))
    return moved(pytree.tree_map_only(Tensor, without_gradients, (args, kwargs)), device)  # type: ignore[no-any-return]


def as_batch(args: tuple[Any, ...], kwargs: dict[str, Any], graph_module: GraphModule) -> Batch:
    """The inverse of :func:`as_call`: the inputs of a call of a graph, as a batch."""
    if not kwargs:
        return args
    if not args:
        return kwargs
    return {**dict(zip(input_names(graph_module), args, strict=False)), **kwargs}


def input_names(graph_module: GraphModule) -> list[str]:
    """The names of forward's parameters, or of the placeholders if the graph does not know them."""
    convention = calling_convention(graph_module)
    if convention is None:
        return [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
    return list(convention.orig_args)


def plain_batch(batch: Batch) -> Batch:
    """The batch; a mapping as a dict, because what a tokenizer returns is a mapping but not a dict."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def flatten_batch(graph_module: GraphModule, batch: Batch) -> list[Any]:
    """The values of a batch in the order of the graph's placeholders, if all fits the captured inputs."""
    args, kwargs = as_call(batch, graph_module)
    nodes = graph_module.graph.find_nodes(op="placeholder")
    return checked_inputs(_call_spec(graph_module), nodes, args, kwargs, {})


def _call_spec(graph_module: GraphModule) -> Any:
    """The input spec of a graph that takes a tuple of positional and a dict of keyword inputs, else None."""
    convention = calling_convention(graph_module)
    if convention is None or convention.in_spec.num_children != 2:
        return None
    spec = convention.in_spec
    return spec if spec.child(0).type is tuple and spec.child(1).type is dict else None


def count_samples(values: list[Any], axis: int = 0) -> int:
    """Length of an axis of the first tensor that has it; 1 if none does."""
    return next((int(value.shape[axis]) for value in values if isinstance(value, Tensor) and value.dim() > axis), 1)


def has_no_element(values: Sequence[Any]) -> bool:
    """Whether a batch has tensors, and all of them are empty: then neither model need run, and many ops could not."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return bool(tensors) and not any(value.numel() for value in tensors)


def written_buffers(graph_module: GraphModule) -> tuple[str, ...]:
    buffers = dict(graph_module.named_buffers())
    held = [node for node in graph_module.graph.find_nodes(op="get_attr") if str(node.target) in buffers]
    return tuple(dict.fromkeys(str(node.target) for node in Aliases(graph_module).written(held)))


@contextmanager
def buffers_kept(graph_module: torch.nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Gives buffers their values back after a run, for graphs whose forward writes to them."""
    saved = {name: graph_module.get_buffer(name).clone() for name in names}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in saved.items():
                graph_module.get_buffer(name).copy_(value)
