"""The arguments of ``pt2qa.diagnose``, and what of a search ends up in its report."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

import pt2qa
from pt2qa import Target
from pt2qa._diagnosis import projected
from pt2qa._diagnosis.analysis import _aim, _errors_of, _needed
from pt2qa._diagnosis.projected import SiteNoises, site_noises, together
from pt2qa._diagnosis.worth import Worth
from pt2qa._report.set_apart import SetApart
from pt2qa._sensitivity.roundings import Variant, own_rounding
from pt2qa._simulator.data import Data
from pt2qa._trials import judge as judges
from pt2qa.report import Diagnosis, Finding
from tests.check.plain_quantizer import EXACT, PlainQuantizer
from tests.diagnosis import facts
from tests.flows import quantized_pair, residual_pair
from tests.sensitivity.brute_force import quantized_at


def score(model: Any) -> float:
    return 0.8


def test_a_metric_and_a_target_are_one_aim() -> None:
    assert _aim(None, None) is None
    assert _aim(None, 30.0) == Target(30.0)
    assert _aim(score, None) == Target(-math.inf, metric=score, name="score")
    assert _aim(score, 1) == Target(1.0, metric=score, name="score")
    own = Target(0.9, name="own", of_float=True)
    assert _aim(score, own) == replace(own, metric=score)
    assert _aim(None, own) == own
    assert _aim(score, replace(own, metric=score)).metric is score  # type: ignore[union-attr]

    class Callable:
        def __call__(self, model: Any) -> float:
            return 0.0

    assert _aim(Callable(), None).name == "Callable"  # type: ignore[union-attr]
    with pytest.raises(pt2qa.SelectionError, match="metric: got another one than target= has"):
        _aim(score, replace(own, metric=lambda model: 0.0))
    for wrong in (True, "0.9"):
        with pytest.raises(pt2qa.SelectionError, match="expected a number in the unit of the metric"):
            _aim(score, wrong)


def test_what_is_needed_follows_from_the_aim() -> None:
    judge: Any = type("Judge", (), {"of_float": lambda self: -0.8})()
    assert _needed(None, judge, Worth()) is None
    assert _needed(Target(30.0), judge, Worth()) == 30.0
    assert _needed(Target(-math.inf, metric=score), judge, Worth(least=0.05)) == pytest.approx(-0.84)
    assert _needed(Target(0.5, metric=score, of_float=True), judge, Worth()) == -0.4
    assert _needed(Target(0.5, metric=score), judge, Worth()) == 0.5


def test_errors_of_the_structure_are_looked_for_with_those_of_the_plug_in() -> None:
    from pt2qa._check.rules import RULES

    errors = {rule.id for rule in RULES.values() if rule.severity == "error"}
    assert set(_errors_of(residual_pair())) >= errors
    assert not set(_errors_of(residual_pair())) & (RULES.keys() - errors)
    foreign = replace(residual_pair(), recipe=None)
    assert set(_errors_of(foreign)) == errors


@pytest.fixture(scope="module")
def narrow() -> tuple[pt2qa.QuantizedPair, list[torch.Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batches = list(torch.randn(2, 8, 8))
    return quantized_pair(net, batches[0], batches=[0.1 * batch for batch in batches]), batches


def diagnosed(narrow: Any, **options: Any) -> Diagnosis:
    pair, batches = narrow
    return pt2qa.diagnose(pair, batches, progress=False, **options)


def test_a_report_holds_what_the_search_has_found(narrow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, batches = narrow
    made, again = list[Any](), judges.quantize_again
    monkeypatch.setattr(judges, "quantize_again", lambda *given, **more: made.append(given) or again(*given, **more))
    found = diagnosed(narrow, verify_code=False)
    assert found.quantizations == len(made) > 0
    assert found.rows[0].cause == "narrow-calibration"
    assert (found.batches, found.samples, found.unit, found.target, found.met) == (2, 16, "dB", "", -1)
    assert (found.quantizer, found.model, found.environment) == (pair.quantizer, pair.model, pair.environment)
    assert {"findings", "budget"} == set(found.reports)
    assert found.budget == cast(Any, found.reports["budget"]).in_short() != ""
    assert found.asides == ()
    assert found.plan_json == ""
    assert found.code_verified.startswith("not run")
    assert "with the remedies of a diagnosis." in found.code
    assert (
        "the new calibration data were also the evaluation data; pass evaluation= to measure on others" in found.notes
    )
    assert len(found.treatments) == len(found.rows)
    assert found.search_target is None
    assert found.next_command == "pt2qa.quantize(capture, 'xnnpack', batches)"

    assert any(name in found.verdict for name in ("outside the range", "lie outside")), found.verdict
    assert found.input_ranges != ()
    outputs = [found.pair.quantized(batch) for batch in batches]
    reference = [pair.reference(batch) for batch in batches]
    assert found.sqnr_after == pytest.approx(pt2qa.sqnr(torch.cat(reference), torch.cat(outputs)), abs=0.01)


def test_data_apart_and_targets(narrow: Any) -> None:
    others = list(torch.randn(3, 8, 8))
    found = diagnosed(narrow, evaluation=others, target=20.0, verify_code=False)
    assert (found.batches, found.samples) == (3, 24)
    assert not any("also the evaluation data" in note for note in found.notes)
    assert (found.target, found.met) == ("at least 20", 0)
    assert found.code != ""
    assert found.code_verified.startswith("not run")
    reached = diagnosed(narrow, target=-100.0, verify_code=False)
    assert (reached.met, reached.rows, reached.next_command) == (1, (), "pt2qa.diagnose(pair, batches)")
    assert "are outside the calibrated range and clamped" in reached.verdict
    assert reached.code == reached.code_verified == ""


def test_findings_are_made_where_none_are_given(narrow: Any) -> None:
    pair, _ = narrow
    given = pt2qa.check(pair, rules=["train-mode"])
    found = diagnosed(narrow, findings=given, target=-100.0, verify_code=False)
    assert found.reports["findings"] is given
    assert "pt2qa.check finds" not in found.verdict
    wrong = replace(given, rows=(Finding("rule", "error", "0/linear", "", "does not lower", "fix", math.nan),))
    found = diagnosed(narrow, findings=wrong, target=-100.0, verify_code=False)
    assert ". The target is met: " in found.verdict
    assert found.verdict.endswith(". But pt2qa.check finds 1 error.")
    assert found.next_command == "pt2qa.check(pair)"
    other = residual_pair()
    with pytest.raises(pt2qa.SelectionError, match="findings: got those of another model, "):
        diagnosed(narrow, findings=pt2qa.check(other, rules=["train-mode"]))
    kernels = pt2qa.DeployedReport(
        *((), (), (), (), (), "none"), notes=(), quantizer="x86", model="Net", environment=pair.environment
    )
    with pytest.raises(pt2qa.SelectionError, match="deployed: got the report of another pair, Net quantized by x86"):
        diagnosed(narrow, deployed=kernels)
    with pytest.raises(pt2qa.SelectionError, match="deployed: got the report of another pair"):
        diagnosed(narrow, deployed=replace(kernels, quantizer=pair.quantizer, environment=other.environment))


def part(**given: Any) -> SiteNoises:
    return replace(facts.noises({0: 1.0, (1, "fitted"): 2.0}, signal=8.0, measured=4.0), **given)


def test_noises_of_several_ranks_are_added() -> None:
    apart = SetApart(1, 8, -1, "batch", "NaN")
    one = part(
        variance={(0, "quantized"): 0.5}, notes=("a",), batches=2, samples=16, projections=4, method="projection"
    )
    two = part(notes=("b", "a"), batches=3, samples=24, projections=8, set_apart=(apart,), method="projection")
    whole = together([one, two])
    assert whole.noise == {(0, "quantized"): 2.0, (1, "fitted"): 4.0}
    assert whole.variance == {(0, "quantized"): 0.5, (1, "fitted"): 0.0}
    assert (whole.signal, whole.measured, whole.batches, whole.samples) == (16.0, 8.0, 5, 40)
    assert (whole.projections, whole.method, whole.notes) == (8, "projection", ("a", "b"))
    assert [each.batch for each in whole.set_apart] == [3]  # behind the two of the first
    assert together([one, replace(two, method="exact")]).method == "exact"
    assert together([replace(one, method="exact"), two]).method == "exact"
    assert together([one]) is one


class Outputs(nn.Module):
    """Two outputs in units of their own, and an index."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.a(x), 1000 * self.b(x), self.c(x).argmax(-1)


@pytest.mark.parametrize("method", ["exact", "projection"])
def test_outputs_in_other_units_count_alike(method: Any) -> None:
    """Each output's squared error is a share of its sum of squares, times the samples, batch by batch."""
    batches = list(torch.randn(2, 8, 6))
    pair = quantized_pair(Outputs(), batches[0], PlainQuantizer(("linear",), inputs=EXACT, outputs=EXACT))

    def own(site: Any) -> dict[str, Variant]:
        return {"quantized": Variant(own_rounding(pair.simulator, site))}

    found = site_noises(pair, Data("batches", batches), own, method=method, projections=8, relative=True)

    def shares(graph: Any) -> float:
        total = 0.0
        for batch in batches:
            for ref, out in zip(pair.reference(batch)[:2], graph(batch)[:2], strict=True):
                error = (ref.double() - out.double()).square().sum() / ref.double().square().sum()
                total += 8 * float(error)
        return total

    with torch.no_grad():
        expected = {(site.index, "quantized"): shares(quantized_at(pair, [site.index])) for site in pair.sites}
        assert found.measured == pytest.approx(shares(pair.quantized), rel=1e-3)
    assert found.noise == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert found.signal == 2 * 2 * 8
    assert (found.batches, found.samples, found.method) == (2, 16, method)
    assert found.settings["errors"] == "relative to each output"
    assert found.projections == (0 if method == "exact" else 8)
    silent = "no gradient from a floating-point output reaches c/linear, c/linear: the noise there is 0"
    assert (silent in found.notes) == (method == "projection")
    plain = site_noises(pair, Data("batches", batches), own, method=method)
    assert "errors" not in plain.settings
    with torch.no_grad():
        signal = sum(float(out.double().square().sum()) for batch in batches for out in pair.reference(batch)[:2])
    assert plain.signal == pytest.approx(signal, rel=1e-6)
    assert set(plain.flops) == set(found.flops) != set()


def test_sixteen_runs_are_as_cheap_as_the_projection() -> None:
    assert projected.RUNS == 16
    pair = residual_pair()
    batch = torch.randn(2, 3, 8, 8)

    def found(count: int) -> str:
        first = pair.sites[0]
        own = {str(at): Variant(lambda value, at=at: value * (1 + at)) for at in range(count)}  # type: ignore[misc]
        return site_noises(pair, Data("batches", [batch]), lambda site: own if site is first else {}).method

    assert [found(16), found(17)] == ["exact", "projection"]


def test_a_batch_without_a_number_in_one_of_both_models_is_set_apart() -> None:
    pair, batches = residual_pair(), [torch.randn(2, 3, 8, 8) for _ in range(3)]
    runs = list[Any]()

    def quantized(values: Any) -> Any:
        runs.append(values)
        out = pair.simulator.run(values)
        return (torch.full_like(out[0], math.nan),) if len(runs) == 2 else out

    for method in ("exact", "projection"):
        runs.clear()
        found = site_noises(
            pair,
            Data("batches", batches),
            lambda site: {"quantized": Variant(own_rounding(pair.simulator, site))} if site.index < 2 else {},
            method=method,  # type: ignore[arg-type]
            quantized=quantized,
        )
        assert [each.batch for each in found.set_apart] == [1]
        assert (found.batches, found.samples) == (2, 4)
        whole = torch.cat([batches[0], batches[2]])
        noise = (pair.reference(whole) - pair.quantized(whole)).detach().double().square().sum()
        assert found.measured == pytest.approx(float(noise), rel=1e-3)
