"""The sentences of a diagnosis."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pt2qa import Target
from pt2qa._diagnosis.report import CauseRow, FigureRow, TriedRow
from pt2qa._diagnosis.verdict import next_command, search_target, story_of, target_of, unit_of, verdict_of
from pt2qa._trials.evidence import Gain
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Treatment
from pt2qa.overrides.plan import Edit
from pt2qa.plugins import GenericPlugin, resolve
from tests.check.plain_quantizer import PlainQuantizer

PLAYED = Treatment(exact=frozenset({("activation", "a", 0)}))
EDITS = Treatment(edits=(Edit("int8", ("a",)),))
FLOATS = Treatment(floats=(Edit("float", ("a",)),))


def score(model: Any) -> float:
    raise NotImplementedError


def of_db(value: float, **given: Any) -> Outcome:
    return Outcome(value, (("output", value),), **given)


def sampled(value: float) -> Outcome:
    """With two samples, so that other data have an interval: 20 ± a few dB."""
    signal, noise = torch.tensor([[100.0, 100.0]]).double(), torch.tensor([[0.9, 1.1]]).double()
    return of_db(value, signal=signal, noise=noise)


def row(**given: Any) -> CauseRow:
    own = {"rank": 1, "cause": "precision", "name": "a", "module": "", "evidence": "", "remedy": "the remedy"}
    own |= {"gain": 0.1, "gain_in_sequence": 0.1, "cost": 0.0, "sentence": "few bits", "others": (), "source": ""}
    return CauseRow(**{**own, "quality": -0.5, "how": "simulated", **given})


def searched(now: Outcome, needed: float | None = None, *rows: CauseRow, **given: Any) -> Any:
    """What a search has found; without a metric unless there is a target of one."""
    target = given.pop("target", None if needed is None else Target(needed, metric=score))
    judge = SimpleNamespace(target=target, metric=None if target is None else target.metric)
    judge.recipe, judge.float_value = given.pop("recipe", None), given.pop("float_value", math.nan)
    sites = [SimpleNamespace(index=index, name=f"site{index}", kind="weight") for index in range(5)]
    shares = given.pop("shares", (0.0,) * 5)
    case = SimpleNamespace(
        now=now,
        fault=given.pop("fault", None),
        judge=judge,
        is_judged_on_calibration=given.pop("calibrating", False),
        pair=SimpleNamespace(sites=sites, program=SimpleNamespace(whole_graphs=given.pop("whole", ()))),
        noise=lambda index: shares[index],
        noises=SimpleNamespace(signal=2.0, measured=2.0),
        names=lambda indices: tuple(sites[index].name for index in indices),
    )
    own = {"rows": rows, "bounds": {}, "from_repair": None, "repair_helps": False, "state": Treatment(), "quality": now}
    own |= {
        "out_of_reach": None,
        "clamped": None,
        "beyond": [],
        "tried": [],
        "deployed": {},
        "worth": SimpleNamespace(least=0.01),
    }
    return SimpleNamespace(case=case, needed=needed, **{**own, **given})


def said(search: Any, after: Outcome | None = None, *, interrupted: bool = False) -> str:
    return verdict_of(search, after, interrupted=interrupted)


@pytest.mark.parametrize("needed", [-0.4, 0.0, 3.0])
def test_a_target_of_any_sign_is_not_met(needed: float) -> None:
    found = Outcome(-0.5, (("output", 9.0),))
    verdict = said(searched(found, needed, row()), found)
    assert verdict == f"-0.5 score, 9.0 dB. precision at a: few bits (+0.1 score). The target, {needed:g}, is not met."


def test_a_first_cause_is_told_with_its_gain_and_others_are_counted() -> None:
    now = of_db(12.0)
    assert said(searched(now, None, row(name="", gain=8.0))) == "12.0 dB. precision: few bits (+8 dB)."
    assert said(searched(now, None, row(gain=math.nan))) == "12.0 dB. precision at a: few bits (gain not measured)."
    two = searched(now, None, row(), row(cause="bias"), quality=of_db(31.0))
    first = "12.0 dB. precision at a: few bits (+0.1 dB); with"
    assert said(two, of_db(30.0)) == f"{first} 1 more cause, 30.0 dB after all remedies."
    assert said(two) == f"{first} 1 more cause, 31.0 dB after all remedies."
    two.rows, two.state = (*two.rows, row()), PLAYED  # what no pair has was measured on the simulator
    assert said(two, of_db(30.0)) == f"{first} 2 more causes, 31.0 dB after all remedies."
    assert said(two, interrupted=True).startswith("Interrupted. So far: 12.0 dB. precision at a")


def test_a_target_that_is_met_says_what_other_data_have() -> None:
    target = Target(25.0)
    after = sampled(26.0)
    met = said(searched(of_db(12.0), 25.0, row(), target=target), after)
    assert met.endswith(f"(+0.1 dB). The target, 25, is met; samples like these have {after.lowest:.1f} dB or more.")
    assert said(searched(of_db(12.0), 25.0, row(), target=target), of_db(25.0)).endswith("The target, 25, is met.")
    assert said(searched(of_db(12.0), 25.0, row()), after).endswith("The target, 25, is met.")  # it is no metric's
    enough = said(searched(sampled(25.0), 25.0, target=target))
    assert enough == f"Nothing to do: 25.0 dB, the target is 25; samples like these have {after.lowest:.1f} dB or more."
    assert said(searched(of_db(24.0), 25.0, target=target)) == "24.0 dB; no remedy reaches the target, 25."
    assert said(searched(of_db(math.nan), 25.0, row(), target=target), of_db(math.nan)).endswith("is not met.")


def test_a_target_that_is_met_does_not_hide_values_that_are_clamped() -> None:
    target = Target(10.0)
    beyond = [SimpleNamespace(name=name, saturation=part) for name, part in (("conv", 0.94), ("x", 0.5), ("fc", 0.02))]
    given: dict[str, Any] = {"target": target, "beyond": beyond[:1]}
    told = "94.00 % of the values at conv are outside the calibrated range and clamped"
    one = searched(of_db(10.0), 10.0, **given)
    assert said(one) == f"The target is met: 10.0 dB, the target is 10. {told}; no remedy for that was measured."
    many = f"{told}, and many at 2 more sites; no remedy for that was measured."
    assert said(searched(of_db(10.0), 10.0, target=target, beyond=beyond)).endswith(f"the target is 10. {many}")
    changed = searched(of_db(10.0), 10.0, row(cause="capture-changed", gain=math.nan), **given)
    assert said(changed).endswith(f"The target, 10, is met. {told}; no remedy for that was measured.")
    assert next_command(changed, None, interrupted=False) == "the remedy"


def test_data_that_calibrate_and_repairs_are_told_after_the_causes() -> None:
    gain = Gain(2.0, 1.0, 3.0)
    given = {"calibrating": True, "from_repair": gain, "repair_helps": True}
    assert said(searched(of_db(12.0), None, row(), **given)) == (
        "12.0 dB. precision at a: few bits (+0.1 dB). These samples also calibrate the model: others may gain less. "
        "pt2qa.repair gives +2 dB for free (+1 to +3 on samples like these)."
    )


def test_the_quality_names_what_is_worst() -> None:
    now = Outcome(
        12.0,
        (("a", 30.0), ("b", 12.0)),
        samples=8,
        worst_sample=0,
        worst_sample_sqnr=8.1,
        worst_sample_share=0.6,
        labels=0.5,
    )
    first = "12.0 dB at b, the worst of 2 outputs, worst sample 0 at 8.1 dB"
    assert said(searched(now, None, row())).startswith(
        f"{first} with 60.00 % of the noise, 50.00 % of 8 labels kept. precision"
    )
    half = Outcome(12.0, (("b", 12.0),), worst_sample=2, worst_sample_sqnr=8.1, worst_sample_share=0.5)
    assert said(searched(half, None, row())).startswith("12.0 dB, worst sample 2 at 8.1 dB. precision")
    metric = Outcome(0.75, (("a", 30.0), ("b", 12.0)))
    assert said(searched(metric, 0.9, row())).startswith("0.75 score, 12.0 dB at b, the worst of 2 outputs. precision")
    assert said(searched(of_db(math.inf))) == "Nothing to do: the outputs are equal to the float model's."
    assert said(searched(Outcome(1.0, (("a", math.inf),)), 1.0)).startswith("Nothing to do: 1 score, inf dB")


def test_no_number_is_no_diagnosis() -> None:
    found = Outcome(math.nan, (("output", 9.0),))
    assert said(searched(found, 0.5)) == "No diagnosis: score of the quantized model is NaN."
    fault = SimpleNamespace(what="NaN", name="a/log", side="quantized", batch=3)
    assert said(searched(of_db(math.nan), fault=fault)) == (
        "No diagnosis: the outputs have no SQNR: NaN at a/log in the quantized model, batch 3."
    )
    assert said(searched(of_db(math.nan)), interrupted=True) == "Interrupted before a cause was found: nan dB."


def test_without_a_cause_it_says_why() -> None:
    """From what decides first to what decides last."""
    spread = (0.01, 0.42, 0.02, 0.3, 0.25)  # 90 % are the three largest
    over = ", spread over 3 sites"
    gain = Gain(2.0, 1.0, 3.0)
    free = " pt2qa.repair gives +2 dB for free (+1 to +3 on samples like these)."
    low, high = of_db(15.0), of_db(20.0)
    poor, fine, nan = (Outcome(value, (("o", value),)) for value in (19.9, 20.0, math.nan))

    def of(now: Outcome, **given: Any) -> str:
        return said(searched(now, **{"shares": spread, "from_repair": Gain(-1.0), **given}))

    none = " Ranges as pt2qa.repair fits them give nothing more."
    repaired = {"from_repair": gain, "repair_helps": True, "out_of_reach": 30.0}
    assert of(high, **repaired) == f"No cause found: 20.0 dB{over}.{free}"
    assert of(high, out_of_reach=30.0) == ("No certain remedy: 20.0 dB; ranges that fit the data would give 30.0 dB.")
    beyond = "Values beyond the calibrated range, most at conv, cause 90.00 % of the noise:"
    certain = f"No certain remedy: 20.0 dB. {beyond} calibrate on more samples.{none}"
    assert of(high, clamped=("conv", 0.9, True)) == certain
    assert (
        of(high, clamped=("conv", 0.9, False))
        == f"Nothing to do: 20.0 dB{over}. {beyond} other data may lose more.{none}"
    )
    tried = [TriedRow("bias", "", "", 1.0, "too little"), TriedRow("range", "", "", 3.0, "chance")]
    tried += [TriedRow("observer", "", "", 2.0, "no"), TriedRow("saturation", "", "", math.nan, "no")]
    assert of(high, out_of_reach=30.0, tried=tried).endswith(
        "would give 30.0 dB. The best of those that were tried is range, +3 dB: chance."
    )
    little = [TriedRow("bias", "", "", 0.5, "chance")]
    assert of(high, out_of_reach=30.0, tried=little).endswith("those that were tried is bias, +0.5 dB: chance.")
    nothing = [TriedRow("bias", "", "", 0.0, "none")]
    assert of(high, out_of_reach=30.0, tried=nothing).endswith("would give 30.0 dB.")
    held = {"shares": (0.1, 0.6, 0.0, 0.0, 0.55)}
    one = f"No measured remedy helps: 15.0 dB. Most of the noise comes from one weight: site1.{none}"
    assert of(low, **held, bounds={"fitted": poor}) == one
    assert of(low, shares=(0.5, 0.5, 0.0, 0.0, 0.0)).startswith("No single cause")  # half is not most
    amplified = ". The model itself amplifies rounding errors: even with ranges fitted per channel, 8 bits give "
    assert (
        of(low, bounds={"x": nan, "fitted": of_db(10.0), "by channel": poor})
        == f"15.0 dB{amplified}19.9 dB{over}.{none}"
    )
    whole = {"whole": (3, 1)}
    nested = f"No cause found: 20.0 dB{over}. The noise inside site1, site3 is not attributed.{none}"
    assert of(high, bounds={"fitted": fine}, **whole) == nested
    assert of(low, bounds={"fitted": fine}) == f"No single cause: 15.0 dB{over}.{none}"
    assert of(low, bounds={}) == f"No single cause: 15.0 dB{over}.{none}"
    assert of(high, **held) == f"Nothing to do: 20.0 dB, spread over 2 sites.{none}"
    assert of(high, shares=(0.0,) * 5) == f"Nothing to do: 20.0 dB.{none}"
    assert of(high, shares=(0.0, 1.0, 0.0, 0.0, 0.0)) == f"Nothing to do: 20.0 dB, spread over 1 site.{none}"
    assert of(high, shares=(0.9, 0.1, 0.0, 0.0, 0.0)) == f"Nothing to do: 20.0 dB, spread over 1 site.{none}"
    more = " Ranges as pt2qa.repair fits them give +0.5 dB more."
    assert of(high, from_repair=Gain(0.5)) == f"Nothing to do: 20.0 dB{over}.{more}"
    doubted = f"{more[:-1]} on these samples, and perhaps nothing on others."
    assert of(high, from_repair=Gain(0.5, -1.0, 2.0)) == f"Nothing to do: 20.0 dB{over}.{doubted}"
    assert of(high, from_repair=Gain(0.0)).endswith(none)
    assert of(high, from_repair=Gain()) == of(high, from_repair=None) == f"Nothing to do: 20.0 dB{over}."


def test_what_to_call_next() -> None:
    xnnpack, generic = resolve("xnnpack"), GenericPlugin(PlainQuantizer())
    known, own = SimpleNamespace(plugin=xnnpack), SimpleNamespace(plugin=generic)
    now, poor = of_db(30.0), of_db(12.3)

    def of(search: Any, after: Outcome | None = None, *, interrupted: bool = False) -> str:
        return next_command(search, after, interrupted=interrupted)

    assert of(searched(poor), interrupted=True) == "pt2qa.diagnose(pair, batches)"
    assert of(searched(now)) == ""
    assert of(searched(poor, recipe=known, repair_helps=True)) == "pt2qa.repair(pair, batches)"
    assert of(searched(poor, recipe=known)) == "pt2qa.reconfigure(pair, batches, target=16)"
    assert of(searched(of_db(20.0))) == ""
    assert of(searched(poor)) == "pt2qa.sensitivity(pair, batches)"  # made elsewhere: no search quantizes it again
    assert of(searched(poor, 25.0, recipe=known, target=Target(25.0), repair_helps=True)).endswith("target=25)")
    assert of(searched(poor, 25.0, row(), recipe=known, target=Target(25.0)), of_db(24.0)).endswith("target=25)")
    assert of(searched(poor, 25.0, row(), target=Target(25.0)), of_db(24.0)) == "the remedy"
    assert of(searched(poor, 25.0, row(), target=Target(25.0), repair_helps=True), of_db(25.0)) == "the remedy"
    quantize = "pt2qa.quantize(capture, "
    assert of(searched(poor, None, row(), recipe=known)) == "the remedy"  # nothing to quantize with
    assert of(searched(poor, None, row(), state=EDITS)) == "the remedy"  # made elsewhere
    assert of(searched(poor, None, row(), recipe=known, state=EDITS.then(PLAYED))) == "the remedy"
    with_plan = f"{quantize}'xnnpack', calibration, overrides=diagnosis.plan)"
    for state in (EDITS, FLOATS):
        assert of(searched(poor, None, row(), recipe=known, state=state, repair_helps=True)) == with_plan
    assert of(searched(poor, None, row(), recipe=own, state=EDITS)).startswith(f"{quantize}quantizer, calibration, ")
    data: Any = SimpleNamespace(name="batches")
    options = Treatment(options=(("per_channel", False),), data=data)
    found = of(searched(poor, None, row(), recipe=known, state=options))
    assert found == f"{quantize}'xnnpack:per_channel=false', batches)"


def test_what_a_search_should_reach() -> None:
    assert search_target(searched(of_db(12.3)), None) == 16
    assert search_target(searched(of_db(20.0)), None) is None
    assert search_target(searched(of_db(12.3), None, row()), None) is None
    needed = searched(of_db(12.3), 25.0, quality=of_db(20.0))
    assert [search_target(needed, after) for after in (None, of_db(24.9), of_db(25.0))] == [25.0, 25.0, None]


def test_a_target_in_words() -> None:
    now = of_db(12.0)
    share = Target(0.99, metric=score, of_float=True)
    assert target_of(searched(now)) == ""
    assert target_of(searched(now, 30.0, target=Target(30.0))) == "at least 30"
    assert target_of(searched(now, 0.9543, target=share)) == "at least 0.9543, 99 % of float"
    assert target_of(searched(now, 0.792, target=Target(-math.inf, metric=score))) == "at least 0.792, 99 % of float"
    assert target_of(searched(now, 0.7, target=None)) == ""
    assert unit_of(searched(now, 30.0, target=Target(30.0)).case) == "dB"
    assert unit_of(searched(now, 0.7).case) == "score"
    assert unit_of(searched(now).case) == "dB"


def test_a_story_tells_each_stage_that_was_measured() -> None:
    now, after = of_db(12.3), of_db(24.1)
    assert story_of(searched(now), None) == ""
    assert story_of(searched(now, None, row()), after) == "int8 12.3 dB -> with the remedy 24.1 dB"
    assert story_of(searched(now, None, row(), row()), after) == "int8 12.3 dB -> with the remedies 24.1 dB"
    advice = searched(now, None, row(), state=PLAYED, quality=of_db(30.0))
    assert story_of(advice, after) == "int8 12.3 dB -> with the remedy 24.1 dB -> with the advice 30.0 dB"
    metric = Outcome(0.11, (("output", 9.0),))
    kernels = {
        "deployed": FigureRow("deployed", 0.1, "", 8.0, -1, math.nan),
        "deployed, after": FigureRow("deployed, after", math.nan, "", 23.0, -1, math.nan),
    }
    found = searched(metric, 0.9, row(), float_value=0.96, deployed=kernels)
    assert story_of(found, Outcome(0.95, ())) == (
        "float 0.96 score -> int8 0.11 score -> with the remedy 0.95 score -> on the kernels 23.0 dB"
    )
    del kernels["deployed, after"]
    assert story_of(found, Outcome(0.95, ())) == (
        "float 0.96 score -> int8 0.11 score -> on the kernels 0.1 score -> with the remedy 0.95 score"
    )
