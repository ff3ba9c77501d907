"""``find_bad_cases(mask=)``: prompts are ranked by the positions that count, and rows say where they go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pt2qa
from pt2qa._bad_cases.case_metrics import OutputPair
from pt2qa._simulator.data import Layout
from tests.padded_prompts import Running, padded, prompts, quantized

METRICS = ["sqnr", "cosine", "l1", "atol", "kl"]


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized(Running(), "xnnpack")


def masked(pair: pt2qa.QuantizedPair, batches: Any, mask: Any = "attention_mask", **options: Any) -> pt2qa.BadCases:
    return pt2qa.find_bad_cases(pair, batches, mask=mask, **{"k": 4, **options})


def _found(report: pt2qa.BadCases) -> list[tuple[str, int, float, int, int]]:
    return [(row.metric, row.index, row.value, row.first_wrong, row.worst_position) for row in report.rows]


def test_a_padded_batch_ranks_as_its_prompts_one_by_one(pair: pt2qa.QuantizedPair) -> None:
    together = masked(pair, [padded(prompts())], metric=METRICS)
    ones = [padded([prompt]) for prompt in prompts()]
    alone = masked(pair, ones, metric=METRICS)
    for left, right in zip(_found(together), _found(alone), strict=True):
        assert left[:2] == right[:2]
        assert left[3:] == right[3:]
        assert left[2] == pytest.approx(right[2], abs=1e-9)
    plain = masked(pair, ones, None, metric=METRICS)
    assert [row[:3] for row in _found(alone)] == [pytest.approx(row[:3], abs=1e-9) for row in _found(plain)]


def test_the_token_that_goes_wrong_first_and_the_worst_one(pair: pt2qa.QuantizedPair) -> None:
    batch = padded(prompts())
    report = masked(pair, [batch])
    values = pair.values(batch)
    reference, quantized = (pair.simulator.run(values, on=on)[0].double() for on in (False, True))
    for row in report.rows:
        length = len(prompts()[row.sample])
        ref, quant = reference[row.sample, :length], quantized[row.sample, :length]
        others = (ref.argmax(-1) != quant.argmax(-1)).nonzero().flatten().tolist()
        assert row.first_wrong == (others[0] if others else -1)
        assert row.worst_position == int(((ref - quant).square().sum(-1) / ref.square().sum(-1)).argmax())
    assert "worst\nposition" not in report.text()
    assert "worst" in report.table(limit=None)
    assert "position" in report.table(limit=None)


def test_a_batch_as_a_whole_is_both_values() -> None:
    whole = OutputPair("output", torch.ones(2), torch.tensor([1.0, torch.inf]), None)
    assert torch.equal(whole.counted(-1)[1], torch.tensor([1.0, torch.inf]))
    assert whole.nonfinite(-1)
    assert not OutputPair("output", torch.ones(2), torch.ones(2), None).nonfinite(-1)


def test_where_no_token_goes_wrong_there_is_no_position(pair: pt2qa.QuantizedPair) -> None:
    batch = padded(prompts())
    plain = masked(pair, [batch], None)
    assert {(row.first_wrong, row.worst_position) for row in plain.rows} == {(-1, -1)}
    equal = masked(pair, [batch], post_process=lambda outputs: outputs["logits"] * 0)
    assert {(row.first_wrong, row.worst_position) for row in equal.rows} == {(-1, -1)}


def test_without_a_mask_the_table_has_no_positions(pair: pt2qa.QuantizedPair) -> None:
    assert "position" not in pt2qa.find_bad_cases(pair, [padded(prompts())]).table(limit=None)


def test_labels_of_padding_do_not_count(pair: pt2qa.QuantizedPair) -> None:
    batch = padded(prompts())
    report = masked(pair, [batch], targets_of=lambda batch: batch["input_ids"], metric="flips")
    assert report.labels[0].targets == sum(map(len, prompts()))


def test_a_custom_metric_receives_the_positions_that_count(pair: pt2qa.QuantizedPair) -> None:
    seen = []

    def largest(reference: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(reference.shape[:2]))
        return (reference - quantized).abs().amax((1, 2))

    metric = pt2qa.CaseMetric("largest", largest)
    own = masked(pair, [padded(prompts())], metric=[metric, "atol"])
    assert seen == [(1, len(prompt)) for prompt in prompts()]
    assert [row.value for row in own.worst("largest")] == pytest.approx([row.value for row in own.worst("atol")])


def test_an_argmax_of_ones_own_is_masked_too(pair: pt2qa.QuantizedPair) -> None:
    report = masked(pair, [padded(prompts())], metric="l1", post_process=lambda out: out["logits"].argmax(-1))
    logits = masked(pair, [padded(prompts())])
    first = {row.index: row.first_wrong for row in logits.rows}
    assert {row.index: row.first_wrong for row in report.rows} == first


def test_positions_count_along_any_axis_and_along_the_first_two_after_post_processing(
    pair: pt2qa.QuantizedPair,
) -> None:
    class Turned(Running):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": super().forward(input_ids, attention_mask)["logits"].transpose(1, 2)}

    torch.manual_seed(0)
    turned = quantized(Turned(), "xnnpack")
    back = {"post_process": lambda outputs: outputs["logits"].transpose(1, 2)}
    expected, *others = (
        [row.value for row in masked(each, [padded(prompts())], metric="l1", **options).rows]
        for each, options in ((pair, {}), (turned, {}), (turned, back))
    )
    assert others == [pytest.approx(expected)] * 2


def test_outputs_that_cannot_be_masked_are_noted_unless_they_are_post_processed() -> None:
    class Total(Running):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            found = super().forward(input_ids, attention_mask)
            return {**found, "total": found["logits"].sum((0, 1))}

    total, said = quantized(Total(), "xnnpack"), "1 of 2 outputs"
    assert any(said in note for note in masked(total, [padded(prompts())]).notes)
    own = masked(total, [padded(prompts())], post_process=lambda outputs: outputs["logits"])
    assert not any(said in note for note in own.notes)


def test_a_value_whose_positions_are_not_its_second_axis_names_none() -> None:
    keep, reference = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 4, 3)
    output = OutputPair("output", reference, 2 * reference, 0, layout=Layout(0, (2,)), keep=keep)
    assert output.positions == [(-1, -1), (-1, -1)]
