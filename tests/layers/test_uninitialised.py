"""Memory that an op gives before another one writes to it holds anything, so it is not compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import pt2qa
from tests.recomputation import Recomputation


class Filled(nn.Module):
    """A linear whose result is scattered into new memory, as routed tokens of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.empty_like(y).scatter(0, order, y)


def test_new_memory_has_no_number() -> None:
    torch.manual_seed(0)
    batch = torch.randn(3, 4), torch.tensor([[2], [0], [1]]).expand(3, 4).contiguous()
    pair = pt2qa.quantize(pt2qa.capture(Filled().eval(), batch), "xnnpack", [batch], progress=False)
    report = pt2qa.compare_layers(pair, [batch], progress=False)
    (row,) = (each for each in report.rows if each.op == "empty_like")
    assert math.isnan(row.sqnr)
    assert row.note == "memory that is not written yet"
    assert report.set_apart == ()
    assert report.sqnr > 30
    found = Recomputation(pair, *batch)
    assert bool(found.of(row).reference.isnan().all())
    assert bool(found.of(row).quantized.isnan().all())
    assert all(bool(found.of(each).reference.isfinite().all()) for each in report.rows if each is not row)


class Written(nn.Module):
    """New memory of several kinds: read as it is, through a view, and after it was written."""

    def forward(self, x: Tensor) -> Tensor:
        new, other = torch.empty_like(x), x.new_empty(4, 3)
        order = torch.arange(3)[:, None].expand(3, 4)
        return new.scatter(0, order, x) + other.t().scatter(0, order, x) + torch.empty(3, 4).copy_(x)


def test_no_row_of_a_profile_is_about_memory_that_is_not_written_yet() -> None:
    x = torch.randn(3, 4)
    program = torch.export.export(Written().eval(), (x,))
    report = pt2qa.profile(program.module(), [x], progress=False)
    assert {row.of for row in report.rows}.isdisjoint({"empty_like", "new_empty", "empty", "t"})
    assert next(row for row in report.rows if row.op == "copy" and row.role == "output").max == float(x.max())
    assert "not measured, memory that is not written yet: empty_like, new_empty, t, empty" in report.notes


def test_two_graphs_do_not_differ_in_memory_that_is_not_written_yet() -> None:
    x = torch.randn(3, 4)
    capture = pt2qa.capture(Written().eval(), x)
    report = pt2qa.compare_graphs(capture.module(), capture.module(), [x], progress=False)
    unwritten = [row for row in report.rows if row.note == "memory that is not written yet"]
    assert {row.op for row in unwritten} == {"empty_like", "new_empty", "t", "empty"}
