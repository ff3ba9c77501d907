"""The coverage of a pair is that of its annotation report: one table of what is annotated and what is quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pt2qa
from pt2qa.testing import MODELS
from tests.flows import quantized_pair
from tests.overrides.strangers import STRANGERS

SHOWN = (*("conv_bn_relu", "conv_transpose", "cat", "attention", "multihead_attention", "lstm", "embedding"),)
"""Of the models of the conformance kit: all of them agree, and take minutes."""


def embedding_quantizer() -> Any:
    """torchao's: it annotates embeddings and never sets ``_annotated``."""
    from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer

    return EmbeddingQuantizer()


QUANTIZERS: dict[str, Callable[[], Any]] = {
    "xnnpack": lambda: "xnnpack",
    "xnnpack dynamic": lambda: "xnnpack:mode=dynamic",
    "x86": lambda: "x86",
    "x86 weight-only": lambda: "x86:mode=weight_only",
    "cadence": STRANGERS["cadence"][0],
    "samsung": STRANGERS["samsung"][0],
    "embedding": embedding_quantizer,
}


def quantized_or_none(capture: pt2qa.Capture, quantizer: Any, batches: Any) -> pt2qa.QuantizedPair | None:
    """None where the quantizer takes nothing of the model."""
    try:
        return pt2qa.quantize(capture, quantizer, batches, progress=False)
    except pt2qa.QuantizeError as error:
        if "annotated 0 of " not in str(error):
            raise
        return None


def counts(kinds: Any) -> dict[str, tuple[int, int, int]]:
    return {kind.op: (kind.total, kind.annotated, kind.quantized) for kind in kinds}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", SHOWN)
def test_coverage_agrees_with_annotations(name: str) -> None:
    model = MODELS[name]
    batches = model.batches()
    capture = pt2qa.capture(model.build(), batches[0], dynamic_shapes=model.dynamic_shapes, decompose=model.decompose)
    compared = 0
    with_matmul = {"x86 with matmul": lambda: pt2qa.quantizer("x86", op_types={"matmul": {}})}
    for quantizer, make in (QUANTIZERS | with_matmul if name == "attention" else QUANTIZERS).items():
        pair = quantized_or_none(capture, make(), batches)
        if pair is None:
            continue
        compared += 1
        assert counts(pair.coverage) == counts(pt2qa.annotations(pair).coverage), quantizer
    assert compared >= 2


def test_what_a_quantizer_annotates_counts_though_it_does_not_say_so() -> None:
    """Trap 46: ``_annotated`` is for quantizers among themselves."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    pair = quantized_pair(model, torch.tensor([[1, 2, 3]]), embedding_quantizer())
    assert counts(pair.coverage) == {"embedding": (1, 1, 1), "linear": (1, 0, 0)}
