"""What is added to biases, and how much of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._quantize.quantization import with_numbers
from pt2qa._repair.biases import Biases, _shares
from pt2qa._simulator.data import Data
from pt2qa._trials.outcome import Folds
from pt2qa.overrides.plan import in_base64
from tests.flows import quantized_pair
from tests.repair.nets import batches, clipped_pair, played


def test_shares_minimise_the_error_within_0_and_1() -> None:
    columns = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    target = torch.tensor([1.1, 5.0, -3.0], dtype=torch.float64)
    shares = _shares(columns.T @ columns, columns.T @ target)
    # The first by its ridge; the others would be more than all, and less than nothing.
    assert shares.tolist() == pytest.approx([2.2 / 4.4, 1.0, 0.0])


def test_an_op_alone_gets_its_mean_error_back() -> None:
    """With one op, v·e and v·(J d) are of the same error, so as much is taken back as the ridge lets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8))
    data = [torch.rand(64, 16) for _ in range(4)]
    pair = quantized_pair(model, data[0], "xnnpack", batches=data)
    fit = Biases.look(pair, Folds(pair, Data("calibration", data))).fit((0, 1))
    [(_, _, added)] = fit.added.values()
    inputs = torch.cat(data)
    rounded = {site.kind: site for site in pair.sites}
    assert {"activation", "weight"} <= set(rounded)
    with torch.no_grad():
        error = torch.cat([pair.quantized(x) - pair.reference(x) for x in data]).mean(0)
        left = torch.cat([played(fit, pair, x) - pair.reference(x) for x in data])
    assert inputs.shape == (256, 16)
    assert float((error * added).sum()) < 0
    assert float(left.mean(0).square().sum()) < float(error.square().sum())


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_quantizing_with_the_edits_gives_what_was_played(quantizer: str) -> None:
    pair = clipped_pair(quantizer)
    fit = Biases.look(pair, Folds(pair, Data("calibration", batches()))).fit((0, 1))
    assert pair.capture is not None
    new = pt2qa.quantize(pair.capture, quantizer, batches(), overrides=OverridePlan(fit.edits), progress=False)
    assert fit.edits
    for x in batches(seed=3):
        assert torch.equal(played(fit, pair, x), new.quantized(x))
        assert torch.equal(new.reference(x), pair.reference(x))
    new.verify(batches()[0])


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_pair_with_other_biases_is_what_quantizing_gives(quantizer: str) -> None:
    pair = clipped_pair(quantizer)
    fit = Biases.look(pair, Folds(pair, Data("calibration", batches()))).fit((0, 1))
    assert pair.capture is not None
    once = pt2qa.quantize(pair.capture, quantizer, batches(), overrides=OverridePlan(fit.edits[:1]), progress=False)
    before = [once.quantized(x) for x in batches(seed=3)]
    plan = OverridePlan(fit.edits[:1] + fit.edits)
    new, expected = (
        with_numbers(once, plan),
        pt2qa.quantize(pair.capture, quantizer, batches(), overrides=plan, progress=False),
    )
    assert new is not None
    assert new.recipe is not None
    assert expected.recipe is not None
    assert (new.quantization, new.environment) == (expected.quantization, expected.environment)
    assert (set(new.notes), new.recipe.edits) == (set(expected.notes), expected.recipe.edits)
    assert new.recipe.annotations.specs == expected.recipe.annotations.specs
    for x, own in zip(batches(seed=3), before, strict=True):
        assert torch.equal(new.quantized(x), expected.quantized(x))
        assert torch.equal(new.reference(x), expected.reference(x))
        assert torch.equal(once.quantized(x), own)
        assert not torch.equal(new.quantized(x), own)
    new.verify(batches()[0])
    assert with_numbers(once, OverridePlan((*plan.edits, Edit("float", (fit.edits[0].ops[0],))))) is None
    assert with_numbers(once, OverridePlan(())) is None


def test_edits_of_one_bias_add_up() -> None:
    pair = clipped_pair()
    assert pair.capture is not None

    def quantized(*values: float) -> Tensor:
        edits = tuple(Edit("bias", ("fc/linear",), values=in_base64([value] * 10)) for value in values)
        plan = OverridePlan(edits) if edits else None
        made = pt2qa.quantize(pair.capture, "xnnpack", batches(), overrides=plan, progress=False)  # type: ignore[arg-type]
        bias: Tensor = next(each.stored for each in made.program.constants if each.attribute == "fc.bias")
        return bias

    assert torch.allclose(quantized(0.5, 0.25) - quantized(), torch.full((10,), 0.75))


def test_what_cannot_be_changed_is_said() -> None:
    pair = clipped_pair()
    assert pair.capture is not None
    for op, count, message in (
        ("mean", 3, "bias of 3 channels: mean: it has no bias of its own"),
        ("fc/linear", 3, r"bias of 3 channels: fc/linear: the bias has the shape \(10,\)"),
    ):
        plan = OverridePlan((Edit("bias", (op,), values=in_base64([1.0] * count)),))
        with pytest.raises(pt2qa.QuantizeError, match=message):
            pt2qa.quantize(pair.capture, "xnnpack", batches(), overrides=plan, progress=False)
    with pytest.raises(pt2qa.QuantizeError, match="made after calibration"):
        plan.apply_to("xnnpack")
    without = quantized_pair(nn.ConvTranspose1d(2, 3, 2), torch.rand(4, 2, 8))
    with pytest.raises(pt2qa.SelectionError, match="no convolution or linear with quantized weights has a bias"):
        Biases.look(without, Folds(without, Data("calibration", [torch.rand(4, 2, 8)])))


def test_a_product_of_two_values_gets_no_bias() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, x + 1)

    x = torch.rand(4, 8)
    pair = quantized_pair(Product(), x, "xnnpack")
    assert pair.capture is not None
    plan = OverridePlan((Edit("bias", ("linear",), values=in_base64([1.0] * 4)),))
    with pytest.raises(pt2qa.QuantizeError, match="it has no bias of its own"):
        pt2qa.quantize(pair.capture, "xnnpack", [x], overrides=plan, progress=False)


class WithoutBias(nn.Module):
    """A convolution and two linears, none of which has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, bias=False)
        self.fc, self.head = nn.Linear(16, 32, bias=False), nn.Linear(32, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.fc(self.conv(x).relu().mean((2, 3))).relu())
        return result


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_an_op_without_a_bias_gets_one(quantizer: str) -> None:
    torch.manual_seed(0)
    data, held_out = [[torch.rand(16, 3, 8, 8) for _ in range(4)] for _ in range(2)]
    pair = quantized_pair(WithoutBias(), data[0], quantizer, batches=data)
    fit = Biases.look(pair, Folds(pair, Data("calibration", data))).fit((0, 1))
    assert len(fit.edits) >= 2
    assert pair.capture is not None
    plan = OverridePlan.from_json(OverridePlan(fit.edits).to_json())
    new = pt2qa.quantize(pair.capture, quantizer, data, overrides=plan, progress=False)
    other = with_numbers(pair, plan)
    assert other is not None
    assert (other.quantization, other.environment) == (new.quantization, new.environment)
    for x in held_out:
        for quantized in (new.quantized(x), other.quantized(x)):
            assert torch.equal(quantized, played(fit, pair, x))
            assert not torch.equal(quantized, pair.quantized(x))
        assert torch.equal(new.reference(x), pair.reference(x))
        assert torch.equal(other.reference(x), pair.reference(x))
    new.verify(data[0])
    other.verify(data[0])
    repaired = pt2qa.repair(pair, held_out, methods=["biases"], progress=False)
    assert repaired.plan.edits
    assert repaired.code_verified == "equal"
    stages = {stage.name: stage.quality for stage in repaired.stages}
    assert stages["converted"] > stages["before"]


def test_a_bias_follows_its_op() -> None:
    """With an op in float, its bias is the reference's; with its weight rounded, the one that was fitted to that."""
    pair = clipped_pair()
    assert pair.capture is not None
    plan = OverridePlan((Edit("bias", ("fc/linear",), values=in_base64([1.0] * 10)),))
    new = pt2qa.quantize(pair.capture, "xnnpack", batches(), overrides=plan, progress=False)
    weight = next(site for site in new.sites if site.kind == "weight" and site.name == "fc/linear")
    every = frozenset(site.index for site in new.sites)
    values = new.values((batches()[0],))
    run = new.simulator.run
    assert torch.equal(run(values, on=every)[0], run(values, on=True)[0])
    assert torch.equal(
        run(values, on=every - {weight.index})[0], pair.simulator.run(values, on=every - {weight.index})[0]
    )


def test_outputs_without_an_element_leave_nothing_to_fit() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)[..., :0]

    data = [torch.randn(2, 4) for _ in range(2)]
    pair = pt2qa.quantize(pt2qa.capture(Empty().eval(), data[0]), "xnnpack", data, progress=False)
    assert not Biases.look(pair, Folds(pair, Data("calibration", data))).fit((0, 1)).edits


def test_a_linear_whose_weight_is_computed_gets_no_bias() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.weight = nn.Linear(4, 4, bias=False), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.fc(x).sigmoid() + 1, self.weight.t())

    data = [torch.rand(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    pair = quantized_pair(Transposed(), data[0], "x86:mode=dynamic", batches=data)
    assert pair.capture is not None
    ops = [step.name for step, _ in Biases.look(pair, Folds(pair, Data("calibration", data))).ops]
    assert ops == ["fc/linear"]
    plan = OverridePlan((Edit("bias", ("linear",), values=in_base64([0.1] * 4)),))
    assert with_numbers(pair, plan) is None
    with pytest.raises(pt2qa.QuantizeError, match="it has no bias of its own"):
        pt2qa.quantize(pair.capture, "x86:mode=dynamic", data, overrides=plan, progress=False)
