"""One case of the blind bench: planted, diagnosed, and judged on samples that the diagnosis never saw."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import pt2qa
from tests.diagnosis.blind.bed import Bed, UnfitError
from tests.diagnosis.blind.faults import HARMLESS, Kind, Places
from tests.diagnosis.blind.newer import KINDS

LEAST_LOSS, FLOOR, TRIES = 3.0, 15.0, 6
"""dB that a fault must cost, dB that a net must have without it, and nets that are drawn until both hold."""

MOST_CHANGE = 1.0
"""dB that a harmless change may cost: with the observers' smallest scale, another unit costs more."""


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        group: ``fault``, ``pair``, ``untouched`` or ``harmless``; the kinds that were planted are in ``kind``.
        state: ``diagnosed``; ``refused`` with the right error; ``error`` for any other; ``weak``, if no draw cost
            enough; ``unfit``, if no net had a place; ``missing``, if a package was; ``broken``, if the bench failed.
        healthy, faulty, after: dB on the check set without the fault, with it, and with all applied remedies.
        right_cause, right: whether the first row has the cause; and the place, and what else is asked.
        share: of the lost dB that was brought back, 0..1; nan where nothing was lost.
        claimed, measured: gain of all remedies, in dB, as reported, and of those that were applied, on the check set.
        within: whether ``measured`` is in the interval that the report gives; None if it gives none.
        rows, unheld: how many causes are named, and how many of those on an untouched net whose remedy does not hold.
    """

    group: str
    kind: str
    net: str = ""
    quantizer: str = ""
    state: str = "unfit"
    healthy: float = math.nan
    faulty: float = math.nan
    after: float = math.nan
    right_cause: bool = False
    right: bool = False
    share: float = math.nan
    claimed: float = math.nan
    measured: float = math.nan
    within: bool | None = None
    rows: int = 0
    unheld: int = 0
    forwards: int = 0
    seconds: float = math.nan
    said: str = ""

    @property
    def ran(self) -> bool:
        """Whether there is anything to judge."""
        return self.state in ("diagnosed", "refused", "error")


@dataclass(frozen=True)
class Trial:
    """A case that a seed draws.

    Attributes:
        group, kinds, harmless: what is planted, and what is changed beside it.
        seed: of everything else.
        nets: kinds of net to draw from, if not all that the kinds take.
    """

    group: str
    kinds: tuple[Kind, ...]
    seed: str
    harmless: str = ""
    nets: tuple[str, ...] = ()

    def run(self) -> Outcome:
        """Draws nets until one shows the fault, and has it diagnosed."""
        name = " + ".join(filter(None, (*(kind.id for kind in self.kinds), self.harmless)))
        out = Outcome(self.group, name)
        nets = [net for net in self.nets or NETS if all(net in kind.nets for kind in self.kinds)]
        for number in range(TRIES if nets else 0):
            r = random.Random(f"{self.seed} {number}")
            out.net, out.quantizer, seed = r.choice(nets), r.choice(("xnnpack", "x86")), r.randrange(1 << 20)
            try:
                if self._tried(out, seed, f"{self.seed} {number}"):
                    break
            except UnfitError:
                continue
            except pytest.skip.Exception as missing:
                out.state, out.said = "missing", str(missing)
            except Exception as error:  # of the bench itself, which is printed and counted
                out.state, out.said = "broken", f"{type(error).__name__}: {error}"
                break
        return out

    def _bed(self, out: Outcome, seed: int, state: str, sick: Sequence[bool]) -> tuple[Bed, list[Places]]:
        bed = Bed.made(out.net, seed, out.quantizer)
        places = [kind.plant(bed, random.Random(state), ill) for kind, ill in zip(self.kinds, sick, strict=True)]
        return bed, places

    def _tried(self, out: Outcome, seed: int, state: str) -> bool:
        """Whether this draw is the one that counts."""
        count = len(self.kinds)
        bed, _ = self._bed(out, seed, state, [False] * count)
        out.healthy, out.faulty = bed.quality(bed.pair().quantized), math.nan
        if self.kinds and out.healthy < FLOOR:
            return False
        begun = time.monotonic()
        bed, places = self._bed(out, seed, state, [True] * count)
        try:
            pair = bed.pair()
            out.faulty = bed.quality(pair.quantized)
            if not self._costs(out, seed, state):
                out.state = "weak"
                return False
            begun = time.monotonic()
            found = _diagnosed(bed, pair)
            out.seconds = time.monotonic() - begun
            out.state, out.after = "diagnosed", bed.quality(_remedied(found, pair).quantized)
        except UnfitError:
            raise
        except Exception as error:  # a wrong answer that is printed, unless it is the right one
            if math.isnan(out.faulty) and not isinstance(error, pt2qa.Pt2qaError):
                raise  # the bench could not plant it
            out.said, out.seconds = f"{type(error).__name__}: {error}", time.monotonic() - begun
            refused = any(kind.error and re.search(kind.error, str(error)) for kind in self.kinds)
            named = all(each is None or any(place and place in str(error) for place in each) for each in places)
            out.state = "refused" if refused and named else "error"
            out.right_cause = out.right = out.state == "refused"
            out.share = math.nan if out.right else 0.0
            return True
        self._judge(out, found, places)
        if self.harmless:
            self._changed(out, seed, state, found)
        return True

    def _costs(self, out: Outcome, seed: int, state: str) -> bool:
        """Whether each fault does, beside the other one."""
        if not self.kinds or self.kinds[0].elsewhere:
            return True
        if len(self.kinds) == 1:
            return not out.healthy - out.faulty < LEAST_LOSS
        for number in range(2):
            bed, _ = self._bed(out, seed, state, [number == 0, number == 1])
            if bed.quality(bed.pair().quantized) - out.faulty < LEAST_LOSS:
                return False
        return True

    def _judge(self, out: Outcome, found: pt2qa.Diagnosis, places: list[Places]) -> None:
        rows = found.rows
        out.rows, out.forwards = len(rows), found.forwards
        out.said = ", ".join(f"{row.cause} {row.name}".strip() for row in rows) or "nothing"
        value = {figure.name: figure.sqnr for figure in found.figures}
        out.claimed = value.get("after", math.nan) - value.get("now", math.nan)
        gain = out.measured = out.after - out.faulty
        if not self.kinds:
            held = gain > 0 and not gain < out.claimed / 2
            out.unheld, out.right, out.within = (0 if held else out.rows), not out.rows, _within(rows, gain)
            return
        fits = [[_fits(row, kind, where) for row in rows] for kind, where in zip(self.kinds, places, strict=True)]
        out.right_cause = bool(rows) and any(rows[0].cause in kind.causes for kind in self.kinds)
        out.right = any(each[:1] == [True] for each in fits) and all(any(each) for each in fits)
        lost = out.healthy - out.faulty
        if not self.kinds[0].elsewhere:
            by_hand = out.right and self.kinds[0].by_hand
            part = 1.0 if by_hand or out.after == math.inf else gain / lost
            out.share = 0.0 if math.isnan(part) else min(max(part, 0.0), 1.0)
            if out.rows and not gain:  # nothing was applied, and what the right advice gives is what was lost
                out.measured = lost if out.right else math.nan
        else:
            out.measured = math.nan  # there was nothing to gain
        out.within = _within(rows, out.measured)

    def _changed(self, out: Outcome, seed: int, state: str, found: pt2qa.Diagnosis) -> None:
        """Diagnoses again after the harmless change; right is what says the same.

        Units are not harmless where an observer's smallest scale, its eps, is too large for them.
        """
        bed, _ = self._bed(out, seed, state, [True] * len(self.kinds))
        HARMLESS[self.harmless](bed, random.Random(state))
        pair = bed.pair()
        if abs(bed.quality(pair.quantized) - out.faulty) > MOST_CHANGE:
            raise UnfitError
        other = _diagnosed(bed, pair)
        out.right = [(row.cause, row.name) for row in other.rows] == [(row.cause, row.name) for row in found.rows]
        if not out.right:
            out.said += " -> " + (", ".join(f"{row.cause} {row.name}" for row in other.rows) or "nothing")


def _diagnosed(bed: Bed, pair: pt2qa.QuantizedPair) -> pt2qa.Diagnosis:
    return pt2qa.diagnose(pair, bed.use, evaluation=bed.evaluation, verify_code=False, progress=False)


def _remedied(found: pt2qa.Diagnosis, pair: pt2qa.QuantizedPair) -> pt2qa.QuantizedPair:
    """The pair with all remedies, the one that was diagnosed if none can be applied."""
    try:
        return found.pair
    except pt2qa.ReportError:
        return pair


def _fits(row: Any, kind: Kind, places: Places) -> bool:
    at = places is None or any(row.name in (place, place.rpartition("/")[0] or place) for place in places)
    return row.cause in kind.causes and at


def _within(rows: Sequence[Any], measured: float) -> bool | None:
    """Whether the only row's interval of its gain holds; None without one."""
    if len(rows) != 1 or any(map(math.isnan, (measured, rows[0].low, rows[0].high))):
        return None
    return bool(rows[0].low <= measured <= rows[0].high)


NETS = ("cnn", "detector", "encoder", "words", "lstm", "tabular", "digits", "mobilenet_v2")


def deck(seed: int, count: int, kinds: Sequence[str] = (), nets: Sequence[str] = ()) -> list[Trial]:
    """Cases of a seed: of ten, seven have one fault, one has two, one is untouched, and one is changed harmlessly."""
    r = random.Random(f"deck {seed}")
    waiting: list[Kind] = []
    chosen = [KINDS[name] for name in kinds or KINDS]

    def fit(kind: Kind) -> set[str]:
        return set(kind.nets) & set(nets or NETS)

    composing = [kind for kind in KINDS.values() if kind.composes and fit(kind)]
    groups = ("fault",) if kinds else (*["fault"] * 7, "pair", "untouched", "harmless")
    trials = []
    for number in range(count):
        group, planted, change = groups[number % len(groups)], (), ""
        if group == "fault":
            waiting = waiting or r.sample(chosen, len(chosen))
            planted = (waiting.pop(),)
        elif group == "pair":
            one = r.choice(composing)
            planted = (one, r.choice([kind for kind in composing if kind.part != one.part and fit(kind) & fit(one)]))
        elif group == "harmless":
            planted = r.choice(((), (KINDS["faint-calibration"],), (KINDS["reduced-range"],)))
            change = r.choice([*HARMLESS])
        trials.append(Trial(group, planted, f"{seed} {number}", change, tuple(nets)))
    return trials
