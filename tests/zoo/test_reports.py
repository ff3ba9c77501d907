"""The report of a real model on the screen and on disk."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import pt2qa
from tests.zoo.pairs import QUANTIZERS, layers_of, pair_of

pytestmark = pytest.mark.zoo


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("model", ["mobilenet_v2", "efficientnet_lite0"])
def test_text_fits_the_screen_and_names_nobody_who_costs_nothing(
    model: str, quantizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    report = layers_of(model, quantizer)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    (worst,) = report.worst(1)
    assert worst.isolated_sqnr == np.nanmin([row.isolated_sqnr for row in report.rows])
    first = next(line for before, line in itertools.pairwise(lines) if before.startswith("---"))
    assert first.split()[0] == worst.name
    summary = " ".join(report.summary().split())
    # The lowest isolated SQNR of either model is of a layer that costs its output less than 0.3 dB: it is not named.
    lowest = min(row.isolated_sqnr for row in report.rows if row.answers_for and not np.isnan(row.isolated_sqnr))
    assert f"quantized values: lowest {lowest:.1f} dB, median" in summary
    assert not any(row.name in summary for row in report.rows)
    assert f"The output has an SQNR of {report.sqnr:.1f} dB, below 20 dB" in summary


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_layer_report_comes_back_from_disk_as_it_was(quantizer: str, tmp_path: Path) -> None:
    report = layers_of("mobilenet_v2", quantizer)
    report.save(tmp_path / "layers.safetensors")
    loaded = pt2qa.load(tmp_path / "layers.safetensors")
    assert isinstance(loaded, pt2qa.LayerReport)
    for part in ("rows", "outputs", "modules"):
        pd.testing.assert_frame_equal(
            loaded.to_pandas(extended=True, part=part),
            report.to_pandas(extended=True, part=part),
            check_exact=True,
        )
    for field in ("unpaired", "notes", "batches", "samples", "quantizer", "model", "environment"):
        assert getattr(loaded, field) == getattr(report, field)
    assert str(loaded) == str(report)


def test_weight_report_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    report = pt2qa.compare_weights(pair_of("mobilenet_v2", "xnnpack"))
    report.save(tmp_path / "weights.safetensors")
    loaded = pt2qa.load(tmp_path / "weights.safetensors")
    assert [str(asdict(row)) for row in loaded.rows] == [str(asdict(row)) for row in report.rows]
    assert str(loaded) == str(report)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("model", ["mobilenet_v2", "efficientnet_lite0", "resnet18", "resnet50"])
def test_nothing_is_noted_of_a_model_that_shows_nothing(model: str, quantizer: str) -> None:
    # Their in-place ops write to values that nothing else reads; all convs and linears are quantized.
    # That x86 finds other ops in a plain export is true of some of them.
    assert [note for note in layers_of(model, quantizer).notes if "plain torch.export" not in note] == []
