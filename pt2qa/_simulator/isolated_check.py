"""Verifies isolated errors: runs a region of the converted graph on values of the reference graph.

The outputs of a run do not show whether the isolated regions were computed correctly.  So a few regions run again, node
by node as in the converted graph, on values that the reference graph computed.  Their errors must equal those that the
engine found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import attribute_of, handle_of
from pt2qa._metrics import NoiseSums, error_sums
from pt2qa._simulator import op_rules, quant_ops
from pt2qa._simulator.graph_run import call_op
from pt2qa._simulator.lifetimes import memory_of
from pt2qa._simulator.program import Program, Step
from pt2qa._simulator.strides import copied
from pt2qa.errors import SimulationError

CHECKED = 4
"""Regions to check for each batch; they cost little compared with the runs of the two graphs."""

TOLERANCE = 1e-4
"""Relative tolerance of the noise: the engine sums in float32 where that is accurate enough."""

TOLERANCE_TO_ROUNDING = 0.1
"""The same if the two references agree only up to rounding: values close to a tie may round the other way."""


@dataclass(frozen=True, slots=True)
class Isolated:
    """An isolated error that an engine found for an op, run together with the steps ``inside``.

    ``place`` is the step at which the value is observed: the op, or a site after it.  ``counted`` gives the elements of
    a value there that the sums are over.
    """

    name: str
    handle: int
    place: Step
    inside: Collection[Step]
    noise: NoiseSums
    counted: Callable[[Step, Tensor], Tensor] = lambda step, value: value


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to recompute one: nodes of the converted graph in order, and where their inputs come from."""

    found: Isolated
    nodes: tuple[Node, ...]
    sources: dict[Node, Node]
    reference: Node


class IsolatedCheck:
    """Checks some isolated errors on one batch; ``keep`` receives the values of the reference graph."""

    def __init__(
        self, quantized: GraphModule, reference: GraphModule, program: Program, found: Sequence[Isolated], seed: int
    ) -> None:
        self.root = quantized
        planner = _Planner(quantized, reference, program)
        self.plans: list[_Plan] = []
        # Regions far apart, and starting elsewhere for other data, so that many batches check many regions.
        start, stride = seed % max(len(found), 1), max(len(found) // CHECKED, 1)
        rotated = [*found[start:], *found[:start]]
        for each in (rotated[number] for offset in range(stride) for number in range(offset, len(rotated), stride)):
            plan = planner.plan(each) if len(self.plans) < CHECKED else None
            if plan is not None:
                self.plans.append(plan)
        self.wanted = {node for plan in self.plans for node in (*plan.sources.values(), plan.reference)}
        self.values: dict[Node, Any] = {}

    def keep(self, node: Node, value: Any) -> None:
        if node in self.wanted:
            self.values[node] = copied(value) if isinstance(value, Tensor) else value

    def check(self, *, exact: bool) -> None:
        """Runs the regions; ``exact``: whether both references agree bit for bit."""
        tolerance = TOLERANCE if exact else TOLERANCE_TO_ROUNDING
        for plan in self.plans:
            both = (
                plan.found.counted(plan.found.place, each) for each in (self.values[plan.reference], self._run(plan))
            )
            sums, noise = error_sums(*both), plan.found.noise.noise
            expected = math.nan if sums.nonfinite else sums.noise
            both_nan = math.isnan(expected) and math.isnan(noise)
            if not both_nan and not abs(noise - expected) <= tolerance * expected + 1e-13 * sums.signal:
                raise SimulationError(
                    f"the isolated error of {plan.found.name} has a squared sum of {noise:.6g}; the nodes of the "
                    f"converted graph, run on the reference's values, give {expected:.6g}. The numbers would be "
                    "wrong, so none are reported. Please file a bug with the model."
                )

    def _run(self, plan: _Plan) -> Any:
        env: dict[Node, Any] = {node: self.values[source] for node, source in plan.sources.items()}
        with torch.no_grad():
            for node in plan.nodes:
                if node.op == "get_attr":
                    env[node] = attribute_of(self.root, node)
                    continue
                writes = op_rules.mutates_first_argument(node.target)
                arguments: Any = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
                (first, *rest), kwargs = arguments
                function: Callable[..., Any] = node.target  # type: ignore[assignment]
                env[node] = call_op(function, copied(first) if writes else first, *rest, **kwargs)
        return env[plan.nodes[-1]]


class _Planner:
    """For a region of the converted graph, finds the nodes of the reference graph that give its inputs."""

    def __init__(self, quantized: GraphModule, reference: GraphModule, program: Program) -> None:
        self.nodes = {node.name: node for node in quantized.graph.nodes}
        self.position = {node: number for number, node in enumerate(quantized.graph.nodes)}
        self.writers: dict[Node | int, list[Node]] = defaultdict(list)
        for node in quantized.graph.nodes:
            if op_rules.mutates_first_argument(node.target):
                self.writers[memory_of(node)].append(node)
        # Everything else is a constant of the quantized model.
        ops = {step.node for step in program.steps}
        self.values = {node for node in quantized.graph.nodes if node.op == "placeholder" or node.name in ops}
        inputs = ([n for n in graph.graph.nodes if n.op == "placeholder"] for graph in (quantized, reference))
        self.inputs = dict(zip(*inputs, strict=True))
        self.by_handle: dict[int | None, list[Node]] = defaultdict(list)
        for node in reference.graph.nodes:
            self.by_handle[handle_of(node)].append(node)

    def plan(self, found: Isolated) -> _Plan | None:
        """None if the source of a value that the region reads is ambiguous."""
        reference = self._only(found.handle)
        inside = {self.nodes[step.node] for step in found.inside}
        needed, sources, open_nodes = set[Node](), dict[Node, Node](), [self.nodes[found.place.node]]
        while open_nodes:
            node = open_nodes.pop()
            if node in needed or node in sources:
                continue
            if node in inside or node not in self.values or quant_ops.serves_quantization(node):
                if node.op not in ("call_function", "get_attr") or (
                    node.op == "get_attr" and self._is_overwritten(node)
                ):
                    return None
                needed.add(node)
                open_nodes += node.all_input_nodes
                continue
            source = self.inputs.get(node) or self._only(handle_of(node))
            if source is None or self._is_overwritten(node):
                return None
            sources[node] = source
        if reference is None or not needed:
            return None
        return _Plan(found, tuple(sorted(needed, key=self.position.__getitem__)), sources, reference)

    def _is_overwritten(self, node: Node) -> bool:
        """Whether an op overwrites the value later: what else reads its memory may do so before or after the write."""
        later = [each for each in self.writers[memory_of(node)] if self.position[each] > self.position[node]]
        return bool(later) and later != list(node.users)

    def _only(self, handle: int | None) -> Node | None:
        nodes = self.by_handle[handle]
        return nodes[0] if handle is not None and len(nodes) == 1 else None
