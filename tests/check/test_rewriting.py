"""A program after capture's passes: each op has a number of its own, and keeps the name that it had."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pt2qa._capture.writes import make_writes_functional
from pt2qa._check.context import rewrite
from pt2qa._graph.handles import assign_handles, handle_of, names_of, walk


class PartlyWritten(nn.Module):
    """A write to a part of a value, which a pass turns into other ops."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).tanh()
        y[:, :2].add_(1)
        return y * 2


def test_ops_that_passes_added_have_numbers_of_their_own_and_the_others_keep_their_names() -> None:
    program = torch.export.export(PartlyWritten().eval(), (torch.randn(2, 4),))
    assign_handles(program)
    names = names_of(program)
    rewritten = rewrite(program, names, [make_writes_functional])  # no later pass numbers the ops
    assert any(rewritten.changes.values())
    found = [handle_of(placed.node) for placed in walk(rewritten.program.graph_module)]
    numbers = [number for number in found if number is not None]
    assert len(numbers) > len(names)
    assert numbers == sorted(set(numbers))
    called = {rewritten.names[number].name for number in numbers if number in rewritten.names}
    assert {"fc/linear", "tanh", "mul"} <= called
