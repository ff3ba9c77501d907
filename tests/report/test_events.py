"""What TensorBoard reads back is what the reports hold."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pt2qa._layers.report import SCALARS
from pt2qa._profile.histogram import CHANNELS, packed
from pt2qa._report.charts import drawings
from pt2qa._report.plot import draw
from pt2qa._report.tensorboard import write_tensorboard
from pt2qa.errors import ReportError, SelectionError
from pt2qa.report import LayerReport, Profile, WeightReport
from tests.report.html import samples


@pytest.fixture(scope="module")
def accumulator() -> Callable[[Path], Any]:
    """TensorBoard's own reader of one run, with nothing thinned out."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'pt2qa[plot]'")
    reason = "tensorboard is not installed: pip install 'pt2qa[tensorboard]'"
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)

    def read(run: Path) -> Any:
        found = module.EventAccumulator(str(run), size_guidance={"scalars": 0, "histograms": 0, "images": 0})
        return found.Reload()

    return read


def with_channels(profile: Profile) -> Profile:
    numbers = [np.array([10, 20]), *(np.array([number, -number]) for number in (0.5, 1.5, 1.0, 0.25, math.nan))]
    row = replace(profile.rows[0], channels=1)
    return replace(profile, rows=(row,), channels=packed(CHANNELS, [numbers]))


def test_every_finite_number_of_every_layer_is_a_scalar(accumulator, tmp_path):
    report = samples.layers()
    write_tensorboard(report, tmp_path, step=7)
    found = accumulator(tmp_path / "layers")
    expected = {
        f"{metric}/{row.name}": getattr(row, metric)
        for metric in SCALARS
        for row in report.rows + report.outputs
        if math.isfinite(getattr(row, metric))
    }
    tags = found.Tags()["scalars"]
    assert sorted(tags) == sorted(expected)
    for tag in tags:
        (event,) = found.Scalars(tag)
        assert (event.step, event.value) == (7, pytest.approx(expected[tag], rel=1e-6))


def test_both_sides_of_a_number_share_a_tag_and_so_a_card(accumulator, tmp_path):
    report = samples.layers()
    write_tensorboard(report, tmp_path, step=7)
    for run, value in (("reference", report.rows[3].ref_max), ("quantized", report.rows[3].quant_max)):
        (event,) = accumulator(tmp_path / run).Scalars("max/blocks.3/conv2d")
        assert (event.step, event.value) == (7, pytest.approx(value))


def test_charts_are_pictures_with_both_sides_in_one_histogram(accumulator, tmp_path):
    write_tensorboard([samples.layers(), *samples.profiles()], tmp_path, step=7)
    found = accumulator(tmp_path / "layers")
    title = "charts/blocks.3/conv2d"  # without its number, so that those of several builds share a card
    assert [tag for tag in found.Tags()["images"] if not tag.endswith("along the graph")] == [title]
    (image,) = found.Images(title)
    assert (image.step, image.width, image.height) == (7, 900, 400)
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert int.from_bytes(image.encoded_image_string[16:20], "big") == image.width


def test_a_weight_has_a_picture_of_its_histogram(accumulator, tmp_path, weights: WeightReport) -> None:
    quantized = [row for row in weights.rows if row.quantized]
    counts = np.tile(np.arange(32, dtype=np.int32), (len(quantized), 1))
    write_tensorboard(replace(weights, histograms={"float": counts, "dequantized": counts}), tmp_path)
    found = accumulator(tmp_path / "weights")
    assert found.Tags()["images"] == [f"charts/{row.name}, weight" for row in quantized]
    (event,) = found.Scalars("worst_channel_sqnr/features.1/conv2d/weight")
    assert event.value == quantized[1].worst_channel_sqnr


def test_of_many_weights_the_worst_have_pictures_and_all_have_numbers(weights: WeightReport) -> None:
    first = next(row for row in weights.rows if row.quantized)
    rows = tuple(replace(first, name=f"{i}/linear", worst_channel_sqnr=float(7 * i % 30)) for i in range(30))
    counts = np.tile(np.arange(32, dtype=np.int32), (30, 1))
    many = replace(weights, rows=rows, histograms={"float": counts, "dequantized": counts})
    events = many.events(0, False, ())["weights"]
    pictures = [each.tag for each in events if each.tag.startswith("charts/")]
    assert pictures == [f"charts/{row.name}, weight" for row in rows if row.worst_channel_sqnr < 20]
    assert sum(each.tag.startswith("worst_channel_sqnr/") for each in events) == 30


def test_prefixes_and_ops_choose_what_is_written(accumulator, tmp_path, weights: WeightReport) -> None:
    layers, (profile, _) = samples.layers(), samples.profiles()
    write_tensorboard([layers, profile], tmp_path, prefixes=["blocks.3"], ops=["conv2d"])
    outputs = {row.name for row in layers.outputs}
    named = {tag.partition("/")[2] for tag in accumulator(tmp_path / "layers").Tags()["scalars"]}
    assert named - outputs == {"blocks.3/conv2d"}
    assert {tag.rpartition("/")[0] for tag in accumulator(tmp_path / profile.side).Tags()["histograms"]} == {
        "blocks.3/conv2d"
    }
    counts = np.arange(96, dtype=np.int32).reshape(3, 32)
    whole = replace(weights, histograms={"float": counts, "dequantized": counts})
    dead = whole.rows[1]
    write_tensorboard([layers, whole], tmp_path / "dead", prefixes=[dead.name])
    assert accumulator(tmp_path / "dead" / "weights").Tags()["images"] == [f"charts/{dead.name}, weight"]
    assert whole.with_rows([dead]).histogram(dead)[1].tolist() == counts[1].tolist()
    with pytest.raises(SelectionError, match=r"no op type is called 'conv9'\. Closest names: conv2d"):
        write_tensorboard([layers, profile], tmp_path, ops=["conv9"])


def test_a_later_step_goes_on_with_the_curves(accumulator, tmp_path):
    for step in (0, 1, 2):
        write_tensorboard(samples.layers(), tmp_path, step=step)
    assert [event.step for event in accumulator(tmp_path / "layers").Scalars("sqnr/output")] == [0, 1, 2]


def test_each_metric_is_a_curve_over_the_layers_and_builds_share_its_card(
    accumulator: Callable[[Path], Any], tmp_path: Path
) -> None:
    report = samples.layers()
    rows = report.rows + report.outputs
    better = replace(report, rows=tuple(replace(row, sqnr=row.sqnr + 1) for row in report.rows))
    for step, build in ((3, report), (4, better)):
        write_tensorboard(build, tmp_path, step=step)
    values = {
        ("layers", "sqnr"): [row.sqnr for row in rows],
        ("layers", "max_lsb"): [row.max_lsb for row in rows],
        ("reference", "max"): [row.ref_max for row in rows],
        ("quantized", "max"): [row.quant_max for row in rows],
    }
    for (run, metric), found in values.items():
        points = accumulator(tmp_path / run / "step_3").Scalars(f"along_the_graph/layers/{metric}")
        expected = [(at, value) for at, value in enumerate(found) if math.isfinite(value)]
        assert len(expected) > 5
        assert [event.step for event in points] == [at for at, _ in expected]
        assert [event.value for event in points] == pytest.approx([value for _, value in expected], rel=1e-6)
    first, second = (accumulator(tmp_path / "layers" / f"step_{step}") for step in (3, 4))
    tag = "along_the_graph/layers/sqnr"
    moved = [b.value - a.value for a, b in zip(first.Scalars(tag), second.Scalars(tag), strict=True)]
    assert moved == pytest.approx([float(row in report.rows) for row in rows if math.isfinite(row.sqnr)], abs=1e-4)


def test_bars_say_what_their_axis_is(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    report = samples.deployed()
    assert "in proportion to the signal's" in draw(drawings(report)[0], axes).get_xlabel()


def test_histograms_hold_the_values_of_both_sides(accumulator, tmp_path):
    profiles = samples.profiles()
    write_tensorboard(profiles, tmp_path, step=3)
    for profile in profiles:
        (row,) = profile.rows
        found = accumulator(tmp_path / profile.side)
        assert found.Tags()["histograms"] == ["blocks.3/conv2d/output"]
        (event,) = found.Histograms("blocks.3/conv2d/output")
        value = event.histogram_value
        assert (event.step, value.min, value.max, value.num) == (3, row.min, row.max, 20_000)
        assert value.sum == pytest.approx(20_000 * row.mean)
        assert value.sum_squares / 20_000 - (value.sum / 20_000) ** 2 == pytest.approx(row.variance)
        edges = np.array([row.min, *value.bucket_limit])
        assert edges[-1] == row.max
        assert sum(value.bucket) == pytest.approx(20_000)
    values = np.random.default_rng(0).normal(0.0, 1.2, 20_000)
    reference = accumulator(tmp_path / "reference").Histograms("blocks.3/conv2d/output")[0].histogram_value
    exact, _ = np.histogram(values, [reference.min, *reference.bucket_limit])
    assert np.abs(np.array(reference.bucket) - exact).sum() < 0.02 * 20_000


def test_numbers_by_channel_are_written_on_request(accumulator, tmp_path):
    profile = with_channels(samples.profiles()[0])
    write_tensorboard(profile, tmp_path / "without")
    assert accumulator(tmp_path / "without" / "reference").Tags()["scalars"] == []
    write_tensorboard(profile, tmp_path / "with", per_channel=True)
    found = accumulator(tmp_path / "with" / "reference")
    points = found.Scalars("blocks.3/conv2d/output/channel_min")
    assert [(event.step, event.value) for event in points] == [(0, 0.5), (1, -0.5)]
    assert "blocks.3/conv2d/output/channel_zeros" not in found.Tags()["scalars"]


def test_rows_of_one_name_and_the_users_metrics_have_tags_of_their_own():
    first = samples.layers().rows[1]
    rows = (replace(first, custom={"kl": 0.5}), replace(first, sqnr=9.0, custom={"kl": math.inf}))
    report = replace(samples.layers(), rows=rows, outputs=())
    found = {
        event.tag: event.value
        for event in report.events(0, False, [report])["layers"]
        if isinstance(event.value, float)
    }
    assert found["sqnr/blocks.1/linear"] == first.sqnr
    assert found["sqnr/blocks.1/linear (2)"] == 9.0
    assert found["kl/blocks.1/linear"] == 0.5
    assert "kl/blocks.1/linear (2)" not in found


def test_what_does_not_fit_is_refused(layers: LayerReport, tmp_path: Path) -> None:
    reference, _ = samples.profiles()
    with pytest.raises(ReportError, match="two reports would be written as the run 'layers'; write them to separate"):
        write_tensorboard([layers, layers], tmp_path)
    with pytest.raises(
        ReportError, match="got Findings; TensorBoard shows layer, weight and deployed reports, and profiles"
    ):
        write_tensorboard([samples.findings()], tmp_path)
    with pytest.raises(ReportError, match="no numbers by channel; profile with per_channel=True"):
        reference.events(0, True, [reference])
    assert list(tmp_path.iterdir()) == []


def test_a_profile_without_histograms_and_a_folder_that_is_a_file_are_refused(accumulator, tmp_path):
    reference, _ = samples.profiles()
    with pytest.raises(ReportError, match="has no histograms"):
        write_tensorboard(replace(reference, histograms={}), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot write events to"):
        write_tensorboard(reference, tmp_path / "file")


def test_without_tensorboard_the_error_names_the_extra(
    layers: LayerReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # type: ignore[arg-type]
    with pytest.raises(ReportError, match=r"not installed: pip install 'pt2qa\[tensorboard\]'"):
        write_tensorboard(layers, tmp_path)
