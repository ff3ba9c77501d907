"""Each column of each row of weights against NumPy in float64, and every sentence of their report."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._simulator.program import Constant, QuantParams
from pt2qa._simulator.stored import Integers
from pt2qa._weights import sums as sums_module
from pt2qa._weights.analysis import _is_weight, _max_lsb, _worst, channel_axis
from pt2qa._weights.report import BINS, span
from pt2qa._weights.sums import Sides, SumsOfWeights, WeightSums, _counts, _frequencies, histograms, weight_sums
from pt2qa.report import UNQUANTIZED, Environment, Unpaired, WeightReport, WeightRow
from tests.flows import quantized_pair, residual_pair
from tests.recomputation import by_handle


class Kinds(nn.Module):
    """Weights of convolutions of both kinds, of a linear, an embedding and a norm, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 16)
        self.conv, self.up = nn.Conv1d(4, 6, 3, padding=1), nn.ConvTranspose1d(6, 4, 3, padding=1)
        self.fc, self.norm = nn.Linear(16, 5), nn.LayerNorm(5)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.norm(self.fc(self.up(self.conv(x)))) * self.gain


@functools.cache
def kinds() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(Kinds(), (torch.randint(0, 7, (2, 4)),))


def constant_of(pair: pt2qa.QuantizedPair, row: WeightRow) -> Any:
    places = {"weight": 1, "bias": 2}
    (found,) = [
        each
        for each in pair.program.constants
        if each.reader == row.name
        and (
            each.attribute.rpartition(".")[2] == row.attr
            or (row.op in ("conv2d", "linear") and each.argument == places.get(row.attr))
        )
    ]
    return found


def in_graph(pair: pt2qa.QuantizedPair, row: WeightRow) -> Tensor:
    """The parameter that the float graph's node reads."""
    node = by_handle(pair.reference)[row.handle]
    read = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    values = {name: operator.attrgetter(name)(pair.reference) for name in read}
    own = [
        value
        for name, value in values.items()
        if tuple(value.shape) == row.shape and (row.attr in name or len(read) == 1)
    ]
    return next(iter(own)).detach()


@pytest.mark.parametrize("pair", [kinds, residual_pair, functools.partial(residual_pair, "x86")])
def test_every_column_of_every_row_is_that_of_numpy(pair: Any) -> None:
    pair = pair()
    report = pt2qa.compare_weights(pair)
    assert report.rows
    for row in report.rows:
        constant = constant_of(pair, row)
        ref, quant = (np.asarray(side.detach().double()) for side in (in_graph(pair, row), constant.quantized))
        site = pair.sites[constant.site] if constant.site is not None else None
        known = pair.names[row.handle]
        assert (row.name, row.op, row.module) == (known.name, known.op, known.module)
        assert (row.shape, row.quantized) == (ref.shape, site is not None)
        by_channel = ref.ndim > 1 and row.op != "layer_norm"
        assert row.note == (UNQUANTIZED if site is None else "" if by_channel else "no channels to compare")
        assert row.dtype == (site.params.dtype if site is not None else "float32")
        error = np.abs(ref - quant)
        signal, noise = (ref**2).sum(), (error**2).sum()
        assert row.sqnr == pytest.approx(10 * math.log10(signal / noise) if noise else inf, rel=1e-5)
        assert row.mse == pytest.approx((error**2).mean(), rel=1e-5)
        assert (row.l1, row.atol) == (pytest.approx(error.mean(), rel=1e-5), pytest.approx(error.max(), rel=1e-5))
        lengths = math.sqrt(signal * (quant**2).sum())
        assert row.cosine == pytest.approx((ref * quant).sum() / lengths if lengths else nan, rel=1e-6, nan_ok=True)
        ends = ref.min(), quant.min(), ref.max(), quant.max()
        assert (row.ref_min, row.quant_min, row.ref_max, row.quant_max) == pytest.approx(ends)
        axis = 1 if row.op.startswith("conv_transpose") else 0
        if site is None:
            assert math.isnan(row.scale)
            assert math.isnan(row.max_lsb)
            assert row.axis == -1
        else:
            scale = np.asarray(torch.as_tensor(site.params.scale, dtype=torch.float64))
            assert row.scale == pytest.approx(scale.max())
            assert row.axis == (-1 if site.params.axis is None else site.params.axis)
            axis = axis if row.axis < 0 else row.axis
            shape = [-1 if each == axis else 1 for each in range(ref.ndim)] if scale.size > 1 else [1] * ref.ndim
            assert row.max_lsb == pytest.approx((error / scale.reshape(shape)).max(), rel=1e-4)
        if not by_channel:
            assert (row.worst_channel, row.dead_channels, math.isnan(row.worst_channel_sqnr)) == (-1, 0, True)
            continue
        channels = [np.moveaxis(side, axis, 0).reshape(ref.shape[axis], -1) for side in (ref, ref - quant)]
        power, lost = ((side**2).sum(1) for side in channels)
        sqnr = [10 * math.log10(a / b) if b else inf for a, b in zip(power, lost, strict=True)]
        assert row.worst_channel == int(np.argmin(sqnr))
        assert row.worst_channel_sqnr == pytest.approx(min(sqnr), rel=1e-4)
        assert row.dead_channels == 0


def test_every_histogram_is_that_of_numpy() -> None:
    pair = kinds()
    report = pt2qa.compare_weights(pair)
    for row in report.rows:
        if not row.quantized:
            continue
        constant = constant_of(pair, row)
        edges, *counts = report.histogram(row)
        covered = min(row.ref_min, row.quant_min), max(row.ref_max, row.quant_max)
        if covered[0] == covered[1]:
            covered = covered[0] - 0.5, covered[0] + 0.5
        assert edges.tolist() == pytest.approx(np.linspace(*covered, 33))
        for side, found in zip((constant.reference, constant.quantized), counts, strict=True):
            # A value on an edge belongs to the bin above, wherever rounding leaves it.
            places = np.floor(
                (side.detach().double().numpy().ravel() - covered[0]) / (covered[1] - covered[0]) * 32 + 1e-12
            )
            assert found.tolist() == np.bincount(np.minimum(places, 31).astype(int), minlength=32).tolist()


# -- channels ----------------------------------------------------------------------------------------------------------


def of(reference: list[Any], quantized: list[Any], axis: int | None = 0) -> WeightSums:
    return weight_sums(torch.tensor(reference), torch.tensor(quantized), axis)


def test_the_worst_channel_is_the_one_with_the_lowest_sqnr() -> None:
    found = of([[1.0, 1.0], [2.0, 0.0], [0.0, 0.0], [3.0, 1.0]], [[1.0, 0.5], [0.0, 0.0], [1.0, 0.0], [3.0, 1.0]])
    assert _worst(found, 0) == (1, 0.0, 1)
    assert _worst(found, None) == (-1, pytest.approx(nan, nan_ok=True), 0)
    fine = of([[1.0, 1.0], [3.0, 1.0]], [[1.0, 1.0], [3.0, 1.0]])
    assert _worst(fine, 0) == (0, inf, 0)
    # A channel of zeros has no signal to lose, whatever its error.
    zeros = of([[0.0], [0.0]], [[1.0], [0.0]])
    assert _worst(zeros, 0) == (0, inf, 0)
    broken = of([[1.0, 1.0], [1.0, nan], [inf, inf], [2.0, 2.0]], [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert _worst(broken, 0) == (1, pytest.approx(nan, nan_ok=True), 2)
    assert _worst(weight_sums(torch.empty(0, 4), torch.empty(0, 4), 0), 0)[0] == -1
    assert found.largest.tolist() == [1.0, 2.0, 0.0, 3.0]
    assert of([[-5.0, 1.0]], [[0.0, 0.0]]).largest.tolist() == [5.0]
    assert found.zero.tolist() == [False, True, False, False]
    assert of([[1.0], [1.0]], [[-1.0], [1.0]]).zero.tolist() == [False, False]


def test_the_largest_error_is_in_steps_of_each_channel_or_block() -> None:
    reference, rounded = torch.tensor([[1.0, 1.0], [4.0, 4.0]]), torch.tensor([[0.5, 1.0], [2.0, 4.0]])
    constant, nothing = Constant(0, reference, rounded), weight_sums(torch.empty(0, 4), torch.empty(0, 4), 0)

    found = weight_sums(reference, rounded, 0)

    def of(params: QuantParams | None) -> float:
        return _max_lsb(params, constant, found)

    assert of(QuantParams("int8", torch.tensor([0.25, 2.0]), None, axis=0)) == 2.0
    assert of(QuantParams("int8", 0.5, 0)) == 4.0
    for params in (None, QuantParams("int8"), QuantParams("int8", torch.tensor([0.25, 2.0]), None)):
        assert math.isnan(of(params))
    assert math.isnan(_max_lsb(QuantParams("int8", 0.5, 0), constant, nothing))
    assert of(QuantParams("int8", torch.tensor([0.5]), None)) == 4.0
    blocks = torch.tensor([[0.1, 8.0], [1.0, 0.5]])
    assert of(QuantParams("int4", blocks, torch.zeros(2, 2), block=(1, 1))) == pytest.approx(5.0)


def test_channels_are_those_of_the_scales_or_of_the_outputs() -> None:
    pair = kinds()
    axes = {each.attribute: channel_axis(pair, each) for each in pair.program.constants if each.is_parameter}
    assert axes["words.weight"] == axes["conv.weight"] == axes["fc.weight"] == 0
    assert axes["up.weight"] == 1
    assert axes["conv.bias"] is axes["norm.weight"] is axes["gain"] is None


# -- sums --------------------------------------------------------------------------------------------------------------


def exact(reference: Tensor, quantized: Tensor, axis: int) -> list[list[float]]:
    """The columns of the sums, by NumPy in float64, of finite values."""
    ref, quant = (
        np.moveaxis(np.asarray(side.double()), axis, 0).reshape(reference.shape[axis], -1)
        for side in (reference, quantized)
    )
    error = np.abs(ref - quant)
    columns = (ref**2, error**2, quant**2, error)
    ends = (ref.min(1), ref.max(1), quant.min(1), quant.max(1))
    zeros = np.zeros(len(ref))
    return [each.tolist() for each in (*(column.sum(1) for column in columns), error.max(1), *ends, zeros, zeros)]


FIELDS = (
    *("signal", "noise", "quant_signal", "absolute", "atol", "ref_min", "ref_max", "quant_min", "quant_max"),
    *("excluded", "nonfinite"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_blocks_are_those_of_the_whole(dtype: torch.dtype, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 1030, generator=generator, dtype=dtype).reshape(7, 5, 206)
    weight[2] *= 1e-25  # a channel that float32 cannot square, in the middle of a block
    quantized = (weight / 0.01).round() * 0.01
    expected = exact(weight, quantized, axis)
    for block in (1, 2060, 3000, 1 << 19):
        monkeypatch.setattr(sums_module, "BLOCK", block)
        found = weight_sums(weight, quantized, axis)
        for name, column in zip(FIELDS, expected, strict=True):
            values = getattr(found, name)
            assert values.dtype == torch.float64
            assert values.tolist() == pytest.approx(column, rel=1e-6, abs=0.0), name
        assert found.finite


def test_integers_are_read_as_the_values_that_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 600, generator=generator)
    integers = (weight / 0.02).round().clamp(-128, 127).to(torch.int8)
    scale, zero_point = torch.linspace(0.01, 0.03, 7), torch.arange(7)
    by_channel = Integers.of(integers, scale, zero_point, 0)
    whole = Integers.of(integers, 0.02, 3, None)
    for quantized in (by_channel, whole):
        assert quantized is not None
        value = quantized.value()
        for block in (1, 1200, 1500, 1 << 19):
            monkeypatch.setattr(sums_module, "BLOCK", block)
            for axis in (0, 1, None):
                own, plain = weight_sums(weight, quantized, axis), weight_sums(weight, value, axis)
                assert all(torch.equal(getattr(own, name), getattr(plain, name)) for name in FIELDS)
            covered = float(min(weight.min(), value.min())), float(max(weight.max(), value.max()))
            counts = histograms(weight, quantized, covered, 32, finite=True)
            assert np.array_equal(counts, histograms(weight, value, covered, 32, finite=True))
            assert np.array_equal(counts[0], torch.histc(weight.double(), 32, *covered).long().numpy())


def test_blocks_cover_a_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module, "BLOCK", 10)
    for shape, axis, step, rows in (
        ((7, 4), 0, 2, 7),
        ((7, 4), 1, 1, 4),
        ((7, 20), 0, 1, 7),
        ((23,), None, 1, 1),
        ((3, 2), None, 3, 3),
    ):
        weight = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        sides = Sides.of(weight, weight + 1, axis)
        assert (sides.step, len(sides.reference)) == (step, rows)
        assert list(sides.starts) == list(range(0, rows, step))
        blocks = [sides.block(start) for start in sides.starts]
        assert torch.equal(torch.cat([ref for ref, _ in blocks]), sides.reference.reshape(rows, -1))
        assert torch.equal(torch.cat([quant for _, quant in blocks]), sides.reference.reshape(rows, -1) + 1)
        assert len(sides.memory) == step * weight.numel() // rows
    empty = Sides.of(torch.empty(0, 4), torch.empty(0, 4), 0)
    assert list(empty.starts) == []


def test_sums_are_read_once_for_each_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int | None] = []
    monkeypatch.setattr(
        sums_module,
        "weight_sums",
        lambda reference, quantized, axis: read.append(axis) or weight_sums(reference, quantized, axis),
    )
    constants = [each for each in residual_pair().program.constants if each.is_parameter][:2]
    known = SumsOfWeights()
    for axis in (0, None, 0, None):
        for constant in constants:
            assert known.of(constant, axis) is known.of(constant, axis)
    assert read == [0, 0, None, None]


def test_values_that_are_not_finite_are_left_out_of_the_whole() -> None:
    reference = torch.tensor([[1.0, nan, inf, inf, -inf, 2.0]])
    quantized = torch.tensor([[1.5, nan, inf, 1.0, inf, nan]])
    found = weight_sums(reference, quantized, 0)
    assert (found.excluded.tolist(), found.nonfinite.tolist()) == ([2.0], [3.0])
    assert [getattr(found, name).item() for name in ("signal", "noise", "quant_signal", "absolute")] == [
        1.0,
        0.25,
        2.25,
        0.5,
    ]
    assert (found.ref_min.item(), found.ref_max.item(), found.quant_min.item(), found.quant_max.item()) == (
        1.0,
        1.0,
        1.5,
        1.5,
    )
    assert math.isnan(found.atol.item())
    total = found.total
    assert (total.count, total.excluded, total.nonfinite) == (1, 2, 3)
    alike = weight_sums(torch.tensor([[1.0, nan]]), torch.tensor([[1.5, nan]]), 0)
    assert (alike.total.count, alike.atol.item(), alike.finite) == (1, 0.5, False)
    fine = weight_sums(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[3.0, 3.0], [0.0, 1.0]]), 0).total
    assert (fine.signal, fine.noise, fine.quant_signal, fine.product, fine.absolute) == (26.0, 1.0, 19.0, 22.0, 1.0)
    assert (fine.atol_seen, fine.ref_min, fine.ref_max, fine.quant_min, fine.quant_max) == (1.0, 0.0, 4.0, 0.0, 3.0)
    assert math.isnan(fine.ref_sum)
    assert math.isnan(fine.quant_sum)
    assert weight_sums(torch.empty(0, 4), torch.empty(0, 4), 0).total.count == 0


def test_squares_below_the_range_of_float32_are_summed_again() -> None:
    for side in range(3):
        reference, quantized = torch.full((1, 4), 0.5), torch.full((1, 4), 0.5)
        if side == 0:
            reference, quantized = torch.full((1, 4), 1e-24), torch.full((1, 4), 1.0)
        elif side == 1:
            reference, quantized = torch.full((1, 4), 1.0), torch.full((1, 4), -1e-24)
        else:
            reference, quantized = torch.full((1, 4), 1e-22), torch.full((1, 4), 1e-22 - 1e-24)
        found = weight_sums(reference, quantized, 0)
        for name, column in zip(FIELDS, exact(reference, quantized, 0), strict=True):
            assert getattr(found, name).tolist() == pytest.approx(column, rel=1e-7, abs=0.0), (side, name)


# -- histograms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 4, 5, 301])
def test_numbers_are_counted_two_at_a_time(count: int, moved: int) -> None:
    generator = torch.Generator().manual_seed(count)
    first = torch.randint(0, 33, (count,), generator=generator, dtype=torch.int8)
    second = (first + torch.randint(-moved, moved + 1, (count,), generator=generator).to(torch.int8)).clamp(0, 32)
    expected = [np.bincount(line.numpy(), minlength=33).tolist() for line in (first, second)]
    assert _counts(first, 33).tolist() == expected[0]
    lines = torch.zeros(2, count + count % 2, dtype=torch.int8)[:, :count]  # each begins at an even place
    assert _frequencies(lines.copy_(torch.stack([first, second])), 33).tolist() == expected


def test_values_far_from_zero_are_counted_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module, "BLOCK", 4)
    far = torch.arange(8.0).reshape(4, 2) / 8 + 4096
    assert histograms(far, far, (4096.0, 4097.0), 4, finite=True).tolist() == [[2, 2, 2, 2]] * 2


def test_a_value_on_an_edge_is_in_the_bin_above_and_the_last_bin_has_its_end() -> None:
    value = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 0.999])
    assert histograms(value, value, (0.0, 1.0), 4, finite=True).tolist() == [[1, 1, 1, 3]] * 2
    far = value + 4096.0
    assert histograms(far, far, (4096.0, 4097.0), 4, finite=True).tolist() == [[1, 1, 1, 3]] * 2
    plain = histograms(value, value - 0.1, (-0.1, 1.0), 11, finite=False)
    assert plain.tolist() == [np.histogram(side.double(), 11, (-0.1, 1.0))[0].tolist() for side in (value, value - 0.1)]


# -- the report --------------------------------------------------------------------------------------------------------


def row(name: str = "a", **changes: Any) -> WeightRow:
    known: dict[str, Any] = {
        "handle": 0,
        "name": name,
        "module": "",
        "op": "conv2d",
        "attr": "weight",
        "dtype": "int8",
        "quantized": True,
        "scale": 0.01,
        "axis": 0,
        "shape": (2, 3),
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
        "quant_min": -1.25,
        "ref_max": 1.0,
        "quant_max": 0.75,
    }
    return WeightRow(**{**known, **changes})


def report(*rows: WeightRow, **fields: Any) -> WeightReport:
    known: dict[str, Any] = {
        "unpaired": (),
        "notes": ("a note",),
        "quantizer": "xnnpack",
        "model": "Net",
        "environment": Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a"),
    }
    return WeightReport(rows, **{**known, **fields})


FLOAT = {"quantized": False, "dtype": "float32", "sqnr": inf, "note": UNQUANTIZED}


def test_what_a_report_of_weights_says() -> None:
    def said(*rows: WeightRow, **fields: Any) -> list[str]:
        return report(*rows, **fields).summary().splitlines()

    counts = "Counts: 0 not quantized, 0 rows without a number, 0 unpaired, 1 note."
    assert said() == ["No weight is quantized.", counts]
    assert said(row(), row("b", worst_channel_sqnr=20.0)) == [
        "Channel SQNR of 2 quantized weights: lowest 20.0 dB; 0 below 20 dB.",
        counts,
    ]
    low = row("b", worst_channel_sqnr=19.9)
    assert said(row(), low, row("c", **FLOAT))[:2] == [
        "Channel SQNR of 2 quantized weights: lowest 19.9 dB (b, weight, channel 3); 1 below 20 dB.",
        "Counts: 1 not quantized, 0 rows without a number, 0 unpaired, 1 note.",
    ]
    first_channel = replace(low, worst_channel=0)
    assert "(b, weight, channel 0)" in said(first_channel)[0]
    assert "(b, weight)" in said(replace(low, worst_channel=-1))[0]
    silent = row("d", worst_channel=0, worst_channel_sqnr=nan, sqnr=nan, note="2 values are NaN")
    assert said(row(), silent, unpaired=(Unpaired(3, "bn", "reference", "folded"),), notes=()) == [
        "Without an SQNR: 1 quantized weight, such as d, weight, channel 0 (2 values are NaN).",
        "Channel SQNR of 1 quantized weight: lowest 31.2 dB; 0 below 20 dB.",
        "Counts: 0 not quantized, 1 row without a number, 1 unpaired, 0 notes.",
    ]
    alone = said(replace(silent, worst_channel=-1, note=""), replace(silent, name="e"))
    assert alone[:2] == [
        "Without an SQNR: 2 quantized weights, such as d, weight (nan).",
        "No weight has a channel SQNR.",
    ]


def test_a_weight_is_a_parameter_or_a_rounded_constant_and_not_of_integers() -> None:
    buffer = Constant(0, torch.ones(2), torch.ones(2))
    kinds = buffer, replace(buffer, site=0), replace(buffer, is_parameter=True)
    assert [_is_weight(each) for each in kinds] == [False, True, True]
    assert not any(_is_weight(replace(each, reference=torch.tensor([1]))) for each in kinds)


def test_dead_channels_are_added_up_by_cause() -> None:
    rows = [
        row("a", axis=-1, dead_channels=1),
        row("b", axis=-1, dead_channels=4),
        row("c", axis=0, dead_channels=1),
        row("d", axis=1, dead_channels=0),
        row("e", axis=-1, dead_channels=7, **FLOAT),
    ]
    lists = "pt2qa.check lists those that contributed at least one LSB to the output."
    assert report(*rows).summary().splitlines()[1:3] == [
        "5 dead channels, all zeros once quantized, in 2 weights (most: b, 4): these weights have one scale for all "
        f"channels. {lists}",
        "1 dead channel, all zeros once quantized, in 1 weight (most: c, 1): their per-channel scales are too large. "
        f"{lists}",
    ]


def test_lists_and_titles() -> None:
    why = f"{UNQUANTIZED}: an op without a kernel"
    found = report(
        row(),
        row("b", **FLOAT),
        row("c", attr="bias", **{**FLOAT, "note": why}),
        row("d", worst_channel_sqnr=nan, note="zero"),
    )
    assert found._title("worst") == "Net, quantized by xnnpack: 4 weights, smallest channel SQNR first"
    assert found._title("graph").endswith("4 weights, in graph order")
    assert repr(found) == "<WeightReport of Net, xnnpack: 4 weights>"
    lists = {each.title: list(each.entries) for each in found._after(None)}  # type: ignore[union-attr]
    assert lists["Without a number (1)"] == ["d: zero"]
    assert lists["Not quantized (2)"] == ["b, weight (float32)", "c, bias (float32): an op without a kernel"]
    assert [each.name for each in found.worst(2)] == ["a", "b"]
    assert [each.name for each in found.worst(1, "sqnr")] == ["a"]


def test_a_histogram_covers_both_sides() -> None:
    assert span(row()) == (-1.25, 1.0)
    assert span(row(quant_min=-0.5, quant_max=2.0)) == (-1.0, 2.0)
    equal = {"ref_min": 3.0, "ref_max": 3.0, "quant_min": 3.0, "quant_max": 3.0}
    assert span(row(**equal)) == (2.5, 3.5)
    for changes in ({"ref_min": nan}, {"ref_max": 2e30}, {"ref_min": -2e30}, {"quant_max": inf}):
        assert span(row(**changes)) is None
    assert span(row(ref_max=1e30)) == (-1.25, 1e30)


def test_histograms_belong_to_the_quantized_rows() -> None:
    counts = np.arange(2 * BINS, dtype=np.int32).reshape(2, BINS)
    histograms = {"float": counts, "dequantized": counts + 100}
    found = report(row(), row("b", **FLOAT), row("c", sqnr=12.34), histograms=histograms)
    edges, own, dequantized = found.histogram(found.rows[2])
    assert edges.tolist() == pytest.approx(np.linspace(-1.25, 1.0, BINS + 1))
    assert (own.tolist(), dequantized.tolist()) == (counts[1].tolist(), (counts[1] + 100).tolist())
    charts = found.charts([])
    assert [(each["row"], each["title"], each["about"]) for each in charts] == [
        (0, "a, weight", "int8, 40.5 dB over all values"),
        (2, "c, weight", "int8, 12.3 dB over all values"),
    ]
    assert charts[1]["edges"] == edges.tolist()
    assert charts[1]["series"] == [
        {"side": "float", "counts": own.tolist()},
        {"side": "dequantized", "counts": dequantized.tolist()},
    ]
    for gone in (found.rows[1], row()):
        with pytest.raises(pt2qa.ReportError, match="the report holds no histogram of its weight"):
            found.histogram(gone)
    with pytest.raises(pt2qa.ReportError, match="the report holds no histogram"):
        report(*found.rows).histogram(found.rows[0])
    assert report(*found.rows).charts([]) == []
    broken = report(row(ref_min=nan), row("c"), histograms=histograms)
    assert [each["row"] for each in broken.charts([])] == [1]
    kept = found.with_rows(found.rows[1:])
    assert kept.histogram(kept.rows[1])[1].tolist() == counts[1].tolist()
    assert [each.name for each in kept.rows] == ["b", "c"]


def test_a_row_says_how_many_ops_read_its_weight() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.relu(self.fc(x)))

    torch.manual_seed(0)
    found = pt2qa.compare_weights(quantized_pair(Twice(), (torch.randn(2, 8),)))
    assert (found.rows[0].attr, found.rows[0].note) == ("weight", "read by 2 ops")
    assert len(found.histograms["float"]) == 1
