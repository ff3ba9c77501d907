"""Copies of graphs and programs, without copies of their weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

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


def set_parameters(graph_module: GraphModule, values: Mapping[str, Tensor]) -> None:
    """Gives parameters of a graph other values, in place; other graphs that have the same parameters keep theirs."""
    for target, value in values.items():
        module, _, name = target.rpartition(".")
        setattr(graph_module.get_submodule(module), name, nn.Parameter(value, requires_grad=False))


def _parameters(given: GraphModule | ExportedProgram) -> Iterable[Any]:
    held = given.parameters() if isinstance(given, GraphModule) else given.state_dict.values()
    return (each for each in held if isinstance(each, nn.Parameter))
