"""Which rules have something to look at, by what is given, and what the others say is missing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

import pt2qa
from pt2qa._check.rules import RULES
from tests.flows import residual_pair
from tests.models import images, residual

GRAPH = (
    *("nested-graph", "invalid-fold", "opaque-recurrent", "unfoldable-batch-norm", "random-op", "fixed-batch"),
    *("no-float-output", "shared-module", "shared-weight", "opaque-attention", "written-buffer"),
)
PRODUCTS = ("no-coverage", "float-op", "half-quantized", "coverage")
ANNOTATIONS = (
    *("unfused-pair", "broken-share", "backend-spec", "integer-observed", "in-place-spelling", "residual-add"),
    *("mixed-parameters", "dynamic-conv", "float-island", "fixed-range", "lost-write"),
)
EXPORTED = ("plain-program", "decomposed-first", "integer-scalar", "added-zero")
CHANGED = ("partial-write", "dead-code")
NUMBERS = (
    *("dead-channel", "channel-range", "saturation", "range-outliers", "unused-range", "requantize-mismatch"),
    "bias-overflow",
)
VALUES = ("saturation", "range-outliers", "unused-range")

INPUTS = "without example inputs: pt2qa.check(model, args)"
QUANTIZER = "without a quantizer: pass quantizer="
CAPTURE = "without a capture"
EARLY = {
    "never-calibrated": "before prepare: pass a graph with observers, or a pair",
    **dict.fromkeys(
        ("nonfinite-observed", "degenerate-scale"), "before calibration: pass a graph with observers, or a pair"
    ),
    **dict.fromkeys(NUMBERS, "without a quantized pair: pass what pt2qa.quantize returns"),
}
"""What is said before there are numbers."""

CAPTURED = {
    **dict.fromkeys(EXPORTED, "to programs that pt2qa.capture made"),
    "capture-fails": "to what is captured already",
    "aliased-inputs": "to what was captured from inputs that are no longer known",
    "module-never-called": "without the eager model: pass it, or model=",
    "strict-differs": "to graphs, which were exported in one mode",
    "fixed-batch": "found",
    "shared-module": "found",
}
"""Of the model below after capture: it calls a relu twice, and its batch is fixed."""

ANNOTATED = {
    "broken-share": "to annotations without shared scales",
    "unmatched-filter": "to quantizers without filters by name or type",
    "fixed-range": "to models without softmax, sigmoid or tanh",
    "lost-write": "to graphs that write to no input",
}
"""Of the annotations of the x86 quantizer."""

NO_QUANTIZER = dict.fromkeys(
    (*ANNOTATIONS, *PRODUCTS, "quantizer-fails", "foreign-quantizer", "unmatched-filter", "strict-differs"), QUANTIZER
)

AS_EXPORTED = {
    **CAPTURED,
    **dict.fromkeys(EXPORTED, "clear"),
    "strict-differs": CAPTURE,
    **EARLY,
}
FAILING = {
    **dict.fromkeys((*ANNOTATIONS, *PRODUCTS), "the quantizer could not annotate the graph"),
    "plain-program": "found",
    "quantizer-fails": "where another rule reports why the quantizer fails",
    "unmatched-filter": ANNOTATED["unmatched-filter"],
}
"""x86 takes the two calls of the relu for one."""

PREPARED = {
    **CAPTURED,
    **dict.fromkeys((*GRAPH, *PRODUCTS, "unmatched-filter"), "to graphs with observers"),
    **dict.fromkeys((*CHANGED, "strict-differs"), CAPTURE),
    "train-mode": "to graphs that are being calibrated or trained",
    "never-calibrated": "found",
    **dict.fromkeys(NUMBERS, EARLY["dead-channel"]),
}
PAIR = {
    **CAPTURED,
    **ANNOTATED,
    "foreign-quantizer": "to quantizers that made a pair",
    "channel-range": "to models without weights that have one scale for the whole tensor",
    **dict.fromkeys(VALUES, "without data: pass batches="),
    "bias-overflow": "to kernels that add the bias in float",
}
MODEL = {**dict.fromkeys(EXPORTED, CAPTURED["added-zero"]), **EARLY}

EXPECTED: dict[tuple[str, str | None], dict[str, str]] = {
    ("model", "x86"): {
        **MODEL,
        **dict.fromkeys((*GRAPH, *ANNOTATIONS, *PRODUCTS, *CHANGED, "capture-fails", "aliased-inputs"), INPUTS),
        **dict.fromkeys(("module-never-called", "quantizer-fails", "unmatched-filter", "strict-differs"), INPUTS),
    },
    ("model", None): {
        **MODEL,
        **dict.fromkeys((*GRAPH, *PRODUCTS, *CHANGED, "capture-fails", "aliased-inputs"), INPUTS),
        **dict.fromkeys(("module-never-called", "unmatched-filter", "strict-differs"), INPUTS),
        **dict.fromkeys((*ANNOTATIONS, "quantizer-fails", "foreign-quantizer"), QUANTIZER),
    },
    ("model with inputs", "x86"): {**MODEL, **ANNOTATED, "fixed-batch": "found", "shared-module": "found"},
    ("model with inputs", None): {**MODEL, **NO_QUANTIZER, "fixed-batch": "found", "shared-module": "found"},
    ("capture", "x86"): {**CAPTURED, **ANNOTATED, **EARLY},
    ("capture", None): {**CAPTURED, **NO_QUANTIZER, **EARLY},
    ("program", "x86"): {**AS_EXPORTED, **FAILING, "aliased-inputs": "clear"},
    ("graph", "x86"): {**AS_EXPORTED, **FAILING},
    ("program", None): {
        **NO_QUANTIZER,
        **AS_EXPORTED,
        **dict.fromkeys(("plain-program", "integer-scalar"), QUANTIZER),
        "aliased-inputs": "clear",
    },
    ("graph", None): {
        **NO_QUANTIZER,
        **AS_EXPORTED,
        **dict.fromkeys(("plain-program", "integer-scalar"), QUANTIZER),
    },
    ("prepared", "x86"): {**PREPARED, **dict.fromkeys((*ANNOTATIONS, "quantizer-fails"), CAPTURE)},
    ("prepared", None): {
        **PREPARED,
        **dict.fromkeys((*ANNOTATIONS, "quantizer-fails", "foreign-quantizer"), QUANTIZER),
    },
    ("pair", None): PAIR,
    ("pair of graphs", None): {
        **PAIR,
        **NO_QUANTIZER,
        **dict.fromkeys(PRODUCTS, "clear"),
        **dict.fromkeys((*CHANGED, "strict-differs"), CAPTURE),
        "bias-overflow": "clear",
    },
}
"""What is neither clear nor said here is clear."""


@functools.cache
def _exported() -> Any:
    return torch.export.export(residual(), (images(),))


def _prepared() -> Any:
    graph = pt2qa.capture(residual(), images()).module()
    return prepare_pt2e(graph, pt2qa.quantizer("x86").build(graph, qat=False))


SUBJECTS: dict[str, Callable[[], Any]] = {
    "model": residual,
    "model with inputs": residual,
    "capture": lambda: pt2qa.capture(residual(), images()),
    "program": _exported,
    "graph": lambda: _exported().module(),
    "prepared": _prepared,
    "pair": lambda: residual_pair("x86"),
    "pair of graphs": lambda: pt2qa.pair(pt2qa.capture(residual(), images()).module(), residual_pair("x86").quantized),
}


@pytest.mark.parametrize(("kind", "quantizer"), EXPECTED)
def test_each_rule_applies_or_says_what_is_missing(kind: str, quantizer: str | None) -> None:
    args = images() if kind == "model with inputs" else None
    findings = pt2qa.check(SUBJECTS[kind](), args, quantizer=quantizer, rules=list(RULES), progress=False)
    found = {each.rule: each.reason or each.outcome for each in findings.rules}
    assert found == {rule: EXPECTED[kind, quantizer].get(rule, "clear") for rule in RULES}
