"""A value that is rounded twice with unequal parameters, as an output and again as an input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import pt2qa
from pt2qa._simulator.program import Site
from pt2qa._simulator.verification import CHECKED
from tests.check.quantizers import UINT8, WEIGHT, Annotates

BATCHES = [torch.linspace(-1, 2, 24).reshape(6, 4), torch.linspace(-3, 1, 24).reshape(6, 4)]


class Stack(nn.Module):
    """Two linears with a tanh between; the whole is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x)


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    def annotate(nodes: dict[str, Node]) -> dict[Node, tuple[dict[Node, object], object]]:
        return {nodes["tanh"]: ({}, UINT8), nodes["linear_1"]: ({nodes["tanh"]: WEIGHT}, None)}

    made = pt2qa.quantize(pt2qa.capture(Stack().eval(), BATCHES[0]), Annotates(annotate), BATCHES, progress=False)
    assert [site.name for site in made.sites] == ["both.1/tanh", "both.1/tanh"]
    assert made.sites[1].source == made.sites[0].result
    assert len(made.regions) <= CHECKED  # so each analysis below is held against the converted graph's own nodes
    return made


def rounded(value: Tensor, site: Site) -> Tensor:
    params = site.params
    integers = (value.double() / params.scale).round() + params.zero_point
    return (integers.clamp(params.quant_min, params.quant_max) - params.zero_point) * params.scale


def decibels(reference: Tensor, other: Tensor) -> float:
    noise = ((reference.double() - other.double()) ** 2).sum()
    return float(10 * torch.log10((reference.double() ** 2).sum() / noise))


def test_both_roundings_are_in_the_isolated_error_and_each_has_a_row(pair: pt2qa.QuantizedPair) -> None:
    model, batch = Stack().eval(), BATCHES[1]
    with torch.no_grad():
        tanh, output = model.both[1](model.both[0](batch)), model(batch)
        once = rounded(tanh, pair.sites[0])
        twice = rounded(once, pair.sites[1])
        linear = model.both[2](twice.float())
    report = pt2qa.compare_layers(pair, [batch], progress=False)
    found = [(row.name, row.dtype, row.isolated_sqnr) for row in report.rows if row.op in ("tanh", "linear")]
    assert found == [
        ("both.0/linear", "float32", pytest.approx(float("inf"))),
        ("both.1/tanh", "uint8", pytest.approx(decibels(tanh, once), abs=1e-4)),
        ("both.1/tanh", "int8", pytest.approx(decibels(tanh, twice), abs=1e-4)),
        ("both.2/linear", "float32", pytest.approx(decibels(output, linear), abs=1e-4)),
    ]
    assert decibels(tanh, twice) < decibels(tanh, once) - 0.5
    assert report.rows[-1].input_sqnr == pytest.approx(decibels(tanh, twice), abs=1e-4)


@pytest.mark.parametrize("module", ["both", "both.1"])
def test_a_module_run_alone_has_both_roundings(pair: pt2qa.QuantizedPair, module: str) -> None:
    (row,) = pt2qa.compare_modules(pair, BATCHES, modules=[module], progress=False).rows
    assert row.isolated_sqnr == pytest.approx(row.sqnr)


def test_each_site_in_series_has_the_op_of_the_value(pair: pt2qa.QuantizedPair) -> None:
    report = pt2qa.sensitivity(pair, BATCHES, method="exact", progress=False)
    assert [(row.name, row.op, row.dtype) for row in report.rows] == [
        ("both.1/tanh", "tanh", "uint8"),
        ("both.1/tanh", "tanh", "int8"),
    ]
