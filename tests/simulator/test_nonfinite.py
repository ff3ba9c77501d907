"""Which op gives the first value that is not finite, in which model, and in which sample."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pt2qa._simulator.nonfinite import NonFinite, first_nonfinite, sample_of
from tests.flows import quantized_pair, residual_pair
from tests.models import images


class Attention(nn.Module):
    """Scores of which a mask hides some; a row that is hidden whole has the softmax NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return scores.masked_fill(~keep, -math.inf).softmax(-1)


class Logarithm(nn.Module):
    """Small values, which quantization rounds to zero, go through a logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.first.weight.data = torch.eye(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.first(x))


def spoilt(value: float) -> Tensor:
    batch = images()
    batch[1, 2, 3, 4] = value
    return batch


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
@pytest.mark.parametrize(("value", "what"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")])
def test_what_the_batch_itself_holds_is_its_own_fault(quantizer: str, value: float, what: str) -> None:
    found = first_nonfinite(residual_pair(quantizer).simulator, [spoilt(value)])
    assert found == NonFinite("x", "batch", what, 1)  # type: ignore[arg-type]


def test_a_batch_whose_values_are_all_finite_has_none() -> None:
    assert first_nonfinite(residual_pair().simulator, [images()]) is None


def test_a_mask_that_both_models_share_is_none_but_what_a_softmax_makes_of_a_hidden_row_is() -> None:
    keep = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    x = torch.linspace(-1, 1, 160).reshape(2, 5, 16)
    pair = quantized_pair(Attention(), (x, keep), "x86")
    assert first_nonfinite(pair.simulator, [x, keep]) is None
    keep[1, 2] = False
    assert first_nonfinite(pair.simulator, [x, keep]) == NonFinite("softmax", "both", "NaN", 1, "masked_fill")


def test_what_quantization_alone_makes_is_told_from_what_the_float_model_makes() -> None:
    pair = quantized_pair(Logarithm(), (torch.linspace(0.5, 4, 16).reshape(4, 4),))
    x = torch.ones(4, 4)
    x[2, 3] = 1e-4
    found = first_nonfinite(pair.simulator, [x])
    assert found == NonFinite("log", "quantized", "infinite", 2)
    x[2, 3] = -1.0
    found = first_nonfinite(pair.simulator, [x])
    assert found is not None
    assert (found.name, found.what, found.sample) == ("log", "NaN", 2)
    assert found.side in ("both", "reference")


def test_the_first_wrong_sample_is_known_where_there_are_samples() -> None:
    wrong = torch.tensor([[False, False], [False, True], [True, False]])
    assert [sample_of(wrong, 3), sample_of(wrong, 2), sample_of(torch.tensor(True), 1)] == [1, -1, -1]
