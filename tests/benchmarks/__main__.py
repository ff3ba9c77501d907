"""``make bench``: prints every ratio beside its bar, and fails where one is missed.

Times are the best of several rounds.  Each round runs everything that is compared once, so that a machine that slows
down slows all of it; memory is the peak of resident memory beyond what was there before.  Each model has a process of
its own: whether the C library gives freed memory back to the system decides how long a forward takes.
"""

from __future__ import annotations

import argparse
import sys
import warnings

from tabulate import tabulate

from tests.benchmarks.bad_cases import measure_bad_cases
from tests.benchmarks.bars import Result
from tests.benchmarks.checking import measure_checking
from tests.benchmarks.deployed import measure_deployed
from tests.benchmarks.diagnose import measure_diagnose
from tests.benchmarks.language_models import measure_language_models
from tests.benchmarks.layers import measure_memory, measure_times
from tests.benchmarks.packaging import measure_wheel
from tests.benchmarks.processes import measure_processes
from tests.benchmarks.quantizing import measure_quantizing
from tests.benchmarks.reconfigure import measure_reconfigure
from tests.benchmarks.sensitivity import measure_sensitivity
from tests.benchmarks.startup import measure_startup
from tests.benchmarks.weights import measure_weights


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each measurement; the best counts")
    parser.add_argument(
        "--only",
        choices=[
            "times",
            "memory",
            "startup",
            "package",
            "cases",
            "sensitivity",
            "deployed",
            "diagnose",
            "reconfigure",
            "processes",
            "quantize",
            "checking",
            "weights",
            "language_models",
        ],
        help="one part of it",
    )
    parser.add_argument("--size", type=float, default=1.0, help="GB of weights of the model of `weights`")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results: list[Result] = []
    if arguments.only in (None, "startup"):
        results += measure_startup(arguments.rounds)
    if arguments.only in (None, "package"):
        results += measure_wheel()
    if arguments.only in (None, "times"):
        for model in ("resnet50", "mobilenet_v2"):
            results += measure_times(model, arguments.rounds)
    if arguments.only in (None, "memory"):
        results += measure_memory()
    if arguments.only in (None, "cases"):
        results += measure_bad_cases(arguments.rounds)
    if arguments.only in (None, "sensitivity"):
        results += measure_sensitivity(max(2, arguments.rounds // 5))
    if arguments.only in (None, "deployed"):
        results += measure_deployed(max(2, arguments.rounds // 2))
    if arguments.only in (None, "diagnose"):
        results += measure_diagnose(max(3, arguments.rounds // 2))
    if arguments.only in (None, "reconfigure"):
        results += measure_reconfigure()
    if arguments.only in (None, "processes"):
        results += measure_processes(max(2, arguments.rounds // 5))
    if arguments.only in (None, "quantize"):
        results += measure_quantizing(max(1, arguments.rounds // 5))
    if arguments.only in (None, "checking"):
        results += measure_checking(max(2, arguments.rounds // 5))
    if arguments.only in (None, "weights"):
        results += measure_weights(arguments.size)
    if arguments.only == "language_models":
        results += measure_language_models()
    rows = [(r.what, r.shown, r.bar_shown, "" if r.met is None else "yes" if r.met else "NO") for r in results]
    print(tabulate(rows, headers=["what", "measured", "bar", "met"], tablefmt="github"))
    missed = [result.what for result in results if result.met is False]
    if missed:
        print(f"\nmissed: {'; '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
