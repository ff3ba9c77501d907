"""Where a search starts: the given pair, or one converted with the free edits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._repair.guard import Method, guarded
from pt2qa._trials.judge import Judge
from pt2qa._trials.outcome import Folds, Outcome
from pt2qa._trials.treatment import Treatment
from pt2qa.overrides.annotations import Annotations, fusions_in, observing
from pt2qa.overrides.plan import Edit


@dataclass(frozen=True)
class Baseline:
    """A treatment of free edits, its pair and its outcome."""

    judge: Judge
    state: Treatment = field(default_factory=Treatment)
    notes: tuple[str, ...] = ()

    @property
    def pair(self) -> QuantizedPair:
        return self.judge.pair_with(self.state)

    @property
    def annotations(self) -> Annotations:
        found = self.judge.annotations(self.state)
        assert found is not None, "a pair that is quantized again has annotations"
        return found

    @property
    def outcome(self) -> Outcome:
        return self.judge.outcome(self.state)

    def quality(self, on: Collection[int]) -> Outcome:
        """The quality with these sites of the pair on, and all others in float."""
        off = {site.index for site in self.pair.sites}.difference(on)
        return self.judge.outcome(self.judge.without(self.state, off) if off else self.state)

    def edited(self, edits: Sequence[Edit]) -> Treatment:
        """The treatment with more edits, all of which are applied by quantizing again."""
        return self.state.then(Treatment(floats=tuple(edits)))

    def free(self, edits: Sequence[Edit]) -> Treatment:
        return self.state.then(Treatment(edits=tuple(edits)))

    def better(self, edits: Sequence[Edit]) -> Baseline:
        if not edits:
            return self
        changed = replace(self, state=self.free(edits))
        return changed if changed.outcome.rank > self.outcome.rank else self


def with_free_edits(
    base: Baseline,
    fuse: bool,
    observers: Sequence[str],
    repairs: Sequence[type[Method]],
    data: Folds,
    needed: float | None,
) -> Baseline:
    """Converts with all fusions, then with each other observer, then with repairs; keeps what measures best.

    A pair that reaches the ``needed`` quality gets no further edit.
    """

    def enough(found: Baseline) -> bool:
        return needed is not None and found.outcome.value >= needed

    best = base
    if fuse and not enough(best):
        best = best.better(fusions_in(best.annotations))
    fused = best
    for observer in observers:
        if not enough(best):
            tried = fused.better(observing(fused.annotations, observer))
            best = tried if tried.outcome.rank > best.outcome.rank else best
    for method in repairs:
        if not enough(best):
            best = repaired(best, method, data)
    return best


def repaired(base: Baseline, method: type[Method], data: Folds) -> Baseline:
    """The pair with a repair, if it gains on held-out calibration data and on the evaluation data; a note says so."""
    found = guarded(method, base.pair, data)
    new = base if found.fit is None else base.better(found.fit.edits)
    gain = f"{found.gain:+.2g} dB on held-out calibration data"
    if found.fit is None:
        note = f"{method.name} not applied: {found.refused}"
    elif new is base:
        note = f"{method.name} not applied: {gain}, but no gain on the evaluation data"
    elif found.doubt and not new.outcome.gain_over(base.outcome).is_certain:
        new, note = (
            base,
            f"{method.name} not applied: {gain}, {found.doubt}, and no certain gain on the evaluation data",
        )
    else:
        note = "; ".join(filter(None, (f"{method.name} applied: {gain}", found.left_out)))
    base.judge.forget(new.state)
    return replace(new, notes=(*base.notes, note))
