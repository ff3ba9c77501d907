"""``pt2qa.repair``: better numbers in the same ops, only where data that they were not fitted to shows it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import pt2qa
from pt2qa._repair.guard import guarded
from pt2qa._repair.methods import methods_named
from pt2qa._repair.ranges import FittedRanges, Ranges, _between
from pt2qa._simulator.data import Data
from pt2qa._trials.outcome import Folds
from pt2qa.cli import main
from tests.flows import direct_sqnr, quantized_pair
from tests.models import Linears
from tests.repair.nets import Clipped, batches, clipped_pair

HELD_OUT = batches(seed=9)


def measured(pair: pt2qa.QuantizedPair, data: list[Tensor]) -> float:
    reference, quantized = ([graph(x) for x in data] for graph in (pair.float_graph, pair.quantized))
    return direct_sqnr(torch.cat(reference), torch.cat(quantized))


@pytest.fixture(scope="module", params=["xnnpack", "x86"])
def repaired(request: pytest.FixtureRequest) -> pt2qa.Reconfiguration:
    return pt2qa.repair(clipped_pair(request.param), HELD_OUT, progress=False)


def test_other_data_gains(repaired: pt2qa.Reconfiguration) -> None:
    pair = clipped_pair(repaired.quantizer)
    before, after = measured(pair, HELD_OUT), measured(repaired.pair, HELD_OUT)
    assert repaired.met
    assert after > before + (10.0 if repaired.quantizer == "xnnpack" else 0.5)
    stages = {stage.name: stage.quality for stage in repaired.stages}
    assert stages["before"] == pytest.approx(before, abs=1e-3)
    assert stages["converted"] == pytest.approx(after, abs=1e-3)
    assert stages["converted, calibration"] == pytest.approx(measured(repaired.pair, batches()), abs=1e-3)
    assert "labels kept" in repaired.verdict


def test_a_metric_is_reported_beside_the_sqnr(repaired: pt2qa.Reconfiguration) -> None:
    def error(model: Callable[..., Any]) -> float:
        with torch.no_grad():
            return -float(torch.cat([model(x) for x in HELD_OUT]).square().mean())

    pair = clipped_pair(repaired.quantizer)
    report = pt2qa.repair(pair, HELD_OUT, metric=error, verify_code=False, progress=False)
    stages = {stage.name: stage.quality for stage in report.stages}
    assert stages["float, error"] == pytest.approx(error(pair.reference))
    assert stages["before, error"] == error(pair.quantized)
    assert stages["converted, error"] == error(report.pair.quantized) != error(pair.quantized)


def test_ops_are_the_same_and_the_reference_is_the_users_model(repaired: pt2qa.Reconfiguration) -> None:
    pair = clipped_pair(repaired.quantizer)

    def ops(each: pt2qa.QuantizedPair) -> Counter[Any]:
        return Counter(str(node.target) for node in each.quantized.graph.nodes if node.op == "call_function")

    assert ops(repaired.pair) == ops(pair)
    assert pair.float_graph is not None
    for x in HELD_OUT:
        assert torch.equal(repaired.pair.reference(x), pair.reference(x))


def test_the_plan_and_the_printed_code_give_the_same(repaired: pt2qa.Reconfiguration) -> None:
    assert {edit.kind for edit in repaired.plan.edits} == {"range", "round"}
    assert repaired.code_verified == "equal"
    plan = pt2qa.OverridePlan.from_json(repaired.plan_json)
    pair = clipped_pair(repaired.quantizer)
    assert pair.capture is not None
    again = pt2qa.quantize(pair.capture, pair.quantizer, batches(), overrides=plan, progress=False)
    for x in HELD_OUT:
        assert torch.equal(again.quantized(x), repaired.pair.quantized(x))


def test_a_saved_program_gives_the_same_without_pt2qa(repaired: pt2qa.Reconfiguration, tmp_path: Path) -> None:
    program = torch.export.export(repaired.pair.quantized, (HELD_OUT[0],))
    torch.export.save(program, tmp_path / "repaired.pt2")
    loaded = torch.export.load(tmp_path / "repaired.pt2")
    ops = [node.target for node in loaded.graph.nodes if node.op == "call_function"]
    assert {op.namespace for op in ops} == {"aten", "quantized_decomposed"}
    for x in HELD_OUT:
        assert torch.equal(loaded.module()(x), repaired.pair.quantized(x))


def test_repaired_again_it_is_left_alone(repaired: pt2qa.Reconfiguration) -> None:
    again = pt2qa.repair(repaired.pair, HELD_OUT, verify_code=False, progress=False)
    assert not again.met
    assert again.pair is repaired.pair
    assert "Nothing to repair: " in again.verdict


def test_one_batch_repeated_is_refused() -> None:
    pair, [batch] = clipped_pair(), batches(1)
    report = pt2qa.repair(pair, HELD_OUT, calibration=[batch] * 6, verify_code=False, progress=False)
    assert report.pair is pair
    assert report.plan.edits == ()
    tried = methods_named(None, "")
    for method, note in zip(tried, report.notes[-len(tried) :], strict=True):
        assert note.startswith(f"{method.name} not applied: calibration has one distinct batch")


def test_what_loses_on_the_other_half_is_refused() -> None:
    class Overfitted(Ranges):
        """Clamps everything of the half that it was not fitted to."""

        def fit(self, folds: Collection[int]) -> FittedRanges:
            scale = 1.0 if len(folds) == 2 else 0.01
            return FittedRanges(
                {each: replace(each.params, scale=float(each.params.scale) * scale) for each in self.groups}  # type: ignore[arg-type]
            )

    pair = clipped_pair()
    found = guarded(Overfitted, pair, Folds(pair, Data("calibration", batches())))
    assert found.fit is None
    assert found.gain < 0
    assert re.fullmatch(r"-[0-9.]+ dB on held-out calibration data; at least 0.1 dB needed", found.refused)


def test_a_weaker_repair_is_taken_where_the_whole_goes_too_far() -> None:
    class Overdone(Ranges):
        """Draws every end in twice as far, on a logarithmic scale."""

        def fit(self, folds: Collection[int]) -> FittedRanges:
            found = super().fit(folds)
            return FittedRanges({group: _between(group, each, 2.0) for group, each in found.groups.items()})

    pair = clipped_pair()
    data = Folds(pair, Data("calibration", batches()))
    found, sound = (guarded(each, pair, data) for each in (Overdone, Ranges))
    whole = Overdone.look(pair, data).fit((0, 1))
    assert found.fit == whole.weaker[0]
    assert found.gain > sound.gain / 2


def test_what_cannot_be_repaired_is_said() -> None:
    data = [torch.randn(4, 16) for _ in range(2)]
    pair = quantized_pair(Linears(), data[0], "xnnpack:mode=dynamic", batches=data)
    report = pt2qa.repair(pair, data, verify_code=False, progress=False)
    assert "ranges not applied: no activation has a range that calibration chose" in report.notes
    with pytest.raises(
        pt2qa.SelectionError, match=r"methods: got .'scales'., expected a list of shifting, equalization, ranges, "
    ):
        pt2qa.repair(clipped_pair(), HELD_OUT, methods=["scales"])
    trained = quantized_pair(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), batches()[0], "xnnpack", qat=True)
    with pytest.raises(pt2qa.SelectionError, match="was trained"):
        pt2qa.repair(trained, HELD_OUT)


def test_reconfigure_repairs_before_it_takes_anything_out_of_int8() -> None:
    pair = clipped_pair()
    target = measured(pair, HELD_OUT) + 6
    fixed = pt2qa.reconfigure(pair, HELD_OUT, target=target, fuse=False, verify_code=False, progress=False)
    assert fixed.met
    assert {edit.kind for edit in fixed.plan.edits} <= {"range", "bias"}
    paid = pt2qa.reconfigure(pair, HELD_OUT, target=target, fuse=False, repairs=(), verify_code=False, progress=False)
    assert "float" in {edit.kind for edit in paid.plan.edits}
    with pytest.raises(pt2qa.SelectionError, match="repairs: got 'ranges', expected a list"):
        pt2qa.reconfigure(pair, HELD_OUT, target=target, repairs="ranges")


def test_outputs_count_relative_to_their_size() -> None:
    """The range is that which serves the worst output, not the largest."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Clipped()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found = self.net(x)
            return found, found * 1e6

    torch.manual_seed(0)
    pair = quantized_pair(Two(), batches()[0], "xnnpack", batches=batches())
    data = Folds(pair, Data("calibration", batches()))
    weights = Ranges.look(pair, data).histograms[0]
    assert all(0 < float(each.sum()) < 1e6 for each in weights.values())


FLOW = """
import torch
from tests.repair.nets import Clipped, batches, clipped_pair
def flow():
    data = batches()
    return dict(model=clipped_pair().capture.module(), example_inputs=data[0], batches=data, evaluation=batches(2, 9))
def once():
    return flow() | {"batches": batches(1)}
"""


def test_from_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flow.py").write_text(FLOW, encoding="utf-8")
    files = ("-o", "r.safetensors", "--plan", "plan.json", "--code", "quantizer.py")
    result = CliRunner().invoke(main, ["repair", "flow.py:flow", "-q", "xnnpack", *files])
    assert result.exit_code == 0, result.output
    report = pt2qa.load("r.safetensors")
    assert isinstance(report, pt2qa.Reconfiguration)
    assert report.plan == pt2qa.OverridePlan.load("plan.json")
    assert Path("quantizer.py").read_text(encoding="utf-8") == report.code
    assert "Repaired at no cost at run time" in result.stdout
    result = CliRunner().invoke(main, ["repair", "flow.py:once", "-q", "xnnpack"])
    assert result.exit_code == 1
    assert "calibration has one distinct batch" in result.stdout
