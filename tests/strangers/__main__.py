"""``make strangers``: every quantizer that a pip user can import on ten small nets.

Each quantizer runs in a process of its own, because some change torch when they are imported. The table of
docs/quantizers_of_others.md is written anew; the exit code is 1 if anything is a fault of pt2qa's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tabulate import tabulate

from tests.strangers.campaign import NETS, OUTCOMES, Tried, attempt
from tests.strangers.quantizers import STRANGERS

PAGE: Final = Path(__file__).parents[2] / "docs" / "quantizers_of_others.md"
START: Final = "<!-- python -m tests.strangers writes what follows -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.strangers", description=__doc__)
    parser.add_argument("--quantizer", action="append", choices=STRANGERS, help="these alone; the page stays as it is")
    parser.add_argument("--net", action="append", choices=NETS, help="these alone; the page stays as it is")
    parser.add_argument("--here", action="store_true", help="in this process, one line of JSON for each net")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one quantizer")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many processes at a time")
    arguments = parser.parse_args()
    nets = arguments.net or NETS
    if arguments.here:
        for name in arguments.quantizer or STRANGERS:
            for net in nets:
                found = attempt(name, STRANGERS[name], net, lambda text: print(text, file=sys.stderr))
                print(json.dumps(asdict(found)), flush=True)
        return 0
    whole = not arguments.quantizer and not arguments.net
    tried: list[Tried] = []
    waiting: dict[str, str] = {}
    for name in arguments.quantizer or STRANGERS:
        missing = [module for module in STRANGERS[name].needs if find_spec(module) is None]
        waiting[name] = f"which needs {', '.join(missing)}" if missing else ""
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = {
            pool.submit(_in_process, name, nets, arguments.timeout): name for name, why in waiting.items() if not why
        }
        for run in as_completed(runs):
            del waiting[runs[run]]
            tried += run.result()
            print(runs[run], Counter(each.outcome for each in run.result()), file=sys.stderr, flush=True)
            if whole:
                PAGE.write_text(PAGE.read_text().partition(START)[0] + START + "\n" + page(tried, waiting))
    print(page(tried, waiting))
    return int(bool(waiting) or any(each.outcome == "ours" for each in tried))


def _in_process(name: str, nets: Sequence[str], timeout: float) -> list[Tried]:
    """What a process found; of the nets that it did not come to, that."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.strangers", "--here", "--quantizer", name]
    command += [part for net in nets for part in ("--net", net)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=timeout)
        text, end = done.stdout, f"the process ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        end = f"the process took more than {timeout:g} s"
    found = [Tried(**json.loads(line)) for line in text.splitlines() if line.startswith('{"quantizer"')]
    return [*found, *(Tried(name, net, "ours", "process", end) for net in nets[len(found) :])]


def page(tried: Sequence[Tried], waiting: Mapping[str, str]) -> str:
    """The table, its totals, every error with the nets where it is raised, and what was not tried, with the reason."""
    counts = {
        name: Counter(each.outcome for each in tried if each.quantizer == name)
        for name in STRANGERS
        if any(each.quantizer == name for each in tried)
    }
    rows = [[name, STRANGERS[name].package, *(count[each] for each in OUTCOMES)] for name, count in counts.items()]
    total = Counter(each.outcome for each in tried)
    rows.append(["all", "", *(total[each] for each in OUTCOMES)])
    parts = [tabulate(rows, headers=["quantizer", "from", *OUTCOMES.values()], tablefmt="github")]
    reasons: dict[tuple[str, str], dict[str, list[str]]] = {}
    for each in tried:
        if each.why:
            text = each.why if len(each.why) <= 200 else f"{each.why[:199]}…"
            reasons.setdefault((each.step, text), {}).setdefault(each.quantizer, []).append(each.net)
    lines = [
        f"- {', '.join(f'{name} ({_listed(nets)})' for name, nets in where.items())}: `{step}` raises\n"
        f"  `{why.replace('`', chr(39))}`"
        for (step, why), where in reasons.items()
    ]
    parts += ["\n".join(["What was raised:", "", *lines])] if lines else []
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "torchao", "executorch"))
    parts.append(f"Measured with {versions}; nets: {', '.join(dict.fromkeys(each.net for each in tried))}.")
    parts += [f"Not tried: {name}, {why}." for name, why in waiting.items() if why]
    if rest := [name for name, why in waiting.items() if not why]:
        parts.append(f"Not tried in this run: {'; '.join(rest)}.")
    return "\n\n".join(parts) + "\n"


def _listed(nets: Sequence[str]) -> str:
    return "all nets" if len(nets) == len(NETS) else ", ".join(nets)


if __name__ == "__main__":
    sys.exit(main())
