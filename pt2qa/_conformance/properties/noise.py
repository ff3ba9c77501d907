"""The quantized model is as good as its integers allow."""

from __future__ import annotations

from pt2qa._conformance.ideal import ALLOWANCE, IdealSimulator, output_sqnr
from pt2qa._conformance.properties.flow import pair_or_skip
from pt2qa._conformance.properties.property import Outcome, Property, failed, passed
from pt2qa._conformance.trial import Trial
from pt2qa._quantize.pairing import QuantizedPair


def _sqnr(trial: Trial) -> Outcome:
    """Compares the SQNR with ideal rounding at the same sites, less :data:`pt2qa._conformance.ideal.ALLOWANCE`.

    So the floor depends on the model, the sites and their number of levels, and on no tuned number. Scales that do not
    fit the data, clamps that clip it, or a bias with a wrong scale fall below it.
    """
    pair = pair_or_skip(trial)
    if not isinstance(pair, QuantizedPair):
        return pair
    values = pair.values(trial.batches[0])
    reference = pair.simulator.run(values, on=False)
    measured = output_sqnr(reference, pair.simulator.run(values, on=True))
    ideal = output_sqnr(reference, IdealSimulator(pair.program, values).run(values, on=True))
    floor = ideal - ALLOWANCE
    numbers = f"{measured:.1f} dB; ideal scales at the same {len(pair.sites)} sites give {ideal:.1f} dB"
    if measured >= floor:
        return passed(numbers)
    return failed(f"{numbers}, and at least {floor:.1f} dB was expected; {_worst(pair, values, reference)}")


def _worst(pair: QuantizedPair, values: list[object], reference: object) -> str:
    alone = {site.index: output_sqnr(reference, pair.simulator.run(values, on={site.index})) for site in pair.sites}
    worst = pair.sites[min(alone, key=lambda index: alone[index])]
    return f"the worst site is the {worst.kind} of {worst.name}: {alone[worst.index]:.1f} dB when it alone is quantized"


SQNR = Property("sqnr", "the output is at most two bits worse than ideal scales at the same places make it", _sqnr)
