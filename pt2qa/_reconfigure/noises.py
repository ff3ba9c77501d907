"""Each site's noise in each output: ranked, used for prediction and compared with measurements."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pt2qa._decibels import power
from pt2qa._graph.internals.torch import pytree
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._reconfigure.baseline import Baseline
from pt2qa._reconfigure.ordering import Noise
from pt2qa._sensitivity.analysis import sensitivity
from pt2qa._sensitivity.report import SensitivityReport
from pt2qa._trials.judge import SimulatedModel
from pt2qa._trials.outcome import outcome_of
from pt2qa.errors import BatchError, SelectionError


@dataclass(frozen=True)
class Noises:
    """The noise of all sites, and the notes of the sensitivity analysis."""

    of_site: Mapping[int, Noise]
    notes: tuple[str, ...]


def noises_of(base: Baseline, given: SensitivityReport | None, progress: bool | None) -> Noises:
    """The noise of each site in each output, measured separately per output unless ``given`` holds it.

    It is a finished report of the pair by site; with several outputs it holds only the sum, and is not used.
    """
    pair, reference = base.pair, base.judge.reference
    single = len(reference.names) == 1
    if single and given is not None and len(given.rows) == given.planned:
        return _together([given])
    positions = [None] if single or not reference.names else reference.positions
    try:
        reports = [
            sensitivity(
                pair,
                reference,
                inputs_of=operator.attrgetter("batch"),
                mask=reference.data.mask,
                post_process=None if position is None else functools.partial(_leaf, position),
                progress=progress,
            )
            for position in positions
        ]
    except BatchError:  # quantized, the model is finite on no batch, which is what the search is to repair
        return _alone(base)
    return _together(reports)


def _alone(base: Baseline) -> Noises:
    """The noise of each site with nothing else quantized, measured on the whole model."""
    of_site = {}
    for site in range(len(base.pair.sites)):
        run = SimulatedModel(base.pair, frozenset({site})).of_item
        found = outcome_of(base.judge.reference.of(base.pair), run)
        of_site[site] = tuple(_share(power(-sqnr), 1.0) for _, sqnr in found.outputs)
    return Noises(of_site, ("quantized, the model is finite on no batch, so each site was measured by itself",))


def check_given(pair: QuantizedPair, given: SensitivityReport) -> None:
    """Rejects a report that is grouped, or about another pair."""
    if given.group != "site":
        raise SelectionError(f"sensitivity: got rows by {given.group}. Make the report without group=.")
    about = given.quantizer, given.environment.fingerprint
    if about != (pair.quantizer, pair.environment.fingerprint) or {row.site for row in given.rows} - {
        site.index for site in pair.sites
    }:
        raise SelectionError(
            f"sensitivity: the report is about another pair: {given.model}, quantized by {given.quantizer}; expected "
            f"{pair.model}, quantized by {pair.quantizer}. Leave it out, and it is measured."
        )


def _together(reports: Sequence[SensitivityReport]) -> Noises:
    sites: dict[int, list[float]] = {}
    for number, report in enumerate(reports):
        for row in report.rows:
            sites.setdefault(row.site, [0.0] * len(reports))[number] = _share(row.noise, report.signal)
    # With several outputs most sites do not reach all of them; keep only notes that all reports share.
    said = [note for note in reports[0].notes if all(note in report.notes for report in reports)]
    return Noises({site: tuple(noise) for site, noise in sites.items()}, tuple(said))


def _share(noise: float, signal: float) -> float:
    """Noise as a share of the signal; infinite if it is nan, so that such a site is the first to go."""
    if math.isnan(noise):
        return math.inf
    return noise / signal if signal > 0 else noise


def _leaf(position: int, outputs: Any) -> Any:
    return pytree.tree_leaves(outputs)[position]
