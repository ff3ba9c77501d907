"""A target is met only if it is met on data that the search did not see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from tests.flows import quantized_pair


@pytest.fixture(scope="module")
def own() -> list[Tensor]:
    """Batches of one kind; the first two calibrate."""
    torch.manual_seed(0)
    return [torch.rand(8, 8) for _ in range(3)]


@pytest.fixture(scope="module")
def pair(own: list[Tensor]) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(nn.Linear(8, 8), own[0], batches=own[:2])


def test_batches_that_the_search_does_not_see_decide_as_well(pair: pt2qa.QuantizedPair, own: list[Tensor]) -> None:
    found = pt2qa.reconfigure(pair, [*own[:2], 5 * own[2]], target=20, verify_code=False, progress=False)
    assert found.met == 0
    assert "The target is met on the batches that the search saw alone: " in found.verdict
    assert "dB on 8 samples that the search did not see" in found.verdict


def test_the_verdict_says_what_other_data_may_have(pair: pt2qa.QuantizedPair, own: list[Tensor]) -> None:
    found = pt2qa.reconfigure(pair, own, target=20, verify_code=False, progress=False)
    assert found.met == 1
    assert "on 8 samples that the search did not see, other data " in found.verdict


def test_of_two_batches_none_is_kept_apart(pair: pt2qa.QuantizedPair, own: list[Tensor]) -> None:
    found = pt2qa.reconfigure(pair, [*own[:2], own[0]], target=20, verify_code=False, progress=False)
    assert "did not see" not in found.verdict
