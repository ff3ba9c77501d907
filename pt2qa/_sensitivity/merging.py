"""Sensitivity reports of parts of the data, merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pt2qa._report.notes import joined_notes, notes_without
from pt2qa._report.set_apart import added
from pt2qa._report.sums import Sums, pack, settings_of, unpack
from pt2qa._sensitivity.ledger import Ledger, Place, ledger_of, precision_notes, results
from pt2qa._sensitivity.metrics import OutputMetric

PROJECTIONS = "projections that were asked for"
"""The setting with the argument ``projections``."""


def packed(places: Sequence[Place], metric: OutputMetric, settings: Mapping[str, str]) -> Sums:
    """What a report keeps besides the sums, which are its tables ``data`` and ``parts``."""
    return pack({**settings, "weighted": str(metric.weighted)}, places=places)


def merged(reports: Sequence[Any]) -> Any:
    """One sensitivity report of several; see :func:`pt2qa.merge`."""
    first = reports[0]
    settings = settings_of(first.sums)
    weighted = settings.get("weighted") == str(True)
    metric = OutputMetric(first.metric, None, first.worst_is == "smallest", weighted)
    places = unpack(first.sums, "places", Place())
    given = settings.get(PROJECTIONS) != str(None)

    ledger, said = Ledger(), []
    for report in reports:
        own, before = ledger_of(report), len(ledger.data)
        ledger.data += own.data
        for number, apart in own.set_apart.items():
            ledger.set_apart[before + number] = replace(apart, batch=before + number)
        for part in own.parts.values():
            ledger.add(replace(part, batch=before + part.batch))
        said.append(notes_without("of sums", report.notes))
    precision = [] if first.method == "exact" else precision_notes(ledger, len(places), given=given)
    notes = (*joined_notes(said), *precision)
    ranges = added(report.input_ranges for report in reports)
    return replace(first, **results(places, ledger, metric), notes=notes, input_ranges=ranges)
