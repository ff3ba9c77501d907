"""Language models: sequences of any length, a static cache of keys and values, ranges for each input, embeddings."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerAxis, PerGroup, quantize_

import pt2qa
from pt2qa_torchao import mixed_config
from tests.padded_prompts import padded, with_garbage
from tests.zoo.language_models import ARCHITECTURES, Architecture, Logits, language_model, prompts, with_static_cache

pytestmark = pytest.mark.zoo

LENGTHS = (12, 7, 19)
LONGEST = 32
QUANTIZERS = ("xnnpack", "xnnpack:mode=dynamic", "x86:mode=dynamic", "x86:mode=weight_only")


@functools.cache
def captured(architecture: Architecture) -> pt2qa.Capture:
    length = Dim("length", min=2, max=LONGEST)
    shapes = {"tokens": {1: length}}
    return pt2qa.capture(Logits(language_model(architecture)).eval(), prompts(LENGTHS)[0], dynamic_shapes=shapes)


@functools.cache
def pair_of(architecture: Architecture, quantizer: str) -> pt2qa.QuantizedPair:
    return pt2qa.quantize(captured(architecture), quantizer, prompts(LENGTHS))


def step(tokens: Tensor, first: int = 0) -> dict[str, Tensor]:
    """The inputs of a model with a cache: some tokens of a prompt, and where they stand in it."""
    return {"input_ids": tokens, "cache_position": torch.arange(first, first + tokens.shape[1])}


def pooled(pair: pt2qa.QuantizedPair, batches: list[Any]) -> float:
    """The output's SQNR over all batches in dB, from the two graphs alone, each batch from their present state."""
    signal = noise = 0.0
    for batch in batches:
        args, keywords = ((), batch) if isinstance(batch, dict) else ((batch,), {})
        with torch.no_grad():
            expected = pair.capture.module()(*args, **keywords).double()
            actual = pair.quantized(*args, **keywords).double()
        signal += float(expected.square().sum())
        noise += float((expected - actual).square().sum())
    return 10 * math.log10(signal / noise)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_of_unequal_length_make_one_report(architecture: Architecture, quantizer: str) -> None:
    pair, data = pair_of(architecture, quantizer), prompts(LENGTHS)
    report = pt2qa.compare_layers(pair, data, progress=False)
    assert not any("fell back" in note for note in report.notes)
    assert {each.reason for each in report.unpaired} <= {"computed from constants alone, once"}
    linears = {name.name for name in pair.names.values() if name.op == "linear"}
    assert linears <= {row.name for row in report.rows}
    assert (report.batches, report.samples) == (3, 3)
    assert report.sqnr == pytest.approx(pooled(pair, data), abs=1e-4)
    cases = pt2qa.find_bad_cases(pair, data, k=3, progress=False)
    assert {row.batch: row.value for row in cases.rows} == {
        place: pytest.approx(pooled(pair, [prompt]), abs=1e-4) for place, prompt in enumerate(data)
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_quantize_makes_is_paired_op_by_op(architecture: Architecture) -> None:
    capture, data = captured(architecture), prompts(LENGTHS)
    assert capture.eager is not None
    transformed = copy.deepcopy(capture.eager)
    quantize_(transformed, Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)))
    pair = pt2qa.pair(capture, transformed, quantizer="8da4w")
    assert pair.pairing.unpaired == ()
    assert all(torch.equal(pair.quantized(prompt), transformed(prompt)) for prompt in data)
    report = pt2qa.compare_layers(pair, data, progress=False)
    with torch.no_grad():
        both = [torch.cat([net(prompt).flatten() for prompt in data]) for net in (capture.eager, transformed)]
    assert report.sqnr == pytest.approx(pt2qa.sqnr(*both), abs=1e-4)
    ranked = pt2qa.sensitivity(pair, data, progress=False)
    linears = {name.name for name in pair.names.values() if name.op == "linear"}
    assert {row.name for row in ranked.rows if row.kind == "weight"} == linears


class Padded(nn.Module):
    """The logits of prompts that are padded on the right."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86:mode=weight_only"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_is_in_no_number(architecture: Architecture, quantizer: str) -> None:
    """The output's SQNR is that of the prompts' own positions, and other tokens at the padding change no row."""
    given = [prompt[0] for prompt in prompts(LENGTHS)]
    batch = padded(given)
    counts = batch["attention_mask"].bool()
    axes = {0: Dim("prompts", max=8), 1: Dim("length", min=2, max=LONGEST)}
    shapes = {"input_ids": axes, "attention_mask": axes}
    capture = pt2qa.capture(Padded(language_model(architecture)).eval(), (), batch, dynamic_shapes=shapes)
    pair = pt2qa.quantize(capture, quantizer, [batch], progress=False)
    report = pt2qa.compare_layers(pair, [batch], mask="attention_mask", progress=False)
    with torch.no_grad():
        expected, actual = pair.reference(**batch)[counts], pair.quantized(**batch)[counts]
    assert expected.shape == (sum(LENGTHS), 256)
    assert report.sqnr == pytest.approx(pt2qa.sqnr(expected, actual), abs=1e-4)
    assert report.sqnr != pytest.approx(pt2qa.compare_layers(pair, [batch], progress=False).sqnr, abs=1e-3)
    other = pt2qa.compare_layers(pair, [with_garbage(batch)], mask="attention_mask", progress=False)
    for row, same in zip(report.rows, other.rows, strict=True):
        assert (row.name, row.sqnr, row.isolated_sqnr) == (
            same.name,
            pytest.approx(same.sqnr, abs=0.02, nan_ok=True),
            pytest.approx(same.isolated_sqnr, abs=0.02, nan_ok=True),
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_small_errors_add_up(architecture: Architecture) -> None:
    """Weights in float16: the noise of all of them is what each makes alone."""
    pair, data = pair_of(architecture, "x86:mode=weight_only"), prompts(LENGTHS)
    report = pt2qa.sensitivity(pair, data, method="exact", progress=False)
    alone = sum(10 ** (-row.value / 10) for row in report.rows)
    assert -10 * math.log10(alone) == pytest.approx(pooled(pair, data), abs=1)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_a_static_cache_changes_no_number(strict: bool) -> None:
    """Whole prompts through a model that writes keys and values to buffers, against the same model without them."""
    model, length = with_static_cache(language_model("llama"), LONGEST), Dim("length", min=2, max=LONGEST)
    data = [step(prompt) for prompt in prompts(LENGTHS)]
    shapes = {"input_ids": {1: length}, "cache_position": {0: length}}
    cached = pt2qa.capture(model, data[0], dynamic_shapes=shapes, strict=strict)
    assert len(cached.stateful) == 6  # keys, values and the length of two blocks
    pair = pt2qa.quantize(cached, "xnnpack:mode=dynamic", data)
    report = pt2qa.compare_layers(pair, data, progress=False)
    plain = pt2qa.compare_layers(pair_of("llama", "xnnpack:mode=dynamic"), prompts(LENGTHS), progress=False)
    assert report.sqnr == pytest.approx(plain.sqnr, abs=0.01)
    linears = [row.isolated_sqnr for row in report.rows if row.op == "linear"]
    assert linears == pytest.approx([row.isolated_sqnr for row in plain.rows if row.op == "linear"], abs=0.01)
    assert not model.key_cache_0.any(), "the model's cache is as it was"
    assert not pair.quantized.key_cache_0.any(), "calibration leaves the captured cache in the graphs"


def test_a_step_reads_the_keys_of_the_prompt_before_it() -> None:
    """The prompt is in the cache when the step is captured; each batch is one more token."""
    model = with_static_cache(language_model("llama"), LONGEST)
    (prompt,) = prompts((12,))
    with torch.no_grad():
        expected = model(**step(prompt))[:, -1:]
        model(**step(prompt[:, :-1]))
    pair = pt2qa.quantize(
        pt2qa.capture(model, step(prompt[:, -1:], 11)), "xnnpack:mode=dynamic", [step(prompt[:, -1:], 11)]
    )
    steps = [step(torch.tensor([[word]]), 11) for word in (int(prompt[0, -1]), 3, 200)]
    with torch.no_grad():
        assert pt2qa.sqnr(expected, pair.reference(**steps[0])) > 100
    report = pt2qa.compare_layers(pair, steps, progress=False)
    assert report.sqnr == pytest.approx(pooled(pair, steps), abs=1e-4)


class Step(nn.Module):
    """A step whose cache is an input, so that every batch brings that of its own prompt."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, cache_position: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        for layer, key, value in zip(self.model.static_cache.layers, keys, values, strict=True):
            layer.keys.copy_(key)
            layer.values.copy_(value)
        return self.model(input_ids=input_ids, cache_position=cache_position)  # type: ignore[no-any-return]


def test_steps_of_several_prompts_are_batches_where_the_cache_is_an_input() -> None:
    model, batches, expected = with_static_cache(language_model("qwen2"), LONGEST), [], []
    for prompt in prompts(LENGTHS):
        last = prompt.shape[1] - 1
        with torch.no_grad():
            expected.append(model(**step(prompt))[:, -1:])
            model(**step(prompt[:, :-1]))
        layers = model.static_cache.layers
        cache = {"keys": [layer.keys.clone() for layer in layers], "values": [layer.values.clone() for layer in layers]}
        batches.append({**step(prompt[:, -1:], last), **cache})
    pair = pt2qa.quantize(pt2qa.capture(Step(model).eval(), batches[0]), "xnnpack:mode=dynamic", batches)
    for batch, logits in zip(batches, expected, strict=True):
        with torch.no_grad():
            assert pt2qa.sqnr(logits, pair.reference(**batch)) > 100
    report = pt2qa.compare_layers(pair, batches, progress=False)
    assert report.sqnr == pytest.approx(pooled(pair, batches), abs=1e-4)


@pytest.mark.filterwarnings("ignore:_check_is_size will be removed:FutureWarning")
@pytest.mark.parametrize("cache", [False, True])
def test_executorchs_own_llama(cache: bool) -> None:
    from executorch.examples.models.llama.llama_transformer import construct_transformer
    from executorch.examples.models.llama.model_args import ModelArgs

    torch.manual_seed(0)
    size = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 256, "hidden_dim": 192}
    longest = {"max_seq_len": LONGEST, "max_context_len": LONGEST}
    args = ModelArgs(**size, **longest, use_kv_cache=cache, enable_dynamic_shape=cache, generate_full_logits=True)
    model = construct_transformer(args).eval()
    length = {1: Dim("length", min=2, max=LONGEST - 1)}
    data = [(prompt, {"input_pos": torch.tensor([0])}) if cache else (prompt,) for prompt in prompts(LENGTHS)]
    shapes = (length, {"input_pos": None}) if cache else (length,)
    pair = pt2qa.quantize(pt2qa.capture(model, data[0], dynamic_shapes=shapes), "xnnpack:mode=dynamic", data)
    report = pt2qa.compare_layers(pair, data, progress=False)
    assert report.unpaired == ()
    assert len([row for row in report.rows if row.op == "linear"]) == 15
    assert report.sqnr > 25


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_embedding_quantizer_beside_xnnpacks(architecture: Architecture) -> None:
    """Gemma's embedding is the weight of its last linear, too, and each reader rounds it in its own way."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantizer import ComposableQuantizer
    from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer

    dynamic = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    both = ComposableQuantizer([EmbeddingQuantizer(), XNNPACKQuantizer().set_global(dynamic)])
    pair, data = pt2qa.quantize(captured(architecture), both, prompts(LENGTHS)), prompts(LENGTHS)
    weights = {row.name: row for row in pt2qa.compare_weights(pair).rows}
    assert weights["model.model.embed_tokens/embedding"].dtype == "uint8"
    assert weights["model.lm_head/linear"].dtype == "int8"
    assert pt2qa.compare_layers(pair, data, progress=False).sqnr == pytest.approx(pooled(pair, data), abs=1e-4)
    cost = pt2qa.sensitivity(pair, data, progress=False)
    assert cost.worst(1)[0].name == "model.model.embed_tokens/embedding"


def test_the_pasted_call_of_quantize_reaches_the_target() -> None:
    narrow = Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))
    wide = Int8DynamicActivationIntxWeightConfig(torch.int8, PerAxis(0))
    floats, model = (Logits(language_model("llama")).eval() for _ in range(2))
    data = prompts(LENGTHS)
    kept = pt2qa.metrics.token_agreement(floats, [{"tokens": tokens} for tokens in data])
    target = pt2qa.Target(0.9, kept)
    found = mixed_config(captured("llama"), [narrow, wide], data, target=target, progress=False)
    assert narrow in found.configs.values()
    exec(found.code, {"model": model})
    with torch.no_grad():
        both = [torch.cat([net(tokens)[0] for tokens in data]) for net in (floats, model)]
    assert pt2qa.sqnr(*both) == pytest.approx(found.sqnr, abs=1e-3)
    assert found.met
    assert kept(model) == found.value >= 0.9


def test_diagnose_names_a_projection_whose_weights_have_an_outlier() -> None:
    """One weight of 30 times the largest other in its tensor: one scale for the tensor leaves the others no steps."""
    model = language_model("llama")
    with torch.no_grad():
        weight = model.model.layers[1].mlp.down_proj.weight
        weight[5, 7] = 30 * weight.abs().max()
    data = prompts(LENGTHS)
    shapes = {"tokens": {1: Dim("length", min=2, max=LONGEST)}}
    capture = pt2qa.capture(Logits(model).eval(), data[0], dynamic_shapes=shapes)
    pair = pt2qa.quantize(capture, "xnnpack:per_channel=false", data)
    found = pt2qa.diagnose(pair, data, progress=False)
    assert any("layers.1.mlp" in row.name for row in found.rows[:2]), found.table()
