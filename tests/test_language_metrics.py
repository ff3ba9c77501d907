"""Metrics of language models, against torch's own loss on the prompts one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2qa
from tests.padded_prompts import Running, padded, prompts, quantized


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Running().eval()


def test_log_likelihood_and_accuracy_are_those_of_the_prompts_one_by_one(model: nn.Module) -> None:
    losses, hits, count = 0.0, 0, 0
    for prompt in prompts():
        scores = model(**padded([prompt]))["logits"][0, :-1].detach().double()
        losses += float(functional.cross_entropy(scores, prompt[1:], reduction="sum"))
        hits += int((scores.argmax(-1) == prompt[1:]).sum())
        count += len(prompt) - 1
    batch = [padded(prompts())]
    assert pt2qa.metrics.log_likelihood(batch)(model) == pytest.approx(-losses / count, rel=1e-6)
    assert pt2qa.metrics.perplexity(model, batch) == pytest.approx(math.exp(losses / count), rel=1e-6)
    assert pt2qa.metrics.next_token_accuracy(batch)(model) == hits / count


def test_token_agreement_counts_only_what_is_not_padding(model: nn.Module) -> None:
    batch = padded(prompts())

    def wrong_in_padding(**inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = model(**inputs)["logits"]
        return torch.where(inputs["attention_mask"].bool().unsqueeze(-1), scores, -scores)

    agreement = pt2qa.metrics.token_agreement(model, [batch])
    assert agreement(model) == agreement(wrong_in_padding) == 1.0
    assert pt2qa.metrics.token_agreement(model, [batch], mask=None)(wrong_in_padding) < 1.0


def test_without_a_next_token_there_is_no_number(model: nn.Module) -> None:
    assert math.isnan(pt2qa.metrics.log_likelihood([padded([torch.tensor([3])])])(model))


def test_an_output_may_be_a_tuple(model: nn.Module) -> None:
    batch = [padded(prompts())]
    as_tuple = pt2qa.metrics.log_likelihood(batch, logits=1)(lambda **inputs: (None, model(**inputs)["logits"]))
    assert as_tuple == pt2qa.metrics.log_likelihood(batch)(model)


def test_they_are_targets_of_a_search(model: nn.Module) -> None:
    batch = padded(prompts())
    pair = quantized(model, "xnnpack")
    target = pt2qa.Target(0.0, metric=pt2qa.metrics.token_agreement(model, [batch]))
    assert target.name == "token_agreement"
    found = pt2qa.reconfigure(pair, [batch], target=target, verify_code=False, progress=False)
    assert found.stages[-1].quality == pt2qa.metrics.token_agreement(model, [batch])(found.pair.quantized)
