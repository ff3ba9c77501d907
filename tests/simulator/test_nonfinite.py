"""Which op gives the first value that is not finite, in which model, and in which sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pt2qa._report.set_apart import SetApart
from pt2qa._simulator.accumulate import first_fault, is_empty, sample_of, unlike
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
    found = first_fault(residual_pair(quantizer).simulator, [spoilt(value)], 5, 7)
    assert found == SetApart(5, 7, 1, "batch", what, "x")


def test_a_batch_whose_values_are_all_finite_has_none() -> None:
    assert first_fault(residual_pair().simulator, [images()], 5, 7) is None


def test_a_mask_that_both_models_share_is_none_but_what_a_softmax_makes_of_a_hidden_row_is() -> None:
    keep = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    x = torch.linspace(-1, 1, 160).reshape(2, 5, 16)
    pair = quantized_pair(Attention(), (x, keep), "x86")
    assert first_fault(pair.simulator, [x, keep], 5, 7) is None
    keep[1, 2] = False
    assert first_fault(pair.simulator, [x, keep], 5, 7) == SetApart(5, 7, 1, "both", "NaN", "softmax", "masked_fill")


def test_what_quantization_alone_makes_is_told_from_what_the_float_model_makes() -> None:
    pair = quantized_pair(Logarithm(), (torch.linspace(0.5, 4, 16).reshape(4, 4),))
    x = torch.ones(4, 4)
    x[2, 3] = 1e-4
    found = first_fault(pair.simulator, [x], 5, 7)
    assert found == SetApart(5, 7, 2, "quantized", "infinite", "log")
    x[2, 3] = -1.0
    found = first_fault(pair.simulator, [x], 5, 7)
    assert found is not None
    assert (found.name, found.what, found.sample) == ("log", "NaN", 2)
    assert found.side in ("both", "reference")


def test_the_first_wrong_sample_is_known_where_there_are_samples() -> None:
    wrong = torch.tensor([[False, False], [False, True], [True, False]])
    assert [sample_of(wrong, 3), sample_of(wrong, 2), sample_of(torch.tensor(True), 1)] == [1, -1, -1]


INF, NAN = math.inf, math.nan
UNLIKE: dict[str, tuple[Any, Any, tuple[str, str, list[bool]] | None]] = {
    "finite": ([1.0, 2], [1.5, 3], None),
    "a mask of both": ([1.0, -INF], [1.5, -INF], None),
    "NaN in the quantized": ([1.0, 2], [1.5, NAN], ("NaN", "quantized", [False, True])),
    "NaN in the reference": ([NAN, 2], [1.5, 2], ("NaN", "reference", [True, False])),
    "NaN in both": ([NAN, 2], [NAN, NAN], ("NaN", "both", [True, False])),
    "NaN beside an infinity": ([INF, 2], [2, NAN], ("NaN", "quantized", [False, True])),
    "infinite in the quantized": ([1.0, -INF], [INF, -INF], ("infinite", "quantized", [True, False])),
    "infinite in the reference": ([1.0, INF], [1.5, 2], ("infinite", "reference", [False, True])),
    "opposite": ([1.0, INF], [1.5, -INF], ("infinite", "both", [False, True])),
    "complex": ([1 + 1j, 2], [1 + 1j, complex(0, NAN)], ("NaN", "quantized", [False, True])),
    "integers": ([1, 2], [3, 4], None),
    "no tensors": (NAN, 1.0, None),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_wrong_with_a_value_in_which_model_and_where(name: str) -> None:
    reference, quantized, expected = UNLIKE[name]
    if name != "no tensors":
        reference, quantized = torch.tensor(reference), torch.tensor(quantized)
    found = unlike(reference, quantized)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (*found[:2], found[2].tolist()) == expected


def test_infinities_of_values_of_unlike_shapes_are_not_shared() -> None:
    found = unlike(torch.tensor([1.0, INF]), torch.tensor([1.0, INF, 2]))
    assert found is not None
    assert found[:2] == ("infinite", "both")
    # torch cannot test these for NaN
    eight = torch.tensor([1.0, NAN]).to(torch.float8_e5m2)
    assert unlike(eight, eight) is None


def test_a_batch_is_empty_without_samples_and_finite_outputs() -> None:
    finite, none = torch.ones(2), torch.full((2,), NAN)
    assert is_empty(0, [none, {"a": (3, torch.ones(0))}])
    assert is_empty(0, [])
    assert not is_empty(0, [none, {"a": (3, finite)}])
    assert not is_empty(0, torch.tensor([NAN, 1.0]))
    assert not is_empty(1, [none])


class Parts(nn.Module):
    """An op with several outputs, the second of which becomes infinite, and a value without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = self.fc(x).split(2, -1)
        return left + right + (y.sum() * 1e30).exp()


def test_a_value_without_samples_names_none() -> None:
    x, y = torch.linspace(-1, 1, 12).reshape(3, 4), torch.zeros(3)
    pair = quantized_pair(Parts(), (x, y))
    assert first_fault(pair.simulator, [x, y], 5, 7) is None
    found = first_fault(pair.simulator, [x, torch.ones(3)], 5, 7)
    # Calibrated on zeros, the quantized model reads zeros.
    assert found == SetApart(5, 7, -1, "reference", "infinite", "exp")
