"""``profile(mask=)``: padding is in no number of a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pt2qa
from tests.padded_prompts import Attending, Running, padded, prompts, quantized, with_garbage

NUMBERS = (
    *("count", "min", "max", "mean", "std", "q1", "q50", "q99_9", "zeros", "saturation", "range_use", "outlier_ratio"),
)


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized(Running(), "xnnpack")


@pytest.fixture(scope="module")
def attending() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized(Attending(), "xnnpack")


def profiled(subject: Any, batches: Any, mask: Any = "attention_mask", **options: Any) -> pt2qa.Profile:
    return pt2qa.profile(subject, batches, mask=mask, **options)


def numbers(report: pt2qa.Profile) -> dict[str, list[float]]:
    return {
        f"{row.name} {row.role} {row.argument} {row.scheme}": [float(getattr(row, name)) for name in NUMBERS]
        for row in report.rows
    }


def alike(one: pt2qa.Profile, other: pt2qa.Profile, abs: float) -> None:
    left, right = numbers(one), numbers(other)
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert values == pytest.approx(right[name], rel=1e-9, abs=abs, nan_ok=True), name


@pytest.mark.parametrize("side", ["reference", "quantized"])
def test_a_padded_batch_equals_its_prompts_one_by_one(pair: pt2qa.QuantizedPair, side: Any) -> None:
    masked = profiled(pair, [padded(prompts())], side=side)
    alike(masked, profiled(pair, [padded([prompt]) for prompt in prompts()], None, side=side), 1e-6)
    assert {row.count for row in masked.rows if row.role == "output" and row.name == "words/embedding"} == {34 * 16}


@pytest.mark.parametrize("side", ["reference", "quantized"])
def test_what_stands_at_padded_positions_changes_nothing(pair: pt2qa.QuantizedPair, side: Any) -> None:
    batch = padded(prompts())
    one, other = (profiled(pair, [each], side=side, per_channel=True) for each in (batch, with_garbage(batch)))
    alike(one, other, 0.0)
    assert numbers(one) != numbers(profiled(pair, [batch], None, side=side))
    for key in one.channels:
        assert torch.equal(torch.from_numpy(one.channels[key]), torch.from_numpy(other.channels[key])), key


def test_channels_are_those_of_the_prompts(pair: pt2qa.QuantizedPair) -> None:
    masked = profiled(pair, [padded(prompts())], per_channel=True)
    alone = profiled(pair, [padded([prompt]) for prompt in prompts()], None, per_channel=True)
    ours, wanted = (report.channel(report.find("out/linear")) for report in (masked, alone))
    assert set(ours) >= {"count", "min", "max", "mean", "variance", "zeros"}
    for name in ours:
        assert ours[name] == pytest.approx(wanted[name], abs=1e-6), name
    assert any("the channels are samples or positions: input_ids" in note for note in masked.notes)


def test_any_graph_and_ones_own_loop(pair: pt2qa.QuantizedPair) -> None:
    batch = padded(prompts())
    for subject in (pair.capture, pair.quantized):
        alike(profiled(subject, [batch]), profiled(subject, [with_garbage(batch)]), 0.0)
    with pt2qa.Profiler(pair, mask="attention_mask") as profiler:
        profiler.graph(**batch)
    alike(profiler.profile(), profiled(pair, [batch]), 0.0)


def test_attention_scores_count_where_both_positions_do(attending: pt2qa.QuantizedPair) -> None:
    rows = [
        row for row in profiled(attending, [padded(prompts())]).rows if row.op == "softmax" and row.role == "output"
    ]
    assert [row.count for row in rows] == [2 * sum(len(prompt) ** 2 for prompt in prompts())]
    notes = profiled(attending, [padded(prompts())]).notes
    assert any("whose sample and position axes are unknown" in note and "ones" in note for note in notes)


def test_what_the_kernels_write(pair: pt2qa.QuantizedPair, tmp_path: Path) -> None:
    def deployed(batch: Any, mask: Any = "attention_mask") -> pt2qa.Profile:
        return profiled(pair, [batch], mask, side="deployed", program=tmp_path / "program")

    batch = padded(prompts())
    alike(deployed(batch), deployed(with_garbage(batch)), 0.0)
    assert numbers(deployed(batch)) != numbers(deployed(batch, None))


def test_there_is_no_such_input(pair: pt2qa.QuantizedPair) -> None:
    with pytest.raises(pt2qa.SelectionError, match="mask: the model has no input 'mask'; it has input_ids"):
        profiled(pair, [padded(prompts())], "mask")
