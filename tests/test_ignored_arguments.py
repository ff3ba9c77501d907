"""What an analysis would ignore is refused, or the report says so."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import pt2qa
from tests.flows import quantized_pair

X = torch.linspace(-1, 1, 32).reshape(8, 4)


@functools.cache
def _pair() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(nn.Linear(4, 2), X)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ("pair", {"args": [X]}, "args: got QuantizedPair; only a model takes example inputs. Pass data as batches="),
        ("capture", {"kwargs": {"input": X}}, "kwargs: got Capture; only a model takes"),
        ("pair", {"dynamic_shapes": {}}, "dynamic_shapes: got QuantizedPair; only a model takes"),
        ("model", {"dynamic_shapes": {}}, "dynamic_shapes: nothing is captured without example inputs"),
        ("model", {"batches": [X]}, "batches: got Linear; pass the pair"),
        ("capture", {"batches": [X]}, "batches: got Capture; pass the pair"),
        ("pair", {"inputs_of": id}, "inputs_of: there are no batches to map"),
        ("model", {"model": nn.Linear(4, 2)}, "model: the subject is the model itself"),
    ],
)
def test_check_refuses_what_it_would_ignore(given: str, options: dict[str, Any], said: str) -> None:
    pair = _pair()
    subject = {"pair": pair, "capture": pair.capture, "model": nn.Linear(4, 2).eval()}[given]
    with pytest.raises(pt2qa.SelectionError, match=said):
        pt2qa.check(subject, progress=False, **options)


def test_batches_that_no_rule_reads_are_named() -> None:
    unread = pt2qa.check(_pair(), batches=[X], rules=["shared-weight"], progress=False)
    assert unread.notes[-1] == "batches: no rule that ran reads data"
    assert unread.health.batches == 0


def test_all_nan_data_are_no_clean_bill() -> None:
    found = pt2qa.check(_pair(), batches=[X * torch.nan], progress=False)
    assert found.error_count
    assert found.lines()[0].startswith("The input data contain NaN or infinities in 1 of 1 batch: NaN in the input")


@pytest.mark.parametrize("analysis", [pt2qa.sensitivity, pt2qa.error_budget])
def test_the_exact_method_takes_no_projections(analysis: Any) -> None:
    with pytest.raises(pt2qa.SelectionError, match='projections applies only to method="projection"'):
        analysis(_pair(), [X], method="exact", projections=8, progress=False)


def test_steps_beyond_the_data_are_named() -> None:
    found = pt2qa.find_bad_cases(_pair(), [X], num_steps=5, progress=False)
    assert "num_steps is 5, but the data has only 1 batch" in found.notes
    assert not pt2qa.find_bad_cases(_pair(), [X], num_steps=1, progress=False).notes


def test_a_diagnosis_takes_no_report_of_another_model() -> None:
    pair = _pair()
    findings = pt2qa.check(pair, progress=False)
    other = replace(findings, environment=replace(findings.environment, fingerprint="another"))
    with pytest.raises(pt2qa.SelectionError, match="findings: got those of another model, Linear"):
        pt2qa.diagnose(pair, [X], findings=other, progress=False)


def test_metrics_are_merged_only_where_there_can_be_some() -> None:
    report = pt2qa.error_budget(_pair(), [X], progress=False)
    with pytest.raises(pt2qa.ReportError, match="metrics: ErrorBudget has no custom metrics"):
        pt2qa.merge([report, report], metrics={"mine": object()})
