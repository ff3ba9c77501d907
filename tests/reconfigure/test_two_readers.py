"""A value with several readers is rounded for each of them, so one of them can have it unrounded."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._simulator.data import Data
from pt2qa._trials.judge import Judge
from pt2qa._trials.treatment import Treatment
from tests.flows import direct_sqnr, quantized_pair
from tests.overrides.flows import captured, plain

QUANTIZERS = pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])


class TwoReaders(nn.Module):
    """Two linears read one value with a loud channel; only ``near`` loses by its rounding."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.near, self.far = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        with torch.no_grad():
            for linear, size in ((self.near, 0.75), (self.far, 0.01)):
                linear.weight.copy_(size * torch.randn(16, 16, generator=generator))
                linear.weight[:, 5] *= 0.01

    def forward(self, x: Tensor) -> Tensor:
        return self.near(x) + self.far(x)


@functools.cache
def data() -> tuple[Tensor, ...]:
    values = torch.randn(32, 16, generator=torch.Generator().manual_seed(4))
    values[:, 5] *= 30
    return values.split(16)


@functools.cache
def two_readers(quantizer: str, *edits: Edit) -> pt2qa.QuantizedPair:
    plan = OverridePlan(edits) if edits else None
    return quantized_pair(TwoReaders(), data()[0], quantizer, batches=data(), overrides=plan)


def measured(pair: pt2qa.QuantizedPair, batches: tuple[Tensor, ...]) -> float:
    with torch.no_grad():
        return direct_sqnr(
            *(torch.cat([graph(each) for each in batches]) for graph in (pair.reference, pair.quantized))
        )


@QUANTIZERS
def test_one_reader_in_float_is_enough(quantizer: str) -> None:
    near, pair = Edit("float", ("near/linear",)), two_readers(quantizer)
    assert [site.readers for site in pair.sites if site.name == "x"] == [("near/linear", "far/linear")]
    target = measured(two_readers(quantizer, near), data()) - 0.5
    assert measured(pair, data()) < target
    fixed = pt2qa.reconfigure(pair, data(), target=target, repairs=(), verify_code=False, progress=False)
    assert fixed.plan.edits == (near,)
    assert measured(fixed.pair, data()) >= target


@QUANTIZERS
@pytest.mark.parametrize("op", ["near/linear", "far/linear", "add"])
def test_an_edit_is_played_as_it_is_converted(quantizer: str, op: str) -> None:
    judge = Judge(two_readers(quantizer), Data("batches", data()), None, "two readers")
    played = Treatment(floats=(Edit("float", (op,)),))
    if judge.annotations(Treatment()).after(*played.floats) is None:  # type: ignore[union-attr]
        assert (quantizer, op) == ("x86", "add")
        return
    found = judge.outcome(played)
    assert judge.quantizations == 0
    assert found.value == pytest.approx(measured(judge.applied(played), data()), abs=1e-4)


@pytest.mark.parametrize("op", ["conv1/conv2d", "conv2/conv2d", "relu/relu", "add"])
def test_a_value_loses_the_rounding_of_its_own_op_and_keeps_that_of_its_readers(op: str) -> None:
    (batch,) = captured("residual")[1]
    judge = Judge(plain("residual", "xnnpack"), Data("batches", [batch]), None, "residual")
    played = Treatment(floats=(Edit("float", (op,)),))
    assert judge.outcome(played).value == pytest.approx(measured(judge.applied(played), (batch,)), abs=1e-4)


def test_a_plan_is_minimal_where_an_edit_less_changes_a_scale_that_values_share() -> None:
    capture, (batch,) = captured("pooled")
    options = {"repairs": (), "fuse": False, "verify_code": False, "progress": False}
    fixed = pt2qa.reconfigure(plain("pooled", "xnnpack"), [batch], target=41, **options)  # type: ignore[arg-type]
    assert fixed.met
    for out in fixed.plan.edits:
        plan = OverridePlan(tuple(edit for edit in fixed.plan.edits if edit != out))
        fewer = pt2qa.quantize(capture, "xnnpack", [batch], overrides=plan, progress=False)
        assert measured(fewer, (batch,)) < 41, f"{out} is not needed"
