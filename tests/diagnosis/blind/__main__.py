"""``python -m tests.diagnosis.blind``: faults that a seed draws, diagnosed, and judged on other samples."""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from statistics import mean, median

from tabulate import tabulate

from tests.diagnosis.blind.newer import KINDS, NEWER
from tests.diagnosis.blind.trial import NETS, Outcome, deck

BAR = 0.95
"""Share of right rows, of the lost dB, and of gains within their interval."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis.blind", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="how many cases; of ten, seven have one fault")
    parser.add_argument("--kind", action="append", choices=KINDS, help="these kinds of fault alone, one in each case")
    parser.add_argument("--new", action="store_true", help="the kinds of newer.py alone, one in each case")
    parser.add_argument("--net", action="append", choices=NETS, help="these kinds of net alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after that; the rest is counted")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless all bars are met")
    parser.add_argument("--list", action="store_true", help="print the kinds of fault and stop")
    arguments = parser.parse_args()
    chosen = [*(arguments.kind or ()), *(NEWER if arguments.new else ())]
    if arguments.list:
        kinds = [KINDS[name] for name in dict.fromkeys(chosen or KINDS)]
        rows = [(kind.id, kind.sentence, ", ".join(kind.causes), kind.source) for kind in kinds]
        print(tabulate(rows, headers=["kind", "what is wrong", "right to say", "reported"], tablefmt="github"))
        return 0
    trials = deck(arguments.seed, arguments.count, chosen, arguments.net or ())
    outcomes, begun = [], time.monotonic()
    try:
        for number, trial in enumerate(trials):
            if time.monotonic() - begun > 60 * arguments.minutes:
                break
            outcomes.append(trial.run())
            print(f"[{number + 1}/{len(trials)}, {time.monotonic() - begun:.0f} s] {line(outcomes[-1])}", flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    met = summary(outcomes, len(trials), random.Random(arguments.seed))
    return int(arguments.strict and not met)


def line(out: Outcome) -> str:
    """A case in a line."""
    mark = "right" if out.right else "WRONG" if out.ran else out.state
    lost = f"{out.healthy:.1f} -> {out.faulty:.1f} -> {out.after:.1f} dB, gain {out.claimed:+.1f} claimed"
    return f"{mark} {out.group} {out.kind} {out.net} {out.quantizer}: {lost}: {out.said[:300]} ({out.seconds:.1f} s)"


def summary(outcomes: Sequence[Outcome], drawn: int, r: random.Random) -> bool:
    """Prints the tables; whether all bars are met."""
    ran = [out for out in outcomes if out.ran]
    faults = [out for out in ran if out.group == "fault"]
    rows = []
    for name in [*KINDS, "pair", "untouched", "harmless"]:
        own = [out for out in ran if (out.kind if out.group == "fault" else out.group) == name]
        shares = _known(out.share for out in own)
        other = Counter(out.said.partition(",")[0] or out.state for out in own if not out.right)
        rows.append(
            (
                name,
                len(own),
                sum(out.right_cause for out in own),
                sum(out.right for out in own),
                f"{mean(shares):.0%}" if shares else "",
                f"{median(shares):.0%}" if shares else "",
                _ratio([out.within for out in own if out.within is not None]),
                sum(out.unheld for out in own),
                f"{mean(_known(out.forwards for out in own if out.forwards) or [0]):.0f}",
                f"{mean(_known(out.seconds for out in own) or [0]):.1f}",
                "; ".join(f"{said[:60]} ({count})" if count > 1 else said[:60] for said, count in other.most_common(3)),
            )
        )
    headers = ["kind", "cases", "cause", "right", "dB back: mean", "median", "gain within", "rows that do not hold"]
    print(tabulate([row for row in rows if row[1]], [*headers, "forwards", "seconds", "said otherwise"], "github"))
    return _totals(outcomes, faults, ran, drawn, r)


def _totals(
    outcomes: Sequence[Outcome], faults: list[Outcome], ran: list[Outcome], drawn: int, r: random.Random
) -> bool:
    shares = _known(out.share for out in faults)
    pairs, plain, changed = ([out for out in ran if out.group == each] for each in ("pair", "untouched", "harmless"))
    within = [out.within for out in ran if out.within is not None]
    errors = _known(abs(out.claimed - out.measured) for out in ran if out.rows)
    print(f"right cause and place: {_wilson([out.right for out in faults])}; bar {BAR:.0%}")
    print(f"right cause: {_wilson([out.right_cause for out in faults])}")
    print(f"lost dB brought back on the check set: {_bootstrap(shares, r)}; bar {BAR:.0%} in the mean")
    followed = [1.0 if out.right else out.share for out in faults if not math.isnan(out.share)]
    print(f"the same where the remedies of right rows are followed by hand: {_bootstrap(followed, r)}")
    print(f"pairs of faults, both named: {_wilson([out.right for out in pairs])}")
    print(f"claimed gain within its interval: {_wilson(within) if within else 'no interval in the reports'}; bar 95 %")
    if errors:
        near = sum(error < 1 for error in errors)
        print(f"claimed and measured gain differ by {median(errors):.1f} dB in the median, less than 1 in {near} of"
              f" {len(errors)}")  # fmt: skip
    rows, unheld = sum(out.rows for out in plain), sum(out.unheld for out in plain)
    print(f"untouched: {rows} rows in {len(plain)} nets, {unheld} of which do not hold; bar 0")
    print(f"harmless changes that change the verdict: {_wilson([not out.right for out in changed])}; bar 0")
    states = Counter(out.state for out in outcomes)
    print(f"of {drawn} cases: {', '.join(f'{count} {state}' for state, count in states.items())}", end="")
    print(f", {drawn - len(outcomes)} not begun" if drawn > len(outcomes) else "")
    for out in outcomes:
        if not out.ran:
            print(f"not judged, {out.state}: {out.group} {out.kind} {out.said}")
    good = [bool(faults), _share(out.right for out in faults) >= BAR, bool(shares) and mean(shares) >= BAR]
    good += [bool(within) and _share(within) >= BAR, not unheld, all(out.right for out in changed)]
    return all(good)


def _known(values: object) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _share(values: object) -> float:
    found = [bool(value) for value in values]
    return sum(found) / len(found) if found else 0.0


def _ratio(values: Sequence[object]) -> str:
    return f"{sum(map(bool, values))} of {len(values)}" if values else ""


def _wilson(values: Sequence[object], z: float = 1.96) -> str:
    """A share with its 95 % interval by Wilson's score."""
    count = len(values)
    if not count:
        return "no case"
    share = _share(values)
    middle, spread = share + z * z / 2 / count, z * math.sqrt(share * (1 - share) / count + z * z / 4 / count**2)
    low, high = ((middle + sign * spread) / (1 + z * z / count) for sign in (-1, 1))
    return f"{share:.1%} ({_ratio(values)}; {low:.1%} to {high:.1%})"


def _bootstrap(values: list[float], r: random.Random) -> str:
    """Mean and median, and the mean's 95 % interval by resampling."""
    if not values:
        return "no case"
    means: list[float] = sorted(mean(r.choices(values, k=len(values))) for _ in range(2000))
    return f"mean {mean(values):.1%} ({means[50]:.1%} to {means[-51]:.1%}), median {median(values):.1%}"


if __name__ == "__main__":
    sys.exit(main())
