"""Reference and quantized graph, handle by handle: traps 1 to 8."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import generate_numeric_debug_handle, prepare_for_propagation_comparison
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa.plugins import resolve
from tests.check.plain_quantizer import PlainQuantizer
from tests.flows import direct_sqnr, quantized_pair, residual_pair
from tests.models import Conditional, Linears, SameInputTwice, TwoUsers, images, residual

NAMES = ["conv1/conv2d", "relu/relu", "conv2/conv2d", "add", "relu/relu_1", "mean", "fc/linear"]


def made_elsewhere(capture: pt2qa.Capture, batch: Any) -> tuple[GraphModule, GraphModule]:
    """The flow of torchao on a captured graph: the prepared graph before calibration, and the converted one."""
    graph = capture.module()
    prepared = prepare_pt2e(graph, resolve("xnnpack").build(graph, qat=False))
    untouched = copy.deepcopy(prepared)
    prepared(batch)
    return untouched, convert_pt2e(prepared)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_folded_conv_is_compared_after_its_batch_norm(quantizer: str) -> None:
    """Trap 1: with batch norm weight 10 and mean 5, the raw conv and the folded one have nothing in common."""
    pair = residual_pair(quantizer)
    report = pt2qa.compare_layers(pair, [images()], progress=False)
    conv = next(row for row in report.rows if row.name == "conv1/conv2d")
    assert conv.sqnr > 20
    assert conv.isolated_sqnr > 20
    folded = {unpaired.name: unpaired.reason for unpaired in report.unpaired}
    assert folded == {
        "bn1/batch_norm": "folded into conv1/conv2d, which is compared after it",
        "bn2/batch_norm": "folded into conv2/conv2d, which is compared after it",
    }


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_every_op_is_paired_or_explained(quantizer: str) -> None:
    pair = residual_pair(quantizer)
    assert [paired.name for paired in pair.pairing.pairs] == ["x", *NAMES]
    assert all(len(paired.quantized) == len(paired.reference) == 1 for paired in pair.pairing.pairs)
    assert str(pair.pairing).startswith("8 ops paired, 2 not\n  bn1/batch_norm (reference): folded into conv1/conv2d")


def test_in_place_ops_do_not_corrupt_what_is_compared() -> None:
    """Trap 2: relu_ overwrites the conv's output, which a logger that keeps references compares as the conv's."""
    pair = residual_pair()
    report = pt2qa.compare_layers(pair, [images()], progress=False)
    rows = {row.name: row for row in report.rows}
    assert rows["conv1/conv2d"].ref_min < 0 < rows["conv1/conv2d"].ref_max
    assert rows["relu/relu"].ref_min == 0


def test_two_users_are_both_compared() -> None:
    """Trap 5."""
    pair = quantized_pair(TwoUsers(), images())
    report = pt2qa.compare_layers(pair, [images()], progress=False)
    rows = {row.name: row for row in report.rows}
    assert {"conv/conv2d", "relu", "add"} <= rows.keys()
    assert rows["conv/conv2d"].ref_min < 0
    assert rows["relu"].ref_min == 0


def test_one_edge_for_two_uses() -> None:
    """Traps 4 and 6: cat([y, y]) and z + z; dequantize nodes are duplicated per user, rows are not."""
    pair = quantized_pair(SameInputTwice(), images())
    report = pt2qa.compare_layers(pair, [images()], progress=False)
    assert [row.name for row in report.rows] == ["x", "conv/conv2d", "cat", "add"]
    assert report.sqnr == pytest.approx(direct_sqnr(pair.reference(images()), pair.quantized(images())), abs=1e-6)


def _reexported(graph: GraphModule) -> GraphModule:
    return torch.export.export(graph, (images(),)).module()


def _reloaded(graph: GraphModule) -> GraphModule:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(graph, (images(),)), buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


def _renamed(graph: GraphModule) -> GraphModule:
    renamed = copy.deepcopy(graph)
    for number, node in enumerate(renamed.graph.nodes):
        if node.op == "call_function":
            node.name = f"n{number}"
    renamed.recompile()
    return renamed


@pytest.mark.parametrize(
    "change", [copy.deepcopy, _reexported, _reloaded, _renamed], ids=lambda f: f.__name__.strip("_")
)
def test_names_and_numbers_survive_what_renames_nodes(change: Any) -> None:
    """Trap 7: deepcopy, re-export, save and load and no-op passes rename nodes."""
    original = residual_pair()
    report = pt2qa.compare_layers(original, [images()], progress=False)
    changed = pt2qa.pair(original.float_graph, change(original.quantized))
    again = pt2qa.compare_layers(changed, [images()], progress=False)
    assert [row.name for row in again.rows] == [row.name for row in report.rows]
    for row, other in zip(report.rows, again.rows, strict=True):
        assert other.sqnr == pytest.approx(row.sqnr, abs=0.2), row.name
        assert other.dtype == row.dtype


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_qat_pairs_every_conv(quantizer: str) -> None:
    """Trap 8: prepare_qat_pt2e replaces conv and batch norm by new nodes."""
    pair = quantized_pair(residual(), images(), quantizer, qat=True)
    assert [paired.name for paired in pair.pairing.pairs] == ["x", *NAMES]
    report = pt2qa.compare_layers(pair, [images()], progress=False)
    assert report.sqnr == pytest.approx(direct_sqnr(pair.reference(images()), pair.quantized(images())), abs=1e-6)


# -- pair(): graphs that somebody else made ----------------------------------------------------------------------------


def test_pair_of_graphs_made_elsewhere_equals_our_own() -> None:
    capture = pt2qa.capture(residual(), images())
    prepared, quantized = made_elsewhere(capture, images())
    own = pt2qa.compare_layers(residual_pair(), [images()], progress=False)
    for reference in (capture.module(), capture.program, prepared):
        pair = pt2qa.pair(reference, quantized, quantizer="xnnpack", model="Residual")
        report = pt2qa.compare_layers(pair, [images()], progress=False)
        assert [row.name for row in report.rows] == [row.name for row in own.rows]
        assert report.sqnr == pytest.approx(own.sqnr, abs=0.05)
        weights = {row.name: row.sqnr for row in pt2qa.compare_weights(pair).rows if row.quantized}
        assert weights["conv1/conv2d"] > 30


def test_pair_with_another_models_weights_is_refused() -> None:
    capture = pt2qa.capture(residual(), images())
    _, quantized = made_elsewhere(capture, images())
    other = residual()
    with torch.no_grad():
        other.fc.weight.neg_()  # type: ignore[union-attr, operator]
    stranger = pt2qa.capture(other, images())
    with pytest.raises(
        pt2qa.PairingError,
        match=r"weight of fc/linear has an SQNR of -6.0 dB instead of at least 3 dB, .*from one model",
    ):
        pt2qa.pair(stranger.module(), quantized)


def test_what_is_not_a_quantized_graph_is_refused() -> None:
    capture = pt2qa.capture(residual(), images())
    prepared, _ = made_elsewhere(capture, images())
    with pytest.raises(
        pt2qa.PairingError, match=r"still has the observer .* Expected the graph that convert_pt2e returns"
    ):
        pt2qa.pair(capture.module(), prepared)
    with pytest.raises(pt2qa.PairingError, match="nothing in the quantized graph is quantized"):
        pt2qa.pair(capture.module(), capture.module())
    with pytest.raises(pt2qa.PairingError, match="the quantized graph is of type Linear; expected a GraphModule"):
        pt2qa.pair(capture.module(), nn.Linear(2, 2))  # type: ignore[arg-type]


def test_two_quantized_graphs_are_for_compare_graphs() -> None:
    converted = residual_pair().quantized
    for reference in (converted, _reloaded(converted)):
        with pytest.raises(
            pt2qa.PairingError,
            match=r"the reference graph is quantized itself: convert_pt2e put 16 ops into it, .* "
            r"compared by pt2qa\.compare_graphs\(a, b, batches\)\.",
        ):
            pt2qa.pair(reference, converted)


def test_coverage_counts_what_is_annotated_and_quantized() -> None:
    coverage = {entry.op: entry for entry in residual_pair().coverage}
    assert (coverage["conv2d"].total, coverage["conv2d"].quantized) == (2, 2)
    assert coverage["conv2d"].annotated == 2
    assert (coverage["linear"].total, coverage["linear"].quantized) == (1, 1)


def test_nested_graphs_are_listed_as_not_analysed() -> None:
    """Trap 24."""
    example = (torch.randn(4, 16),)
    pair = quantized_pair(Conditional(), example)
    report = pt2qa.compare_layers(pair, [example], progress=False)
    assert any(note.startswith("without rows, inside nested graphs: ") for note in report.notes)
    assert "outer/linear" in {row.name for row in report.rows}


def test_fingerprints_tell_models_apart_and_recognise_the_same() -> None:
    example = (torch.randn(4, 16),)
    torch.manual_seed(1)
    first, second = Linears(), Linears()
    prints = [quantized_pair(model, example).environment.fingerprint for model in (first, second, copy.deepcopy(first))]
    assert prints[0] == prints[2] != prints[1]


# -- handles and loggers of torchao ------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    """A linear for each of two inputs, and parts that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.both = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.both(x).chunk(2, -1)
        return self.a(x).relu() + self.b(y), left * right


def numbered_by_torchao(model: nn.Module, example: Any) -> tuple[GraphModule, GraphModule]:
    """A float graph with handles that torchao gave, and the converted one."""
    program = torch.export.export(model.eval(), example)
    generate_numeric_debug_handle(program)
    reference, graph = (program.module(check_guards=False) for _ in range(2))
    prepared = prepare_pt2e(graph, resolve("xnnpack").build(graph, qat=False))
    prepared(*example)
    return reference, convert_pt2e(prepared)


def test_torchaos_handles_pair_every_op_and_name_no_op_like_an_input() -> None:
    example = (torch.randn(3, 16), torch.randn(3, 16))
    pair = pt2qa.pair(*numbered_by_torchao(TwoInputs(), example))
    assert pair.pairing.unpaired == ()
    assert "both/linear" in {paired.name for paired in pair.pairing.pairs}
    rows = pt2qa.compare_layers(pair, [example], progress=False).rows
    assert [row.op for row in rows if row.name in ("x", "y")] == ["input", "input"]
    assert next(row.op for row in rows if row.name == "both/linear") == "linear"


def test_torchaos_handles_get_reasons_that_are_true() -> None:
    pair = pt2qa.pair(*numbered_by_torchao(residual(), (images(),)))
    assert {unpaired.name: unpaired.reason for unpaired in pair.pairing.unpaired} == {
        "bn1/batch_norm": "folded into conv1/conv2d, which is compared after it",
        "bn2/batch_norm": "folded into conv2/conv2d, which is compared after it",
    }
    example = (torch.randn(4, 16),)
    nested = pt2qa.pair(*numbered_by_torchao(Conditional(), example)).pairing.unpaired
    assert {unpaired.reason for unpaired in nested} == {"inside a nested graph: it has no row"}
    assert all(unpaired.name.startswith("cond.") for unpaired in nested)


def test_ops_without_a_handle_are_listed_on_both_sides() -> None:
    reference, quantized = numbered_by_torchao(residual(), (images(),))
    for graph in (reference, quantized):
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mean.dim):
            del node.meta["custom"]
    unpaired = {(each.side, each.name): each.reason for each in pt2qa.pair(reference, quantized).pairing.unpaired}
    assert unpaired["reference", "mean (mean)"] == "carries no handle"
    assert unpaired["quantized", "mean (mean)"] == (
        "has no handle, like ops of the reference: it cannot be matched with one of them"
    )


def test_loggers_of_torchao_are_left_out() -> None:
    reference, quantized = numbered_by_torchao(residual(), (images(),))
    plain = pt2qa.compare_layers(pt2qa.pair(reference, quantized), [images()], progress=False)
    logged = pt2qa.pair(*map(prepare_for_propagation_comparison, (reference, quantized)))
    assert pt2qa.compare_layers(logged, [images()], progress=False).rows == plain.rows


# -- another model's integers ------------------------------------------------------------------------------------------


class Picks(nn.Module):
    """Logits in an order that a buffer gives, and what is largest."""

    order: Tensor
    mask: Tensor

    def __init__(self, order: list[int], mask: list[float], largest: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.largest = nn.Linear(16, 4), largest
        self.register_buffer("order", torch.tensor(order))
        self.register_buffer("mask", torch.tensor(mask))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.fc(x)
        shown = logits[:, self.order] + self.mask
        return shown, logits.argmax(-1) if self.largest else logits.argmin(-1)


PICKS = Picks([0, 1, 2, 3], [0.0, 0, 0, 0])


def graphs_of_two(first: nn.Module, second: nn.Module) -> tuple[GraphModule, GraphModule]:
    x = torch.randn(3, 16)
    graph = pt2qa.capture(second.eval(), x).module()
    prepared = prepare_pt2e(graph, PlainQuantizer())
    prepared(x)
    return pt2qa.capture(first.eval(), x).module(), convert_pt2e(prepared)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Picks([1, 0, 2, 3], [0.0, 0, 0, 0]), r"order that index reads differs in 2 of 4 values"),
        (Picks([0, 1, 2, 3], [0.0, 0, -math.inf, 0]), r"mask that add reads is NaN or infinite at 1 other places"),
    ],
)
def test_pair_with_other_integers_or_infinities_is_refused(other: nn.Module, what: str) -> None:
    with pytest.raises(pt2qa.PairingError, match=f"{what}, compared with its float value. Pass .* made from one model"):
        pt2qa.pair(*graphs_of_two(PICKS, other))
    assert pt2qa.pair(*graphs_of_two(PICKS, PICKS)).pairing.unpaired == ()


def test_another_argmax_is_an_error_and_not_inf_db() -> None:
    """Trap 45."""
    pair = pt2qa.pair(*graphs_of_two(PICKS, Picks([0, 1, 2, 3], [0.0, 0, 0, 0], largest=False)))
    with pytest.raises(pt2qa.SimulationError, match=r"output\[1\] differs in 3 of 3 values.*not made from one float"):
        pt2qa.compare_layers(pair, [torch.randn(3, 16)], progress=False)
