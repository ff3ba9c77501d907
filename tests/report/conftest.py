"""Small reports, and golden files: ``pytest tests/report --rewrite-golden`` writes them anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from pt2qa.report import UNQUANTIZED, Environment, LayerReport, LayerRow, Unpaired, WeightReport, WeightRow

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write the golden report texts anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with ``golden/<name>.txt``, or write it there."""
    # The option is unknown where this folder is not named on the command line: conftest is then read too late.
    rewrite = request.config.getoption("rewrite_golden", False)

    def check(name: str, text: str) -> None:
        file = GOLDEN / f"{name}.txt"
        if rewrite:
            file.write_text(text + "\n", encoding="utf-8")
        assert file.exists(), f"{file.name} is missing; run pytest tests/report --rewrite-golden"
        assert text + "\n" == file.read_text(encoding="utf-8")

    return check


LAYER: dict[str, Any] = {
    "handle": 0,
    "name": "features.0/conv2d",
    "module": "features.0",
    "op": "conv2d",
    "observed_at": "dq",
    "dtype": "int8",
    "scale": 0.02,
    "zero_point": -3.0,
    "shape": (8, 32, 14, 14),
    "sqnr": 31.25,
    "isolated_sqnr": 33.5,
    "rounding_sqnr": 38.25,
    "mse": 1e-4,
    "cosine": 0.9991,
    "l1": 0.01,
    "atol": 0.1,
    "max_lsb": 5.0,
    "saturation": 0.0001,
    "ref_min": -1.5,
    "quant_min": -1.25,
    "ref_max": 2.5,
    "quant_max": 2.25,
    "ref_mean": 0.125,
    "quant_mean": 0.0625,
}
WEIGHT: dict[str, Any] = {
    "handle": 0,
    "name": "features.0/conv2d",
    "module": "features.0",
    "op": "conv2d",
    "attr": "weight",
    "dtype": "int8",
    "quantized": True,
    "scale": 0.01,
    "axis": 0,
    "shape": (32, 3, 3, 3),
    "sqnr": 40.5,
    "worst_channel": 3,
    "worst_channel_sqnr": 31.25,
    "dead_channels": 0,
    "mse": 1e-6,
    "cosine": 0.99995,
    "l1": 0.001,
    "atol": 0.005,
    "max_lsb": 0.5,
    "ref_min": -1.0,
    "quant_min": -1.0,
    "ref_max": 1.0,
    "quant_max": 1.0,
}
HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")


@pytest.fixture
def layer() -> Callable[..., LayerRow]:
    """A layer row with some fields set."""
    return lambda **changes: LayerRow(**{**LAYER, **changes})


@pytest.fixture
def weight() -> Callable[..., WeightRow]:
    """A weight row with some fields set."""
    return lambda **changes: WeightRow(**{**WEIGHT, **changes})


@pytest.fixture
def layers(layer: Callable[..., LayerRow]) -> LayerReport:
    """Twenty-six layers as of a MobileNet: one bad by itself, one clamped, one nan, one inf."""
    rows = [
        layer(
            handle=index,
            name=f"features.{index}.conv.1.0/conv2d",
            module=f"features.{index}.conv.1.0",
            sqnr=40.0 - 0.75 * index,
            isolated_sqnr=25.0 + (7 * index) % 13,
            cosine=0.9999 - index / 5000,
            mse=1e-5 * (index + 1),
            answers_for=f"features.{index}.conv.1.0/conv2d",
            input_sqnr=40.75 - 0.75 * index,
            excess_lsb=0.25,
        )
        for index in range(26)
    ]
    rows[0] = replace(rows[0], name="x", module="", op="input", sqnr=inf, isolated_sqnr=inf, answers_for="x")
    rows[7] = replace(rows[7], isolated_sqnr=8.24, sqnr=21.0, saturation=0.0421)
    rows[9] = replace(rows[9], op="zeros_like", sqnr=nan, isolated_sqnr=nan, cosine=nan, note="the reference is zero")
    rows[12] = replace(
        rows[12], observed_at="raw", dtype="float32", max_lsb=nan, zero_point=nan, scale=nan, answers_for=""
    )
    output = layer(handle=-1, name="output", op="output", sqnr=13.46, isolated_sqnr=nan, cosine=0.97812, atol=0.5321)
    module = layer(handle=-1, name="features.3", op="InvertedResidual", sqnr=30.0, isolated_sqnr=22.5)
    return LayerReport(
        rows=tuple(rows),
        outputs=(output,),
        modules=(module,),
        unpaired=(
            Unpaired(3, "features.0.1/batch_norm", "reference", "folded into features.0.0"),
            Unpaired(-1, "output/dequantize", "quantized", "has no handle"),
        ),
        notes=("2 ops fell back to the converted op",),
        batches=4,
        samples=32,
        quantizer="xnnpack",
        model="MobileNetV2",
        environment=HERE,
    )


@pytest.fixture
def weights(weight: Callable[..., WeightRow]) -> WeightReport:
    """Five weights: one with dead channels, one per tensor, two that stay float."""
    dead = weight(name="features.1/conv2d", sqnr=18.0, worst_channel=17, worst_channel_sqnr=0.0, dead_channels=2)
    linear = weight(name="classifier.1/linear", axis=-1, worst_channel_sqnr=24.5, shape=(10, 32))
    plain = replace(linear, dtype="float32", scale=nan, worst_channel=-1, sqnr=inf, worst_channel_sqnr=inf, cosine=1.0)
    bias = replace(plain, attr="bias", note=UNQUANTIZED, quantized=False)
    why = f"{UNQUANTIZED}: an op that xnnpack has no kernel for"
    norm = replace(plain, name="norm/layer_norm", note=why, quantized=False)
    rows = (weight(), dead, linear, bias, norm)
    return WeightReport(
        rows, (), notes=("per channel for conv2d alone",), quantizer="xnnpack", model="MobileNetV2", environment=HERE
    )


@pytest.fixture
def empty() -> LayerReport:
    """A report of nothing."""
    return LayerReport((), (), (), (), notes=(), quantizer="xnnpack", model="Net", environment=HERE)
