"""What holds of each repair that changes parameters: the model, its ops, and what the plan and the code give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

import pt2qa
from pt2qa.overrides.plan import OverridePlan
from tests.flows import direct_sqnr
from tests.repair.nets import sequences


def check_reference(pair: pt2qa.QuantizedPair, repaired: pt2qa.Reconfiguration, held_out: Sequence[Tensor]) -> None:
    """The reference is the user's model but for the rounding of float32, and no op is new."""
    assert pair.capture is not None
    model = pair.capture.module()
    for x in held_out:
        assert torch.equal(pair.reference(x), model(x))
        assert direct_sqnr(model(x), repaired.pair.reference(x)) > 100

    def ops(each: pt2qa.QuantizedPair) -> Counter[str]:
        return Counter(str(node.target) for node in each.quantized.graph.nodes if node.op == "call_function")

    assert ops(repaired.pair) == ops(pair)


def check_plan(pair: pt2qa.QuantizedPair, repaired: pt2qa.Reconfiguration, held_out: Sequence[Tensor]) -> None:
    """A new capture with the saved plan gives the same bits, and so does the printed code."""
    assert repaired.code_verified == "equal"
    assert pair.capture is not None
    assert pair.capture.eager is not None
    plan = OverridePlan.from_json(repaired.plan_json)
    again = pt2qa.quantize(
        pt2qa.capture(pair.capture.eager, sequences()[0]), pair.quantizer, sequences(), overrides=plan, progress=False
    )
    for x in held_out:
        assert torch.equal(again.quantized(x), repaired.pair.quantized(x))
