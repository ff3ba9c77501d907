"""Any two graphs of one model: every value against float64, every difference where it was planted."""

from __future__ import annotations

import copy
import io
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from executorch.exir import to_edge
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.nn import functional as F

import pt2qa
from pt2qa._graph.handles import names_of
from pt2qa._metrics import error_sums
from pt2qa._report.html.page import sections_of
from pt2qa._two_graphs import analysis
from pt2qa.cli import main
from pt2qa.report import SetApart, Unpaired
from tests import padded_prompts
from tests.flows import direct_sqnr, quantized_pair, residual_pair
from tests.models import (
    Conditional,
    Counter,
    InPlaceViews,
    KeywordInputs,
    Linears,
    NestedOutputs,
    Recurrent,
    images,
    residual,
)
from tests.recomputation import Recording, is_quantization
from tests.simulator.test_nonfinite import Logarithm

X = images()


def compared(a: Any, b: Any, batches: Any = (X,), **options: Any) -> pt2qa.GraphReport:
    return pt2qa.compare_graphs(a, b, batches, progress=False, **options)


def rows_of(report: pt2qa.LayerReport) -> dict[str, pt2qa.LayerRow]:
    return {row.name: row for row in report.rows}


def reloaded(graph: GraphModule, example: Any = (X,)) -> ExportedProgram:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(graph, example), buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


def changed(graph: GraphModule, attribute: str, change: Callable[[Tensor], Tensor]) -> GraphModule:
    """A copy of a graph with another constant."""
    graph = copy.deepcopy(graph)
    owner, _, name = attribute.rpartition(".")
    tensor = getattr(graph.get_submodule(owner), name)
    with torch.no_grad():
        tensor.copy_(change(tensor.clone()))
    return graph


def node_of(graph: GraphModule, handle: int) -> Node:
    """The last node with a handle."""
    nodes = [node for node in graph.graph.nodes if node.meta.get("custom", {}).get("numeric_debug_handle") == handle]
    return [node for node in nodes if not is_quantization(node)][-1]


def as_read(node: Node) -> Node:
    """What the readers of a node get: the dequantized value, where it is quantized."""
    for user in node.users:
        if is_quantization(user) and "dequantize" not in str(user.target):
            return next(iter(user.users))
    return node


class Attending(nn.Module):
    """Ops that an edge program takes apart, and two halves of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.fc(self.norm(x)).chunk(2, -1)
        y = torch.cat([F.silu(left), right.softmax(-1)], -1)
        return self.out(y), y.mean(1)


TOKENS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def attending() -> pt2qa.Capture:
    return pt2qa.capture(Attending().eval(), TOKENS)


@pytest.fixture(scope="module")
def edge(attending: pt2qa.Capture) -> ExportedProgram:
    return to_edge(attending.program).exported_program()


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_every_number_is_that_of_float64() -> None:
    """A bias was changed: the values are those of torch.fx.Interpreter, the sums NumPy's in float64."""
    a = residual_pair().quantized
    b = changed(a, "conv2.weight_bias", lambda bias: bias + 0.3)
    left, right = Recording.of(a, X), Recording.of(b, X)
    report = compared(a, b)
    assert [row.name for row in report.rows] == [
        *("x", "conv1/conv2d", "relu/relu", "conv2/conv2d", "add", "relu/relu_1", "mean", "fc/linear"),
    ]
    for row in report.rows:
        ref = left[as_read(node_of(a, row.handle))].double().numpy()
        other = right[as_read(node_of(b, row.handle))].double().numpy()
        noise, signal = ((ref - other) ** 2).sum(), (ref**2).sum()
        sqnr = 10 * math.log10(signal / noise) if noise else math.inf
        cosine = (ref * other).sum() / math.sqrt(signal * (other**2).sum())
        assert row.sqnr == pytest.approx(sqnr, abs=1e-5), row.name
        assert (row.mse, row.l1) == pytest.approx(((noise / ref.size), abs(ref - other).mean()), rel=1e-5)
        assert row.atol == pytest.approx(abs(ref - other).max(), rel=1e-6)
        assert row.cosine == pytest.approx(cosine, abs=1e-7)
        assert (row.ref_min, row.quant_max) == pytest.approx((ref.min(), other.max()))
        assert (row.ref_mean, row.quant_mean) == pytest.approx((ref.mean(), other.mean()), abs=1e-6)
        if row.observed_at == "dq":
            assert row.max_lsb == pytest.approx(row.atol / row.scale)
        assert all(math.isnan(each) for each in (row.isolated_sqnr, row.rounding_sqnr, row.saturation))
    assert report.sqnr == pytest.approx(direct_sqnr(a(X), b(X)), abs=1e-5)


def test_the_first_difference_is_named() -> None:
    a = residual_pair().quantized
    b = changed(a, "conv2.weight_bias", lambda bias: bias + 0.3)
    verdict = compared(a, b).summary().splitlines()
    assert verdict[0].startswith("First difference at conv2/conv2d: SQNR ")
    assert verdict[0].endswith(" LSB); 3 values before it agree bit for bit.")
    assert verdict[1].startswith("5 of 8 values differ; the lowest SQNR is ")
    assert verdict[-1] == "Counts: 0 rows without a number, 0 unpaired."


def test_another_scale_is_a_difference_at_the_value_that_it_rounds() -> None:
    a = residual_pair().quantized
    b = copy.deepcopy(a)
    quantize = next(user for user in node_of(b, 4).users if is_quantization(user))
    for node in (quantize, *quantize.users):
        node.update_arg(1, node.args[1] * 1.5)
    report = compared(a, b)
    assert report.summary().startswith("First difference at conv2/conv2d: ")
    row = rows_of(report)["conv2/conv2d"]
    assert row.note == (
        "rounded to int8 -128..127, scale 0.0647837, zero point 45 in a, "
        "to int8 -128..127, scale 0.0971755, zero point 45 in b"
    )
    assert row.sqnr == pytest.approx(
        direct_sqnr(Recording.of(a, X)[as_read(node_of(a, 4))], Recording.of(b, X)[as_read(node_of(b, 4))]),
        abs=1e-5,
    )


@pytest.mark.parametrize("side", ["reference", "float_graph"])
def test_reference_against_converted_is_the_cumulative_error_of_compare_layers(side: str) -> None:
    """Also with the graph before its batch norms were folded."""
    pair = residual_pair()
    layers = rows_of(pt2qa.compare_layers(pair, [X], progress=False))
    found = compared(getattr(pair, side), pair.quantized)
    assert rows_of(found).keys() == layers.keys()
    for row in found.rows:
        other = layers[row.name]
        assert (row.observed_at, row.dtype, row.scale) == pytest.approx(
            (other.observed_at, other.dtype, other.scale), nan_ok=True
        )
        assert row.sqnr == pytest.approx(other.sqnr, abs=0.01), row.name
    assert [each.reason for each in found.unpaired] == (
        [] if side == "reference" else [f"folded into conv{n}/conv2d, which is compared after it" for n in (1, 2)]
    )


# -- which values ------------------------------------------------------------------------------------------------------


def test_a_decomposed_op_is_compared_at_the_part_that_has_its_value(
    attending: pt2qa.Capture, edge: ExportedProgram
) -> None:
    graph = attending.module()
    report = compared(graph, edge, [TOKENS])
    rows = rows_of(report)
    assert list(rows) == [
        *("norm/layer_norm", "fc/linear", "chunk[0]", "chunk[1]", "silu", "softmax", "cat", "out/linear", "mean"),
    ]
    assert rows["norm/layer_norm"].note == "2 ops in b, compared after getitem"
    assert rows["silu"].note == "2 ops in b, compared after mul"
    assert rows["fc/linear"].note == "4 ops in b, compared after view_copy"
    assert report.notes == ("not compared, the value is not a tensor: chunk",)
    assert report.unpaired == ()
    left, right = Recording.of(graph, TOKENS), Recording.of(edge.module(), TOKENS)
    silu = [value for node, value in right.items() if node.meta.get("custom", {}).get("numeric_debug_handle") == 6][-1]
    assert rows["silu"].sqnr == pytest.approx(direct_sqnr(left[node_of(graph, 6)], silu), abs=1e-5)
    assert min(row.sqnr for row in report.rows) > 120


def test_names_are_those_of_the_graph_that_is_whole(attending: pt2qa.Capture, edge: ExportedProgram) -> None:
    forth, back = compared(attending.program, edge, [TOKENS]), compared(edge, attending.program, [TOKENS])
    assert [row.name for row in forth.rows] == [row.name for row in back.rows]


def test_an_edge_program_computes_what_the_converted_graph_does() -> None:
    converted = residual_pair().quantized
    report = compared(to_edge(torch.export.export(converted, (X,))).exported_program(), converted)
    assert report.summary().splitlines()[0] == "The graphs agree bit for bit: 8 values and the output are equal."
    assert report.grade() == "good"
    assert [row.dtype for row in report.rows if row.observed_at == "dq"] == ["int8"] * 6
    assert rows_of(report)["conv1/conv2d"].note.startswith("convolution in a, conv2d in b")


def test_ops_without_a_counterpart_are_listed() -> None:
    a, b = copy.deepcopy(residual_pair().quantized), residual_pair().quantized
    del node_of(a, 8).meta["custom"]
    assert compared(a, b).unpaired == (
        Unpaired(-1, "mean (mean)", "a", "has no handle, so it cannot be matched to an op of the other graph"),
        Unpaired(8, "mean", "b", "no op of the other graph has its handle: it was removed or replaced"),
    )


def test_an_op_that_was_rewritten_without_its_handle_may_be_the_first_to_differ() -> None:
    a = residual_pair().quantized
    b = changed(a, "conv2.weight_bias", lambda bias: bias + 0.3)
    conv = node_of(b, 4)
    del conv.meta["custom"]
    conv.target, conv.args = torch.ops.aten.convolution.default, (*conv.args, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    b.recompile()
    verdict = compared(a, b).summary().splitlines()
    assert verdict[0].startswith("First difference at add: ")
    assert verdict[1] == "The first difference may be earlier: 1 op before it cannot be compared, conv2/conv2d last."


def test_an_op_that_lost_its_handle_alone_is_found_again() -> None:
    a = residual_pair().quantized
    b = changed(a, "conv2.weight_bias", lambda bias: bias + 0.3)
    del node_of(b, 4).meta["custom"]
    assert compared(a, b).summary().startswith("First difference at conv2/conv2d: ")


def test_handles_of_other_ops_pair_nothing() -> None:
    """Two captures whose handles were not given to the same ops."""
    a, b = residual_pair().reference, copy.deepcopy(residual_pair().reference)
    conv, linear = node_of(b, 4), node_of(b, 9)
    conv.meta["custom"], linear.meta["custom"] = {"numeric_debug_handle": 9}, {"numeric_debug_handle": 4}
    report = compared(a, b)
    assert report.notes == (
        "2 handles of different ops in the two graphs, conv2/conv2d first: they were not made from the same capture, "
        "so rows may compare unrelated ops",
    )
    assert {(each.side, each.name): each.reason for each in report.unpaired} == {
        (side, name): f"its handle is that of {other} in the other graph, a different op"
        for name, other in (("conv2/conv2d", "fc/linear"), ("fc/linear", "conv2/conv2d"))
        for side in "ab"
    }


class OneMore(nn.Module):
    """Linear, relu, linear, and a relu at the start if asked for; no module tells them apart."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.eye(16)), nn.Parameter(torch.eye(16))
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu() if self.more else x
        return F.linear(F.linear(x, self.first).relu(), self.second)


def test_captures_whose_ops_differ_are_told_by_the_kinds_of_op() -> None:
    x = torch.randn(3, 16)
    graphs = [pt2qa.capture(OneMore(more).eval(), x).module() for more in (False, True)]
    report = compared(*graphs, [x])
    assert report.notes[0].startswith("3 handles of different ops in the two graphs, linear first: ")
    assert report.rows == ()


def test_what_has_another_shape_or_is_no_float_is_a_row_without_a_number() -> None:
    a = residual_pair().quantized
    b = copy.deepcopy(a)
    mean, linear = node_of(b, 8), node_of(b, 9)
    with b.graph.inserting_before(mean):
        whole = b.graph.call_function(torch.ops.aten.clone.default, (mean.args[0],))
    whole.meta["custom"] = mean.meta.pop("custom")
    row = rows_of(compared(a, b))["mean"]
    assert (row.note, math.isnan(row.sqnr)) == (
        "mean in a, clone in b; float32[2, 8] in a, float32[2, 8, 8, 8] in b",
        True,
    )
    assert linear in b.graph.nodes


def test_prefixes_and_ops_choose_rows() -> None:
    a = residual_pair().quantized
    assert [row.name for row in compared(a, a, ops=["conv2d"]).rows] == ["conv1/conv2d", "conv2/conv2d"]
    assert [row.name for row in compared(a, a, prefixes=["fc"]).rows] == ["fc/linear"]
    with pytest.raises(pt2qa.SelectionError, match="no op type is called 'conv'"):
        compared(a, a, ops=["conv"])


# -- the run -----------------------------------------------------------------------------------------------------------


def test_writes_in_place_do_not_reach_what_is_compared() -> None:
    """The order of the nodes differs, so that values wait for their comparison while their memory is written to."""
    pair = quantized_pair(InPlaceViews(), X)
    b = copy.deepcopy(pair.float_graph)
    assert b is not None
    report = compared(pair.float_graph, b)
    assert "agree bit for bit" in report.summary()
    assert rows_of(report)["conv/conv2d"].ref_min < 0


class Branches(nn.Module):
    """Two values, each overwritten by its relu."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        return F.relu(left, inplace=True) + F.relu(right, inplace=True)


def test_the_graphs_may_compute_in_another_order() -> None:
    a = pt2qa.capture(Branches().eval(), X).module()
    b = copy.deepcopy(a)
    left, right, left_relu, right_relu = (node_of(b, handle) for handle in (1, 2, 3, 4))
    right_relu.append(left)
    left.append(left_relu)
    b.graph.lint()
    assert [node.name for node in b.graph.nodes if node.op == "call_function"] == [
        *(right.name, right_relu.name, left.name, left_relu.name, "add"),
    ]
    report = compared(a, b)
    assert report.summary().startswith("The graphs agree bit for bit: 5 values and the output are equal.")
    assert rows_of(report)["right/conv2d"].ref_min < 0


def test_batches_and_outputs_may_be_nested_and_named() -> None:
    named = pt2qa.capture(KeywordInputs().eval(), (torch.randn(4, 16),), {"scale": torch.ones(16)})
    batch = {"x": torch.randn(4, 16), "scale": torch.full((16,), 2.0)}
    assert "agree bit for bit" in compared(named.program, named.module(), [batch]).summary()
    nested, x = pt2qa.capture(NestedOutputs().eval(), torch.randn(4, 16)), torch.randn(4, 16)
    report = compared(nested.program, nested.module(), [x])
    assert [row.name for row in report.outputs] == ["output.logits", *(f"output.rest[{n}]" for n in range(3))]
    assert report.summary().startswith("The graphs agree bit for bit")


def test_numbers_and_the_steps_of_a_recurrent_op_have_rows() -> None:
    """A 0-d tensor has no size that could tell it from a value that was never seen."""
    x = torch.randn(4, 16)
    branch = pt2qa.capture(Conditional().eval(), x)
    assert [(row.name, row.shape) for row in compared(branch.program, branch.module(), [x]).rows][:2] == [
        ("sum", ()),
        ("gt", ()),
    ]
    inputs = (torch.randint(0, 10, (5, 3)), torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))
    steps = pt2qa.capture(Recurrent().eval(), inputs, decompose=("lstm",))
    report = compared(steps.program, steps.module(), [inputs])
    assert {row.part_of for row in report.rows} == {"", "rnn/lstm"}
    assert max(row.step for row in report.rows) == 4
    assert len(report.opened("rnn/lstm").table(limit=None)) > len(report.table(limit=None))


def test_every_batch_starts_from_the_buffers_that_the_graphs_have() -> None:
    a = pt2qa.capture(Counter().eval(), X).module()
    report = compared(a, a, [X, X])
    assert report.summary().startswith("The graphs agree bit for bit")
    assert float(a.calls) == 0


class Chain(nn.Module):
    """Twenty linears in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_values_are_freed_when_nothing_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 16)
    a = pt2qa.capture(Chain().eval(), x).module()
    seen: list[weakref.ref[Tensor]] = []
    most: list[int] = []

    def counting(one: Tensor, other: Tensor) -> Any:
        seen.extend(map(weakref.ref, (one, other)))
        most.append(sum(each() is not None for each in seen))
        return error_sums(one, other)

    monkeypatch.setattr(analysis, "error_sums", counting)
    compared(a, copy.deepcopy(a), [x])
    assert len(seen) == 2 * 21
    assert max(most) <= 4


def test_the_graphs_are_not_changed() -> None:
    pair = residual_pair()
    before = [str(graph.graph) for graph in (pair.reference, pair.quantized)]
    compared(pair.reference, pair.quantized)
    assert [str(graph.graph) for graph in (pair.reference, pair.quantized)] == before


# -- batches -----------------------------------------------------------------------------------------------------------


def test_batches_add_up_and_those_that_are_empty_or_not_finite_are_set_apart() -> None:
    pair = quantized_pair(residual(), (images(6),), dynamic_shapes=({0: Dim("batch")},))
    batches = [images(3, seed=1), images(2, seed=2)]
    spoilt = images(3, seed=9)
    spoilt[1, 0, 0, 0] = math.nan
    report = compared(pair.reference, pair.quantized, [batches[0], spoilt, images()[:0], batches[1]])
    clean = compared(pair.reference, pair.quantized, batches)
    assert (report.rows, report.outputs) == (clean.rows, clean.outputs)
    assert report.set_apart == (SetApart(1, 3, 1, "batch", "NaN", "x"), SetApart(2, 0, -1, "batch", "no samples"))
    assert (report.batches, report.samples) == (4, 8)
    whole = compared(pair.reference, pair.quantized, [torch.cat(batches)])
    assert [row.sqnr for row in whole.rows] == pytest.approx([row.sqnr for row in clean.rows], rel=1e-6)
    with pytest.raises(pt2qa.BatchError, match="every batch is empty"):
        compared(pair.reference, pair.quantized, [images()[:0]])


def test_infinities_of_one_graph_alone_are_named() -> None:
    pair = quantized_pair(Logarithm(), (torch.linspace(0.5, 4, 16).reshape(4, 4),))
    tiny = torch.ones(4, 4)
    tiny[2, 3] = 1e-4
    report = compared(pair.reference, pair.quantized, [tiny, torch.ones(4, 4)])
    assert report.set_apart == (SetApart(0, 4, 2, "b", "infinite", "log"),)
    assert report.summary().splitlines()[0] == (
        "Only one of the graphs gives finite values in 1 of 2 batches: infinite in graph b alone, first at log "
        "(batch 0, sample 2)."
    )
    assert report.grade() == "bad"
    negative = compared(pair.reference, pair.reference, [-torch.ones(4, 4)])
    assert negative.set_apart[0].side == "graphs"
    assert negative.summary().startswith("Both graphs give NaN or infinities in 1 of 1 batch: NaN in both graphs")


# -- errors, and the report --------------------------------------------------------------------------------------------


def test_two_exports_are_compared_without_handles() -> None:
    first, second = (torch.export.export(residual(), (X,)) for _ in range(2))
    report = compared(first, second, [X])
    assert [row.name for row in report.rows] == [op.name for op in names_of(pt2qa.with_handles(first)).values()][1:]
    assert not report.unpaired
    assert {row.sqnr for row in report.rows} == {math.inf}


def test_graphs_that_do_not_belong_together_are_refused() -> None:
    pair = residual_pair()
    plain = torch.export.export(residual(), (X,)).module()
    alone = torch.export.export(nn.Tanh(), (X,)).module()
    with pytest.raises(pt2qa.PairingError, match="the first and the second graph have no op in common: none with the"):
        compared(pair.quantized, alone)
    with pytest.raises(pt2qa.PairingError, match="the first graph is of type Linear; expected a GraphModule"):
        compared(nn.Linear(2, 2), plain)
    nested = pt2qa.capture(NestedOutputs().eval(), torch.randn(4, 16)).module()
    linears = pt2qa.capture(Linears().eval(), torch.randn(4, 16)).module()
    with pytest.raises(
        pt2qa.PairingError,
        match=r"the first graph returns output\.logits, .*, the second output\. Expected two graphs of one model\.",
    ):
        compared(nested, linears, [torch.randn(4, 16)])
    other = copy.deepcopy(linears)
    (output,) = other.graph.find_nodes(op="output")
    first = node_of(other, 1)
    output.replace_input_with(node_of(other, 3), first)
    with pytest.raises(pt2qa.PairingError, match=r"output is float32\[4, 4\] in a, float32\[4, 32\] in b\. Expected"):
        compared(linears, other, [torch.randn(4, 16)])


def test_a_prepared_graph_is_compared_without_its_observers_seeing_the_batches() -> None:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    from pt2qa.plugins import resolve

    capture = pt2qa.capture(residual(), X)
    prepared = prepare_pt2e(capture.module(), resolve("xnnpack").build(capture.module(), qat=False))
    before = copy.deepcopy(prepared.state_dict())
    report = compared(capture.program, prepared)
    assert report.sqnr > 100
    assert all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items())


def test_parts_that_a_backend_took_are_said_to_run_in_python() -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    converted = residual_pair().quantized
    program = torch.export.export(converted, (X,))
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).exported_program()
    report = compared(converted, lowered)
    assert any(
        note.endswith("of graph b delegated to a backend: their ops ran in Python, not on it") for note in report.notes
    )
    assert any(each.name == "conv1/conv2d" and each.side == "a" for each in report.unpaired)


def test_the_report_is_saved_and_shown(tmp_path: Path) -> None:
    pair = residual_pair()
    report = compared(pair.reference, pair.quantized, model="Residual")
    report.save(tmp_path / "graphs.safetensors")
    assert str(pt2qa.load(tmp_path / "graphs.safetensors")) == str(report)
    assert isinstance(report, pt2qa.LayerReport)
    said = report.text(width=120)
    assert said.startswith("Residual, graph b against graph a: 8 values, 1 batch (2 samples), smallest SQNR first\n")
    assert repr(report).startswith("<GraphReport of Residual: 8 rows, output SQNR 38.8")
    assert sections_of([report])


# -- from a shell ------------------------------------------------------------------------------------------------------

FLOW = """
import torch
from tests.models import images, residual

def flow():
    return residual(), images(), [images()]
"""


def test_the_command_compares_two_files(tmp_path: Path) -> None:
    converted = residual_pair().quantized
    (tmp_path / "flow.py").write_text(FLOW)
    a, b, other = (str(tmp_path / name) for name in ("a.pt2", "b.pt2", "other.pt2"))
    torch.export.save(torch.export.export(converted, (X,)), a)
    torch.export.save(torch.export.export(changed(converted, "fc.bias", lambda bias: bias + 1), (X,)), b)
    run, flow = CliRunner().invoke, f"{tmp_path / 'flow.py'}:flow"
    result = run(main, ["compare-graphs", a, b, flow, "-o", str(tmp_path / "graphs.safetensors"), "--width", "120"])
    assert result.exit_code == 0, result.output
    assert "Residual, graph b against graph a: 8 values, 1 batch (2 samples)" in result.output
    assert "First difference at fc/linear: " in result.output
    assert isinstance(pt2qa.load(tmp_path / "graphs.safetensors"), pt2qa.GraphReport)
    Path(other).write_text("no program")
    result = run(main, ["compare-graphs", a, other, flow])
    assert result.exit_code == 2
    assert "other.pt2: expected a file that torch.export.save wrote (BadZipFile: " in result.output


def test_padding_is_in_no_number_with_a_mask() -> None:
    torch.manual_seed(0)
    pair = padded_prompts.quantized(padded_prompts.Running(), "xnnpack")
    batch = padded_prompts.padded(padded_prompts.prompts())

    def compared(given: Any, mask: Any = "attention_mask") -> pt2qa.GraphReport:
        return pt2qa.compare_graphs(pair.reference, pair.quantized, [given], mask=mask, progress=False)

    one, other = compared(batch), compared(padded_prompts.with_garbage(batch))
    assert str(one.rows) == str(other.rows)
    assert one.outputs == other.outputs != compared(batch, None).outputs
    masked = pt2qa.compare_layers(pair, [batch], mask="attention_mask", progress=False)
    assert one.outputs[0].sqnr == pytest.approx(masked.outputs[0].sqnr, abs=1e-6)
    with pytest.raises(pt2qa.ReportError, match="mask of report 2 is None, of the first one 'attention_mask'"):
        pt2qa.merge([one, compared(batch, None)])
    with pytest.raises(pt2qa.SelectionError, match="mask: the model has no input 'mask'"):
        compared(batch, "mask")
