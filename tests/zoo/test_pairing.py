"""On real models nothing gets lost: every conv and linear is paired and quantized, the numbers are the graphs' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.zoo.pairs import QUANTIZERS, captured, compute_nodes, decibels, handle, layers_of, pair_of

pytestmark = pytest.mark.zoo

MODELS = ("mobilenet_v2", "efficientnet_lite0")
each_pair = pytest.mark.parametrize(("model", "quantizer"), [(m, q) for m in MODELS for q in QUANTIZERS])


@each_pair
def test_every_conv_and_linear_is_paired(model: str, quantizer: str) -> None:
    made, pair = captured(model), pair_of(model, quantizer)
    layers = [layer for layer in made.model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    wanted = {handle(node) for node in compute_nodes(made.capture.program.graph)}
    assert len(wanted) == len(layers) == {"mobilenet_v2": 53, "efficientnet_lite0": 50}[model]
    assert wanted <= {paired.handle for paired in pair.pairing.pairs}
    assert wanted == {row.handle for row in layers_of(model, quantizer).rows if row.op in ("conv2d", "linear")}


@each_pair
def test_only_folded_batch_norms_are_unpaired(model: str, quantizer: str) -> None:
    norms = sum(isinstance(layer, nn.BatchNorm2d) for layer in captured(model).model.modules())
    unpaired = pair_of(model, quantizer).pairing.unpaired
    assert len(unpaired) == norms
    assert all(entry.name.endswith("/batch_norm") and entry.side == "reference" for entry in unpaired)
    assert all(entry.reason.startswith("folded into ") for entry in unpaired)


@each_pair
def test_every_conv_and_linear_reads_quantized_input_and_weight(model: str, quantizer: str) -> None:
    # Trap 28: with strict=False the x86 quantizer leaves all 49 convs of EfficientNet-Lite0, a subclass, in float.
    made, pair = captured(model), pair_of(model, quantizer)
    assert made.capture.strict is False
    nodes = list(compute_nodes(pair.quantized.graph))
    in_float = [
        pair.names[handle(node)].name
        for node in nodes
        for argument in node.args[:2]
        if "dequantize_per_" not in str(argument.target)
    ]
    assert in_float == []
    assert len(nodes) == {"mobilenet_v2": 53, "efficientnet_lite0": 50}[model]
    convs = next(entry for entry in pair.coverage if entry.op == "conv2d")
    assert (convs.total, convs.annotated, convs.quantized) == (len(nodes) - 1,) * 3


@each_pair
def test_simulator_equals_the_converted_graph_bit_for_bit(model: str, quantizer: str) -> None:
    pair = pair_of(model, quantizer)
    for batch in captured(model).batches:
        assert pair.verify(batch) == (), "the converted ops had to stand in for the fused ones"
        with torch.no_grad():
            expected = pair.quantized(batch)
        (simulated,) = pair.simulator.run(pair.values(batch), on=True)
        assert torch.equal(simulated, expected)


@each_pair
def test_reference_is_the_eager_model(model: str, quantizer: str) -> None:
    made, pair = captured(model), pair_of(model, quantizer)
    with torch.no_grad():
        match = decibels([made.model(batch) for batch in made.batches], [pair.reference(b) for b in made.batches])
    assert match >= 60, f"the reference matches the eager model at {match:.1f} dB"


@each_pair
def test_output_sqnr_equals_a_direct_computation(model: str, quantizer: str) -> None:
    batches, pair = captured(model).batches, pair_of(model, quantizer)
    with torch.no_grad():
        direct = decibels([pair.reference(batch) for batch in batches], [pair.quantized(batch) for batch in batches])
    report = layers_of(model, quantizer)
    assert [row.name for row in report.outputs] == ["output"]
    assert report.sqnr == pytest.approx(direct, abs=1e-6)
    assert (report.batches, report.samples) == (2, 20)


def test_another_process_gives_the_same_handles_and_names() -> None:
    program = """
import json, sys, pt2qa
from tests.zoo import models
capture = pt2qa.capture(models.mobilenet_v2(), (models.pictures()[:10],))
json.dump([[handle, name.name, name.module, name.op] for handle, name in capture.names.items()], sys.stdout)
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    names = captured("mobilenet_v2").capture.names
    assert json.loads(result.stdout) == [[handle, op.name, op.module, op.op] for handle, op in names.items()]
    assert names[1].name == "features.0.0/conv2d"
