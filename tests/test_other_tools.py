"""What people bring from other tools: it works, or the error says what to call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import DeQuantStub, QuantStub, fuse_modules

import pt2qa
from pt2qa._graph.handles import handle_of, op_of
from pt2qa._other_tools import KEYWORDS, NAMES
from pt2qa.errors import CaptureError, PairingError, QuantizeError, SelectionError
from tests.flows import quantized_pair, residual_pair
from tests.models import images

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
        ("compare_per_layer", {"types": (nn.Linear,)}, "pass ops=, which takes names such as"),
        ("auto_find_bad_case", {"device": "cpu"}, "models run where they are"),
        ("auto_find_bad_case", {"data_generator": [X]}, "it is called batches"),
        ("auto_find_bad_case", {"custom_metric_order_seq": "ascending"}, r"pass metric=pt2qa\.CaseMetric"),
        ("set_bad_case", {"data": X}, "it is called batch"),
        ("set_bad_case", {"baseline_model_cached_attr": {}}, "state is an input of the captured model"),
        ("sensitivity", {"device": "cpu"}, "models run where they are"),
        ("sensitivity", {"reserve": True}, "leave it out: no file"),
    ],
)
def test_a_parameter_of_another_tool_is_answered_with_what_to_pass(
    analysis: pt2qa.QuantAnalysis, method: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(SelectionError, match=rf"{method} has no {next(iter(given))}=: .*{message}"):
        getattr(analysis, method)(**given)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "check": lambda given, **options: pt2qa.check(given.reference, **options),
    "compare_layers": lambda given, **options: pt2qa.compare_layers(given, [X], **options),
    "compare_modules": lambda given, **options: pt2qa.compare_modules(given, [X], **options),
    "compare_weights": lambda _, **options: pt2qa.compare_weights(**options),
    "find_bad_cases": lambda given, **options: pt2qa.find_bad_cases(given, **options),
    "profile": lambda given, **options: pt2qa.profile(given, [X], **options),
    "Profiler": lambda given, **options: pt2qa.Profiler(given, **options),
    "QuantAnalysis": lambda given, **options: pt2qa.QuantAnalysis(given, [X], out_dir="out", **options),
    "write_tensorboard": lambda _, **options: pt2qa.write_tensorboard([], "folder", **options),
}


@pytest.mark.parametrize(
    ("function", "keyword", "message"),
    [
        ("check", "save_results", "pt2qa check --text"),
        ("check", "out_dir", "reports are written by save"),
        ("check", "example_inputs", "it is called args"),
        ("compare_layers", "logger_cls", r"pass metrics=\{name: a pt2qa\.Metric\}"),
        ("compare_layers", "white_list", "pass prefixes= or ops="),
        ("compare_layers", "float_model", r"pass the pair: pt2qa\.pair\("),
        ("compare_modules", "module_swap_list", "it is called modules"),
        ("compare_weights", "float_dict", r"pass the pair: pt2qa\.pair\("),
        ("find_bad_cases", "data_generator", "it is called batches"),
        ("profile", "types", "pass ops="),
        ("Profiler", "out_dir", "reports are written by save"),
        ("QuantAnalysis", "device_ids", "models run where they are"),
        ("write_tensorboard", "force_per_channel", "it is called per_channel"),
        ("write_tensorboard", "types", "pass ops="),
    ],
)
def test_functions_explain_parameters_of_other_tools(
    pair: pt2qa.QuantizedPair, function: str, keyword: str, message: str
) -> None:
    with pytest.raises(SelectionError, match=rf"^{function} has no {keyword}=: .*{message}"):
        FUNCTIONS[function](pair, **{keyword: None})


def test_two_models_are_one_pair(pair: pt2qa.QuantizedPair) -> None:
    both: Any = (pair.reference, pair.quantized)
    for function in (pt2qa.compare_layers, pt2qa.compare_modules, pt2qa.find_bad_cases, pt2qa.sensitivity):
        call = rf"pt2qa\.{function.__name__}\(pt2qa\.pair\(baseline, analysis\), batches"
        message = rf"as one pair, got a GraphModule and a GraphModule\. Pass {call}"
        with pytest.raises(SelectionError, match=message):
            function(*both, X)
    function: Any = pt2qa.compare_layers
    with pytest.raises(SelectionError, match=r"takes 2 arguments by position, got 3\. .* pass the list \[\(a, b\)\]"):
        function(pair, X, X)
    states: Any = (MODEL.state_dict(), MODEL.state_dict())
    with pytest.raises(SelectionError, match=r"Pass pt2qa\.compare_weights\(pt2qa\.pair\(baseline, analysis\)\)\.$"):
        pt2qa.compare_weights(*states)


def test_a_profiler_names_what_replaces_its_methods(pair: pt2qa.QuantizedPair) -> None:
    profiler: Any = pt2qa.Profiler(pair)
    with pytest.raises(AttributeError, match=r"no attribute 'get_info_manager'; call profile\(\) of a pt2qa\.Profiler"):
        profiler.get_info_manager()
    profile: Any = pt2qa.profile(pair, [X], progress=False)
    with pytest.raises(AttributeError, match=r"no attribute 'tensorboard'; call pt2qa\.write_tensorboard\("):
        profile.tensorboard()
    with pytest.raises(CaptureError, match=r"got a Sequential, which is an eager module; .* Capture a model first"):
        pt2qa.Profiler(MODEL)


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


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_both_sides_of_a_row_are_the_same_op(quantizer: str) -> None:
    pair = residual_pair(quantizer)
    ops = [
        {handle_of(node): op_of(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        for graph in (pair.reference, pair.quantized)
    ]
    rows = pt2qa.compare_layers(pair, [images()], progress=False).rows
    compared = [row for row in rows if row.op != "input"]
    assert len(compared) > 4
    assert [(ops[0][row.handle], ops[1][row.handle]) for row in compared] == [(row.op, row.op) for row in compared]


class WrittenForEagerMode(nn.Module):
    """Stubs, a sum as a module, fused modules: what the tutorial's ResNet is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.add = FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.add.add_relu(self.relu(self.bn(self.conv(x))), x))


def test_a_float_model_that_was_written_for_eager_mode_is_captured() -> None:
    model = fuse_modules(WrittenForEagerMode().eval(), [["conv", "bn", "relu"]])
    pair = quantized_pair(model, images())
    rows = pt2qa.compare_layers(pair, [images()], progress=False).rows
    assert [row.name for row in rows if row.op != "input"] == ["conv.0/conv2d", "conv.1/relu", "add", "relu"]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_a_model_that_eager_mode_or_fx_prepared_or_converted_is_refused() -> None:
    from torch.ao.quantization import QConfigMapping, convert, default_qconfig, prepare
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    model: Any = WrittenForEagerMode().eval()
    model.qconfig = default_qconfig
    prepared = prepare(model)
    prepared(images())
    fx = prepare_fx(MODEL, QConfigMapping().set_global(default_qconfig), (X,))
    fx(X)
    for made in (prepared, convert(prepared), fx, convert_fx(fx)):
        with pytest.raises(CaptureError, match="was prepared or quantized by eager mode or FX already: "):
            pt2qa.capture(made, images())
    with pytest.raises(CaptureError, match=r"by eager mode or FX already: .* Pass the float model"):
        pt2qa.check(convert(prepared))


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
