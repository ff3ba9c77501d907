"""Where a search starts: the given pair, or one converted with the free edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pt2qa._quantize.pairing import QuantizedPair, Recipe
from pt2qa._reconfigure.scoring import Quality, Scorer
from pt2qa.overrides.annotations import Annotations, fusions_in
from pt2qa.overrides.plan import Edit, OverridePlan
from pt2qa.plugins import describe

Requantize = Callable[..., QuantizedPair]
"""Requantizes a capture with ``overrides``; see :func:`pt2qa.quantize`."""


@dataclass(frozen=True)
class Baseline:
    """A pair to search from, made with free ``edits``; ``before`` is the measured quality without them."""

    pair: QuantizedPair
    scorer: Scorer
    annotations: Annotations
    edits: tuple[Edit, ...]
    before: Quality

    @property
    def quality(self) -> Quality:
        """The pair's measured quality."""
        return self.scorer.quality(self.scorer.every)

    def plan(self, recipe: Recipe, edits: Sequence[Edit] = ()) -> OverridePlan:
        """The plan of the original pair, plus the free edits and some more."""
        return OverridePlan((*recipe.edits, *self.edits, *edits), describe(recipe.plugin), self.pair.model)


def with_free_edits(
    base: Baseline, requantize: Requantize, fuse: bool, observers: Sequence[str], needed: float | None
) -> Baseline:
    """Converts with all fusions, then with each other observer; keeps what measures best.

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
    return best


def _better(base: Baseline, edits: tuple[Edit, ...], requantize: Requantize) -> Baseline:
    """The pair with additional edits if they improve its quality, else the pair unchanged."""
    recipe, scorer = base.pair.recipe, base.scorer
    if not edits or recipe is None:
        return base
    pair = requantize(overrides=OverridePlan((*recipe.edits, *edits), describe(recipe.plugin), base.pair.model))
    changed = Baseline(pair, scorer.of(pair), base.annotations.with_edits(edits), (*base.edits, *edits), base.before)
    return changed if changed.quality.rank > base.quality.rank else base


def _observing(annotations: Annotations, observer: str) -> tuple[Edit, ...]:
    """One edit: another observer for all activations that it can observe; none if all have it."""
    ops = tuple(name for name, op in annotations.ops.items() if "observer" in op.levels)
    if not ops:
        return ()
    edit = Edit("observer", ops, observer)
    return () if annotations.after(edit) is None else (edit,)
