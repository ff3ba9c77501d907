"""Verification: compares what an engine computed with the graphs that it simulates.

The numbers of a report come from an engine (two runs in lockstep, a forked walk, a forward run with gradients).  They
describe the converted graph only if the engine computes what that graph computes.  So the engine's own outputs are
compared with the graphs': those of the quantized run bit for bit, those of the reference run up to rounding, because a
batch norm may be folded in another order.  This happens for the first batch of each analysis, and for each batch with
new dtypes, shapes or strides, because these determine which kernels run.

The outputs of a run do not show whether isolated errors are right.  So a few regions run again, node by node as in the
converted graph, on values that the reference graph computed.  Their errors must equal those that the engine found.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._exclusion import computes
from pt2qa._graph.agreement import FLIPS, agreement_in, compare_leaves, difference
from pt2qa._graph.handles import attribute_of, handle_of, is_quantization, op_of
from pt2qa._graph.internals.torch import arguments_of, pytree
from pt2qa._grouping import grouped
from pt2qa._metrics import NoiseSums, error_sums
from pt2qa._simulator import op_rules, quant_ops
from pt2qa._simulator.batches import buffers_kept, flat_outputs, nbytes_of, output_names, written_buffers
from pt2qa._simulator.fused import RoundingStats
from pt2qa._simulator.graph_run import call_op
from pt2qa._simulator.lifetimes import memory_of
from pt2qa._simulator.program import Program, Step
from pt2qa._simulator.simulator import Simulator, graph_values, tensors_equal
from pt2qa._simulator.strides import copied
from pt2qa.errors import SimulationError

REFERENCE_MATCH_DB = 60.0
"""How closely the simulator with every site off must match the reference graph, in float32."""

KEPT_BYTES = 1 << 24
"""Size of what a reference graph returned, up to which it is kept for further engines on the same batch."""

Values = Sequence[Any]

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
        writing = (node for node in quantized.graph.nodes if op_rules.mutates_first_argument(node.target))
        self.writers = grouped((memory_of(node), node) for node in writing)
        # Everything else is a constant of the quantized model.
        ops = {step.node for step in program.steps}
        self.values = {node for node in quantized.graph.nodes if node.op == "placeholder" or node.name in ops}
        inputs = ([n for n in graph.graph.nodes if n.op == "placeholder"] for graph in (quantized, reference))
        self.inputs = dict(zip(*inputs, strict=True))
        self.by_handle = grouped((handle_of(node), node) for node in reference.graph.nodes)

    def plan(self, found: Isolated) -> _Plan | None:
        """None if the source of a value that the region reads is ambiguous."""
        reference = self._only(found.handle)
        inside = {self.nodes[step.node] for step in found.inside}
        needed, sources, open_nodes = set[Node](), dict[Node, Node](), [self.nodes[found.place.node]]
        while open_nodes:
            node = open_nodes.pop()
            if node in needed or node in sources:
                continue
            if self._is_overwritten(node):
                return None
            if node in inside or node not in self.values or quant_ops.serves_quantization(node):
                if node.op not in ("call_function", "get_attr"):
                    return None
                needed.add(node)
                open_nodes += node.all_input_nodes
                continue
            source = self.inputs.get(node) or self._only(handle_of(node))
            if source is None:
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


@dataclass(frozen=True, slots=True)
class Outputs:
    """What an engine computed for a batch.

    Attributes:
        reference: the outputs of the reference; None if the engine does not run it.
        quantized: those of the quantized model, likewise.
        isolated: the errors of regions on the reference's values, summed over this batch.
    """

    reference: Any = None
    quantized: Any = None
    isolated: Sequence[Isolated] = ()


AnyRun = TypeVar("AnyRun", bound=Outputs)
_Key = TypeVar("_Key")


@dataclass(slots=True)
class Graphs:
    """The two graphs that a simulator computes; its fused ops are switched off if they turn out not to be exact.

    ``accepted`` has by side, and digest and kind of the inputs, the digests of outputs that passed the comparison;
    ``returned``, by the same, what the reference graph returned last, if that is small.
    """

    quantized: GraphModule
    reference: GraphModule
    simulator: Simulator
    accepted: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    returned: dict[str, list[Any]] = field(default_factory=dict)

    def accept(self, values: Values, outputs: Any) -> None:
        """Notes what the quantized graph itself returned on flat inputs, so that it need not run on them again."""
        self.accepted.setdefault(("quantized", _key_of(values)), set()).add(digest_of(flat_outputs(outputs)))


@dataclass(slots=True)
class Verification:
    """The checks of one engine in one analysis; the notes are for the report."""

    graphs: Graphs
    notes: list[str] = field(default_factory=list)
    _kinds: set[tuple[Any, ...]] = field(default_factory=set)

    @computes
    def run(self, engine: Callable[[], AnyRun], values: Values, quantized_values: Values | None = None) -> AnyRun:
        """Runs an engine on a batch and checks what it computed; a SimulationError names the first op that differs.

        The engine runs the batch on ``graphs.simulator`` and has no side effects; it may be called twice.
        """
        result = engine()
        while not self.accepts(result, values, quantized_values):
            result = engine()
        return result

    def accepts(self, run: Outputs, values: Values, quantized_values: Values | None = None) -> bool:
        """Whether a run is correct; if not, the fused ops are now off: run again and check again."""
        alike = quantized_values is None or quantized_values is values
        quantized_values = values if quantized_values is None else quantized_values
        kind = (*kind_of(values), *kind_of(quantized_values))
        if kind in self._kinds:
            return True
        inputs = _key_of(values)
        quantized_inputs = inputs if alike else _key_of(quantized_values)
        if run.quantized is not None and not self._is_quantized(run.quantized, quantized_values, quantized_inputs):
            found = first_inexact_site(self.graphs, quantized_values) if self.graphs.simulator.fused else None
            if found is None:
                raise SimulationError(_first_difference(self.graphs, quantized_values))
            self.graphs.simulator.fused = False
            self.notes.append(f"{found}; the converted ops are used instead")
            return False
        if run.reference is not None:
            self._check_reference(run, values, inputs)
        self._kinds.add(kind)
        return True

    def _is_quantized(self, outputs: Any, values: Values, inputs: str) -> bool:
        accepted = self.graphs.accepted.setdefault(("quantized", inputs), set())
        leaves = flat_outputs(outputs)
        digest = digest_of(leaves)
        if digest not in accepted and tensors_equal(leaves, flat_outputs(graph_outputs(self.graphs.quantized, values))):
            accepted.add(digest)
        return digest in accepted

    def _check_reference(self, run: Outputs, values: Values, inputs: str) -> None:
        """The converted graph without its quantization must equal the reference; else convert changed the model."""
        accepted = self.graphs.accepted.setdefault(("reference", inputs), set())
        leaves = flat_outputs(run.reference)
        digest = digest_of(leaves)
        wanted = f"{digest} isolated" if run.isolated else digest
        if wanted in accepted:
            return
        graphs, seed = self.graphs, int(inputs[:8], 16)
        check = IsolatedCheck(graphs.quantized, graphs.reference, graphs.simulator.program, run.isolated, seed)
        expected = None if run.isolated else graphs.returned.get(inputs)
        if expected is None:
            expected = flat_outputs(graph_outputs(graphs.reference, values, check.keep))
            graphs.returned.clear()
            if nbytes_of(expected) <= KEPT_BYTES:
                # Copies, because a graph may return what it was given.
                graphs.returned[inputs] = pytree.tree_map_only(Tensor, copied, expected)
        names = output_names(self.graphs.quantized, len(expected))
        least = agreement_in(self.graphs.reference.graph, REFERENCE_MATCH_DB)
        found = compare_leaves(expected, leaves, names, least, flips=FLIPS)
        if found is not None:
            hints = "".join(f" {note}." for note in self.graphs.simulator.program.notes)
            raise SimulationError(
                f"the quantized graph without its quantization is not the reference graph: {found}, "
                f"and quantization does not explain that.{_first_change(graphs, values, least)} Either the two graphs "
                "were not made from one float graph (same weights, eval mode), or convert_pt2e changed the model."
                f"{hints}{_written_buffers(self.graphs)}"
            )
        check.check(exact=tensors_equal(leaves, expected))
        accepted.update((digest, wanted))


def simulated(simulator: Simulator, values: Values, quantized_values: Values | None = None) -> Outputs:
    quantized_values = values if quantized_values is None else quantized_values
    return Outputs(simulator.run(values, on=False), simulator.run(quantized_values, on=True))


def graph_outputs(
    graph_module: GraphModule, values: Values, visit: Callable[[Node, Any], Any] = lambda node, value: None
) -> Any:
    """A graph's outputs on flat inputs; inputs and buffers do not change.  For ``visit`` see :func:`graph_values`."""
    writes = any(op_rules.mutates_first_argument(node.target) for node in graph_module.graph.nodes)
    own = [copied(value) if writes and isinstance(value, Tensor) else value for value in values]
    with buffers_kept(graph_module, written_buffers(graph_module) if writes else ()):
        return graph_values(graph_module, own, visit)


def values_by(key: Callable[[Node], _Key | None], graph_module: GraphModule, values: Values) -> dict[_Key, Any]:
    """Copies of what nodes compute on flat inputs; where several have one key, that of the last, and none without."""
    found: dict[_Key, Any] = {}

    def keep(node: Node, value: Any) -> None:
        if (own := key(node)) is not None:
            found[own] = pytree.tree_map_only(Tensor, Tensor.clone, value)

    graph_outputs(graph_module, values, keep)
    return found


def add_state(update: Callable[[bytes], object], graph_module: GraphModule) -> None:
    """Adds the parameters and buffers of a graph to the digest with this ``update``."""
    for name, tensor in sorted(graph_module.state_dict().items()):
        update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        update(bytes_of(tensor))


def digest_of(values: Sequence[Any]) -> str:
    digest = hashlib.blake2b()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
            digest.update(bytes_of(value))
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    # The stride of a dimension of size 1 is whatever it was of the tensor that this is a part of.
    flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()


def kind_of(values: Values) -> tuple[Any, ...]:
    """What determines which kernels run."""
    return tuple(
        (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, Tensor) else repr(value)
        for value in values
    )


def _key_of(values: Values) -> str:
    return f"{digest_of(values)} {kind_of(values)}"


def first_inexact_site(graphs: Graphs, values: Values) -> str | None:
    """The first site where the fused op differs from the converted ops, and how; None if there is none."""
    simulator = _FusedAgainstConverted(graphs.simulator.program)
    simulator.run(values, on=True)
    return simulator.found


class _FusedAgainstConverted(Simulator):
    """Runs the converted ops, and compares the fused op of each site with them."""

    found: str | None = None

    def site_function(self, step: Step) -> Callable[..., Any]:
        converted = step.converted
        if converted is None:
            return step.function

        def compared(x: Tensor, *, out: Tensor | None = None, stats: RoundingStats | None = None) -> Any:
            expected, fused = converted(x), step.function(x)
            if self.found is None and not tensors_equal(fused, expected):
                self.found = f"at {step.name} the fused quantize op gives other values than the converted ops"
            elif self.found is None and fused.stride() != expected.stride():
                self.found = (
                    f"at {step.name} the fused quantize op gives the strides {fused.stride()}, the converted ops "
                    f"{expected.stride()}"
                )
            return expected

        return compared


def _first_difference(graphs: Graphs, values: Values) -> str:
    """Names the first op where the simulator and the converted graph differ."""
    expected = values_by(lambda node: node.name, graphs.quantized, values)
    where, do = "in how they are run: op by op, both agree", "Please file a bug with the model."
    with torch.no_grad():
        for step, value in graphs.simulator.walk(values, True):
            if step.site is None and step.node in expected and not tensors_equal(value, expected[step.node]):
                where = f"first at {step.name}"
                if step.op.startswith("dropout"):
                    where, do = f"{where}{_in_training(step)}", "Export the model in eval mode."
                break
    return (
        f"the simulator does not compute what the converted graph computes: they differ {where}. "
        f"Its numbers would describe another model, so none are reported. {do}"
    )


_IN_TRAINING = {
    "dropout": "it drops values at random, as in training mode",
    "batch_norm": "it may use the statistics of the batch, as in training mode",
}
"""What ops do otherwise in training mode, by the beginning of their type."""


def _first_change(graphs: Graphs, values: Values, least: float) -> str:
    """Names the first op that computes something else without quantization than it does in the reference graph."""
    expected = values_by(handle_of, graphs.reference, values)
    last = {step.handle: step.index for step in graphs.simulator.program.steps if step.site is None}
    with torch.no_grad():
        for step, value in graphs.simulator.walk(values, False):
            if step.handle not in expected or last.get(step.handle) != step.index:
                continue
            if difference(expected[step.handle], value, least, flips=FLIPS):
                return f" They differ first at {step.name}{_in_training(step) or _otherwise(graphs, step.handle)}."
    return ""


def _otherwise(graphs: Graphs, handle: int) -> str:
    """How an op differs in the two graphs, by its type or an argument; empty if it has several nodes."""
    both = []
    for graph in (graphs.reference, graphs.quantized):
        found = [node for node in graph.graph.nodes if node.op == "call_function" and handle_of(node) == handle]
        both.append([_facts(node) for node in found if not is_quantization(node)])
    if [*map(len, both)] != [1, 1]:
        return ""
    (one,), (other,) = both
    name = next((name for name in one if name in other and one[name] != other[name]), "")
    return f": its {name} is {one[name]} in the reference graph and {other[name]} in the quantized one" if name else ""


def _facts(node: Node) -> dict[str, Any]:
    """The type of an op and its arguments, by name, but for those that other nodes compute."""
    schema = arguments_of(node.target)
    given = {each.name: each.default_value for each in schema if each.has_default_value()}
    given |= {each.name: value for each, value in zip(schema, node.args, strict=False)} | node.kwargs
    computed = {
        name for name, value in given.items() if any(isinstance(each, Node) for each in pytree.tree_leaves(value))
    }
    return {"type": op_of(node.target)} | {name: value for name, value in given.items() if name not in computed}


def _in_training(step: Step) -> str:
    return next((f": {text}" for op, text in _IN_TRAINING.items() if step.op.startswith(op)), "")


def _written_buffers(graphs: Graphs) -> str:
    written = [constant.attribute for constant in graphs.simulator.program.constants if constant.mutated]
    written += [
        str(node.args[0].target)
        for node in graphs.reference.graph.nodes
        if node.op == "call_function"
        and op_rules.mutates_first_argument(node.target)
        and isinstance(node.args[0], Node)
        and node.args[0].op == "get_attr"
    ]
    if not written:
        return ""
    names = ", ".join(sorted(set(written)))
    return f" The forward writes to the buffers {names}; convert_pt2e treats a buffer that is quantized as a constant."
