"""Weights that are rounded with error feedback."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._quantize.quantization import with_numbers
from pt2qa._repair.rounding import LimitedRounding, Rounding, _rounded
from pt2qa._simulator.data import Data
from pt2qa._simulator.program import QuantParams
from pt2qa._trials.outcome import Folds
from pt2qa.overrides.plan import in_base64
from tests.flows import quantized_pair
from tests.repair.nets import played


class Convs(nn.Module):
    """Convolutions of several kinds, one of them grouped, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.wide = nn.Conv2d(16, 16, (1, 3), dilation=2, bias=False)
        self.line = nn.Conv1d(16, 8, 3, padding=1)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.grouped(self.first(x).relu()).relu()).relu().flatten(2)
        result: Tensor = self.fc(self.line(x).relu().mean(2))
        return result


def smooth_pictures(count: int = 4, seed: int = 0) -> list[Tensor]:
    """Pictures without fine detail, so that inputs of an op tell much about each other."""
    generator = torch.Generator().manual_seed(seed)
    coarse = [torch.randn(8, 3, 6, 6, generator=generator) for _ in range(count)]
    return [F.interpolate(each, scale_factor=3.0, mode="bilinear") for each in coarse]


@functools.cache
def convs_pair(quantizer: str) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    batches = smooth_pictures()
    return quantized_pair(Convs(), batches[0], quantizer, batches=batches)


QUANTIZERS = pytest.mark.parametrize("quantizer", ["xnnpack:per_channel=false", "x86"])


@pytest.mark.parametrize("axis", [None, 0])
def test_outputs_change_less_than_with_plain_rounding(axis: int | None) -> None:
    torch.manual_seed(0)
    rows = torch.randn(400, 8) @ torch.randn(8, 40) + 0.1 * torch.randn(400, 40)
    weight = torch.randn(24, 40)
    largest = weight.abs().amax(1) if axis == 0 else weight.abs().max()
    scale = largest / 7
    params = QuantParams("int8", scale if axis == 0 else float(scale), 0, -7, 7, axis)
    steps = scale.reshape(-1, 1)
    plain = torch.round(weight / steps)
    fed_back = _rounded(weight, params, (rows.T @ rows)[None]).float()
    assert fed_back.abs().max() <= 7
    errors = [float((rows @ (weight - each * steps).T).square().sum()) for each in (plain, fed_back)]
    assert errors[1] < errors[0] / 3


def test_inputs_that_are_unrelated_change_nothing() -> None:
    torch.manual_seed(0)
    weight, params = torch.randn(6, 5), QuantParams("int8", 0.03, 0, -127, 127)
    assert torch.equal(_rounded(weight, params, torch.eye(5)[None]).float(), torch.round(weight / 0.03))


@QUANTIZERS
def test_quantizing_with_the_edits_gives_what_was_played(quantizer: str) -> None:
    pair = convs_pair(quantizer)
    look = Rounding.look(pair, Folds(pair, Data("calibration", smooth_pictures())))
    fit = look.fit((0, 1))
    assert look.left_out == ""
    assert len(fit.edits) == 5
    assert pair.capture is not None
    plan = OverridePlan.from_json(OverridePlan(fit.edits).to_json())
    new = pt2qa.quantize(pair.capture, quantizer, smooth_pictures(), overrides=plan, progress=False)
    assert new.quantization == pair.quantization  # the same scales
    for x in smooth_pictures(seed=3):
        assert torch.equal(played(fit, pair, x), new.quantized(x))
        assert not torch.equal(new.quantized(x), pair.quantized(x))
        assert torch.equal(new.reference(x), pair.reference(x))
    new.verify(smooth_pictures()[0])


def test_the_rows_are_those_of_the_product() -> None:
    """``x.T @ x`` of a convolution is that of the patches that its weight meets."""
    pair = convs_pair("x86")
    look = Rounding.look(pair, Folds(pair, Data("calibration", smooth_pictures())))
    rounded = {site.name: site for site in pair.sites if site.kind == "weight"}
    for number, (step, weight) in enumerate(look.ops):
        rows = look.grams[0][number]
        inputs = weight.reference[0].numel()
        assert rows.shape == (16 if step.name == "grouped/conv2d" else 1, inputs, inputs)
        assert step.name in rounded
    patches = F.unfold(smooth_pictures()[0], 3, padding=1, stride=2).transpose(1, 2).reshape(-1, 27)
    others = F.unfold(smooth_pictures()[2], 3, padding=1, stride=2).transpose(1, 2).reshape(-1, 27)
    expected = patches.T @ patches + others.T @ others
    assert torch.allclose(look.grams[0][0][0], expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("axis", [None, 0])
def test_the_groups_of_a_convolution_are_rounded_each_for_itself(axis: int | None) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 2, 3, 3)
    scale = torch.rand(6) / 20 + 0.05 if axis == 0 else 0.06
    rows = torch.randn(3, 200, 4) @ torch.randn(3, 4, 18) + 0.1 * torch.randn(3, 200, 18)
    grams = rows.mT @ rows
    found = _rounded(weight, QuantParams("int8", scale, 0, -127, 127, axis), grams)
    for group in range(3):
        part = slice(2 * group, 2 * group + 2)
        own = QuantParams("int8", scale[part] if isinstance(scale, Tensor) else scale, 0, -127, 127, axis)
        assert torch.equal(found[part], _rounded(weight[part], own, grams[group : group + 1]))


def test_the_rows_of_groups_are_their_patches() -> None:
    pair = convs_pair("x86")
    look = Rounding.look(pair, Folds(pair, Data("calibration", smooth_pictures())))
    [number] = [number for number, (step, _) in enumerate(look.ops) if step.name == "grouped/conv2d"]
    read: list[Tensor] = []
    for x in smooth_pictures()[::2]:
        pair.simulator.run(
            pair.values((x,)),
            on=False,
            visit=lambda step, value: read.append(value) if (step.name, step.site) == ("relu", None) else None,
        )
    assert len(read) == 2
    for group in (0, 7):
        rows = torch.cat([F.unfold(each, 3, padding=1)[:, 9 * group : 9 * group + 9].transpose(1, 2) for each in read])
        expected = rows.flatten(0, 1).T @ rows.flatten(0, 1)
        assert torch.allclose(look.grams[0][number][group], expected, rtol=0.05, atol=0.02 * float(expected.max()))


def test_columns_are_rounded_as_gptq_publishes_it_with_an_inverse() -> None:
    torch.manual_seed(0)
    rows = torch.randn(400, 8) @ torch.randn(8, 200) + 0.1 * torch.randn(400, 200)
    weight, params = torch.randn(12, 200), QuantParams("int8", 0.05, 0, -127, 127)
    gram = (rows.T @ rows).double()
    order = gram.diagonal().argsort(descending=True)
    damped = gram[order][:, order] + 0.01 * gram.diagonal().mean() * torch.eye(200).double()
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    left, expected = weight[:, order].double(), torch.empty(12, 200)
    for column in range(200):
        expected[:, order[column]] = torch.round(left[:, column] / 0.05).clamp(-127, 127).float()
        error = (left[:, column] - expected[:, order[column]] * 0.05) / upper[column, column]
        left[:, column:] -= error[:, None] * upper[column, column:]
    assert (_rounded(weight, params, gram.float()[None]).float() != expected).float().mean() < 0.005


def test_by_default_where_it_takes_neither_long_nor_a_large_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, held_out = convs_pair("x86"), smooth_pictures(seed=9)
    report = pt2qa.repair(pair, held_out, verify_code=False, progress=False)
    assert "round" in {edit.kind for edit in report.plan.edits}
    for most, message in (((10, 1e9), "1.8e+03 weights, by default at most 10"), ((1e9, 10), "inputs cubed")):
        monkeypatch.setattr(LimitedRounding, "most", most)
        [note] = [
            each
            for each in pt2qa.repair(pair, held_out, verify_code=False, progress=False).notes
            if each.startswith("rounding")
        ]
        assert note.startswith("rounding not applied")
        assert message in note
        assert note.endswith("name it to try it")


def test_code_gives_the_same() -> None:
    pair, held_out = convs_pair("x86"), smooth_pictures(seed=9)
    report = pt2qa.repair(pair, held_out, methods=["rounding"], progress=False)
    assert {edit.kind for edit in report.plan.edits} == {"round"}
    assert report.code_verified.startswith("equal")
    assert "with pt2qa" not in report.code_verified
    stages = {stage.name: stage.quality for stage in report.stages}
    assert stages["converted"] > stages["before"] + 0.5


@QUANTIZERS
def test_quantizing_again_is_not_needed_and_gives_the_same(quantizer: str) -> None:
    pair, data = convs_pair(quantizer), Folds(convs_pair(quantizer), Data("calibration", smooth_pictures()))
    assert pair.capture is not None
    plan = OverridePlan(Rounding.look(pair, data).fit((0, 1)).edits)
    made = with_numbers(pair, plan)
    assert made is not None
    again = pt2qa.quantize(pair.capture, quantizer, smooth_pictures(), overrides=plan, progress=False)
    assert pt2qa.compare_weights(made).to_pandas().equals(pt2qa.compare_weights(again).to_pandas())
    for x in smooth_pictures(seed=3):
        assert torch.equal(made.quantized(x), again.quantized(x))
        assert torch.equal(made.reference(x), pair.reference(x))
    made.verify(smooth_pictures()[0])


def test_what_cannot_be_set_is_said() -> None:
    pair = convs_pair("x86")
    assert pair.capture is not None
    for op, count, message in (
        ("mean", 3, "it has no int8 weight of its own"),
        ("fc/linear", 3, r"the weight has the shape \(10, 8\)"),
    ):
        plan = OverridePlan((Edit("round", (op,), values=in_base64([1] * count, "<i1")),))
        with pytest.raises(pt2qa.QuantizeError, match=message):
            pt2qa.quantize(pair.capture, "x86", smooth_pictures(), overrides=plan, progress=False)
    with pytest.raises(pt2qa.QuantizeError, match="the plan has round edits, which are made after calibration"):
        plan.apply_to("x86")
