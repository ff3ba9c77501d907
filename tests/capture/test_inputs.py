from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pt2qa import capture
from pt2qa._capture.inputs import as_call, leaf_names, share_memory
from pt2qa.errors import CaptureError


class Cell(nn.Module):
    """An input and a nested state, as a recurrent cell takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("start", torch.zeros(3, 4))
        self.eval()

    def forward(self, x: Tensor, h: Tensor, c: Any = None) -> Tensor:
        return x @ self.w + h * 2 + (c[0] if c is not None else 0)


def x() -> Tensor:
    return torch.randn(3, 4)


def test_the_same_tensor_twice_is_refused_trap_31() -> None:
    zeros = torch.zeros(3, 4)
    with pytest.raises(CaptureError) as caught:
        capture(Cell(), (x(), zeros, [zeros]))
    assert str(caught.value) == (
        "example inputs args[1] and args[2][0] are the same tensor; expected separate tensors, because torch.export "
        "would make one input of both. Pass args[2][0].clone()."
    )


def test_without_the_check_one_of_two_inputs_is_ignored_trap_31() -> None:
    zeros = torch.zeros(3, 4)
    graph = torch.export.export(Cell(), (x(), zeros, [zeros])).module()
    given = (torch.zeros(3, 4), torch.ones(3, 4), [torch.zeros(3, 4)])
    assert not torch.equal(graph(*given), Cell()(*given))


def test_two_views_of_one_memory_are_refused_trap_31() -> None:
    state = torch.zeros(4, 4)
    with pytest.raises(CaptureError, match=r"args\[1\] and kwargs\['c'\]\[0\] share memory"):
        capture(Cell(), (x(), state[:3]), {"c": [state[1:]]})


def test_neighbours_in_one_memory_are_separate() -> None:
    state = torch.zeros(3, 8)
    captured = capture(Cell(), (x(), state[:, :4], [state[:, 4:]]))
    assert [op.name for op in captured.names.values() if op.op == "input"] == ["x", "h", "c_0"]


@pytest.mark.parametrize(("name", "kind"), [("w", "parameter"), ("start", "buffer")])
def test_a_part_of_the_model_as_an_input_is_refused_trap_31(name: str, kind: str) -> None:
    model = Cell()
    part = getattr(model, name).detach()
    inputs = (part, torch.zeros_like(part))
    with pytest.raises(CaptureError, match=rf"args\[0\] shares memory with the model's {kind} '{name}'") as caught:
        capture(model, inputs)
    assert "Pass args[0].detach().clone()." in str(caught.value)


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        (torch.zeros(4), torch.zeros(4), False),
        ((t := torch.zeros(6))[::2], t[1::2], False),
        (t[::2], t[2:], True),
        (t[:0], t, False),
        (t, t.view(torch.int32), True),
        (t.to_sparse(), t, False),
    ],
    ids=["two tensors", "interleaved", "overlapping", "empty", "another dtype", "sparse"],
)
def test_share_memory_looks_at_elements(a: Tensor, b: Tensor, shared: bool) -> None:
    assert share_memory(a, b) is shared


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([torch.ones(1)], None, r"args is of type list; expected a tuple .* Pass tuple\(args\)\."),
        (
            "text",
            None,
            r"args is of type str; expected a tuple .* Pass \(value,\) for one input that is not a tensor\.",
        ),
        ({"x": 1}, {}, "args is a dict, which means keyword inputs, and kwargs is given too"),
        ((), [1], "kwargs is of type list; expected a dict of input names and values"),
        ((), {1: 2}, r"kwargs is a dict with the keys \[1\]; expected a dict"),
    ],
)
def test_inputs_of_another_form_are_refused(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        as_call(args, kwargs)


def test_tensors_tuples_and_mappings_are_taken() -> None:
    value = torch.ones(1)
    assert as_call(value, None) == ((value,), {})
    assert as_call((value, 2), {"y": 3}) == ((value, 2), {"y": 3})
    assert as_call(UserDict(x=value), None) == ((), {"x": value})


def test_leaves_are_named_by_where_they_stand() -> None:
    names = [name for name, _ in leaf_names((1, [2, {"a": 3}]), {"k": (4,)})]
    assert names == ["args[0]", "args[1][0]", "args[1][1]['a']", "kwargs['k'][0]"]
