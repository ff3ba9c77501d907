"""What a fault is planted in: a net, its quantizer, its data, and what is done to the graph after conversion."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import pt2qa
from tests.diagnosis.bench import sqnr
from tests.diagnosis.blind.nets import Link, Net, net_of
from tests.diagnosis.subject import Altered, Graph


class UnfitError(Exception):
    """The net has no place for this fault."""


@dataclass
class Bed:
    """What a fault edits.

    Attributes:
        net: the untouched net.
        model: the float model that is meant, a copy.
        quantizer: name and options.
        calibration: what calibrates.
        use, evaluation, check: three sets of batches that share no sample with it or each other: what the diagnosis is
            given as data, what it measures on, and what only the bench sees.
        specs: edits of what the quantizer annotates.
        overrides: edits that the pair is made with.
        finish: makes another pair of the one that pt2qa made, as a flow by hand would.
    """

    net: Net
    model: nn.Module
    quantizer: str
    calibration: list[Tensor]
    use: list[Tensor]
    evaluation: list[Tensor]
    check: list[Tensor]
    specs: list[Callable[[Graph], None]] = field(default_factory=list)
    overrides: list[pt2qa.Edit] = field(default_factory=list)
    finish: Callable[[Bed, pt2qa.QuantizedPair], pt2qa.QuantizedPair] | None = None
    _captured: tuple[list[type], pt2qa.Capture] | None = None

    @classmethod
    def made(cls, kind: str, seed: int, quantizer: str) -> Bed:
        """Healthy."""
        net, r = net_of(kind, seed), random.Random(f"sizes {seed}")
        # Of real data there is less, and no two sets may share a sample.
        sizes = (2, 1, 1, 1) if kind == "mobilenet_v2" else (8, r.choice((4, 5, 6)), r.choice((3, 4, 5, 6)), 12)
        sets = [net.batches(number + 1, size) for number, size in enumerate(sizes)]
        if kind == "mobilenet_v2":
            every = torch.cat(net.batches(0, 3))[:20]  # the pictures that there are
            sets = [list(part.split(4)) for part in every.split((8, 4, 4, 4))]
        elif kind == "digits":
            every = torch.cat(net.batches(0, sum(sizes)))
            sets = [list(part.split(8)) for part in every.split([8 * size for size in sizes])]
        return cls(net, copy.deepcopy(net.model), quantizer, *sets)

    @property
    def backend(self) -> str:
        """Name of the quantizer, without options."""
        return self.quantizer.partition(":")[0]

    def capture(self, model: nn.Module | None = None) -> pt2qa.Capture:
        """Of the model as it is now, or of another one."""
        return pt2qa.capture(model or self.model, (self.calibration[0],), decompose=self.net.decompose)

    def graph(self) -> Graph:
        """The float graph, for names; captured again once modules are of other types."""
        types = [type(module) for module in self.model.modules()]
        if self._captured is None or self._captured[0] != types:
            self._captured = types, self.capture()
        return Graph(self._captured[1].module(), self._captured[1].names)

    def quantized(self, model: nn.Module | None = None) -> pt2qa.QuantizedPair:
        """The pair that pt2qa makes of the model, or of another one."""
        capture = self.capture(model)
        quantizer: Any = self.quantizer
        if self.specs:
            quantizer = Altered(self.quantizer, capture, self._annotate)
        plan = pt2qa.OverridePlan(tuple(self.overrides)) if self.overrides else None
        return pt2qa.quantize(capture, quantizer, self.calibration, overrides=plan, progress=False)

    def _annotate(self, graph: Graph) -> None:
        for edit in self.specs:
            edit(graph)

    def pair(self) -> pt2qa.QuantizedPair:
        """What is diagnosed."""
        pair = self.quantized()
        return pair if self.finish is None else self.finish(self, pair)

    def quality(self, quantized: Callable[..., Any]) -> float:
        """SQNR in dB of the worst output on the set that only the bench sees, against the model that is meant."""
        return sqnr(quantized, self.model, self.check)

    # -- places --------------------------------------------------------------------------------------------------------

    def near(self, *names: str, hops: int = 2) -> tuple[str, ...]:
        """These ops, what they read, and what reads them, a few steps on."""
        graph = self.graph()
        front = [node for node in graph.module.graph.nodes if graph.name(node) in names]
        found = [*front, *(source for node in front for source in node.all_input_nodes)]
        for _ in range(hops):
            front = [reader for node in front for reader in node.users]
            found += front
        return tuple(dict.fromkeys(filter(None, map(graph.name, found))))

    def at(self, link: Link) -> tuple[str, ...]:
        """The ops from one end of a link to the other."""
        graph = self.graph()
        first, last = graph.op(self.op_of(link.product)), graph.op(self.op_of(link.reader))
        after, before = _reached(first, lambda node: [*node.users]), _reached(last, lambda node: node.all_input_nodes)
        return tuple(graph.name(node) for node in after if node in before and graph.name(node))

    def op_of(self, module: str) -> str:
        """The op of a module's weights."""
        names = self.graph().names.values()
        return next(name.name for name in names if name.module == module and name.op in ("conv2d", "linear"))

    def ops(self, *kinds: str) -> list[str]:
        """Names of all ops of these kinds."""
        return [name.name for name in self.graph().names.values() if name.op in kinds]

    # -- weights -------------------------------------------------------------------------------------------------------

    def link(self, r: random.Random, scales: bool = True) -> Link:
        """One that channels can be scaled at, or shifted."""
        found = [each for each in self.net.links if each.scales is scales]
        if not found:
            raise UnfitError
        return r.choice(found)

    def scale(self, link: Link, channels: list[int], factor: float) -> None:
        """Multiplies channels, and divides what reads them."""
        product, reader = self.model.get_submodule(link.product), self.model.get_submodule(link.reader)
        scaled = self.model.get_submodule(link.norm) if link.norm else product
        columns = [link.first + channel for channel in channels]
        with torch.no_grad():
            scaled.weight[channels] *= factor
            scaled.bias[channels] *= factor
            reader.weight[:, columns] /= factor

    def channels(self, link: Link, r: random.Random, count: int) -> list[int]:
        """Some of a product's."""
        return r.sample(range(len(self.model.get_submodule(link.product).weight)), count)


def _reached(start: Node, steps: Callable[[Node], list[Node]]) -> list[Node]:
    found, front = [start], [start]
    while front:
        front = list(dict.fromkeys(node for each in front for node in steps(each) if node not in found))
        found += front
    return found


def activations_of(graph: GraphModule) -> list[Node]:
    """The nodes of a converted graph that quantize activations with constant parameters."""
    target = torch.ops.quantized_decomposed.quantize_per_tensor.default
    return [node for node in graph.graph.nodes if node.target is target and node.args[0].op != "get_attr"]
