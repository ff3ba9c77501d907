from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from pt2qa import capture
from tests.capture.models import Forward, annotated_names, image, prepared, quantized_sqnr, rules


def convs(**more: nn.Module) -> dict[str, nn.Module]:
    return {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(3, 4, 3), **more}


def unused_pooler(inplace: bool) -> nn.Module:
    pooler = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=inplace))
    return Forward(lambda m, x: (m.pooler(x), m.a(x))[1], pooler=pooler, a=nn.Conv2d(3, 4, 3))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_an_unused_pooler_goes_trap_29(strict: bool, inplace: bool) -> None:
    model = unused_pooler(inplace)
    with pytest.raises(IndexError):
        prepared(export(model, (image(),), strict=strict).module(check_guards=False), "x86")
    captured = capture(model, image(), strict=strict)
    assert ("dead code", "pooler.0/conv2d") in rules(captured)
    assert ("dead code", "pooler.1/relu") in rules(captured)
    assert annotated_names(model, image(), "x86", strict=strict) == {"a/conv2d"}


def test_writes_that_are_seen_from_outside_stay() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        m.calls.add_(1)
        return m.a(x)

    model = Forward(forward, **convs())
    model.register_buffer("calls", torch.zeros(1))
    captured = capture(model, image())
    graph = captured.module()
    graph(image())
    assert graph.calls.item() == 1
    assert "dead code" not in dict(rules(captured))


def test_a_write_that_a_view_shows_stays() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.a(x)
        z = y.flatten(1)
        y.relu_()
        return z

    captured = capture(Forward(forward, **convs()), image())
    assert "dead code" not in dict(rules(captured))
    assert (captured.module()(image()) >= 0).all()


@pytest.mark.parametrize("strict", [False, True])
def test_the_zero_of_a_python_sum_goes_trap_29(strict: bool) -> None:
    model = Forward(lambda m, x: sum([m.a(x), m.b(x)]), **convs())
    with pytest.raises(AssertionError):
        prepared(export(model, (image(),), strict=strict).module(check_guards=False), "x86")
    captured = capture(model, image(), strict=strict)
    assert rules(captured) == [("add of zero", "add")]
    assert annotated_names(model, image(), "x86", strict=strict) == {"a/conv2d", "b/conv2d", "add"}
    assert quantized_sqnr(captured, model, "x86", image()) > 20


def test_a_sum_that_is_an_output_keeps_the_program_valid() -> None:
    captured = capture(Forward(lambda m, x: (sum([m.a(x)]), m.b(x)), **convs()), image())
    assert rules(captured) == [("add of zero", "add")]
    captured.program.validate()
    assert captured.program.graph_signature.user_outputs[0] == "conv2d"
    captured.program.run_decompositions()


@pytest.mark.parametrize(
    ("claim", "forward"),
    [
        ("it makes the copy that is written to", lambda m, x: (y := m.a(x), (y + 0).relu_(), y)[1:]),
        ("it makes the copy from before a write", lambda m, x: (y := m.a(x), y + 0, y.relu_())[1:]),
        ("it changes the dtype", lambda m, x: (x > 0) + 0),
        ("it changes the shape", lambda m, x: m.a(x).mean((2, 3)) + torch.zeros(1, 1, 1)),
        ("it would return the caller's tensor", lambda m, x: x + 0),
        ("it adds something", lambda m, x: m.a(x) + 1),
    ],
)
def test_an_addition_stays_where(claim: str, forward: object) -> None:
    captured = capture(Forward(forward, **convs()), image())
    assert "add of zero" not in dict(rules(captured))
