"""The campaigns of ``make soak``, seconds long."""

from __future__ import annotations

from tests.soak.fuzz import fuzz
from tests.soak.race import race


def test_no_damaged_file_is_believed_or_crashes_what_reads_it() -> None:
    figures = fuzz(250, seed=1)
    assert figures.violations == []
    assert figures.counts["damages"] == 250
    assert min(figures.counts["refused"], figures.counts["read"]) > 50


def test_two_processes_in_one_folder_lose_nothing() -> None:
    figures = race(30)
    assert figures.violations == []
    assert figures.counts["folders"] == 30
