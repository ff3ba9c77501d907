"""The gradients that come from a formula are those of autograd, and overwrite nothing that is still read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pt2qa._sensitivity import gradients
from pt2qa._sensitivity.gradients import GradientRun, float_tensors
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.program import Step
from tests.flows import quantized_pair
from tests.models import images


class Convs(nn.Module):
    """Strides, groups, dilation, asymmetric kernels, a clamp of its own, and a sum whose gradient goes two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.wide = nn.Conv2d(8, 16, 1)
        self.deep = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16)
        self.side = nn.Conv2d(8, 16, (1, 3), stride=(2, 2), padding=(0, 2), dilation=2, bias=False)
        self.left, self.right = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.deep(F.relu6(self.wide(x))) + self.side(x))
        x = F.relu(x + self.left(x) + F.hardtanh(self.right(x), -0.5, 0.25))
        return self.head(x.mean((2, 3)))


def all_gradients(run: GradientRun) -> dict[str, list[Tensor]]:
    """By step, of its value for three vectors, copied before the way back goes on."""
    (slot,) = set(slots_in(run.program.outputs))
    generator = torch.Generator().manual_seed(1)
    found: dict[str, list[Tensor]] = {}

    def visit(step: Step, arrived: gradients.Gradients) -> None:
        found[f"{step.index} {step.name}"] = [each.clone() for leaf in arrived if leaf is not None for each in leaf]

    vectors = [torch.randn(value.shape, generator=generator) for value in float_tensors(run.env[slot]) * 3]
    run.backward({slot: [vectors]}, visit)
    return found


@pytest.mark.parametrize("together", [0, gradients.TOGETHER])
def test_formulas_agree_with_autograd(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    pair = quantized_pair(Convs(), (images(),))
    values = pair.values((images(),))
    monkeypatch.setattr(gradients, "TOGETHER", together)
    own = all_gradients(GradientRun(pair.simulator, values))
    monkeypatch.setattr(gradients, "formula_of", lambda step, env: None)
    expected = all_gradients(GradientRun(pair.simulator, values))
    assert own.keys() == expected.keys()
    for name, vectors in expected.items():
        for left, right in zip(own[name], vectors, strict=True):
            torch.testing.assert_close(left, right, msg=lambda text, name=name: f"{name}: {text}")


def test_convolutions_and_clamps_have_formulas() -> None:
    torch.manual_seed(0)
    pair = quantized_pair(Convs(), (images(),))
    run = GradientRun(pair.simulator, pair.values((images(),)))
    with_formula = {step.op for step in run.program.steps if step.site is None and gradients.formula_of(step, run.env)}
    assert with_formula == {"conv2d", "relu", "hardtanh"}
