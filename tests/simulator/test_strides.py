"""The simulator gives every value the strides that the graphs give it, whatever strides the inputs have (trap 41)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2qa
from pt2qa._metrics import error_sums
from pt2qa._simulator import strides
from pt2qa._simulator.fused import quantize_dequantize
from pt2qa._simulator.simulator import graph_values, tensors_equal
from tests.flows import quantized_pair

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a picture read by height, width, channel": lambda x: x[0].permute(1, 2, 0).contiguous().permute(2, 0, 1)[None],
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "width before height": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second column": lambda x: torch.stack([x, x], -1).flatten(3)[..., ::2],
    "one channel for all": lambda x: x[:, :1].expand_as(x),
}


class Pointwise(nn.Module):
    """Convolutions of several kinds with pointwise ops between, some in place and some not, and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.narrow = nn.Conv2d(16, 1, 1)
        self.wide = nn.Conv2d(1, 16, 5, padding=2)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(x + 0.1) - 0.25 * F.hardswish(x)
        x = F.hardtanh(self.stem(F.sigmoid(x) * 2), -2, 2, inplace=True)
        y = F.leaky_relu_(self.depthwise(x)) + x
        y = F.silu(self.wide(F.relu_(self.narrow(y))))
        y += x
        return self.fc(F.adaptive_avg_pool2d(y.clamp_(-1, 1), 1).flatten(1))


def picture(seed: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, 12, 10, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=["xnnpack", "x86"])
def pair(request: pytest.FixtureRequest) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(Pointwise().eval(), picture(0), request.param)


@pytest.mark.parametrize("on", [True, False], ids=["quantized", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_strides_are_those_of_the_graphs(pair: pt2qa.QuantizedPair, layout: str, on: bool) -> None:
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {}

    def keep(node: torch.fx.Node, value: object) -> None:
        if isinstance(value, Tensor):
            expected[node.name] = value.clone(), value.stride()

    graph_values(pair.quantized if on else pair.reference, [LAYOUTS[layout](picture(1))], keep)
    compared = 0
    with torch.no_grad():
        for step, value in pair.simulator.walk(pair.values(LAYOUTS[layout](picture(1))), on):
            if on or (step.site is None and step.node in expected):
                wanted, wanted_strides = expected[step.node]
                assert tensors_equal(value, wanted), step.node
                assert value.stride() == wanted_strides, step.node
                compared += 1
    assert compared > 15


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_report_holds_for_a_later_batch_of_another_layout(pair: pt2qa.QuantizedPair, layout: str) -> None:
    batches = [picture(2), LAYOUTS[layout](picture(3))]
    report = pt2qa.compare_layers(pair, batches, progress=False)
    with torch.no_grad():
        sums = [error_sums(pair.reference(batch.clone()), pair.quantized(batch.clone())) for batch in batches]
    assert report.outputs[0].sqnr == pytest.approx(sums[0].merge(sums[1]).sqnr, abs=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_rounding_gives_the_strides_of_the_pair_for_any_strides(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dims = int(torch.randint(1, 6, (), generator=generator))
    shape = torch.randint(1, 4, (dims,), generator=generator).tolist()
    order = torch.randperm(dims, generator=generator).tolist()
    x = torch.randn([shape[dim] for dim in order], generator=generator).permute(
        [order.index(dim) for dim in range(dims)]
    )
    odd = [7 if size == 1 and seed % 2 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    x = torch.as_strided(torch.randn(x.numel() + 7 * dims, generator=generator), x.shape, odd)
    ops, arguments = torch.ops.quantized_decomposed, (0.1, 3, -128, 127, torch.int8)
    expected = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *arguments), *arguments)
    for out in (None, x.clone(), torch.empty(x.shape)):
        result = quantize_dequantize(x, *arguments[:4], out=out)
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()


def test_plain_strides_are_those_that_pointwise_ops_keep() -> None:
    for shape in ((2, 3, 4, 5), (1, 3, 4, 5), (1, 3, 1, 1), (1, 1, 4, 4), (2, 0, 3, 3), (4,), (), (2, 1, 3)):
        x = torch.randn(shape)
        assert strides.is_plain(x)
        assert strides.after_rounding(x) == x.stride() == torch.relu(x).stride()
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert strides.is_plain(last)
    assert torch.equal(strides.flat(last), last.permute(0, 2, 3, 1).reshape(-1))
    assert strides.flat(last).data_ptr() == last.data_ptr()
    assert not strides.is_plain(LAYOUTS["a picture read by height, width, channel"](picture(0)))
