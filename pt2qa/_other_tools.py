"""What other tools call things, and what these are in pt2qa: for errors about a name that somebody brings along.

The tools are torch's Numeric Suites, torchao's numeric debugger and accuracy-tuning kits of vendors, as in
``docs/numeric_suite.md``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Final, NoReturn, ParamSpec, TypeVar

from pt2qa.errors import SelectionError

Given = ParamSpec("Given")
Result = TypeVar("Result")

_LAYERS: Final = "pt2qa.compare_layers(pair, batches)"
_MODULES: Final = "pt2qa.compare_modules(pair, batches)"
_METRIC: Final = "a pt2qa.Metric, for metrics="
_QUANTIZERS: Final = "pt2qa.compare_quantizers(capture, quantizers, calibration)"
_QUANTIZE: Final = "pt2qa.quantize(pt2qa.capture(model, example_inputs), quantizer, batches)"
_NOT_NEEDED: Final = "nothing: no logger is added to the models"

NAMES: Final = {
    **dict.fromkeys(
        (
            *("compare_model_outputs", "prepare_model_outputs", "get_matching_activations", "add_loggers"),
            *("extract_logger_info", "extend_logger_results_with_comparison", "prepare_for_propagation_comparison"),
            *("extract_results_from_loggers", "compare_results"),
        ),
        _LAYERS,
    ),
    **dict.fromkeys(
        ("add_shadow_loggers", "extract_shadow_logger_info"),
        f"{_LAYERS}, whose column isolated_sqnr is the error on the float model's inputs",
    ),
    **dict.fromkeys(("compare_model_stub", "prepare_model_with_stubs", "get_logger_dict", "Shadow"), _MODULES),
    **dict.fromkeys(("Logger", "OutputLogger", "ShadowLogger", "OutputComparisonLogger"), _METRIC),
    **dict.fromkeys(("loggers_set_enabled", "loggers_set_save_activations"), _NOT_NEEDED),
    **dict.fromkeys(
        (
            *("prepare_n_shadows_model", "convert_n_shadows_model", "extract_results_n_shadows_model"),
            "print_comparisons_n_shadows_model",
        ),
        _QUANTIZERS,
    ),
    **dict.fromkeys(
        ("QuantStub", "DeQuantStub", "FloatFunctional", "fuse_modules"),
        "nothing: a float model needs none of them, and may have them",
    ),
    **dict.fromkeys(
        ("QConfig", "QConfigMapping", "get_default_qconfig"),
        "pt2qa.quantizer(name, option=value), and pt2qa.OverridePlan for single ops",
    ),
    "Observer": "pt2qa.profile(subject, batches)",
    "quantize_dynamic": 'pt2qa.quantize(capture, pt2qa.quantizer(name, mode="dynamic"), batches)',
    **dict.fromkeys(("prepare", "prepare_qat", "convert", "prepare_fx", "convert_fx"), _QUANTIZE),
    **dict.fromkeys(("prepare_pt2e", "prepare_qat_pt2e", "convert_pt2e", "capture_pre_autograd_graph"), _QUANTIZE),
    "DEFAULT_NUMERIC_SUITE_COMPARE_MODEL_OUTPUT_WHITE_LIST": f"{_LAYERS}, which compares every op",
    "extract_weights": "pt2qa.compare_weights(pair)",
    "compute_error": "pt2qa.sqnr(reference, quantized)",
    "compute_sqnr": "pt2qa.sqnr(reference, quantized)",
    "NSTracer": "pt2qa.capture(model, example_inputs)",
    "generate_numeric_debug_handle": "pt2qa.capture(model, example_inputs), which gives every op a handle",
    "check_qat_model": "pt2qa.check(model, example_inputs), and pt2qa.annotations for the configuration of each op",
    "ModelProfiler": "pt2qa.Profiler(pt2qa.capture(model, example_inputs)), or pt2qa.profile(subject, batches)",
    "HbirModelProfiler": 'pt2qa.profile(pair, batches, side="deployed")',
    "get_info_manager": "profile() of a pt2qa.Profiler, which returns a pt2qa.Profile",
    "table": "profile().table() of a pt2qa.Profiler",
    "tensorboard": "pt2qa.write_tensorboard(profile, folder)",
    "set_model_profiler_dir": "pt2qa.diff_profiles(pt2qa.load(old), pt2qa.load(new))",
}
"""Functions, classes and methods, and what to call."""

_SESSION: Final = "pass the pair: pt2qa.QuantAnalysis(pt2qa.pair(baseline, analysis), batches, out_dir=folder)"
_PAIR: Final = "pass the pair: pt2qa.pair(float graph, quantized graph)"
_CUSTOM: Final = "pass metric=pt2qa.CaseMetric(name, function, worst)"
_DEVICE: Final = "models run where they are: move the model and the batches there before pt2qa.capture"
_STATE: Final = "state is an input of the captured model: put it into the batch"

KEYWORDS: Final = {
    **dict.fromkeys(("baseline_model", "analysis_model", "analysis_model_type"), _SESSION),
    **dict.fromkeys(("float_dict", "quantized_dict", "float_model", "q_model", "float_module", "q_module"), _PAIR),
    **dict.fromkeys(("device", "device_ids"), _DEVICE),
    **dict.fromkeys(("custom_metric_func", "custom_metric_order_seq"), _CUSTOM),
    **dict.fromkeys(("baseline_model_cached_attr", "analysis_model_cached_attr"), _STATE),
    "cached_attrs": "pass feedback={input name: output name}",
    "dump_in_run": "leave it out: the bad cases are written when the search ends or is interrupted",
    "data_generator": "it is called batches",
    "data": "it is called batch",
    "example_inputs": "it is called args",
    "filename": "it is called path",
    "types": "pass ops=, which takes names such as 'conv2d', classes, functions and overloads",
    "logger_cls": "pass metrics={name: a pt2qa.Metric}",
    "module_swap_list": "it is called modules",
    "allow_list": "pass prefixes= or ops=",
    "white_list": "pass prefixes= or ops=",
    "force_per_channel": "it is called per_channel",
    "reserve": "leave it out: no file is written between",
    "save_results": "one text file is written by pt2qa.QuantAnalysis(pair, batches, out_dir=folder).check() and by "
    "pt2qa check --text",
    "out_dir": "reports are written by save(path) and to_csv(path), and all of a session by pt2qa.QuantAnalysis",
}
"""Parameters, and what to pass."""


def explains_arguments(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function that says what to pass for arguments of another tool: its keywords, or two models for a pair.

    >>> explains_arguments(lambda batches: 0)(data_generator=[])
    Traceback (most recent call last):
    pt2qa.errors.SelectionError: <lambda> has no data_generator=: it is called batches.
    >>> explains_arguments(lambda pair, batches: 0)({"weight": 1.0}, {"weight": 1})
    Traceback (most recent call last):
    pt2qa.errors.SelectionError: <lambda> takes both models as one pair, got a dict and a dict. Pass \
pt2qa.<lambda>(pt2qa.pair(baseline, analysis), batches).
    """
    known = inspect.signature(function).parameters
    name = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    second = list(known).index("pair") + 1 if "pair" in known else None
    own = int("self" in known)
    most = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in known.values())

    @functools.wraps(function)
    def call(*args: Given.args, **given: Given.kwargs) -> Result:
        for keyword in given:
            if keyword in KEYWORDS and keyword not in known:
                raise SelectionError(f"{name} has no {keyword}=: {KEYWORDS[keyword]}.")
        if second is not None and len(args) > second and _is_model(args[second]):
            kinds = " and ".join(f"a {type(each).__name__}" for each in args[second - 1 : second + 1])
            raise SelectionError(f"{name} takes both models as one pair, got {kinds}. Pass {_with_pair(name, known)}.")
        if "batches" in known and len(args) > most:
            raise SelectionError(
                f"{name} takes {most - own} arguments by position, got {len(args) - own}. A batch of several inputs "
                "is a tuple: pass the list [(a, b)]."
            )
        return function(*args, **given)

    return call


def _is_model(given: object) -> bool:
    """Whether it is a module, a program or a dict of weights; they are told without torch."""
    return isinstance(given, Mapping) or hasattr(given, "state_dict")


def _with_pair(name: str, known: Mapping[str, inspect.Parameter]) -> str:
    """A call with a pair and whatever else has no default."""
    needed = [each for each in known.values() if each.default is each.empty and each.name not in ("self", "pair")]
    rest = (f"{each.name}={each.name}" if each.kind is each.KEYWORD_ONLY else each.name for each in needed)
    return f"pt2qa.{name}({', '.join(('pt2qa.pair(baseline, analysis)', *rest))})"


def no_attribute(self: object, name: str) -> NoReturn:
    """A class's ``__getattr__``: the usual error, and what to call for a name of another tool.

    Raises:
        AttributeError: always.
    """
    hint = f"; call {NAMES[name]}" if name in NAMES else ""
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
