"""``make fuzz``: random models through every analysis, each number against its recomputation."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from tests.fuzz.campaign import campaign


def main(name: str = "fuzz", about: str | None = __doc__, **ways: Any) -> int:
    """The command line of a campaign, whose ways of drawing and judging are those of ``campaign``."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.{name}", description=about)
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="no model is begun after these")
    parser.add_argument("--seed", type=int, default=0, help="of the first model; each next one has one more")
    parser.add_argument("--models", type=int, default=10**9, metavar="N", help="the most models")
    parser.add_argument("--folder", type=Path, default=Path("build", name), help="for a script of each failure")
    parser.add_argument("--known", action="append", default=[], metavar="TEXT", help="failures that are only counted")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.models)
    done = campaign(seeds, given.seconds, given.folder, known=given.known, progress=True, **ways)
    print(
        tabulate([("models", done.models), *sorted(done.counts.items())], headers=["what", "number"], tablefmt="github")
    )
    for title, counts in (("refused", done.refusals), ("failed", done.again)):
        rows = tabulate(counts.most_common(), headers=[title, "models"], tablefmt="github", maxcolwidths=[100, None])
        print(f"\n{rows}")
    return 1 if done.again else 0


if __name__ == "__main__":
    sys.exit(main())
