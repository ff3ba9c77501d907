"""The report of bad cases, its rows, and the inputs of a case: NumPy arrays and a JSON text of how they are nested.

The text is one node: ``{"tensor": 0, "dtype": "float32"}`` is array 0 of the case, ``{"value": 3}`` a plain value, and
``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [["name", ...], ...]}`` hold further nodes.
"""

from __future__ import annotations

import json
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import numpy as np

from pt2qa._report.base import Block, Listing, ModelReport, Report
from pt2qa._report.charts import LONGEST
from pt2qa._report.prose import blank, counted, index, number, share
from pt2qa._report.rows import Column, Count, Row, column
from pt2qa._report.set_apart import DataHealth, InputRange, SetApart
from pt2qa._report.storage import register
from pt2qa._report.sums import FIRST, Array, Mergeable, Sums
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    import torch


AS_FLOAT32: Final = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
"""dtypes that NumPy lacks and float32 holds exactly."""

AS_REAL: Final = {"complex64": "float32", "complex128": "float64"}
"""Stored with an additional last axis for the real and imaginary part."""

SAME: Final = frozenset(
    {"float16", "float32", "float64", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
)

DEEPEST: Final = 64


def _position(value: int) -> str:
    return str(value) if value >= 0 else ""


_SEEN: Final[dict[str, Any]] = {"optional": True, "extended": True, "since": 7}
"""What the columns of predictions have in common."""


@dataclass(frozen=True, slots=True, eq=False)
class CaseRow(Row):
    """One bad case in one ranking.

    Args:
        metric: the metric of the ranking: ``sqnr`` (dB), ``cosine``, ``l1``, ``atol``, ``kl`` (nats), ``flips`` or a
            custom one.
        output: the model output that was compared, e.g. ``output.logits``.
        rank: 1 is the worst.
        value: the metric of this sample alone; nan if it is undefined.
        batch: number of the batch in the loader, from 0.
        sample: number of the sample in its batch, from 0; -1 if the whole batch was ranked.
        index: running number of the sample in the loader, from 0; for a whole batch, that of its first sample.
        note: why the value is nan.
        first_wrong: with a mask, the first position that counts where the quantized model's largest value is another
            than the reference's (the token that goes wrong first), from 0 in the padded batch; -1 if there is none.
        worst_position: with a mask, the position with the lowest SQNR; -1 if there is none.
        target: with targets, the sample's right class.
        ref_class: the class that the reference predicts: its name if names were given, else its number.  That is
            where an output of shape (samples, classes) is largest, or an output of one integer a sample; empty for
            others.  With a mask, that at the position ``first_wrong``, or else at ``worst_position``.
        quant_class: the class that the quantized model predicts.
        ref_value: the reference's output for ``ref_class``, or its only number for the sample; nan for other outputs.
        quant_value: the quantized model's output for ``quant_class``, or its only number for the sample.
    """

    shown: ClassVar[tuple[str, ...]] = (
        "metric", "output", "rank", "value", "batch", "sample", "index", "target", "ref_class",
        "ref_value", "quant_class", "quant_value", "first_wrong", "worst_position", "note",
    )  # fmt: skip

    metric: Annotated[str, column(key=True, importance=0)]
    output: Annotated[str, column(key=True, importance=8, shrinks_to=12)]
    rank: Annotated[int, column(worse="smaller", importance=0)]
    value: Annotated[float, column(importance=0)]
    batch: Annotated[int, column(importance=6)]
    sample: Annotated[int, column("sample\nin batch", show=index, importance=5)]
    index: Annotated[int, column(key=True, importance=7)]
    note: Annotated[str, column(importance=1, shrinks_to=16, optional=True, extended=True)] = ""
    first_wrong: Annotated[
        int, column("first wrong\nposition", show=_position, importance=4, optional=True, extended=True, since=5)
    ] = -1
    worst_position: Annotated[
        int, column("worst\nposition", show=_position, importance=3, optional=True, extended=True, since=5)
    ] = -1
    target: Annotated[str, column("right\nclass", **_SEEN, importance=4, shrinks_to=8)] = ""
    ref_class: Annotated[str, column("float\nclass", **_SEEN, importance=8, shrinks_to=8)] = ""
    quant_class: Annotated[str, column("quantized\nclass", **_SEEN, importance=8, shrinks_to=9)] = ""
    ref_value: Annotated[float, column("float\nscore", **_SEEN, show=blank, worse="", importance=2)] = nan
    quant_value: Annotated[float, column("quantized\nscore", **_SEEN, show=blank, worse="", importance=2)] = nan


@dataclass(frozen=True, slots=True, eq=False)
class Ranking(Row):
    """A summary of one metric of one output over all data.

    Args:
        metric: the metric.
        output: the model output.
        worst: which values are bad.
        values: how many samples (or whole batches) have a number.
        mean: of the finite numbers; nan if there are none.
        nonfinite: how many have no number because the quantized model returns NaN or infinities where the reference is
            finite.  They are ranked worst of all.
        without_number: how many have no number for another reason, such as a zero reference.  They are ranked last.
        reason: the reason for the first of these.
    """

    metric: Annotated[str, column(key=True)]
    output: Annotated[str, column(key=True)]
    worst: Literal["smallest", "largest"]
    values: int
    mean: float
    nonfinite: int
    without_number: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LabelCounts(Mergeable):
    """How often each model is right.

    Args:
        output: the model output with the classes.
        targets: number of targets.
        ref_right: how many the reference gets right.
        quant_right: how many the quantized model gets right.
        lost: right in the reference and wrong in the quantized model.
        gained: wrong in the reference and right in the quantized model.
    """

    output: Annotated[str, column(key=True)] = field(metadata=FIRST)
    targets: int
    ref_right: int
    quant_right: int
    lost: int
    gained: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredCase(Row):
    """The inputs of one case, whose tensors are ``inputs["<batch>/<sample>/<number>"]`` of the report.

    Args:
        batch: number of the batch in the loader.
        sample: number of the sample; -1 if the whole batch is stored because the sample cannot be cut out of it.
        index: running number of the sample.
        repeats: how often the sample is repeated to fit the model; 1 except for fixed batch sizes.
        structure: how the tensors are nested, as :mod:`pt2qa._bad_cases.report` describes.
    """

    batch: int
    sample: int
    index: Annotated[int, column(key=True)]
    repeats: int
    structure: str


def stored_dtype(dtype: str) -> str:
    """The NumPy dtype in which a torch dtype is stored; empty if it cannot be stored.

    >>> stored_dtype("int64"), stored_dtype("bfloat16"), stored_dtype("qint8")
    ('int64', 'float32', '')
    """
    if dtype in SAME:
        return dtype
    return "float32" if dtype in AS_FLOAT32 else AS_REAL.get(dtype, "")


def key_of(batch: int, sample: int, number: int) -> str:
    """The name of a case's array in the file; sample -1 is a whole batch."""
    return f"{batch}/{sample}/{number}"


def check_structure(text: str, prefix: tuple[int, int], arrays: Mapping[str, Array]) -> set[str]:
    """The names of the arrays that a case consists of.

    Raises a ReportError where the text is not what this module describes, or an array is missing or of another dtype.
    """
    leaves: list[tuple[int, str]] = []
    try:
        _filled(json.loads(text), lambda number, dtype: leaves.append((number, dtype)))
    except (ValueError, RecursionError) as error:
        raise ReportError(f"the structure of case {prefix} is damaged: {error}") from error
    names = set()
    for place, dtype in leaves:
        name = key_of(*prefix, place)
        want = stored_dtype(dtype)
        if not want:
            raise ReportError(f"the structure of case {prefix} has the unknown dtype {dtype!r}")
        if name not in arrays:
            raise ReportError(f"the input tensor {name!r} is missing")
        got = arrays[name]
        if got.dtype != np.dtype(want) or (dtype in AS_REAL and (not got.ndim or got.shape[-1] != 2)):
            raise ReportError(f"the input tensor {name!r} is {got.dtype} of shape {got.shape}, expected {want}")
        names.add(name)
    return names


def rebuild(
    text: str, prefix: tuple[int, int], arrays: Mapping[str, Array], repeats: int, axis: int
) -> torch.Tensor | tuple[Any, ...] | list[Any] | dict[str, Any]:
    """The batch of a case, given its structure, as torch tensors with their original dtypes.

    ``prefix`` is the number of the batch and of the sample, which is repeated along the batch axis to fit the model.
    """
    # Imported here: reports are loaded and shown without torch.
    import torch

    def tensor(number: int, dtype: str) -> torch.Tensor:
        # A copy, so that changes by the user do not affect the report.
        stored = torch.from_numpy(np.array(arrays[key_of(*prefix, number)]))
        tensor = (torch.view_as_complex(stored) if dtype in AS_REAL else stored).to(getattr(torch, dtype))
        return tensor.repeat_interleave(repeats, axis) if repeats > 1 and tensor.dim() > axis else tensor

    return _filled(json.loads(text), tensor)  # type: ignore[no-any-return]


def _filled(node: Any, leaf: Callable[[int, str], Any], depth: int = 0) -> Any:
    """A structure with what ``leaf`` makes of a tensor's number and dtype; a ValueError if it is not a structure."""
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    match node:
        case {"tensor": int(number), "dtype": str(dtype)} if len(node) == 2:
            return leaf(number, dtype)
        case {"value": bool() | int() | float() | str() | None as value} if len(node) == 1:
            return value
        case {"tuple": list(items)} if len(node) == 1:
            return tuple(_filled(item, leaf, depth + 1) for item in items)
        case {"list": list(items)} if len(node) == 1:
            return [_filled(item, leaf, depth + 1) for item in items]
        case {"dict": list(items)} if len(node) == 1:
            for item in items:
                if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)):
                    raise ValueError(f"expected pairs of name and value, got {item!r:.60}")
            return {name: _filled(item, leaf, depth + 1) for name, item in items}
        case _:
            raise ValueError(f"expected a tensor, a value, a tuple, a list or a dict, got {node!r:.60}")


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
