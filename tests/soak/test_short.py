"""The campaigns of ``make soak``, seconds long."""

from __future__ import annotations

from tests.soak.fuzz import fuzz


def test_no_damaged_file_is_believed_or_crashes_what_reads_it() -> None:
    figures = fuzz(250, seed=1)
    assert figures.violations == []
    assert figures.counts["damages"] == 250
    assert min(figures.counts["refused"], figures.counts["read"]) > 50
