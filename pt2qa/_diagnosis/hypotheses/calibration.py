"""Calibration data against evaluation data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from torch import Tensor

from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._grouping import grouped
from pt2qa._metrics import float64
from pt2qa._ranks import batches_before, everywhere
from pt2qa._report.prose import counted, decibel, number, share
from pt2qa._sensitivity.ranges import Observed, use_of
from pt2qa._simulator.batches import Batch, count_samples
from pt2qa._simulator.data import Data
from pt2qa._simulator.verification import digest_of
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Treatment
from pt2qa.overrides.annotations import observing

HALF = 0.5
"""Least share of the noise that one sample causes."""

OTHER_UNIT = 1.5
"""How many times larger or smaller the inputs of calibration are, if the input itself is at fault."""

ALONE = 0.5
"""A batch is an outlier if, without it, less than this share of a range is left."""


FAR, NEAR, ALL = 0.5, 0.1, 0.02
"""How far, as a share of the calibrated range, one batch must exceed it, or most batches, or each one."""

MOSTLY = 0.6
"""The share of that range below which the values are smaller than those of calibration."""


def freaks(case: Case) -> dict[int, list[Hypothesis]]:
    """By number, single calibration batches that are unlike all others."""
    if case.calibration is None or not case.seen:
        return {}
    found = _outliers(case, case.calibration, case.seen)
    return {number: list(_by_observers(case, each, ", with min-max observers")) for number, each in found}


def ranges_of_calibration(case: Case, apart: Collection[int] = ()) -> Iterator[Hypothesis]:
    """What the calibration data have in common, some batches apart."""
    if not case.seen:
        return
    seen = {site: each.left_without(apart) for site, each in case.seen.items()}
    sites = [site.index for site in case.static_sites]
    worst = case.ranked(sites, case.excess)
    if not worst:
        return
    if by_input(case) is not None:
        return  # one reason for all of them
    if not (case.is_judged_apart or is_of_another_kind(case, seen)):
        return  # samples of one kind differ as much, and the gain would be that of the data that calibrate
    wider = {site: _width(case.ranges[site].whole) > _width(seen[site].whole) for site in worst}
    narrow = sum(case.excess(site) if wider[site] else -case.excess(site) for site in worst) > 0
    # An input that differs so is where it begins: the other values are made from it.
    inputs = [at for at in worst if case.pair.sites[at].source in case.pair.program.inputs and wider[at] == narrow]
    site = case.pair.sites[(inputs or worst)[0]]
    needed, beyond = use_of(site, *case.ranges[site.index].whole)
    evidence = (
        f"values exceed the calibrated range at {counted(len(worst), 'site')}; here by {share(beyond)} % of it"
        if narrow
        else f"ranges are wider than the values at {counted(len(worst), 'site')}; here {share(needed)} % is used"
    )
    yield from _on_data_in_use(
        case,
        cause="narrow-calibration" if narrow else "wide-calibration",
        name=site.name,
        others=case.names(worst),
        evidence=f"{evidence} (ranges of {counted(len(case.ranges[site.index].lowest), 'batch', 'batches')} and "
        f"of {counted(len(seen[site.index].lowest), 'calibration batch', 'calibration batches')})",
    )


def _on_data_in_use(case: Case, **given: Any) -> Iterator[Hypothesis]:
    """Calibration on the data that analyses read, with the quantizer's observers, and with those of all values.

    Where calibration saw too little, on both: few samples in use show less of it than many others and they.
    """
    choices = [("in use, with the same preprocessing", " and min-max observers", case.data)]
    if given["cause"] == "narrow-calibration" and not given.get("audited") and case.calibration is not None:
        both = Data(f"[*calibration, *{case.data.name}]", Joined(case.calibration, case.data))
        choices.append(("in use, too", ", with min-max observers", both))
    for which, how, data in choices:
        remedy = f"calibrate on data like the model's inputs {which}"
        for each in _by_observers(case, Hypothesis(remedy=remedy, treatment=Treatment(data=data), **given), how):
            call = f"pt2qa.quantize(capture, {case.pair.quantizer!r}, {data.name})"
            yield replace(each, remedy=f"{each.remedy}: {call}")


def _by_observers(case: Case, found: Hypothesis, how: str) -> Iterator[Hypothesis]:
    """The same, and with observers that keep all values, as the remedy says at its end."""
    yield found
    if observers := () if case.annotations is None else observing(case.annotations, "minmax"):
        treatment = replace(found.treatment, edits=observers)
        yield replace(found, remedy=f"{found.remedy}{how}", treatment=treatment)


def is_of_another_kind(case: Case, seen: Mapping[int, Observed]) -> bool:
    """Whether the values at most sites, by what ranges cost there, differ from those of calibration beyond chance."""
    excess = {site: case.excess(site) for site in case.ranked((site.index for site in case.static_sites), case.excess)}
    return any(
        2 * sum(each for site, each in excess.items() if differs(case.ranges[site], seen[site])) > sum(excess.values())
        for differs in (goes_beyond, _stays_within)
    )


def inputs(case: Case) -> Iterator[Hypothesis]:
    """A model input that calibration saw in another unit; no model runs for that."""
    found = by_input(case)
    if found is not None:
        name, ratio = found
        how = f"{number(max(ratio, 1 / ratio))} x {'larger' if ratio > 1 else 'smaller'}" if ratio else "all zero"
        yield from _on_data_in_use(
            case,
            cause="wide-calibration" if ratio > 1 else "narrow-calibration",
            name=name.partition(",")[0],
            evidence=f"the values of {name} in the calibration data are {how}{' than those in use' if ratio else ''} "
            "(root mean square of the sample in the middle)",
            sentence=f"the calibration data have {name} in another unit than the data in use",
            audited=True,
        )


def by_input(case: Case) -> tuple[str, float] | None:
    """The input that is most different in the calibration data, and how many times larger it is there."""
    if case.calibration is None or not case.is_calibrated_on_others:
        return None
    seen, found = (_sizes(case, data) for data in (case.calibration, case.data))
    ratios = {name: seen[name] / size for name, size in found.items() if size > 0 and name in seen}
    apart = {name: max(each, 1 / each) if each else math.inf for name, each in ratios.items()}
    worst = max(apart, key=lambda name: apart[name], default="")
    return (worst, ratios[worst]) if worst and apart[worst] >= OTHER_UNIT else None


COLOURS = 4
"""Most channels of a picture."""


def _sizes(case: Case, data: Data) -> dict[str, float]:
    """The root mean square of each floating-point input, of pictures by channel, in the sample in the middle."""
    program = case.pair.program
    sizes: list[tuple[str, float]] = []
    for batch in data:
        values = case.pair.values(batch)
        read = case.counted(data, batch, values).inputs(values)
        for slot, value in zip(program.inputs, read, strict=True):
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                name, count = program.input_names[program.inputs.index(slot)], value.shape[0] if value.dim() else 1
                apart = value.dim() > 2 and value.shape[1] <= COLOURS
                means = float64(value).square().reshape(count, value.shape[1] if apart else 1, -1).mean(2)
                for number, own in enumerate(means.T.tolist()):
                    sizes += [(f"{name}, channel {number}" if apart else name, each) for each in own]
    by_name = grouped(each for own in everywhere(sizes) for each in own)
    return {name: median(found) ** 0.5 for name, found in by_name.items()}


def bad_sample(case: Case, state: Treatment, now: Outcome) -> Iterator[Hypothesis]:
    """The worst sample, if calibration saw it: without its batch, the ranges are those of all others."""
    own = case.calibration if state.data is None else state.data
    if own is None or not now.worst_sample_share >= HALF:
        return
    read = [(item.key, count_samples(item.values)) for item in case.judge.reference]
    ends = list(itertools.accumulate(count for found in everywhere(read) for _, count in found))
    keys = [key for found in everywhere(read) for key, _ in found]
    worst = keys[next(number for number, end in enumerate(ends) if now.worst_sample < end)]
    left = [digest_of(case.pair.values(batch)) != worst for batch in own]
    if all(all(found) for found in everywhere(left)) or not any(any(found) for found in everywhere(left)):
        return
    yield Hypothesis(
        cause="bad-sample",
        name="",
        evidence=f"sample {now.worst_sample} accounts for {share(now.worst_sample_share)} % of the noise of "
        f"{now.samples} samples, has {decibel(now.worst_sample_sqnr)} dB, and calibrates the model",
        remedy="calibrate without its batch, and check that it was preprocessed like the others: "
        "pt2qa.find_bad_cases(pair, batches) keeps its inputs",
        treatment=Treatment(data=Data("calibration without this batch", Chosen(own.batches, left), own.inputs_of)),
        unseen=now.worst_sample,
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
        yield (
            batch,
            Hypothesis(
                cause="calibration-outlier",
                name=case.pair.sites[worst].name,
                others=case.names(sorted(alone, key=lambda site: -weight[site])),
                evidence=f"calibration batch {batch} more than doubles {counted(len(alone), 'range')}; here "
                f"{number(widths[worst])} instead of {number(_width(seen[worst].without(place)))}",
                remedy=f"drop batch {batch} from the calibration data",
                treatment=Treatment(
                    data=Data(
                        f"[batch for number, batch in enumerate(calibration) if number != {batch}]",
                        Chosen(own.batches, [number != batch - first for number in range(len(filled))]),
                        own.inputs_of,
                    )
                ),
            ),
        )


class Joined:
    """The batches of several data; it starts over as often as they do."""

    def __init__(self, *data: Data) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Batch]:
        return itertools.chain.from_iterable(self.data)


class Chosen:
    """An iterable with some of its items; it starts over as often as the whole does."""

    def __init__(self, batches: Iterable[Any], left: Sequence[bool]) -> None:
        self.batches, self.left = batches, left

    def __iter__(self) -> Iterator[Any]:
        return itertools.compress(self.batches, self.left)


def _width(ends: tuple[float, float]) -> float:
    low, high = ends
    return 0.0 if math.isnan(low) else max(high, 0.0) - min(low, 0.0)
