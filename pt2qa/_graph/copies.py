"""Copies of graphs and programs, without copies of their weights."""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

_Exported = TypeVar("_Exported", GraphModule, ExportedProgram)


def copy_to_edit(given: _Exported) -> _Exported:
    """A copy that shares the parameters, whose values are not to be changed; buffers are copied.

    ``prepare`` and quantizers set new parameters where they need other values, as to fold a batch norm.
    """
    return copy.deepcopy(given, {id(parameter): parameter for parameter in _parameters(given)})


def copy_nodes(graph_module: GraphModule) -> GraphModule:
    """A copy whose nodes can be edited, those of nested graphs too; all parameters and buffers are shared."""
    copied = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    copied.meta.update(graph_module.meta)
    for name, nested in list(copied.named_children()):
        if isinstance(nested, GraphModule):
            setattr(copied, name, copy_nodes(nested))
    return copied


def copy_without_values(graph_module: GraphModule) -> GraphModule:
    """A copy whose parameters and buffers are on the meta device, for edits that depend on no value."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in graph_module.buffers()}
    for parameter in graph_module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(graph_module, memo)


def share_constants(graph_module: GraphModule, like: GraphModule) -> None:
    """Gives a graph the constants of another where they are equal, in place, so that each is in memory once."""
    known: dict[Any, list[Tensor]] = defaultdict(list)
    for constant in _constants(like).values():
        known[_key(constant)].append(constant)
    for target, constant in _constants(graph_module).items():
        equal = next((each for each in known.get(_key(constant), ()) if torch.equal(each, constant)), None)
        if equal is not None:
            module, _, name = target.rpartition(".")
            setattr(graph_module.get_submodule(module), name, equal)


def _constants(graph_module: GraphModule) -> dict[str, Tensor]:
    """What the graph reads of the module, but for parameters, by name."""
    targets = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    read = {target: operator.attrgetter(target)(graph_module) for target in sorted(targets)}
    return {target: x for target, x in read.items() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)}


def _key(constant: Tensor) -> Any:
    return constant.dtype, constant.shape, constant.stride(), constant.device, str(constant.flatten()[:64].tolist())


def _parameters(given: GraphModule | ExportedProgram) -> Iterable[Any]:
    held = given.parameters() if isinstance(given, GraphModule) else given.state_dict.values()
    return (each for each in held if isinstance(each, nn.Parameter))
