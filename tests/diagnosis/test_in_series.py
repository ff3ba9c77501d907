"""Which site is before another one, through ops that pick or clip, and what it leaves to that one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pt2qa._diagnosis.budget import sites_before
from tests.check.plain_quantizer import EXACT, PlainQuantizer
from tests.flows import quantized_pair


class Through(nn.Module):
    """A linear, what a test puts behind it, and a second linear that rounds what it reads."""

    def __init__(self, ops: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.first, self.second, self.ops = nn.Linear(4, 8), nn.Linear(width, 3), ops

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.ops(self.first(x)))


def before_second(ops: Callable[[Tensor], Tensor], width: int = 8, inputs: Any = EXACT) -> tuple[str, bool] | None:
    """The site before the one that the second linear reads, and whether that one changes nothing."""
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    pair = quantized_pair(Through(ops, width), x, PlainQuantizer(("linear",), inputs=inputs, outputs=EXACT))
    found = sites_before(pair.simulator)
    (site,) = (site for site in pair.sites if site.kind == "activation" and "second/linear" in site.readers)
    before = found.get(site.index)
    return None if before is None else (before.site.name, before.settles)


FIRST = "first/linear"


@pytest.mark.parametrize(
    ("ops", "width", "expected"),
    [
        (lambda x: x.relu(), 8, (FIRST, False)),  # its range is smaller, so its scale is finer
        (lambda x: x.clamp(-100.0, 100.0), 8, (FIRST, True)),
        (lambda x: x.reshape(6, 2, 4).transpose(0, 1).reshape(6, 8), 8, (FIRST, True)),
        (lambda x: F.pad(x, (1, 1)), 10, (FIRST, True)),
        (lambda x: F.pad(x, (1, 1), value=0.3), 10, None),
        (lambda x: torch.cat([x, x], -1), 16, (FIRST, True)),
        (lambda x: torch.cat([x, x + 1], -1), 16, None),
        (lambda x: torch.cat([x, torch.zeros(6, 2)], -1), 10, None),
        (lambda x: x * 2, 8, None),
        (lambda x: x.tanh(), 8, None),
        (lambda x: x.tanh() * 1.0, 8, None),
        (lambda x: x.split(4, -1)[1], 4, (FIRST, False)),
        (lambda x: F.max_pool2d(x[None, None], (1, 2))[0, 0], 4, (FIRST, False)),
        (lambda x: F.avg_pool2d(x[None, None], (1, 2))[0, 0], 4, None),
        (lambda x: torch.clamp(1.0 - x, 0.0, 1.0), 8, None),
    ],
)
def test_ops_between_pick_or_clip(ops: Callable[[Tensor], Tensor], width: int, expected: Any) -> None:
    found = before_second(ops, width)
    assert (found and found[0]) == (expected and expected[0])
    if expected and expected[1]:
        assert found == expected


@pytest.mark.parametrize("ops", [torch.relu, lambda x: x.clamp(-0.4, 0.7), lambda x: x.clamp(-9.0, 9.0)])
def test_what_the_first_site_leaves_is_rounded_and_clipped(ops: Callable[[Tensor], Tensor]) -> None:
    """Recomputed by hand; where a clip ends, the value was perhaps beyond it, and stays at what that becomes."""
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    pair = quantized_pair(Through(ops, 8), x, PlainQuantizer(("linear",), inputs=EXACT, outputs=EXACT))
    (site,) = (site for site in pair.sites if site.kind == "activation" and "second/linear" in site.readers)
    before = sites_before(pair.simulator)[site.index]
    params = before.site.params
    assert isinstance(params.scale, float)
    assert isinstance(params.zero_point, int)

    def rounded(value: Tensor) -> Tensor:
        steps = (value / params.scale).round() + params.zero_point
        return (steps.clamp(params.quant_min, params.quant_max) - params.zero_point) * params.scale

    model = Through(ops, 8)
    model.load_state_dict(pair.capture.program.state_dict)  # type: ignore[union-attr]
    with torch.no_grad():
        inner = model.first(x)
        found = before.leaves(ops(inner))
        direct = ops(rounded(inner))
    ends = ops(torch.tensor([-torch.inf, torch.inf]))
    inside = (ops(inner) > ends[0]) & (ops(inner) < ends[1])
    torch.testing.assert_close(found[inside], direct[inside], atol=1e-6, rtol=0)
    lowest, highest = ops(rounded(torch.tensor([-torch.inf, torch.inf]))).tolist()
    at_low, at_high = ops(inner) <= ends[0], ops(inner) >= ends[1]
    assert found[at_low].tolist() == pytest.approx([lowest] * int(at_low.sum()))
    assert found[at_high].tolist() == pytest.approx([highest] * int(at_high.sum()))


class OneRow(nn.Module):
    """One row of a rounded value, taken out of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x.unbind(0)[0][None])


def test_a_value_that_is_taken_out_of_several_has_the_same_site() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    pair = quantized_pair(OneRow(), x, PlainQuantizer(("linear",), inputs=EXACT, outputs=EXACT))
    found = sites_before(pair.simulator)
    (site,) = (site for site in pair.sites if site.kind == "activation" and "second/linear" in site.readers)
    assert found[site.index].site.name == FIRST


def test_a_site_with_a_scale_of_each_batch_is_before_none() -> None:
    pair = quantized_pair(Through(torch.relu, 8), torch.randn(6, 4), "xnnpack:mode=dynamic")
    assert sites_before(pair.simulator) == {}


def test_the_first_site_has_none_before_it() -> None:
    x = torch.randn(6, 4)
    pair = quantized_pair(Through(torch.relu, 8), x, PlainQuantizer(("linear",), inputs=EXACT, outputs=EXACT))
    found = sites_before(pair.simulator)
    names = {pair.sites[index].name: before.site.name for index, before in found.items()}
    assert names == {"relu": FIRST}
