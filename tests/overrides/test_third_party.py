"""Edits work on quantizers that pt2qa knows nothing about."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa.overrides import annotations_of
from tests.models import images
from tests.overrides.flows import check_prediction, places
from tests.overrides.strangers import STRANGERS

pytestmark = [
    # coremltools and its parts speak about versions of scikit-learn, of torch, and of pkg_resources.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Small(nn.Module):
    """Two convolutions with ReLUs, a pool, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 1)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = self.pool(torch.relu(self.second(x)))
        result: Tensor = self.fc(x.flatten(1))
        return result


@functools.cache
def captured() -> pt2qa.Capture:
    torch.manual_seed(0)
    return pt2qa.capture(Small().eval(), images())


# Core ML's exports hundreds of patterns before it annotates, which takes minutes.
@pytest.mark.parametrize(
    "stranger", [pytest.param(name, marks=[pytest.mark.conformance] * (name == "coreml")) for name in STRANGERS]
)
def test_one_region_in_float_changes_the_sites_that_were_meant(stranger: str) -> None:
    make, qat = STRANGERS[stranger]
    before = pt2qa.quantize(captured(), make(), [images()], qat=qat, progress=False)
    annotations = annotations_of(captured(), make(), qat=qat)
    assert annotations.sites_on(before.sites) == set(range(len(before.sites)))

    edit = Edit("float", ("second/conv2d", "relu_1"))
    predicted = annotations.with_edits([edit])
    plan = OverridePlan((edit,))
    after = pt2qa.quantize(captured(), make(), [images()], qat=qat, overrides=plan, progress=False)
    check_prediction(predicted, before, after)
    gone = places(before.sites) - places(after.sites)
    assert ("weight", "second/conv2d") in gone
    assert {name for _, name in gone} <= {"second/conv2d", "relu_1"}
    assert not places(after.sites) - places(before.sites)
    after.verify(images())
