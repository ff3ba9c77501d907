"""A pair with other ranges and biases, against one that is quantized with them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._quantize.quantization import with_numbers
from pt2qa._repair.biases import Biases
from pt2qa._repair.ranges import Ranges, groups_in
from pt2qa._simulator.data import Data
from pt2qa._trials.outcome import Folds
from tests.repair.nets import batches, clipped_pair, encoder_pair, sequences


class Joined(nn.Module):
    """Values that are read twice, shared, moved and added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cat([self.second(x) + self.third(x), nn.functional.max_pool2d(x, 3, 1, 1)], 1)
        result: Tensor = self.fc(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return result


@functools.cache
def joined_pair(quantizer: str) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return pt2qa.quantize(pt2qa.capture(Joined().eval(), batches()[0]), quantizer, batches(), progress=False)


PAIRS = {"clipped": clipped_pair, "joined": joined_pair, "encoder": encoder_pair}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("quantizer", ["xnnpack", "xnnpack:per_channel=false", "x86"])
def test_it_is_what_quantizing_gives(name: str, quantizer: str) -> None:
    pair, data = PAIRS[name](quantizer), sequences if name == "encoder" else batches
    folds = Folds(pair, Data("calibration", data()))
    biases = Biases.look(pair, folds).fit((0, 1)).edits
    # Every range that can be fixed, drawn in; what is fitted may leave some as they are.
    ranges = tuple(
        Edit("range", (group.name,), scale=float(group.params.scale) / 2, zero_point=int(group.params.zero_point))  # type: ignore[arg-type]
        for group in groups_in(pair)
    )
    assert biases
    assert ranges
    plan = OverridePlan((*ranges, *biases))
    found = with_numbers(pair, plan)
    assert found is not None
    assert pair.capture is not None
    expected = pt2qa.quantize(pair.capture, quantizer, data(), overrides=plan, progress=False)
    assert found.recipe is not None
    assert expected.recipe is not None
    assert (found.quantization, found.environment) == (expected.quantization, expected.environment)
    assert (set(found.notes), found.recipe.edits) == (set(expected.notes), expected.recipe.edits)
    assert str(found.recipe.annotations.specs) == str(expected.recipe.annotations.specs)
    before = pair.quantized(data()[0])
    for x in data(seed=3):
        assert torch.equal(found.quantized(x), expected.quantized(x))
        assert torch.equal(found.reference(x), expected.reference(x))
    found.verify(data()[0])
    assert torch.equal(pair.quantized(data()[0]), before)
    assert not torch.equal(found.quantized(data()[0]), before)


def test_what_is_fitted_needs_no_second_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = clipped_pair()
    fit = Ranges.look(pair, Folds(pair, Data("calibration", batches()))).fit((0, 1))
    assert fit.edits

    def refused(*arguments: object, **keywords: object) -> None:
        raise AssertionError("it was quantized again")

    monkeypatch.setattr("pt2qa._trials.judge.quantize_again", refused)
    repaired = pt2qa.repair(pair, batches(), methods=["ranges", "biases"], verify_code=False, progress=False)
    assert {edit.kind for edit in repaired.plan.edits} >= {"range"}
    # Other data may have other ranges where no edit fixes them.
    with pytest.raises(AssertionError, match="quantized again"):
        pt2qa.repair(pair, batches(), methods=["ranges"], calibration=batches(seed=1), progress=False)


def test_other_edits_and_quantized_biases_need_it() -> None:
    pair = clipped_pair()
    [first, *_] = groups_in(pair)
    fixed = Edit("range", (first.name,), scale=0.1, zero_point=0)
    assert with_numbers(pair, OverridePlan((fixed,))) is not None
    assert with_numbers(pair, OverridePlan((fixed, Edit("float", ("fc/linear",))))) is None
    once = with_numbers(pair, OverridePlan((fixed,)))
    assert once is not None
    assert with_numbers(once, OverridePlan(())) is None
