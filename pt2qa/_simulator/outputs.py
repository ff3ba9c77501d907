"""Outputs: what a graph returns, and the names of its parts in reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import calling_convention, pytree


def output_names(graph_module: GraphModule, count: int) -> list[str]:
    """``output``, ``output[1]``, ``output.logits``: where each of ``count`` leaves sits in what the model returns.

    A graph of ``torch.export`` knows how the model nests its outputs.
    """
    spec = _out_spec(graph_module, count)
    if spec is not None:
        return leaf_names(pytree.tree_unflatten(list(range(count)), spec))
    return [f"output[{number}]" for number in range(count)] if count > 1 else ["output"]


def structured(graph_module: GraphModule, outputs: Any) -> Any:
    """The flat outputs of a run, nested as the model returns them."""
    leaves = pytree.tree_leaves(plain(outputs))
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
    leaves = pytree.tree_leaves(plain(graph_module.graph.output_node().args[0]))
    names = enumerate(output_names(graph_module, len(leaves)))
    return {number: name for number, name in names if is_tensor(leaves[number])}


def leaves_of(outputs: Any) -> list[Any]:
    """The flat outputs of a run, without None, numbers and sizes, which are not compared."""
    return [leaf for leaf in pytree.tree_leaves(plain(outputs)) if isinstance(leaf, Tensor)]


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
