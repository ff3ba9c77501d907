"""``int8`` and ``int8_weight`` edits: scales of their own over all integers, whatever the quantizer annotates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa import Edit, OverridePlan, PluginError
from pt2qa.overrides import annotations_of
from pt2qa.plugins import quantizer_code, resolve
from tests.overrides.faulty import FAULTS, Faulty, coarse


def edit_of(fault: Callable[[Node], None]) -> Edit:
    return Edit("int8_weight" if fault is coarse else "int8", ("2/linear",))


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)).eval()
    made[2].weight.data *= 0.2
    made[2].bias.data.zero_()
    return made


def batch() -> torch.Tensor:
    return torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


def pair_of(quantizer: Any, *edits: Edit) -> pt2qa.QuantizedPair:
    plan = OverridePlan(edits) if edits else None
    return pt2qa.quantize(pt2qa.capture(model(), batch()), quantizer, [batch()], overrides=plan, progress=False)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_op_gets_scales_of_its_own_over_all_integers(fault: Callable[[Node], None]) -> None:
    before, after = pair_of(Faulty(fault)), pair_of(Faulty(fault), edit_of(fault))
    healthy = pair_of("xnnpack")
    values = batch()
    reference = healthy.reference(values)
    lost, brought_back, own = (pt2qa.sqnr(reference, pair.quantized(values)) for pair in (before, after, healthy))
    assert lost < own - 3
    assert brought_back > own - 1
    sites = {(site.kind, site.name): site.params for site in after.sites}
    output, weight = sites["activation", "2/linear"], sites["weight", "2/linear"]
    assert (output.quant_min, output.quant_max) == (-128, 127)
    assert (weight.quant_min, weight.quant_max, weight.axis) == (-127, 127, 0)
    scales = [site.params.scale for site in after.sites if site.kind == "activation"]
    assert len(set(scales)) == len(scales)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_code_and_a_flow_without_pt2qa_give_the_same_bits(fault: Callable[[Node], None]) -> None:
    plan = OverridePlan((edit_of(fault),))
    pair = pair_of(Faulty(fault), *plan.edits)
    assert pair.capture is not None
    code = quantizer_code(resolve(Faulty(fault)), plan, pair.capture.module())
    scope: dict[str, Any] = {"quantizer": Faulty(fault)}
    exec(compile(code, "code", "exec", dont_inherit=True), scope)
    for quantizer in (scope["quantizer"], plan.apply_to(Faulty(fault))):
        prepared = prepare_pt2e(torch.export.export(model(), (batch(),)).module(), quantizer)
        prepared(batch())
        assert torch.equal(convert_pt2e(prepared)(batch()), pair.quantized(batch()))


def test_values_that_ops_only_move_keep_one_scale() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([self.one(x), self.other(x)], 1))  # type: ignore[no-any-return]

    before = annotations_of(pt2qa.capture(Joined().eval(), batch()), "xnnpack")
    after = before.with_edits([Edit("int8", ("one/linear",))])
    shared = {frozenset(values) for point, values in after.shared.items() if after.value_name(point) == "one/linear"}
    assert shared == {frozenset({"linear", "linear_1", "cat"})}


def test_seven_bits_that_an_option_asks_for_are_kept() -> None:
    with pytest.raises(PluginError, match="reduce_range=true keeps activations in seven bits"):
        annotations_of(pt2qa.capture(model(), batch()), "x86:reduce_range=true").with_edits(
            [Edit("int8", ("2/linear",))]
        )
