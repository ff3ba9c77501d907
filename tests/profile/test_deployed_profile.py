"""The profile of a lowered program: every number against NumPy on what the program returns without pt2qa."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pt2qa
import pt2qa_xnnpack.lowering
from pt2qa._deployed.deployment import inputs_for, lowerable
from pt2qa._profile.analysis import count_at_ends
from pt2qa._simulator.program import QuantParams
from pt2qa.report import Profile
from pt2qa_xnnpack.backend import XNNPACKProgram
from pt2qa_xnnpack.internals import runtime
from tests.models import Linears, images, residual
from tests.profile.test_profile import assert_measured

DATA = [2 * images(4, seed=1), images(3, seed=2)]
"""The first one is larger than what calibration saw, so that values reach the ends of their range."""


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    shapes = {"x": {0: torch.export.Dim("batch", max=8)}}
    return pt2qa.quantize(pt2qa.capture(residual(), images(4), dynamic_shapes=shapes), "xnnpack", [images(4)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deployed") / "residual"


def deployed(pair: pt2qa.QuantizedPair, folder: Path, **options: Any) -> Profile:
    return pt2qa.profile(pair, DATA, side="deployed", program=folder, **options)


@pytest.fixture(scope="module")
def report(pair: pt2qa.QuantizedPair, folder: Path) -> Profile:
    return deployed(pair, folder, per_channel=True)


@pytest.fixture(scope="module")
def written(report: Profile, folder: Path) -> dict[str, list[Tensor]]:
    """What the program with further outputs returns, by the name of the quantize node, batch by batch."""
    positions = json.loads((folder / "xnnpack.json").read_text())["positions"]
    program = runtime().load_program(folder / "observed.pte")
    outputs = [program.load_method("forward").execute([x]) for x in DATA]
    return {name: [each[place].clone() for each in outputs] for name, place in positions.items()}


def test_every_number_is_that_of_the_integers_that_the_kernels_write(
    pair: pt2qa.QuantizedPair, report: Profile, written: dict[str, list[Tensor]]
) -> None:
    nodes = {node.name: node for node in pair.quantized.graph.nodes}
    assert [row.name for row in report.values] == [
        *("x", "relu/relu", "conv2/conv2d", "relu/relu_1", "mean", "fc/linear")
    ]
    reached = 0
    for row, (name, batches) in zip(report.values, written.items(), strict=True):
        scale, zero_point, low, high = nodes[name].args[1:5]
        integers = np.concatenate([batch.numpy().ravel() for batch in batches]).astype(np.int64)
        real = (integers - zero_point).astype(np.float32) * np.float32(scale)
        assert_measured(report, row, real.astype(np.float64))
        ends = [end for end in (low, high) if end != zero_point]
        assert row.saturation == np.isin(integers, ends).mean()
        assert row.range_use == pytest.approx((integers.max() - integers.min()) / (high - low))
        assert (row.dtype, row.scheme, row.scale, row.zero_point) == ("int8", "per_tensor", scale, zero_point)
        assert row.shape == tuple(batches[0].shape)
        reached += row.saturation > 0
        if len(row.shape) < 2:
            continue
        axis = row.channels % len(row.shape)
        by_channel = [np.moveaxis(batch.numpy(), axis, 0).reshape(batch.shape[axis], -1) for batch in batches]
        channels = np.concatenate(by_channel, axis=1).astype(np.float64) - zero_point
        assert np.allclose(report.channel(row)["max"], channels.max(1) * scale)
        assert np.allclose(report.channel(row)["mean"], channels.mean(1) * scale, atol=1e-6)
    assert reached >= 3


def test_rows_show_each_value_at_its_readers_too(report: Profile) -> None:
    made = report.find("relu/relu")
    readers = [row for row in report.rows if row.of == "relu/relu" and row.role == "input"]
    assert [row.name for row in readers] == ["conv2/conv2d", "add"]
    assert {row.value for row in readers} == {made.value}


def test_what_cannot_be_observed_is_counted_and_named(report: Profile) -> None:
    assert report.notes == (
        "run by ExecuTorch with XNNPACK",
        "2 XNNPACK delegates; outside, in portable kernels: mean (1)",
        "not observed, 1 value: inside the kernel that writes relu/relu: conv1/conv2d",
        "not observed, 1 value: inside the kernel that writes relu/relu_1: add",
        "not observed, 6 values: weights and constants, which the program holds",
    )


def test_the_difference_from_the_quantized_side_has_every_observed_value(
    pair: pt2qa.QuantizedPair, report: Profile
) -> None:
    found = pt2qa.diff_profiles(pt2qa.profile(pair, DATA, side="quantized"), report)
    assert [row.name for row in found.values] == [row.name for row in report.values]
    assert not [only for only in found.only if only.side == "b"]
    assert max(row.distance for row in found.rows) < 1e-3
    assert "Nothing stands out" in found.summary()


def test_the_report_is_shown_saved_and_written_for_tensorboard(report: Profile, tmp_path: Path) -> None:
    assert report.title == "Residual, deployed, quantized by xnnpack"
    assert "At an end of the integer range, clamped or not" in report.summary()
    assert len(report.csv().splitlines()) == 1 + len(report.rows)
    report.save(tmp_path / "profile.safetensors")
    assert pt2qa.load(tmp_path / "profile.safetensors").text(limit=None) == report.text(limit=None)
    pt2qa.write_tensorboard(report, tmp_path / "logs", per_channel=True)
    assert list((tmp_path / "logs" / "deployed_values").glob("events.*"))


def test_the_page_of_a_layer_report_draws_it_beside_the_other_sides(pair: pt2qa.QuantizedPair, report: Profile) -> None:
    layers = pt2qa.compare_layers(pair, DATA)
    quantized = pt2qa.profile(pair, DATA, side="quantized")
    charts = [each for each in layers.charts([layers, quantized, report]) if each["kind"] == "histogram"]
    drawn = next(each for each in charts if each["title"].startswith("relu/relu:"))
    assert [each["side"] for each in drawn["series"]] == ["quantized", "deployed"]
    assert sum(drawn["series"][1]["counts"]) == pytest.approx(report.find("relu/relu").count)


def test_ops_are_chosen_and_a_saved_program_costs_no_lowering(
    pair: pt2qa.QuantizedPair, report: Profile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pt2qa_xnnpack.lowering, "lower")
    found = deployed(pair, folder, prefixes=["fc"], with_stack=True, histograms=False)
    assert {row.name for row in found.rows} == {"fc/linear"}
    assert [row.role for row in found.rows] == ["input", "output"]
    assert "self.fc(" in found.find("fc/linear").source
    assert not found.histograms
    assert found.find("fc/linear").mean == report.find("fc/linear").mean


def test_the_profile_of_x86_kernels_is_that_of_what_its_walk_returns() -> None:
    pair = pt2qa.quantize(pt2qa.capture(residual(), images(4)), "x86", [images(4)])
    batch = 2 * images(4, seed=1)
    report = pt2qa.profile(pair, [batch], side="deployed")
    place, backend = lowerable(pair), pt2qa.plugins.backend_of(pt2qa.plugins.resolve("x86"))
    assert backend is not None
    program = backend.lower(
        place.graph, (images(4),), tuple(place.wanted), dynamic_shapes=None, progress=lambda _: None
    )
    values = program.run(inputs_for([batch])).values
    steps = {tap.step.out: tap for tap in place.values if not program.taps[tap.node]}
    assert len(report.values) == len(steps)
    for tap in steps.values():
        row = report.find(tap.owner.name if tap.owner is not None else "x")
        assert_measured(report, row, tap.value(values[tap.node]).double().numpy().ravel())
        assert math.isnan(row.scale) == (tap.params is None)


def test_values_that_kernels_round_by_row_are_those_before_the_rounding() -> None:
    torch.manual_seed(0)
    example = torch.randn(4, 16)
    pair = pt2qa.quantize(pt2qa.capture(Linears().eval(), example), "xnnpack:mode=dynamic", [example])
    report = pt2qa.profile(pair, [example], side="deployed")
    assert [(row.name, row.dtype, row.scheme) for row in report.values] == [
        ("relu", "float32", ""),
        ("second/linear", "float32", ""),
    ]
    assert "not observed, 1 value: an input that no kernel rounds: x" in report.notes
    quantized = pt2qa.profile(pair.as_deployed(), [example], side="quantized")
    assert report.find("second/linear").max == pytest.approx(quantized.find("second/linear").max, rel=1e-4)


def test_batches_on_which_observing_changed_the_outputs_give_no_values(
    pair: pt2qa.QuantizedPair, report: Profile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = XNNPACKProgram.run

    def profile(changes: list[bool]) -> Profile:
        each = iter(changes)
        monkeypatch.setattr(XNNPACKProgram, "run", lambda self, x: replace(run(self, x), changed=next(each)))
        return deployed(pair, folder)

    found = profile([True, False])
    assert found.notes[-1] == "no values, because observing changed the program's outputs, in 1 of 2 batches: batch 0"
    assert found.find("x").count == DATA[1].numel()
    with pytest.raises(pt2qa.DeploymentError, match=r"no value .* was observed: .*in 2 of 2 batches"):
        profile([True, True])


def test_the_other_sides_take_no_program_and_a_profiler_no_deployed_side(pair: pt2qa.QuantizedPair) -> None:
    with pytest.raises(pt2qa.SelectionError, match="apply to side='deployed' only"):
        pt2qa.profile(pair, DATA, side="quantized", program="folder")
    with pytest.raises(pt2qa.SelectionError, match="a Profiler watches a graph"):
        pt2qa.Profiler(pair, side="deployed")
    with pytest.raises(pt2qa.SelectionError, match="has no sides"):
        pt2qa.profile(pt2qa.capture(residual(), images(4)), DATA, side="deployed")
    with pytest.raises(pt2qa.BatchError, match="no batch to profile"):
        pt2qa.profile(pair, [], side="deployed")


@pytest.mark.parametrize(
    ("zero_point", "low", "high", "count"),
    [(0, -128, 127, 2), (-128, -128, 127, 1), (127, -128, 127, 1), (3, -5, 4, 4)],
)
def test_an_end_that_stands_for_zero_is_no_saturation(zero_point: int, low: int, high: int, count: int) -> None:
    integers = torch.tensor([-128, 127, 4, -5, 0], dtype=torch.int8)
    assert count_at_ends(integers, QuantParams("int8", 1.0, zero_point, low, high)) == count
