"""Copies of graphs, without copies of their weights."""

from __future__ import annotations

import copy

from torch.fx import GraphModule


def copy_to_edit(graph_module: GraphModule) -> GraphModule:
    """A copy that shares the parameters, whose values are not to be changed; buffers are copied.

    ``prepare`` and quantizers set new parameters where they need other values, as to fold a batch norm.
    """
    return copy.deepcopy(graph_module, {id(parameter): parameter for parameter in graph_module.parameters()})
