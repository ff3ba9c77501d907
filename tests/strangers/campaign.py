"""One quantizer on one net: in plain torchao, and with every analysis of pt2qa."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import pt2qa
from pt2qa.testing import MODELS, ConformanceModel
from tests.flows import direct_sqnr
from tests.strangers.quantizers import Stranger

NETS: Final = (
    *("conv_bn_relu", "conv_relu6", "linear", "residual_add", "cat", "shared_conv", "avg_pool", "multihead_attention"),
    *("lstm_decomposed", "embedding"),
)
"""Models of :data:`pt2qa.testing.MODELS`."""

SAME_DB: Final = 60.0
"""SQNR of the prepared graph below which plain torchao has changed the model before it quantizes."""

Outcome = Literal["both", "nothing", "torchao", "changed", "ours"]
OUTCOMES: Final[dict[Outcome, str]] = {
    "both": "works in torchao and in pt2qa",
    "nothing": "nothing is annotated",
    "torchao": "fails in torchao itself",
    "changed": "the prepared graph computes another model",
    "ours": "a fault of pt2qa's",
}


@dataclass(frozen=True)
class Tried:
    """What came of a quantizer on a net.

    Attributes:
        quantizer: its name.
        net: the net's.
        outcome: one of :data:`OUTCOMES`.
        step: the step of torchao or pt2qa that failed; empty if none did.
        why: the error.
    """

    quantizer: str
    net: str
    outcome: Outcome
    step: str = ""
    why: str = ""


class _Failed(Exception):
    """A step failed; the cause is what it raised."""

    def __init__(self, step: str) -> None:
        super().__init__(step)
        self.step = step


def attempt(name: str, stranger: Stranger, net: str, say: Callable[[str], None] = lambda text: None) -> Tried:
    """What comes of a quantizer on a net; ``say`` gets the tracebacks of pt2qa's faults."""
    model = MODELS[net]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            quantizes, kept = _plain(stranger, model)
        except _Failed as failed:
            return Tried(name, net, "torchao", failed.step, _text(failed.__cause__))
        if not quantizes:
            return Tried(name, net, "nothing")
        if not stranger.qat and not kept >= SAME_DB:
            return Tried(name, net, "changed", "prepare", f"{kept:.1f} dB")
        try:
            for step, function in _analyses(stranger, model):
                with _step(step):
                    function()
        except _Failed as failed:
            say("".join(traceback.format_exception(failed.__cause__)))
            return Tried(name, net, "ours", failed.step, _text(failed.__cause__))
    return Tried(name, net, "both")


class _step:
    """Names what fails within it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            raise _Failed(self.name) from error


def _plain(stranger: Stranger, model: ConformanceModel) -> tuple[bool, float]:
    """Whether anything is quantized, and the SQNR in dB of the prepared graph against the model.

    Some quantizers find ops only by what ``strict=True`` writes, others fail on it: the first mode counts that works.
    """
    failures: list[_Failed] = []
    for strict in (False, True):
        try:
            found = _plain_once(stranger, model, strict)
        except _Failed as failed:
            failures.append(failed)
        else:
            if found[0]:
                return found
    if len(failures) == 2:
        raise failures[0]
    return False, math.inf


def _plain_once(stranger: Stranger, model: ConformanceModel, strict: bool) -> tuple[bool, float]:
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

    eager, batches = model.build(), model.batches()
    with _step("export"):
        exported = torch.export.export(eager, batches[0], dynamic_shapes=model.dynamic_shapes, strict=strict)
    with _step("quantizer"):
        quantizer = stranger.make()
    with torch.set_grad_enabled(stranger.qat):
        with _step("prepare"):
            graph = exported.module(check_guards=False)
            prepared = (prepare_qat_pt2e if stranger.qat else prepare_pt2e)(graph, quantizer)
        if stranger.qat:
            move_exported_model_to_eval(prepared)
        with _step("calibrate"):
            outputs = [prepared(*batch) for batch in batches]
    with torch.no_grad():
        with _step("convert"):
            converted = convert_pt2e(prepared, fold_quantize=stranger.fold)
        with _step("run"):
            converted(*batches[0])
        quantizes = any("quantize" in str(node.target) for node in converted.graph.nodes)
        pairs = zip(_floats(eager(*batches[0])), _floats(outputs[0]), strict=True)
        return quantizes, min((direct_sqnr(want, got) for want, got in pairs), default=math.inf)


def _floats(outputs: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _analyses(stranger: Stranger, model: ConformanceModel) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The steps of pt2qa, each with what does it."""
    batches, made = list(model.batches()), dict[str, Any]()

    def capture() -> None:
        shapes = model.dynamic_shapes
        made["capture"] = pt2qa.capture(model.build(), batches[0], dynamic_shapes=shapes, decompose=model.decompose)

    def quantize() -> None:
        made["pair"] = pt2qa.quantize(made["capture"], stranger.make(), batches, qat=stranger.qat, progress=False)

    def compare_layers() -> None:
        report = pt2qa.compare_layers(made["pair"], batches[:1], progress=False)
        with torch.no_grad():
            sides = (_floats(graph(*batches[0])) for graph in (made["pair"].reference, made["pair"].quantized))
        for row, want, got in zip(report.outputs, *sides, strict=True):
            if abs(row.sqnr - direct_sqnr(want, got)) > 1e-3:
                raise ValueError(f"{row.name}: {row.sqnr} dB, by its definition {direct_sqnr(want, got)}")

    def sensitivity() -> None:
        assert pt2qa.sensitivity(made["pair"], batches, progress=False).rows, "no row"

    def check() -> None:
        findings = pt2qa.check(made["pair"], batches=batches, progress=False)
        failed = [f"{rule.rule}: {rule.reason}" for rule in findings.rules if rule.outcome == "failed"]
        assert not failed, "; ".join(failed)

    def annotations() -> None:
        before = pt2qa.annotations(made["capture"], stranger.make(), qat=stranger.qat)
        asked, there = (
            {(row.name, row.role, row.argument) for row in report.rows if row.quantized or not wanted}
            for report, wanted in ((before, True), (pt2qa.annotations(made["pair"]), False))
        )
        assert asked, "nothing is quantized"
        assert asked <= there, f"places that the converted model lacks: {sorted(asked - there)}"

    yield from (
        ("capture", capture),
        ("quantize", quantize),
        ("compare_layers", compare_layers),
        ("sensitivity", sensitivity),
        ("check", check),
        ("annotations", annotations),
    )


def _text(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
