"""Reference and quantized graph, handle by handle: traps 1 to 8."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa.plugins import resolve
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
        pt2qa.PairingError, match=r"weight of fc/linear matches its float value at -6.0 dB; .*from one model"
    ):
        pt2qa.pair(stranger.module(), quantized)


def test_graphs_without_handles_are_refused() -> None:
    plain = torch.export.export(residual(), (images(),)).module()
    with pytest.raises(
        pt2qa.PairingError, match=r"the reference graph carries no handles\. Capture the model with pt2qa"
    ):
        pt2qa.pair(plain, residual_pair().quantized)
    with pytest.raises(pt2qa.PairingError, match="the quantized graph carries no handles"):
        pt2qa.pair(residual_pair().reference, plain)


def test_what_is_not_a_quantized_graph_is_refused() -> None:
    capture = pt2qa.capture(residual(), images())
    prepared, _ = made_elsewhere(capture, images())
    with pytest.raises(
        pt2qa.PairingError, match=r"still has the observer .* Expected the graph that convert_pt2e returns"
    ):
        pt2qa.pair(capture.module(), prepared)
    with pytest.raises(pt2qa.PairingError, match="nothing in the quantized graph is quantized"):
        pt2qa.pair(capture.module(), capture.module())
    with pytest.raises(pt2qa.PairingError, match="the quantized graph is a Linear; expected a GraphModule"):
        pt2qa.pair(capture.module(), nn.Linear(2, 2))  # type: ignore[arg-type]


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
    assert any(note.startswith("not analysed, inside nested graphs: ") for note in report.notes)
    assert "outer/linear" in {row.name for row in report.rows}


def test_fingerprints_tell_models_apart_and_recognise_the_same() -> None:
    example = (torch.randn(4, 16),)
    torch.manual_seed(1)
    first, second = Linears(), Linears()
    prints = [quantized_pair(model, example).environment.fingerprint for model in (first, second, copy.deepcopy(first))]
    assert prints[0] == prints[2] != prints[1]
