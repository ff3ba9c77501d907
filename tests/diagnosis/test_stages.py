"""Stages before quantization, kernels behind it, and repairs: of outputs and reports that a test makes up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import pt2qa
from pt2qa._diagnosis.case import Case
from pt2qa._diagnosis.hypotheses import repairs, stages
from pt2qa._repair.equalization import Equalization
from pt2qa._repair.ranges import Ranges
from pt2qa._report.set_apart import SetApart
from pt2qa._simulator.data import Data
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Treatment
from pt2qa.overrides.plan import Edit
from tests.diagnosis import facts
from tests.diagnosis.facts import Changed, joined, judged_by, said, with_facts


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("reference", "other", "sqnr"),
    [
        ([[1.0, 1.0]], [[1.0, 0.9]], 10 * math.log10(2 / 0.01)),
        ([[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 0.9]], 10 * math.log10(2 / 0.01)),  # the worst
        ([[1.0, 1.0], [1.0]], [[1.0, 0.9], [1.0, 2.0]], 10 * math.log10(2 / 0.01)),  # other shapes say nothing
        ([[math.nan]], [[1.0]], math.nan),
        ([[1.0]], [[1.0]], math.inf),
        ([], [], math.nan),
    ],
)
def test_stages_are_compared_by_their_worst_output(reference: Any, other: Any, sqnr: float) -> None:
    found = stages._sqnr(list(map(torch.tensor, reference)), list(map(torch.tensor, other)))
    assert found == pytest.approx(sqnr, nan_ok=True, rel=1e-5)


def test_integers_are_not_compared() -> None:
    assert math.isnan(stages._sqnr([torch.tensor([1])], [torch.tensor([2])]))


def outputs_of(case: Case, patch: pytest.MonkeyPatch, **by_stage: float) -> tuple[Case, list[Any]]:
    """What is found if each stage is off by an error with this root mean square, of outputs of 1."""
    made = judged_by(case, outputs=lambda values, on: [torch.ones(1000) * (1.5 if on else 1 + by_stage["prepared"])])
    before = {name: [torch.full((1000,), 1 + error)] for name, error in by_stage.items() if name != "prepared"}
    patch.setattr(stages, "Stages", lambda pair: SimpleNamespace(before=lambda batch, values: dict(before)))
    return made, list(stages.changed(made))


def test_capture_or_prepare_that_changed_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    case = joined("xnnpack")
    case = Case(case.pair, case.judge, case.data, replace(case.now, outputs=(("output", 20.0),)))

    def found(**by_stage: float) -> list[Any]:
        made, hypotheses = outputs_of(case, monkeypatch, **by_stage)
        assert made.judge.forwards == case.judge.forwards + len(by_stage) - 1
        return hypotheses

    # A tenth of the noise: of an error of 0.1, 0.0316.
    assert found(model=0.0, capture=0.031, prepared=0.031) == []
    (capture,) = found(model=0.0, capture=0.032, prepared=0.032)
    relative = -20 * math.log10(0.032)
    rest = -20 * math.log10((0.5 - 0.032) / 1.032)
    assert said(capture, "gain") == {
        "cause": "capture-changed",
        "name": "",
        "evidence": f"SQNR on the first batch: capture {relative:.1f} dB relative to model; quantized 6.0 dB relative "
        f"to model, {rest:.1f} dB relative to capture (stages)",
        "remedy": "compare the two graphs op by op with pt2qa.compare_graphs; no quantizer setting can help",
        "gain": pytest.approx(math.nan, nan_ok=True),
    }
    assert capture.treatment == Treatment()
    (prepare,) = found(model=0.0, capture=0.0, prepared=0.032)
    assert prepare.cause == "prepare-changed"
    assert "prepared 29.9 dB relative to capture" in prepare.evidence
    assert found(model=math.nan, capture=0.0, prepared=0.0) == []
    nan = Case(case.pair, case.judge, case.data, replace(case.now, outputs=(("output", math.nan),)))
    assert list(stages.changed(nan)) == []


def constants(case: Case, *values: tuple[str, Tensor, Tensor], **given: Any) -> list[Any]:
    """What is found of constants that stay in float, by reader: in the reference, and in the converted graph."""
    made = [
        Changed(None, site=None, mutated=False, reader=reader, argument=2, reference=reference, quantized=quantized)
        for reader, reference, quantized in values
    ]
    for each in made:
        each.__dict__.update(given)
    program = Changed(case.pair.program, constants=tuple(made))
    pair: Any = Changed(case.pair, program=program)
    own = Case(pair, case.judge, case.data, case.now)
    own.constants, own.fitted_weights = {}, {}
    return list(stages.constants(own))


def test_constants_are_the_float_models() -> None:
    case = joined("xnnpack")
    ones = torch.ones(4)
    near, far = ones * 1.0009, ones * 1.0011
    assert constants(case, ("a/linear", ones, near)) == []
    (found,) = constants(case, ("a/linear", ones, far))
    assert said(found) == {
        "cause": "prepare-changed",
        "name": "a/linear",
        "evidence": "a weight or bias has 59.2 dB relative to its float value",
        "remedy": "load the float model's value, and find what changed it before the converted graph, such as batch "
        "norm folding with other statistics",
    }
    assert found.treatment == Treatment(restored=frozenset({("a/linear", 2)}))
    for quiet in ({"site": 1}, {"mutated": True}, {"quantized": 1.0}, {"reference": 1.0}):
        assert constants(case, ("a/linear", ones, far), **quiet) == []
    assert constants(case, ("a/linear", torch.full((4,), math.nan), far)) == []


def test_constants_of_most_ops_are_another_checkpoint() -> None:
    """There are three weights: two ops are more than half of them."""
    case = joined("xnnpack")
    ones, far = torch.ones(4), torch.ones(4) * 2
    (whole,) = constants(case, ("a/linear", ones, far), ("b/linear", ones, far))
    assert said(whole) == {
        "cause": "prepare-changed",
        "name": "a/linear",
        "evidence": "a weight or bias and 1 others are not the float model's: here it has 0.0 dB relative to its float "
        "value",
        "remedy": "load the weights of the float model: those of the converted graph are from another checkpoint",
    }
    assert whole.treatment == Treatment(restored=frozenset({("a/linear", 2), ("b/linear", 2)}))
    assert len(constants(case, ("a/linear", ones, far), ("a/linear", ones, far))) == 2  # one op


def test_weights_that_are_others_are_told_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    case = joined("xnnpack")
    monkeypatch.setattr(stages, "changed_weights", lambda case: {3: 2.5})
    made = with_facts(case)
    (found,) = stages.constants(made)
    assert (found.name, found.evidence) == (
        "b/linear",
        "a weight or bias is 2.5 LSB from its float value; rounding is half an LSB at most",
    )
    assert [place for place, _ in found.treatment.played] == [case.places[3]]


def test_what_is_first_not_finite_is_kept_in_float() -> None:
    case = joined("xnnpack")
    fault = SetApart(batch=0, samples=8, sample=-1, what="NaN", side="quantized", name="a/linear")
    (found,) = stages.nonfinite(with_facts(case, fault=fault))
    assert said(found) == {
        "cause": "nonfinite",
        "name": "a/linear",
        "evidence": "NaN appears first at a/linear, only in the quantized model",
        "remedy": "keep the op in float (float: a/linear)",
        "cost": pytest.approx(2 / 7),
    }
    assert found.treatment == Treatment(floats=(Edit("float", ("a/linear",)),))
    assert list(stages.nonfinite(with_facts(case, fault=replace(fault, side="reference")))) == []
    assert list(stages.nonfinite(with_facts(case, fault=replace(fault, name="unknown")))) == []
    assert list(stages.nonfinite(with_facts(case, fault=None))) == []


def report(converted: float, kernels: float, *suspects: str, **given: Any) -> Any:
    rows = [SimpleNamespace(name="converted", sqnr=converted), SimpleNamespace(name="deployed", sqnr=kernels)]
    made = [SimpleNamespace(name=name, isolated_max_lsb=3.25) for name in suspects]
    return SimpleNamespace(**{"stages": rows, "suspects": made, **given})


def costly(case: Case, found: Any, gains: Any = None, backend: Any = None) -> list[Any]:
    program = SimpleNamespace(backend=backend, sqnr=gains or (lambda treatment: 29.0))
    return list(stages._costly(case, found, cast(Any, program)))


def test_kernels_that_cost_much_are_told_with_the_first_suspect() -> None:
    case = joined("xnnpack")
    foreign = judged_by(case, pair=replace(case.pair, recipe=None))
    foreign = Case(case.pair, foreign.judge, case.data, case.now)
    (found,) = costly(foreign, report(30.0, 20.0, "a/linear", "b/linear"))
    assert said(found, "gain") == {
        "cause": "deployed-kernel",
        "name": "a/linear",
        "others": ("b/linear",),
        "evidence": "converted 30.0 dB, deployed 20.0 dB; on the same inputs, its kernel differs from the converted "
        "graph by up to 3.25 LSB (deployed kernels)",
        "remedy": "use another kernel or float for a/linear, b/linear; see the notes of "
        "diagnosis.reports['deployed'] for known issues",
        "gain": pytest.approx(math.nan, nan_ok=True),
    }
    assert costly(foreign, report(30.0, 20.0)) == []  # nobody is at fault
    for missing in ("converted", "deployed"):
        rows = [each for each in report(30.0, 20.0).stages if each.name != missing]
        assert costly(foreign, report(30.0, 20.0, "a/linear", stages=rows)) == []
    assert costly(foreign, report(40.05, 40.0, "a/linear")) == []  # too little
    assert len(costly(foreign, report(43.02, 40.0, "a/linear"))) == 1  # half of all noise
    plain = Case(case.pair, case.judge, case.data, case.now)
    made: Any = pt2qa.DeployedReport(
        *((), (), (), (), (), "none"), notes=(), quantizer="x", model="M", environment=case.pair.environment
    )
    assert [each.gain != each.gain for each in costly(plain, report(30.0, 20.0, "a/linear"), backend=made)] == [True]


def test_ops_with_slow_or_wrong_kernels_are_kept_in_float() -> None:
    case = joined("xnnpack")
    (found,) = costly(case, report(30.0, 20.0, "relu", "c/linear"))
    assert found.cause == "deployed-kernel"
    assert found.treatment == Treatment(floats=(Edit("float", ("a/linear", "relu")), Edit("float", ("c/linear",))))
    assert found.remedy == "keep these ops in float: a/linear, relu, c/linear"
    assert found.gain == 9.0
    assert found.cost == pytest.approx(3 / 7)
    assert costly(case, report(30.0, 20.0, "unknown")) == []
    assert costly(with_facts(case, annotations=None), report(30.0, 20.0, "relu")) == []
    five = ("unknown1", "unknown2", "unknown3", "unknown4", "c/linear")
    assert costly(case, report(30.0, 20.0, *five)) == []  # the fifth is not tried
    assert len(costly(case, report(30.0, 20.0, *five[1:]))) == 1


def test_saturated_sums_are_tried_where_the_quantizer_has_the_option() -> None:
    case = with_facts(joined("x86"))
    assert case.options["reduce_range"] is False
    narrower = Treatment(options=(("reduce_range", True),))

    def found(gain: float) -> list[Any]:
        made = report(30.0, 20.0, "a/linear")
        return costly(case, made, lambda treatment: 20.0 + gain if treatment == narrower else 29.0)

    (saturation,) = found(5.0)  # half of what kernels cost
    assert (saturation.cause, saturation.gain, saturation.treatment) == ("saturation", 5.0, narrower)
    assert saturation.remedy == "quantize with reduce_range=true, or deploy on CPUs with VNNI"
    assert [each.cause for each in found(4.9)] == ["saturation", "deployed-kernel"]
    case.options = {"reduce_range": True}
    assert [each.cause for each in found(9.0)] == ["deployed-kernel"]


def test_the_best_remedy_for_kernels_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    case = joined("xnnpack")
    made = [facts.Hypothesis("deployed-kernel", str(gain), "", "", Treatment(), gain=gain) for gain in (1.0, 3.0, 2.0)]
    made.append(replace(made[0], gain=None, name="none"))
    little = replace(made[0], gain=0.5, name="0.5")
    monkeypatch.setattr(stages, "_costly", lambda *given: iter([made[-1], little]))
    assert stages.Kernels(case, "own", [(case.pair, cast(Any, "known"))]).hypotheses() == [little]
    monkeypatch.setattr(stages, "_costly", lambda *given: iter(made))
    lowered: list[Any] = []
    monkeypatch.setattr(
        stages, "compare_deployed", lambda pair, batches, **given: lowered.append((pair, given)) or given
    )
    kernels = stages.Kernels(case, "own")
    assert [each.name for each in kernels.hypotheses()] == ["3.0"]
    first = kernels.of(case.pair)
    assert kernels.of(case.pair) is first  # lowered once
    ((pair, given),) = lowered
    assert pair is case.pair
    assert given == {"backend": "own", "metric": None, "inputs_of": None, "mask": None, "progress": False}
    own: Any = pt2qa.DeployedReport(
        *((), (), (), (), (), "none"), notes=(), quantizer="x", model="M", environment=case.pair.environment
    )
    assert [each.name for each in stages.Kernels(case, own).hypotheses()] == ["1.0", "3.0", "2.0", "none"]
    assert stages.Kernels(case, own).of(cast(Any, "another")) is own


def test_data_for_repairs_are_those_that_calibrate() -> None:
    case = joined("xnnpack")
    recipe: Any = case.judge.recipe
    data, why = repairs.calibration_of(case, Treatment())
    assert why == ""
    assert data is not None
    assert data.batches is recipe.data.batches
    other = Data("x", [])
    assert repairs.calibration_of(case, Treatment(data=other)) == (other, "")
    advice = Treatment(as_deployed=True)
    reason = "a remedy above must be applied to the model or the quantizer first"
    assert repairs.calibration_of(case, advice) == (None, reason)
    for change, why in (
        ({"data": None}, "the pair was calibrated on an iterator, which is exhausted"),
        ({"qat": True}, "the pair was trained (QAT), so its ranges and weights are learned"),
    ):
        made = judged_by(case, pair=replace(case.pair, recipe=replace(recipe, **change)))
        assert repairs.calibration_of(made, Treatment()) == (None, why)
    foreign = judged_by(case, pair=replace(case.pair, recipe=None))
    assert repairs.calibration_of(foreign, Treatment()) == (None, "the pair was not made by pt2qa.quantize")


def fit(patch: pytest.MonkeyPatch, method: Any = Ranges, noise: Any = None, **given: Any) -> Any:
    """What a method finds for the relu and the output."""
    edits = (Edit("int8", ("relu",)), Edit("int8", ("c/linear", "x")))
    own = {"fit": SimpleNamespace(edits=edits), "doubt": "", "refused": "", "gain": 1.25, **given}
    patch.setattr(repairs, "guarded", lambda *given: SimpleNamespace(**own))
    patch.setattr(repairs, "Folds", lambda *given: None)
    made = with_facts(joined("xnnpack"), {2: 0.1, 8: 0.3, 0: 0.2} if noise is None else noise)
    return repairs.fitted(made, Treatment(), cast(Any, None), method)


def test_a_repair_is_told_at_its_noisiest_op(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit(monkeypatch)
    assert said(found) == {
        "cause": "range",
        "name": "c/linear",
        "others": ("c/linear", "x", "relu"),
        "evidence": "2 edits fitted to the output error; +1.2 dB on held-out calibration data",
        "remedy": "ranges, as pt2qa.repair does: 2 edits in the plan",
    }
    assert [edit.ops for edit in found.treatment.edits] == [("relu",), ("c/linear", "x")]
    assert fit(monkeypatch, fit=None, refused="nothing to fit") == "nothing to fit"
    doubt = fit(monkeypatch, doubt="which may be chance", gain=-0.5)
    assert doubt == "-0.5 dB on held-out calibration data, which may be chance"
    assert fit(monkeypatch, method=Equalization).cause == "norm-outliers"
    monkeypatch.setattr(repairs, "with_outliers", lambda case: [8, 2])
    monkeypatch.setattr(repairs, "evidence_of_outliers", lambda case, sites: f"outliers at {sites}")
    outliers = fit(monkeypatch, method=Equalization)
    assert (outliers.cause, outliers.name) == ("outlier-channel", "c/linear")
    assert outliers.others == ("c/linear", "relu", "c/linear", "x", "relu")
    assert outliers.evidence.startswith("outliers at [8, 2]; 2 edits fitted to the output error; +1.2 dB")
    assert fit(monkeypatch).cause == "range"


def test_outlier_channels_are_equalized_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    case = joined("xnnpack")
    made = facts.Hypothesis("outlier-channel", "", "", "", Treatment())
    monkeypatch.setattr(repairs, "fitted", lambda case, state, data, method: made if method is Equalization else None)
    assert list(repairs.equalized(case)) == []
    monkeypatch.setattr(repairs, "with_outliers", lambda case: [8])
    assert list(repairs.equalized(case)) == [made]
    monkeypatch.setattr(repairs, "fitted", lambda *given: "refused")
    assert list(repairs.equalized(case)) == []
    monkeypatch.setattr(repairs, "calibration_of", lambda *given: (None, "none"))
    assert list(repairs.equalized(case)) == []


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [((8, 8, 8, 8), 2), ((4, 4, 4, 4, 4), 4), ((32, 1, 1), 2), ((1, 1), 2), ((5, 5, 5, 1, 9), 4), ((20,), 1)],
)
def test_a_few_batches_show_what_a_repair_gives(sizes: tuple[int, ...], kept: int) -> None:
    data = Data("calibration", [torch.zeros(size, 8) for size in sizes])
    assert len(list(repairs._first(joined("xnnpack").pair, data))) == kept


def test_the_bound_of_repairs_is_never_below_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case = joined("xnnpack")
    low, high = Outcome(0.0, (("output", 0.0),)), Outcome(99.0, (("output", 99.0),))
    assert repairs.bound(case, Treatment(), high) == (high, Treatment())
    found, ranges = repairs.bound(case, Treatment(), low)
    assert found is not None
    assert found.value > 0
    assert {edit.kind for edit in ranges.edits} == {"range"}
    assert ranges == Treatment(edits=ranges.edits)
    best, _ = repairs.bound(case, Treatment(), case.now)
    assert best is not None
    assert best.value >= case.now.value
    monkeypatch.setattr(repairs, "calibration_of", lambda *given: (None, "none"))
    assert repairs.bound(case, Treatment(), low) == (None, Treatment())
