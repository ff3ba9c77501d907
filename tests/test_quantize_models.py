"""Models of torchao's ``quantize_`` as the quantized side of a pair."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)
from torchao.quantization.quant_primitives import MappingType
from torchao.utils import unwrap_tensor_subclass

import pt2qa

WORDS, WIDTH = 40, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList([Block(), Block()]),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


CONFIGS: dict[str, Any] = {
    "int8": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
    "int4 groups": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "int4 asymmetric": IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=PerGroup(16), mapping_type=MappingType.ASYMMETRIC
    ),
    "int2 groups": IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerGroup(16)),
    "8da4w": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)),
    "8da8w": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0)),
}
NARROW = {"int4 groups": (-8, 7), "int4 asymmetric": (-8, 7), "int2 groups": (-2, 1), "8da4w": (-8, 7)}


@functools.cache
def floats() -> tuple[Decoder, pt2qa.Capture, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, length = Decoder().eval(), torch.export.Dim("length", min=2, max=32)
    batches = tuple(torch.randint(WORDS, (2, size)) for size in (7, 5))
    return model, pt2qa.capture(model, batches[0], dynamic_shapes=({1: length},)), batches


@functools.cache
def quantized(config: str) -> tuple[nn.Module, pt2qa.QuantizedPair]:
    model, capture, _ = floats()
    transformed = copy.deepcopy(model)
    quantize_(transformed, CONFIGS[config])
    return transformed, pt2qa.pair(capture, transformed, quantizer=config)


def weights_of(transformed: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Float and dequantized weight of each linear, by module."""
    model, _, _ = floats()
    return {
        name: (part.weight.detach(), transformed.get_submodule(name).weight.dequantize())  # type: ignore[operator,union-attr]
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
    }


@pytest.mark.parametrize("config", CONFIGS)
def test_the_quantized_graph_computes_what_the_model_computes(config: str) -> None:
    transformed, pair = quantized(config)
    _, _, batches = floats()
    assert pair.pairing.unpaired == ()
    assert all(torch.equal(pair.quantized(batch), transformed(batch)) for batch in batches)
    kinds = [site.kind for site in pair.sites]
    assert kinds.count("weight") == 9
    assert kinds.count("activation") == (9 if config.startswith("8da") else 0)
    assert {site.params.dtype for site in pair.sites if site.kind == "weight"} == {
        "int2" if "int2" in config else "int4" if config in NARROW else "int8"
    }
    for batch in batches:
        pair.verify(batch)


@pytest.mark.parametrize("config", CONFIGS)
def test_weights_equal_numpy(config: str) -> None:
    transformed, pair = quantized(config)
    rows = {row.module: row for row in pt2qa.compare_weights(pair).rows if row.attr == "weight" and row.quantized}
    own = weights_of(transformed)
    assert rows.keys() == own.keys()
    for name, (weight, rounded) in own.items():
        reference, other = (each.detach().double().numpy() for each in (weight, rounded))
        noise = ((reference - other) ** 2).sum(1)
        assert rows[name].sqnr == pytest.approx(10 * np.log10((reference**2).sum() / noise.sum()), abs=1e-4)
        channels = 10 * np.log10((reference**2).sum(1) / noise)
        assert rows[name].worst_channel_sqnr == pytest.approx(channels.min(), abs=1e-4)
        subclass: Any = transformed.get_submodule(name).weight
        scale = subclass.scale.detach().double().reshape(len(weight), -1)
        steps = np.abs(reference - other) / np.repeat(scale.numpy(), weight.shape[1] // scale.shape[1], axis=1)
        assert rows[name].max_lsb == pytest.approx(steps.max(), rel=1e-5)
        assert ("a scale for each block of 1x" in rows[name].note) == (config in NARROW)


@pytest.mark.parametrize("config", ["int4 groups", "8da4w"])
def test_sensitivities_and_isolated_errors_are_those_of_one_weight_alone(config: str) -> None:
    transformed, pair = quantized(config)
    model, _, batches = floats()
    found = {row.name: row for row in pt2qa.sensitivity(pair, batches, method="exact").rows if row.kind == "weight"}
    projected = {row.name: row for row in pt2qa.sensitivity(pair, batches, method="projection").rows}
    for name, (_, rounded) in weights_of(transformed).items():
        alone = copy.deepcopy(model)
        alone.get_submodule(name).weight = nn.Parameter(rounded)  # type: ignore[assignment]
        with torch.no_grad():
            both = [(model(batch).double(), alone(batch).double()) for batch in batches]
        signal = sum(float(ref.square().sum()) for ref, _ in both)
        noise = sum(float((ref - other).square().sum()) for ref, other in both)
        row = found[f"{name}/linear"]
        assert row.value == pytest.approx(10 * np.log10(signal / noise), abs=1e-3)
        assert abs(projected[row.name].value - row.value) < max(0.5, 3 * projected[row.name].error)


def test_the_budget_tells_clamping_from_rounding_in_groups() -> None:
    model, capture, batches = floats()
    transformed = copy.deepcopy(model)
    quantize_(transformed, CONFIGS["int4 groups"])
    weight: Any = transformed.layers[1].down.weight  # type: ignore[union-attr,index]
    with torch.no_grad():
        weight.scale.mul_(0.25)  # now the integers of most values would be beyond -8..7
        exact = model.layers[1].down.weight.view(WIDTH, 3, 32) / weight.scale[..., None]  # type: ignore[union-attr,index,operator]
        weight.qdata.copy_(exact.round().clamp(-8, 7).view(WIDTH, 96).to(torch.int8))
    pair = pt2qa.pair(capture, transformed)
    rows = pt2qa.error_budget(pair, batches).rows
    worst, second = sorted(rows, key=lambda row: -row.noise)[:2]
    assert (worst.name, worst.mechanism) == ("layers.1.down/linear", "weight clamping")
    assert worst.noise > 3 * second.noise
    assert max(row.noise for row in rows if row.mechanism == "weight clamping" and row is not worst) == 0


@pytest.mark.parametrize("config", CONFIGS)
def test_every_analysis_runs(config: str) -> None:
    _, pair = quantized(config)
    _, _, batches = floats()
    report = pt2qa.compare_layers(pair, batches)
    assert report.batches_apart == 0
    linears = [row for row in report.rows if row.op == "linear"]
    assert len(linears) == 9
    assert all(5 < row.isolated_sqnr < 60 for row in linears)
    assert pt2qa.find_bad_cases(pair, batches).rows
    profile = pt2qa.profile(pair, batches, side="quantized", per_channel=True)
    schemes = {row.scheme for row in profile.rows if row.role == "weight" and row.op == "linear"}
    assert schemes == ({"per_group"} if config in NARROW else {"per_channel"})
    places = [row for row in pt2qa.annotations(pair).rows if row.role == "weight" and row.op == "linear"]
    assert {row.scheme for row in places} == schemes
    if config in NARROW:
        assert {(row.quant_min, row.quant_max) for row in places} == {NARROW[config]}
    assert not [finding for finding in pt2qa.check(pair, batches=batches).rows if finding.severity == "error"]
    diagnosis = pt2qa.diagnose(pair, batches)
    assert "reconfigure" not in diagnosis.next_command
    with pytest.raises(pt2qa.SelectionError, match=r"not made by pt2qa\.quantize"):
        pt2qa.repair(pair, batches)


def test_programs_are_paired_like_the_model() -> None:
    transformed, pair = quantized("8da4w")
    _, capture, batches = floats()
    shapes = ({1: torch.export.Dim("length", min=2, max=32)},)
    numbers = ["name", "sqnr", "isolated_sqnr"]
    expected = pt2qa.compare_layers(pair, batches, ops=["linear"]).to_pandas()[numbers]
    plain = unwrap_tensor_subclass(copy.deepcopy(transformed))
    programs = [torch.export.export(model, (batches[0],), dynamic_shapes=shapes) for model in (transformed, plain)]
    for program in (*programs, pt2qa.with_handles(programs[1])):  # the last one's are not those of the float program
        found = pt2qa.compare_layers(pt2qa.pair(capture, program), batches, ops=["linear"]).to_pandas()[numbers]
        assert found.equals(expected)


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig])
def test_models_that_multiply_integers_are_compared_as_graphs(config: Any) -> None:
    model, capture, batches = floats()
    transformed = copy.deepcopy(model)
    quantize_(transformed, config())
    with pytest.raises(pt2qa.PairingError, match=r"Intx\.\.\..*pt2qa\.compare_graphs"):
        pt2qa.pair(capture, transformed)
    report = pt2qa.compare_graphs(capture, transformed, batches)
    with torch.no_grad():
        both = [torch.cat([net(batch).flatten() for batch in batches]) for net in (model, transformed)]
    assert report.outputs[0].sqnr == pytest.approx(pt2qa.sqnr(*both), abs=1e-4)
    assert {row.op for row in report.rows} >= {"silu", "embedding"}
