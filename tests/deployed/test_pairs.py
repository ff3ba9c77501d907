"""Pairs that were not made in the usual way: after training, of graphs made elsewhere, with nested graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pt2qa
from tests.models import Conditional, images, residual

X = images(4)


def test_after_training_the_change_of_weights_belongs_to_the_stage_prepared() -> None:
    def train(graph: torch.fx.GraphModule) -> None:
        with torch.no_grad():
            for parameter in graph.parameters():
                parameter.mul_(1.1)

    capture = pt2qa.capture(residual(), X)
    pair = pt2qa.quantize(capture, "xnnpack", [X], qat=True, train=train, progress=False)
    report = pt2qa.compare_deployed(pair, [X], progress=False)
    assert report.suspects == ()
    assert report.stage == "prepared"
    by_name = {row.name: row for row in report.stages}
    with torch.no_grad():
        expected = pt2qa.sqnr(residual()(X), pair.reference(X))
    assert by_name["prepared"].sqnr == pytest.approx(expected, abs=1e-3)
    assert by_name["converted"].step_sqnr > by_name["prepared"].step_sqnr


def test_graphs_made_elsewhere_begin_with_their_program() -> None:
    made = pt2qa.quantize(pt2qa.capture(residual(), X), "xnnpack", [X], progress=False)
    assert made.capture is not None
    pair = pt2qa.pair(made.capture.module(), made.quantized, quantizer="xnnpack")
    report = pt2qa.compare_deployed(pair, [X], progress=False)
    assert report.suspects == ()
    assert [row.name for row in report.stages] == ["capture", "prepared", "converted", "deployed"]
    assert report.stages[0].sqnr == float("inf")
    assert "the pair does not hold the eager model: the stages begin with its program" in report.notes


def test_a_model_in_training_mode_is_not_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    x = torch.randn(3, 4)
    pair = pt2qa.quantize(pt2qa.capture(model, x), "xnnpack", [x], progress=False)
    model.train()
    report = pt2qa.compare_deployed(pair, [x], progress=False)
    assert report.stages[0].name == "capture"
    assert "the model is in training mode: the stages begin with its program" in report.notes


def test_branches_that_executorch_cannot_lower_are_refused_in_its_words() -> None:
    x = torch.randn(3, 16)
    pair = pt2qa.quantize(pt2qa.capture(Conditional().eval(), x), "xnnpack", [x], progress=False)
    with pytest.raises(pt2qa.DeploymentError, match="ExecuTorch could not"):
        pt2qa.compare_deployed(pair, [x], progress=False)
