"""Calibration data against evaluation data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._ranks import batches_before, everywhere
from pt2qa._report.formats import decibel, number, share
from pt2qa._report.prose import counted
from pt2qa._sensitivity.ranges import Observed, use_of
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.data import Data
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Treatment

FEWEST_SAMPLES = 4
HALF, MOST = 0.5, 0.8
"""Least share of the noise that one sample causes; ``MOST`` to be named before the precision of ops."""

ALONE = 0.5
"""A batch is an outlier if, without it, less than this share of a range is left."""


FAR, NEAR, ALL = 0.5, 0.1, 0.02
"""How far, as a share of the calibrated range, one batch must exceed it, or most batches, or each one."""

MOSTLY = 0.6
"""The share of that range below which the values are smaller than those of calibration."""


def ranges_of_calibration(case: Case) -> Iterator[Hypothesis]:
    recipe = case.judge.recipe
    seen = case.seen
    if recipe is None or recipe.data is None or not seen:
        return
    freaks = dict(_outliers(case, recipe.data, seen))
    yield from freaks.values()
    seen = {site: each.left_without(freaks) for site, each in seen.items()}
    sites = [site.index for site in case.static_sites]
    worst = case.ranked(sites, case.excess)
    if not worst:
        return
    weight = {site: case.excess(site) for site in worst}
    half = sum(weight.values()) / 2
    narrow = sum(each for site, each in weight.items() if goes_beyond(case.ranges[site], seen[site])) > half
    wide = sum(each for site, each in weight.items() if _stays_within(case.ranges[site], seen[site])) > half
    if not (narrow or wide):
        return  # samples of one kind differ as much
    site = case.pair.sites[worst[0]]
    needed, beyond = use_of(site, *case.ranges[site.index].whole)
    evidence = (
        f"values exceed the calibrated range at {counted(len(worst), 'site')}; here by {share(beyond)} % of it"
        if narrow
        else f"ranges are wider than the values at {counted(len(worst), 'site')}; here {share(needed)} % is used"
    )
    yield Hypothesis(
        cause="narrow-calibration" if narrow else "wide-calibration",
        name=site.name,
        others=case.names(worst),
        evidence=f"{evidence} (ranges of {counted(len(case.ranges[site.index].lowest), 'batch', 'batches')} and "
        f"of {counted(len(seen[site.index].lowest), 'calibration batch', 'calibration batches')})",
        remedy="calibrate on data like the model's inputs in use, with the same preprocessing: "
        f"pt2qa.quantize(capture, {case.pair.quantizer!r}, {case.data.name})",
        treatment=Treatment(data=case.data),
    )


def bad_sample(now: Outcome, least: float = HALF) -> Iterator[Hypothesis]:
    if now.samples < FEWEST_SAMPLES or not now.worst_sample_share >= least:
        return
    yield Hypothesis(
        cause="bad-sample",
        name="",
        evidence=f"sample {now.worst_sample} accounts for {share(now.worst_sample_share)} % of the noise of "
        f"{now.samples} samples and has {decibel(now.worst_sample_sqnr)} dB; the others have "
        f"{decibel(now.without_worst)} dB",
        remedy="check that it was preprocessed like the others; if the model receives such data in use, calibrate with "
        "it: pt2qa.find_bad_cases(pair, batches) keeps its inputs",
        treatment=Treatment(),
        gain=now.without_worst - now.worst[1],
    )


def goes_beyond(found: Observed, seen: Observed) -> bool:
    """Whether values exceed what calibration saw by more than the next samples of the same kind would."""
    low, high = seen.whole
    width = _width((low, high))
    beyond = [
        max(min(low, 0.0) - lowest, 0.0) + max(highest - max(high, 0.0), 0.0)
        for lowest, highest in zip(found.lowest, found.highest, strict=True)
    ]
    most = sum(each > NEAR * width for each in beyond) > len(beyond) / 2
    return most or max(beyond) > FAR * width or (len(beyond) > 2 and min(beyond) > ALL * width)


def _stays_within(found: Observed, seen: Observed) -> bool:
    """Whether calibration saw larger values than the next samples of the same kind would have."""
    return _width(found.whole) < MOSTLY * _width(seen.whole)


def _outliers(case: Case, own: Data, seen: dict[int, Observed]) -> Iterator[tuple[int, Hypothesis]]:
    """By number, a calibration batch without which the ranges of most sites would be less than half as wide."""
    count = max((len(each.lowest) for each in seen.values()), default=0)
    if count < 2:
        return
    widths = {site.index: _width(seen[site.index].whole) for site in case.static_sites}
    weight = {site: case.excess(site) for site, width in widths.items() if width > 0}
    filled = [bool(count_samples(case.pair.values(batch))) for batch in own]
    first = batches_before(lambda: len(filled))
    numbers = everywhere([first + number for number, has_samples in enumerate(filled) if has_samples])
    for place, batch in enumerate(batch for each in numbers for batch in each):
        alone = [site for site in weight if _width(seen[site].without(place)) < ALONE * widths[site]]
        if sum(weight[site] for site in alone) <= sum(weight.values()) / 2 or not alone:
            continue
        worst = max(alone, key=lambda site: weight[site])
        low, high = seen[worst].without(place)
        yield (
            batch,
            Hypothesis(
                cause="calibration-outlier",
                name=case.pair.sites[worst].name,
                others=case.names(sorted(alone, key=lambda site: -weight[site])),
                evidence=f"calibration batch {batch} more than doubles {counted(len(alone), 'range')}; here "
                f"{number(widths[worst])} instead of {number(_width((low, high)))}",
                remedy=f"drop batch {batch} from the calibration data",
                treatment=Treatment(
                    data=Data(
                        f"[batch for number, batch in enumerate(calibration) if number != {batch}]",
                        _Without(own.batches, batch - first),
                        own.inputs_of,
                    )
                ),
            ),
        )


class _Without:
    """An iterable without one item; it starts over as often as the whole does."""

    def __init__(self, batches: Iterable[Any], missing: int) -> None:
        self.batches, self.missing = batches, missing

    def __iter__(self) -> Iterator[Any]:
        return (item for number, item in enumerate(self.batches) if number != self.missing)


def _width(ends: tuple[float, float]) -> float:
    low, high = ends
    return 0.0 if math.isnan(low) else max(high, 0.0) - min(low, 0.0)
