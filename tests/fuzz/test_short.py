"""The campaign of ``make fuzz``, seconds long, and that it finds what is planted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pt2qa
from pt2qa._layers import sums
from pt2qa._simulator import fused
from tests.fuzz.analyses import STAGES, Outcome, analyse, quantized
from tests.fuzz.campaign import CRASHED, Finding, Worker, campaign, reduced, script_of
from tests.fuzz.grammar import OPS, Gene, Genome, batch_of, random_genome, write
from tests.fuzz.planted import Reader, crashes

SEEDS = (1, 4, 5, 6, 7)
LINEAR = Genome(((2, 5),), {0: Gene("linear_relu", -1, -1, 3)}, (0,), ("normal", "wide"), "random_ops", 3)


def test_random_models_go_through_every_analysis_and_every_number_is_the_recomputed_one() -> None:
    outcomes = {seed: analyse(random_genome(seed)) for seed in SEEDS}
    failures = [
        f"seed {seed}, {stage}: {trace}" for seed in SEEDS for stage, (_, trace) in outcomes[seed].failures.items()
    ]
    assert failures == []
    counts = {name: sum(each.counts.get(name, 0) for each in outcomes.values()) for name in outcomes[1].counts}
    assert counts["pairs"] == len(SEEDS)
    assert min(counts["layer rows"], counts["exact sensitivities"], counts["profile rows"]) > 15


def test_a_model_is_the_same_each_time_and_every_op_is_in_some_model() -> None:
    assert write(random_genome(5)).source == write(random_genome(5)).source
    assert {gene.op for seed in range(600) for gene in random_genome(seed).genes.values()} == OPS.keys()


def failed(stage: str) -> str:
    outcome: Outcome = analyse(LINEAR, [stage])
    return outcome.failures[stage][0] if stage in outcome.failures else ""


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed("layers") == ""
    monkeypatch.setattr(sums.ErrorSums, "mse", property(lambda self: 1.01 * self.noise / max(self.count, 1)))
    assert "mse" in failed("layers")


def test_an_op_that_a_plug_in_puts_into_a_region_is_run_with_it() -> None:
    genes = {0: Gene("conv2d", -1, -1, 1), 1: Gene("linear", 0, 0, 1)}
    before_linear = Genome(((1, 1, 1, 1),), genes, (1,), ("normal",), "xnnpack:dynamic", 233)
    genes = {0: Gene("conv2d", -1, -1, 1), 1: Gene("maximum", -1, 0, 1)}
    behind_rounding = Genome(
        ((1, 1, 2, 2),), {**genes, 2: Gene("mul_scalar", 1, 1, 1)}, (2, 0), ("normal",), "xnnpack", 1
    )
    for genome in (before_linear, behind_rounding):
        outcome = analyse(genome, ["layers"])
        assert not outcome.failures
        pair = quantized(genome).pair
        assert any(step.handle < 0 for step in pair.program.steps if step.site is None)
        assert outcome.counts["layer rows"] == len(pt2qa.compare_layers(pair, [batch_of(genome, "normal", 10)]).rows)


def test_what_a_quantized_graph_makes_of_constants_has_an_error_of_its_own() -> None:
    genes = {0: Gene("positions", -1, -1, 1), 1: Gene("while_loop", 0, 0, 4), 2: Gene("round", 1, 1, 7)}
    genome = Genome(((2, 3, 5),), genes, (2,), ("normal",), "random", 31359)
    assert not analyse(genome, ["layers"]).failures
    assert any(site.nested for site in quantized(genome).pair.sites)


def test_a_value_that_is_rounded_twice_alike_in_series_has_two_rows() -> None:
    genes = {0: Gene("sign", -1, -1, 1), 1: Gene("sqrt", 0, 0, 1)}
    genome = Genome(((3, 1),), genes, (1,), ("normal",), "random", 90328)
    assert not analyse(genome, ["layers"]).failures
    first, second = (site for site in quantized(genome).pair.sites if site.name == "sign")
    assert (first.params, first.result) == (second.params, second.source)


def test_a_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = fused.quantize_dequantize

    def off(x: Tensor, scale: float, *args: int, **options: object) -> Tensor:
        result: Tensor = rounded(x, scale, *args, **options)  # type: ignore[arg-type]
        return result.add_(scale)

    monkeypatch.setattr("pt2qa._simulator.fused.quantize_dequantize", off)
    assert "the simulator is not the converted graph" in failed("simulator")


def test_an_error_that_is_not_of_the_library_is_found_and_its_own_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pt2qa.compare_weights", lambda pair: pair.no_such_name)
    assert "AttributeError" in failed("weights")
    embedding = Genome(((2, 5),), {0: Gene("argmax", -1, -1, 3)}, (0,), ("normal",), "xnnpack", 3)
    outcome = analyse(embedding)
    assert not outcome.failures
    assert outcome.refusals["quantize"].startswith("QuantizeError: ")


def test_a_random_state_that_is_moved_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAGES, "weights", lambda subject: torch.rand(1))
    assert "random state" in failed("weights")


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_a_crash_of_native_code_is_an_outcome_and_the_next_model_runs() -> None:
    worker = Worker(crashes)
    assert worker.run("crash") == f"{CRASHED} with code -11"
    assert worker.run("sound").counts == {"pairs": 1}
    worker.close()


def test_the_bar_of_a_campaign_shows_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    done = campaign(range(10**9), 1, None, analyse=crashes, draw=str, progress=True)
    assert done.models > 0
    shown = capsys.readouterr().err
    assert "| 00:00 of 00:01" in shown
    assert f"findings=0, models={done.models}" in shown
    assert str(10**9) not in shown


def test_a_failure_is_reduced_to_the_op_that_brings_it_about(tmp_path: Path) -> None:
    genome = next(g for g in map(random_genome, range(100)) if len(g.genes) > 8 and g.genes[6].op != g.genes[0].op)
    small, _ = reduced(Reader(genome.genes[6].op), genome, "layers", "Wrong: #", "trace")
    assert [gene.op for gene in small.genes.values()] == [genome.genes[6].op]
    assert len(small.outputs) == len(small.batches) == 1
    finding = Finding(genome.seed, "layers", "Wrong: #", script_of(small, "layers", "Wrong: #", "trace"))
    compile(finding.script, "script", "exec")
    assert "class Net" in finding.script
