"""Batches: from what users pass to the flat list of values that a graph takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

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


def output_names(graph_module: GraphModule, count: int) -> list[str]:
    """``output``, ``output[1]``, ``output.logits``: where each of ``count`` leaves sits in what the model returns."""
    spec = _out_spec(graph_module, count)
    if spec is not None:
        return leaf_names(pytree.tree_unflatten(list(range(count)), spec))
    return [f"output[{number}]" for number in range(count)] if count > 1 else ["output"]


def structured(graph_module: GraphModule, outputs: Any) -> Any:
    """The flat outputs of a run, nested as the model returns them."""
    leaves = flat_outputs(outputs)
    spec = _out_spec(graph_module, len(leaves))
    if spec is not None:
        return pytree.tree_unflatten(leaves, spec)
    return leaves[0] if len(leaves) == 1 else tuple(leaves)


def is_tensor(leaf: Any) -> bool:
    """Whether an output of a graph is a tensor, not a number, a size or None."""
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(leaf, Node) and not isinstance(leaf.meta.get(VALUE), numbers)


def tensor_outputs(graph_module: GraphModule) -> dict[int, str]:
    """The names of a graph's outputs that are tensors, by their number among all of them."""
    leaves = flat_outputs(graph_module.graph.output_node().args[0])
    names = enumerate(output_names(graph_module, len(leaves)))
    return {number: name for number, name in names if is_tensor(leaves[number])}


def flat_outputs(outputs: Any) -> list[Any]:
    """The leaves of what a run or a graph returns, None, numbers and sizes included."""
    return pytree.tree_leaves(plain(outputs))


def leaves_of(outputs: Any) -> list[Any]:
    """The flat outputs of a run, without None, numbers and sizes, which are not compared."""
    return [leaf for leaf in flat_outputs(outputs) if isinstance(leaf, Tensor)]


def leaf_names(value: Any) -> list[str]:
    """The name of each leaf of a nested value.

    >>> leaf_names({"logits": 1, "rest": (2, 3)})
    ['output.logits', 'output.rest[0]', 'output.rest[1]']
    """
    paths, _ = pytree.tree_flatten_with_path(value)
    return [
        "output" + "".join(f".{part.key}" if isinstance(part, pytree.MappingKey) else str(part) for part in path)
        for path, _ in paths
    ]


def named_parts(value: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """A nested value and everything in it, whole tuples and dicts too, each with its name.

    >>> [name for name, _ in named_parts((1, {"h": 2}))]
    ['output', 'output[0]', 'output[1]', 'output[1].h']
    """
    yield name, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from named_parts(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from named_parts(item, f"{name}[{number}]")


def plain(outputs: Any) -> Any:
    """Converts fx's immutable containers to plain ones, which pytree can flatten."""
    if isinstance(outputs, (list, tuple)):
        return [plain(item) for item in outputs]
    if isinstance(outputs, dict):
        return {key: plain(item) for key, item in outputs.items()}
    return outputs


def nbytes_of(outputs: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))


def _out_spec(graph_module: GraphModule, count: int) -> Any:
    convention = calling_convention(graph_module)
    spec = None if convention is None else convention.out_spec
    return spec if spec is not None and spec.num_leaves == count else None
