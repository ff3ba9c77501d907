"""Both models side by side: what runs in pieces gives what whole tensors give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._metrics import CHUNK
from pt2qa._simulator.lockstep import Event, lockstep
from tests.flows import quantized_pair

SIDE = 128
"""Of the pictures; with 64 channels a value has more than one piece."""


class Bounded(nn.Module):
    """A convolution, and an op that keeps its result within bounds."""

    low: Tensor

    def __init__(self, bound: Callable[[Tensor, Tensor], Tensor], low: Tensor) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 1)
        self.bound = bound
        self.register_buffer("low", low)

    def forward(self, x: Tensor) -> Tensor:
        return self.bound(self.conv(x), self.low)


def large_pair(bound: Callable[[Tensor, Tensor], Tensor], low: Tensor) -> tuple[pt2qa.QuantizedPair, Tensor]:
    torch.manual_seed(0)
    image = torch.randn(1, 3, SIDE, SIDE)
    return quantized_pair(Bounded(bound, low), image, "x86"), image


BOUNDS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "by a buffer": (lambda x, low: torch.clamp(x, min=low), torch.zeros(64, 1, 1)),
    "by a buffer of the size of the value": (lambda x, low: torch.clamp(x, min=low), torch.zeros(1, 64, SIDE, SIDE)),
    "by a buffer that makes the value larger": (lambda x, low: torch.clamp(x, min=low), torch.zeros(2, 64, 1, 1)),
    "by another value": (lambda x, low: torch.clamp(x, min=x.mean((2, 3), keepdim=True)), torch.zeros(1)),
    "by numbers": (lambda x, low: torch.clamp(x, -0.5, 0.5), torch.zeros(1)),
}


@pytest.mark.parametrize("how", BOUNDS)
def test_a_large_value_that_is_bounded_gives_the_numbers_of_the_whole(how: str) -> None:
    pair, image = large_pair(*BOUNDS[how])
    report = pt2qa.compare_layers(pair, [image], progress=False)
    row = next(row for row in report.rows if row.op == "clamp")
    with torch.no_grad():
        expected, actual = pair.reference(image), pair.quantized(image)
    assert row.shape == tuple(expected.shape)
    assert (row.ref_min, row.ref_max) == (float(expected.min()), float(expected.max()))
    assert row.atol == pytest.approx(float((expected - actual).abs().max()), rel=1e-6)


@pytest.mark.parametrize("bound", [lambda x, low: x.relu(), lambda x, low: x.clamp(-0.5, 0.5)], ids=["relu", "clamp"])
def test_an_op_of_the_value_alone_runs_in_the_pieces_of_the_op_before_it(
    bound: Callable[[Tensor, Tensor], Tensor],
) -> None:
    pair, image = large_pair(bound, torch.zeros(1))
    seen: list[tuple[str, int]] = []

    def visit(event: Event) -> None:
        if event.step.site is None:
            seen.append((event.step.op, event.reference.numel()))

    lockstep(pair.simulator, pair.values(image), visit, pieces=True)
    sizes = [size for _, size in seen]
    assert 64 * SIDE * SIDE > CHUNK >= max(sizes)
    assert [op for op, _ in seen[:2]] == ["conv2d", pair.program.steps[-1].op]
