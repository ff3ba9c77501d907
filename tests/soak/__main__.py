"""``make soak``: runs every campaign, prints what it counted, and fails where something was lost or believed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

from tabulate import tabulate

from tests.soak.figures import Figures
from tests.soak.fuzz import fuzz

SHOWN = 20
"""Violations that are printed; the rest are counted."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--damages", type=int, default=20_000, metavar="N", help="damaged files to read")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    parser.add_argument("--only", choices=["fuzz"], help="one campaign")
    arguments = parser.parse_args()
    campaigns: dict[str, Callable[[], Figures]] = {
        "fuzz": partial(fuzz, arguments.damages, arguments.seed),
    }
    found = [run() for name, run in campaigns.items() if arguments.only in (None, name)]
    rows = [
        (each.campaign, ", ".join(f"{count} {what}" for what, count in each.counts.items()), len(each.violations))
        for each in found
    ]
    print(tabulate(rows, headers=["campaign", "counted", "violations"], tablefmt="github"))
    violations = [violation for each in found for violation in each.violations]
    for violation in violations[:SHOWN]:
        print(f"violation: {violation}", file=sys.stderr)
    if len(violations) > SHOWN:
        print(f"and {len(violations) - SHOWN} more", file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
