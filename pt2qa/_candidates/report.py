"""The report of several quantizer configurations of one model, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isnan, nan

from pt2qa._candidates.text import candidates_summary, candidates_table, candidates_text
from pt2qa._report.base import Rendering, RowReport
from pt2qa._report.columns import check_custom, since
from pt2qa._report.rows import Environment
from pt2qa._report.set_apart import SetApart
from pt2qa._report.storage import register


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One value of the model, with the SQNR that each candidate has there.

    Args:
        handle: of the op, in graph order; -1 for an output of the model.
        name: as reports show it; ``output``, ``output[1]`` for outputs.
        module: path of the module that calls the op.
        op: what it does; ``output`` for outputs.
        custom: cumulative SQNR in dB by candidate; nan if a candidate has no such value.
    """

    handle: int
    name: str
    module: str
    op: str
    custom: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One quantizer configuration.

    Args:
        name: the name that the user gave it.
        quantizer: the plug-in and its options, or the class of a quantizer without a plug-in.
        sqnr: the smallest SQNR of the model's outputs, dB; nan if it failed, even on a single batch.
        quantized_ops: convolutions, linears and the like that read quantized values.
        ops: how many convolutions, linears and the like there are.
        activations: sites where an activation is rounded.
        weights: sites where a weight is rounded.
        bytes: of all stored parameters: quantized ones at the width of their integers, others in float.
        note: why it failed; empty if it did not.
    """

    name: str
    quantizer: str
    sqnr: float
    quantized_ops: int
    ops: int
    activations: int
    weights: int
    bytes: int
    note: str = ""


@register("candidates", schema=2, oldest=1)
@dataclass(frozen=True, slots=True, repr=False)
class CandidateReport(RowReport):
    """How several quantizer configurations of one model compare, as a whole and layer by layer.

    Args:
        rows: the model's outputs, then each op that any of them has, in graph order.
        candidates: the configurations, in the order given.
        notes: what else the reader must know.
        batches, samples: how much was run.
        model: the model's class name.
        environment: versions, and the model's fingerprint.
        set_apart: batches that are excluded from all numbers: empty ones, and those with NaN or infinities; with a
            candidate's name, those that are excluded only for that candidate, because it fails on them.

    Raises:
        ReportError: the rows do not have the same candidates.
    """

    rows: tuple[CandidateRow, ...]
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]
    batches: int
    samples: int
    model: str
    environment: Environment
    set_apart: tuple[SetApart, ...] = field(default=(), metadata=since(2))

    rendering = Rendering(candidates_table, candidates_summary, candidates_text)

    def __post_init__(self) -> None:
        check_custom(CandidateRow, self.rows)

    @property
    def best(self) -> Candidate | None:
        """The candidate with the largest output SQNR, the first one if there are ties; None if all failed."""
        able = [candidate for candidate in self.candidates if not isnan(candidate.sqnr)]
        return max(able, key=lambda candidate: candidate.sqnr, default=None)

    @property
    def batches_apart(self) -> int:
        """How many batches are excluded from all numbers, or from those of a candidate that fails on them."""
        return len({each.batch for each in self.set_apart})

    @property
    def sqnr(self) -> float:
        """Output SQNR of the best candidate in dB; nan if all failed."""
        return nan if self.best is None else self.best.sqnr

    def worst_of(self, row: CandidateRow) -> float:
        """The smallest SQNR of a row over the candidates, dB; inf if none has the value."""
        return min((value for value in row.custom.values() if not isnan(value)), default=inf)

    def _headline(self) -> str:
        best = "none ran" if self.best is None else f"best {self.best.name} with {self.best.sqnr:.4g} dB"
        return f"<CandidateReport of {self.model}: {len(self.candidates)} candidates, {best}>"
