"""A model that lost accuracy gets it back at the least cost, converted and measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pt2qa
from pt2qa._quantize.plain_flow import PlainFlow, plain_flow
from tests.flows import direct_sqnr, quantized_pair, residual_pair
from tests.models import Linears, images, residual
from tests.reconfigure.planted import HOSTILE, planted, planted_pair


def measured(pair: pt2qa.QuantizedPair, batches: list[torch.Tensor]) -> float:
    """The output SQNR of the graphs themselves."""
    with torch.no_grad():
        reference = torch.cat([pair.reference(batch) for batch in batches])
        return direct_sqnr(reference, torch.cat([pair.quantized(batch) for batch in batches]))


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_planted_layer_is_found_and_left_in_float_alone(quantizer: str) -> None:
    made, pair = planted(), planted_pair(quantizer)
    before = made.accuracy(pair.quantized)
    assert before < made.accuracy(made.model) - 0.05
    fixed = pt2qa.reconfigure(pair, made.batches, target=25.0, repairs=(), verify_code=False, progress=False)
    assert fixed.met
    [edit] = [edit for edit in fixed.plan.edits if edit.kind == "float"]
    assert HOSTILE in edit.ops
    assert not [each for each in fixed.plan.edits if each.kind == "bias" and each.ops[0] in edit.ops]
    assert made.accuracy(fixed.pair.quantized) >= made.accuracy(made.model) - 0.01
    stay = {(site.kind, site.name) for site in fixed.pair.sites}
    gone = [site for site in pair.sites if (site.kind, site.name) not in stay]
    assert ("weight", HOSTILE) in {(site.kind, site.name) for site in gone}
    assert all(any(name.startswith("deep") for name in (site.name, *site.readers)) for site in gone)
    assert not [note for note in fixed.notes if "meant to" in note]


@pytest.mark.parametrize("method", ["projection", "exact"])
def test_the_planted_layer_is_the_most_sensitive_by_both_methods(method: str) -> None:
    report = pt2qa.sensitivity(planted_pair(), planted().batches[:1], method=method, progress=False)  # type: ignore[arg-type]
    worst = max(report.rows, key=lambda row: row.noise)
    assert (worst.name, worst.kind) == (HOSTILE, "weight")


def test_what_is_reported_is_what_the_converted_graph_does() -> None:
    pair, batches = residual_pair(), [images()]
    before = measured(pair, batches)
    fixed = pt2qa.reconfigure(pair, batches, target=before + 3, verify_code=False, progress=False)
    assert fixed.met
    stages = {stage.name: stage for stage in fixed.stages}
    assert stages["before"].quality == pytest.approx(before, abs=1e-4)
    assert stages["converted"].quality == pytest.approx(measured(fixed.pair, batches), abs=1e-4)
    assert stages["converted"].quality >= before + 3
    assert stages["converted"].sites == len(fixed.pair.sites) < len(pair.sites)


def test_a_target_that_is_met_changes_nothing() -> None:
    pair = residual_pair()
    fixed = pt2qa.reconfigure(pair, [images()], target="sqnr>=1", verify_code=False, progress=False)
    assert fixed.met
    assert fixed.plan.edits == ()
    assert fixed.pair is pair
    assert fixed.verdict.startswith("The target is already met")


def test_a_target_out_of_reach_gives_the_best_and_says_so() -> None:
    fixed = pt2qa.reconfigure(
        residual_pair(), [images()], target=60.0, budget={"macs": 0.2}, verify_code=False, progress=False
    )
    assert not fixed.met
    assert "cannot be met within the budget" in fixed.verdict
    stages = {stage.name: stage for stage in fixed.stages}
    assert stages["converted"].macs <= 0.2
    assert stages["converted"].quality >= stages["before"].quality


def test_a_model_is_never_left_in_float_as_a_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 4))
    batch = torch.randn(2, 3, 8, 8)
    fixed = pt2qa.reconfigure(quantized_pair(model, batch), [batch], target=1000, verify_code=False, progress=False)
    assert not fixed.met
    assert fixed.verdict.startswith("The target cannot be met")
    assert fixed.pair.sites


def test_a_function_of_the_user_is_a_target() -> None:
    made, pair = planted(), planted_pair()
    asked: list[Callable[..., Any]] = []

    def top1(model: Callable[..., Any]) -> float:
        asked.append(model)
        return made.accuracy(model)

    target = pt2qa.Target(0.985, metric=top1, name="top-1", of_float=True)
    fixed = pt2qa.reconfigure(pair, made.batches, target=target, verify_code=False, progress=False)
    assert fixed.met
    assert made.accuracy(fixed.pair.quantized) >= 0.985 * made.accuracy(made.model)
    assert "top-1" in fixed.verdict
    assert asked[-1] is fixed.pair.quantized


def test_the_plan_does_the_same_on_a_model_that_was_captured_again(tmp_path: Any) -> None:
    made = planted()
    fixed = pt2qa.reconfigure(planted_pair(), made.batches, target=25.0, verify_code=False, progress=False)
    fixed.plan.save(tmp_path / "plan.json")
    again = pt2qa.capture(made.model, (made.batches[0],))
    plan = pt2qa.OverridePlan.load(tmp_path / "plan.json")
    pair = pt2qa.quantize(again, "xnnpack", made.batches, overrides=plan, progress=False)
    assert {(s.kind, s.name) for s in pair.sites} == {(s.kind, s.name) for s in fixed.pair.sites}
    assert torch.equal(pair.quantized(made.batches[0]), fixed.pair.quantized(made.batches[0]))


def test_the_report_survives_a_file_without_its_pair(tmp_path: Any) -> None:
    fixed = pt2qa.reconfigure(residual_pair(), [images()], target=40.0, verify_code=False, progress=False)
    fixed.save(tmp_path / "fixed.safetensors")
    loaded = pt2qa.load(tmp_path / "fixed.safetensors")
    assert isinstance(loaded, pt2qa.Reconfiguration)
    for part in ("rows", "curve", "stages"):
        assert loaded.to_pandas(part=part, extended=True).equals(fixed.to_pandas(part=part, extended=True))  # type: ignore[arg-type]
    assert loaded.text(width=100) == fixed.text(width=100)
    assert loaded.plan == fixed.plan
    with pytest.raises(pt2qa.ReportError, match="has no pair"):
        _ = loaded.pair


def test_the_curve_goes_from_no_edit_to_every_edit() -> None:
    fixed = pt2qa.reconfigure(residual_pair(), [images()], target=60.0, verify_code=False, progress=False)
    curve = fixed.to_pandas(part="curve")
    assert list(curve.columns) == ["name", "edits", "macs", "bytes", "predicted", "measured"]
    assert curve.macs.is_monotonic_increasing
    assert curve.predicted.dropna().is_monotonic_increasing
    assert curve.measured.notna().sum() >= 2


def test_what_cannot_be_searched_is_refused() -> None:
    pair, batches = residual_pair(), [images()]
    with pytest.raises(pt2qa.SelectionError, match="got neither target nor budget"):
        pt2qa.reconfigure(pair, batches)
    with pytest.raises(pt2qa.SelectionError, match="fallback: got 'int16', expected one that xnnpack supports: float"):
        pt2qa.reconfigure(pair, batches, target=40, fallback="int16")
    stranger = pt2qa.pair(pair.reference, pair.quantized)
    with pytest.raises(pt2qa.SelectionError, match=r"was not made by pt2qa\.quantize"):
        pt2qa.reconfigure(stranger, batches, target=40)


def test_an_iterator_of_calibration_batches_cannot_be_used_again() -> None:
    pair = quantized_pair(residual(), images(), batches=iter([images()]))
    with pytest.raises(pt2qa.SelectionError, match="which is exhausted"):
        pt2qa.reconfigure(pair, [images()], target=40)
    assert pt2qa.reconfigure(pair, [images()], target=40, calibration=[images()], verify_code=False, progress=False).met


def test_the_code_is_verified_at_the_end_or_says_that_it_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, batches = residual_pair("x86"), [images()]
    fixed = pt2qa.reconfigure(pair, batches, target=40.0, progress=False)
    assert fixed.code_verified.startswith("equal, with capture's rewriting (shared module); without it: ")
    assert "report.code (quantizer.py) against the new pair, bit for bit: equal, with" in fixed.summary()
    names: dict[str, Any] = {"__name__": "quantizer"}
    exec(fixed.code, names)
    assert pair.capture is not None
    again = names["quantize"](pair.capture.eager, (images(),), batches)
    assert torch.equal(again(images()), fixed.pair.quantized(images()))
    assert fixed.verdict in " ".join(names["__doc__"].split())
    off = pt2qa.reconfigure(pair, batches, target=40.0, verify_code=False, progress=False)
    assert off.code_verified == "not run: verification is switched off"
    assert (
        "report.code (quantizer.py) against the new pair, bit for bit: not run: verification is switched off."
        in off.summary()
    )

    def interrupted(pair: pt2qa.QuantizedPair, *, verify: bool = True, **options: Any) -> PlainFlow:
        if verify:
            raise KeyboardInterrupt
        return plain_flow(pair, verify=False, **options)

    monkeypatch.setattr("pt2qa._quantize.plain_flow.plain_flow", interrupted)
    stopped = pt2qa.reconfigure(pair, batches, target=40.0, progress=False)
    assert stopped.code_verified == "not run: interrupted"
    assert "interrupted: the code was not verified" in stopped.notes


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_ops_fall_back_to_dynamic_scales(quantizer: str) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 16) for _ in range(2)]
    model = Linears().eval()
    pair = quantized_pair(model, batches[0], quantizer, batches=batches)
    fixed = pt2qa.reconfigure(pair, batches, target=60, fallback="dynamic", repairs=(), progress=False)
    assert {edit.kind for edit in fixed.plan.edits} == {"dynamic"}
    ops = {node.target for node in fixed.pair.quantized.graph.nodes if node.op == "call_function"}
    assert any("choose_qparams" in str(op) for op in ops)
    with torch.no_grad():
        signal, other = (torch.cat([graph(x) for x in batches]) for graph in (model, fixed.pair.quantized))
    assert fixed.stages[-1].quality == pytest.approx(pt2qa.sqnr(signal, other), abs=1e-3)
    assert fixed.stages[-1].sites == len(fixed.pair.sites) > fixed.stages[1].sites
    # The simulation has the same ops in float: that is their sites off, which are the last of the curve.
    assert fixed.stages[1].name == "simulated"
    assert fixed.stages[1].quality == fixed.curve[-1].measured > fixed.stages[-1].quality
    assert not fixed.met
    assert "% of the MACs in float or dynamic" in fixed.verdict
    assert any("converted, they are dynamic" in note for note in fixed.notes)
    assert fixed.code_verified == "equal"
