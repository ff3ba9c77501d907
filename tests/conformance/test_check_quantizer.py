"""``check_quantizer`` takes what ``pt2qa.quantize`` takes, or a function, and says what it did."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import pt2qa
from pt2qa._conformance.trial import Annotated
from pt2qa.errors import CaptureError, PluginError, SelectionError
from pt2qa.testing import ConformanceModel, Outcome, Property, Trial, check_quantizer, failed, passed
from tests.conformance.quantizers import Honest

LINEAR = ["linear"]


def check(quantizer: object, **options: object) -> pt2qa._conformance.ConformanceReport:
    chosen = {"models": LINEAR, "properties": ["prepare"], "progress": False, **options}
    return check_quantizer(quantizer, **chosen)


def make_x86() -> X86InductorQuantizer:
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


@pytest.mark.parametrize(
    ("quantizer", "name", "note"),
    [
        ("x86:reduce_range=true", "x86:reduce_range=true", "by a new quantizer from the plug-in"),
        (pt2qa.quantizer("x86"), "x86", "by a new quantizer from the plug-in"),
        (make_x86, "X86InductorQuantizer", "by a new quantizer from make_x86()"),
        (Honest, "Honest", "by a new quantizer from Honest()"),
        (Honest(), "Honest", "by the one object that was given; pass a function to have a new one for each"),
    ],
    ids=["name", "plug-in", "function", "class", "object"],
)
def test_takes_any_quantizer_and_says_how_it_was_used(quantizer: object, name: str, note: str) -> None:
    report = check(quantizer)
    assert report.passed
    assert report.quantizer == name
    assert {row.quantizer for row in report.rows} == {name}
    assert report.notes[0].endswith(note)


def test_a_quantizer_for_training_is_called_so_and_gives_fake_quantization() -> None:
    def is_for_training(trial: Trial) -> Outcome:
        assert isinstance(trial.annotated, Annotated)
        specs = {mark.spec for mark in trial.annotated.layout.values()}
        return passed("all") if all("FakeQuantize" in spec for spec in specs) else failed(str(specs))

    mine = Property("for_training", "every spec is for fake quantization", is_for_training)
    report = check("xnnpack", qat=True, properties=[mine])
    assert report.quantizer == "xnnpack for QAT"
    assert report.passed, str(report)


def test_rows_come_model_by_model_and_properties_in_order() -> None:
    report = check("x86", models=["linear", "mean"], properties=["sqnr", "prepare"])
    assert [(row.model, row.property) for row in report.rows] == [
        ("linear", "sqnr"),
        ("linear", "prepare"),
        ("mean", "sqnr"),
        ("mean", "prepare"),
    ]
    assert all(row.seconds > 0 for row in report.rows)


def test_a_model_that_is_not_annotated_is_no_failure_but_is_shown() -> None:
    report = check(Honest, models=["linear", ADDITION], properties=None)
    outcomes = {row.outcome for row in report.rows if row.model == "addition"}
    assert outcomes == {"skipped", "does not apply"}
    assert report.passed
    assert [(each.model, each.ops, each.annotated) for each in report.coverage] == [
        ("linear", 2, 2),
        ("addition", 1, 0),
    ]
    assert "Not annotated at all (1):\n  addition" in str(report)
    assert not check(Honest, models=[ADDITION]).passed


ADDITION = ConformanceModel("addition", "a value and a number", lambda: Plus(), lambda: (torch.randn(3),))


class Plus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0


def test_models_and_properties_of_the_users_own() -> None:
    def has_two_sites(trial: Trial) -> Outcome:
        assert isinstance(trial.pair, pt2qa.QuantizedPair)
        sites = len(trial.pair.sites)
        return passed("two") if sites == 2 else failed(f"{sites} sites")

    model = ConformanceModel("mine", "one linear", lambda: nn.Linear(4, 2), lambda: (torch.randn(2, 4),))
    report = check(Honest, models=[model, "linear"], properties=[Property("two_sites", "", has_two_sites)])
    assert [(row.model, row.property, row.outcome, row.why) for row in report.rows] == [
        ("mine", "two_sites", "failed", "3 sites"),
        ("linear", "two_sites", "failed", "5 sites"),
    ]


def test_a_property_that_stops_is_a_failure_and_takes_no_other_with_it() -> None:
    def stops(trial: Trial) -> Outcome:
        raise KeyError("missing")

    report = check(Honest, properties=[Property("mine", "", stops), "prepare"])
    assert [(row.outcome, row.why) for row in report.rows] == [
        ("failed", "stopped with KeyError: 'missing'"),
        ("passed", "a prepared graph"),
    ]


def test_a_warning_is_no_failure() -> None:
    class Warns(Honest):
        def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
            warnings.warn("old config", stacklevel=1)
            return super().annotate(model)

    assert check(Warns, properties=None).passed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"models": ["liner"]}, r"there is no model 'liner'; did you mean 'linear'"),
        ({"properties": ["spell"]}, r"there is no property 'spell'.*Known: declared, prepare, calibrated"),
        ({"models": "linear"}, r"model: got the text 'linear', expected a list of names: \['linear'\]"),
        ({"models": []}, "no model was given: leave it out for all of conv_bn_relu,"),
        ({"models": ["linear", "linear"]}, "model 'linear' is given twice"),
    ],
)
def test_a_wrong_choice_is_an_error(options: dict[str, object], says: str) -> None:
    with pytest.raises(SelectionError, match=says):
        check("x86", **options)


def test_what_is_no_quantizer_is_an_error() -> None:
    with pytest.raises(PluginError, match="got 3"):
        check(3)


def test_a_model_that_cannot_be_captured_is_the_users_error() -> None:
    broken = ConformanceModel("broken", "", nn.Identity, lambda: (torch.randn(2),))
    object.__setattr__(broken, "inputs", lambda: (torch.randn(2), torch.randn(2)))
    with pytest.raises(CaptureError, match="the model fails on its example inputs"):
        check("x86", models=[broken])
