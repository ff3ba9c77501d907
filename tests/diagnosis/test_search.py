"""Which remedies a search measures."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from pt2qa import QuantizedPair
from pt2qa._diagnosis.analysis import _needed
from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.causes import CAUSES
from pt2qa._diagnosis.hypotheses import calibration, configuration, precision, repairs, sites, stages, weights
from pt2qa._diagnosis.search import ALIKE, BIT, COSTLY, HIDDEN, NATURAL, Search, _how, _source, _too_little
from pt2qa._diagnosis.worth import Worth
from pt2qa._repair.guard import Method
from pt2qa._simulator.data import Data
from pt2qa._trials.evidence import Gain
from pt2qa._trials.judge import Judge
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Target, Treatment
from pt2qa.errors import DeploymentError, Pt2qaError
from pt2qa.overrides.plan import Edit
from tests.diagnosis import facts
from tests.flows import quantized_pair


@pytest.fixture(scope="module")
def given() -> tuple[QuantizedPair, Data]:
    """A model whose calibration data are too small, by a factor of 10 for all sites."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    batch = torch.randn(8, 8)
    return quantized_pair(net, (0.1 * batch,)), Data("batches", [batch])


@pytest.fixture
def search(given: tuple[QuantizedPair, Data]) -> Search:
    pair, data = given
    judge = Judge(pair, data, None, "diagnose")
    return Search(Case(pair, judge, data, judge.outcome(Treatment())), None)


def in_float(search: Search, cause: str, share: float, sites: int) -> Hypothesis:
    """All sites of the model in float but some."""
    places = list(search.case.places.values())
    return Hypothesis(
        cause, f"of {share}", "", "", Treatment(exact=frozenset(places[: len(places) - sites])), share=share
    )


@pytest.mark.parametrize(
    ("cause", "share", "measured"),
    [
        ("precision", 0.002, False),  # 0.02 dB twice over, of an error of which a hundredth is asked for
        ("precision", 0.3, True),
        ("site-range", 0.2, True),  # no matter of degree
        ("site-range", 1e-4, False),
    ],
)
def test_what_makes_little_noise_is_not_tried(search: Search, cause: str, share: float, measured: bool) -> None:
    search._take([in_float(search, cause, share, 0)])
    assert len(search.rows) == measured
    assert [row.reason.partition(" of the noise")[0] for row in search.tried] == (
        [] if measured else [f"its sites cause only {100 * share:.2f} %"]
    )
    assert all(math.isnan(row.gain) for row in search.tried)


def test_it_is_tried_after_a_larger_fault(search: Search) -> None:
    large, small = in_float(search, "site-range", 1.0, 2), in_float(search, "precision", 0.01, 0)
    search.bounds = {name: search.case.judge.outcome(small.treatment) for name in ("fitted", "by channel")}
    search._take([small, large])
    assert [row.name for row in search.rows] == ["of 1.0", "of 0.01"]


def test_an_infinite_gain_at_the_cost_of_all_int8_is_taken_last(search: Search) -> None:
    all_in_float, exact = (Hypothesis(cause, "", "", "", Treatment()) for cause in ("masked-values", "site-range"))
    every, most = (replace(all_in_float, cost=1.0), Gain(math.inf)), (exact, Gain(42.0))
    assert search._best([every, most]) == most
    assert search._best([every]) == every


def test_a_metric_that_gains_while_the_outputs_do_not_is_chance(search: Search) -> None:
    each, before = in_float(search, "site-range", 1.0, 0), replace(search.quality, of_metric=True)
    assert search._is_worth(each, Gain(0.1, 5.0, 9.0, "output"), before)
    assert not search._is_worth(each, Gain(0.1, -5.0, 9.0, "output"), before)
    assert not search._is_worth(each, Gain(0.1, 0.0001, 0.0002, "output"), before)


def test_what_is_free_is_taken_before_a_repair(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(search, "repairs", (Method,))
    monkeypatch.setattr(search, "_repair", lambda: taken.extend(row.cause for row in search.rows))
    with torch.no_grad():
        search.run()
    assert "narrow-calibration" in taken


def test_what_is_left_after_ctrl_c_is_listed_with_its_gain(search: Search) -> None:
    best, other = in_float(search, "site-range", 1.0, 0), in_float(search, "precision", 0.9, 2)
    search._left = [(other, Gain(1.0)), (best, Gain(5.0))]
    search.so_far()
    assert [row.name for row in search.rows] == [best.name]
    assert [(row.name, row.gain) for row in search.tried] == [(other.name, 1.0)]
    assert search.tried[0].reason == "interrupted before it was measured after the remedies above"


def test_how_a_gain_was_measured(search: Search) -> None:
    remedy = in_float(search, "deployed-kernel", 1.0, 0)
    measured = replace(remedy, gain=1.0)
    assert [_how(measured), _how(replace(measured, treatment=Treatment()))] == ["deployed", "compared"]
    assert [_how(remedy), _how(replace(remedy, treatment=Treatment(options=(("qat", True),))))] == [
        "simulated",
        "quantized again",
    ]


@pytest.mark.parametrize(
    ("at_least", "of_float", "needed"), [(0.7, False, 0.7), (0.7, True, 0.56), (-math.inf, False, 0.792)]
)
def test_a_target_is_a_number_a_share_or_nearly_all(
    search: Search, monkeypatch: pytest.MonkeyPatch, at_least: float, of_float: bool, needed: float
) -> None:
    monkeypatch.setattr(search.case.judge, "of_float", lambda: 0.8)
    aim = Target(at_least, metric=lambda model: 0.0, of_float=of_float)
    assert _needed(aim, search.case.judge, Worth()) == pytest.approx(needed)


def db(*noise: float) -> float:
    """SQNR where the signal is 1."""
    return math.inf if not sum(noise) else -10 * math.log10(sum(noise))


class Additive:
    """Judges sites whose noise adds up, in the same shares at each of two samples; the signal of each output is 1.

    A treatment takes away the noise of the places and edits that it names.  ``fails`` cannot be quantized.
    """

    def __init__(self, noise: dict[str, tuple[float, ...]], outputs: tuple[str, ...] = ("y",)) -> None:
        self.noise, self.outputs = noise, outputs
        self.target: Target | None = None
        self.metric: Any = None
        self.value: Any = None
        self.float_value = 1.0
        self.recipe, self.fails, self.forgotten = None, "", list[tuple[Treatment, ...]]()

    def outcome(self, treatment: Treatment) -> Outcome:
        if self.fails in {edit.ops[0] for edit in treatment.edits}:
            raise Pt2qaError("it cannot be quantized")
        gone = {name for _, name, _ in treatment.exact}
        gone |= {edit.ops[0] for edit in (*treatment.edits, *treatment.floats)}
        left = [
            sum(noise[at] for name, noise in self.noise.items() if name not in gone) for at in range(len(self.outputs))
        ]
        noise = torch.tensor(left, dtype=torch.float64)[:, None] * torch.tensor([0.5, 0.5]).double()
        found = tuple((name, db(each)) for name, each in zip(self.outputs, left, strict=True))
        value = min(each for _, each in found) if self.value is None else self.value(gone)
        signal = torch.full_like(noise, 0.5)
        return Outcome(value, found, samples=2, signal=signal, noise=noise, of_metric=self.value is not None)

    def annotations(self, treatment: Treatment) -> None:
        """None are known."""

    def forget(self, *but: Treatment) -> None:
        self.forgotten.append(but)

    def pair_with(self, treatment: Treatment) -> Any:
        return ("pair with", treatment)

    def applied(self, treatment: Treatment) -> Any:
        if "refused" in {edit.ops[0] for edit in treatment.all_edits}:
            raise Pt2qaError("no such edit")
        return ("applied", treatment)

    def converted(self, pair: Any) -> Any:
        return ("converted", pair)


def additive(search: Search, noise: dict[str, Any], needed: float | None = None, **given: Any) -> Search:
    """A search on a real pair whose sites are judged to make this noise."""
    noise = {name: each if isinstance(each, tuple) else (each,) for name, each in noise.items()}
    judge: Any = Additive(noise, given.pop("outputs", ("y",)))
    judge.value = given.pop("value", None)
    judge.metric = None if judge.value is None else len
    if needed is not None:
        judge.target = Target(needed, metric=judge.metric)
    return Search(Case(search.case.pair, judge, search.case.data, judge.outcome(Treatment())), needed, **given)


def remedy(cause: str, name: str, *, edit: bool = False, floats: bool = False, **given: Any) -> Hypothesis:
    treatment = Treatment(exact=frozenset({("activation", name, 0)}))
    treatment = Treatment(edits=(Edit("int8", (name,)),)) if edit else treatment
    treatment = Treatment(floats=(Edit("float", (name,)),)) if floats else treatment
    return Hypothesis(cause, name, "evidence", f"treat {name}", treatment, **given)


def test_rows_tell_what_each_remedy_gives_alone_and_after_the_others(search: Search) -> None:
    """Of a noise of 1, in order: 0.9, then 0.09, then 0.009."""
    made = additive(search, {"2": 0.09, "0/linear": 0.9, "4": 0.009, "rest": 0.001})
    others = ("a/b", "0/linear", "a/b")
    made._take([remedy("site-range", "2"), remedy("bias", "0/linear", others=others, cost=0.125)])
    made._take([remedy("site-range", "4", edit=True)])
    first, second, third = (asdict(row) for row in made.rows)
    gains = [first["gain"], second["gain"], third["gain"]]
    assert gains == pytest.approx([10.0, db(0.91), db(0.991)])
    expected = {"rank": 1, "cause": "bias", "name": "0/linear", "module": "0", "evidence": "evidence"}
    expected |= {"remedy": "treat 0/linear", "gain_in_sequence": 10.0, "cost": 0.125}
    expected |= {"sentence": "quantization shifts the mean of op outputs", "quality": 10.0, "how": "simulated"}
    expected |= {"low": 10.0, "high": 10.0, "output": ""}
    assert {name: first[name] for name in expected} == pytest.approx(expected)
    assert first["others"] == ("a/b",)
    keys = ("rank", "name", "quality", "gain_in_sequence", "how", "source", "module")
    assert [second[key] for key in keys] == pytest.approx([2, "2", 20.0, 10.0, "simulated", "", ""])
    assert [third[key] for key in keys] == pytest.approx([3, "4", 30.0, 10.0, "quantized again", "", ""])
    assert made.quality.value == pytest.approx(30.0)
    assert made.tried == []
    assert [{name for _, name, _ in each.treatment.exact} for each in made.taken] == [{"0/linear"}, {"2"}, set()]
    one, two, three = (each.treatment for each in made.taken)
    assert made.state == one.then(two).then(three)


def reasons(made: Search) -> dict[str, tuple[float, str]]:
    return {row.name: (row.gain, row.reason) for row in made.tried}


def test_what_is_not_recommended_says_why(search: Search) -> None:
    made = additive(search, {"large": 0.99, "tiny": 0.0001, "worse": -0.001, "twin": 0.0, "rest": 0.0109})
    given = [remedy("site-range", "large"), remedy("observer", "tiny"), remedy("precision", "worse")]
    given += [remedy("observer", "tiny", cost=0.5), replace(remedy("bias", "large"), name="again")]
    given += [replace(remedy("precision", "tiny", cost=0.5), name="dear", share=0.9)]
    given += [remedy("site-range", "hidden", share=0.99 * HIDDEN), remedy("precision", "small", share=0.001)]
    given += [replace(remedy("observer", "small", cost=10.0), name="costs")]
    made._take(given)
    assert [row.name for row in made.rows] == ["large"]
    found = reasons(made)
    assert found["tiny"] == (pytest.approx(db(0.9999), abs=1e-9), "gain too small for its cost")  # the last of the same
    assert found["worse"] == (pytest.approx(db(1.001), abs=1e-9), "no gain")
    assert found["again"] == (pytest.approx(db(0.01)), "no further gain after the remedies above")
    assert found["dear"][1] == "gain too small for its cost"
    assert math.isnan(found["hidden"][0])
    assert found["hidden"][1] == "its sites cause only 0.03 % of the noise of all sites"
    assert found["small"][1] == "its sites cause only 0.10 % of the noise of all sites"
    assert found["costs"][1] == "not worth its cost at an error of 100.00 %"
    assert len(made.tried) == 7


def test_all_below_a_share_is_hidden_and_what_equals_it_is_not(search: Search) -> None:
    made = additive(search, {"a": 0.9, "rest": 0.1})
    made._take([remedy("site-range", "a", share=HIDDEN)])
    assert [row.name for row in made.rows] == ["a"]


def test_what_gained_little_beside_a_large_fault_is_tried_again(search: Search) -> None:
    noise = {"large": 0.99, "fault": 0.004, "natural": 0.004, "rest": 0.002}
    given = [remedy("site-range", "large"), remedy("bias", "fault"), remedy("observer", "natural")]
    made = additive(search, noise)
    made._take(given)
    assert [row.name for row in made.rows] == ["large", "fault"]
    assert reasons(made)["natural"][1] == "gain too small"
    promising = additive(search, noise)
    promising.bounds = {
        "fitted": promising.case.judge.outcome(remedy("observer", "natural").treatment.then(given[0].treatment))
    }
    promising._take(given)
    assert {row.name for row in promising.rows} == {"large", "fault", "natural"}
    alone = additive(search, noise)
    alone._take(given[1:])  # without a row, nothing is tried again
    assert [row.name for row in alone.rows] == []
    assert {row.name: row.reason for row in alone.tried} == dict.fromkeys(("fault", "natural"), "gain too small")


def test_quantizations_that_no_remedy_needs_are_forgotten(search: Search) -> None:
    made = additive(search, {"a": 0.5, "b": 0.0001, "rest": 0.4999})
    one, two = remedy("bias", "a", edit=True), remedy("bias", "b", edit=True)
    made._take([one, two])
    judge: Any = made.case.judge
    assert judge.forgotten[0] == (Treatment(), one.treatment)


def test_a_target_takes_what_is_certain_until_it_is_met(search: Search) -> None:
    made = additive(search, {"a": 0.5, "b": 0.3, "c": 0.001, "rest": 0.199}, needed=6.0)
    made._take([remedy("observer", name) for name in ("a", "b", "c")])
    assert [row.name for row in made.rows] == ["a", "b"]
    assert reasons(made)["c"] == (pytest.approx(db(0.999), abs=1e-9), "the target is met without it")
    assert made.quality.value == pytest.approx(db(0.2))
    exact = additive(search, {"a": 0.75, "rest": 0.25}, needed=db(0.25))
    assert exact._enough(exact.case.judge.outcome(remedy("bias", "a").treatment))
    assert not exact._enough(exact.case.now)
    assert not additive(search, {"a": 1e-9})._enough(exact.case.now)
    assert exact._can_be_better()


def test_errors_below_the_least_cannot_be_better(search: Search) -> None:
    assert additive(search, {"a": 1e-4})._can_be_better()  # an error of 0.01
    assert not additive(search, {"a": 0.99e-4})._can_be_better()
    assert not additive(search, {"a": 1.1e-4}, worth=Worth(least=0.011))._can_be_better()


def test_a_remedy_of_another_output_than_the_worst_is_a_row_of_that(search: Search) -> None:
    noise = {"a": (0.0, 0.09), "b": (0.4, 0.0), "rest": (0.6, 0.01)}
    made = additive(search, noise, outputs=("y", "z"))
    made._take([remedy("bias", "a"), remedy("bias", "b")])
    assert [(row.name, row.output) for row in made.rows] == [("b", "y"), ("a", "z")]
    assert made.rows[0].gain == pytest.approx(db(0.6))
    assert made.rows[1].gain == pytest.approx(db(0.01) - db(0.1))
    # At the worst output it helps, at another it does harm: that does not matter.
    harm = additive(search, {"a": (0.9, -0.05), "rest": (0.1, 0.06)}, outputs=("y", "z"))
    harm._take([remedy("bias", "a")])
    assert [row.output for row in harm.rows] == ["y"]
    # The worst output gets worse: what others gain is no reason.
    worse = additive(search, {"a": (-0.5, 0.09), "rest": (1.0, 0.01)}, outputs=("y", "z"))
    worse._take([remedy("bias", "a")])
    assert worse.rows == []
    assert reasons(worse)["a"] == (pytest.approx(db(1.0) - db(0.5)), "no gain")


def test_a_preview_that_does_not_help_is_all_that_is_measured(search: Search) -> None:
    made = additive(search, {"a": 0.9, "b": 0.001, "rest": 0.099})
    judge: Any = made.case.judge
    judge.fails = "refused"
    good, poor = (remedy("site-range", name).treatment for name in ("a", "b"))
    refused = remedy("bias", "refused", edit=True)
    made._take([replace(refused, preview=poor), replace(refused, name="other", preview=good)])
    assert made.rows == []
    assert reasons(made)["refused"] == (pytest.approx(db(0.999), abs=1e-9), "gain too small")
    assert reasons(made)["other"][1] == "could not be measured"
    assert math.isnan(reasons(made)["other"][0])
    assert made.notes() == ["not measured: bias (treat refused): it cannot be quantized"]


def test_what_other_data_calibrate_has_no_preview(search: Search) -> None:
    """A preview plays ranges of the pair's own data."""
    made = additive(search, {"a": 0.9, "rest": 0.1})
    each = replace(remedy("activation-scheme", "a", edit=True), preview=remedy("site-range", "none").treatment)
    assert made._gain(each, Treatment(), made.quality).value == 0.0
    assert made._gain(each, Treatment(data=made.case.data), made.quality).value == pytest.approx(10.0)


def test_what_was_found_without_outputs_is_confirmed_by_any_gain(search: Search) -> None:
    made, each = additive(search, {"a": 1.0}), remedy("bias", "a")
    chance = Gain(3.0, -9.0, 15.0, "y")
    assert not chance.is_certain
    assert not made._is_worth(each, chance, made.quality)
    assert made._is_worth(replace(each, audited=True), chance, made.quality)
    assert not made._is_worth(replace(each, audited=True), replace(chance, value=0.0), made.quality)
    assert _too_little(each, chance) == "samples like these may show no gain (-9 to +15 dB)"
    assert _too_little(each, replace(chance, value=-1.0)) == _too_little(each, Gain(0.0)) == "no gain"


@pytest.mark.parametrize(("gain", "is_worth"), [(math.nan, True), (0.1, True), (0.0, False), (-1.0, False)])
def test_what_was_measured_in_another_way_is_a_row_unless_it_does_not_help(
    search: Search, gain: float, is_worth: bool
) -> None:
    made = additive(search, {"a": 1.0})
    made._take([remedy("deployed-kernel", "a", gain=gain)])
    assert [row.how for row in made.rows] == ["deployed"] * is_worth
    assert len(made.tried) == (not is_worth)


def test_what_leaves_int8_must_beat_what_is_free(search: Search) -> None:
    made = additive(search, {"a": 0.9, "b": 0.05, "rest": 0.05})
    costly = remedy("precision", "a", floats=True, cost=0.1)
    assert made._is_worth(costly, made._gain(costly, made.state, made.quality), made.quality)
    made.free = made.case.judge.outcome(remedy("range", "a").treatment)
    gain = made._gain(costly, made.state, made.quality)
    assert not made._beats_free(costly, gain)
    assert not made._is_worth(costly, gain, made.quality)
    assert made._is_outdone(costly, gain, made.quality)
    assert made._is_worth(replace(costly, cause="bias"), gain, made.quality)  # no matter of bits
    assert not made._is_outdone(replace(costly, cause="bias"), gain, made.quality)
    made._take([costly])
    assert reasons(made)["a"][1] == "not worth its cost beside what pt2qa.repair gives for free"
    assert made.outdone == [(costly, gain)]
    assert _too_little(costly, gain) == "gain too small for its cost"
    made.free = made.case.judge.outcome(remedy("range", "b").treatment)
    assert made._beats_free(costly, gain)
    made.free = made.case.now  # nothing for free
    assert made._beats_free(costly, Gain())
    # What it gives more must be worth what it costs: the error falls by 0.07, and all of int8 costs 0.1.
    made.free = made.case.judge.outcome(remedy("range", "a").treatment)
    both = replace(costly, treatment=Treatment(floats=(Edit("float", ("a",)), Edit("float", ("b",)))))
    removed = 10 ** (-db(0.1) / 20) - 10 ** (-db(0.05) / 20)
    assert made._beats_free(replace(both, cost=(removed - 0.0101) / 0.1), Gain(1.0, output="y"))
    assert not made._beats_free(replace(both, cost=(removed - 0.0099) / 0.1), Gain(1.0, output="y"))


@pytest.mark.parametrize(
    ("finder", "cause", "said"), [("_ranges", "outlier-channel", "outlier-channel"), ("needed", "precision", "range")]
)
def test_a_cause_whose_costly_remedy_is_outdone_is_a_row_with_the_free_one(
    search: Search, monkeypatch: pytest.MonkeyPatch, finder: str, cause: str, said: str
) -> None:
    run = Run(search, monkeypatch, 0.01)
    made = additive(search, {"a": 0.9, "rest": 0.1})
    ranges = remedy("range", "a", edit=True).treatment
    costly = [remedy(cause, "a", floats=True, cost=0.1), remedy("shared-scale", "b", floats=True)]
    run.made, run.free, run.ranges = made, made.case.judge.outcome(ranges), ranges
    monkeypatch.setattr(made, "_bound", run.bound)
    monkeypatch.setattr(made, "_ranges", list)
    for module, name in ((precision, "needed"), (configuration, "observers"), (calibration, "bad_sample")):
        monkeypatch.setattr(module, name, lambda *given, **more: [])
    found = made if finder == "_ranges" else precision
    monkeypatch.setattr(found, finder, lambda *given, clamped=False: [] if clamped else costly)
    monkeypatch.setattr(made, "_treated", lambda: made.case)
    run()
    (row,) = made.rows
    assert (row.cause, row.name, row.evidence, row.cost) == (said, "a", "evidence", 0.0)
    assert row.remedy == "ranges, as pt2qa.repair does: 1 edit in the plan"
    assert row.gain == pytest.approx(10.0)
    assert made.state == ranges
    assert {name: reasons(made)[name] for name in ("a", "b")} == {
        "a": (pytest.approx(10.0), "not worth its cost beside what pt2qa.repair gives for free"),
        "b": (0.0, "no gain"),
    }


def test_ranges_that_help_are_a_row_where_nothing_else_is(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(search, monkeypatch, 0.01)
    made = additive(search, {"a": 0.9, "rest": 0.1})
    run.ranges = remedy("range", "a", edit=True).treatment
    run.made, run.free = made, made.case.judge.outcome(run.ranges)
    monkeypatch.setattr(made, "_bound", run.bound)
    monkeypatch.setattr(made, "_treated", lambda: made.case)
    monkeypatch.setattr(repairs, "_noisiest", lambda case, ops: tuple(ops))
    for module, names in ORDER.items():
        for name in names:
            monkeypatch.setattr(module, name, lambda *given, **more: [])
    run()
    (row,) = made.rows
    assert (row.cause, row.evidence) == ("range", "1 edit fitted to the output error")
    assert row.gain == pytest.approx(10.0)
    assert made.state == run.ranges


def test_a_remedy_that_a_later_one_makes_needless_is_taken_back(search: Search) -> None:
    made = additive(search, {"a": 0.4, "b": 0.59, "c": 0.009, "rest": 0.001})
    every = Treatment(exact=frozenset({("activation", name, 0) for name in ("a", "b")}))
    later = replace(remedy("precision", "b"), treatment=every)
    for each in (remedy("observer", "a"), later, remedy("bias", "c")):
        made._take([each])
    assert [row.name for row in made.rows] == ["a", "b", "c"]
    for each in made.taken[:-1]:
        made._drop_if_needless(each)
    assert [(row.rank, row.name) for row in made.rows] == [(1, "b"), (2, "c")]
    assert [row.gain_in_sequence for row in made.rows] == pytest.approx([20.0, 10.0])
    assert made.state == every.then(made.taken[1].treatment)
    assert made.quality.value == pytest.approx(30.0)
    assert reasons(made) == {"a": (0.0, "no further gain after the remedies above")}


@pytest.mark.parametrize("about", [{"cause": "bias"}, {"audited": True}])
def test_a_fault_stays_a_row_whatever_comes_after_it(search: Search, about: dict[str, Any]) -> None:
    made = additive(search, {"a": 0.4, "b": 0.59, "rest": 0.01})
    every = Treatment(exact=frozenset({("activation", name, 0) for name in ("a", "b")}))
    for each in (replace(remedy("observer", "a"), **about), replace(remedy("precision", "b"), treatment=every)):
        made._take([each])
    made._drop_if_needless(made.taken[0])
    assert [row.name for row in made.rows] == ["a", "b"]


@pytest.mark.parametrize(("later", "rows"), [("precision", ["observer", "precision"]), ("observer", ["observer"])])
def test_a_remedy_that_removes_most_stays_a_row_unless_a_later_one_is_of_its_cause(
    search: Search, later: str, rows: list[str]
) -> None:
    made = additive(search, {"a": 0.8, "b": 0.19, "rest": 0.01})
    every = Treatment(exact=frozenset({("activation", name, 0) for name in ("a", "b")}))
    for each in (replace(remedy("observer", "a"), name="b"), replace(remedy(later, "b"), treatment=every)):
        made._take([each])
    made._drop_if_needless(made.taken[0])
    assert [row.cause for row in made.rows] == rows
    assert made.quality.value == pytest.approx(20.0)


def test_what_was_taken_back_is_no_longer_looked_at(search: Search) -> None:
    made = additive(search, {"a": 0.9, "rest": 0.1})
    made._take([remedy("observer", "a")])
    made._drop_if_needless(remedy("observer", "a"))
    assert [row.name for row in made.rows] == ["a"]


@pytest.mark.parametrize(("cause", "least"), [("wide-calibration", 0.5), ("observer", 0.75)])
def test_what_gives_enough_for_free_is_a_row_where_the_error_is_worth_one(
    search: Search, cause: str, least: float
) -> None:
    """Half of the noise from other data, and a bit from another observer."""
    noise = {"a": (least + 1e-3) * 1e-4, "b": 0.05e-4, "rest": (0.95 - least) * 1e-4}  # 40 dB
    made = additive(search, noise)
    made._take([remedy(cause, "a"), remedy("precision", "a", floats=True), remedy("observer", "b")])
    assert [(row.cause, row.name) for row in made.rows] == [(cause, "a")]
    for less in (
        {**noise, "a": (least - 1e-3) * 1e-4, "rest": (0.952 - least) * 1e-4},
        {name: each / 1.01 for name, each in noise.items()},
    ):
        made = additive(search, less)
        made._take([remedy(cause, "a")])
        assert made.rows == []


def test_what_repairs_give_helps_if_it_is_certain_and_worth_a_row(search: Search) -> None:
    made = additive(search, {"a": 0.5, "b": 0.001, "c": 0.014, "rest": 0.485})
    assert made.from_repair is None
    assert not made.repair_helps
    made.free = made.case.judge.outcome(remedy("range", "a").treatment)
    assert made.from_repair is not None
    assert made.from_repair.value == pytest.approx(db(0.5))
    assert made.repair_helps
    made.free = made.case.judge.outcome(remedy("range", "b").treatment)
    assert not made.repair_helps
    made.free = made.case.judge.outcome(remedy("range", "c").treatment)
    assert made.repair_helps  # an error of 0.007: half of a hundredth is enough
    made.free = made.case.judge.outcome(Treatment())
    assert not made.repair_helps
    of_metric = additive(search, {"a": 0.5, "b": 0.001, "rest": 0.499}, value=lambda gone: 0.5 + 0.001 * len(gone))
    of_metric.free = of_metric.case.judge.outcome(remedy("range", "a").treatment)
    assert of_metric.repair_helps  # by the outputs, not by 0.001 of the metric
    of_metric.free = of_metric.case.judge.outcome(remedy("range", "b").treatment)
    assert not of_metric.repair_helps


def test_among_remedies_as_good_the_certain_and_simple_one_is_taken(search: Search) -> None:
    made = additive(search, {"a": 1.0})

    def best(*left: tuple[Hypothesis, float]) -> Hypothesis:
        found = [(each, Gain(gain, output="y")) for each, gain in left]
        assert made._best(found)[0] is made._best(found[::-1])[0]
        return made._best(found)[0]

    free, costs = remedy("precision", "a", floats=True), remedy("bias", "b", cost=0.01, edit=True)
    edit, advice = remedy("precision", "c", edit=True), remedy("nonfinite", "d")
    earlier = remedy("range", "e", edit=True)
    two = replace(edit, treatment=Treatment(edits=(Edit("int8", ("x",)), Edit("int8", ("y",)))))
    assert best((free, 9.0), (costs, 9.5)) is free  # 9 dB of 9.5 are as good
    assert best((free, 8.4), (costs, 9.5)) is costs
    assert best((edit, 9.0), (advice, 9.5)) is edit
    assert best((edit, 9.0), (earlier, 9.0)) is earlier
    assert best((edit, 9.0), (two, 9.5)) is edit
    other = replace(edit, name="other")
    assert best((edit, 9.0), (other, 9.5)) is other
    assert best((edit, ALIKE * 10), (earlier, 10.0)) is earlier
    assert best((earlier, ALIKE * 10), (edit, 10.0)) is earlier
    assert best((earlier, ALIKE * 10 - 1e-6), (edit, 10.0)) is edit
    assert best((edit, math.inf), (earlier, 60.0)) is edit
    assert best((edit, math.inf), (earlier, math.inf)) is earlier
    assert best((earlier, 10.0), (edit, math.nan)) is edit  # what cannot be measured comes first
    dear = remedy("precision", "f", floats=True, cost=1.0)
    assert best((dear, 20.0), (edit, 15.0)) is edit  # an error of 0.1 and 0.1 of cost, and one of 0.18
    assert best((replace(dear, cost=0.5), 20.0), (edit, 1.0)).cost == 0.5


def test_the_worst_output_comes_first_and_a_metric_decides_by_its_value(search: Search) -> None:
    made = additive(search, {"a": (0.1, 0.2)}, outputs=("y", "z"))
    one, two = remedy("bias", "a", edit=True), remedy("bias", "b", edit=True)
    found = [(one, Gain(9.0, output="y")), (two, Gain(1.0, output="z"))]
    assert made._best(found)[0] is two
    assert made._best([(one, Gain(9.0)), found[1]])[0] is one  # of all outputs
    by_metric = additive(search, {"a": 1.0}, value=lambda gone: 0.5)
    assert by_metric._best([(one, Gain(0.1, output="y")), (two, Gain(0.3, output="y"))])[0] is two
    dear = replace(two, cost=1.0)  # 0.1 of the metric
    assert by_metric._best([(one, Gain(0.1, output="y")), (dear, Gain(0.19, output="y"))])[0] is one
    assert by_metric._best([(one, Gain(0.1, output="y")), (dear, Gain(0.21, output="y"))])[0] is dear


def test_a_metric_gains_what_it_gains_but_is_worth_what_outputs_gain(search: Search) -> None:
    made = additive(search, {"a": 0.5, "rest": 0.5}, value=lambda gone: 0.5 + 0.25 * len(gone))
    made._take([remedy("observer", "a", share=0.001)])  # with a metric, a small share says nothing
    (row,) = made.rows
    assert (row.gain, row.quality) == (0.25, 0.75)
    assert row.low == pytest.approx(db(0.5))


def test_the_pair_with_all_remedies(search: Search) -> None:
    made = additive(search, {"a": 1.0})
    edits, floats = remedy("bias", "a", edit=True).treatment, remedy("precision", "b", floats=True).treatment
    assert made.final() == (None, None)
    made.state = remedy("bias", "a").treatment
    assert made.final() == (None, None)
    made.state = edits.then(remedy("bias", "c").treatment)
    assert made.final() == (("applied", edits), made.case.judge.outcome(edits))
    made.state = edits.then(floats)
    assert made.final() == (("applied", made.state), ("converted", ("applied", made.state)))
    made.state = floats
    assert made.final() == (("applied", floats), ("converted", ("applied", floats)))
    made.state = remedy("bias", "refused", edit=True).treatment
    assert made.final() == (None, None)
    assert made.case.notes == ["all remedies together could not be applied: no such edit"]


def test_the_pair_after_ctrl_c_takes_no_run(search: Search) -> None:
    made = additive(search, {"a": 0.6, "b": 0.3, "rest": 0.1})
    assert made.so_far() == (None, None)
    edit, advice = remedy("bias", "a", edit=True), remedy("bias", "b")
    made._left = [(advice, Gain(1.0, output="y")), (edit, Gain(4.0, output="y"))]
    pair, after = made.so_far()
    assert pair == ("pair with", edit.treatment)
    assert after is made.quality
    assert reasons(made) == {"b": (1.0, "interrupted before it was measured after the remedies above")}
    made.state = advice.treatment
    assert made.so_far() == (None, None)
    made.state = edit.treatment.then(advice.treatment)
    assert made.so_far() == (None, None)
    made.state = edit.treatment.then(remedy("precision", "c", floats=True).treatment)
    assert made.so_far() == (None, None)
    rows = len(made.rows)
    made._left = [(advice, Gain(1.0, output="y"))]
    made.so_far()
    assert len(made.rows) == rows  # there is one already
    assert len(made.tried) == 5


def test_figures_are_what_was_measured(search: Search) -> None:
    made = additive(search, {"a": 0.6, "rest": 0.4})
    (now,) = made.figures(None)
    assert (now.name, now.value, now.output, now.sqnr, now.samples) == ("now", 0.0, "y", 0.0, 2)
    after = replace(made.case.judge.outcome(remedy("bias", "a").treatment), worst_sample=1, worst_sample_sqnr=2.0)
    made.bounds = {"fitted": after, "by channel": after}
    made.free, made.state = after, remedy("bias", "a").treatment
    made._deployed("deployed", cast(Any, SimpleNamespace(sqnr=7.0, value=0.5)))
    found = {row.name: row for row in made.figures(replace(after, labels=0.5))}
    assert list(found) == [
        *("now", "after", "with the advice", "ranges fitted to the data", "ranges fitted by channel"),
        *("with ranges of pt2qa.repair", "deployed"),
    ]
    assert found["after"].sqnr == pytest.approx(db(0.4))
    assert (found["after"].sample, found["after"].sample_sqnr, found["after"].labels) == (1, 2.0, 0.5)
    assert found["with the advice"].sqnr == 0.0
    row = found["deployed"]
    assert (row.value, row.sqnr, row.sample, row.output) == (7.0, 7.0, -1, "")
    metric = additive(search, {"a": 0.6, "rest": 0.4}, value=lambda gone: 0.5)
    metric._deployed("deployed", cast(Any, SimpleNamespace(sqnr=7.0, value=0.5)))
    _, of_float, kernels = metric.figures(None)
    assert (of_float.name, of_float.value, of_float.sqnr, of_float.sample) == ("float", 1.0, math.inf, -1)
    assert (kernels.value, kernels.sqnr) == (0.5, 7.0)
    assert math.isnan(kernels.sample_sqnr)


class Kernels:
    """A stand-in for kernels: a report for each pair; an error for one that is None."""

    backend = "own"

    def of(self, pair: Any) -> Any:
        if pair is None:
            raise DeploymentError("it cannot be lowered")
        return self.backend if pair == "own" else SimpleNamespace(sqnr=9.0, value=0.9)

    def hypotheses(self) -> list[Hypothesis]:
        return [remedy("deployed-kernel", "k", gain=3.0)]


def test_kernels_are_looked_at_before_and_after(search: Search) -> None:
    made, kernels = additive(search, {"a": 1.0}), cast(Any, Kernels())
    report = made.look_at_kernels(kernels)
    assert report.sqnr == 9.0
    assert [row.cause for row in made.rows] == ["deployed-kernel"]
    made.look_again(kernels, cast(Any, "own"))  # a report of the pair says nothing of another one
    assert list(made.deployed) == ["deployed"]
    made.look_again(kernels, cast(Any, "final"))
    assert list(made.deployed) == ["deployed", "deployed, after"]
    made.look_again(kernels, cast(Any, None))
    assert made.case.notes == ["the pair with all remedies was not run on its kernels: it cannot be lowered"]


def test_bounds_promise_a_row_or_are_out_of_reach(search: Search) -> None:
    made = additive(search, {"a": 0.9, "b": 0.004, "rest": 0.096})
    by_name = {name: made.case.judge.outcome(remedy("range", name).treatment) for name in ("a", "b")}
    assert made._promises(by_name["a"])
    assert not made._promises(by_name["b"])
    assert made.out_of_reach is None
    assert not made._ranges_at_fault()
    made.bounds = {"by channel": by_name["b"], "fitted": by_name["a"]}
    assert made.out_of_reach == pytest.approx(10.0)
    assert made._ranges_at_fault()
    made.bounds = {"fitted": by_name["b"], "by channel": by_name["a"]}
    assert made.out_of_reach == pytest.approx(10.0)
    assert not made._ranges_at_fault()
    made.bounds = {"fitted": made.case.now}
    assert made.out_of_reach is None
    with_target = additive(search, {"a": 0.9, "b": 0.004, "rest": 0.096}, needed=20.0)
    assert with_target._promises(by_name["b"])  # any gain may count
    assert not with_target._promises(with_target.case.now)


@pytest.mark.parametrize(("left", "bit", "half"), [(0.249, True, True), (0.251, False, True), (0.501, False, False)])
def test_a_bit_is_a_quarter_of_the_noise(search: Search, left: float, bit: bool, half: bool) -> None:
    made = additive(search, {"a": 1 - left, "rest": left})
    made.bounds = {"fitted": made.case.judge.outcome(remedy("range", "a").treatment)}
    assert (made.out_of_reach is not None) == bit
    assert made._ranges_at_fault() == half


@pytest.mark.parametrize(
    ("now", "gain", "is_out"),
    [
        (0.0, BIT, True),
        (20.0, 10.0, True),  # a twentieth of the output
        (50.0, 10.0, False),  # hardly any
        (0.0, math.inf, True),
        (0.0, math.nan, False),
    ],
)
def test_a_bound_is_out_of_reach_from_a_bit_on_where_the_error_is_worth_a_row(
    search: Search, now: float, gain: float, is_out: bool
) -> None:
    made = additive(search, {"a": 1.0})
    made.quality = Outcome(now, (("y", now),))
    values = now + gain, now + gain - 1, now
    made.bounds = {str(number): Outcome(value, (("y", value),)) for number, value in enumerate(values)}
    assert made.out_of_reach == (now + gain if is_out else None)


def test_a_metric_is_out_of_reach_by_what_its_outputs_gain(search: Search) -> None:
    made = additive(search, {"a": 0.9, "rest": 0.1}, value=lambda gone: 0.5 + 0.1 * len(gone))
    made.bounds = {"fitted": made.case.judge.outcome(remedy("range", "a").treatment)}
    assert made.out_of_reach == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("now", "share", "counts"),
    [
        (10.0, 0.51, True),
        (10.0, 0.5, None),  # as much rounding
        (50.0, 0.9, False),  # of hardly any error
        (10.0, math.nan, None),
    ],
)
def test_clamping_is_named_where_it_makes_most_of_the_error(
    search: Search, now: float, share: float, counts: bool | None
) -> None:
    made = additive(search, {"a": 1.0})
    made.quality = Outcome(now, (("y", now),))
    parts = {(0, "activation clamping"): 0.2 * share, (2, "activation clamping"): 0.8 * share}
    rest = {(0, "activation rounding"): 1 - share, (0, "fitted"): 9.0}
    made.case.known_noises = facts.noises(parts | rest)
    name = search.case.pair.sites[2].name
    assert made.clamped == (None if counts is None else (name, pytest.approx(share), counts))


ORDER = {
    stages: ("changed", "constants", "nonfinite"),
    configuration: ("unfused", "rounded_before", "dynamic_by_row", "observers"),
    calibration: ("inputs", "bad_sample", "ranges_of_calibration"),
    sites: ("floored", "unused_levels", "one_sided", "masked", "twice", "unfit", "outliers"),
    weights: ("biases", "unread", "coarse"),
    repairs: ("equalized",),
    precision: ("needed",),
}


class Run:
    """A search whose hypotheses are of no effect, and tell when they are taken."""

    def __init__(self, search: Search, patch: pytest.MonkeyPatch, now: float, needed: float | None = None) -> None:
        self.made = additive(search, {"a": now}, needed)
        self.taken: list[list[str]] = []
        for module, names in ORDER.items():
            for name in names:
                patch.setattr(module, name, self.finder(name))
        self.costly = {"outliers"}
        self.ranges = Treatment()
        self.at_fault, self.free, self.repaired, self.freaks = False, None, 0, dict[int, list[Any]]()
        patch.setattr(calibration, "freaks", lambda case: self.freaks)
        patch.setattr(calibration, "is_of_another_kind", lambda *given: self.at_fault)
        patch.setattr(sites, "has_unused_levels", lambda *given: False)
        patch.setattr(repairs, "bound", lambda *given: (self.free, self.ranges))
        patch.setattr(Case, "clamped_most", ["clamped"])
        patch.setattr(self.made, "_repair", lambda: self.taken.append(["repair"]))
        patch.setattr(self.made, "_take", lambda found: self.taken.append([each.name for each in found]))
        patch.setattr(self.made, "_bound", self.bound)
        patch.setattr(self.made, "_treated", lambda: self.made.case)
        self.instead: frozenset[Any] = frozenset({"fitted", "by channel"})
        self.fits = now

    def finder(self, name: str) -> Any:
        def find(*given: Any, **more: Any) -> Any:
            cause = "outlier-channel" if name in self.costly else "bias"
            yield remedy(cause, f"{name}{next(iter(more.values()), '')}", floats=name in self.costly)

        return find

    def bound(self) -> None:
        self.made.case.instead = self.instead
        self.made.bounds = {"fitted": Outcome(db(self.fits), (("y", db(self.fits)),))}

    def __call__(self) -> list[list[str]]:
        self.made.case.seen = {}
        self.made.run()
        return self.taken


AUDITS = ["changed", "constants", "nonfinite", "unfused", "rounded_before", "dynamic_by_row"]
AUDITS += ["inputs", "floored", "unused_levels", "one_sided", "biases", "unread", "masked"]


def test_faults_come_first_then_repairs_then_what_leaves_int8(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Run(search, monkeypatch, 0.01)() == [
        [*AUDITS, "coarse", "twice", "unfitFalse", "equalized"],
        ["repair"],
        ["ranges_of_calibration", "bad_sample"],
        ["outliers"],
        ["needed"],
        ["observers"],
        ["neededTrue"],
    ]


def test_other_data_and_observers_come_first_where_ranges_are_at_fault(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(search, monkeypatch, 0.01)
    run.at_fault, run.fits = True, 0.005
    assert run() == [
        [*AUDITS, "coarse", "ranges_of_calibration", "twice", "unfitTrue", "equalized", "observers"],
        ["repair"],
        ["bad_sample"],
        ["outliers"],
        ["needed"],
        [],
        ["neededTrue"],
    ]


def test_other_data_come_late_where_one_calibration_batch_is_unlike_all_others(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(search, monkeypatch, 0.01)
    run.at_fault, run.freaks = True, {3: [remedy("calibration-outlier", "freak")]}
    assert run()[:3] == [
        [*AUDITS, "coarse", "freak", "twice", "unfitFalse", "equalized"],
        ["repair"],
        ["ranges_of_calibration", "bad_sample"],
    ]


@pytest.mark.parametrize(
    ("clamped", "cause", "certain"),
    [
        (("a", 0.6, True), "narrow-calibration", True),
        (("a", 0.6, True), "wide-calibration", False),
        (None, "narrow-calibration", False),
    ],
)
def test_where_clamping_makes_most_of_the_noise_more_data_need_not_be_certain(
    search: Search, monkeypatch: pytest.MonkeyPatch, clamped: Any, cause: str, certain: bool
) -> None:
    run, taken = Run(search, monkeypatch, 0.01), list[Hypothesis]()
    monkeypatch.setattr(calibration, "ranges_of_calibration", lambda *given: [remedy(cause, "data")])
    monkeypatch.setattr(Search, "clamped", clamped)
    monkeypatch.setattr(run.made, "_take", taken.extend)
    run()
    assert [each.audited for each in taken if each.name == "data"] == [certain]


def test_ranges_that_promise_nothing_are_not_looked_for(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(search, monkeypatch, 0.01)
    run.instead, run.free = frozenset(), run.made.case.now
    assert run() == [
        [*AUDITS, "coarse", "twice", "unfitFalse"],
        ["repair"],
        ["ranges_of_calibration", "bad_sample"],
        [],
        ["needed"],
        ["neededTrue"],
    ]


def test_a_model_that_is_good_enough_has_faults_alone(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(search, monkeypatch, 0.99e-4)
    assert [len(each) for each in run()] == [17, 1, 2]
    met = Run(search, monkeypatch, 0.01, needed=20.0)
    assert met() == [AUDITS[:3]]
    assert met.made.beyond == ["clamped"]
    assert [len(each) for each in Run(search, monkeypatch, 0.01, needed=20.1)()] == [17, 1, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_without_a_number_instruments_are_of_no_use(
    search: Search, monkeypatch: pytest.MonkeyPatch, worst: float
) -> None:
    run = Run(search, monkeypatch, 0.01)
    run.made.case.now = Outcome(worst, (("y", worst),))
    assert run() == [AUDITS[:3]]


def test_without_bounds_no_ranges_are_looked_for(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(search, monkeypatch, 0.01)
    monkeypatch.setattr(run.made, "_bound", lambda: None)
    assert run()[0] == AUDITS[:6]


class Repairs:
    name = "ranges"


@pytest.mark.parametrize(
    ("data", "found", "needed", "reason"),
    [
        (None, None, None, "no data"),
        ("data", "it does not help", None, "it does not help"),
        ("data", None, 10.0, "the target is met without it"),
        ("data", remedy("range", "a"), None, ""),
    ],
)
def test_repairs_are_fitted_to_what_is_free(
    search: Search, monkeypatch: pytest.MonkeyPatch, data: Any, found: Any, needed: float | None, reason: str
) -> None:
    made = additive(search, {"a": 0.01}, needed, repairs=(cast(Any, Repairs),))
    monkeypatch.setattr(repairs, "calibration_of", lambda *given: (data, "no data" if data is None else ""))
    monkeypatch.setattr(repairs, "fitted", lambda *given: found)
    made._repair()
    assert [row.name for row in made.rows] == ["a"] * (not reason)
    assert [(row.cause, row.name, row.remedy, row.reason) for row in made.tried] == [
        ("range", "", "ranges, as pt2qa.repair does", reason)
    ] * bool(reason)


def test_precision_is_looked_for_in_the_pair_with_the_remedies(search: Search) -> None:
    """What edits leave as it was need not be measured again, unless they change how much noise ops make."""
    case = search.case
    assert search._treated() is case
    case.known_noises = facts.noises({0: 0.5, 1: 0.25, (0, "fitted"): 0.125})
    search.state = Treatment(edits=(Edit("float", ("4/linear",)),))
    treated = search._treated()
    assert treated is not case
    assert treated.state == search.state
    assert treated.now is search.quality
    assert len(treated.pair.sites) < len(case.pair.sites)
    assert treated.known_noises is not None
    assert treated.known_noises.noise == {(0, "quantized"): 0.5, (1, "quantized"): 0.25}
    assert treated.costs is case.costs
    for other in (
        Treatment(edits=(Edit("float", ("4/linear",)), Edit("int8_weight", ("2/linear",)))),
        Treatment(options=(("per_channel", False),)),
        Treatment(data=case.data),
    ):
        search.state = other
        assert search._treated().known_noises is None


def test_the_line_of_an_op_is_that_of_its_graph() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x.tanh()  # here

    own = quantized_pair(Net(), torch.randn(2, 4))
    line = next(at for at, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# here"))
    assert _source(own, "add") == f"test_search.py:{line}"
    assert _source(own, "unknown") == ""
    assert _source(replace(own, float_graph=None), "add") == f"test_search.py:{line}"


def test_causes_of_degree_are_causes() -> None:
    assert COSTLY < NATURAL <= CAUSES.keys()
