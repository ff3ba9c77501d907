"""Two graphs of real models: saved and loaded, lowered to the edge, reference against converted."""

from __future__ import annotations

import io
import math

import pytest
import torch
from executorch.exir import to_edge

import pt2qa
from tests.zoo.pairs import QUANTIZERS, captured, pair_of

pytestmark = pytest.mark.zoo


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("model", ["mobilenet_v2", "resnet18"])
def test_a_reloaded_graph_and_an_edge_program_compute_what_was_converted(model: str, quantizer: str) -> None:
    pair, batch = pair_of(model, quantizer), captured(model).batches[0]
    program = torch.export.export(pair.quantized, (batch,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    reloaded = pt2qa.compare_graphs(pair.quantized, torch.export.load(file), [batch], progress=False)
    assert reloaded.summary().startswith("The graphs agree bit for bit"), reloaded.summary()
    edge = pt2qa.compare_graphs(pair.quantized, to_edge(program).exported_program(), [batch], progress=False)
    # It has addmm in place of linear, whose kernel adds in another order on some processors.
    apart = [row for row in edge.rows if row.sqnr != math.inf]
    assert {row.op for row in apart} <= {"linear"}, edge.summary()
    assert all(row.sqnr > 120 for row in (*apart, *edge.outputs)), edge.summary()
    assert reloaded.unpaired == edge.unpaired == ()


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("model", ["mobilenet_v2", "resnet18"])
def test_reference_against_converted_is_the_cumulative_error(model: str, quantizer: str) -> None:
    pair, batch = pair_of(model, quantizer), captured(model).batches[0]
    layers = pt2qa.compare_layers(pair, [batch], isolated=False, progress=False)
    graphs = pt2qa.compare_graphs(pair.reference, pair.quantized, [batch], progress=False)
    key = [(row.name, row.observed_at, row.dtype) for row in layers.rows]
    assert [(row.name, row.observed_at, row.dtype) for row in graphs.rows] == key
    assert [row.sqnr for row in graphs.rows] == pytest.approx([row.sqnr for row in layers.rows], abs=1e-6)
