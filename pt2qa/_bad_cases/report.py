from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan
from typing import Annotated, Any, ClassVar, Final

import numpy as np

from pt2qa._bad_cases.rows import CaseRow, LabelCounts, Ranking, StoredCase, check_structure, key_of, rebuild
from pt2qa._report.base import Block, Listing, ModelReport, Report
from pt2qa._report.charts import LONGEST
from pt2qa._report.prose import counted, number, share
from pt2qa._report.rows import Column, Count, column
from pt2qa._report.set_apart import DataHealth, InputRange, SetApart
from pt2qa._report.storage import register
from pt2qa._report.sums import Array, Sums
from pt2qa.errors import ReportError

UNITS: Final = {"sqnr": " dB", "kl": " nats"}

LARGEST: Final = 2**32
"""The most bytes that one input may take when its sample is repeated to fill a batch: 4 GiB."""


@register("bad-cases", schema=7, oldest=5)
@dataclass(frozen=True, slots=True, repr=False)
class BadCases(ModelReport):
    """The samples on which the quantized model is furthest from the reference, with their inputs.

    Tables can be sorted by ``worst`` (ranking by ranking), ``graph`` (in the order of the loader), ``name`` (by output)
    or a column.  ``to_pandas`` has one row for each case and ranking, worst first.

    What :func:`pt2qa.find_bad_cases` returns.  Its other fields are those of :class:`pt2qa.report.ModelReport`.

    Args:
        rows: the worst k of every metric and output, worst first.
        rankings: a summary of each metric of each output, in the order of the rows.
        labels: if targets were given, how often each model is right.
        cases: the cases whose inputs are kept.
        inputs: the arrays of the cases.
        batch_axis: the axis of a batch that holds the samples; -1 if batches were ranked whole.
        steps, samples: how many batches and samples were run.
        set_apart: batches that are empty, and those with an output that is NaN, or infinite in only one model, with the
            op that produced the first such value.  Their other samples are ranked.
        sums: what :func:`pt2qa.merge` needs besides the inputs.
        input_ranges: how many values of the inputs lie outside the calibrated ranges.

    Raises:
        ReportError: a row's inputs are missing, do not fit their description, or would be too large.
    """

    merges_in: ClassVar[str] = "pt2qa._bad_cases.standings"
    usual_measures: ClassVar[tuple[str, ...]] = ("value",)
    served: ClassVar[frozenset[str]] = frozenset({"cases"})
    one_run: ClassVar[tuple[str, ...]] = ("model", "quantizer", "batch_axis")

    rows: tuple[CaseRow, ...]
    rankings: tuple[Ranking, ...]
    labels: tuple[LabelCounts, ...]
    cases: tuple[StoredCase, ...]
    inputs: Sums = field(compare=False)
    batch_axis: int
    steps: Count
    samples: Count
    set_apart: Annotated[tuple[SetApart, ...], column(since=2)] = ()
    sums: Annotated[Sums, column(since=4)] = field(default_factory=dict, compare=False)
    input_ranges: Annotated[tuple[InputRange, ...], column(since=6)] = ()

    def __post_init__(self) -> None:
        known: set[str] = set()
        for case in self.cases:
            if case.repeats < 1:
                raise ReportError(f"case {(case.batch, case.sample)}: repeats is {case.repeats}, expected 1 or more")
            names = check_structure(case.structure, (case.batch, case.sample), self.inputs)
            largest = max(
                [1, *(size for name in names for size in (self.inputs[name].nbytes, *self.inputs[name].shape))]
            )
            if case.repeats * largest > LARGEST:
                raise ReportError(
                    f"case {(case.batch, case.sample)}: {case.repeats} repeats of its inputs would take "
                    f"{case.repeats * largest} bytes, expected {LARGEST} at most"
                )
            known |= names
        if self.inputs.keys() - known:
            raise ReportError(f"the input tensor {min(self.inputs.keys() - known)!r} belongs to no case")
        for row in self.rows:
            self._case(row.batch, row.sample)

    @property
    def health(self) -> DataHealth:
        return DataHealth(self.steps, self.samples, self.set_apart, self.input_ranges, in_part=True)

    def worst(self, metric: str | None = None, output: str | None = None) -> tuple[CaseRow, ...]:
        """The rows of one ranking, worst first.

        Args:
            metric: one of the metrics; None for the first one requested.
            output: one of the outputs; None for the first that the metric ranked.

        Raises:
            ReportError: there is no such ranking; the message lists those that exist.
        """
        names = [(ranking.metric, ranking.output) for ranking in self.rankings]
        chosen = [name for name in names if metric in (None, name[0]) and output in (None, name[1])]
        if not chosen:
            known = ", ".join(f"{name} of {what}" for name, what in names) or "none"
            raise ReportError(f"no ranking by {metric!r} of {output!r}; there are: {known}")
        return tuple(row for row in self.rows if (row.metric, row.output) == chosen[0])

    def batch(self, row: CaseRow | None = None) -> Any:
        """The inputs of a case as the model takes them: a tensor, a tuple or a dict of torch tensors.

        If the capture has a fixed batch size, the sample is repeated to fill it.

        Args:
            row: one of ``rows``; None for the first, which is the worst.

        Raises:
            ReportError: there is no such case.
        """
        if row is None:
            if not self.rows:
                raise ReportError("the report has no cases")
            row = self.rows[0]
        return self._rebuilt(self._case(row.batch, row.sample))

    def batches(self, metric: str | None = None, output: str | None = None) -> list[Any]:
        """The inputs of all cases, each once, the worst of every ranking first; pass them to other analyses.

        Args:
            metric: only cases that this metric ranked.
            output: only cases that were ranked by this output.

        Raises:
            ReportError: there is no such ranking.
        """
        if metric is not None or output is not None:
            self.worst(metric, output)
        rows = [row for row in self.rows if metric in (None, row.metric) and output in (None, row.output)]
        cases = [self._case(row.batch, row.sample) for row in sorted(rows, key=lambda row: row.rank)]
        return [self._rebuilt(case) for case in dict.fromkeys(cases)]

    def _case(self, batch: int, sample: int) -> StoredCase:
        for case in self.cases:
            if case.batch == batch and case.sample in (sample, -1):
                return case
        raise ReportError(f"the inputs of sample {sample} of batch {batch} are not in the report")

    def _rebuilt(self, case: StoredCase) -> Any:
        return rebuild(case.structure, (case.batch, case.sample), self.inputs, case.repeats, max(self.batch_axis, 0))

    def charts(self, others: Sequence[Report]) -> list[dict[str, Any]]:
        """The worst samples of the first ranking, and those with lost labels, as pictures, waveforms or tokens."""
        metrics = [ranking.metric for ranking in self.rankings]
        titles = dict.fromkeys(metrics[:1], "Worst samples")
        if "flips" in metrics[1:]:
            titles["flips"] = "Samples that lose their label"
        axis = max(self.batch_axis, 0)
        found = (chart_of(t, self.worst(m), self.inputs, axis, UNITS.get(m, "")) for m, t in titles.items())
        return [chart for charts in found for chart in charts]

    def _headline(self) -> str:
        kept = f"{len(self.cases)} cases of {self.samples} samples, {len(self.rankings)} rankings"
        return f"<BadCases of {self.model}, {self.quantizer}: {kept}>"

    def meant(self, column: Column, key: Sequence[str] = ()) -> Column:
        """Each ranking has a metric of its own, which says what is worse."""
        if column.name not in ("value", "mean"):
            return column
        worst = [ranking.worst for ranking in self.rankings if not key or ranking.metric == key[0]]
        unit = "dB" if {ranking.metric for ranking in self.rankings} == {"sqnr"} else ""
        return replace(column, unit=unit, worse="smaller" if key and "smallest" in worst else "larger")

    def _title(self, sort: str) -> str:
        how = {"graph": "in the loader's order", "name": "by output"}.get(sort, self._how(sort))
        read = f"{counted(self.samples, 'sample')} in {counted(self.steps, 'batch', 'batches')}"
        return f"{self.model}, quantized by {self.quantizer}: {counted(len(self.cases), 'bad case')} of {read}, {how}"

    def _ordered(self, sort: str) -> tuple[Sequence[CaseRow], str | None]:
        keys: dict[str, Any] = {"graph": lambda row: row.index, "name": lambda row: row.output}
        if sort in keys:
            return sorted(self.rows, key=keys[sort]), None
        return (self.rows if sort == "worst" else self.ranked(self.rows, sort)), None

    def _after(self, limit: int | None) -> Iterator[Block]:
        yield Listing("Labels", [_label_line(counts) for counts in self.labels])
        yield from self._set_apart("Not finite, or empty")
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        advice = "To see where they lose accuracy: pt2qa.compare_layers(pair, report.batches())."
        return [*map(self._about, self.rankings), advice if self.cases else "No case was kept."]

    def _about(self, ranking: Ranking) -> str:
        which = f"{ranking.metric} of {ranking.output}"
        rows, missing = self.worst(ranking.metric, ranking.output), ""
        if ranking.nonfinite:
            missing += f" {ranking.nonfinite} NaN or infinite in the quantized model only, ranked worst of all."
        if ranking.without_number:
            missing += f" {ranking.without_number} without a number ({ranking.reason or 'nan'}), ranked last."
        if not rows:
            return f"{which}: no bad case.{missing}"
        worst = rows[0]
        if ranking.metric == "sqnr" and worst.value == inf:
            return f"{which}: no sample differs.{missing}"
        unit = UNITS.get(ranking.metric, "")
        sample = f"sample {worst.index} (batch {worst.batch}, place {worst.sample})"
        where = f"batch {worst.batch} as a whole" if worst.sample < 0 else sample
        what = "no number" if isnan(worst.value) else f"{number(worst.value)}{unit}"
        mean = "" if isnan(ranking.mean) else f"; the mean of {ranking.values} is {number(ranking.mean)}{unit}"
        return f"{which}: worst is {where}, {what}{mean}.{missing}"


def _label_line(counts: LabelCounts) -> str:
    rates = [
        share(right / counts.targets) if counts.targets else "-" for right in (counts.ref_right, counts.quant_right)
    ]
    return (
        f"{counts.output}: {counted(counts.targets, 'target')}, reference right in {counts.ref_right} ({rates[0]} %), "
        f"quantized in {counts.quant_right} ({rates[1]} %); {counts.lost} lost, {counts.gained} gained"
    )


SHOWN: Final = 8
SIDE: Final = 112
"""Most pixels on a side, values of a waveform are as many."""

TOKENS: Final = 12
COLOURS: Final = (1, 3)


def chart_of(
    title: str, rows: Sequence[CaseRow], inputs: Mapping[str, Array], axis: int, unit: str
) -> list[dict[str, Any]]:
    """A chart of the first rows, worst first, each with the first of its inputs that can be drawn; none if none can.

    Batches that are ranked or kept whole are not drawn.
    """
    drawn = []
    for row in rows[:SHOWN]:
        own = key_of(row.batch, row.sample, 0)[:-1]
        arrays = [each for key, each in inputs.items() if row.sample >= 0 and key.startswith(own)]
        shapes = (_drawn(each.take(0, axis)) for each in arrays if each.ndim > axis and each.shape[axis])
        found = next((each for each in shapes if each), None)
        if found is not None:
            label = f"{row.index}: {number(row.value)}{unit}"
            differs = row.ref_class != row.quant_class
            drawn.append({"label": label, "lines": list(_predicted(row)), "differs": differs, **found})
    about = "Number and score of each, worst first; its first input that can be drawn, from the smallest value on."
    if any(each["lines"] for each in drawn):
        about += " Below, what each model predicts: the class with the largest output, and that output."
    return [{"kind": "samples", "title": title, "about": about, "samples": drawn}] if drawn else []


def _predicted(row: CaseRow) -> Iterator[str]:
    """What both models predict for a sample, and what it is, in a line each."""
    for side, what, value in (
        ("float", row.ref_class, row.ref_value),
        ("quantized", row.quant_class, row.quant_value),
        ("right", row.target, nan),
    ):
        if what or not isnan(value):
            yield ": ".join(filter(None, [side if isnan(value) else f"{side} {number(value)}", what]))


def _drawn(sample: Array) -> dict[str, Any] | None:
    """A PNG of what has the shape of a picture, a line of what has that of a waveform, the first of some tokens."""
    if sample.dtype.kind in "iu" and sample.ndim == 1:
        more = " …" if len(sample) > TOKENS else ""
        return {"text": " ".join(map(str, sample[:TOKENS].tolist())) + more} if len(sample) else None
    if sample.dtype.kind not in "fiu" or not sample.size:
        return None
    if sample.ndim == 1 and len(sample) > SIDE / 8:
        return {"line": [round(each, 3) for each in _scaled(sample[:: -(-len(sample) // SIDE)]).tolist()]}
    if sample.ndim == 3 and sample.shape[0] in COLOURS:
        sample = sample.transpose(1, 2, 0)
    if sample.ndim == 2:
        sample = sample[:, :, None]
    if sample.ndim != 3 or sample.shape[2] not in COLOURS or min(sample.shape[:2]) < 4:
        return None
    step = -(-max(sample.shape[:2]) // SIDE)
    pixels = (255 * _scaled(sample[::step, ::step])).round().astype(np.uint8)
    height, width, _ = pixels.shape
    return {"png": b64encode(_png(pixels)).decode(), "width": width, "height": height}


def _scaled(values: Array) -> Array:
    """From 0, the smallest value, to 1; what is not finite counts as 0."""
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0).clip(-LONGEST, LONGEST)
    low, high = values.min(), values.max()
    return np.asarray((values - low) / ((high - low) or 1.0))


def _png(pixels: Array) -> bytes:
    """A picture of 8 bits, (height, width, 1 or 3), in the format of RFC 2083."""
    height, width, colours = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if colours == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
