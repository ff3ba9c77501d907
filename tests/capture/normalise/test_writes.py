from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from pt2qa import capture, sqnr
from tests.capture.models import QUANTIZERS, Forward, converted, image, quantized_sqnr, rules


def slice_scaled(m: nn.Module, x: Tensor) -> Any:
    y = m.a(x)
    y[:, :2].mul_(0.1)
    return m.b(y)


def channel_zeroed(m: nn.Module, x: Tensor) -> Any:
    y = m.a(x)
    y[:, 0] = 0
    return m.b(y)


def flat_view_rectified(m: nn.Module, x: Tensor) -> Any:
    y = m.a(x)
    y.flatten(1).relu_()
    return m.b(y)


def older_view_read_later(m: nn.Module, x: Tensor) -> Any:
    y = m.a(x)
    z, first = y.transpose(2, 3), y.chunk(2, 1)[0]
    y.add_(1)
    return m.b(y) + m.b(z), first


def copied_from_another(m: nn.Module, x: Tensor) -> Any:
    y = m.a(x)
    y[:, 1:3, 0] = y.sum((2, 3))[:, :2, None]
    return m.b(y)


def many_writes(m: nn.Module, x: Tensor) -> Any:
    y = m.a(x)
    y[:, :2].mul_(0.5)
    y.permute(0, 2, 3, 1)[..., 1:].add_(0.25)
    tail = y[:, 2:]
    tail.relu_()
    y.narrow(1, 0, 1).fill_(0.5)
    return m.b(y), tail


def masked_values_replaced(m: nn.Module, x: Tensor) -> Any:
    y = m.a(x)
    flat = y.flatten(1)
    flat[flat > 0.5] = 0.5
    return m.b(y)


FORWARDS = [
    slice_scaled,
    channel_zeroed,
    flat_view_rectified,
    older_view_read_later,
    copied_from_another,
    many_writes,
    masked_values_replaced,
]


def model_of(forward: Any) -> nn.Module:
    return Forward(forward, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 4, 3))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_without_capture_the_write_is_lost_in_silence(name: str) -> None:
    model, x = model_of(slice_scaled), image()
    graph = converted(export(model, (x,)).module(check_guards=False), name, x)
    assert sqnr(model(x), graph(x)) < 10


@pytest.mark.parametrize(
    ("forward", "name", "strict"),
    [(forward, "x86", strict) for forward in FORWARDS for strict in (False, True)] + [(many_writes, "xnnpack", False)],
)
def test_a_write_to_a_part_reaches_the_whole_in_the_quantized_graph(forward: Any, name: str, strict: bool) -> None:
    model, x = model_of(forward), image()
    captured = capture(model, x, strict=strict)
    assert "partial write" in dict(rules(captured))
    assert quantized_sqnr(captured, model, name, x) > 25


def test_it_is_reported() -> None:
    captured = capture(model_of(slice_scaled), image())
    assert str(captured.changes[0]) == (
        "partial write: mul: computed out of place, for 1 later read of the tensor that it changes"
    )
    assert [name.op for name in captured.names.values()] == [
        "input",
        "conv2d",
        "slice",
        "mul",
        "slice_scatter",
        "conv2d",
    ]


def test_ordinary_in_place_ops_keep_their_spelling_trap_21() -> None:
    model = Forward(lambda m, x: m.b(m.a(x).relu_()).add_(1), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 4, 3))
    captured = capture(model, image())
    targets = [str(node.target) for node in captured.program.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.conv2d.default", "aten.relu_.default", "aten.conv2d.default", "aten.add_.Tensor"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_write_through_something_else_is_left_and_says_so(strict: bool) -> None:
    def forward(m: nn.Module, x: Tensor) -> Any:
        y = m.a(x)
        torch.diagonal(y, 0, 2, 3).zero_()
        return m.b(y)

    captured = capture(model_of(forward), image(), strict=strict)
    (change,) = [change for change in captured.changes if change.rule == "partial write"]
    assert change.what == (
        "left as it is, so a quantizer that rounds this tensor changes what is computed: "
        "it writes through aten.diagonal.default"
    )
    assert change.left == "it writes through aten.diagonal.default"


def test_a_write_to_an_input_stays_a_write() -> None:
    def forward(m: nn.Module, x: Tensor) -> Any:
        x[:, 0].mul_(2)
        return m.a(x)

    captured = capture(model_of(forward), image())
    assert "it writes to an input, a parameter or a buffer" in captured.changes[0].what
    x = image()
    before = x[:, 0].clone()
    captured.module()(x)
    assert torch.equal(x[:, 0], 2 * before)
