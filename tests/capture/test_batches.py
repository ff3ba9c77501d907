from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from pt2qa import Capture, capture
from pt2qa._capture.inputs import check_inputs
from pt2qa.errors import BatchError


class Pair(nn.Module):
    """Two tensors that are stacked, a flag, and a nested state."""

    def forward(self, x: Tensor, y: Tensor, state: list[Tensor], *, flag: bool = True) -> Tensor:
        z = torch.cat([x, y], 0) + state[0]
        return z if flag else -z


class Sum(nn.Module):
    """Two tensors of one size."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Doubled(nn.Module):
    """The second tensor is twice as long as the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.repeat(2, 1) + y


def t(rows: int, columns: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


@pytest.fixture(scope="module")
def pair() -> Capture:
    shapes: Any = {"x": {0: Dim("rows", min=3, max=64)}, "y": {0: Dim("more")}, "state": [None], "flag": None}
    return capture(Pair().eval(), (t(5), t(6), [t(1)]), {"flag": True}, dynamic_shapes=shapes)


STATE = [torch.zeros(1, 4)]


@pytest.mark.parametrize("sizes", [(3, 1), (64, 6), (5, 1000)])
def test_dynamic_dimensions_take_every_size_in_their_range(pair: Capture, sizes: tuple[int, int]) -> None:
    pair.check_batch((t(sizes[0]), t(sizes[1]), STATE), {"flag": True})


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (t(65), t(6), STATE),
            {"flag": True},
            "args[0] (x) has size 65 in dimension 0; captured for sizes from 3 to 64.",
        ),
        (
            (t(2), t(6), STATE),
            {"flag": True},
            "args[0] (x) has size 2 in dimension 0; captured for sizes from 3 to 64.",
        ),
        ((t(5), t(6, 3), STATE), {"flag": True}, "args[1] (y) has shape [6, 3]; captured with [s"),
        ((t(5), t(6, 3), STATE), {"flag": True}, "capture with dynamic_shapes={'y': {1: torch.export.Dim.AUTO}, ...}."),
        ((t(5), t(6)[0], STATE), {"flag": True}, "args[1] (y) has shape [4]; captured with [s"),
        (
            (t(5), t(6, dtype=torch.float64), STATE),
            {"flag": True},
            "args[1] (y) has dtype torch.float64; captured with",
        ),
        ((t(5), 3, STATE), {"flag": True}, "args[1] (y) is 3; captured with a tensor of shape [s"),
        ((t(5), t(6), STATE), {"flag": False}, "kwargs['flag'] (flag) is False; captured with True, which is part of"),
        ((t(5), t(6), STATE), {"flag": t(1)}, "kwargs['flag'] (flag) is a tensor of shape [1, 4]; captured with True"),
        ((t(5), t(6)), {"flag": True}, "the batch has 2 positional inputs; captured with 3 and the keywords ['flag']."),
        ((t(5), t(6)), {"flag": True}, "pass its inputs only (inputs_of=lambda item: item[0])."),
        ((t(5), t(6), STATE), {}, "the batch has no ['flag']; captured with the keywords ['flag']."),
        (
            (t(5), t(6), STATE),
            {"flagg": True},
            "the batch has unknown keywords ['flagg'] and no ['flag']; captured with the keywords ['flag'].",
        ),
        (
            (t(5), t(6), tuple(STATE)),
            {"flag": True},
            "args[2] is nested as TreeSpec(tuple, None, [*]); captured with nested",
        ),
        (
            (t(5), [t(6)], STATE),
            {"flag": True},
            "args[1] is nested as TreeSpec(list, None, [*]); captured with a single value.",
        ),
        ((t(5), t(6), [t(2)]), {"flag": True}, "args[2][0] (state_0) has shape [2, 4]; captured with [1, 4]."),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_traps_11_and_32(
    pair: Capture, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError) as caught:
        pair.check_batch(args, kwargs)
    assert message in str(caught.value)


def test_dimensions_captured_as_one_must_be_equal() -> None:
    captured = capture(Sum().eval(), (t(3), t(3)), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    captured.check_batch((t(5), t(5)))
    captured.check_batch((t(1), t(1)))
    with pytest.raises(
        BatchError, match=r"args\[1\] \(y\) has size 6 in dimension 0; expected 5 .* because args\[0\] \(x\)"
    ):
        captured.check_batch((t(5), t(6)))


def test_derived_dimensions_are_checked_with_what_they_derive_from() -> None:
    rows = Dim("rows")
    captured = capture(Doubled().eval(), (t(3), t(6)), dynamic_shapes=({0: rows}, {0: 2 * rows}))
    captured.check_batch((t(5), t(10)))
    with pytest.raises(BatchError, match=r"has size 11 in dimension 0; expected 10 \(2\*s\d+\), because args\[0\]"):
        captured.check_batch((t(5), t(11)))


def test_a_derived_dimension_on_its_own_is_checked_too() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[: x.shape[0] // 2] + x[x.shape[0] // 2 :]

    captured = capture(Halves().eval(), (t(6),), dynamic_shapes=({0: 2 * Dim("half", min=1)},))
    captured.check_batch((t(8),))
    with pytest.raises(BatchError, match=r"has size 7 in dimension 0; captured for sizes of the form 2\*s\d+"):
        captured.check_batch((t(7),))


def test_keywords_come_in_any_order() -> None:
    captured = capture(Sum().eval(), {"x": t(2), "y": t(2)})
    check_inputs(captured.program, (), {"y": t(2), "x": t(2)})


def test_checking_a_batch_leaves_dynamic_sizes_open(pair: Capture) -> None:
    for batch in [(t(5), t(6, 3), STATE), (t(7), t(8), STATE)]:
        with pytest.raises(BatchError):
            pair.check_batch(batch, {"flag": False})
    assert "s" in str(next(node for node in pair.program.graph.nodes if node.name == "y").meta["val"].shape[0])
