"""``python -m tests.diagnosis``: plants every fault in every model, and counts how often a diagnosis is right."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tabulate import tabulate

from tests.diagnosis.bench import Bench, Outcome, append, read, score
from tests.diagnosis.faults import Fault, every_fault
from tests.diagnosis.models import NETS, PRETRAINED
from tests.diagnosis.subject import QUANTIZERS

RIGHT, BROUGHT_BACK, WITHIN = 0.95, 0.95, 0.95
"""Bars: share of faults named right, mean share of lost dB brought back on a third set of data, share of gains there
within their interval.  That of false alarms is 0."""


def main() -> int:
    faults = every_fault()
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis", description=__doc__)
    parser.add_argument(
        "--fault", action="append", choices=[*faults, "none"], help="these alone; none: untouched models"
    )
    parser.add_argument(
        "--model",
        action="append",
        choices=[*NETS, *PRETRAINED],
        help="these alone; without, all that are not pretrained",
    )
    parser.add_argument("--quantizer", action="append", choices=QUANTIZERS, help="these alone")
    parser.add_argument("--list", action="store_true", help="print the kinds of fault and stop")
    parser.add_argument("--csv", type=Path, help="write each outcome there as it comes; a later run goes on behind it")
    arguments = parser.parse_args()
    if arguments.list:
        rows = [
            (each.id, each.sentence, ", ".join(each.causes) or each.finding or each.note or "an error")
            for each in faults.values()
        ]
        print(tabulate(rows, headers=["fault", "what is wrong", "right to say"], tablefmt="github"))
        return 0
    chosen: list[Fault | None] = [faults[name] for name in arguments.fault or faults if name != "none"]
    if arguments.fault is None or "none" in arguments.fault:
        chosen.append(None)
    outcomes: list[Outcome] = []
    try:
        _run(chosen, arguments.model or [*NETS], arguments.quantizer or list(QUANTIZERS), arguments.csv, outcomes)
    except KeyboardInterrupt:
        print("interrupted: the figures are of what was done", file=sys.stderr)
    return _summary(outcomes, faults)


def _run(
    faults: list[Fault | None], models: list[str], quantizers: list[str], path: Path | None, outcomes: list[Outcome]
) -> None:
    known = {(each.fault, each.model, each.quantizer): each for each in read(path)} if path and path.exists() else {}
    bench, begun = Bench(), time.monotonic()
    cases = [(fault, model, quantizer) for fault in faults for model in models for quantizer in quantizers]
    for number, (fault, model, quantizer) in enumerate(cases):
        name = "" if fault is None else fault.id
        if (name, model, quantizer) in known:
            outcomes.append(known[name, model, quantizer])
            continue
        found = bench.healthy(model, quantizer) if fault is None else bench.planted(fault, model, quantizer)
        if found is None:
            continue
        outcomes.append(found)
        if path is not None:
            append(path, found)
        mark = "right" if found.right else "WRONG"
        lost = f"{found.untouched:5.1f} -> {found.planted:5.1f} dB"
        said = (
            f"{found.cause or 'nothing'} {found.name} {found.gain:+.1f} dB ({found.low:+.1f} to {found.high:+.1f}), "
            f"on other data {found.third:+.1f}"
        )
        where = f"[{number + 1}/{len(cases)}, {time.monotonic() - begun:.0f} s]"
        print(
            f"{where} {mark} {name or 'untouched'} {model} {quantizer}: {lost}: {said} ({found.seconds:.1f} s)",
            flush=True,
        )


def _summary(outcomes: list[Outcome], faults: dict[str, Fault]) -> int:
    found = score(outcomes, faults)
    rows = []
    for name in dict.fromkeys(each.fault for each in outcomes if each.fault):
        own = [each for each in outcomes if each.fault == name]
        part = score(own, faults)
        causes = ", ".join(dict.fromkeys(each.cause or "nothing" for each in own if not each.right_cause))
        rows.append((name, len(own), f"{part.right:.0%}", f"{part.brought_back:.0%}", causes))
    headers = ["fault", "models", "right", "dB brought back", "other causes named"]
    print(tabulate(rows, headers=headers, tablefmt="github"))
    print(
        f"{found.diagnosed} planted: first cause and place right {found.right:.1%} "
        f"({_interval(found.right, found.diagnosed)}; bar {RIGHT:.0%})"
    )
    print(
        f"lost dB that the first remedy brings back on other data: mean {found.mean_back:.1%}, median "
        f"{found.brought_back:.1%} (bar {BROUGHT_BACK:.0%})"
    )
    print(
        f"gains on other data within their interval: {found.within:.1%} of {found.intervals} "
        f"({_interval(found.within, found.intervals)}; bar {WITHIN:.0%})"
    )
    print(f"{found.untouched} untouched: {found.false_alarms} with a row that does not hold on other data (bar 0)")
    for each in found.unplanted:
        print(f"costs too little: {each}", file=sys.stderr)
    failed = not (found.right >= RIGHT and found.mean_back >= BROUGHT_BACK and found.within >= WITHIN)
    return 1 if failed or found.false_alarms or found.unplanted else 0


def _interval(share: float, count: int) -> str:
    """Wilson's interval of a share, which holds 95 %."""
    if not count:
        return "none"
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return f"{middle - half:.0%} to {middle + half:.0%}"


if __name__ == "__main__":
    sys.exit(main())
