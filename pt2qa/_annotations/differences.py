"""Two annotations, place by place."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

from pt2qa._ambient import torch_defaults
from pt2qa._annotations import listing
from pt2qa._annotations.report import UNKNOWN, AnnotationDiff, AnnotationDiffRow, AnnotationReport, AnnotationRow
from pt2qa._capture.program import Capture
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa.errors import SelectionError

_Key = tuple[str, str, int, int]
"""Op, role, argument, and which of several values in one argument."""

_ASKED: Final = frozenset({"scheme", "observer", "options", "shares", "asked"})
"""What a converted graph alone does not say."""


@torch_defaults
def diff_annotations(a: Any, b: Any, *, capture: Capture | None = None) -> AnnotationDiff:
    """Compares the annotations of two quantizers, or of two versions or settings of one.

    Places are matched by op name, so the two sides may come from two captures of one model.  Scales are
    not compared: they depend on the calibration.

    Args:
        a: an :class:`AnnotationReport` or a pair; with ``capture`` also any quantizer that :func:`pt2qa.quantize`
            takes.
        b: likewise.
        capture: the model that quantizers annotate.

    Returns:
        The places that differ; true where there are any.

    Raises:
        SelectionError: a quantizer without a capture.
        QuantizeError: a quantizer failed.
        PluginError: there is no such quantizer.

    >>> diff_annotations("xnnpack", "xnnpack:per_channel=false", capture=capture).rows[0].what
    'scheme per_channel_symmetric -> per_tensor_symmetric; axis 0 -> none; observer PerChannelMinMaxObserver -> ...
    """
    one, two = _report(a, "a", capture), _report(b, "b", capture)
    left, right = _by_key(one.rows), _by_key(two.rows)
    unknown = _ASKED if "converted" in (one.basis, two.basis) else frozenset()
    rows: list[AnnotationDiffRow] = []
    equal = Counter[bool]()
    for key, row in left.items():
        other = right.get(key)
        found = _only(row, "only in a") if other is None else _compared(row, other, unknown)
        if found is None:
            equal[row.quantized] += 1
        else:
            rows.append(found)
    rows += [_only(row, "only in b") for key, row in right.items() if key not in left]
    return AnnotationDiff(
        rows=tuple(rows),
        a=one.quantizer,
        b=two.quantizer,
        equal_quantized=equal[True],
        equal_float=equal[False],
        notes=tuple(_notes(one, two, unknown)),
        model=one.model if one.model == two.model else f"{one.model} and {two.model}",
        environment=one.environment,
    )


def _report(side: Any, name: str, capture: Capture | None) -> AnnotationReport:
    if isinstance(side, AnnotationReport):
        return side
    if isinstance(side, QuantizedPair):
        return listing.annotations(side)
    if capture is None:
        raise SelectionError(
            f"{name}: got {side!r}, expected an AnnotationReport or a pair. To compare quantizers, pass the model: "
            "pt2qa.diff_annotations(a, b, capture=capture)."
        )
    return listing.annotations(capture, side)


def _by_key(rows: Iterable[AnnotationRow]) -> dict[_Key, AnnotationRow]:
    counts: dict[tuple[str, str, int], Iterator[int]] = defaultdict(itertools.count)
    places = [(row, (row.name, row.role, row.argument)) for row in rows]
    return {(*place, next(counts[place])): row for row, place in places}


def _compared(a: AnnotationRow, b: AnnotationRow, unknown: frozenset[str]) -> AnnotationDiffRow | None:
    facts_a, facts_b = a.facts, b.facts
    changed = {
        fact: f"{fact} {facts_a[fact] or 'none'} -> {facts_b[fact] or 'none'}"
        for fact in facts_a
        if facts_a[fact] != facts_b[fact] and fact not in unknown and UNKNOWN not in (facts_a[fact], facts_b[fact])
    }
    if not changed:
        return None
    # Which values share a scale differs from place to place.
    kind = "\n".join(fact if fact in ("shares", "value") else text for fact, text in changed.items())
    status: Literal["only in a", "only in b", "changed"] = "changed"
    what = "; ".join(changed.values())
    if a.quantized != b.quantized:
        status = "only in a" if a.quantized else "only in b"
        rounded = {name: fact for name, fact in (facts_a if a.quantized else facts_b).items() if name not in unknown}
        left_alone = b.dtype if a.quantized else a.dtype
        kind, what = "", f"{_text(rounded)}, and {left_alone or 'float'} in {'b' if a.quantized else 'a'}"
    return AnnotationDiffRow(a.name, a.role, a.argument, a.of, status, what, kind)


def _only(row: AnnotationRow, status: Literal["only in a", "only in b"]) -> AnnotationDiffRow:
    other = "b" if status == "only in a" else "a"
    what = f"{_text(row.facts) if row.quantized else row.dtype or 'float'}, and {other} has no such place"
    return AnnotationDiffRow(row.name, row.role, row.argument, row.of, status, what)


def _text(facts: dict[str, str]) -> str:
    words = [facts.get(name, "") for name in ("dtype", "scheme", "range", "observer")]
    return " ".join(filter(None, (*words, "dynamic" if facts["scale"] == "dynamic" else "")))


def _notes(a: AnnotationReport, b: AnnotationReport, unknown: frozenset[str]) -> Iterable[str]:
    if a.environment.fingerprint != b.environment.fingerprint:
        yield (
            "the two models differ in ops or parameters: their fingerprints are "
            f"{a.environment.fingerprint or 'unknown'} and {b.environment.fingerprint or 'unknown'}"
        )
    if unknown:
        yield (
            "one side is a converted graph from elsewhere: annotations, schemes, observers and shared scales are not "
            "compared"
        )
