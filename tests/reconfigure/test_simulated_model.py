"""A configuration is scored on the simulator as on a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import pt2qa
from pt2qa._simulator.data import Data
from pt2qa._simulator.simulator import tensors_equal
from pt2qa._trials.judge import Judge, SimulatedModel
from pt2qa._trials.treatment import Treatment
from pt2qa.errors import SimulationError
from tests.flows import quantized_pair
from tests.models import NestedOutputs


@pytest.mark.parametrize("quantized", [False, True], ids=["float", "int8"])
def test_a_metric_sees_the_outputs_nested_as_the_model_nests_them(quantized: bool) -> None:
    x = torch.randn(4, 16)
    pair = quantized_pair(NestedOutputs(), x, "x86")
    sites = frozenset(site.index for site in pair.sites) if quantized else frozenset()
    actual, expected = SimulatedModel(pair, sites)(x), (pair.quantized if quantized else pair.reference)(x)
    assert type(actual) is dict
    assert type(actual["rest"]) is tuple
    assert actual.keys() == expected.keys()
    assert tensors_equal(actual, expected)


def test_where_the_simulator_is_wrong_the_converted_graph_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(pair: pt2qa.QuantizedPair) -> object:
        raise SimulationError("it computes something else")

    x = torch.randn(4, 16)
    pair = quantized_pair(NestedOutputs(), x, "x86")
    measured: list[object] = []
    target = pt2qa.Target(0.0, metric=lambda model: measured.append(model) or 1.0)
    judge = Judge(pair, Data("batches", [x]), target, "judge")
    treatment = Treatment(data=Data("other", [2 * x]))
    monkeypatch.setattr("pt2qa._trials.judge.verified_run", wrong)
    found = judge.outcome(treatment)
    graph = judge.pair_with(treatment).quantized
    assert measured == [graph]
    for (_, sqnr), position in zip(found.outputs, judge.reference.positions, strict=True):
        ref, quant = (
            pytree.tree_leaves(each(x))[position].detach().double().numpy() for each in (pair.reference, graph)
        )
        assert sqnr == pytest.approx(10 * np.log10((ref**2).sum() / ((ref - quant) ** 2).sum()), abs=1e-3)
