"""A backend whose native code dies of one op; importable, since the process of its own has to find it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.interpreted import Interpreted, Program


def segmentation_fault(value: Tensor) -> Tensor:
    ctypes.string_at(0)
    return value


@dataclass(frozen=True)
class Crashing(Interpreted):
    """Aborts when a tanh is lowered, or reads address 0 when one runs."""

    lowers: bool = False

    def lower(self, graph: GraphModule, inputs: Sequence[Any], taps: Sequence[str], **given: Any) -> Program:
        names = [node.name for node in graph.graph.nodes if node.target is torch.ops.aten.tanh.default]
        if names and not self.lowers:
            os.abort()
        return replace(super().lower(graph, inputs, taps), wrong=dict.fromkeys(names, segmentation_fault))
