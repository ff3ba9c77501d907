"""Sensitivity reports of parts of the data, merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pt2qa._report.merging import joined_notes
from pt2qa._report.sums import Sums, pack, settings_of, unpack
from pt2qa._sensitivity.ledger import Ledger, Place, ledger_of, results
from pt2qa._sensitivity.metrics import OutputMetric


def packed(places: Sequence[Place], metric: OutputMetric, settings: Mapping[str, str]) -> Sums:
    """What a report keeps besides the sums, which are its tables ``data`` and ``parts``."""
    return pack({**settings, "weighted": str(metric.weighted)}, places=places)


def merged(reports: Sequence[Any]) -> Any:
    """One sensitivity report of several; see :func:`pt2qa.merge`."""
    first = reports[0]
    weighted = settings_of(first.sums).get("weighted") == str(True)
    metric = OutputMetric(first.metric, None, first.worst_is == "smallest", weighted)
    ledger = Ledger()
    for report in reports:
        own, before = ledger_of(report), len(ledger.data)
        ledger.data += own.data
        for number, apart in own.set_apart.items():
            ledger.set_apart[before + number] = replace(apart, batch=before + number)
        for part in own.parts.values():
            ledger.add(replace(part, batch=before + part.batch))
    places = unpack(first.sums, "places", Place())
    return replace(first, **results(places, ledger, metric), notes=joined_notes([report.notes for report in reports]))
