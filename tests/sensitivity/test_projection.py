"""The projection method: right in expectation, near the exact one, and without traces."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import pt2qa
from pt2qa._sensitivity.projection import _Meter
from pt2qa.errors import SelectionError, SimulationError
from tests import models
from tests.flows import quantized_pair, residual_pair
from tests.models import images
from tests.sensitivity.brute_force import noises


class Deep(nn.Module):
    """Six convs with relu6 and a residual, a linear: enough sites to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if number == 0 else 12, 12, 3, padding=1) for number in range(6))
        self.head = nn.Linear(12, 20)

    def forward(self, x: Tensor) -> Tensor:
        for number, conv in enumerate(self.convs):
            y = nn.functional.relu6(conv(x))
            x = y + x if number in (2, 4) else y
        return self.head(x.mean((2, 3)))


class Mixing(nn.Module):
    """Samples of a batch that depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x + 3 * x.mean(0, keepdim=True))


class Sequence(nn.Module):
    """Time first: no axis of samples where one is expected."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.transpose(0, 1))).transpose(0, 1)


class TwoHeads(nn.Module):
    """Two linears whose results are outputs as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.left(x), self.right(x)


class Scalar(nn.Module):
    """A value without an axis, which a path of errors ends at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).mean()


class Scanned(nn.Module):
    """A loop whose gradient torch cannot take: XNNPACK's quantizer puts a tensor into its body."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        carry, every = scan(_halved, torch.zeros(4, 8), torch.stack([y, y * 2]))
        return self.second(every.sum(0) + carry)


def _halved(carry: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    carry = carry * 0.5 + value
    return carry, carry * 2.0


class Coordinates(nn.Module):
    """Channels that are expanded, so that their elements share memory, are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.Conv2d(3, 3, 1), nn.Conv2d(4, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.linspace(-1, 1, 6).view(1, 1, 6, 1).expand(len(x), 1, 6, 6)
        return self.conv(torch.cat([self.first(x), rows], 1)).mean((2, 3))


def projected(pair: pt2qa.QuantizedPair, batches: Any, **options: Any) -> pt2qa.SensitivityReport:
    return pt2qa.sensitivity(pair, batches, method="projection", **options)


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep()


def check_against_exact(pair: pt2qa.QuantizedPair, batches: Any, projections: int, sigmas: float = 5) -> None:
    """Within the sampling error that the report states."""
    report = projected(pair, batches, projections=projections)
    for row, noise in zip(report.rows, noises(pair, batches), strict=True):
        if noise == 0.0:
            assert row.noise == 0.0, row.name
            continue
        expected = 10 * np.log10(report.signal / noise)
        assert abs(row.value - expected) <= sigmas * row.error + 0.02, row.name


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_linear_network_is_estimated_within_the_stated_error(quantizer: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    batches = [(torch.randn(8, 16),), (torch.randn(8, 16),)]
    check_against_exact(quantized_pair(model, batches[0], quantizer), batches, projections=64)


@pytest.mark.parametrize("axis", [0, 1], ids=["samples first", "samples second at one of them"])
def test_errors_of_a_weight_that_two_ops_read_add_up(axis: int) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x).transpose(0, axis)).transpose(0, axis)

    torch.manual_seed(0)
    x = torch.randn(4, 2, 16)
    pair = quantized_pair(Twice(), (x,))
    first, second = pair.quantized.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    second.args = (second.args[0], first.args[1])
    pair.quantized.recompile()
    shared = pt2qa.pair(pair.reference, pair.quantized)
    reports = projected(shared, [x], projections=x.numel()), pt2qa.sensitivity(shared, [x], method="exact")
    (estimated,), (exact,) = ([row.noise for row in report.rows if row.kind == "weight"] for report in reports)
    assert estimated == pytest.approx(exact, rel=0.05)


def test_the_noise_of_one_site_is_what_the_formula_says() -> None:
    torch.manual_seed(0)
    pair = quantized_pair(nn.Linear(16, 8, bias=False), (torch.randn(8, 16),))
    batch = torch.randn(8, 16)
    report = projected(pair, [(batch,)], projections=256)
    weight = next(row for row in report.rows if row.kind == "weight")
    constant = next(constant for constant in pair.program.constants if constant.site == weight.site)
    change = batch.double() @ (constant.quantized - constant.reference).double().T
    assert weight.noise == pytest.approx((change.detach() ** 2).sum().item(), rel=0.1)


@pytest.mark.parametrize("model", [Mixing, Sequence])
def test_samples_that_are_not_apart_are_projected_together(model: type[nn.Module]) -> None:
    # Eight time steps and eight samples: an axis of the right length need not be the axis of samples.
    torch.manual_seed(0)
    shape = (8, 16) if model is Mixing else (8, 8, 16)
    batches = [(torch.randn(shape),) for _ in range(4)]
    pair = quantized_pair(model(), batches[0])
    check_against_exact(pair, batches, projections=64)
    notes = projected(pair, batches).notes
    assert any("no axis of independent samples" in note for note in notes), notes


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86", "xnnpack:mode=dynamic"])
def test_ranks_as_the_exact_method_does(quantizer: str) -> None:
    batches = [images(16), images(16, seed=1)]
    pair = quantized_pair(deep(), (batches[0],), quantizer)
    report = projected(pair, batches)
    assert not any("no axis" in note for note in report.notes)
    assert spearmanr([row.noise for row in report.rows], noises(pair, batches)).statistic > 0.9


@pytest.mark.parametrize("method", ["projection", "exact"])
def test_a_hostile_layer_is_the_worst(method: Any) -> None:
    model = deep()
    with torch.no_grad():
        # One channel a thousand times larger takes all the integers; the next conv makes up for it.
        model.convs[3].weight[5] *= 1000
        model.convs[3].bias[5] *= 1000
        model.convs[4].weight[:, 5] /= 1000
    model.forward = _without_relu6(model)  # type: ignore[method-assign]
    pair = quantized_pair(model, (images(16),), "xnnpack:per_channel=false")
    report = pt2qa.sensitivity(pair, [images(16)], method=method)
    assert report.worst(1)[0].module == "convs.3"


def _without_relu6(model: nn.Module) -> Any:
    def forward(x: Tensor) -> Tensor:
        for conv in model.convs:  # type: ignore[union-attr]
            x = conv(x).relu()
        return model.head(x.mean((2, 3)))

    return forward


def test_leaves_no_trace() -> None:
    torch.manual_seed(0)
    pair = residual_pair()
    before, state = copy.deepcopy(pair.quantized.state_dict()), torch.get_rng_state()
    first = projected(pair, [images(), images(seed=1)])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert projected(pair, [images(), images(seed=1)]) == first
    for name, value in pair.quantized.state_dict().items():
        assert torch.equal(value, before[name])
    for graph in (pair.quantized, pair.reference, pair.float_graph):
        assert all(parameter.grad is None for parameter in graph.parameters())
    for constant in pair.program.constants:
        assert getattr(constant.reference, "grad", None) is None
    assert all(np.isfinite([row.noise, row.error, row.flops_share]).all() for row in first.rows)


def test_one_projection_states_an_error_too() -> None:
    report = projected(residual_pair(), [images()], projections=1)
    assert all(row.error > 0 for row in report.rows)
    assert report.projections == 1


def test_frozen_and_trainable_parameters_are_alike() -> None:
    frozen = deep()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    reports = [projected(quantized_pair(model, (images(8),)), [images(8)]) for model in (deep(), frozen)]
    assert reports[0].rows == reports[1].rows


def test_groups_add_up_their_sites() -> None:
    pair = residual_pair()
    single, regions = (projected(pair, [images()], group=group) for group in (None, "region"))
    assert sum(row.noise for row in regions.rows) == pytest.approx(sum(row.noise for row in single.rows))
    for region in regions.rows:
        own = [row for row in single.rows if row.region == region.region and row.region >= 0]
        if own:
            assert region.noise == pytest.approx(sum(row.noise for row in own))
            assert region.kind == ("activation" if any(row.kind == "activation" for row in own) else "weight")


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86", "xnnpack:mode=dynamic"])
def test_an_output_that_post_process_ignores_has_no_gradient_and_no_noise(quantizer: str) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 16),)]
    pair = quantized_pair(TwoHeads(), batches[0], quantizer)
    report = projected(pair, batches, post_process=lambda outputs: outputs[1], projections=32)
    expected = noises(pair, batches, post_process=lambda outputs: outputs[1])
    assert next(row.name for row in report.rows if row.noise == 0.0) == "left/linear"
    for row, noise in zip(report.rows, expected, strict=True):
        assert row.noise == pytest.approx(noise, rel=0.5), row.name
    assert any("no gradient leads from left/linear" in note for note in report.notes)
    found = pt2qa.reconfigure(pair, batches, target=pt2qa.compare_layers(pair, batches, progress=False).sqnr + 3)
    assert found.met


def test_post_process_is_differentiated() -> None:
    pair, batches = residual_pair(), [images(seed=seed) for seed in range(4)]
    report = projected(pair, batches, post_process=lambda logits: logits.softmax(-1), projections=32)
    expected = noises(pair, batches, post_process=lambda logits: logits.softmax(-1))
    assert spearmanr([row.noise for row in report.rows], expected).statistic > 0.9
    for function, problem in (
        (lambda logits: logits.argmax(-1).float(), "post_process returns an output without a gradient"),
        (lambda logits: torch.from_numpy(logits.numpy()), "post_process cannot be differentiated"),
    ):
        with pytest.raises(SelectionError, match=f'{problem}.*method="exact"'):
            projected(pair, batches, post_process=function)


def test_integer_outputs_and_dead_ends_are_noted() -> None:
    torch.manual_seed(0)
    example = (torch.randn(4, 16),)
    report = projected(quantized_pair(models.NestedOutputs(), example), [example])
    assert report.outputs == ("output.logits", "output.rest[0]")
    tokens = (torch.randint(0, 10, (5, 2)), torch.zeros(2, 2, 8), torch.zeros(2, 2, 8))
    recurrent = projected(quantized_pair(models.Recurrent(), tokens), [tokens])
    assert all(np.isfinite(row.noise) for row in recurrent.rows)


@pytest.mark.parametrize("model", [models.TwoUsers, models.SameInputTwice, models.Parameters, models.InPlaceViews])
def test_patterns_of_graphs(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    pair = quantized_pair(model(), (images(8),))
    check_against_exact(pair, [images(8)], projections=64, sigmas=6)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_values_without_an_axis_are_projected(quantizer: str) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(4, 8) for _ in range(2)]
    pair = quantized_pair(Scalar(), batches[0], quantizer)
    # The output has one element, so a single vector leaves nothing to chance.
    report = projected(pair, batches, projections=1)
    for row, noise in zip(report.rows, noises(pair, batches), strict=True):
        assert row.noise == pytest.approx(noise, rel=0.05), row.name
    budget = pt2qa.error_budget(pair, batches, method="projection", projections=1)
    assert sum(row.noise for row in budget.rows) == pytest.approx(sum(row.noise for row in report.rows), rel=0.3)
    assert pt2qa.diagnose(pair, batches).samples == 8


def test_a_loop_that_torch_gives_no_gradient_of_is_measured_exactly() -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 8)
    pair = quantized_pair(Scanned(), batch)
    with pytest.raises(SimulationError, match=r'scan \(scan\) has no gradient here.*method="exact"'):
        projected(pair, [batch])
    assert pt2qa.sensitivity(pair, [batch]).method == "exact"


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_values_whose_elements_share_memory(quantizer: str) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 6, 6) for _ in range(2)]
    pair = quantized_pair(Coordinates(), batches[0], quantizer)
    check_against_exact(pair, batches, projections=8)
    assert pt2qa.diagnose(pair, batches).samples == 4


def test_dot_products_count_what_is_not_finite_as_zero_and_say_where() -> None:
    def dots(*errors: Tensor) -> tuple[list[list[float]], list[str]]:
        meter: Any = SimpleNamespace(projection=SimpleNamespace(cleaned={}))
        path: Any = SimpleNamespace(start=SimpleNamespace(name="fc"))
        found = _Meter._dots(meter, path, [None, *([leaf] * (len(errors) - 1))], list(errors), 2)
        return found.tolist(), list(meter.projection.cleaned)

    leaf = torch.tensor([[[1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 1.0, 1.0]], [[3.0, 5.0, 7.0, 9.0], [0.0, 0.0, 0.0, 0.0]]])
    error = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    assert dots(error, error) == ([[49.0, 26.0], [70.0, 0.0]], [])
    assert dots(error, error, error) == ([[98.0, 52.0], [140.0, 0.0]], [])
    error[0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 4.0])
    assert dots(error, error) == ([[32.0, 26.0], [36.0, 0.0]], ["fc"])
    for value in (torch.nan, torch.inf, -torch.inf):  # no gradient in one row
        leaf[1, 0, 3] = value
        assert dots(error, error) == ([[32.0, 26.0], [0.0, 0.0]], ["fc"])
