"""Random small graphs through both quantizers: the simulator is exact and no node is lost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import pt2qa
from pt2qa._graph.handles import handle_of
from pt2qa._simulator import quant_ops
from pt2qa._simulator.simulator import tensors_equal
from tests.models import images, randomize_batch_norms

OPS = (
    "conv",
    "conv_bn",
    "shared_conv",
    "relu",
    "relu_",
    "hardtanh_",
    "add",
    "add_",
    "add_self",
    "cat",
    "pool",
    "slice_add_",
)


@dataclass(frozen=True)
class Plan:
    """Ops with the positions (from the end) of the earlier values that they read."""

    ops: tuple[tuple[str, int, int], ...]
    head: bool


class RandomModel(nn.Module):
    """Every value has four channels, so any two can be added."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.stem = nn.Conv2d(3, 4, 1)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in plan.ops)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in plan.ops)
        self.mixers = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in plan.ops)
        self.shared = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.stem(x)]
        for number, (op, left, right) in enumerate(self.plan.ops):
            a, b = values[-1 - left % len(values)], values[-1 - right % len(values)]
            values.append(self._apply(op, number, a, b))
        result = values[-1]
        return self.head(result.mean((2, 3))) if self.plan.head else result

    def _apply(self, op: str, number: int, a: Tensor, b: Tensor) -> Tensor:
        match op:
            case "conv":
                return self.convs[number](a)
            case "conv_bn":
                return self.norms[number](self.convs[number](a))
            case "shared_conv":
                return self.shared(a)
            case "relu":
                return F.relu(a)
            case "relu_":
                return F.relu_(self.convs[number](a))
            case "hardtanh_":
                return F.hardtanh_(self.convs[number](a))
            case "add":
                return a + b
            case "add_":
                return self.convs[number](a).add_(b)
            case "add_self":
                return a + a
            case "cat":
                return self.mixers[number](torch.cat([a, b], 1))
            case "pool":
                return F.max_pool2d(a, 3, 1, 1)
            case _:
                y = self.convs[number](a).sigmoid()
                y[:, :2].add_(1)
                return y * 1.5


plans = st.builds(
    Plan,
    ops=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=7).map(
        tuple
    ),
    head=st.booleans(),
)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(plan=plans)
def test_random_graphs_are_simulated_exactly_and_completely(quantizer: str, plan: Plan) -> None:
    torch.manual_seed(0)
    model = randomize_batch_norms(RandomModel(plan))
    batch = images()
    capture = pt2qa.capture(model, (batch,))
    pair = pt2qa.quantize(capture, quantizer, [batch], progress=False)
    report = pt2qa.compare_layers(pair, [batch], progress=False)  # checks simulator = converted and off = reference

    other = images(seed=1)
    assert tensors_equal(pair.simulator.run([other], on=True)[0], pair.quantized(other))
    every_site = {site.index for site in pair.sites}
    assert tensors_equal(pair.simulator.run([other], on=every_site)[0], pair.quantized(other))
    assert tensors_equal(pair.simulator.run([other], on=False)[0], pair.reference(other))

    steps = {step.handle for step in pair.program.steps if step.site is None}
    explained = {unpaired.handle for unpaired in pair.pairing.unpaired}
    inputs = set(pair.program.input_handles)
    assert capture.names.keys() == (steps - {-1}) | explained | inputs
    assert {paired.handle for paired in pair.pairing.pairs}.isdisjoint(explained)
    in_graph = {
        handle_of(node)
        for node in pair.quantized.graph.nodes
        if node.op == "call_function" and not quant_ops.is_quantization(node) and handle_of(node) is not None
    }
    assert in_graph <= {row.handle for row in report.rows}
