"""What other tools call things, and what these are in pt2qa: for errors about a name that somebody brings along.

The tools are torch's Numeric Suites, torchao's numeric debugger and accuracy-tuning kits of vendors, as in
``docs/numeric_suite.md``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from pt2qa.errors import SelectionError

Given = ParamSpec("Given")
Result = TypeVar("Result")

_LAYERS: Final = "pt2qa.compare_layers(pair, batches)"
_MODULES: Final = "pt2qa.compare_modules(pair, batches)"
_METRIC: Final = "a pt2qa.Metric, for metrics="
_QUANTIZERS: Final = "pt2qa.compare_quantizers(capture, quantizers, calibration)"

NAMES: Final = {
    "ModelProfiler": "pt2qa.Profiler(graph), or pt2qa.profile(subject, batches)",
    "HbirModelProfiler": 'pt2qa.profile(pair, batches, side="deployed")',
    "check_qat_model": "pt2qa.check(model, example_inputs), and pt2qa.annotations for the configuration of each op",
    "compare_model_outputs": _LAYERS,
    "prepare_model_outputs": _LAYERS,
    "get_matching_activations": _LAYERS,
    "compare_model_stub": _MODULES,
    "prepare_model_with_stubs": _MODULES,
    "get_logger_dict": _MODULES,
    "Logger": _METRIC,
    "OutputLogger": _METRIC,
    "ShadowLogger": _METRIC,
    "OutputComparisonLogger": _METRIC,
    "extract_weights": "pt2qa.compare_weights(pair)",
    "add_loggers": _LAYERS,
    "extract_logger_info": _LAYERS,
    "add_shadow_loggers": f"{_LAYERS}, whose column isolated_sqnr is the error on the float model's inputs",
    "extract_shadow_logger_info": f"{_LAYERS}, whose column isolated_sqnr is the error on the float model's inputs",
    "extend_logger_results_with_comparison": _LAYERS,
    "prepare_n_shadows_model": _QUANTIZERS,
    "convert_n_shadows_model": _QUANTIZERS,
    "extract_results_n_shadows_model": _QUANTIZERS,
    "print_comparisons_n_shadows_model": _QUANTIZERS,
    "generate_numeric_debug_handle": "pt2qa.capture(model, example_inputs), which gives every op a handle",
    "prepare_for_propagation_comparison": _LAYERS,
    "extract_results_from_loggers": _LAYERS,
    "compare_results": _LAYERS,
    "set_model_profiler_dir": "pt2qa.diff_profiles(pt2qa.load(old), pt2qa.load(new))",
}
"""Functions, classes and methods, and what to call."""

_PAIR: Final = "pass the pair: pt2qa.QuantAnalysis(pt2qa.pair(baseline, analysis), batches, out_dir=folder)"
_CUSTOM: Final = "pass metric=pt2qa.CaseMetric(name, function, worst)"
_DEVICE: Final = "models run where they are: move the model and the batches there before pt2qa.capture"

KEYWORDS: Final = {
    "baseline_model": _PAIR,
    "analysis_model": _PAIR,
    "analysis_model_type": _PAIR,
    "device": _DEVICE,
    "device_ids": _DEVICE,
    "custom_metric_func": _CUSTOM,
    "custom_metric_order_seq": _CUSTOM,
    "cached_attrs": "pass feedback={input name: output name}",
    "dump_in_run": "leave it out: the bad cases are written when the search ends or is interrupted",
    "data_generator": "it is called batches",
    "filename": "it is called path",
    "types": "pass ops=, kinds of op such as 'conv2d'",
    "reserve": "leave it out: no file is written between",
}
"""Parameters, and what to pass."""


def explains_keywords(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function that says what to pass for a keyword of another tool that it does not have.

    >>> explains_keywords(lambda batches: 0)(data_generator=[])
    Traceback (most recent call last):
    pt2qa.errors.SelectionError: <lambda> has no data_generator=: it is called batches.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Given.args, **given: Given.kwargs) -> Result:
        for name in given:
            if name in KEYWORDS and name not in known:
                raise SelectionError(f"{function.__name__} has no {name}=: {KEYWORDS[name]}.")
        return function(*args, **given)

    return call
