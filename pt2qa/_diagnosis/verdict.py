"""The sentences of a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pt2qa._decibels import LOW_SQNR
from pt2qa._diagnosis.report import between, signed
from pt2qa._report.prose import counted, decibel, few, number, share
from pt2qa.plugins import GenericPlugin, describe
from pt2qa.plugins.options import with_options

if TYPE_CHECKING:
    from pt2qa._diagnosis.case import Case
    from pt2qa._diagnosis.search import Search
    from pt2qa._layers.rows import LayerRow
    from pt2qa._trials.outcome import Outcome

HALF = 0.5
"""The share of the noise from which on a sample is said to make it."""

MOST_NOISE = 0.9
"""The share of the noise that "spread over N sites" stands for."""


def verdict_of(search: Search, after: Outcome | None, *, interrupted: bool) -> str:
    after = search.quality if after is None or not search.state.made_of_edits else after
    case, rows, needed = search.case, search.rows, search.needed
    unit = unit_of(case)
    now, beyond = _quality(case.now, unit), _beyond(search.beyond)
    if rows:
        first = rows[0]
        where = f" at {first.name}" if first.name else ""
        gain = "gain not measured" if math.isnan(first.gain) else f"{signed(first.gain)} {unit}"
        now = f"Interrupted. So far: {now}" if interrupted else now
        found = f"{now}. {first.cause}{where}: {first.sentence} ({gain})"
        if len(rows) > 1:
            found += f"; with {counted(len(rows) - 1, 'more cause')}, {_shown(after.value, unit)} after all remedies"
        if needed is not None and not after.value >= needed:
            found += f". The target, {number(needed)}, is not met"
        elif needed is not None:
            found += f". The target, {number(needed)}, is met{_elsewhere(after, unit)}"
        own = " These samples also calibrate the model: others may gain less." if case.is_judged_on_calibration else ""
        return f"{found}.{own}{beyond}{_from_repair(search)}"
    if interrupted:
        return f"Interrupted before a cause was found: {now}."
    if math.isnan(case.now.value):
        fault = case.fault
        where = f": {fault.what} at {fault.name} in the {fault.side} model, batch {fault.batch}" if fault else ""
        what = "the outputs have no SQNR" if unit == "dB" else f"{unit} of the quantized model is NaN"
        return f"No diagnosis: {what}{where}."
    if needed is not None and case.now.value >= needed:
        done, met = ("The target is met" if beyond else "Nothing to do"), _elsewhere(case.now, unit)
        return f"{done}: {now}, the target is {number(needed)}{met}.{beyond}"
    if needed is not None:
        return f"{now}; no remedy reaches the target, {number(needed)}.{_from_repair(search)}"
    found = _spread(case)
    if search.repair_helps:
        return f"No cause found: {now}{found}.{_from_repair(search)}"
    best = max((each.worst[1] for each in search.bounds.values() if not math.isnan(each.worst[1])), default=math.nan)
    rest = _from_repair(search)
    if (bound := search.out_of_reach) is not None:
        return f"No certain remedy: {now}; ranges that fit the data would give {decibel(bound)} dB{_likeliest(search)}."
    if (clamped := search.clamped) is not None:
        name, of_noise, counts = clamped
        beyond = f"Values beyond the calibrated range, most at {name}, cause {share(of_noise)} % of the noise"
        if counts:
            return f"No certain remedy: {now}. {beyond}: calibrate on more samples{_likeliest(search)}.{rest}"
        rest = f" {beyond}: other data may lose more.{rest}"
    poor, noises = case.now.worst[1] < LOW_SQNR, case.noises
    holder = next((s for s in case.pair.sites if 2 * case.noise(s.index) * noises.signal > noises.measured), None)
    if poor and holder is not None:
        return f"No measured remedy helps: {now}. Most of the noise comes from one {holder.kind}: {holder.name}.{rest}"
    if best < LOW_SQNR:
        return (
            f"{now}. The model itself amplifies rounding errors: even with ranges fitted per channel, 8 bits give "
            f"{decibel(best)} dB{found}.{rest}"
        )
    if whole := case.pair.program.whole_graphs:
        return (
            f"No cause found: {now}{found}. The noise inside {few(case.names(sorted(whole)))} is not attributed.{rest}"
        )
    if poor:
        return f"No single cause: {now}{found}.{rest}"
    return f"Nothing to do: {now}{found}.{rest}"


def _likeliest(search: Search) -> str:
    """The remedy that gained most of those whose gain may be chance."""
    found = max((row for row in search.tried if row.gain > 0), key=lambda row: row.gain, default=None)
    if found is None:
        return ""
    return f". The best of those that were tried is {found.cause}, {signed(found.gain)} dB: {found.reason}"


def _elsewhere(found: Outcome, unit: str) -> str:
    """What other data may have, where the target is about that."""
    known = unit == "dB" and not math.isnan(found.lowest)
    return f"; samples like these have {decibel(found.lowest)} dB or more" if known else ""


def _beyond(rows: Sequence[LayerRow]) -> str:
    """Which values are clamped, where the target is met all the same."""
    if not rows:
        return ""
    more = f", and many at {counted(len(rows) - 1, 'more site')}" if len(rows) > 1 else ""
    which = f"{share(rows[0].saturation)} % of the values at {rows[0].name}"
    return f" {which} are outside the calibrated range and clamped{more}; no remedy for that was measured."


def _from_repair(search: Search) -> str:
    """What repairs give for free after the rows; empty where they were not tried."""
    gain = search.from_repair
    if gain is None or math.isnan(gain.value):
        return ""
    if not search.repair_helps:
        doubt = "" if gain.holds else " on these samples, and perhaps nothing on others"
        more = f"{signed(gain.value)} dB more{doubt}" if gain.value > 0 else "nothing more"
        return f" Ranges as pt2qa.repair fits them give {more}."
    return (
        f" pt2qa.repair gives {signed(gain.value)} dB for free ({between(gain.low, gain.high)} on samples like these)."
    )


def unit_of(case: Case) -> str:
    """``dB``, or the name of the user's metric."""
    aim = case.judge.target
    return "dB" if aim is None or aim.metric is None else aim.name


def next_command(search: Search, after: Outcome | None, *, interrupted: bool) -> str:
    """What to call next, or what to change; empty if there is nothing to do."""
    if interrupted:
        return "pt2qa.diagnose(pair, batches)"
    if search.state.as_deployed:  # what is left is to be found in what the kernels compute
        aim = "" if search.needed is None else f", target={search.needed:g}"
        return f"pt2qa.diagnose(pair.as_deployed(), batches{aim})"
    target, recipe = search_target(search, after), search.case.judge.recipe
    if recipe is None and not search.rows and target is not None:  # no search can quantize it again
        return "pt2qa.sensitivity(pair, batches)"
    if not search.rows and search.repair_helps and search.needed is None:
        return "pt2qa.repair(pair, batches)"
    if target is not None and recipe is not None:
        return f"pt2qa.reconfigure(pair, batches, target={target:g})"
    if not search.rows:
        return ""
    state = search.state
    if recipe is None or not state.made_of_edits or not (state.requantizes or state.floats):
        return search.rows[0].remedy
    plugin = with_options(recipe.plugin, dict(state.options))
    quantizer = "quantizer" if isinstance(plugin, GenericPlugin) else repr(describe(plugin))
    data = "calibration" if state.data is None else state.data.name
    overrides = ", overrides=diagnosis.plan" if state.edits or state.floats else ""
    return f"pt2qa.quantize(capture, {quantizer}, {data}{overrides})"


def search_target(search: Search, after: Outcome | None) -> float | None:
    """What a search for another configuration should reach; None if there is nothing to search for."""
    poor, needed = search.case.now.worst[1], search.needed
    if not search.rows and needed is None and poor < LOW_SQNR:
        return math.ceil(poor) + 3
    value = search.quality.value if after is None else after.value
    return None if needed is None or value >= needed else needed


def target_of(search: Search) -> str:
    """``at least 0.9543, 99 % of float``; empty without a target."""
    aim, needed = search.case.judge.target, search.needed
    if needed is None or aim is None:
        return ""
    part = aim.at_least if aim.of_float else 1 - search.worth.least if math.isinf(aim.at_least) else 0.0
    return f"at least {needed:g}{f', {100 * part:g} % of float' if part else ''}"


def story_of(search: Search, after: Outcome | None) -> str:
    """``float 0.96 -> int8 0.11 -> with the remedies 0.95 -> on the kernels 0.95``."""
    judge, unit = search.case.judge, unit_of(search.case)
    steps = [] if judge.metric is None else [f"float {number(judge.float_value)} {unit}"]
    steps.append(f"int8 {_shown(search.case.now.value, unit)}")
    kernels = {
        name: f"on the kernels {_shown(row.sqnr, 'dB') if math.isnan(row.value) else _shown(row.value, unit)}"
        for name, row in search.deployed.items()
    }
    if "deployed, after" not in kernels:
        steps += kernels.values()
    many = "remedy" if len(search.rows) == 1 else "remedies"
    if after is not None:
        steps.append(f"with the {many} {_shown(after.value, unit)}")
    if not search.state.made_of_edits:
        steps.append(f"with the advice {_shown(search.quality.value, unit)}")
    steps += [kernels[name] for name in kernels if name == "deployed, after"]
    return " -> ".join(steps) if len(steps) > 1 else ""


def _shown(value: float, unit: str) -> str:
    return f"{decibel(value) if unit == 'dB' else number(value)} {unit}"


def _quality(found: Outcome, unit: str) -> str:
    """``12.3 dB, worst sample 3 at 8.1 dB, 85 % of labels kept``."""
    output, sqnr = found.worst
    if sqnr == math.inf == found.value:
        return "the outputs are equal to the float model's"
    parts = [f"{_shown(found.value, unit)}"]
    if unit != "dB":
        parts.append(f"{decibel(sqnr)} dB")
    if len(found.outputs) > 1:
        parts[-1] += f" at {output}, the worst of {len(found.outputs)} outputs"
    if found.worst_sample >= 0:
        most = found.worst_sample_share > HALF
        part = f" with {share(found.worst_sample_share)} % of the noise" if most else ""
        parts.append(f"worst sample {found.worst_sample} at {decibel(found.worst_sample_sqnr)} dB{part}")
    if not math.isnan(found.labels):
        parts.append(f"{share(found.labels)} % of {found.samples} labels kept")
    return ", ".join(parts)


def _spread(case: Case) -> str:
    noises = sorted((case.noise(site.index) for site in case.pair.sites), reverse=True)
    total, held, count = sum(noises), 0.0, 0
    while held < MOST_NOISE * total:
        held += noises[count]
        count += 1
    return f", spread over {counted(count, 'site')}" if count else ""
