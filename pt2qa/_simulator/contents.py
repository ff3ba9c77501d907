"""What graphs compute with: their nodes, and what is in their parameters, buffers and constants.

A program holds values that were made from these.  They may be written to at any time: by ``load_state_dict``, which
raises the version that torch counts for a tensor; through ``.data`` or NumPy, which does not; or with the same values
as before, as a model with state is given its buffers back.  So what counts is their content, of which a checksum is
compared.  With 1 GB of linears that takes 0.17 s, where ``compare_layers`` of 8 rows takes 1 s.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2qa._simulator.verification import bytes_of

_ROWS, _WORDS = 16, 4096
"""A block of words of 8 bytes that is summed by rows and by columns: half a megabyte, which stays in cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What some graphs computed with at one moment.

    Attributes:
        nodes: of each node, what may be set anew; these objects cannot change, and are compared by identity.
        constants: of each tensor its name, what it looks like, and a checksum.
    """

    nodes: tuple[object, ...]
    constants: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, graphs: Iterable[GraphModule]) -> Contents:
        modules = [(path, module) for graph in graphs for path, module in graph.named_modules(remove_duplicate=False)]
        nodes = [part for _, module in modules if isinstance(module, GraphModule) for part in _nodes(module)]
        known: dict[int, tuple[Any, ...]] = {}
        constants = []
        for path, module in modules:
            for name, tensor in _tensors(module):
                if id(tensor) not in known:
                    looks = isinstance(tensor, nn.Parameter), tensor.dtype, tuple(tensor.shape), tensor.stride()
                    known[id(tensor)] = (len(known), *looks, tensor.device, checksum(tensor))
                constants.append((path, name, *known[id(tensor)]))
        return cls(tuple(nodes), tuple(constants))

    def equal(self, other: Contents) -> bool:
        """Whether a program of the one is a program of the other."""
        return (
            self.constants == other.constants
            and len(self.nodes) == len(other.nodes)
            and all(map(operator.is_, self.nodes, other.nodes))
        )


def _nodes(graph: GraphModule) -> Iterator[object]:
    for node in graph.graph.nodes:
        yield from (node, node.target, node.args, node.kwargs)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
    yield from ((name, value) for name, value in vars(module).items() if isinstance(value, Tensor))


def checksum(tensor: Tensor) -> int:
    """A number for the elements of a tensor; it takes one pass at the speed of a sum.

    Of large tensors, it is made from sums of bytes by row and by column, which notice any change of few values, and any
    exchange of two.
    """
    if tensor.is_meta:
        return 0
    if tensor.numel() * tensor.element_size() < 8 * _ROWS * _WORDS:
        return hash(bytes_of(tensor))
    strides = tensor.stride()
    flat = tensor.detach().permute(sorted(range(len(strides)), key=lambda axis: -strides[axis])).reshape(-1)
    size = 8 * _ROWS * _WORDS // flat.element_size()
    blocks = flat.split(size)
    whole = [block for block in blocks if len(block) == size]
    sums = [torch.zeros(_WORDS, dtype=torch.int64, device=flat.device)]
    for block in whole:
        # A view of other words needs an address that these may have.
        aligned = block if block.storage_offset() * block.element_size() % 8 == 0 else block.clone()
        words = aligned.view(torch.uint8).view(torch.int64).view(_ROWS, _WORDS)
        sums[0].add_(words.sum(0))
        sums.append(words.sum(1))
    rest = blocks[len(whole) :]
    return hash((*map(bytes_of, rest), bytes_of(torch.cat(sums))))
