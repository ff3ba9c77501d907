"""A configuration is scored on the simulator as on a model."""

from __future__ import annotations

import pytest
import torch

from pt2qa._simulator.simulator import tensors_equal
from pt2qa._trials.judge import SimulatedModel
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
