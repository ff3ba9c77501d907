"""What a person tries on a page: the figures are those of the model that is converted with the plan."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._reconfigure.session import Session
from tests.flows import direct_sqnr


class Branches(nn.Module):
    """Two branches that a cat joins, so they share a scale, behind a batch norm that is folded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.bn, self.b = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.c, self.fc = nn.Conv2d(8, 8, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn(self.a(x)))
        z = nn.functional.relu6(self.b(y))
        both = torch.cat([y[:, :, 1:-1, 1:-1] + z, self.c(z)], 1)
        return self.fc(nn.functional.adaptive_avg_pool2d(both, 1).flatten(1))


@functools.cache
def batches(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple((1 + number) * torch.randn(8, 3, 8, 8, generator=generator) for number in range(3))


def share(model: Any) -> float:
    """A metric of a user: larger is better."""
    return sum(float((model(each).argmax(1) < 5).float().mean()) for each in batches(1))


@functools.cache
def session(quantizer: str) -> Session:
    capture = pt2qa.capture(Branches().eval(), batches(0)[0])
    return Session(pt2qa.quantize(capture, quantizer, batches(0), progress=False), batches(1), metric=share)


def chosen(of: Session, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    for number, facts in enumerate(of.facts):
        choice = draw.choice([*facts["choices"], *[""] * 4])
        if choice:
            ends = facts["choices"][choice].get("ends", ())
            wanted = zip(("low", "high"), (draw.uniform(0.4, 1.1) * end for end in ends), strict=False)
            found.append({"place": number, "set": choice, **dict(wanted)})
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_the_figures_are_those_of_the_model_that_is_converted_with_the_exported_plan(quantizer: str, seed: int) -> None:
    given = session(quantizer)
    settings = chosen(given, seed)
    found, (plan, converted) = given.measured(settings), given.exported(settings)
    pair = given.pair
    assert pair.capture is not None
    read = pt2qa.OverridePlan.from_json(plan.to_json())
    again = pt2qa.quantize(pair.capture, quantizer, batches(0), overrides=read, progress=False)
    with torch.no_grad():
        both = (torch.cat([graph(each) for each in batches(1)]) for graph in (pair.reference, again.quantized))
        sqnr = direct_sqnr(*both)
    assert found["outputs"][0]["sqnr"] == pytest.approx(sqnr, abs=1e-6)
    assert converted["outputs"][0]["sqnr"] == pytest.approx(sqnr, abs=1e-6)
    assert found["value"] == converted["value"] == pytest.approx(share(again.quantized))
    assert plan.quantizer == quantizer


def test_a_group_whose_first_observer_leaves_it_is_quantized_again() -> None:
    given = session("xnnpack")
    names = [facts["name"] for facts in given.facts]
    other = {"place": names.index("c/conv2d"), "set": "observer moving_average"}
    found = given.measured([{"place": names.index("add"), "set": "float"}, other])
    assert found["how"] == "quantized again", "torchao takes the observer of the first point of a group"


def test_ops_in_float_are_simulated_unless_others_get_another_scale_and_noise_is_shared_out() -> None:
    given = session("xnnpack")
    names = [facts["name"] for facts in given.facts]
    assert sum(facts["noise"] for facts in given.facts) == pytest.approx(1.0)
    alone = given.measured([{"place": names.index("c/conv2d"), "set": "float"}])
    assert alone["how"] == "simulated"
    assert alone["float_macs"] == given.facts[names.index("c/conv2d")]["macs"] > 0
    assert given.measured([{"place": names.index("cat"), "set": "float"}])["how"] == "quantized again"


def test_a_range_reaches_all_that_share_it_and_0() -> None:
    given = session("xnnpack")
    ranges = [each for facts in given.facts for each in facts["choices"].values() if each]
    assert any("cat" in each["names"] and len(each["names"]) > 2 for each in ranges)
    assert all(each["ends"][0] <= 0 <= each["ends"][1] for each in ranges)


WRONG: list[tuple[Any, str]] = [
    ({"place": 0}, "settings: got {'place': 0}, expected a list of settings of places"),
    (["float"], "setting 'float': expected a place from 0 to"),
    ([{"place": True, "set": "float"}], "setting {'place': True, 'set': 'float'}: expected a place from 0 to"),
    ([{"place": 99, "set": "float"}], "setting {'place': 99, 'set': 'float'}: expected a place from 0 to"),
    ([{"place": 0, "set": "round"}], "a/conv2d + relu can be set to float, observer minmax"),
    ([{"place": 0, "set": "observer os"}], "a/conv2d + relu can be set to float, observer minmax"),
    ([{"place": 0, "set": "range of x", "low": 1, "high": 2}], "expected numbers low <= 0 <= high that differ"),
    ([{"place": 0, "set": "range of x", "low": "0", "high": 2}], "expected numbers low <= 0 <= high that differ"),
    ([{"place": 0, "set": "range of x", "low": 0, "high": float("inf")}], "expected numbers low <= 0 <= high"),
    ([{"place": 0, "set": ["range of x"], "low": 0, "high": 2}], "can be set to float"),
    ([{"place": 0, "set": "range of x"}], "expected numbers low <= 0 <= high that differ"),
    ([{"place": 0, "set": "float"}] * 2, "settings: got places [0, 0], expected each at most once"),
]


@pytest.mark.parametrize(("settings", "told"), WRONG)
def test_wrong_settings_are_named(settings: Any, told: str) -> None:
    with pytest.raises(pt2qa.SelectionError, match=re.escape(told)):
        session("xnnpack").measured(settings)


def test_something_must_stay_quantized() -> None:
    given = session("x86")
    with pytest.raises(pt2qa.SelectionError) as caught:
        given.measured([{"place": number, "set": "float"} for number in range(len(given.facts))])
    assert str(caught.value) == "settings: nothing stays quantized; leave at least one place as it was quantized"
