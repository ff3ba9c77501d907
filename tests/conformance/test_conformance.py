"""Quantizers that others wrote, model by model and property by property: all is as their tables say."""

from __future__ import annotations

import warnings

import pytest

from tests.conformance.outcomes import CHECKED, OURS, SOME_MODELS, STRANGERS, TABLES, differences, read, written


def check(name: str, models: tuple[str, ...]) -> None:
    expected = {key: outcome for key, outcome in read(name).items() if key[0] in models}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # third parties' own, at import
        wrong = differences(expected, CHECKED[name].run(models))
    assert not wrong, "".join(f"\n  {each}" for each in [f"{name}:", *wrong])


@pytest.mark.parametrize("name", [*OURS, *(name for name in STRANGERS if name != "coreml")])
def test_quantizers_on_some_models(name: str) -> None:
    check(name, SOME_MODELS)


@pytest.mark.zoo
@pytest.mark.parametrize("name", OURS)
def test_quantizers_with_a_plugin_on_all_models(name: str) -> None:
    check(name, OURS[name].models)


@pytest.mark.conformance
@pytest.mark.parametrize("name", STRANGERS)
def test_quantizers_of_strangers_on_all_models(name: str) -> None:
    check(name, STRANGERS[name].models)


def test_some_models_show_every_fault_that_all_models_show() -> None:
    faults = {(name, each) for name in STRANGERS for (_, each), (found, _) in read(name).items() if found == "failed"}
    shown = {
        (name, each)
        for name in STRANGERS
        for (model, each), (found, _) in read(name).items()
        if found == "failed" and model in SOME_MODELS
    }
    assert shown == faults


def test_a_difference_names_property_model_and_reason() -> None:
    expected = {("linear", "convert"): ("passed", ""), ("cat", "sqnr"): ("failed", "a coarse scale")}
    found = {("linear", "convert"): ("failed", "no scale was found"), ("cat", "sqnr"): ("failed", "2 dB")}
    assert differences(expected, found) == ["convert on linear: failed: no scale was found; the table says passed"]
    assert differences(found, {}) == [
        "convert on linear: not looked at; the table says failed: no scale was found",
        "sqnr on cat: not looked at; the table says failed: 2 dB",
    ]


@pytest.mark.parametrize("name", CHECKED)
def test_a_table_reads_as_it_is_written(name: str) -> None:
    assert written(read(name)) == (TABLES / f"{name}.txt").read_text()
