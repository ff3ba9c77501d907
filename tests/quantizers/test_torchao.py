"""Configs of torchao's ``quantize_`` by linear, chosen for a target or a budget, and the call that is written."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, PerAxis, PerGroup
from torchao.quantization.quant_primitives import MappingType

import pt2qa
from pt2qa_torchao import MixedConfig, code, mixed, mixed_config

INT4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
FINER = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16), mapping_type=MappingType.ASYMMETRIC)
INT8 = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))


class Net(nn.Module):
    """A tied head, and a linear whose width groups of 32 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(40, 64), nn.Linear(64, 48), nn.Linear(48, 64)
        self.mix, self.head = nn.Linear(64, 64), nn.Linear(64, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(F.silu(self.up(x)))
        logits: Tensor = self.head(x + self.mix(x))
        return logits


@functools.cache
def floats() -> tuple[Net, pt2qa.Capture, list[Tensor]]:
    torch.manual_seed(0)
    model, batches = Net().eval(), [torch.randint(40, (4, 9)) for _ in range(2)]
    return model, pt2qa.capture(model, batches[0]), batches


def found(*configs: Any, **aim: Any) -> MixedConfig:
    _, capture, batches = floats()
    return mixed_config(capture, configs, batches, progress=False, **aim)


def pasted(source: str) -> nn.Module:
    """A copy of the float model, after the code was executed as a user does."""
    model = copy.deepcopy(floats()[0])
    exec(source, {"model": model})
    return model


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in floats()[2]])


@pytest.mark.parametrize("target", [25.0, 32.0])
def test_the_pasted_call_has_the_figure_of_the_report(target: float) -> None:
    best = found(INT4, FINER, INT8, target=target)
    model = pasted(best.code)
    assert best.met
    assert pt2qa.sqnr(outputs(floats()[0]), outputs(model)) == pytest.approx(best.sqnr, abs=1e-3)
    assert best.value == best.sqnr >= target
    assert torch.equal(outputs(model), outputs(best.pair.quantized))
    assert best.nbytes == mixed.nbytes(model) < mixed.nbytes(floats()[0])


def test_no_choice_with_fewer_bytes_meets_the_target() -> None:
    best = found(INT4, FINER, INT8, target=28.0)
    ways = {"up": (INT4, FINER, INT8, None), "down": (FINER, INT8, None), "mix": (INT4, FINER, INT8, None)}
    reference, smallest = outputs(floats()[0]), best.nbytes
    for chosen in itertools.product(*ways.values()):
        model = pasted(code.call_of(dict(zip(ways, chosen, strict=True))))
        if pt2qa.sqnr(reference, outputs(model)) >= 28.0:
            smallest = min(smallest, mixed.nbytes(model))
    assert best.nbytes == smallest


def test_a_linear_gets_only_configs_whose_groups_divide_its_width() -> None:
    best = found(INT4, max_bytes=10**9)
    assert {*best.configs} == {"up", "mix", "head"}
    with pytest.raises(pt2qa.SelectionError, match="no linear takes any of them"):
        found(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(33)), target=20)


def test_a_tied_weight_stays_in_float_where_another_copy_would_only_add_bytes() -> None:
    assert found(INT4, INT8, target=20.0).configs["head"] is None


def test_the_best_model_within_a_budget() -> None:
    least = found(INT4, FINER, INT8, max_bytes=0)
    assert not least.met
    sizes = [least.nbytes + more for more in (0, 800, 2000, 4000)]
    kept = [found(INT4, FINER, INT8, max_bytes=size) for size in sizes]
    assert all(each.met and each.nbytes <= size for each, size in zip(kept, sizes, strict=True))
    assert [each.sqnr for each in kept] == sorted({each.sqnr for each in kept})


def test_a_target_out_of_reach_gives_the_best_that_is_quantized() -> None:
    best = found(INT4, target=200.0)
    assert not best.met
    assert sum(config is not None for config in best.configs.values()) == 1
    assert str(best).startswith(f"# NOT met: {best.sqnr:.4g} (")


def test_a_metric_of_the_user_is_measured_on_the_model_of_the_call() -> None:
    model, _, batches = floats()
    prompts = [{"tokens": batch} for batch in batches]
    kept = pt2qa.metrics.token_agreement(model, prompts)
    best = found(INT4, FINER, INT8, target=pt2qa.Target(0.97, kept))
    assert best.met
    assert best.value == kept(pasted(best.code)) >= 0.97


def test_noise_of_dynamic_activations_counts_for_the_linear_that_reads_them() -> None:
    dynamic = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0))
    _, capture, batches = floats()
    model, reference = floats()[0], outputs(floats()[0])
    options = mixed._options(capture, model, [dynamic], batches, lambda module, name: name == "mix", {})
    alone = outputs(pasted(code.call_of({"mix": dynamic})))
    assert options["mix"][1].noise == pytest.approx(float((alone - reference).square().sum()), rel=0.3)


def test_neither_target_nor_budget() -> None:
    with pytest.raises(pt2qa.SelectionError, match="neither target nor max_bytes"):
        found(INT4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"configs": ["int4"]}, "configs: got .*int4.*, expected a list of configs of quantize_"),
        ({"configs": INT4}, "configs: got 'IntxWeightOnlyConfig.*, expected a list of configs"),
        ({"target": "sqnr>=20"}, "target: got 'sqnr>=20', expected dB, such as 30, or a pt2qa.Target"),
        ({"capture": nn.Linear(4, 4)}, r"capture: got 'Linear.*, expected what pt2qa.capture\(model"),
    ],
)
def test_arguments_of_another_kind_are_refused(wrong: dict[str, Any], message: str) -> None:
    _, capture, batches = floats()
    given: dict[str, Any] = {"capture": capture, "configs": [INT4], "batches": batches, "target": 20.0} | wrong
    with pytest.raises(pt2qa.SelectionError, match=message):
        mixed.mixed_config(**given)
