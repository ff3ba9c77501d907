"""The exact method is the loop over sites that everybody would write, without running what did not change."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2qa
from pt2qa._sensitivity.gradients import GradientRun
from pt2qa._sensitivity.site_groups import find_site_groups, walk_places, whole_model
from pt2qa._simulator.simulator import tensors_equal
from pt2qa.errors import SimulationError
from tests import models
from tests.flows import quantized_pair, residual_pair
from tests.models import images
from tests.sensitivity.brute_force import noises


class Towers(nn.Module):
    """Two branches of which the second is computed after the first, a residual and a view between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.left = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU6(inplace=True), nn.Conv2d(4, 4, 1))
        self.right = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = self.left(x) + F.hardtanh(self.right(x))
        return self.head((y + x).flatten(2).transpose(1, 2).mean(1))


def exact(pair: pt2qa.QuantizedPair, batches: Any, **options: Any) -> pt2qa.SensitivityReport:
    return pt2qa.sensitivity(pair, batches, method="exact", **options)


def check(pair: pt2qa.QuantizedPair, batches: Any, group: Any = None) -> pt2qa.SensitivityReport:
    report = exact(pair, batches, group=group)
    expected = noises(pair, batches, group)
    assert len(report.rows) == report.planned == len(expected)
    for row, noise in zip(report.rows, expected, strict=True):
        assert row.noise == pytest.approx(noise, rel=1e-6, abs=0.0), row.name
    places = find_site_groups(pair.program, group)
    for batch in batches:
        values = pair.values(batch)

        def same(place: int, outputs: Any, values: Any = values) -> None:
            assert tensors_equal(outputs, pair.simulator.run(values, on=places[place].sites)), places[place].name

        walk_places(pair.simulator, values, places, range(len(places)), same)
    return report


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86", "xnnpack:mode=dynamic"])
def test_equals_a_run_of_the_whole_model_for_each_site(quantizer: str) -> None:
    report = check(residual_pair(quantizer), [images(), images(seed=1)])
    assert {row.kind for row in report.rows} >= {"weight"}
    assert report.batches == 2
    assert report.samples == 4


def test_weights_alone_have_rows_of_their_own() -> None:
    torch.manual_seed(0)
    pair = quantized_pair(models.Linears(), (torch.randn(4, 16),), "x86:mode=weight_only")
    report = check(pair, [(torch.randn(4, 16),)])
    assert [row.kind for row in report.rows] == ["weight", "weight"]


def test_flops_are_those_of_the_op_and_its_share_of_the_model() -> None:
    report = exact(quantized_pair(models.Linears(), (torch.randn(4, 16),)), [torch.randn(4, 16)])
    shares = {row.name: (row.flops, row.flops_share) for row in report.rows if row.kind == "weight"}
    first, second = 2 * 16 * 32, 2 * 32 * 4
    assert shares == {
        "first/linear": (first, pytest.approx(first / (first + second))),
        "second/linear": (second, pytest.approx(second / (first + second))),
    }


def test_a_region_is_named_after_its_first_op() -> None:
    pair = residual_pair()
    rows = exact(pair, [images()], group="region").rows
    found = {row.name: (row.op, pair.names[row.handle].name) for row in rows if row.handle >= 0 and row.region >= 0}
    assert found["conv1/conv2d"] == ("conv2d", "conv1/conv2d")  # with the relu behind it
    assert all(found[name] == (name.rpartition("/")[2], name) for name in found if "/" in name)


@pytest.mark.parametrize("group", ["region", "module"])
def test_a_group_is_run_with_all_its_sites(group: str) -> None:
    report = check(residual_pair(), [images()], group)
    assert report.group == group
    assert all(row.site == -1 for row in report.rows)
    single = exact(residual_pair(), [images()])
    assert sum(row.flops for row in report.rows) == sum({row.handle: row.flops for row in single.rows}.values()), (
        "flops of an op count once in a group"
    )


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_branches_that_a_site_does_not_reach_are_the_references(quantizer: str) -> None:
    torch.manual_seed(0)
    check(quantized_pair(Towers(), (images(),), quantizer), [images(), images(seed=3)])


@pytest.mark.parametrize("model", [models.TwoUsers, models.SameInputTwice, models.InPlaceViews, models.Parameters])
@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_patterns_of_graphs(model: type[nn.Module], quantizer: str) -> None:
    torch.manual_seed(0)
    check(quantized_pair(model(), (images(),), quantizer), [images()])


def test_several_outputs_count_together() -> None:
    torch.manual_seed(0)
    example = (torch.randn(4, 16),)
    report = check(quantized_pair(models.NestedOutputs(), example), [example])
    assert report.outputs == ("output.logits", "output.rest[0]")


def test_metrics_of_the_output() -> None:
    pair, batch = residual_pair(), images()
    values = pair.values(batch)
    ref = pair.simulator.run(values, on=False)[0].double()
    for metric in ("cosine", "l1", "atol", "kl"):
        report = exact(pair, [batch], metric=metric)
        for row in report.rows:
            alone = pair.simulator.run(values, on={row.site})[0].double()
            expected = {
                "cosine": F.cosine_similarity(ref.flatten(), alone.flatten(), 0),
                "l1": (ref - alone).abs().mean(),
                "atol": (ref - alone).abs().max(),
                "kl": F.kl_div(alone.log_softmax(-1), ref.log_softmax(-1), reduction="batchmean", log_target=True),
            }[metric]
            assert row.value == pytest.approx(float(expected), rel=1e-6, abs=1e-9)
        worst = [row.value for row in report.worst(len(report.rows))]
        assert worst == sorted(worst, reverse=metric != "cosine")


def test_a_loss_of_the_users() -> None:
    pair = residual_pair()

    def agreement(reference: Tensor, quantized: Tensor) -> float:
        return float((reference.argmax(-1) == quantized.argmax(-1)).float().mean())

    report = exact(pair, [images(), images(seed=1)], metric=agreement, larger_is_worse=False)
    assert report.metric == "agreement"
    assert report.worst_is == "smallest"
    assert [row.value for row in report.worst(2)] == sorted(row.value for row in report.rows)[:2]


def test_post_process_needs_no_gradient() -> None:
    pair = residual_pair()
    report = exact(pair, [images()], post_process=lambda logits: torch.from_numpy(logits.numpy()).argmax(-1).float())
    assert report.outputs == ("output",)


def test_additivity_is_measured() -> None:
    report = exact(residual_pair("x86"), [images()])
    assert report.predicted_sqnr == pytest.approx(report.measured_sqnr, abs=3)
    assert report.value == pytest.approx(report.measured_sqnr, rel=1e-9)


def test_copies_of_a_site_are_one_row() -> None:
    pair = residual_pair()
    twice = copy.deepcopy(pair.quantized)
    dequantize = next(
        node
        for node in twice.graph.nodes
        if "dequantize_per_tensor" in str(node.target) and len(node.args[0].users) > 1
    )
    last = next(iter(dequantize.args[0].users))
    # Behind the last reader of the other copy, whose value must be kept for it.
    next(iter(last.users)).prepend(last)
    with twice.graph.inserting_before(last):
        copied = twice.graph.node_copy(dequantize.args[0])
    last.replace_input_with(dequantize.args[0], copied)
    twice.recompile()
    copied_pair = pt2qa.pair(pair.float_graph, twice)
    assert len(copied_pair.sites) == len(pair.sites) + 1
    report = check(copied_pair, [images()])
    assert [row.noise for row in report.rows] == [row.noise for row in exact(pair, [images()]).rows]
    estimated = [
        pt2qa.sensitivity(each, [images()], method="projection", projections=4).rows for each in (pair, copied_pair)
    ]
    assert [row.noise for row in estimated[1]] == pytest.approx([row.noise for row in estimated[0]], rel=1e-5)


def test_writes_that_reach_other_values_make_every_row_a_run_of_the_whole_model() -> None:
    torch.manual_seed(0)
    pair = quantized_pair(models.TwoUsers(), (images(),))
    pair.simulator.program = pair.__dict__["program"] = dataclasses.replace(pair.program, may_share=False)
    assert any("each row took a run of the whole model" in note for note in check(pair, [images()]).notes)
    assert pair.program.steps[0].site is not None
    pair.program.steps[-2].mutates = True
    with pytest.raises(SimulationError, match=r'writes to a value that other ops share.*Use method="exact"'):
        pt2qa.sensitivity(pair, [images()], method="projection")


def test_a_site_that_makes_the_output_infinite_by_itself_has_no_number() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + torch.rsqrt(x * x * 1e-3 + 1e-4)  # the addition is rounded to steps of 1e-2

    batch = torch.tensor([[0.0, 50.0], [0.1, -2.0]])
    pair = quantized_pair(Inverse(), batch)
    expected = noises(pair, [batch])
    assert any(map(math.isnan, expected))
    assert [row.noise for row in exact(pair, [batch]).rows] == pytest.approx(expected, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("method", ["exact", "projection"])
def test_nested_graphs_run_as_one_op(method: Any) -> None:
    torch.manual_seed(0)
    example = (torch.randn(4, 16),)
    pair = quantized_pair(models.Conditional(), example)
    report = pt2qa.sensitivity(pair, [example], method=method)
    for row, noise in zip(report.rows, noises(pair, [example]), strict=True):
        assert row.noise == pytest.approx(noise, rel=2.0 if method == "projection" else 1e-6)


def test_an_op_without_a_gradient_is_named() -> None:
    torch.manual_seed(0)
    pair = quantized_pair(models.Linears(), (torch.randn(4, 16),))
    started = GradientRun(pair.simulator, pair.values((torch.randn(4, 16),)))
    assert started.outputs()[0].shape == (4, 4)
    step = next(step for step in pair.program.steps if step.op == "relu")
    step.function, step.in_place = _opaque, None
    with pytest.raises(SimulationError, match=r'relu.* has no gradient here: .*Use method="exact"'):
        GradientRun(pair.simulator, pair.values((torch.randn(4, 16),)))


def _opaque(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy().clip(0))


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86", "xnnpack:mode=dynamic"])
def test_the_walk_gives_the_outputs_of_both_whole_models(quantizer: str) -> None:
    torch.manual_seed(0)
    for pair in (residual_pair(quantizer), quantized_pair(Towers(), (images(),), quantizer)):
        values = pair.values(images())
        reference, quantized = whole_model(pair.simulator, values)
        assert tensors_equal(reference, pair.simulator.run(values, on=False))
        assert tensors_equal(quantized, pair.simulator.run(values, on=True))


def test_what_the_walk_computes_is_held_against_the_graph() -> None:
    torch.manual_seed(0)
    pair = quantized_pair(models.Linears(), (torch.randn(4, 16),))
    step = next(step for step in pair.program.steps if step.op == "relu")
    step.function, step.in_place = lambda x: x.clamp(min=0.05), None
    with pytest.raises(SimulationError, match="does not compute what the converted graph computes"):
        exact(pair, [(torch.randn(4, 16),)])
