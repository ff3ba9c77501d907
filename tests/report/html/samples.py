"""One small report of each kind that the page draws in a way of its own, all of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np

from pt2qa._profile.histogram import HISTOGRAM, Histogram, packed
from pt2qa.report import (
    BudgetRow,
    Candidate,
    CandidateReport,
    CandidateRow,
    CauseRow,
    CurvePoint,
    DeployedReport,
    DeployedRow,
    Diagnosis,
    EditRow,
    ErrorBudget,
    FigureRow,
    Finding,
    Findings,
    LayerReport,
    LayerRow,
    Profile,
    ProfileRow,
    Reconfiguration,
    Report,
    RuleOutcome,
    RuntimeReport,
    RuntimeRow,
    RuntimeSummary,
    SensitivityReport,
    SensitivityRow,
    Stage,
    StageRow,
    Unpaired,
)
from tests.report.conftest import HERE, LAYER

EVIL = """</script><script>alert("1")</script><b onclick='x'>&amp;"""
"""A name that would break a page that does not escape it."""

SCALE, ZERO_POINT = 0.025, -20


def layers(count: int = 12, model: str = "Net") -> LayerReport:
    """Layers whose SQNR falls along the graph; one bad by itself, one without a number, one with an evil name."""
    rows = [
        LayerRow(
            **{
                **LAYER,
                "handle": i,
                "name": f"blocks.{i}/{'linear' if i % 3 else 'conv2d'}",
                "op": "linear" if i % 3 else "conv2d",
                "module": f"blocks.{i}",
                "sqnr": 45.0 - 30.0 * i / count,
                "isolated_sqnr": 30.0 + (7 * i) % 11 + i / 1000,
                "mse": 1e-5 / (i + 3),
            }
        )
        for i in range(count)
    ]
    rows[0] = replace(rows[0], sqnr=inf, isolated_sqnr=inf)
    rows[3] = replace(rows[3], isolated_sqnr=8.125)
    rows[5] = replace(rows[5], sqnr=nan, isolated_sqnr=nan, rounding_sqnr=nan, note="the reference is zero")
    rows[7] = replace(rows[7], name=EVIL, note=EVIL)
    output = replace(rows[1], handle=-1, name="output", op="output", sqnr=15.5)
    unpaired = (Unpaired(3, EVIL, "reference", "folded <away>"),)
    return LayerReport(
        tuple(rows),
        (output,),
        (),
        unpaired,
        notes=("2 ops & 1 more <fell> back",),
        batches=2,
        samples=16,
        quantizer="xnnpack",
        model=model,
        environment=HERE,
    )


def residual() -> LayerReport:
    """A block with two linear layers, and an addition that reads what the block reads."""
    ops = {
        "stem/conv2d": "",
        "block.fc1/linear": "stem/conv2d",
        "block/relu": "block.fc1/linear",
        "block.fc2/linear": "block/relu",
        "block/add": "stem/conv2d, block.fc2/linear",
        "head/linear": "block/add",
    }
    rows = tuple(
        LayerRow(
            **{**LAYER, "handle": i, "name": name, "module": name.rpartition("/")[0], "op": name.rpartition("/")[2]},
            inputs=inputs,
        )
        for i, (name, inputs) in enumerate(ops.items())
    )
    return replace(layers(), rows=rows)


def profiles(*names: str) -> tuple[Profile, Profile]:
    """What these layers make, or the fourth: in float, and rounded to an int8 grid that clamps their largest values."""
    values = np.random.default_rng(0).normal(0.0, 1.2, 20_000)
    integers = np.clip(np.round(values / SCALE) + ZERO_POINT, -128, 127)
    rounded = (integers - ZERO_POINT) * SCALE
    names = names or ("blocks.3/conv2d",)
    return _profile(names, "reference", values), _profile(
        names, "quantized", rounded, dtype="int8", scale=SCALE, zero_point=float(ZERO_POINT), scheme="per_tensor"
    )


def _profile(names: Sequence[str], side: str, values: np.ndarray[Any, Any], **changes: Any) -> Profile:
    row = ProfileRow(
        name="blocks.3/conv2d",
        module="blocks.3",
        op="conv2d",
        role="output",
        argument="",
        of="blocks.3/conv2d",
        dtype="float32",
        scheme="",
        axis=-1,
        scale=nan,
        zero_point=nan,
        shape=(8, 4, 25, 25),
        count=values.size,
        min=float(values.min()),
        max=float(values.max()),
        mean=float(values.mean()),
        variance=float(values.var()),
        q0_1=-3.0,
        q1=-2.5,
        q50=0.0,
        q99=2.5,
        q99_9=3.0,
        zeros=0.0,
        nans=0,
        infs=0,
        saturation=nan,
        range_use=nan,
        outlier_ratio=1.2,
        source="net.py:3: x = self.conv(x)",
        value=0,
        handle=3,
    )
    counted = Histogram.of(values)
    return Profile(
        tuple(replace(row, name=name, of=name, value=value, **changes) for value, name in enumerate(names)),
        packed(HISTOGRAM, len(names) * [(counted.bins, counted.counts)]),
        {},
        side,
        quantizer="xnnpack",
        batches=2,
        samples=16,
        notes=(),
        model="Net",
        environment=HERE,
    )


def sensitivity() -> SensitivityReport:
    """Three sites; the second makes most of the noise."""
    rows = tuple(
        SensitivityRow(
            f"blocks.{i}/linear",
            "weight" if i % 2 else "activation",
            "linear",
            20.0 + i,
            "int8",
            100,
            0.5,
            site=i,
            handle=i,
            module=f"blocks.{i}",
            region=i,
            noise=noise,
            noise_share=noise,
            error=0.25,
            rank=rank,
            near_tie=False,
        )
        for i, (noise, rank) in enumerate([(0.25, 2), (0.7, 1), (0.05, 3)])
    )
    return SensitivityReport(
        rows,
        ("output",),
        "exact",
        "sqnr",
        "smallest",
        "site",
        0,
        3,
        100.0,
        1.0,
        20.0,
        (),
        (),
        batches=2,
        samples=16,
        notes=(),
        quantizer="xnnpack",
        model="Net",
        environment=HERE,
    )


def candidates() -> CandidateReport:
    """Two candidates, and one that failed."""
    rows = tuple(CandidateRow(i, f"blocks.{i}/linear", "", "linear", {"a": 30.0 - i, "b": 20.25}) for i in range(3))
    each = (
        Candidate("a", "xnnpack", 21.25, 5, 5, 6, 5, 1000),
        Candidate("b", "x86", 24.5, 5, 5, 6, 5, 1000),
        Candidate("broken", "x86:oops", nan, 0, 0, 0, 0, 0, "why <not>"),
    )
    return CandidateReport(rows, each, notes=(), batches=2, samples=16, model="Net", environment=HERE)


def reconfiguration() -> Reconfiguration:
    """Two edits, the second of which reaches the target."""
    edits = (EditRow("blocks.3/conv2d", "float", 0.25, 0.5, 2, ops="blocks.3/conv2d"),)
    curve = (
        CurvePoint("none", 0, 0.0, 0.0, 15.5, 15.25),
        CurvePoint("blocks.3/conv2d", 1, 0.25, 0.125, 24.0, nan),
        CurvePoint("blocks.4/linear", 2, 0.5, 0.25, 28.0, 27.5),
    )
    stages = (Stage("before", 15.25, 0.0, 9), Stage("converted", 27.5, 0.5, 7))
    return Reconfiguration(
        edits,
        curve,
        stages,
        "sqnr ≥ 25 dB",
        1,
        "The target is met: 27.5 dB.",
        7,
        "[]",
        "quantizer.set(<x>)",
        notes=(),
        quantizer="xnnpack",
        model="Net",
        environment=HERE,
    )


def findings() -> Findings:
    """An error about one op, and two warnings of one rule."""
    rows = (
        Finding("quantizer-fails", "error", EVIL, "net.py:12", "IndexError <1>", "report it"),
        Finding("unfused-pair", "warning", "blocks.1/linear", "net.py:20", "rounded before relu", "fuse"),
        Finding("unfused-pair", "warning", "blocks.2/linear", "", "rounded before relu", "fuse"),
    )
    outcomes = (
        RuleOutcome("quantizer-fails", "the quantizer fails", "found", 1, 0, ""),
        RuleOutcome("unfused-pair", "pairs rounded in between", "found", 2, 0, ""),
    )
    return Findings(rows, outcomes, ("model",), notes=(), quantizer="xnnpack", model="Net", environment=HERE)


def deployed() -> DeployedReport:
    """Three kernels: an exact one, one that is wrong, and a float one left to a portable kernel."""
    exact = DeployedRow(1, "stem/conv2d", "stem", "conv2d", "dq", "int8", 0.02, True, 0.0, 0.0, inf, inf, 40.5, 40.5)
    wrong = replace(
        exact,
        handle=2,
        name=EVIL,
        isolated_max_lsb=106.0,
        isolated_differing=0.25,
        isolated_sqnr=3.0,
        cumulative_sqnr=3.0,
        quantized_sqnr=38.25,
        deployed_sqnr=3.0,
    )
    left = replace(wrong, handle=3, name="mean", observed_at="raw", dtype="float32", scale=nan, delegated=False)
    left = replace(left, isolated_max_lsb=nan, isolated_differing=nan, isolated_sqnr=140.0)
    output = replace(left, handle=-1, name="output", op="output", isolated_sqnr=nan)
    stages = (("eager", nan, inf), ("capture", inf, inf), ("prepared", 132.0, 132.0), ("converted", 36.0, 36.0))
    return DeployedReport(
        (exact, wrong, left),
        (output,),
        tuple(StageRow(*stage) for stage in (*stages, ("deployed", 3.0, 2.5))),
        (),
        ("1 <delegate>",),
        "ExecuTorch with XNNPACK",
        notes=(),
        batches=2,
        samples=16,
        quantizer="xnnpack",
        model="Net",
        environment=HERE,
    )


def runtimes() -> RuntimeReport:
    """Two runtimes, one of which differs at an op, and one that did not run."""
    right = {"a LSB": 0.0, "a dB": inf, "b LSB": 0.0, "b dB": inf}
    rows = (
        RuntimeRow(1, "stem/conv2d", "stem", "conv2d", 2, (), "", right),
        RuntimeRow(2, EVIL, "stem", "conv2d", 1, ("b",), "b: it rounds <down>", {**right, "b LSB": 9.0, "b dB": 12.5}),
        RuntimeRow(-1, "output", "", "output", 0, (), "", dict.fromkeys(right, nan)),
    )
    ran = RuntimeSummary("a", "A", 36.0, 140.0, nan, 0, 2, 2, 0.5, 1000, 2)
    each = (ran, replace(ran, name="b", sqnr=3.0, apart=3.5, different=1), RuntimeSummary("c", "", note="why <not>"))
    return RuntimeReport(
        rows,
        each,
        ("a: 1 <delegate>",),
        notes=(),
        batches=2,
        samples=16,
        quantizer="xnnpack",
        model="Net",
        environment=HERE,
    )


def diagnosis() -> Diagnosis:
    """Two causes; both remedies are free."""
    others, why = ("b/linear", "c/linear"), "33 pairs are rounded in between"
    numbers = (9.0, 9.0, 0.0, why, others, "net.py:12", 15.8, "simulated")
    first = CauseRow(1, "unfused-activation", "a/conv2d", "a", "check: 33 pairs", "pt2qa.fuse(<x>)", *numbers)
    second = replace(first, rank=2, cause="narrow-calibration", name=EVIL, gain=1.0, gain_in_sequence=0.5)
    figures = (FigureRow("now", 6.8, "output", 6.8, 3, 1.5), FigureRow("after", 16.3, "output", 16.3, 3, 11.0))
    return Diagnosis(
        rows=(first, second),
        tried=(),
        figures=figures,
        asides=(),
        verdict="The output has 6.8 dB: unfused activations.",
        next_command="pt2qa show 'a b.safetensors'",
        unit="dB",
        target="",
        met=-1,
        budget="",
        plan_json="",
        code="",
        code_verified="",
        forwards=12,
        quantizations=2,
        batches=2,
        samples=16,
        notes=(),
        quantizer="xnnpack",
        model="Net",
        environment=HERE,
    )


def budget(modules: int = 3) -> ErrorBudget:
    """Activations that are rounded and clamped, the last one's most; their errors cancel in part."""
    rows = tuple(
        BudgetRow(f"blocks.{i}/linear", f"blocks.{i}", "linear", "activation", mechanism, noise, noise, "int8", i, 0.0)
        for i in range(modules)
        for mechanism, noise in (("activation rounding", 0.25 * (i + 1)), ("activation clamping", 0.125))
    )
    return ErrorBudget(
        rows,
        ("output",),
        "exact",
        0,
        100.0,
        1.0,
        batches=2,
        samples=16,
        notes=(),
        quantizer="xnnpack",
        model="Net",
        environment=HERE,
    )


def every() -> list[Report]:
    """All of them."""
    return [
        layers(),
        findings(),
        sensitivity(),
        candidates(),
        reconfiguration(),
        deployed(),
        runtimes(),
        *profiles(),
        budget(),
    ]
