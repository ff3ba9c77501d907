"""Where a search starts: the pair as it is, or converted with the edits that cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pt2qa.errors import PluginError, QuantizeError
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.fusion import fusions_in
from pt2qa.overrides.plan import Edit, OverridePlan
from pt2qa.pairing import QuantizedPair, Recipe
from pt2qa.plugins import describe
from pt2qa.reconfiguration.scoring import Scorer

Again = Callable[..., QuantizedPair]
"""Quantizes a capture anew with ``overrides``; see :func:`pt2qa.quantize`."""


@dataclass(frozen=True)
class Start:
    """A pair to search from.

    Attributes:
        pair: the pair.
        scorer: scores it.
        annotations: what its quantizer annotates.
        edits: the free edits that it was made with.
        before: quality of the pair without them.
    """

    pair: QuantizedPair
    scorer: Scorer
    annotations: Annotations
    edits: tuple[Edit, ...]
    before: float

    @property
    def quality(self) -> float:
        """The quality of the pair."""
        return self.scorer.quality(self.scorer.every)

    def plan(self, recipe: Recipe, edits: Sequence[Edit] = ()) -> OverridePlan:
        """The plan of the original pair, the free edits, and some more."""
        return OverridePlan((*recipe.edits, *self.edits, *edits), describe(recipe.plugin), self.pair.model)


def with_free_edits(start: Start, again: Again, fuse: bool, observers: Sequence[str]) -> Start:
    """Converts with all fusions, then with other observers; each is kept where the quality is better for it.

    Args:
        start: the pair as it is.
        again: quantizes it anew with ``overrides``.
        fuse: whether to fuse.
        observers: names of observers to try for all activations.

    Raises:
        SelectionError: there is no such observer.
    """
    best = start
    if fuse:
        best = _better(best, fusions_in(best.annotations), again)
    for observer in observers:
        best = _better(best, _observing(best.annotations, observer), again)
    return best


def _better(start: Start, edits: tuple[Edit, ...], again: Again) -> Start:
    """The pair with some more edits where its quality is better for them, else the pair as it is."""
    recipe, scorer = start.pair.recipe, start.scorer
    if not edits or recipe is None:
        return start
    pair = again(overrides=OverridePlan((*recipe.edits, *edits), describe(recipe.plugin), start.pair.model))
    other = Scorer(pair, scorer.batches, scorer.target, scorer.inputs_of, scorer.progress, scorer.evaluations)
    changed = Start(pair, other, start.annotations.with_edits(edits), (*start.edits, *edits), start.before)
    if changed.quality > start.quality:
        return changed
    scorer.evaluations = other.evaluations
    return start


def _observing(annotations: Annotations, observer: str) -> tuple[Edit, ...]:
    """An edit for each op whose activations another observer can watch."""
    found: list[Edit] = []
    for name, op in annotations.ops.items():
        edit = Edit("observer", (name,), observer)
        if "observer" in op.levels and _changes(annotations, edit):
            found.append(edit)
    return tuple(found)


def _changes(annotations: Annotations, edit: Edit) -> bool:
    try:
        annotations.with_edits([edit])
    except (QuantizeError, PluginError):  # this op has no observer that could be another one
        return False
    return True
