"""``make soak``: runs every campaign, prints what it counted, and fails where something was lost or believed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

from tabulate import tabulate

from tests.soak.declared import declared
from tests.soak.figures import Outcome
from tests.soak.fuzz import fuzz
from tests.soak.interrupt import interrupt
from tests.soak.kill import kill
from tests.soak.race import race

SHOWN = 20
"""Violations that are printed; the rest are counted."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--damages", type=int, default=20_000, metavar="N", help="damaged files to read")
    parser.add_argument("--fields", type=int, default=2_000, metavar="N", help="damaged fields of each kind of report")
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="processes to kill while they save")
    parser.add_argument("--folders", type=int, default=100, metavar="N", help="folders in which two processes write")
    parser.add_argument("--seconds", type=float, default=45, metavar="S", help="time for interrupted analyses")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    # Kills first: they fork, which is safe as long as no campaign has loaded torch.
    campaigns: dict[str, Callable[[argparse.Namespace], Outcome]] = {
        "kill": lambda given: kill(given.kills, given.seed),
        "interrupt": lambda given: interrupt(given.seconds, given.seed),
        "race": lambda given: race(given.folders),
        "fields": lambda given: declared(given.fields, given.seed),
        "fuzz": lambda given: fuzz(given.damages, given.seed),
    }
    parser.add_argument("--only", choices=list(campaigns), help="one campaign")
    arguments = parser.parse_args()
    chosen = [run for name, run in campaigns.items() if arguments.only in (None, name)]
    found = [_timed(partial(run, arguments)) for run in chosen]
    rows = [
        (each.campaign, ", ".join(f"{count} {what}" for what, count in each.counts.items()), len(each.violations), took)
        for each, took in found
    ]
    print(tabulate(rows, headers=["campaign", "counted", "violations", "s"], floatfmt=".0f", tablefmt="github"))
    violations = [f"{each.campaign}: {violation}" for each, _ in found for violation in each.violations]
    for violation in violations[:SHOWN]:
        print(f"violation: {violation}", file=sys.stderr)
    if len(violations) > SHOWN:
        print(f"and {len(violations) - SHOWN} more", file=sys.stderr)
    return 1 if violations else 0


def _timed(run: Callable[[], Outcome]) -> tuple[Outcome, float]:
    begun = time.monotonic()
    return run(), time.monotonic() - begun


if __name__ == "__main__":
    sys.exit(main())
