"""One comparison of outputs for all stages: floats to decibels, all else exactly."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from pt2qa._graph.agreement import agreement_in, compare_outputs, leaf_name

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("expected", "actual", "what"),
    [
        (torch.ones(3), torch.ones(3) + 1e-7, None),
        (torch.ones(3), torch.ones(3) + 1e-4, "has an SQNR of 80.0 dB instead of at least 100 dB"),
        (torch.zeros(3), torch.tensor([0, 0, 0.5]), "has an SQNR of a largest difference of 0.5 from zero"),
        (torch.tensor([1, NAN, INF]), torch.tensor([1, NAN, INF]), None),
        (torch.tensor([1, NAN]), torch.tensor([1.0, 2]), "is NaN or infinite at 1 other places"),
        (torch.tensor([INF]), torch.tensor([-INF]), "is NaN or infinite at 1 other places"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "differs in 1 of 2 values"),
        (torch.tensor([True]), torch.tensor([True]), None),
        (torch.zeros(0), torch.zeros(0), None),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64), None),
        (torch.ones(2), torch.ones(3), r"is float32\[3\] instead of float32\[2\]"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), r"is float64\[2\] instead of float32\[2\]"),
        (1, 2, "is 2 instead of 1"),
        (NAN, NAN, None),
        (None, None, None),
        (1, True, "is True instead of 1"),
    ],
)
def test_leaves_agree_or_say_how_they_do_not_trap_10(expected: Any, actual: Any, what: str | None) -> None:
    found = compare_outputs(expected, actual, 100)
    if what is None:
        assert found is None
    else:
        assert found is not None
        assert re.match(f"output {what}", found)


def test_another_number_of_leaves_is_a_disagreement() -> None:
    found = compare_outputs((1, 2), (1,), 100)
    assert found is not None
    assert found.startswith("output has 1 leaves")


def test_leaves_are_named_like_the_outputs_of_reports() -> None:
    found = compare_outputs({"a": [1, {"b-c": 2}]}, {"a": [1, {"b-c": 3}]}, 100)
    assert found is not None
    assert found == "output.a[1]['b-c'] is 3 instead of 2"
    assert leaf_name(()) == "output"


def test_a_share_of_integers_may_flip_where_that_is_said() -> None:
    expected = torch.zeros(1000, dtype=torch.int64)
    actual = expected.clone()
    actual[3] = 1
    assert compare_outputs(expected, actual, 60, flips=1e-3) is None
    actual[4] = 1
    found = compare_outputs(expected, actual, 60, flips=1e-3)
    assert found is not None
    assert found == "output differs in 2 of 1000 values"
    assert compare_outputs(expected[:9], actual[:9] * 0 + 1, 60, flips=1e-3) is not None


@pytest.mark.parametrize(
    ("dtypes", "least"),
    [
        ((torch.float32,), 60),
        ((torch.float64, torch.int64), 60),
        ((torch.float32, torch.float16), 48.16),
        ((torch.bfloat16, torch.float32, torch.float16), 30.10),
        ((), 60),
    ],
)
def test_the_coarsest_dtype_of_a_graph_says_how_closely_its_runs_agree(
    dtypes: tuple[torch.dtype, ...], least: float
) -> None:
    graph = torch.fx.Graph()
    for number, dtype in enumerate(dtypes):
        graph.placeholder(f"x{number}").meta["val"] = torch.ones(1, dtype=dtype)
    assert agreement_in(graph, 60) == pytest.approx(least, abs=0.01)
