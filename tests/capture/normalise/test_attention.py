"""Attention taken apart: the same numbers, written with ops that quantizers take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import pt2qa
from pt2qa import capture
from tests.capture.models import Forward

STEPS, WIDTH, HEADS = 6, 32, 4
X = torch.randn(2, STEPS, WIDTH, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(STEPS, STEPS, dtype=torch.bool).tril()
EMPTY_ROW = MASK.clone().index_fill_(0, torch.tensor([2]), False)
"""A mask that leaves the third query nothing: softmax would give NaN there, attention gives zeros."""
MINUS_INF = torch.zeros(STEPS, STEPS).masked_fill(~EMPTY_ROW, -math.inf)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

SPELLINGS: dict[str, Attention] = {
    "plain": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.2),
    "bool mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=EMPTY_ROW),
    "float mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MINUS_INF),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
}


def sdpa_model(attention: Attention) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return m.out(attention(q, k, v).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    return Forward(forward, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH))


def module_model(call: Callable[..., Any], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
    return Forward(call, mha=attention, fc=nn.Linear(WIDTH, 4))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "fused": lambda: module_model(lambda m, x: m.fc(m.mha(x, x, x, need_weights=False)[0])),
    "weights": lambda: module_model(lambda m, x: m.fc(m.mha(x, x, x)[0])),
    "masked weights": lambda: module_model(lambda m, x: m.fc(m.mha(x, x, x, attn_mask=~MASK)[0])),
    "two inputs": lambda: module_model(lambda m, x: m.fc(m.mha(x, x + 1, x + 1, need_weights=False)[0])),
    "other width": lambda: module_model(
        lambda m, x: m.fc(m.mha(x, x[..., :8], x[..., :8], need_weights=False)[0]), kdim=8, vdim=8
    ),
}


def ops_of(captured: pt2qa.Capture) -> list[str]:
    return [op.op for op in captured.names.values()]


@pytest.mark.parametrize("name", SPELLINGS)
def test_sdpa_becomes_two_matmuls_with_the_same_numbers(name: str) -> None:
    model = sdpa_model(SPELLINGS[name])
    captured = capture(model, X, decompose="attention")
    ops = ops_of(captured)
    assert ops.count("matmul") == 2
    assert "scaled_dot_product_attention" not in ops
    assert [(change.name, change.what) for change in captured.changes if change.rule == "attention"] == [
        ("scaled_dot_product_attention", "decomposed into two matmuls and the ops between them")
    ]
    # neither a sum nor a product is made, which XNNPACK would round together with a mask or a second time
    assert not {"add", "mul"} & set(ops)
    other = torch.randn(X.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(captured.module()(other), model(other))


def test_the_batch_may_be_dynamic() -> None:
    model = sdpa_model(SPELLINGS["causal"])
    captured = capture(model, X, dynamic_shapes=({0: Dim("batch")},), decompose="attention")
    other = torch.randn(5, STEPS, WIDTH)
    torch.testing.assert_close(captured.module()(other), model(other))


@pytest.mark.parametrize("name", MODULES)
def test_x86_reaches_the_linears_and_matmuls_of_a_multihead_attention_trap_35(name: str) -> None:
    """By default x86 leaves the linears float: they are part of a module that it does not know."""
    model = MODULES[name]()
    with_matmul = pt2qa.quantizer("x86", op_types={"matmul": {}})
    whole = pt2qa.quantize(capture(model, X), "x86", [X], progress=False)
    apart = pt2qa.quantize(capture(model, X, decompose="attention"), with_matmul, [X], progress=False)
    quantized = [{entry.op: (entry.quantized, entry.total) for entry in pair.coverage} for pair in (whole, apart)]
    assert quantized[0]["linear"][0] == 1
    linears = quantized[1]["linear"]
    assert linears[0] == linears[1] == {"two inputs": 5, "other width": 5}.get(name, 3)
    assert quantized[1]["matmul"] == (2, 2)
    assert "bmm" not in quantized[1]
    report = pt2qa.compare_layers(apart, [X], progress=False)
    assert report.sqnr > 25
    assert not [note for note in report.notes if "float" in note]


def test_a_mask_does_not_spoil_a_scale_trap_34() -> None:
    model = sdpa_model(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MINUS_INF.clamp(min=-3.4e38)))
    pair = pt2qa.quantize(capture(model, X, decompose="attention"), "xnnpack", [X], progress=False)
    assert max(site.params.largest_scale for site in pair.sites) < 1
    assert pt2qa.compare_layers(pair, [X], progress=False).sqnr > 25


def test_a_transformer_layer_is_quantized_whole() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True).eval()
    pair = pt2qa.quantize(capture(model, X, decompose="attention"), "x86", [X], progress=False)
    assert [(e.quantized, e.total) for e in pair.coverage if e.op == "linear"] == [(4, 4)]


def test_a_scale_of_zero_and_a_product_with_factors_keep_their_numbers() -> None:
    class MultiheadAttention(nn.Module):  # a class of the user's own, with the name of torch's
        def forward(self, mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return torch.baddbmm(mask, query, key, beta=0.5, alpha=0.125)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiheadAttention()

        def forward(self, mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.attention(mask, query, key)
            return scores, F.scaled_dot_product_attention(query, query, query, scale=0.0)

    # capture holds the program against the model at 100 dB.
    inputs = (torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5))
    captured = capture(Own().eval(), inputs, decompose=("attention",))
    assert len(captured.changes) == 2
