"""``make mutants``: random faults, each against the tests that run its line."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from tests.mutants.lines import Lines, lines_of
from tests.mutants.mutations import Mutation, mutated, mutations
from tests.mutants.rooms import BESIDE, DEFAULTS, ROOMS, every_test, tests_of
from tests.mutants.worker import POLL, ROOT, Fork, Verdict, trial, warm

ENOUGH = 0.95
"""The share of mutants that must be killed."""

SLOW = 60
"""Seconds, beyond those of its tests, after which a mutant counts as noticed: it does not come to an end."""

OTHERS = 60
"""Seconds of tests after which no more of other rooms are run."""


def candidates(rooms: list[str]) -> list[Mutation]:
    """All faults of the modules of some rooms."""
    files = [
        path for room in rooms for path in ([ROOT / room] if room.endswith(".py") else (ROOT / room).rglob("*.py"))
    ]
    names = sorted(str(path.relative_to(ROOT)) for path in files if path.name not in BESIDE)
    return [mutation for name in names for mutation in mutations(name, (ROOT / name).read_text())]


def tests_for(mutation: Mutation, known: dict[str, Lines]) -> tuple[list[str], float]:
    """The tests that run a line, or of one that is run by imports any line of the module.

    Those of the module's room first, the quickest first; then, for a minute, those of other rooms.
    """
    chosen, total = list[str](), 0.0
    found = [each.of(mutation.path, mutation.line if mutation.called else None) for each in known.values()]
    if not mutation.called:  # which looks at what imports made, and runs no line
        found += [
            {test: taken for test, taken in each.passed.items() if test.startswith(DEFAULTS)} for each in known.values()
        ]
    seconds = {test: taken for each in found for test, taken in each.items()}
    own = tests_of(mutation.path)
    for test in sorted(seconds, key=lambda test: (not test.startswith(own), seconds[test])):
        if test.startswith(own) or total < OTHERS:
            chosen.append(test)
            total += seconds[test]
    return chosen, total


def verdicts(
    chosen: Sequence[Mutation], known: dict[str, Lines], processes: int, instead: list[str] | None = None
) -> Iterator[tuple[Mutation, list[str], Verdict]]:
    """What becomes of each fault, and the tests that run its line, as they end; so many run side by side."""
    waiting, running = list(reversed(chosen)), list[tuple[Mutation, list[str], Fork]]()
    while waiting or running:
        while waiting and len(running) < processes:
            mutation = waiting.pop()
            tests, seconds = (instead, SLOW) if instead else tests_for(mutation, known)
            if not tests:
                yield mutation, tests, "survived"
                continue
            source = mutated(mutation, (ROOT / mutation.path).read_text())
            running.append((mutation, tests, trial(mutation.path, source, tests, SLOW + 3 * processes * seconds)))
        time.sleep(POLL)
        for each in list(running):
            mutation, tests, fork = each
            if (verdict := fork.verdict()) is not None:
                running.remove(each)
                yield mutation, tests, verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=200, metavar="N", help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument("--only", default="", metavar="PATH", help="a folder or file, such as pt2qa/_layers")
    parser.add_argument("--line", type=int, metavar="N", help="only the faults of this line of the file")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="run these instead of all that run the line")
    parser.add_argument("--lines", type=Path, default=ROOT / "build" / "mutants", help="folder of the tests' lines")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="side by side")
    given = parser.parse_args()
    os.chdir(ROOT)
    rooms = [room for room in ROOMS if given.only.startswith(room) or room.startswith(given.only)]
    found = [each for each in candidates(rooms) if each.path.startswith(given.only) and given.line in (None, each.line)]
    chosen = random.Random(given.seed).sample(found, min(given.count, len(found)))
    warm()
    known = {} if given.tests else lines_of(every_test(ROOT), given.lines, given.processes)
    counts: Counter[str] = Counter()
    bar = tqdm(total=len(chosen), desc="mutants")
    for mutation, tests, verdict in verdicts(chosen, known, given.processes, given.tests):
        counts[verdict] += 1
        bar.update()
        bar.set_postfix(counts)
        if verdict == "survived":
            bar.write(f"survived {len(tests)} tests: {mutation}", file=sys.stdout)
            sys.stdout.flush()
    bar.close()
    killed = counts["killed"] + counts["slow"]
    print(f"{killed} of {len(chosen)} mutants were killed, {counts['slow']} of them by the clock")
    return 0 if killed >= ENOUGH * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
