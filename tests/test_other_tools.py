"""What people bring from other tools: it works, or the error says what to call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pt2qa
from pt2qa._other_tools import KEYWORDS, NAMES
from pt2qa.errors import CaptureError, PairingError, QuantizeError, SelectionError
from tests.flows import quantized_pair

X = torch.linspace(-1, 1, 8).reshape(2, 4)
MODEL = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    return quantized_pair(MODEL, X)


@pytest.fixture
def analysis(pair: pt2qa.QuantizedPair, tmp_path: Path) -> pt2qa.QuantAnalysis:
    return pt2qa.QuantAnalysis(pair, [X], out_dir=tmp_path, progress=False)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_of_another_tool_is_answered_with_what_to_call(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; call ") as caught:
        getattr(pt2qa, name)
    assert str(caught.value).endswith(NAMES[name])


def test_what_the_answers_name_is_there_and_what_they_explain_is_not() -> None:
    named = re.findall(r"pt2qa\.(\w+)", " ".join([*NAMES.values(), *KEYWORDS.values()]))
    assert [name for name in named if not hasattr(pt2qa, name)] == []
    assert [name for name in NAMES if name in pt2qa.__all__] == []


def test_the_table_of_the_docs_has_each_of_these_names() -> None:
    page = (Path(__file__).parent.parent / "docs" / "numeric_suite.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if not re.search(rf"`(\w+\.)?{name}`", page)] == []


@pytest.mark.parametrize(
    "call",
    [
        lambda graphs: pt2qa.QuantAnalysis(*graphs, "fake_quant", out_dir="out"),
        lambda graphs: pt2qa.QuantAnalysis(MODEL, MODEL, "fake_quant"),
        lambda graphs: pt2qa.QuantAnalysis(baseline_model=MODEL, analysis_model=MODEL, out_dir="out"),
    ],
    ids=["graphs", "modules", "keywords"],
)
def test_a_session_of_two_models_says_how_to_make_a_pair(pair: pt2qa.QuantizedPair, call: Callable[[Any], Any]) -> None:
    with pytest.raises(SelectionError, match=r"QuantAnalysis\(pt2qa\.pair\(baseline, analysis\), batches, out_dir="):
        call((pair.reference, pair.quantized))


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("auto_find_bad_case", {"custom_metric_func": max}, r"pass metric=pt2qa\.CaseMetric\(name, function, worst\)"),
        ("auto_find_bad_case", {"cached_attrs": ("state",)}, "pass feedback="),
        ("auto_find_bad_case", {"dump_in_run": True}, "leave it out: the bad cases are written"),
        ("load_bad_case", {"filename": "badcase.pt"}, "it is called path"),
        ("run", {"device": "cpu"}, r"move the model and the batches there before pt2qa\.capture"),
        ("compare_per_layer", {"types": (nn.Linear,)}, "pass ops=, kinds of op such as 'conv2d'"),
        ("sensitivity", {"reserve": True}, "leave it out: no file"),
    ],
)
def test_a_parameter_of_another_tool_is_answered_with_what_to_pass(
    analysis: pt2qa.QuantAnalysis, method: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(SelectionError, match=rf"{method} has no {next(iter(given))}=: .*{message}"):
        getattr(analysis, method)(**given)


def test_profiles_of_earlier_runs_are_compared_by_a_function(analysis: pt2qa.QuantAnalysis) -> None:
    with pytest.raises(AttributeError, match=r"'set_model_profiler_dir'; call pt2qa\.diff_profiles\("):
        analysis.set_model_profiler_dir("old", "new")
    with pytest.raises(AttributeError, match=r"no attribute 'comparelayer'$"):
        analysis.comparelayer  # noqa: B018


@pytest.mark.parametrize("metric", ["COSINE", "L1", "ATOL"])
def test_metrics_may_be_in_upper_case(analysis: pt2qa.QuantAnalysis, metric: str) -> None:
    assert analysis.auto_find_bad_case(metric=metric).rows[0].metric == metric.lower()
    assert analysis.sensitivity(metric=metric).metric == metric.lower()


ANALYSES: dict[str, Callable[[Any], Any]] = {
    "compare_layers": lambda given: pt2qa.compare_layers(given, [X]),
    "compare_modules": lambda given: pt2qa.compare_modules(given, [X], modules=["0"]),
    "compare_weights": pt2qa.compare_weights,
    "compare_deployed": lambda given: pt2qa.compare_deployed(given, [X]),
    "find_bad_cases": lambda given: pt2qa.find_bad_cases(given, [X]),
    "sensitivity": lambda given: pt2qa.sensitivity(given, [X]),
    "reconfigure": lambda given: pt2qa.reconfigure(given, [X], target=30),
    "diagnose": lambda given: pt2qa.diagnose(given, [X]),
    "QuantAnalysis": lambda given: pt2qa.QuantAnalysis(given, [X], out_dir="out"),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_of_something_else_than_a_pair_says_how_to_make_one(pair: pt2qa.QuantizedPair, name: str) -> None:
    for given, message in (
        (MODEL, r"got a Sequential, .* pair = pt2qa\.quantize\(pt2qa\.capture\(model, example_inputs\), quantizer, "),
        (pair.reference, r"got a GraphModule, .* pair = pt2qa\.pair\(reference, quantized\), of both graphs"),
        (pair.capture, r"got a Capture, .* pair = pt2qa\.quantize\(capture, quantizer, batches\)"),
    ):
        with pytest.raises(SelectionError, match=message):
            ANALYSES[name](given)


def test_an_eager_model_is_captured_first() -> None:
    with pytest.raises(QuantizeError, match=r"got a Sequential, expected a Capture\. Make one: pt2qa\.capture\("):
        pt2qa.quantize(MODEL, "xnnpack", [X])
    with pytest.raises(PairingError, match=r"is a Sequential; expected .* Capture an eager model: pt2qa\.capture\("):
        pt2qa.pair(MODEL, MODEL)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_a_model_that_eager_mode_quantized_is_named() -> None:
    from torch.ao.quantization import quantize_dynamic

    quantized = quantize_dynamic(MODEL, {nn.Linear})
    with pytest.raises(CaptureError, match=r"by eager mode or FX already: 0 \(Linear\), .* Pass the float model"):
        pt2qa.capture(quantized, X)
