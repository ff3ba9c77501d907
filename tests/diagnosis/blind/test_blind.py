"""The blind bench itself: what it draws is repeatable and fair, and it tells a right answer from a wrong one."""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import pytest
import torch

import pt2qa
from tests.diagnosis.blind.__main__ import summary
from tests.diagnosis.blind.bed import Bed
from tests.diagnosis.blind.faults import INPUT, KINDS, Kind, Places
from tests.diagnosis.blind.newer import NEWER
from tests.diagnosis.blind.trial import LEAST_LOSS, Outcome, Trial, deck


def test_every_kind_names_causes_that_the_docs_have() -> None:
    page = (Path(__file__).parents[3] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE))
    assert len(known) > 20
    assert {cause for kind in KINDS.values() for cause in kind.causes} <= known
    assert all(kind.causes or kind.error for kind in KINDS.values())


def test_a_seed_draws_the_same_cases_of_every_group() -> None:
    assert deck(3, 20) == deck(3, 20) != deck(4, 20)
    assert {trial.group for trial in deck(3, 10)} == {"fault", "pair", "untouched", "harmless"}


def test_no_two_sets_share_a_sample() -> None:
    bed = Bed.made("tabular", 5, "x86")
    rows = torch.cat([*bed.calibration, *bed.use, *bed.evaluation, *bed.check])
    assert len(rows.unique(dim=0)) == len(rows)
    assert 24 <= sum(map(len, bed.evaluation)) <= 48


@pytest.fixture(scope="module")
def faint() -> Outcome:
    return Trial("fault", (KINDS["faint-calibration"],), "self test", nets=("tabular",)).run()


def test_a_planted_fault_is_judged_on_the_set_that_only_the_bench_has(faint: Outcome) -> None:
    assert faint.state == "diagnosed"
    assert faint.healthy - faint.faulty > 3
    assert faint.measured == pytest.approx(faint.after - faint.faulty)
    assert 0 <= faint.share <= 1


def test_what_could_not_be_run_is_printed_and_does_not_count(
    faint: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    met = summary([faint, Outcome("fault", "raw-pixels", state="weak")], 3, random.Random(0))
    text = capsys.readouterr().out
    assert "of 3 cases: 1 diagnosed, 1 weak, 1 not begun" in text
    assert "not judged, weak: fault raw-pixels" in text
    assert not met  # no interval was there to be right


def test_the_newer_kinds_can_be_drawn_alone() -> None:
    assert len(NEWER) > 25
    trials = deck(5, 2 * len(NEWER), NEWER)
    assert sorted(kind.id for trial in trials for kind in trial.kinds) == sorted(2 * NEWER)


QUICK = {"tabular": 19, "words": 14, "detector": 11}
"""Nets by what a case of theirs takes, and a seed of each that shows the faults."""

REFUSED = ("layers-mixed-up",)
"""Kinds of which no pair is made."""


# With the tests of real models: they take twenty seconds, and are of the bench.
@pytest.mark.zoo
@pytest.mark.parametrize("name", NEWER)
def test_a_newer_kind_can_be_planted_and_costs_something(name: str) -> None:
    kind = KINDS[name]
    net = next(net for net in QUICK if net in kind.nets)
    healthy = _planted(kind, net, False)[1] if kind.prepares else _untouched(net)
    if kind.id in REFUSED:
        with pytest.raises(pt2qa.Pt2qaError, match=kind.error):
            _planted(kind, net, True)
        return
    places, faulty = _planted(kind, net, True)
    assert healthy - faulty > LEAST_LOSS
    assert places is None or places


def _planted(kind: Kind, net: str, sick: bool) -> tuple[Places, float]:
    bed = Bed.made(net, QUICK[net], "xnnpack")
    places = kind.plant(bed, random.Random(kind.id), sick)
    known = {*INPUT, *(part for each in bed.graph().names.values() for part in (each.name, each.module))}
    assert known.issuperset(places or ())
    return places, bed.quality(bed.pair().quantized)


@functools.cache
def _untouched(net: str) -> float:
    bed = Bed.made(net, QUICK[net], "xnnpack")
    return bed.quality(bed.pair().quantized)
