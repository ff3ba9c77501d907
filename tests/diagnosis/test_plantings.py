"""What is planted costs what it should, and does what its sentence says; untouched models are healthy."""

from __future__ import annotations

import itertools
import re
from math import nan
from pathlib import Path

import pytest

import pt2qa
from tests.diagnosis.bench import LEAST_LOSS, Bench, Outcome, append, read, score, sqnr
from tests.diagnosis.faults import every_fault
from tests.diagnosis.models import NETS
from tests.diagnosis.subject import QUANTIZERS, Subject

HEALTHY = 25.0
ON_DEVICES = ("overflowing-bias", "saturating-sums")
FAULTS = every_fault()


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("net", NETS)
def test_an_untouched_model_is_healthy(bench: Bench, net: str, quantizer: str) -> None:
    assert bench.untouched(net, quantizer) > HEALTHY


def test_there_are_at_least_thirty_kinds_and_six_models() -> None:
    assert len(FAULTS) >= 30
    assert len(NETS) >= 6
    assert all(fault.causes or fault.finding or fault.note or fault.error for fault in FAULTS.values())


COSTLY = [name for name, each in FAULTS.items() if each.costs and name not in ON_DEVICES]


@pytest.mark.parametrize(("fault", "first"), list(zip(COSTLY, itertools.cycle((1, -1)))))
def test_a_fault_costs_half_of_the_noise_budget(bench: Bench, fault: str, first: int) -> None:
    """In the first model that has a place for it, with one quantizer or else the other; the bench tells of all."""
    places = ((net, quantizer) for quantizer in QUANTIZERS[::first] for net in NETS)
    found = ((place, FAULTS[fault].plant(Subject.healthy(*place))) for place in places)
    place, planted = next((place, planted) for place, planted in found if planted is not None)
    against = planted.pair.reference if planted.against is None else planted.against
    after = sqnr(planted.pair.quantized, against, planted.evaluation)
    assert not bench.untouched(*place) - after < LEAST_LOSS
    names = {name.name for name in planted.pair.names.values()}
    assert planted.places is None or set(planted.places) & names


@pytest.mark.parametrize("fault", [name for name, each in FAULTS.items() if each.error])
def test_what_cannot_be_quantized_is_an_error_that_says_so(fault: str) -> None:
    subject = Subject.healthy("linears", "xnnpack")
    with pytest.raises(pt2qa.Pt2qaError, match=re.compile(FAULTS[fault].error)):
        pt2qa.diagnose(FAULTS[fault].plant(subject).pair, subject.evaluation, progress=False)


def test_planting_leaves_the_untouched_model_as_it_is() -> None:
    before = {
        key: value.clone() for key, value in Subject.healthy("linears", "x86").capture().program.state_dict.items()
    }
    FAULTS["outlier-activation-channel"].plant(Subject.healthy("linears", "x86"))
    after = Subject.healthy("linears", "x86").capture().program.state_dict
    assert all(before[key].equal(after[key]) for key in before)


def test_outcomes_are_kept_and_added_up(tmp_path: Path) -> None:
    path, ends, none = tmp_path / "outcomes.csv", (1.0, 20.0, 17.0), (nan, nan, nan)
    right = Outcome(
        "offset", "a", "x86", 30.0, 10.0, "precision", "fc", 1, True, True, 0.9, 18.0, *ends, True, 1.0, "so"
    )
    wrong = Outcome("offset", "b", "x86", 30.0, 28.0, "observer", "fc", 1, False, True, nan, 1.0, *ends, True, 1.0, "")
    alarm = Outcome("", "b", "x86", 30.0, 30.0, "observer", "fc", 1, False, False, nan, 2.0, *none, False, 1.0, "")
    for each in (right, wrong, alarm):
        append(path, each)
    found = score(read(path), FAULTS)
    assert (found.diagnosed, found.right, found.brought_back, found.mean_back) == (2, 0.5, 0.9, 0.9)
    assert (found.within, found.intervals) == (1.0, 2)
    assert (found.untouched, found.false_alarms, found.unplanted) == (1, 1, ("offset b x86",))
