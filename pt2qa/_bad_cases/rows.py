"""Rows of bad cases, and the inputs of a case: NumPy arrays and a JSON text that describes their nesting.

The text is one node: ``{"tensor": 0, "dtype": "float32"}`` is array 0 of the case, ``{"value": 3}`` a plain value, and
``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [["name", ...], ...]}`` hold further nodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import numpy as np

from pt2qa._report.prose import blank, index
from pt2qa._report.rows import Row, column
from pt2qa._report.sums import FIRST, Array, Mergeable
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
        structure: how the tensors are nested, as :mod:`pt2qa._bad_cases.rows` describes.
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
    for number, dtype in leaves:
        name = key_of(*prefix, number)
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
