"""Converted graphs that were saved and loaded, or written in torchao's reference representation."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pandas as pd
import pytest
import torch
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa.plugins import resolve
from tests.flows import quantized_pair
from tests.models import Linears, images, residual
from tests.recomputation import Recording, by_handle

IMAGES, ROWS = images(), torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
CASES: dict[str, tuple[Any, torch.Tensor, dict[str, Any]]] = {
    "xnnpack": (residual, IMAGES, {}),
    "xnnpack:per_channel=false": (residual, IMAGES, {}),
    "xnnpack:mode=dynamic": (Linears, ROWS, {}),
    "xnnpack, QAT": (residual, IMAGES, {"qat": True}),
    "x86": (residual, IMAGES, {}),
    "x86:mode=dynamic": (Linears, ROWS, {}),
    "x86:mode=weight_only": (Linears, ROWS, {}),
    "x86, QAT": (residual, IMAGES, {"qat": True}),
}


@functools.cache
def pair_of(case: str) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    model, x, options = CASES[case]
    return quantized_pair(model(), (x,), case.partition(",")[0], **options)


def reloaded(graph: GraphModule, x: torch.Tensor, **options: Any) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(torch.export.export(graph, (x,), **options), file)
    file.seek(0)
    return torch.export.load(file)


def same(one: Any, other: Any) -> bool:
    """Whether two reports have equal rows; nan is equal to nan."""
    pd.testing.assert_frame_equal(one.to_pandas(extended=True), other.to_pandas(extended=True), check_exact=True)
    return True


@pytest.mark.parametrize("case", CASES)
def test_a_saved_graph_keeps_its_handles_and_computes_the_same(case: str) -> None:
    pair, x = pair_of(case), CASES[case][1]
    again = reloaded(pair.quantized, x)
    handles = [sorted(by_handle(graph)) for graph in (pair.quantized, again.module(check_guards=False))]
    assert set(handles[0]) - set(handles[1]) <= {0}, "only the input may lose its handle, which its place gives back"
    report = pt2qa.compare_graphs(pair.quantized, again, [x], progress=False)
    assert "The graphs agree bit for bit" in report.summary()
    assert report.unpaired == ()
    assert {row.handle for row in report.rows} >= set(handles[0]) - {0}


@pytest.mark.parametrize("case", CASES)
def test_a_saved_graph_gives_the_same_layer_and_weight_reports(case: str) -> None:
    pair, x = pair_of(case), CASES[case][1]
    again = pt2qa.pair(pair.reference, reloaded(pair.quantized, x))
    assert same(pt2qa.compare_layers(again, [x], progress=False), pt2qa.compare_layers(pair, [x], progress=False))
    assert same(pt2qa.compare_weights(again), pt2qa.compare_weights(pair))


def test_a_graph_saved_with_a_free_batch_size_takes_other_batches() -> None:
    capture = pt2qa.capture(residual(), IMAGES, dynamic_shapes=({0: Dim("batch")},))
    pair = pt2qa.quantize(capture, "xnnpack", [IMAGES], progress=False)
    again = reloaded(pair.quantized, IMAGES, dynamic_shapes=({0: Dim("batch")},))
    report = pt2qa.compare_graphs(pair.quantized, again, [images(3), images(5)], progress=False)
    assert "The graphs agree bit for bit" in report.summary()


def test_a_state_dict_holds_no_scale_of_an_activation() -> None:
    """The scales are literals of the graph: loaded into a graph with another calibration, they stay that one's."""
    pair, other = pair_of("xnnpack"), quantized_pair(residual(), (3 * IMAGES,))
    mixed = copy.deepcopy(other.quantized)
    mixed.load_state_dict(pair.quantized.state_dict())
    report = pt2qa.compare_graphs(pair.quantized, mixed, [IMAGES], progress=False)
    assert report.summary().startswith("First difference at x: ")
    assert report.rows[0].note.startswith("rounded to int8 -128..127, scale 0.0256476, ")
    assert all(row.sqnr == float("inf") for row in pt2qa.compare_graphs(pair.quantized, pair.quantized, [IMAGES]).rows)


# -- the reference representation --------------------------------------------------------------------------------------


@functools.cache
def represented(quantizer: str) -> tuple[pt2qa.Capture, GraphModule, GraphModule]:
    """A capture, what ``convert_pt2e`` makes of it, and that in reference representation."""
    torch.manual_seed(0)
    model, x = (residual, IMAGES) if "dynamic" not in quantizer and "only" not in quantizer else (Linears, ROWS)
    capture = pt2qa.capture(model().eval(), x)
    graphs = []
    for written_out in (False, True):
        graph = capture.module()
        prepared = prepare_pt2e(graph, resolve(quantizer).build(graph, qat=False))
        prepared(x)
        graphs.append(convert_pt2e(prepared, use_reference_representation=written_out))
    return capture, graphs[0], graphs[1]


@pytest.mark.parametrize("quantizer", ["xnnpack", "xnnpack:mode=dynamic", "x86", "x86:mode=dynamic"])
def test_a_represented_graph_computes_what_the_converted_one_does(quantizer: str) -> None:
    _, converted, written_out = represented(quantizer)
    report = pt2qa.compare_graphs(converted, written_out, [CASES[quantizer][1]], progress=False)
    assert "The graphs agree bit for bit" in report.summary()
    assert all(each.side == "b" and each.reason.startswith("has no handle") for each in report.unpaired)
    assert any(row.observed_at == "dq" for row in report.rows)


def test_a_linear_in_integers_is_where_a_represented_graph_differs() -> None:
    """Per tensor, torchao rewrites the linear without its handle, and rounds its result otherwise."""
    _, converted, written_out = represented("xnnpack:per_channel=false")
    report = pt2qa.compare_graphs(converted, written_out, [IMAGES], progress=False)
    verdict = report.summary().splitlines()
    assert verdict[0] == "The 7 values that both graphs have agree bit for bit."
    assert verdict[2] == "The first difference may be earlier: 1 op before it cannot be compared, fc/linear last."
    expected, actual = converted(IMAGES).double().numpy(), written_out(IMAGES).double().numpy()
    assert report.outputs[0].atol == pytest.approx(abs(expected - actual).max())
    (last,) = converted.graph.output_node().args[0]
    assert report.outputs[0].atol == pytest.approx(last.args[1]), "one step of the integers"
    mean = next(row for row in report.rows if row.name == "mean")
    values = [Recording.of(graph, IMAGES)[by_handle(graph)[mean.handle]] for graph in (converted, written_out)]
    assert torch.equal(*values)


def test_a_represented_graph_that_cannot_run_is_an_error_that_names_the_op() -> None:
    """torchao's dynamic linear in integers returns float64, which the next choose_qparams refuses."""
    _, converted, written_out = represented("xnnpack:mode=dynamic,per_channel=false")
    with pytest.raises(
        pt2qa.SimulationError,
        match=r"graph b cannot run: quantized_decomposed\.choose_qparams\.tensor fails with AssertionError: Expecting "
        r"input to have dtype torch\.float32/16/b16, but got dtype: torch\.float64\. Run the graph by itself",
    ):
        pt2qa.compare_graphs(converted, written_out, [ROWS], progress=False)


@pytest.mark.parametrize("quantizer", ["xnnpack", "xnnpack:per_channel=false", "xnnpack:mode=dynamic", "x86"])
def test_pair_refuses_a_represented_graph_and_says_what_to_do(quantizer: str) -> None:
    capture, _, written_out = represented(quantizer)
    x = CASES[quantizer][1]
    for graph in (written_out, reloaded(written_out, x)):
        with pytest.raises(
            pt2qa.PairingError,
            match=r"the quantized graph is a reference representation: clamp reads the int8 constant .*, not a "
            r"dequantize op\. Pair what convert_pt2e returns without use_reference_representation, .*compare_graphs",
        ):
            pt2qa.pair(capture.module(), graph)


def test_float16_weights_are_represented_as_they_are_converted() -> None:
    capture, converted, written_out = represented("x86:mode=weight_only")
    reports = [
        pt2qa.compare_layers(pt2qa.pair(capture.module(), graph), [ROWS], progress=False)
        for graph in (converted, written_out)
    ]
    assert same(*reports)
