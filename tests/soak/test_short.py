"""The campaigns of ``make soak``, seconds long."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pt2qa.report import load
from tests.soak.declared import damages, declared, sealed
from tests.soak.fuzz import MEASURED, bounded, fuzz, use
from tests.soak.interrupt import interrupt
from tests.soak.race import race


def test_no_damaged_file_is_believed_or_crashes_what_reads_it() -> None:
    figures = fuzz(250, seed=1)
    assert figures.violations == []
    assert figures.counts["damages"] == 250
    assert min(figures.counts["refused"], figures.counts["read"]) > 50


def test_no_damaged_field_is_believed_or_crashes_what_reads_it() -> None:
    figures = declared(8, seed=1)
    assert figures.violations == []
    assert figures.counts["damages"] == 8 * 17
    assert min(figures.counts["refused"], figures.counts["read"]) > 5


@pytest.mark.parametrize(
    ("kind", "where", "value"),
    [("profile", "sums/described/steps", "1 as all"), ("weights", "rows/quant_max", "1e+308 in 0")],
)
def test_what_the_campaign_of_fields_once_found_is_read(tmp_path: Path, kind: str, where: str, value: str) -> None:
    report = load(MEASURED / f"{kind}.safetensors")
    (damage,) = (each for each in damages(report) if (each.where, each.value) == (where, value))
    sealed(report, damage, tmp_path / "report.safetensors")
    with bounded():
        use(load(tmp_path / "report.safetensors"), report, random.Random(0), every=True)


def test_two_processes_in_one_folder_lose_nothing() -> None:
    figures = race(30)
    assert figures.violations == []
    assert figures.counts["folders"] == 30


@pytest.mark.skipif(os.name != "posix", reason="fork and signals as POSIX has them")
def test_a_killed_process_leaves_whole_files_and_nothing_that_stays() -> None:
    # A process of its own, since forking this one, which has threads, is not safe.
    command = [sys.executable, "-m", "tests.soak", "--only", "kill", "--kills", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "20 kills" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_at_any_moment_is_exit_code_130_without_a_traceback() -> None:
    figures = interrupt(0, seed=1, count=2)
    assert figures.violations == []
    assert figures.counts["interrupts"] == 2
