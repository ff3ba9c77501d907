"""Measures what a remedy gives: quantizes again where needed, and switches or replaces sites where that plays it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tqdm import tqdm

from pt2qa._graph.internals.torch import pytree
from pt2qa._quantize.pairing import QuantizedPair, Recipe
from pt2qa._quantize.quantization import quantize_again
from pt2qa._ranks import everywhere
from pt2qa._reconfigure.figures import Figures, figures_of
from pt2qa._reconfigure.reference import KEPT_BYTES, Item, Reference
from pt2qa._reconfigure.scoring import SimulatedModel
from pt2qa._reconfigure.target import Target
from pt2qa._sensitivity.metrics import detached
from pt2qa._sensitivity.played import with_roundings
from pt2qa._sensitivity.roundings import Rounding, rounding
from pt2qa._simulator.outputs import nbytes_of
from pt2qa._simulator.positions import Mask
from pt2qa._simulator.program import QuantParams
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.verification import Outputs, Verification, digest_of, graph_outputs
from pt2qa.errors import Pt2qaError
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.edited import annotations_of
from pt2qa.overrides.plan import Edit, OverridePlan
from pt2qa.plugins import describe
from pt2qa.plugins.options import with_options

Ranges = Literal["fitted", "by channel"]
"""Parameters for all sites that are tried: those that fit the data, per tensor or by channel."""

Place = tuple[str, str, int]
"""A site in any pair of the model: its kind, its name, and its number among those of that kind and name."""


def places_of(pair: QuantizedPair) -> dict[int, Place]:
    """The place of each site."""
    seen: dict[tuple[str, str], int] = {}
    found: dict[int, Place] = {}
    for site in pair.sites:
        key = (site.kind, site.name)
        found[site.index] = (*key, seen.get(key, 0))
        seen[key] = seen.get(key, 0) + 1
    return found


@dataclass(frozen=True, eq=False)
class Data:
    """Batches to calibrate on, what they are called in calls, and which of their positions count in numbers."""

    name: str
    batches: Iterable[Any] = field(repr=False)
    inputs_of: Callable[[Any], Any] | None = None
    mask: Mask | None = None


@dataclass(frozen=True, eq=False)
class Played:
    """What rounds at a place instead, and its parameters if it is quantize-dequantize and nothing else."""

    value: Rounding = field(repr=False)
    params: QuantParams | None = None


def with_params(params: QuantParams) -> Played:
    """Quantize-dequantize with other parameters."""
    return Played(rounding(params), params)


@dataclass(frozen=True)
class Treatment:
    """All that remedies change; the empty one is the pair as it was given.

    Attributes:
        options: of the quantizer, by name.
        edits: of its annotations, for which the model is quantized again.
        floats: ``float`` edits, played by switching the sites that they remove.
        data: to calibrate on; None: the pair's own.
        exact: places that are left in float, where no edit says so.
        played: by place, what rounds there instead.
        as_deployed: whether dynamic scales are computed as the kernels do.
    """

    options: tuple[tuple[str, object], ...] = ()
    edits: tuple[Edit, ...] = ()
    floats: tuple[Edit, ...] = ()
    data: Data | None = None
    exact: frozenset[Place] = frozenset()
    played: tuple[tuple[Place, Played], ...] = ()
    as_deployed: bool = False

    def then(self, other: Treatment) -> Treatment:
        """Both, the other one last."""
        return Treatment(
            options=tuple(dict((*self.options, *other.options)).items()),
            edits=tuple(dict.fromkeys((*self.edits, *other.edits))),
            floats=tuple(dict.fromkeys((*self.floats, *other.floats))),
            data=self.data if other.data is None else other.data,
            exact=self.exact | other.exact,
            played=tuple(dict((*self.played, *other.played)).items()),
            as_deployed=self.as_deployed or other.as_deployed,
        )

    @property
    def all_edits(self) -> tuple[Edit, ...]:
        """Those that were played, too; what was fitted to an op in int8 does not fit it in float."""
        left = {op for edit in self.floats for op in edit.ops}
        kept = (edit for edit in self.edits if edit.kind not in ("bias", "round") or edit.ops[0] not in left)
        return (*kept, *self.floats)

    @property
    def requantizes(self) -> bool:
        """Whether the model is quantized again for it."""
        return bool(self.options or self.edits or self.data is not None)

    @property
    def made_of_edits(self) -> bool:
        """Whether quantizing again applies all of it; what is only played needs a change of the model or quantizer."""
        return not (self.exact or self.played or self.as_deployed)


class Trials:
    """The measured quality of treatments, each measured once.

    ``forwards`` counts runs of the model on a batch, and ``quantizations`` how often it was quantized again.
    """

    def __init__(self, pair: QuantizedPair, data: Data, target: Target | None, progress: bool | None) -> None:
        self.pair, self.target = pair, target
        self.forwards = self.quantizations = 0
        self._pairs: dict[Any, QuantizedPair] = {(): pair}
        self._annotations: dict[Any, Annotations] = {}
        self._known: dict[Treatment, Figures] = {}
        self._own: dict[tuple[bool, str], Any] = {}
        self._returned: dict[tuple[Treatment, str], str] = {}
        self._free = KEPT_BYTES
        self.checks = {on: Verification(pair.graphs) for on in (True, False)}
        self.reference = Reference(
            pair, data.batches, data.inputs_of, data.mask, lambda values, key: self.outputs(values, False, key)
        )
        self._batches = sum(1 for _ in self.reference)
        hidden = None if progress is None else not progress
        # Measured on MobileNetV2 and EfficientNet-Lite0; what is needed depends on what is found.
        self.bar = tqdm(
            desc="diagnose: about 40 runs of the model, a quantization for each free remedy",
            unit="trial",
            disable=hidden,
            leave=False,
        )

    @property
    def recipe(self) -> Recipe | None:
        """How the pair was made; None if it cannot be made again."""
        return self.pair.recipe if self.pair.capture is not None else None

    def quality(self, treatment: Treatment) -> Figures:
        """The figures with a treatment, on the simulator.

        Raises:
            Pt2qaError: the model cannot be quantized so.
        """
        if treatment not in self._known:
            self.bar.update()
            pair = self.pair_with(treatment)
            on = self._sites_on(pair, treatment)
            simulator = _played(pair, treatment)
            model = SimulatedModel(pair, on, simulator)
            run = self._own_outputs if treatment == Treatment() else self._counted(model.run, treatment)
            self._known[treatment] = self._measured(pair, model, run)
        return self._known[treatment]

    def _own_outputs(self, item: Item) -> Any:
        return self.outputs(item.values, key=item.key)

    def outputs(self, values: Sequence[Any], on: bool = True, key: str | None = None) -> Any:
        """What the simulator returns for the pair or its reference; each is run once, and verified.

        ``key`` is the digest of the values, if it is known.

        Raises:
            SimulationError: the simulator does not compute what the graph computes.
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
        """What the verification of the pair's own outputs found."""
        return [note for check in self.checks.values() for note in check.notes]

    def confirmed(self, treatment: Treatment) -> Figures:
        """The figures of the converted graph that a treatment gives.

        They are those on the simulator, if both return the same bits for the first batch.
        """
        pair = self.pair_with(treatment)
        item = next(iter(self.reference), None)
        same = True
        if item is not None:
            self.forwards += 1
            returned = pytree.tree_leaves(graph_outputs(pair.quantized, item.values))
            same = digest_of(returned) == self._returned.get((treatment, item.key))
        return self.quality(treatment) if all(everywhere(same)) else self.converted(pair)

    def converted(self, pair: QuantizedPair) -> Figures:
        """The figures of a pair's converted graph itself."""
        run = self._counted(lambda values: graph_outputs(pair.quantized, values))
        return self._measured(pair, pair.quantized, run)

    def of_float(self) -> float:
        """The user's metric of the float model; nan without a metric."""
        if self.target is None or self.target.metric is None:
            return math.nan
        self.forwards += self._batches
        return float(self.target.metric(SimulatedModel(self.pair, frozenset())))

    def pair_with(self, treatment: Treatment) -> QuantizedPair:
        """The pair that a treatment quantizes; what it plays is not in it."""
        pair = self._quantized(treatment, treatment.edits)
        return pair.as_deployed() if treatment.as_deployed else pair

    def applied(self, treatment: Treatment) -> QuantizedPair:
        """The pair with all edits of a treatment, those that were played by switching too."""
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

    def plan(self, treatment: Treatment) -> OverridePlan | None:
        """The override plan of a treatment with the edits of the pair itself; None without new edits."""
        edits = treatment.all_edits
        if self.recipe is None or not edits:
            return None
        plugin = with_options(self.recipe.plugin, dict(treatment.options))
        return OverridePlan((*self.recipe.edits, *edits), describe(plugin), self.pair.model)

    def _quantized(self, treatment: Treatment, edits: tuple[Edit, ...]) -> QuantizedPair:
        """The pair with the options and data of a treatment, and some edits; each is quantized once."""
        key = (treatment.options, edits, treatment.data) if edits or treatment.requantizes else ()
        if key not in self._pairs:
            self._pairs[key] = self._quantized_again(treatment, edits)
        return self._pairs[key]

    def _quantized_again(self, treatment: Treatment, edits: tuple[Edit, ...]) -> QuantizedPair:
        recipe = self.recipe
        assert recipe is not None, "only a pair with a recipe is quantized again"
        plugin = with_options(recipe.plugin, dict(treatment.options))
        given = treatment.data
        batches = recipe.calibration if given is None else given.batches
        if batches is None:
            raise Pt2qaError("the batches that the pair was calibrated on were an iterator, which is used up")
        self.quantizations += 1
        plan = OverridePlan((*recipe.edits, *edits), describe(plugin), self.pair.model)
        inputs_of = recipe.inputs_of if given is None else given.inputs_of
        return quantize_again(self.pair, batches, inputs_of, plugin=plugin, overrides=plan if plan.edits else None)

    def _sites_on(self, pair: QuantizedPair, treatment: Treatment) -> frozenset[int]:
        on = {site.index for site in pair.sites}
        if treatment.floats:
            annotations = self.annotations(treatment)
            assert annotations is not None, "edits need a recipe"
            on &= annotations.with_edits(treatment.floats).sites_on(pair.sites)
        if treatment.exact:
            on -= {index for index, place in places_of(pair).items() if place in treatment.exact}
        return frozenset(on)

    def _counted(self, run: Callable[[list[Any]], Any], treatment: Treatment | None = None) -> Callable[[Item], Any]:
        """The same function of a batch, whose calls are counted; what it returns is remembered for a new pair."""

        def counted(item: Item) -> Any:
            self.forwards += 1
            found = run(item.values)
            if treatment is not None and treatment.requantizes and treatment.made_of_edits:
                self._returned[treatment, item.key] = digest_of(pytree.tree_leaves(found))
            return found

        return counted

    def _measured(self, pair: QuantizedPair, model: Callable[..., Any], run: Callable[[Item], Any]) -> Figures:
        metric = None
        if self.target is not None and self.target.metric is not None:
            metric = functools.partial(self.target.metric, model)
            self.forwards += self._batches
        return figures_of(self.reference.of(pair), run, metric)


def _played(pair: QuantizedPair, treatment: Treatment) -> Simulator:
    if not treatment.played:
        return pair.simulator
    instead = dict(treatment.played)
    roundings = {index: instead[place].value for index, place in places_of(pair).items() if place in instead}
    return Simulator(with_roundings(pair.program, roundings), fused=pair.simulator.fused)
