"""A backend that computes what a converted graph says, node by node, but for what a test lets it do wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pt2qa.errors import DeploymentError
from pt2qa.plugins import Ran


class _Walk(Interpreter):
    def __init__(self, graph: GraphModule, wrong: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__(graph)
        self.wrong, self.values = wrong, dict[str, Any]()

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for name, change in self.wrong.items():
            value = change(value) if n.name == name else value
        self.values[n.name] = value
        return value


@dataclass(frozen=True)
class Program:
    graph: GraphModule
    wrong: Mapping[str, Callable[[Tensor], Tensor]]
    taps: Mapping[str, str]
    delegated: frozenset[int] = frozenset()
    facts: tuple[str, ...] = ("node by node",)
    size: int = 1000

    def run(self, inputs: Sequence[Any]) -> Ran:
        walk = _Walk(self.graph, self.wrong)
        with torch.no_grad():
            outputs = walk.run(*inputs)
        return Ran(tuple(outputs), {name: walk.values[name] for name in self.taps})

    def run_alone(self, inputs: Sequence[Any]) -> Ran:
        return Ran(self.run(inputs).outputs)

    def save(self, folder: Path) -> None:
        raise DeploymentError("not saved")


@dataclass(frozen=True)
class Interpreted:
    """Changes the values of nodes by their names."""

    wrong: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    broken: str = ""

    name: ClassVar[str] = "the graph itself"
    suffixes: ClassVar[tuple[str, ...]] = ()
    saves: ClassVar[bool] = False

    def missing(self) -> str:
        return ""

    def lower(self, graph: GraphModule, inputs: Sequence[Any], taps: Sequence[str], **given: Any) -> Program:
        if self.broken:
            raise DeploymentError(self.broken)
        return Program(graph, self.wrong, dict.fromkeys(taps, ""))

    def load(self, folder: Path) -> Program:
        raise DeploymentError("not saved")

    def open(self, path: Path) -> Program:
        raise DeploymentError("not saved")
