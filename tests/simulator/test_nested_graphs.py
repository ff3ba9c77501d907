"""Bodies of loops and branches: each of their quantize-dequantize pairs is a site."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa._diagnosis.budget import sites_before
from pt2qa._graph.handles import op_of
from pt2qa._simulator import program as program_of
from pt2qa._simulator import quant_ops
from pt2qa._simulator.simulator import tensors_equal
from pt2qa.plugins import resolve


class Nested(nn.Module):
    """Linears before and behind an op that calls nested graphs, and one within these."""

    def __init__(self, call: Callable[[Nested, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.first, self.inner, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        nn.init.orthogonal_(self.inner.weight, 1.4)  # so that what the loop rounds makes most of the noise

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self, self.first(x)))


def looped(model: Nested, x: Tensor) -> Tensor:
    """Three iterations."""

    def body(count: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, torch.tanh(model.inner(value))

    return torch.while_loop(lambda count, _: count < 3, body, (torch.tensor(0), x))[1]  # type: ignore[no-any-return]


def scanned(model: Nested, x: Tensor) -> Tensor:
    """A recurrent layer over the rows."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(model.inner(state) + row)
        return state, state * 0.5

    return scan(step, torch.zeros_like(x[0]), x)[1]  # type: ignore[no-any-return]


def branched(model: Nested, x: Tensor) -> Tensor:
    """One of two branches."""
    return torch.cond(x.sum() > 0, lambda x: model.inner(x).relu(), lambda x: model.inner(x).tanh(), (x,))  # type: ignore[no-any-return]


def mapped(model: Nested, x: Tensor) -> Tensor:
    """Row by row."""
    return map_rows(lambda row: model.inner(row).relu(), x)  # type: ignore[no-any-return]


CALLS = {"while_loop": looped, "scan": scanned, "cond": branched, "map": mapped}
BY_HAND = ("cond", "map")
"""Ops whose bodies ``prepare_pt2e`` leaves alone."""


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 8, generator=generator) for _ in range(count)]


def bodies(graph: GraphModule) -> list[str]:
    """The attributes that hold the nested graphs of these ops."""
    return [
        str(node.target)
        for node in graph.graph.find_nodes(op="get_attr")
        if isinstance(getattr(graph, str(node.target), None), GraphModule)
        and all(op_of(user.target) in BY_HAND for user in node.users)
    ]


@functools.cache
def made(call: str, backend: str = "xnnpack") -> tuple[pt2qa.QuantizedPair, GraphModule, Tensor]:
    """A pair whose nested graphs are quantized, its converted graph with float weights, and a batch."""
    torch.manual_seed(0)
    model, x = Nested(CALLS[call]).eval(), batches(1)[0]
    capture = pt2qa.capture(model, x)
    graph = capture.module()
    prepared = prepare_pt2e(graph, resolve(backend).build(graph, qat=False))
    names = bodies(prepared)
    for name in names:
        body = getattr(prepared, name)
        setattr(prepared, name, prepare_pt2e(body, resolve(backend).build(body, qat=False)))
    for batch in batches(20):
        run(prepared, batch)  # of two branches, each sees one

    def converted(fold: bool) -> GraphModule:
        result = copy.deepcopy(prepared)
        for name in names:
            setattr(result, name, convert_pt2e(getattr(result, name), fold_quantize=fold))
        return convert_pt2e(result, fold_quantize=fold)  # type: ignore[no-any-return]

    return pt2qa.pair(capture.module(), converted(True), quantizer=backend), converted(False), x


def graphs_in(graph: GraphModule) -> Iterator[GraphModule]:
    yield graph
    for child in graph.children():
        if isinstance(child, GraphModule):
            yield from graphs_in(child)


def with_pairs(graph: GraphModule, keep: Callable[[int, Node], bool]) -> GraphModule:
    """A copy of an unfolded graph with some of its quantize-dequantize pairs; ``keep`` has the number of the graph."""
    made = copy.deepcopy(graph)
    for number, part in enumerate(graphs_in(made)):
        for node in list(part.graph.nodes):
            if quant_ops.is_dequantize(node) and not keep(number, node.args[0]):
                node.replace_all_uses_with(node.args[0].args[0])
        part.graph.eliminate_dead_code()
        part.recompile()
    return made


@torch.no_grad()
def run(graph: GraphModule, x: Tensor) -> Tensor:
    return graph(x)  # type: ignore[no-any-return]


def noise(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).square().sum())


@pytest.mark.parametrize("call", CALLS)
def test_each_pair_of_a_nested_graph_is_a_site_with_the_noise_that_it_makes_alone(call: str) -> None:
    pair, unfolded, x = made(call)
    reference = run(with_pairs(unfolded, lambda number, node: False), x)
    alone: list[float] = []
    for number, part in enumerate(graphs_in(unfolded)):
        for quantize in part.graph.nodes:
            if number and quant_ops.is_quantize(quantize):
                kept = with_pairs(unfolded, lambda at, node, n=number, q=quantize.name: (at, node.name) == (n, q))
                alone.append(noise(run(kept, x), reference))
    report = pt2qa.sensitivity(pair, [x], method="exact", progress=False)
    nested = [row for row in report.rows if pair.sites[row.site].nested]
    assert len(nested) == len(alone) >= 3
    assert sorted(row.noise for row in nested) == pytest.approx(sorted(alone), rel=1e-6, abs=1e-15)
    assert {"activation", "weight"} == {row.kind for row in nested}
    assert all(row.name.startswith(f"{call}.") for row in nested)


@pytest.mark.parametrize("call", CALLS)
def test_all_sites_on_is_the_converted_graph_and_off_the_reference(call: str) -> None:
    pair, unfolded, x = made(call)
    for batch in (x, -x):
        every = {site.index for site in pair.sites}
        assert tensors_equal(pair.simulator.run([batch]), run(pair.quantized, batch))
        assert tensors_equal(pair.simulator.run([batch], on=every), run(pair.quantized, batch))
        assert tensors_equal(pair.simulator.run([batch], on=False), run(pair.reference, batch))
        assert pair.verify(batch) == ()
        nested = {site.index for site in pair.sites if site.nested}
        assert tensors_equal(
            pair.simulator.run([batch], on=nested), run(with_pairs(unfolded, lambda number, node: number > 0), batch)
        )


@pytest.mark.parametrize("call", CALLS)
def test_the_budget_adds_up_and_counts_a_value_that_is_rounded_alike_twice_once(call: str) -> None:
    pair, _, _ = made(call)
    budget = pt2qa.error_budget(pair, batches(20), progress=False)
    nested = sum(row.noise for row in budget.rows if pair.sites[row.site].nested)
    assert abs(budget.interactions) < 0.25 * budget.noise
    assert nested > 0.1 * budget.noise


def test_a_nested_graph_may_take_more_than_its_op_is_given() -> None:
    """As that of an associative_scan takes two values for each."""
    pair, _, _ = made("map")
    program, longer = pair.program, []
    for constant in program.constants:
        if isinstance(stored := constant.stored, program_of.Nested):
            body = replace(stored.program, inputs=(*stored.program.inputs, stored.program.slots))
            constant = replace(constant, stored=replace(stored, program=body))
        longer.append(constant)
    simulator = copy.copy(pair.simulator)
    simulator.program = replace(program, constants=tuple(longer))
    before = {number: each.site.index for number, each in sites_before(simulator).items()}
    names = {pair.sites[number].name: pair.sites[other].name for number, other in before.items()}
    assert names == {"map[0]": "map.body/relu", "map.body/input[0]": "first/linear"}


@pytest.mark.parametrize("call", ["while_loop", "map"])
def test_a_weight_that_a_nested_graph_rounds_is_in_the_table_of_weights(call: str) -> None:
    pair, unfolded, _ = made(call)
    (row,) = [row for row in pt2qa.compare_weights(pair).rows if row.name == f"{call}.body/linear" and row.quantized]
    weight = unfolded.inner.weight.detach()
    body = next(part for part in list(graphs_in(unfolded))[1:] if part.graph.find_nodes(op="get_attr"))
    quantize = next(node for node in body.graph.nodes if "quantize_per_channel" in str(node.target))
    scale, zero_point = (getattr(body, str(node.target)) for node in quantize.args[1:3])
    parameters = (scale, zero_point, *quantize.args[3:])
    ops = torch.ops.quantized_decomposed
    rounded = ops.dequantize_per_channel(ops.quantize_per_channel(weight, *parameters), *parameters)
    sqnr = 10 * math.log10(float(weight.double().square().sum()) / noise(weight, rounded))
    assert row.sqnr == pytest.approx(sqnr, abs=1e-3)


def test_what_a_loop_rounds_out_of_range_is_named_by_the_diagnosis() -> None:
    pair, _, _ = made("while_loop")
    quantized = copy.deepcopy(pair.quantized)
    body = next(part for part in list(graphs_in(quantized))[1:] if any(map(quant_ops.is_quantize, part.graph.nodes)))
    quantize = next(node for node in body.graph.nodes if "quantize_per_tensor" in str(node.target))
    for node in (quantize, *quantize.users):
        node.args = (node.args[0], node.args[1] / 8, *node.args[2:])
    body.recompile()
    narrow = pt2qa.pair(pair.reference, quantized)
    diagnosis = pt2qa.diagnose(narrow, batches(8), progress=False)
    assert diagnosis.rows[0].name == "while_loop.body/input[1]"
    assert diagnosis.rows[0].gain > 5
    budget = pt2qa.error_budget(narrow, batches(8), progress=False)
    worst = max(budget.rows, key=lambda row: row.noise)
    assert (worst.name, worst.mechanism) == ("while_loop.body/input[1]", "activation clamping")


def test_edits_leave_what_loops_round_as_it_is() -> None:
    torch.manual_seed(0)
    capture = pt2qa.capture(Nested(scanned).eval(), batches(1)[0])
    pair = pt2qa.quantize(capture, "x86", batches(4), progress=False)
    nested = {(site.name, site.kind) for site in pair.sites if site.nested}
    result = pt2qa.reconfigure(pair, batches(4), target=90.0, progress=False)
    assert {(site.name, site.kind) for site in result.pair.sites} == nested
    assert not result.met


@functools.cache
def with_unknown_scale() -> pt2qa.QuantizedPair:
    """A pair with a branch that quantizes with a scale of its own making."""
    pair, _, _ = made("cond")
    quantized = copy.deepcopy(pair.quantized)
    body = quantized.get_submodule(bodies(quantized)[0])
    assert isinstance(body, GraphModule)
    ops = torch.ops.quantized_decomposed
    quantize = next(node for node in body.graph.nodes if node.target is ops.quantize_per_tensor.default)
    value, _, zero_point, *rest = quantize.args
    with body.graph.inserting_before(quantize):
        largest = body.graph.call_function(torch.ops.aten.amax.default, (value,))
        scale = body.graph.call_function(torch.ops.aten.div.Tensor, (largest, 20.0))
        zero = body.graph.call_function(torch.ops.aten.scalar_tensor.default, (zero_point,), {"dtype": torch.int64})
    for node in (quantize, *quantize.users):
        node.target = getattr(ops, node.target.overloadpacket.__name__.rpartition(".")[2]).tensor
        node.args = (node.args[0], scale, zero, *rest)
    body.recompile()
    return pt2qa.pair(pair.reference, quantized)


def test_a_nested_graph_whose_sites_are_not_known_is_a_line_of_its_own() -> None:
    pair, data = with_unknown_scale(), batches(8)
    (whole,) = pair.program.whole_graphs
    site = pair.sites[whole]
    assert (site.name, site.op, site.params.dtype) == ("cond.true", "cond", "int8")
    assert any("zero point, div" in note for note in pair.program.notes)
    budget = pt2qa.error_budget(pair, data, progress=False)
    (row,) = [row for row in budget.rows if row.site == whole]
    assert row.mechanism == "nested graph not attributed"
    expected = sum(noise(*(pair.simulator.run([batch], on=on)[0] for on in ({whole}, False))) for batch in data)
    assert row.noise == pytest.approx(expected, rel=1e-6)
    assert abs(budget.interactions) < 0.25 * budget.noise
    assert "Most of the attributed noise is from nested graphs whose sites are unknown" in str(budget)
    assert budget.fault == ""
    diagnosis = pt2qa.diagnose(pair, data, progress=False)
    assert "Nothing to do" not in diagnosis.verdict
    assert "cond.true" in diagnosis.verdict


def test_observers_of_a_loop_that_no_batch_enters_are_named() -> None:
    def body(value: Tensor) -> tuple[Tensor]:
        return (torch.tanh(model.inner(value)) * 0.5,)

    model = Nested(lambda _, x: torch.while_loop(lambda value: value.abs().max() > 10, body, (x,))[0]).eval()
    capture = pt2qa.capture(model, batches(1)[0])
    with pytest.raises(pt2qa.QuantizeError, match=r"observers never saw .* while_loop.body/linear"):
        pt2qa.quantize(capture, "xnnpack", [batches(1)[0]], progress=False)
    pair = pt2qa.quantize(capture, "xnnpack", [100 * batches(1)[0]], progress=False)
    inside = [site for site in pair.sites if site.name.startswith("while_loop")]
    assert inside
    assert all(bool(torch.as_tensor(site.params.scale).ne(1).all()) for site in inside)


@pytest.mark.parametrize("call", CALLS)
def test_coverage_counts_the_ops_of_nested_graphs(call: str) -> None:
    (entry,) = (entry for entry in made(call)[0].coverage if entry.op == "linear")
    count = 4 if call == "cond" else 3
    assert (entry.quantized, entry.total) == (count, count)
