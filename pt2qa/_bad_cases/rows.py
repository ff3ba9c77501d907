from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pt2qa._report.columns import column
from pt2qa._report.formats import index
from pt2qa._report.rows import Row
from pt2qa._report.sums import FIRST, Mergeable


def _position(value: int) -> str:
    return str(value) if value >= 0 else ""


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
    """

    shown: ClassVar[tuple[str, ...]] = (
        "metric", "output", "rank", "value", "batch", "sample", "index", "first_wrong", "worst_position", "note",
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
        structure: how the tensors are nested, as :mod:`pt2qa._bad_cases.inputs` describes.
    """

    batch: int
    sample: int
    index: Annotated[int, column(key=True)]
    repeats: int
    structure: str
