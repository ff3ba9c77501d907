"""Each site's noise in each output: ranked, used for prediction and compared with measurements."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

from pt2qa._decibels import power
from pt2qa._graph.internals.torch import pytree
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._reconfigure.baseline import Baseline
from pt2qa._reconfigure.candidates import Noise
from pt2qa._sensitivity.analysis import sensitivity
from pt2qa._sensitivity.report import SensitivityReport
from pt2qa._trials.judge import SimulatedModel
from pt2qa._trials.outcome import outcome_of
from pt2qa.errors import BatchError, SelectionError

Noises = tuple[dict[int, Noise], tuple[str, ...]]
"""The noise of each site in each output, and notes."""


def noises_of(base: Baseline, given: SensitivityReport | None, progress: bool | None) -> Noises:
    """Measured per output, unless there is one, and ``given`` is a finished report of the pair by site."""
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
    """Measured on the whole model with one site quantized at a time."""
    of_site = {}
    for site in range(len(base.pair.sites)):
        run = SimulatedModel(base.pair, frozenset({site})).of_item
        found = outcome_of(base.judge.reference.of(base.pair), run)
        of_site[site] = tuple(_share(power(-sqnr), 1.0) for _, sqnr in found.outputs)
    return of_site, ("the quantized model returns NaN on every batch, so each site was quantized and measured alone",)


def check_given(pair: QuantizedPair, given: SensitivityReport) -> None:
    if given.group != "site":
        raise SelectionError(f"sensitivity: got rows by {given.group}, expected one per site. Leave out group=.")
    about = given.quantizer, given.environment.fingerprint
    if about != (pair.quantizer, pair.environment.fingerprint) or {row.site for row in given.rows} - {
        site.index for site in pair.sites
    }:
        raise SelectionError(
            f"sensitivity: got the report of another pair, {given.model}, quantized by {given.quantizer}; expected "
            f"{pair.model}, quantized by {pair.quantizer}. Without sensitivity=, it is measured."
        )


def _together(reports: Sequence[SensitivityReport]) -> Noises:
    sites: dict[int, list[float]] = {}
    for number, report in enumerate(reports):
        for row in report.rows:
            sites.setdefault(row.site, [0.0] * len(reports))[number] = _share(row.noise, report.signal)
    # With several outputs most sites do not reach all of them; keep only notes that all reports share.
    said = [note for note in reports[0].notes if all(note in report.notes for report in reports)]
    return {site: tuple(noise) for site, noise in sites.items()}, tuple(said)


def _share(noise: float, signal: float) -> float:
    """Noise as a share of the signal; infinite if it is nan, so that such a site is the first to go."""
    if math.isnan(noise):
        return math.inf
    return noise / signal if signal > 0 else noise


def _leaf(position: int, outputs: Any) -> Any:
    return pytree.tree_leaves(outputs)[position]
