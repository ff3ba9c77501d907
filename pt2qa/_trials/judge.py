"""The quality of a model with a treatment: quantized again where needed, else simulated."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from pt2qa._capture.inputs import detached
from pt2qa._quantize.pairing import QuantizedPair, Recipe
from pt2qa._quantize.quantization import quantize_again, with_numbers
from pt2qa._ranks import same_everywhere
from pt2qa._sensitivity.roundings import readers_of, with_readers, with_roundings
from pt2qa._simulator.batches import as_batch, nbytes_of, structured
from pt2qa._simulator.data import Data
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.verification import Outputs, Verification, digest_of, graph_outputs
from pt2qa._trials.outcome import KEPT_BYTES, Item, Outcome, Reference, outcome_of
from pt2qa._trials.treatment import Target, Treatment, places_of
from pt2qa.errors import Pt2qaError, SelectionError, SimulationError
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.edited import annotations_of
from pt2qa.overrides.plan import Edit, OverridePlan
from pt2qa.plugins import describe
from pt2qa.plugins.options import with_options


class Judge:
    """Measures treatments of a pair on the data, each once; SQNR requires a floating-point output.

    The simulator of a pair that is quantized again is verified on the first batch; if it does not reproduce the
    converted graph, that graph itself is measured.

    Attributes:
        calibration: what the model is quantized again on; None: the pair's own batches.
        sqnr: whether outputs are measured in addition to the target's metric.
        unseen: digests of the batches that are kept apart, for the verdict of a search.
        forwards: runs of the model on a batch, ``quantizations`` how often it was quantized again, ``measured`` how
            many outcomes there are.
    """

    def __init__(
        self,
        pair: QuantizedPair,
        data: Data,
        target: Target | None,
        title: str,
        *,
        unit: str = "trial",
        calibration: Data | None = None,
        sqnr: bool = True,
        keeps_unseen: bool = False,
    ) -> None:
        self.pair, self.data, self.target, self.calibration, self.sqnr = pair, data, target, calibration, sqnr
        self.forwards = self.quantizations = self.measured = 0
        self._pairs: dict[Any, QuantizedPair] = {self._key(Treatment(), ()): pair}
        self._annotations: dict[Any, Annotations] = {}
        self._known: dict[Treatment, Outcome] = {}
        self._own: dict[tuple[bool, str], Any] = {}
        self._free = KEPT_BYTES
        self.checks = {on: Verification(pair.graphs) for on in (True, False)}
        self.reference = Reference(pair, data, lambda values, key: self.outputs(values, False, key))
        if self.metric is None and not self.reference.names:
            raise SelectionError(
                "no output is a floating-point tensor, so there is no SQNR. Pass metric=, a function of a model, or "
                "target=pt2qa.Target(at_least, metric=...)."
            )
        self._batches = sum(1 for _ in self.reference)
        # Every third batch is one that a search does not see.
        self.unseen = frozenset(list(self.reference.fold_of)[2::3] if keeps_unseen and self.metric is None else ())
        self.bar = data.bar(title, unit)

    @property
    def metric(self) -> Callable[..., float] | None:
        return None if self.target is None else self.target.metric

    @property
    def recipe(self) -> Recipe | None:
        return self.pair.recipe if self.pair.capture is not None else None

    def outcome(self, treatment: Treatment) -> Outcome:
        """The quality of the model with a treatment; a Pt2qaError says why it cannot be quantized so."""
        if treatment not in self._known:
            played = self._switched(treatment)
            if played not in self._known:
                self._known[played] = self._measured(played)
            self._known[treatment] = self._known[played]
        return self._known[treatment]

    def _measured(self, treatment: Treatment) -> Outcome:
        self.bar.update()
        self.measured += 1
        pair = self.pair_with(treatment)
        on = frozenset(index for index, place in places_of(pair).items() if place not in treatment.exact)
        model, *apart = (SimulatedModel(pair, on, each) for each in self._simulators(pair, treatment))
        reference = self.reference.of(pair)
        runs = functools.partial(self._outcome, reference, model)
        if treatment == Treatment():
            return runs(lambda item: self.outputs(item.values, key=item.key))
        if not treatment.made_of_edits:
            fold_of = self.reference.fold_of  # each batch is judged with what was fitted without its fold
            return runs(self._counted(lambda item: (apart[fold_of[item.key]] if apart else model).of_item(item)))
        try:
            return runs(self._counted(verified_run(pair)))
        except SimulationError:
            return self._of_graph(reference, pair)

    def outputs(self, values: Sequence[Any], on: bool = True, key: str | None = None) -> Any:
        """What the simulator returns for the pair or its reference; each is run once, and verified.

        ``key`` is the digest of the values, if it is known.
        """
        place = (on, key or digest_of(values))
        if place in self._own:
            return self._own[place]
        simulator = self.pair.simulator

        def engine() -> Outputs:
            self.forwards += 1
            found = detached(simulator.run(values, on=on))
            return Outputs(quantized=found) if on else Outputs(reference=found)

        run = self.checks[on].run(engine, values)
        found = run.quantized if on else run.reference
        size = nbytes_of(found)
        if size <= self._free:
            self._free -= size
            self._own[place] = found
        return found

    @property
    def notes(self) -> list[str]:
        return [*self.reference.notes, *(note for check in self.checks.values() for note in check.notes)]

    def converted(self, pair: QuantizedPair) -> Outcome:
        return self._of_graph(self.reference.of(pair), pair)

    def _of_graph(self, reference: Reference, pair: QuantizedPair) -> Outcome:
        graph = pair.quantized
        return self._outcome(reference, graph, self._counted(lambda item: graph_outputs(graph, item.values)))

    def of_float(self) -> float:
        """The user's metric of the float model; it must be a number, as others are relative to it."""
        assert self.target is not None
        if math.isnan(self.float_value):
            raise SelectionError(
                f"target: {self.target.name} of the float model is NaN, so no share of it can be reached. Return a "
                "number, or pass of_float=False."
            )
        return self.float_value

    @functools.cached_property
    def float_value(self) -> float:
        """The user's metric of the float model."""
        self.forwards += self._batches
        return self._metric(SimulatedModel(self.pair, frozenset()))

    def pair_with(self, treatment: Treatment) -> QuantizedPair:
        """The pair that a treatment quantizes; what it plays is not in it."""
        pair = self._quantized(treatment, treatment.edits)
        return pair.as_deployed() if treatment.as_deployed else pair

    def applied(self, treatment: Treatment) -> QuantizedPair:
        """The pair with all edits of a treatment, those that were simulated by switching too."""
        return self._quantized(treatment, treatment.all_edits)

    def annotations(self, treatment: Treatment) -> Annotations | None:
        """The quantizer's annotations with the options and edits of a treatment; None if they are not known."""
        recipe, capture = self.recipe, self.pair.capture
        if recipe is None or capture is None:
            return None
        plain, edited = (treatment.options, ()), (treatment.options, treatment.edits)
        if plain not in self._annotations:
            plugin = with_options(recipe.plugin, dict(treatment.options))
            self._annotations[plain] = (
                annotations_of(capture, plugin, recipe.edits, qat=recipe.qat)
                if treatment.options
                else recipe.annotations
            )
        if edited not in self._annotations:
            self._annotations[edited] = self._annotations[plain].with_edits(treatment.edits)
        return self._annotations[edited]

    def plan(self, treatment: Treatment) -> OverridePlan:
        assert self.recipe is not None, "edits need a recipe"
        plugin = with_options(self.recipe.plugin, dict(treatment.options))
        return OverridePlan((*self.recipe.edits, *treatment.all_edits), describe(plugin), self.pair.model)

    def forget(self, *but: Treatment) -> None:
        """Drops the pairs of all treatments but these and the pair itself; what was measured stays known."""
        kept = [self._key(each, each.edits) for each in (Treatment(), *but)]
        self._pairs = {key: pair for key, pair in self._pairs.items() if key in kept}

    def _key(self, treatment: Treatment, edits: tuple[Edit, ...]) -> Any:
        return (treatment.options, edits, treatment.data)

    def _quantized(self, treatment: Treatment, edits: tuple[Edit, ...]) -> QuantizedPair:
        """The pair with the options and data of a treatment, and some edits; each is quantized once."""
        key = self._key(treatment, edits)
        if key not in self._pairs:
            self._pairs[key] = self._quantized_again(treatment, edits)
        return self._pairs[key]

    def _quantized_again(self, treatment: Treatment, edits: tuple[Edit, ...]) -> QuantizedPair:
        recipe = self.recipe
        assert recipe is not None, "only a pair with a recipe is quantized again"
        plugin = with_options(recipe.plugin, dict(treatment.options))
        plan = OverridePlan((*recipe.edits, *edits), describe(plugin), self.pair.model)
        if not treatment.options:
            # What was calibrated on the same data, and has all but the last edits, may need other numbers alone.
            for count in reversed(range(len(edits))):
                before = self._pairs.get(self._key(treatment, edits[:count]))
                if before is not None and (before is not self.pair or self.calibration is treatment.data is None):
                    return with_numbers(before, plan) or self._calibrated(treatment, plugin, plan)
        return self._calibrated(treatment, plugin, plan)

    def _calibrated(self, treatment: Treatment, plugin: Any, plan: OverridePlan) -> QuantizedPair:
        recipe = self.recipe
        assert recipe is not None, "only a pair with a recipe is quantized again"
        data = treatment.data or self.calibration or recipe.data
        if data is None:
            raise Pt2qaError("the pair was calibrated on an iterator, which is exhausted")
        self.quantizations += 1
        progress = self.data.progress if data is self.calibration else False
        overrides = plan if plan.edits else None
        return quantize_again(self.pair, data, plugin=plugin, overrides=overrides, progress=progress)

    def without(self, treatment: Treatment, sites: Collection[int]) -> Treatment:
        places = places_of(self.pair_with(treatment))
        return treatment.then(Treatment(exact=frozenset(places[site] for site in sites)))

    def _switched(self, treatment: Treatment) -> Treatment:
        """The same with places and readers in float instead of edits that leave them there."""
        if not treatment.floats:
            return treatment
        before, pair = self.annotations(treatment), self.pair_with(treatment)
        assert before is not None, "edits need a recipe"
        after, places = before.with_edits(treatment.floats), places_of(pair)
        on, had, left = after.sites_on(pair.sites), before.readers_of(pair.sites), after.readers_of(pair.sites)
        lost = (
            index
            for index, names in left.items()
            if names != had.get(index) and not readers_of(pair.program, pair.sites[index].result) <= names
        )
        return replace(
            treatment,
            floats=(),
            exact=treatment.exact | {place for index, place in places.items() if index not in on},
            readers=frozenset((places[index], left[index]) for index in lost),
        )

    def _simulators(self, pair: QuantizedPair, treatment: Treatment) -> list[Simulator]:
        """That of a treatment; then, if it was fitted to the evaluation data, one for each fold of these."""
        program = pair.program
        if treatment.restored:
            constants = (
                replace(each, weight_site=None, stored=each.reference)
                if (each.reader, each.argument) in treatment.restored
                else each
                for each in program.constants
            )
            program = replace(program, constants=tuple(constants))
        instead, readers = dict(treatment.played), dict(treatment.readers)
        sites = places_of(pair)
        if readers:
            program = with_readers(program, {index: readers[at] for index, at in sites.items() if at in readers})
        places = {index: instead[at] for index, at in sites.items() if at in instead}
        found = [pair.simulator] if program is pair.program and not places else []
        folds = max((len(each.apart) for each in places.values()), default=0)
        for fold in range(-1 if not found else folds, folds):
            roundings = {
                index: each.value if fold < 0 or not each.apart else each.apart[fold] for index, each in places.items()
            }
            found.append(Simulator(with_roundings(program, roundings), fused=pair.simulator.fused))
        return found

    def _counted(self, run: Callable[[Item], Any]) -> Callable[[Item], Any]:
        def counted(item: Item) -> Any:
            self.forwards += 1
            return run(item)

        return counted

    def _outcome(self, reference: Reference, model: Callable[..., Any], run: Callable[[Item], Any]) -> Outcome:
        if self.metric is None:
            return outcome_of(reference, run, unseen=self.unseen)
        self.forwards += self._batches
        if not self.sqnr:
            return Outcome(self._metric(model), (), of_metric=True)
        return outcome_of(reference, run, functools.partial(self._metric, model))

    def _metric(self, model: Callable[..., Any]) -> float:
        assert self.target is not None
        assert self.target.metric is not None
        return same_everywhere(float(self.target.metric(model)), self.target.name)


class SimulatedModel:
    """A callable model: the simulator with some sites on; ``simulator`` is another one than the pair's own."""

    def __init__(self, pair: QuantizedPair, on: frozenset[int], simulator: Simulator | None = None) -> None:
        self.pair, self.on, self.simulator = pair, on, simulator or pair.simulator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph_module = self.pair.quantized
        return structured(graph_module, self.run(self.pair.values(as_batch(args, kwargs, graph_module))))

    def run(self, values: list[Any]) -> Any:
        every = len(self.on) == len(self.pair.sites)
        return self.simulator.run(values, on=True if every else self.on)

    def of_item(self, item: Item) -> Any:
        return self.run(item.values)


def verified_run(pair: QuantizedPair) -> Callable[[Item], Any]:
    """Simulates a pair's converted graph, and verifies that on the first batch."""
    check = Verification(pair.graphs)

    def run(item: Item) -> Any:
        return check.run(lambda: Outputs(quantized=pair.simulator.run(item.values, on=True)), item.values).quantized

    return run
