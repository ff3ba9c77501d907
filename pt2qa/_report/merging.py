"""Merging reports of parts of the data: what must agree, and what all kinds add up alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, TypeVar

from pt2qa._report.base import Report
from pt2qa._report.notes import joined_notes
from pt2qa._report.rows import takes_custom
from pt2qa._report.set_apart import SetApart, added
from pt2qa._report.storage import kinds
from pt2qa._report.sums import settings_of
from pt2qa.errors import ReportError

AnyReport = TypeVar("AnyReport", bound=Report)

_ALIKE = "Shards of one run are made with the same model, the same quantized model and the same arguments"


def merge(reports: Iterable[AnyReport], *, metrics: Mapping[str, Any] | None = None) -> AnyReport:
    """One report of several that an analysis made of parts of the data.

    Every number is that of one run over all batches, those of the first report first: it is computed from the sums
    that the reports carry, by the code of a single run.  Batches and samples are numbered on.  Notes that not all
    reports share say which one they are from.

    Args:
        reports: of one kind, from the same model, quantized model and arguments; see ``docs/merge.md``.
        metrics: the user's metrics of a layer report, in their empty state, as given to the analysis.

    Returns:
        a report of the same kind, which can be merged again.

    Raises:
        ReportError: there is no report, the kind does not add up over batches, a report was made by a version that kept
            no sums, or the reports are not of one run; the text says what differs.

    >>> shards = [pt2qa.compare_layers(pair, [batch]) for batch in (x, 2 * x)]
    >>> pt2qa.merge(shards).samples
    16
    """
    given = list(reports)
    if not given:
        raise ReportError("no report to merge. Give one or more, such as pt2qa.merge([pt2qa.load(path), ...]).")
    for report in given:
        if not isinstance(report, Report):
            raise ReportError(
                f"cannot merge {type(report).__name__}, expected reports; pt2qa.load(path) reads one from its file"
            )
    first = given[0]
    name = type(first).__name__
    if not first.merges_in:
        able = {each.__name__ for each in kinds() if each.merges_in}
        said = f"{'an' if name[0] in 'AE' else 'a'} {name} does not add up over batches."
        which = f"Reports that can be merged: {', '.join(sorted(able))}."
        raise ReportError(" ".join(filter(None, (said, which, first.instead_of_merging))))
    for number, report in enumerate(given, 1):
        _check_alike(number, "kind", type(report).__name__, type(first).__name__)
        _check_run(number, report, first)
    if metrics and not takes_custom(first.row_type()):
        raise ReportError(f"metrics: {name} has no custom metrics. Leave the argument out.")
    # The analyses come after the reports in the import order, and need torch.
    merged: AnyReport = import_module(first.merges_in).merged(given, metrics or {})
    return merged


def _check_run(number: int, report: Any, first: Any) -> None:
    """Checks that a report has sums, and that they are of the same run as those of the first."""
    if not report.sums:
        raise ReportError(
            f"cannot merge: report {number} has no sums: an older version of pt2qa or another program wrote it. Make "
            "it again with this version."
        )
    for each in fields(first.environment):
        _check_alike(number, each.name, getattr(report.environment, each.name), getattr(first.environment, each.name))
    for name in first.one_run:
        _check_alike(number, name, getattr(report, name), getattr(first, name))
    own, wanted = settings_of(report.sums), settings_of(first.sums)
    for name in {**wanted, **own}:
        _check_alike(number, name, own.get(name), wanted.get(name))


def _check_alike(number: int, name: str, given: object, expected: object) -> None:
    if given != expected:
        raise ReportError(
            f"cannot merge: {name} of report {number} is {given!r}, of the first one {expected!r}. {_ALIKE}."
        )


def merged_data(reports: Sequence[Any]) -> dict[str, Any]:
    """The fields that reports on data have in common."""
    batches = [report.batches for report in reports]
    return {
        "batches": sum(batches),
        "samples": sum(report.samples for report in reports),
        "set_apart": numbered_on([report.set_apart for report in reports], batches),
        "input_ranges": added(report.input_ranges for report in reports),
        "notes": joined_notes([report.notes for report in reports]),
    }


def numbered_on(found: Sequence[Sequence[SetApart]], batches: Sequence[int]) -> tuple[SetApart, ...]:
    """The batches set apart in each report, by their number among all batches."""
    firsts = [sum(batches[:number]) for number in range(len(batches))]
    return tuple(
        replace(apart, batch=first + apart.batch) for first, own in zip(firsts, found, strict=True) for apart in own
    )
