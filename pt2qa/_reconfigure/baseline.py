"""Where a search starts: the given pair, or one converted with the free edits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from pt2qa._quantize.numbers import with_numbers
from pt2qa._quantize.pairing import QuantizedPair, Recipe
from pt2qa._reconfigure.figures import Figures
from pt2qa._reconfigure.scoring import Quality, Scorer
from pt2qa._repair.guard import Method, guarded
from pt2qa._repair.halves import Halves
from pt2qa.overrides.annotations import Annotations, fusions_in
from pt2qa.overrides.plan import Edit, OverridePlan
from pt2qa.plugins import describe

Requantize = Callable[..., QuantizedPair]
"""Requantizes a capture with ``overrides``; see :func:`pt2qa.quantize`."""


@dataclass(frozen=True)
class Baseline:
    """A pair to search from, made with free ``edits``; ``before`` is the measured quality without them.

    ``calibrated`` is whether the pair was calibrated on the data that it would be calibrated on again.
    """

    pair: QuantizedPair
    scorer: Scorer
    annotations: Annotations
    edits: tuple[Edit, ...]
    before: Quality
    calibrated: bool
    notes: tuple[str, ...] = ()

    @property
    def quality(self) -> Quality:
        """The pair's measured quality."""
        return self.scorer.quality(self.scorer.every)

    @property
    def figures(self) -> Figures:
        """The figures of the pair's outputs."""
        return self.scorer.figures(self.scorer.every)

    def plan(self, recipe: Recipe, edits: Sequence[Edit] = ()) -> OverridePlan:
        """The plan of the original pair, plus the free edits and some more."""
        kept = self.kept_with(edits)
        return OverridePlan((*recipe.edits, *kept, *edits), describe(recipe.plugin), self.pair.model)

    def kept_with(self, edits: Iterable[Edit]) -> tuple[Edit, ...]:
        """The free edits that still hold after some more: what was fitted to an op in int8 does not fit it in float."""
        left = {op for edit in edits if edit.kind == "float" for op in edit.ops}
        return tuple(edit for edit in self.edits if edit.kind not in ("bias", "round") or edit.ops[0] not in left)


def with_free_edits(
    base: Baseline,
    requantize: Requantize,
    fuse: bool,
    observers: Sequence[str],
    repairs: Sequence[type[Method]],
    data: Halves,
    needed: float | None,
) -> Baseline:
    """Converts with all fusions, then with each other observer, then with repairs; keeps what measures best.

    A pair that reaches the ``needed`` quality gets no further edit.
    """

    def enough(found: Baseline) -> bool:
        return needed is not None and found.quality.value >= needed

    best = base
    if fuse and not enough(best):
        best = _better(best, fusions_in(best.annotations), requantize)
    fused = best
    for observer in observers:
        if not enough(best):
            tried = _better(fused, _observing(fused.annotations, observer), requantize)
            best = tried if tried.quality.rank > best.quality.rank else best
    for method in repairs:
        if not enough(best):
            best = repaired(best, requantize, method, data)
    return best


def repaired(base: Baseline, requantize: Requantize, method: type[Method], data: Halves) -> Baseline:
    """The pair with a repair that helps on data it was not fitted to, and on what is measured; a note says so."""
    found = guarded(method, base.pair, data)
    new = base if found.fit is None else _better(base, found.fit.edits, requantize, data.made)
    data.made.clear()
    gain = f"{found.gain:+.2g} dB on calibration data that was left out of the fit"
    if found.fit is None:
        note = f"{method.name} not repaired: {found.refused}"
    elif new is base:
        note = f"{method.name} not repaired: {gain}, but no gain on what is measured"
    else:
        note = "; ".join(filter(None, (f"{method.name} repaired: {gain}", found.left_out)))
    return replace(new, notes=(*base.notes, note))


def _better(
    base: Baseline,
    edits: tuple[Edit, ...],
    requantize: Requantize,
    made: Mapping[tuple[Edit, ...], QuantizedPair] = MappingProxyType({}),
) -> Baseline:
    """The pair with additional edits if they improve its quality, else the pair unchanged.

    ``made`` are pairs that were quantized already, by their edits.
    """
    recipe, scorer = base.pair.recipe, base.scorer
    if not edits or recipe is None:
        return base
    plan = OverridePlan((*recipe.edits, *edits), describe(recipe.plugin), base.pair.model)
    known = made.get(plan.edits) or (with_numbers(base.pair, plan) if base.calibrated else None)
    pair = known or requantize(overrides=plan)
    annotations = base.annotations.with_edits(edits)
    changed = replace(
        base,
        pair=pair,
        scorer=scorer.of(pair),
        annotations=annotations,
        edits=(*base.edits, *edits),
        calibrated=True,
    )
    return changed if changed.quality.rank > base.quality.rank else base


def _observing(annotations: Annotations, observer: str) -> tuple[Edit, ...]:
    """One edit: another observer for all activations that it can observe; none if all have it."""
    ops = tuple(name for name, op in annotations.ops.items() if "observer" in op.levels)
    if not ops:
        return ()
    edit = Edit("observer", ops, observer)
    return () if annotations.after(edit) is None else (edit,)
