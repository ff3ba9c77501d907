"""Every number of a profile against NumPy in float64, on every kind of graph, and what can be asked of the profiler."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import pt2qa
from pt2qa._profile import values
from pt2qa._profile.histogram import RELATIVE_ERROR, Histogram
from pt2qa._profile.report import QUANTILES
from pt2qa._profile.statistics import Statistics
from pt2qa._simulator.simulator import graph_values
from pt2qa.report import Profile, ProfileRow
from tests.flows import quantized_pair, residual_pair
from tests.models import Counter, InPlaceViews, Linears, Recurrent, images, residual

BATCHES = [images(seed=1), images(seed=2), images(seed=3)]


def profile(subject: Any, batches: Any = BATCHES, **options: Any) -> Profile:
    return pt2qa.profile(subject, batches, **options)


def recorded(graph: torch.fx.GraphModule, batches: list[Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Every value of a graph by node name, all batches after one another."""
    kept: dict[str, list[np.ndarray[Any, Any]]] = {}

    def visit(node: Node, value: Any) -> None:
        if isinstance(value, Tensor):
            kept.setdefault(node.name, []).append(value.detach().clone().double().numpy().ravel())

    for batch in batches:
        graph_values(graph, [batch], visit)
    return {name: np.concatenate(parts) for name, parts in kept.items()}


def assert_measured(report: Profile, row: ProfileRow, values: np.ndarray[Any, Any]) -> None:
    assert row.count == values.size
    assert (row.nans, row.infs) == (0, 0)
    assert (row.min, row.max) == (values.min(), values.max())
    assert row.mean == pytest.approx(values.mean(), rel=1e-6, abs=1e-6 * values.std())
    assert row.variance == pytest.approx(values.var(), rel=1e-6)
    assert row.zeros == np.mean(values == 0)
    for column, share in QUANTILES.items():
        expected = np.quantile(values, share, method="inverted_cdf")
        assert getattr(row, column) == pytest.approx(expected, rel=RELATIVE_ERROR, abs=1e-38)
    magnitudes = np.abs(values[values != 0])
    peak = magnitudes.max() / np.quantile(magnitudes, 0.999, method="inverted_cdf")
    assert row.outlier_ratio == pytest.approx(max(peak, 1.0), rel=1.1 * RELATIVE_ERROR)
    expected_bins = Histogram.of(values)
    assert np.array_equal(report.counted(row).bins, expected_bins.bins)
    assert np.array_equal(report.counted(row).counts, expected_bins.counts)


def test_every_output_of_the_reference_equals_numpy() -> None:
    pair = residual_pair()
    report, values = profile(pair), recorded(pair.reference, BATCHES)
    outputs = {row.name: row for row in report.rows if row.role == "output"}
    nodes = {"x": "x", "conv1/conv2d": "conv2d", "relu/relu": "relu_", "add": "add", "fc/linear": "linear"}
    assert set(nodes) < set(outputs)
    for name, node in nodes.items():
        assert_measured(report, outputs[name], values[node])
        assert (outputs[name].dtype, outputs[name].scheme, outputs[name].of) == ("float32", "", name)
        assert math.isnan(outputs[name].saturation)
    assert (report.batches, report.samples, report.side, report.quantizer) == (3, 6, "reference", "xnnpack")


def test_weights_are_those_of_the_reference_and_measured_once() -> None:
    pair = residual_pair()
    report = profile(pair)
    rows = {(row.name, row.role): row for row in report.rows}
    for name, role, parameter in [
        ("conv1/conv2d", "weight", "conv1.weight"),
        ("fc/linear", "weight", "fc.weight"),
        ("fc/linear", "bias", "fc.bias"),
    ]:
        row = rows[name, role]
        assert_measured(report, row, pair.reference.get_parameter(parameter).detach().double().numpy().ravel())
        assert (row.of, row.argument) == (parameter, role)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_the_quantized_side_shows_what_readers_get_and_what_the_clamp_moved(quantizer: str) -> None:
    pair = residual_pair(quantizer)
    # Larger than what calibration saw, so that the clamp has something to do.
    batches = [2 * batch for batch in BATCHES]
    report = profile(pair, batches, side="quantized")
    values = recorded(pair.quantized, batches)
    checked = 0
    for node in pair.quantized.graph.nodes:
        if "dequantize_per_tensor" not in str(node.target) or node.args[0].op == "get_attr":
            continue
        source, (scale, zero_point, low, high) = node.args[0].args[0], node.args[0].args[1:5]
        moved = np.rint(values[source.name].astype(np.float32) * np.float32(1 / scale)) + zero_point
        saturation = np.mean((moved < low) | (moved > high))
        rows = [row for row in report.rows if row.scale == scale and row.zero_point == zero_point]
        rows = [row for row in rows if row.count == values[node.name].size and row.max == values[node.name].max()]
        assert rows, node.name
        for row in rows:
            assert_measured(report, row, values[node.name])
            assert (row.scheme, row.saturation) == ("per_tensor", pytest.approx(saturation, abs=1e-12))
            assert row.range_use == pytest.approx((row.max - row.min) / scale / (high - low))
            checked += saturation > 0
    assert checked >= 2


def test_quantized_weights_are_dequantized_and_carry_their_parameters_names() -> None:
    pair = residual_pair()
    row = profile(pair, side="quantized").find("conv1/conv2d", "weight")
    quantized = next(each for each in pair.program.constants if each.attribute == "conv1.weight").quantized
    assert (row.of, row.dtype, row.scheme, row.axis) == ("conv1.weight", "int8", "per_channel", 0)
    assert (row.min, row.max) == (float(quantized.min()), float(quantized.max()))
    assert math.isnan(row.saturation)


def test_a_value_is_measured_once_however_many_ops_read_it() -> None:
    report = profile(residual_pair())
    made = report.find("relu/relu")
    readers = [row for row in report.rows if row.of == "relu/relu" and row.role == "input"]
    assert [row.name for row in readers] == ["conv2/conv2d", "add"]
    assert {row.value for row in readers} == {made.value}
    assert made in report.values
    assert not set(readers) & set(report.values)
    assert len({row.value for row in report.rows}) == len(report.values)


def test_batches_one_by_one_are_as_all_at_once() -> None:
    capture = pt2qa.capture(Linears().eval(), torch.zeros(2, 16), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    ragged = [torch.randn(size, 16) for size in (8, 8, 3)]
    one, many = profile(capture, [torch.cat(ragged)]), profile(capture, ragged)
    assert (one.samples, many.samples, many.batches) == (19, 19, 3)
    assert one.find("first/linear").shape == (19, 32)
    for left, right in zip(one.rows, many.rows, strict=True):
        assert (left.name, left.role, left.count) == (right.name, right.role, right.count)
        # A linear may sum in another order for another batch size.
        assert left.variance == pytest.approx(right.variance, rel=1e-5)
    inputs = [report.counted(report.find("x")) for report in (one, many)]
    assert np.array_equal(inputs[0].bins, inputs[1].bins)
    assert np.array_equal(inputs[0].counts, inputs[1].counts)


@pytest.mark.parametrize(
    "axis_of", [("conv1/conv2d", "output", 1), ("conv1/conv2d", "weight", 0), ("fc/linear", "output", 1)]
)
def test_numbers_by_channel_equal_numpy(axis_of: tuple[str, Any, int]) -> None:
    name, role, axis = axis_of
    pair = residual_pair()
    report = profile(pair, per_channel=True)
    row = report.find(name, role)
    assert row.channels == axis
    values = pair.reference.get_parameter("conv1.weight").detach() if role == "weight" else None
    if values is None:
        kept: list[Tensor] = []
        node = {"conv1/conv2d": "conv2d", "fc/linear": "linear"}[name]
        for batch in BATCHES:
            graph_values(pair.reference, [batch], lambda n, v: kept.append(v.clone()) if n.name == node else None)
        values = torch.cat(kept)
    found = report.channel(row)
    by_channel = np.moveaxis(values.double().numpy(), axis, 0).reshape(values.shape[axis], -1)
    for column, expected in {
        "min": by_channel.min(1),
        "max": by_channel.max(1),
        "mean": by_channel.mean(1),
        "variance": by_channel.var(1),
        "zeros": (by_channel == 0).mean(1),
        "count": np.full(len(by_channel), by_channel.shape[1]),
    }.items():
        assert found[column] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    with pytest.raises(pt2qa.ReportError, match=r"'fc/linear' has no numbers by channel for its bias; profile with"):
        report.channel(report.find("fc/linear", "bias"))


# -- kinds of graphs ---------------------------------------------------------------------------------------------------


def prepared_graph(qat: bool = False) -> torch.fx.GraphModule:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e

    graph = pt2qa.capture(residual(), images()).module()
    plugin = pt2qa.quantizer("xnnpack")
    prepare = prepare_qat_pt2e if qat else prepare_pt2e
    prepared = prepare(copy.deepcopy(graph), plugin.build(graph, qat=qat))
    with torch.no_grad():
        prepared(images())
    return prepared


def test_a_prepared_graph_is_profiled_without_its_observers() -> None:
    prepared = prepared_graph()
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    report, reference = profile(prepared), profile(residual_pair())
    assert all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items())
    for row in reference.rows:
        found = report.find(row.name, row.role, row.argument)
        assert (found.min, found.max, found.of, found.dtype) == (row.min, row.max, row.of, "float32")


def test_fake_quantize_modules_quantize_and_do_not_learn() -> None:
    prepared = prepared_graph(qat=True)
    before = {name: value.clone() for name, value in prepared.state_dict().items() if "activation_post" in name}
    row = profile(prepared).find("x")
    state = prepared.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert (row.dtype, row.scheme) == ("int8", "per_tensor")
    assert row.saturation > 0
    steps = (row.max - row.min) / row.scale
    assert steps == pytest.approx(round(steps), abs=1e-3)
    assert steps <= 255


def test_a_converted_graph_alone_is_as_the_quantized_side_of_its_pair() -> None:
    pair = residual_pair()
    alone, of_pair = profile(pair.quantized), profile(pair, side="quantized")
    assert alone.side == "graph"
    for row, other in zip(alone.rows, of_pair.rows, strict=True):
        assert (row.role, row.dtype, row.mean) == (other.role, other.dtype, other.mean)
        assert row.saturation == other.saturation or math.isnan(row.saturation)


def test_an_exported_program_without_handles_gets_names_of_the_same_style() -> None:
    program = torch.export.export(residual(), (images(),))
    report = profile(program)
    names = [row.name for row in report.rows if row.role == "output"]
    assert names[:4] == ["x", "conv1/conv2d", "bn1/batch_norm", "relu/relu"]
    assert len(set(names)) == len(names)
    assert report.find("bn1/batch_norm", "constant", "running_mean").of == "bn1.running_mean"
    assert {row.handle for row in report.rows} == {-1}


def test_dynamic_scales_are_told_from_static_ones() -> None:
    pair = quantized_pair(Linears(), torch.randn(4, 16), "xnnpack:mode=dynamic")
    row = profile(pair, [torch.randn(4, 16)], side="quantized").find("first/linear", "input")
    assert (row.scheme, row.dtype, row.saturation) == ("dynamic", "int8", 0.0)
    assert math.isnan(row.scale)


def test_integers_several_outputs_and_lists_of_weights() -> None:
    capture = pt2qa.capture(
        Recurrent().eval(), (torch.randint(0, 10, (5, 3)), torch.zeros(2, 3, 8), torch.ones(2, 3, 8))
    )
    report = profile(capture, [(torch.full((5, 3), 7), torch.zeros(2, 3, 8), torch.ones(2, 3, 8))])
    tokens = report.find("tokens")
    assert (tokens.dtype, tokens.min, tokens.max, tokens.variance) == ("int64", 7.0, 7.0, 0.0)
    assert report.find("h").zeros == 1.0
    assert report.find("encoder/embedding", "weight").of == "encoder.weight"
    assert [row.of for row in report.rows if row.name == "rnn/lstm" and row.role == "weight"][:2] == [
        "rnn.weight_ih_l0",
        "rnn.weight_hh_l0",
    ]
    assert report.find("rnn/lstm[2]").shape == (2, 3, 8)
    assert report.find("decoder/linear", "input").of == "rnn/lstm[0]"


class Broken(nn.Module):
    """Makes NaN, infinities, an empty tensor, a 0-d tensor and a mask."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.log(x), x[:0] + 1, x.sum() * 2, x > 0


def test_empty_batches_and_batches_with_nan_are_named_and_nothing_but_empty_ones_is_an_error() -> None:
    capture = pt2qa.capture(residual(), images(6), dynamic_shapes=({0: torch.export.Dim("batch")},))
    spoilt = images()
    spoilt[1, 0, 0, 0] = math.nan
    profile = pt2qa.profile(capture, [images()[:0], images(), spoilt])
    apart = [(each.batch, each.what, each.name) for each in profile.set_apart]
    assert apart == [(0, "no samples", ""), (2, "NaN", "x")]
    assert "NaN in 1 of 3 batches: batch 2" in profile.notes
    said = profile.summary()
    assert "first in the graph: x, 1 of 768. Look there first" in said
    assert "Nothing stands out" not in said
    with pytest.raises(pt2qa.BatchError, match=r"every batch is empty \(1 read\)\. Pass batches with samples\."):
        pt2qa.profile(capture, [images()[:0]])


def test_infinities_alone_are_not_said_to_be_inherited() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x < 0, -math.inf).softmax(-1)

    x = torch.tensor([[1.0, -1.0, 2.0, -2.0]]).repeat(3, 1)
    said = profile(pt2qa.capture(Masked().eval(), x), [x]).summary()
    assert "Infinite in 1 of" in said
    assert "first in the graph: masked_fill, 6 of 12. A mask is expected to be" in said
    assert "Look there first" not in said


def test_nan_infinities_empty_and_0d_values() -> None:
    x = torch.tensor([[1.0, 0.0, -1.0]])
    report = profile(pt2qa.capture(Broken().eval(), torch.ones(1, 3)), [x, x])
    log = report.find("log")
    assert (log.count, log.nans, log.infs, log.min, log.max) == (6, 2, 2, 0.0, 0.0)
    empty = report.find("add")
    assert (empty.count, empty.shape) == (0, (0, 3))
    assert math.isnan(empty.mean)
    assert math.isnan(empty.q50)
    assert (report.find("mul").shape, report.find("mul").count) == ((), 2)
    mask = report.find("gt")
    assert (mask.dtype, mask.mean, mask.zeros) == ("bool", pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert report.summary().startswith("NaN in 1 of")
    assert report.summary().count("first in the graph: log, 2 of 6") == 2


def test_a_value_that_is_written_to_is_another_one_for_later_readers() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            before = y + 1
            y[:, 0] = 100.0
            return before, y - 1

    program = torch.export.export(Writes().eval(), (torch.ones(2, 3),))
    report = profile(program.module(check_guards=False), [torch.ones(2, 3)])
    assert report.find("mul").max == 2.0
    assert report.find("add", "input").max == 2.0
    assert report.find("sub", "input").max == 100.0


def test_in_place_ops_do_not_change_what_was_measured() -> None:
    model = InPlaceViews().eval()
    capture = pt2qa.capture(model, images())
    report = profile(capture, [images()])
    assert report.find("tanh").max <= 1.0
    x = model.conv(images()).tanh().detach()
    x[:, 0], x[:, 1:3] = 0.25, x[:, 1:3] * 2
    expected = torch.nn.functional.hardtanh(x + 1)
    assert report.find("last/conv2d", "input").mean == pytest.approx(float(expected.double().mean()), rel=1e-6)


def test_buffers_and_batches_stay_as_they_are() -> None:
    graph = pt2qa.capture(Counter().eval(), images()).module()
    before = {name: buffer.clone() for name, buffer in graph.named_buffers()}
    batch = images()
    profile(graph, [batch, batch])
    assert torch.equal(batch, images())
    assert all(torch.equal(buffer, before[name]) for name, buffer in graph.named_buffers())


# -- what can be asked -------------------------------------------------------------------------------------------------


def test_a_profiler_watches_the_calls_of_a_graph() -> None:
    pair = residual_pair()
    expected = pair.quantized(images())
    with pt2qa.Profiler(pair, side="quantized") as profiler:
        assert profiler.graph is pair.quantized
        assert torch.equal(pair.quantized(images(seed=1)), pair.quantized(images(seed=1)))
        pair.quantized(images(seed=2))
        with pytest.raises(pt2qa.BatchError):
            pair.quantized(images()[0])
    assert torch.equal(pair.quantized(images()), expected)
    assert "forward" not in vars(pair.quantized)
    report = profiler.profile()
    assert (report.batches, report.samples) == (3, 6)
    assert report.find("x").count == 3 * images().numel()


def test_a_profiler_gives_the_outputs_of_the_model() -> None:
    capture = pt2qa.capture(Recurrent().eval(), (torch.zeros(5, 3).long(), torch.zeros(2, 3, 8), torch.ones(2, 3, 8)))
    inputs = (torch.ones(5, 3).long(), torch.zeros(2, 3, 8), torch.ones(2, 3, 8))
    expected = capture.module()(*inputs)
    with pt2qa.Profiler(capture) as profiler:
        outputs = profiler.graph(*inputs)
        with pytest.raises(pt2qa.CaptureError, match="another Profiler watches this graph"):
            profiler.__enter__()
    assert type(outputs) is type(expected)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_observers_learn_inside_a_profiler() -> None:
    prepared = prepared_graph()
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    with pt2qa.Profiler(prepared):
        prepared(100 * images())
    assert any(not torch.equal(value, before[name]) for name, value in prepared.state_dict().items())


def test_without_histograms_there_are_no_quantiles() -> None:
    report = profile(residual_pair(), histograms=False)
    row = report.find("add")
    assert math.isnan(row.q50)
    assert math.isnan(row.outlier_ratio)
    assert row.variance > 0
    assert report.histograms == {}
    with pytest.raises(pt2qa.ReportError, match="this profile has no histograms; profile with histograms=True"):
        report.histogram(row)
    assert report.text(width=200).splitlines()[0].endswith("each once, in graph order")


def test_only_what_was_asked_for_gets_rows() -> None:
    pair = residual_pair()
    everything = profile(pair)
    assert {row.module for row in profile(pair, prefixes=["conv2"]).rows} == {"conv2"}
    linear = profile(pair, ops=["linear"])
    assert {row.op for row in linear.rows} == {"linear"}
    assert linear.find("fc/linear", "input").mean == everything.find("fc/linear", "input").mean
    assert [row.role for row in linear.values] == ["input", "weight", "bias", "output"]
    assert profile(pair, ops=[nn.Linear]).rows == linear.rows == profile(pair, ops=[torch.ops.aten.linear]).rows
    assert [row.name for row in profile(pair, ops=["input"]).rows] == ["x"]


def test_source_lines() -> None:
    capture = pt2qa.capture(residual(), images())
    report = profile(capture, [images()], with_stack=True)
    assert report.find("add").source.startswith("models.py:")
    assert report.find("add").source.endswith("y = self.relu(self.bn2(self.conv2(x)) + x)")
    assert {row.source for row in profile(capture, [images()]).rows} == {""}


def test_items_become_batches() -> None:
    items = [(batch, 3) for batch in BATCHES]
    taken = profile(residual_pair(), iter(items), inputs_of=lambda item: item[0])
    assert repr(taken.rows) == repr(profile(residual_pair()).rows)


def interrupted(after: int) -> Iterator[Tensor]:
    yield from BATCHES[:after]
    raise KeyboardInterrupt


def test_an_interruption_keeps_the_finished_batches() -> None:
    report = profile(residual_pair(), interrupted(2))
    assert report.notes[-1] == "interrupted: covers the 2 batches that were finished"
    assert repr(report.rows) == repr(profile(residual_pair(), BATCHES[:2]).rows)
    with pytest.raises(KeyboardInterrupt):
        profile(residual_pair(), interrupted(0))


def test_a_batch_that_fails_half_way_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = pt2qa.Profiler(residual_pair())
    profiler.add(BATCHES[0])
    before = repr(profiler.profile().rows)
    measure, calls = values.Watch._measure, []

    def failing(self: Any, number: int, result: Any) -> None:
        calls.append(number)
        if len(calls) == 4:
            raise KeyboardInterrupt
        measure(self, number, result)

    monkeypatch.setattr(values.Watch, "_measure", failing)
    with pytest.raises(KeyboardInterrupt):
        profiler.add(BATCHES[1])
    assert (repr(profiler.profile().rows), profiler.batches) == (before, 1)


def test_values_are_dropped_when_they_are_read_up(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    of = Statistics.of

    def watched(x: Tensor, *, histogram: bool) -> Statistics:
        measured.append(weakref.ref(x))
        alive.append(sum(each() is not None for each in measured))
        return of(x, histogram=histogram)

    monkeypatch.setattr(values.Statistics, "of", watched)
    deep = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(12))).eval()
    profiler = pt2qa.Profiler(pt2qa.capture(deep, images()))
    for _ in range(3):
        profiler.add(images())
        kept = [each() for each in measured if each() is not None]
        assert all(isinstance(each, nn.Parameter) for each in kept)
        assert len(kept) == 24
    # An input, an output, and the batch.
    assert max(alive) <= 24 + 3


def test_memory_does_not_grow_with_batches() -> None:
    profiler = pt2qa.Profiler(residual_pair(), per_channel=True)
    sizes = []
    for _ in range(4):
        profiler.add(images())
        report = profiler.profile()
        sizes.append([array.nbytes for array in (*report.histograms.values(), *report.channels.values())])
    assert sizes[0] == sizes[1] == sizes[3]


def test_batches_with_another_number_of_channels_are_noted() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu()

    capture = pt2qa.capture(Mean().eval(), torch.ones(2, 4), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    report = profile(capture, [torch.ones(2, 4), torch.ones(2, 5)], per_channel=True)
    assert "relu: no numbers by channel, batches differ in the channel axis" in report.notes
    assert report.find("relu").channels == -1
    assert report.find("relu").count == 18


@pytest.mark.parametrize(
    ("subject", "options", "error", "says"),
    [
        (
            "model",
            {},
            pt2qa.CaptureError,
            r"got Residual, which is an eager module; expected .* Capture a model first",
        ),
        ("text", {}, pt2qa.CaptureError, r"got str, which is not a graph"),
        ("capture", {"side": "quantized"}, pt2qa.SelectionError, r"Capture has no sides; give a QuantizedPair"),
        (
            "pair",
            {"side": "float"},
            pt2qa.SelectionError,
            r"side: got 'float', expected 'reference', 'quantized' or 'deployed'",
        ),
        (
            "pair",
            {"prefixes": ["con1"]},
            pt2qa.SelectionError,
            r"no module or op is called 'con1'. Closest names: conv1",
        ),
        ("pair", {"ops": ["conv3d"]}, pt2qa.SelectionError, r"no op type is called 'conv3d'. Closest names: conv2d"),
        ("pair", {"batches": []}, pt2qa.BatchError, r"no batch to profile"),
        ("pair", {"batches": images()}, pt2qa.BatchError, r"batches is a single Tensor"),
        ("pair", {"batches": [images()[0]]}, pt2qa.BatchError, r"has shape \[3, 8, 8\]"),
    ],
)
def test_errors_say_what_was_given_and_what_to_do(
    subject: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    given = {
        "model": residual,
        "text": lambda: "model",
        "capture": lambda: pt2qa.capture(residual(), images()),
        "pair": residual_pair,
    }[subject]()
    with pytest.raises(error, match=says):
        profile(given, **options)
