"""Random models, one after the other in a process of its own: a crash of native code is a finding like any other.

A failure is reduced: genes, batches and sizes are taken away as long as the same stage fails in the same way.  The
script of what is left shows it without this package's search.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

SECONDS = 1200
"""How long one model may take: more is a failure."""

FRESH = 100
"""Models after which a new process begins, so that memory that is never given back is no matter."""

TRIES = 60
"""The most smaller models that are tried for one failure."""

CRASHED, SLOW = "the process ended", f"more than {SECONDS} s"


@dataclass(frozen=True)
class Finding:
    """A failure, reduced: the seed it was found with, the stage, what happened, and a script that shows it."""

    seed: int
    stage: str
    signature: str
    script: str


@dataclass
class Campaign:
    """What was run and found."""

    models: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    again: Counter[str] = field(default_factory=Counter)


class Worker:
    """A process that analyses genomes, and is begun anew after a crash."""

    def __init__(self, analyse: Callable[..., Any]) -> None:
        self.analyse, self.process, self.served = analyse, None, 0

    def run(self, genome: Any, only: Sequence[str] = ()) -> Any:
        """The outcome of a genome; a text where there is none."""
        if self.process is None or self.served >= FRESH:
            self.close()
            context = multiprocessing.get_context("spawn")
            self.end, other = context.Pipe()
            self.process = context.Process(target=_serve, args=(other, self.analyse), daemon=True)
            self.process.start()
            other.close()
        self.served += 1
        try:
            self.end.send((genome, tuple(only)))
            if self.end.poll(SECONDS):
                return self.end.recv()
            found = SLOW
        except (EOFError, OSError):
            self.process.join()
            found = f"{CRASHED} with code {self.process.exitcode}"
        self.close()
        return found

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.end.close()
        self.process, self.served = None, 0


def _serve(end: Any, analyse: Callable[..., Any]) -> None:
    logging.disable(logging.ERROR)
    while True:
        end.send(analyse(*end.recv()))


def failures_of(outcome: Any) -> dict[str, tuple[str, str]]:
    """By stage, the line that tells failures apart and the traceback."""
    return {"process": (outcome, outcome)} if isinstance(outcome, str) else outcome.failures


def campaign(
    seeds: range,
    seconds: float,
    folder: Path | None,
    *,
    analyse: Callable[..., Any] | None = None,
    draw: Callable[[int], Any] | None = None,
    script: Callable[..., str] | None = None,
    known: Sequence[str] = (),
    progress: bool = False,
) -> Campaign:
    """Runs models until the time is over; each failure of a kind not seen before is reduced, and written to a folder.

    Args:
        seeds: of the models.
        seconds: no model is begun after these.
        folder: for the scripts; None for none.
        analyse: of a genome and the names of stages; None for all of pt2qa.
        draw: a genome of a seed; None for those of all of pt2qa.
        script: of a reduced genome, its stage, line and traceback.
        known: parts of lines of failures that are only counted.
        progress: whether a bar of the time is shown.
    """
    if draw is None:
        from tests.fuzz.grammar import random_genome as draw
    if analyse is None:
        from tests.fuzz.analyses import analyse
    written = script or script_of
    done, worker, start = Campaign(), Worker(analyse), time.monotonic()
    seen: set[str] = set()
    form = "{percentage:3.0f}% |{bar}| {elapsed} of " + tqdm.format_interval(seconds) + "{postfix}"
    bar = tqdm(total=seconds, bar_format=form, disable=not progress)
    for seed in seeds:
        if (passed := time.monotonic() - start) > seconds:
            break
        bar.update(passed - bar.n)
        genome = draw(seed)
        outcome = worker.run(genome)
        done.models += 1
        if not isinstance(outcome, str):
            done.counts.update(outcome.counts)
            done.refusals.update(f"{stage}: {line}" for stage, line in outcome.refusals.items())
        for stage, (line, trace) in failures_of(outcome).items():
            done.again[f"{stage}: {line}"] += 1
            if f"{stage}: {line}" in seen or any(part in line for part in known):
                continue
            seen.add(f"{stage}: {line}")
            small, trace = reduced(worker, genome, stage, line, trace)
            finding = Finding(seed, stage, line, written(small, stage, line, trace))
            done.findings.append(finding)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{len(done.findings):03d}_{stage}_{seed}.py").write_text(finding.script)
            bar.write(f"seed {seed}, {stage}: {line}")
        bar.set_postfix(models=done.models, findings=len(done.findings))
    bar.close()
    worker.close()
    return done


def reduced(worker: Worker, genome: Any, stage: str, line: str, trace: str) -> tuple[Any, str]:
    """The smallest genome found that fails alike, and its traceback."""
    from tests.fuzz.grammar import smaller

    only = () if stage in ("process", "quantize") else _needed(stage)
    left = TRIES
    shrunk = True
    while shrunk and left > 0:
        shrunk = False
        for candidate in smaller(genome):
            left -= 1
            found = failures_of(worker.run(candidate, only)).get(stage)
            if found is not None and found[0] == line:
                genome, trace, shrunk = candidate, found[1], True
                break
            if left <= 0:
                break
    return genome, trace


def _needed(stage: str) -> tuple[str, ...]:
    """The stages to run for one to fail: views look at the reports of others."""
    from tests.fuzz.analyses import STAGES

    return tuple(STAGES) if stage == "views" else (stage,)


def script_of(genome: Any, stage: str, line: str, trace: str) -> str:
    """A script that runs one stage on one genome, with the model's source to read."""
    from tests.fuzz.grammar import write

    source = write(genome).source
    only = () if stage in ("process", "quantize") else _needed(stage)
    return "\n".join(
        [
            f'"""{stage}: {line}"""',
            "",
            "from tests.fuzz.analyses import analyse",
            "from tests.fuzz.grammar import Gene, Genome",
            "",
            f"GENOME = {genome!r}",
            "",
            "for stage, (line, trace) in analyse(GENOME, " + repr(only) + ").failures.items():",
            "    print(stage, line, trace, sep='\\n')",
            "",
            "# The model:",
            *(f"# {each}".rstrip() for each in source[source.index("class Net") :].splitlines()),
            "#",
            "# What was seen:",
            *(f"# {each}".rstrip() for each in trace.splitlines()),
            "",
        ]
    )
