"""What single kinds of evidence make of a case: the call that a remedy gives, and how far a weight is from its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec

import pt2qa
from pt2qa._diagnosis.case import Case
from pt2qa._diagnosis.hypotheses import calibration
from pt2qa._diagnosis.hypotheses.calibration import bad_sample
from pt2qa._diagnosis.hypotheses.sites import _lowest, floored, in_float, one_sided
from pt2qa._diagnosis.hypotheses.stages import _costly
from pt2qa._diagnosis.hypotheses.weights import _steps_apart
from pt2qa._sensitivity.ranges import observe
from pt2qa._simulator.data import Counted, Data
from pt2qa._simulator.program import Constant, QuantParams, Site
from pt2qa._trials.judge import Judge
from pt2qa._trials.treatment import Treatment
from tests.check.quantizers import every
from tests.flows import quantized_pair


@pytest.fixture(scope="module")
def case() -> Case:
    """Of a model that was calibrated on values ten times too small."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    batches = list(torch.randn(4, 8, 8))
    pair = quantized_pair(net, batches[0], batches=[0.1 * batch for batch in batches])
    data = Data("batches", batches)
    judge = Judge(pair, data, None, "diagnose")
    return Case(pair, judge, data, judge.outcome(Treatment()))


def test_a_remedy_ends_with_the_call_that_applies_it(case: Case) -> None:
    narrow = pt2qa.diagnose(case.pair, case.data.batches, verify_code=False, progress=False).rows[0]
    assert narrow.cause == "narrow-calibration"
    assert narrow.remedy.endswith(": pt2qa.quantize(capture, 'xnnpack', batches)")


def test_a_bad_sample_is_one_that_calibration_saw_and_is_judged_by_all_others(case: Case) -> None:
    assert case.judge.recipe is not None
    worst = replace(case.now, worst_sample=9, worst_sample_share=0.9)
    assert list(bad_sample(case, Treatment(), worst)) == []  # calibration has none of the evaluation batches
    (sample,) = bad_sample(case, Treatment(data=case.data), worst)
    assert sample.unseen == 9
    assert sample.treatment.data is not None
    assert [*map(id, sample.treatment.data.batches)] == [id(each) for n, each in enumerate(case.data.batches) if n != 1]
    assert "pt2qa.find_bad_cases(pair, batches)" in sample.remedy
    assert list(bad_sample(case, Treatment(data=case.data), replace(worst, worst_sample_share=0.4))) == []


def test_a_site_that_is_left_in_float_is_written_as_an_edit(case: Case) -> None:
    site = next(site for site in case.pair.sites if site.kind == "weight")
    treatment, edit, cost = in_float(case, site)
    assert edit == f" ({treatment.floats[0]})"
    assert site.name in edit
    assert cost > 0


def weight_site(zero_point: int) -> Site:
    params = QuantParams("uint8", 0.1, zero_point, 0, 255)
    return Site(0, "weight", "fc/linear", "linear", 1, ("fc/linear",), params, 0, 1, True)


@pytest.mark.parametrize("zero_point", [0, 100, 255])
def test_a_weight_is_as_far_from_its_own_as_where_the_range_holds_it(zero_point: int) -> None:
    low, high = -0.1 * zero_point, 0.1 * (255 - zero_point)
    reference = torch.tensor([low + 1.0, high - 1.0, low - 5.0, high + 5.0])
    clamped = reference.clamp(low, high)
    site = weight_site(zero_point)
    assert _steps_apart(site, reference, clamped) == 0.0
    for end in (0, 1):
        changed = clamped.clone()
        changed[end] += 0.7
        assert _steps_apart(site, reference, changed) == pytest.approx(7.0, rel=1e-4)


def test_the_lowest_value_of_a_mask_is_that_of_the_float_model(case: Case) -> None:
    site = case.pair.sites[0]
    constant = Constant(0, torch.tensor([-100.0, 0.0]), torch.tensor([-96.0, 0.0]))
    assert _lowest(cast(Case, SimpleNamespace(constants={site.index: constant})), site) == -100.0


def test_an_outlier_is_left_out_of_the_batches_of_its_own_process(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    *others, last = case.data.batches
    own = Data("calibration", [*others, 100 * last])
    every = Counted(None, {}, case.pair.program)
    seen = observe(case.pair, ((case.pair.values(batch), every) for batch in own))
    monkeypatch.setattr(calibration, "batches_before", lambda count: 10)
    monkeypatch.setattr(Case, "excess", lambda self, site: 1.0)
    ((number, found),) = calibration._outliers(case, own, seen)
    assert number == 10 + len(others)
    assert found.treatment.data is not None
    assert [*map(id, found.treatment.data.batches)] == [*map(id, others)]


@pytest.mark.parametrize(("narrower", "causes"), [(26.0, 1), (24.0, 2)])
def test_sums_that_saturate_explain_half_of_what_kernels_cost_or_their_ops_are_left_in_float(
    narrower: float, causes: int
) -> None:
    x = torch.randn(4, 8)
    pair, data = quantized_pair(nn.Linear(8, 8), x, "x86"), Data("batches", [x])
    judge = Judge(pair, data, None, "diagnose")
    stages = [SimpleNamespace(name="converted", sqnr=30.0), SimpleNamespace(name="deployed", sqnr=20.0)]
    report = SimpleNamespace(stages=stages, suspects=[SimpleNamespace(name="linear", isolated_max_lsb=3.0)])
    program = SimpleNamespace(backend=None, sqnr=lambda treatment: narrower if treatment.options else 29.0)
    found = list(_costly(Case(pair, judge, data, judge.outcome(Treatment())), cast(Any, report), cast(Any, program)))
    assert [(each.cause, each.gain) for each in found] == [
        ("saturation", narrower - 20.0),
        ("deployed-kernel", 9.0),
    ][:causes]


@pytest.mark.parametrize(("unit", "names"), [(0.0155, ["input"]), (0.0157, [])])
def test_a_scale_is_at_the_observers_eps_where_that_costs_a_bit(unit: float, names: list[str]) -> None:
    x = unit * torch.linspace(-1, 1, 64).reshape(8, 8)
    pair, data = quantized_pair(nn.Linear(8, 8), x, "xnnpack"), Data("batches", [x])
    assert pair.sites[0].params.scale == 2**-12
    assert (2 * unit < 255 * 2**-12 / 2) == bool(names)
    judge = Judge(pair, data, None, "diagnose")
    found = floored(Case(pair, judge, data, judge.outcome(Treatment())))
    assert [each.name for each in found] == names


@pytest.mark.parametrize(("scheme", "named"), [(torch.per_tensor_symmetric, ["1/relu"]), (torch.per_tensor_affine, [])])
def test_values_of_one_sign_with_a_symmetric_scheme_leave_half_of_the_integers(scheme: Any, named: list[str]) -> None:
    """The values that the first linear reads and writes have both signs."""
    spec = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, scheme)
    x = torch.randn(16, 8)
    pair = quantized_pair(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), x, every("linear", spec))
    data = Data("batches", [x])
    judge = Judge(pair, data, None, "diagnose")
    found = list(one_sided(Case(pair, judge, data, judge.outcome(Treatment()))))
    assert [name for each in found for name in (each.name, *each.others)] == 2 * named
    assert [each.cause for each in found] == ["activation-scheme"] * len(named)
    assert all("here 0 of -128..127, values 0 to " in each.evidence for each in found)
    nothing = quantized_pair(nn.Linear(8, 8), torch.zeros(16, 8), every("linear", spec))
    zeros = Data("batches", [torch.zeros(16, 8)])
    judge = Judge(nothing, zeros, None, "diagnose")
    names = [each.name for each in one_sided(Case(nothing, judge, zeros, judge.outcome(Treatment())))]
    assert "input" not in names  # values that are all zero have no sign
