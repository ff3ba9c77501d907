"""Two graphs of real models: saved and loaded, lowered to the edge, reference against converted."""

from __future__ import annotations

import io

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
    for other in (torch.export.load(file), to_edge(program).exported_program()):
        report = pt2qa.compare_graphs(pair.quantized, other, [batch], progress=False)
        assert report.summary().startswith("The graphs agree bit for bit"), report.summary()
        assert report.unpaired == ()


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("model", ["mobilenet_v2", "resnet18"])
def test_reference_against_converted_is_the_cumulative_error(model: str, quantizer: str) -> None:
    pair, batch = pair_of(model, quantizer), captured(model).batches[0]
    layers = pt2qa.compare_layers(pair, [batch], isolated=False, progress=False)
    graphs = pt2qa.compare_graphs(pair.reference, pair.quantized, [batch], progress=False)
    key = [(row.name, row.observed_at, row.dtype) for row in layers.rows]
    assert [(row.name, row.observed_at, row.dtype) for row in graphs.rows] == key
    assert [row.sqnr for row in graphs.rows] == pytest.approx([row.sqnr for row in layers.rows], abs=1e-6)
