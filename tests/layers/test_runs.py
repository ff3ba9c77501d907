"""What a comparison says beside its rows: what was not compared, what stays in float, and what modules return."""

from __future__ import annotations

import functools
import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch import Tensor, nn

import pt2qa
from pt2qa._layers.analysis import compare_rounding
from pt2qa._layers.reading import find_blocks
from pt2qa._report.sums import settings_of
from pt2qa._simulator.data import Data
from pt2qa.report import LayerRow
from tests.flows import direct_sqnr, quantized_pair, residual_pair
from tests.models import images

BATCHES = [images(seed=seed) for seed in (1, 2)]


def layers(pair: pt2qa.QuantizedPair, batches: Any, **options: Any) -> pt2qa.LayerReport:
    return pt2qa.compare_layers(pair, batches, progress=False, **options)


class Shared(nn.Module):
    """A module that is called twice and returns two values, and one of whose values nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = Two(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        first, second = self.pair(x)
        third, _ = self.pair(first)
        return self.head(second + third), torch.sort(third)[1], 7


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.one(x))
        return y, self.two(y)


@functools.cache
def shared() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(Shared(), (torch.randn(4, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))


def test_calls_of_a_module_are_blocks_of_their_own() -> None:
    program = shared().program
    blocks = find_blocks(program, ["pair", Two, "head"])
    assert [(block.name, block.path, block.kind) for block in blocks] == [
        ("pair", "pair", "Two"),
        ("pair@1", "pair", "Two"),
        ("head", "head", "Linear"),
    ]
    names = {step.index: step.name for step in program.steps}
    assert [[names[index] for index in block.steps] for block in blocks] == [
        ["pair.one/linear", "pair/relu", "pair.two/linear"],
        ["pair.one/linear_1", "pair/relu_1"],
        ["head/linear"],
    ]
    with pytest.raises(pt2qa.SelectionError, match="module path or class"):
        find_blocks(program, ["paid"])


def test_values_that_leave_a_module_have_a_row_each() -> None:
    batch = torch.randn(4, 8)
    report = layers(shared(), [batch], modules=["pair", "head"])
    assert [(row.name, row.op, row.module) for row in report.modules] == [
        ("pair[0]", "Two", "pair"),
        ("pair[1]", "Two", "pair"),
        ("pair@1", "Two", "pair"),
        ("head", "Linear", "head"),
    ]
    by_name = {row.name: row for row in report.rows}
    for module, op in (
        ("pair[0]", "pair/relu"),
        ("pair[1]", "pair.two/linear"),
        ("pair@1", "pair/relu_1"),
        ("head", "head/linear"),
    ):
        row, other = next(row for row in report.modules if row.name == module), by_name[op]
        assert (row.sqnr, row.mse, row.shape, row.dtype) == (other.sqnr, other.mse, other.shape, other.dtype)
        assert (row.handle, row.answers_for, row.inputs) == (other.handle, "", "")
        assert math.isnan(row.input_sqnr)
    alone = pt2qa.compare_modules(shared(), [batch], modules=["pair", "head"], progress=False)
    for row, other in zip(alone.rows, report.modules, strict=True):
        for each in fields(LayerRow):
            if each.name not in ("rounding_sqnr",):
                assert _same(getattr(row, each.name), getattr(other, each.name)), each.name
    assert alone.modules == ()


def _same(left: Any, right: Any) -> bool:
    return left == right or (left != left and right != right)


def test_outputs_that_are_no_floats_and_ops_without_a_single_tensor_are_said() -> None:
    report = layers(shared(), [torch.randn(4, 8)])
    assert [row.name for row in report.outputs] == ["output[0]", "output[1]", "output[2]"]
    first, order, number = report.outputs
    assert (first.dtype, first.shape, first.note) == ("float32", (4, 3), "")
    assert (order.dtype, order.shape) == ("int64", (4, 8))
    assert (number.note, number.shape) == ("not a tensor", ())
    assert math.isnan(number.sqnr)
    assert "not compared, no single tensor as output: sort" in report.notes
    assert not any(row.name == "sort" for row in report.rows)


def test_an_output_that_is_none_is_no_row_without_a_number() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, None, dict[str, Tensor | None]]:
            y = self.fc(x)
            return y, None, {"mask": None, "relu": y.relu()}

    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    report = layers(quantized_pair(Optional(), x), [x])
    assert [row.name for row in report.outputs] == ["output[0]", "output[2].relu"]
    said = " ".join(report.summary().split())
    assert "Nothing stands out: no output is below 20 dB, and no quantized value by itself." in said
    assert "output[1]" not in said


def test_ops_that_stay_in_float_are_counted() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    torch.manual_seed(0)
    batch = torch.randn(4, 8)
    pair = quantized_pair(
        Half(), (batch,), XNNPACKQuantizer().set_module_name("one", get_symmetric_quantization_config())
    )
    notes = layers(pair, [batch]).notes
    assert "1 of 2 linear ops are quantized; the rest runs in float" in notes
    assert not any("tanh ops" in note for note in notes)


def test_a_report_has_the_fields_of_its_run() -> None:
    pair = residual_pair()
    report = layers(pair, BATCHES)
    assert (report.batches, report.samples, report.set_apart) == (2, 4, ())
    assert (report.quantizer, report.model, report.environment) == (pair.quantizer, pair.model, pair.environment)
    assert report.unpaired == pair.pairing.unpaired
    assert (report.smaller_is_worse, report.larger_is_worse) == ((), ())
    assert settings_of(report.sums)["isolated"] == "True"
    assert "mask" not in settings_of(report.sums)
    each = [layers(pair, [batch]).input_ranges for batch in BATCHES]
    (one,), (two,), (both,) = *each, report.input_ranges
    assert (both.smallest, both.largest) == (min(one.smallest, two.smallest), max(one.largest, two.largest))
    assert (both.outside, both.values) == (one.outside + two.outside, one.values + two.values)
    assert settings_of(layers(pair, BATCHES, isolated=False).sums)["isolated"] == "False"


def test_rounding_alone_has_the_numbers_that_it_has_beside_isolated_errors() -> None:
    pair = residual_pair()
    whole = layers(pair, BATCHES)
    alone = compare_rounding(pair, Data("batches", BATCHES, progress=False))
    assert len(alone.rows) == len(whole.rows)
    for row, other in zip(alone.rows, whole.rows, strict=True):
        for each in fields(LayerRow):
            if each.name != "isolated_sqnr":
                assert _same(getattr(row, each.name), getattr(other, each.name)), each.name
        assert math.isnan(row.isolated_sqnr)


def test_batches_of_several_sizes_add_up_under_the_shape_of_the_first() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(size, 8, generator=generator) for size in (4, 2)]
    report = layers(shared(), batches)
    assert {row.shape[0] for row in report.rows} == {4}
    assert (report.batches, report.samples) == (2, 6)
    with torch.no_grad():
        outputs = [
            torch.cat([graph(batch)[0] for batch in batches]) for graph in (shared().reference, shared().quantized)
        ]
    assert report.outputs[0].sqnr == pytest.approx(direct_sqnr(*outputs), rel=1e-6)
