"""Buffers and parameters that the forward writes to: what an op reads of them depends on when it reads."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

import pt2qa
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.verification import graph_outputs
from tests.sensitivity import brute_force

Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """A linear, a buffer, a parameter, and a buffer that has the memory of another; ``forward`` restores all."""

    buf: Tensor
    twin: Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("buf", torch.ones(5))
        self.register_buffer("twin", self.buf)
        self.register_buffer("matrix", torch.randn(4, 4))
        self.computed = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.computed(self, x)


def seen_before(m: Model, x: Tensor) -> Tensor:
    seen = m.buf[1:]
    m.buf.fill_(2)
    y = m.fc(x) * seen
    m.buf.fill_(1)
    return y


def read_later(m: Model, x: Tensor) -> Tensor:
    m.buf.mul_(2)
    y = m.fc(x) * m.buf[1:]
    m.buf.fill_(1)
    return y


def read_before_and_after(m: Model, x: Tensor) -> Tensor:
    before = m.fc(x) * m.buf[1:]
    m.buf.fill_(2)
    after = before * m.buf[1:]
    m.buf.fill_(1)
    return before + after


def computed_before_and_after(m: Model, x: Tensor) -> Tensor:
    before = m.buf * 3
    m.buf.fill_(2)
    after = m.buf * 3
    m.buf.fill_(1)
    return m.fc(x) * before[1:] + after[1:]


def written_through_a_view(m: Model, x: Tensor) -> Tensor:
    m.buf[1:].fill_(2)
    y = m.fc(x) * m.buf[:4]
    m.buf[1:].fill_(1)
    return y


def tied(m: Model, x: Tensor) -> Tensor:
    m.buf.fill_(2)
    y = m.fc(x) * m.twin[1:]
    m.buf.fill_(1)
    return y


def view_of_a_parameter(m: Model, x: Tensor) -> Tensor:
    seen = m.gain[1:]
    m.gain[2:].mul_(4)
    y = m.fc(x) * seen
    m.gain[2:].mul_(0.25)
    return y


def weight(m: Model, x: Tensor) -> Tensor:
    row = m.matrix[0]
    m.matrix.mul_(2)
    y = F.linear(m.fc(x), m.matrix) * row
    m.matrix.mul_(0.5)
    return y


def view_of_what_is_computed(m: Model, x: Tensor) -> Tensor:
    whole = m.buf + 1
    part = whole[1:]
    part.fill_(5)
    return m.fc(x) * whole[:4] * part


FORWARDS = [
    seen_before,
    read_later,
    read_before_and_after,
    computed_before_and_after,
    written_through_a_view,
    tied,
    view_of_a_parameter,
    weight,
    view_of_what_is_computed,
]
X = torch.linspace(-2, 3, 32).reshape(8, 4)


def model_of(forward: Forward) -> nn.Module:
    return Model(forward).requires_grad_(False).eval()


@functools.cache
def pair_of(forward: Forward, quantizer: str) -> pt2qa.QuantizedPair:
    return pt2qa.quantize(pt2qa.capture(model_of(forward), X), quantizer, [X], progress=False)


@pytest.mark.parametrize(
    ("forward", "quantizer"),
    [(forward, "xnnpack") for forward in FORWARDS]
    + [(forward, "x86") for forward in (seen_before, written_through_a_view, weight)],
)
def test_the_simulator_is_both_graphs(forward: Forward, quantizer: str) -> None:
    """Even where ``convert_pt2e`` takes a buffer that is quantized for a constant, and so computes something else."""
    pair = pair_of(forward, quantizer)
    wanted = model_of(forward)(X)
    assert torch.equal(copy.deepcopy(pair.reference)(X), wanted)  # its state is the model's
    simulator = Simulator(pair.program)
    (off,), (on,) = simulator.run([X], on=False), simulator.run([X], on=True)
    assert torch.equal(off, wanted)
    assert torch.equal(on, graph_outputs(pair.quantized, [X])[0])
    error = (wanted - on).square().sum()
    report = pt2qa.compare_layers(pair, [X], progress=False)
    assert report.sqnr == pytest.approx(10 * float((wanted.square().sum() / error).log10()), rel=1e-4)


def split(graph_module: GraphModule) -> GraphModule:
    """A copy with a ``get_attr`` node for each op that reads a constant."""
    found = copy.deepcopy(graph_module)
    for node in list(found.graph.nodes):
        for user in list(node.users)[1:] if node.op == "get_attr" else ():
            with found.graph.inserting_before(user):
                user.replace_input_with(node, found.graph.get_attr(node.target))
    found.recompile()
    return found


@pytest.mark.parametrize("forward", [seen_before, read_before_and_after, written_through_a_view])
def test_several_nodes_that_read_one_buffer_share_its_memory(forward: Forward) -> None:
    pair = pair_of(forward, "x86")
    again = pt2qa.pair(split(pair.reference), split(pair.quantized))
    report = pt2qa.compare_layers(again, [X], progress=False)
    assert report.sqnr == pytest.approx(pt2qa.compare_layers(pair, [X], progress=False).sqnr)


def test_sensitivities_are_those_of_the_graphs_where_no_value_may_be_shared() -> None:
    pair = pair_of(seen_before, "x86")
    assert not pair.program.may_share
    report = pt2qa.sensitivity(pair, [X], method="exact", progress=False)
    noise = {row.site: row.noise for row in report.rows}
    assert [noise[number] for number in range(len(pair.sites))] == pytest.approx(
        brute_force.noises(pair, [X]), rel=1e-4
    )
    assert report.measured_sqnr == pytest.approx(pt2qa.compare_layers(pair, [X], progress=False).sqnr)
