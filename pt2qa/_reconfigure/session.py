"""What a person tries on one pair: settings of places, and the figures that each choice gives, from the one engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pt2qa._ambient import torch_defaults
from pt2qa._quantize.pairing import QuantizedPair, check_pair
from pt2qa._reconfigure.analysis import noises_of, recipe_of
from pt2qa._reconfigure.candidates import applied, candidates_of, costs_of, total_noise
from pt2qa._reconfigure.search import Baseline
from pt2qa._repair.ranges import RangeGroup, groups_in, with_ends
from pt2qa._simulator.accumulate import limits
from pt2qa._simulator.data import Data, Mask
from pt2qa._trials.judge import Judge
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Target, Treatment
from pt2qa.errors import SelectionError
from pt2qa.overrides.plan import OBSERVERS, Edit, OverridePlan


class Session:
    """One pair, its places, and the quality with any of their settings.

    A place is ops that are set together. A setting is ``{"place": number, "set": choice}``, for a range with its ends
    ``low`` and ``high``; a place without one is as it was quantized.

    Attributes:
        choices: of each place: edits, and ranges whose ends are chosen.
        facts: what a page shows of each place: its share of the noise of all sites at the worst output and of the
            multiply-accumulates, 0..1; of a range its ends, and the names of the values that have it.
    """

    @torch_defaults
    def __init__(
        self,
        pair: QuantizedPair,
        batches: Iterable[Any],
        *,
        metric: Callable[..., float] | None = None,
        mask: Mask | None = None,
    ) -> None:
        check_pair(pair)
        recipe = recipe_of(pair, "float")
        target = None if metric is None else Target(-math.inf, metric)
        self.pair, self.metric = pair, "" if target is None else target.name
        self.judge = Judge(pair, Data("batches", batches, None, mask, False), target, "serve")
        self._how: dict[Treatment, str] = {}
        base = Baseline(self.judge)
        self.costs = costs_of(pair, self.judge.reference.first.values)
        noise, _ = noises_of(base, None, False)
        outputs = range(len(self.judge.reference.names))
        whole = total_noise(noise, noise, outputs)
        worst = max(outputs, key=whole.__getitem__, default=0)
        candidates = tuple(candidates_of(pair, base.annotations, self.costs, "float"))
        owner = {op: number for number, each in enumerate(candidates) for op in each.edit.ops}
        # What no place makes, such as an input, belongs to the first one that reads it.
        home = {s.index: next((owner[op] for op in (s.name, *s.readers) if op in owner), None) for s in pair.sites}
        groups = () if recipe.qat else groups_in(pair)
        self.choices: list[dict[str, Edit | RangeGroup]] = []
        self.facts: list[dict[str, Any]] = []
        for number, candidate in enumerate(candidates):
            ops, known = candidate.edit.ops, base.annotations.ops
            observed = tuple(op for op in ops if op in known and "observer" in known[op].levels)
            tried = {f"observer {name}": Edit("observer", observed, name) for name in OBSERVERS if observed}
            ranges = {f"range of {group.name}": group for group in groups if home[group.sites[0]] == number}
            can = {name: edit for name, edit in tried.items() if base.annotations.can_take(edit)}
            self.choices.append({"float": candidate.edit, **can, **ranges})
            named = {name: dict.fromkeys(pair.sites[site].name for site in each.sites) for name, each in ranges.items()}
            told = {name: {"ends": limits(each.params), "names": list(named[name])} for name, each in ranges.items()}
            made = total_noise(noise, [site for site in home if home[site] == number], outputs)
            share = made[worst] / whole[worst] if made and whole[worst] else 0.0
            choices = {name: told.get(name, {}) for name in self.choices[-1]}
            macs = self.costs.macs_of(ops)
            self.facts.append({"name": " + ".join(ops), "choices": choices, "noise": share, "macs": macs})

    def edits(self, settings: Any) -> tuple[Edit, ...]:
        """The edits of some settings: of observers, then of ranges, then those that take ops to float.

        Raises:
            SelectionError: they are not what this class describes; the message names the first that is not.
        """
        if not isinstance(settings, list):
            raise SelectionError(f"settings: got {settings!r:.80}, expected a list of settings of places")
        numbers = [setting.get("place") if isinstance(setting, Mapping) else None for setting in settings]
        found = [self._edit(setting, number) for setting, number in zip(settings, numbers, strict=True)]
        if len(set(numbers)) < len(numbers):
            raise SelectionError(f"settings: got places {numbers}, expected each at most once")
        return tuple(sorted(found, key=lambda edit: ("observer", "range", "float").index(edit.kind)))

    def _edit(self, setting: Any, number: Any) -> Edit:
        if type(number) is not int or not 0 <= number < len(self.facts):
            raise SelectionError(f"setting {setting!r:.80}: expected a place from 0 to {len(self.facts) - 1}")
        choices, low, high = self.choices[number], setting.get("low"), setting.get("high")
        choice = choices.get(str(setting.get("set")))
        if choice is None:
            name = self.facts[number]["name"]
            raise SelectionError(f"setting {setting!r:.120}: {name} can be set to {', '.join(choices)}")
        if isinstance(choice, Edit):
            return choice
        known = all(type(end) in (int, float) and math.isfinite(end) for end in (low, high))
        if not known or not low <= 0 <= high != low:
            raise SelectionError(f"setting {setting!r:.120}: expected numbers low <= 0 <= high that differ")
        params: Any = with_ends(choice, float(low), float(high))
        return Edit("range", (choice.name,), scale=float(params.scale), zero_point=int(params.zero_point))

    def treatment(self, edits: tuple[Edit, ...]) -> Treatment:
        """Ops in float are simulated, unless that changes the scale of what stays quantized."""
        free = Treatment(edits=tuple(edit for edit in edits if edit.kind != "float"))
        before = self.judge.annotations(free)
        assert before is not None, "a session's pair has a recipe"
        floats, after = applied(before, (edit for edit in edits if edit.kind == "float"))
        if not after.edges:
            raise SelectionError("settings: nothing stays quantized; leave at least one place as it was quantized")
        if after.has_scales_of(before):
            return replace(free, floats=floats)
        return replace(free, edits=(*free.edits, *floats))

    @torch_defaults
    def measured(self, settings: Any) -> dict[str, Any]:
        """The figures with some settings, and whether these were simulated or quantized again."""
        began, edits, runs = time.monotonic(), self.edits(settings), self.judge.quantizations
        treatment = self.treatment(edits)
        found = self._figures(self.judge.outcome(treatment), edits)
        self.judge.forget(treatment)
        again = "quantized again" if self.judge.quantizations > runs else "simulated"
        return {**found, "how": self._how.setdefault(treatment, again), "seconds": time.monotonic() - began}

    @torch_defaults
    def exported(self, settings: Any) -> tuple[OverridePlan, dict[str, Any]]:
        """The plan with some settings, and the figures of the model that is converted with it."""
        edits = self.edits(settings)
        treatment = self.treatment(edits)
        figures = self._figures(self.judge.converted(self.judge.applied(treatment)), edits)
        self.judge.forget()
        return self.judge.plan(treatment), {**figures, "how": "converted"}

    def _figures(self, outcome: Outcome, edits: Iterable[Edit]) -> dict[str, Any]:
        floats = {op for edit in edits if edit.kind == "float" for op in edit.ops}
        return {
            "outputs": [{"name": name, "sqnr": value} for name, value in outcome.outputs],
            "value": outcome.value if outcome.of_metric else math.nan,
            "worst_sample": outcome.worst_sample,
            "worst_sample_sqnr": outcome.worst_sample_sqnr,
            "labels": outcome.labels,
            "float_macs": self.costs.float_macs + self.costs.macs_of(floats),
        }
