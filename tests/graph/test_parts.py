"""An op that a quantizer writes as several: its name is that of the value that leaves it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2qa
from pt2qa._graph.handles import names_of, op_of, part_name, parts_of
from pt2qa._overlays.overlays import marks_of
from tests.check.plain_quantizer import SIGNED, PlainQuantizer
from tests.flows import direct_sqnr

ATEN = torch.ops.aten
POOL = "pool/adaptive_avg_pool2d"


class Decomposes(PlainQuantizer):
    """Writes an adaptive pool as a pad, a slice and a pool, as Arm's does, and rounds what it reads and gives."""

    def __init__(self) -> None:
        super().__init__(("conv2d", "linear", "avg_pool2d"), inputs=SIGNED, outputs=SIGNED)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=ATEN.adaptive_avg_pool2d.default):
            with model.graph.inserting_before(node):
                padded = model.graph.call_function(ATEN.constant_pad_nd.default, (node.args[0], [0, 2, 0, 2]))
                sliced = model.graph.call_function(ATEN.slice.Tensor, (padded, 2, 0, 6))
                sliced = model.graph.call_function(ATEN.slice.Tensor, (sliced, 3, 0, 6))
                pooled = model.graph.call_function(ATEN.avg_pool2d.default, (sliced, [3, 3], [3, 3]))
            for made in (*padded.users, padded, sliced, pooled):
                made.meta = {**node.meta}
            node.replace_all_uses_with(pooled)
            model.graph.erase_node(node)
        model.recompile()
        return model


class Pooled(nn.Module):
    """A convolution, an adaptive pool, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.conv(x)).flatten(1))


BATCH = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@functools.cache
def captured() -> pt2qa.Capture:
    torch.manual_seed(0)
    return pt2qa.capture(Pooled().eval(), BATCH)


@functools.cache
def quantized() -> pt2qa.QuantizedPair:
    return pt2qa.quantize(captured(), Decomposes(), [BATCH], progress=False)


def pooled() -> Tensor:
    """What the float model's pool gives."""
    model = captured().eager
    assert isinstance(model, Pooled)
    with torch.no_grad():
        result: Tensor = model.pool(model.conv(BATCH))
    return result


def test_rows_and_sites_of_the_op_are_of_the_value_that_leaves_it() -> None:
    pair = quantized()
    values = _values(pair.quantized)
    dequantized = next(
        values[user.name]
        for node in pair.quantized.graph.nodes
        if node.target is ATEN.avg_pool2d.default
        for quantize in node.users
        for user in quantize.users
    )
    rows = {row.name: row for row in pt2qa.compare_layers(pair, [BATCH], progress=False).rows}
    assert rows[POOL].observed_at == "dq"
    assert rows[POOL].sqnr == pytest.approx(direct_sqnr(pooled(), dequantized), abs=1e-3)
    assert [site.op for site in pair.sites if site.name == POOL] == ["adaptive_avg_pool2d"]
    parts = {f"{POOL}:constant_pad_nd1", f"{POOL}:slice2", f"{POOL}:slice3"}
    assert {name for name in rows if name.startswith(f"{POOL}:")} <= parts
    assert {step.name for step in pair.program.steps if step.name.startswith(f"{POOL}:")} == parts


def test_annotations_profiles_overlays_and_candidates_call_it_by_the_same_name() -> None:
    pair = quantized()
    before, after = pt2qa.annotations(captured(), Decomposes()), pt2qa.annotations(pair)
    for report in (before, after):
        (row,) = (row for row in report.rows if row.name == POOL and row.role == "output")
        assert (row.dtype, row.annotated) == ("int8", True)
        (counted,) = (row for row in report.coverage if row.op == "adaptive_avg_pool2d")
        assert (counted.total, counted.annotated, counted.quantized, counted.floating) == (1, 1, 1, 0)
    (counts,) = (each for each in pair.coverage if each.op == "adaptive_avg_pool2d")
    assert (counts.total, counts.annotated, counts.quantized) == (1, 1, 1)
    profile = pt2qa.profile(pair, [BATCH], progress=False)
    (value,) = (row for row in profile.rows if row.name == POOL and row.role == "output")
    assert value.mean == pytest.approx(float(pooled().mean()), rel=1e-5)
    layers = pt2qa.compare_layers(pair, [BATCH], progress=False)
    assert POOL in marks_of(layers, captured(), "sqnr").names.values()
    candidates = {"plain": "xnnpack", "parts": Decomposes()}
    report = pt2qa.compare_quantizers(captured(), candidates, [BATCH], [BATCH], progress=False)
    (compared,) = (row for row in report.rows if row.name == POOL)
    (own,) = (row for row in layers.rows if row.name == POOL)
    assert compared.custom["parts"] == pytest.approx(own.sqnr, abs=1e-3)
    assert compared.custom["plain"] > 30


def test_the_value_is_the_last_one_that_is_read_and_constants_are_counted_last() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    table = graph.call_function(ATEN.mul.Tensor, (graph.get_attr("weight"), 2))
    one = graph.call_function(ATEN.add.Tensor, (x, table))
    two = graph.call_function(ATEN.relu.default, (one,))
    unread = graph.call_function(ATEN.neg.default, (two,))
    for node in (table, one, two, unread):
        node.meta["custom"] = {"numeric_debug_handle": 1}
    graph.output(two)
    assert parts_of(graph) == {two: 0, one: 1, unread: 2, table: 3}
    assert [part_name("op", node, number) for node, number in parts_of(graph).items()] == [
        "op",
        "op:add1",
        "op:neg2",
        "op:mul3",
    ]
    module = GraphModule({"weight": torch.ones(1)}, graph)
    assert names_of(module)[1].op == op_of(ATEN.relu.default)


def _values(graph: GraphModule) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    class Keeps(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Tensor:
            found[n.name] = super().run_node(n)
            return found[n.name]

    with torch.no_grad():
        Keeps(graph).run(BATCH)
    return found
