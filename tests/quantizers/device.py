"""What a lowered model computes: executorch alone, without anything of pt2qa."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.fx import GraphModule


def lowered(graph_module: GraphModule, *example: Tensor) -> bytes:
    """A converted graph as a ``.pte`` file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        exported = torch.export.export(graph_module, example)
        edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        return bytes(edge.to_executorch().buffer)


class XNNPACKDevice:
    """A converted graph, lowered to XNNPACK and loaded; ``method`` fails to load where a kernel refuses its scales."""

    def __init__(self, graph_module: GraphModule, *example: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from executorch.runtime import Runtime

            # The program reads this memory for as long as it lives.
            self.buffer = lowered(graph_module, *example)
        self.program = Runtime.get().load_program(self.buffer)
        self.method = self.program.load_method("forward")

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The first output."""
        output: Tensor = self.method.execute([value.contiguous() for value in inputs])[0]
        return output
