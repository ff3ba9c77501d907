"""The campaigns of ``make soak``, seconds long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.declared import declared
from tests.soak.fuzz import fuzz
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
