"""What a merged report must be: equal to that of one run, in every number and text."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pt2qa
from pt2qa._report.rows import columns_of, custom_names, derived_of, tables_of
from pt2qa.report import Report

CLOSE = 1e-9
"""The largest relative difference of two numbers; exact zeros may become the rounding of the sums they come from."""


def differences(merged: Report, whole: Report, *, without: Sequence[str] = ()) -> list[str]:
    """Every cell and number of a merged report that is not the one of the whole run."""
    return list(_differences(merged, whole, without))


def _differences(merged: Any, whole: Any, without: Sequence[str]) -> Iterator[str]:
    assert type(merged) is type(whole)
    for name in whole.numbers():
        if not close(getattr(merged, name), getattr(whole, name)):
            yield f"{name}: {getattr(merged, name)}, in one run {getattr(whole, name)}"
    for table, row_type in tables_of(type(whole)).items():
        ours, wanted = getattr(merged, table), getattr(whole, table)
        if len(ours) != len(wanted):
            yield f"{len(ours)} {table}, in one run {len(wanted)}"
            continue
        names = [each.name for each in (*columns_of(row_type), *derived_of(row_type)) if each.name not in without]
        for number, (row, expected) in enumerate(zip(ours, wanted, strict=True)):
            cells = [(name, getattr(row, name), getattr(expected, name)) for name in names]
            cells += [(name, row.custom[name], expected.custom[name]) for name in custom_names(wanted)]
            for name, own, other in cells:
                if not close(own, other):
                    yield f"{table}[{number}].{name}: {own}, in one run {other}"


def close(own: Any, other: Any) -> bool:
    if isinstance(other, float):
        return math.isclose(own, other, rel_tol=CLOSE, abs_tol=1e-12) or (math.isnan(own) and math.isnan(other))
    return bool(own == other)


def random_shards(batches: Sequence[Any], seed: int, count: int = 3) -> list[list[Any]]:
    """The batches in order, cut at random into shards of different sizes; none is empty."""
    cuts = sorted(random.Random(seed).sample(range(1, len(batches)), count - 1))
    return [list(batches[start:end]) for start, end in zip([0, *cuts], [*cuts, len(batches)], strict=True)]


def merged_from_files(analysis: Callable[..., Report], shards: Sequence[list[Any]], folder: Path) -> tuple[Any, Any]:
    """The merged report of shards, and that of one run: from files and in any grouping, their numbers are the same."""
    whole = analysis([batch for shard in shards for batch in shard])
    reports = by_shards(analysis, shards)
    files = [folder / f"{number}.safetensors" for number in range(len(reports))]
    for report, file in zip(reports, files, strict=True):
        report.save(file)
    merged = pt2qa.merge(map(pt2qa.load, files))
    assert not differences(merged, whole)
    assert not differences(pt2qa.merge([pt2qa.merge(reports[:2]), *reports[2:]]), whole)
    return merged, whole


def by_shards(analysis: Callable[[list[Any]], Report], shards: Sequence[list[Any]]) -> list[Report]:
    """The report of each shard."""
    return [analysis(list(shard)) for shard in shards]
