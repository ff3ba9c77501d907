"""Where samples are independent is decided once for a pair, whatever the data and however they are divided."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import pt2qa
from pt2qa._sensitivity.projection import independence
from tests.flows import quantized_pair
from tests.merge.equal import differences

PARTS = ("nearest", "repeat", "expand", "twice")


class Repeated(nn.Module):
    """Every element of a value occurs twice, or four times, before the next product."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(8 if how == "twice" else 4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        if self.how == "nearest":
            y = nn.functional.interpolate(y, scale_factor=2.0)
        elif self.how == "repeat":
            y = y.repeat(1, 1, 2, 2)
        elif self.how == "expand":
            y = y.unsqueeze(-1).expand(-1, -1, -1, -1, 2).flatten(3)
        else:
            y = torch.cat([y, y], 1)
        return self.second(y).mean((2, 3))


class Attention(nn.Module):
    """Tokens in one axis with samples, then heads in front; a mean over the batch beside it where ``mixed``."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.mixed = mixed
        self.embedding, self.inner, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rows = torch.tanh(self.inner(x.reshape(-1, 8))).reshape(x.shape)
        scores = (rows @ rows.transpose(1, 2)).masked_fill(mask[:, None] == 0, -1e9)
        y = self.head((scores.softmax(-1) @ rows).mean(1))
        return y - y.mean(0) if self.mixed else y


@functools.cache
def repeated(how: str) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    example = torch.randn(4, 2, 6, 6)
    return quantized_pair(Repeated(how), (example,), batches=[example], dynamic_shapes=({0: Dim("batch")},))


def hostile() -> list[Tensor]:
    """Batches from which nothing can be learned alone: one sample, equal ones, zeros, one that mirrors the next."""
    torch.manual_seed(1)
    one, some = torch.randn(1, 2, 6, 6), torch.randn(5, 2, 6, 6)
    mirrored = torch.cat([one, one.flip((1, 2, 3)), some[:1]])
    return [one, one.expand(4, -1, -1, -1).clone(), torch.zeros(3, 2, 6, 6), mirrored, some]


@pytest.mark.parametrize("how", PARTS)
def test_any_division_gives_what_one_run_gives(how: str) -> None:
    pair, data = repeated(how), hostile()

    def measured(shard: list[Tensor]) -> list[pt2qa.Report]:
        return [
            pt2qa.sensitivity(pair, shard, method="projection", projections=4),
            pt2qa.error_budget(pair, shard, method="projection", projections=4),
        ]

    whole = measured(data)
    assert not any("independent samples" in note for report in whole for note in report.notes)
    for shards in ([data[:1], data[1:]], [[batch] for batch in data]):
        for own, *parts in zip(whole, *map(measured, shards), strict=True):
            assert not differences(pt2qa.merge(parts), own)


def names_apart(pair: pt2qa.QuantizedPair) -> set[str]:
    slots = independence(pair, None).slots
    return {step.name for step in pair.program.steps if step.site is None and step.out in slots}


@pytest.mark.parametrize("how", PARTS)
def test_repeated_values_keep_samples_apart(how: str) -> None:
    steps = repeated(how).program.steps
    assert names_apart(repeated(how)) == {step.name for step in steps if step.site is None}


def attention(mixed: bool) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    example = (torch.randint(0, 12, (4, 4)), torch.ones(4, 4, dtype=torch.long))
    return quantized_pair(Attention(mixed), example)


def test_samples_and_tokens_in_one_axis_keep_samples_apart() -> None:
    apart = names_apart(attention(mixed=False))
    assert {"embedding/embedding", "reshape", "inner/linear", "softmax", "head/linear"} <= apart


def test_nothing_is_apart_where_the_outputs_mix_samples() -> None:
    assert names_apart(attention(mixed=True)) == set()


def test_what_post_process_mixes_is_not_apart() -> None:
    pair = repeated("twice")
    assert not independence(pair, lambda outputs: outputs - outputs.mean(0)).slots
    assert independence(pair, lambda outputs: outputs.softmax(-1)).slots == independence(pair, None).slots


def test_a_function_that_takes_no_such_outputs_is_said() -> None:
    def of_three(outputs: Tensor) -> Tensor:
        return outputs - torch.zeros(3, 3)

    data = [torch.randn(3, 2, 6, 6)]
    report = pt2qa.sensitivity(repeated("twice"), data, method="projection", projections=2, post_process=of_three)
    assert any("independence of samples could not be tested (RuntimeError" in note for note in report.notes)


def test_a_pair_without_a_capture_is_decided_on_its_traced_shapes() -> None:
    pair = attention(mixed=False)
    bare = pt2qa.pair(pair.float_graph, pair.quantized)
    assert bare.capture is None
    assert independence(bare, None).slots == independence(pair, None).slots
