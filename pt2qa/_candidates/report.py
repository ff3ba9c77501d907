"""The report of several quantizer configurations of one model, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isnan, nan
from typing import Annotated, Any, ClassVar, Final

from pt2qa._report.base import Block, DataReport, Report, Table, data_read
from pt2qa._report.charts import bars
from pt2qa._report.prose import counted, decibel, megabytes, sections, wrap
from pt2qa._report.rows import Column, Row, check_custom, column, custom_names, derived
from pt2qa._report.storage import register
from pt2qa._report.sums import Sums
from pt2qa._report.table import table


@dataclass(frozen=True, slots=True, eq=False)
class CandidateRow(Row):
    """One value of the model, with its SQNR for each candidate.

    Args:
        handle: of the op, in graph order; -1 for an output of the model.
        name: as reports show it; ``output``, ``output[1]`` for outputs.
        module: path of the module that calls the op.
        op: what it does; ``output`` for outputs.
        custom: cumulative SQNR in dB by candidate; nan if a candidate has no such value.
    """

    shown: ClassVar[tuple[str, ...]] = ("name", "op")

    handle: Annotated[int, column(worse="smaller")]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=20)]
    module: str
    op: Annotated[str, column(importance=1, shrinks_to=10)]
    custom: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate(Row):
    """One quantizer configuration.

    Args:
        name: the name given by the user.
        quantizer: the plug-in and its options, or the class of a quantizer without a plug-in.
        sqnr: the smallest SQNR of the model's outputs, dB; nan if it failed, even on a single batch.
        quantized_ops: convolutions, linears and the like that read quantized values.
        ops: how many convolutions, linears and the like there are.
        activations: sites where an activation is rounded.
        weights: sites where a weight is rounded.
        bytes: of all stored parameters: quantized ones at their integer width, others in float.
        note: why it failed; empty if it did not.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("name", "quantizer", "sqnr", "quantized_ops", "ops", "activations", "weights", "bytes"),
    )

    name: Annotated[str, column("candidate", key=True, importance=0, shrinks_to=16)]
    quantizer: Annotated[str, column(importance=1, shrinks_to=16)]
    sqnr: Annotated[float, column("SQNR\ndB", unit="dB", importance=0)]
    quantized_ops: Annotated[int, column("int8\nops", importance=6)]
    ops: Annotated[int, column("of", importance=5)]
    activations: Annotated[int, column("activation\nsites", importance=3)]
    weights: Annotated[int, column("weight\nsites", importance=4)]
    bytes: Annotated[int, column("weights\nMB", show=megabytes, importance=7)]
    note: Annotated[str, column(optional=True)] = ""


CLOSE: Final = 0.5
"""dB between two candidates up to which they are called equally good: the effect of another calibration set."""


@register("candidates", schema=4, oldest=3, since={"set_apart": 2, "input_ranges": 4})
@dataclass(frozen=True, slots=True, repr=False)
class CandidateReport(DataReport):
    """How several quantizer configurations of one model compare, as a whole and layer by layer.

    What :func:`pt2qa.compare_quantizers` returns.  Its other fields are those of :class:`pt2qa.report.DataReport`.

    Args:
        rows: the model's outputs, then each op that any of them has, in graph order.
        candidates: the configurations, in the order given.
        set_apart: batches that are excluded from all numbers: empty ones, and those with NaN or infinities; with a
            candidate's name, those that are excluded only for that candidate, because it fails on them.
        sums: what :func:`pt2qa.merge` adds up.

    Raises:
        ReportError: the rows do not have the same candidates.
    """

    merges_in: ClassVar[str] = "pt2qa._candidates.analysis"
    usual_measures: ClassVar[tuple[str, ...]] = ("candidates.sqnr",)
    ties: ClassVar[str] = "handle"
    one_run: ClassVar[tuple[str, ...]] = ("model",)
    quantizer: ClassVar[str] = ""  # type: ignore[misc]  # each candidate has its own

    rows: tuple[CandidateRow, ...]
    candidates: tuple[Candidate, ...]
    sums: Annotated[Sums, column(since=3)] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        check_custom(CandidateRow, self.rows)

    @property
    def best(self) -> Candidate | None:
        """The candidate with the largest output SQNR, the first one if there are ties; None if all failed."""
        able = [candidate for candidate in self.candidates if not isnan(candidate.sqnr)]
        return max(able, key=lambda candidate: candidate.sqnr, default=None)

    @derived()
    def batches_apart(self) -> int:
        """How many batches are excluded from all numbers, or from those of a candidate that fails on them."""
        return len({each.batch for each in self.set_apart})

    @derived(unit="dB", judged=True)
    def sqnr(self) -> float:
        """Output SQNR of the best candidate in dB; nan if all failed."""
        return nan if self.best is None else self.best.sqnr

    def worst_of(self, row: CandidateRow) -> float:
        """The smallest SQNR of a row over the candidates, dB; inf if none has the value."""
        return min((value for value in row.custom.values() if not isnan(value)), default=inf)

    def _headline(self) -> str:
        best = "none ran" if self.best is None else f"best {self.best.name} with {self.best.sqnr:.4g} dB"
        return f"<CandidateReport of {self.model}: {len(self.candidates)} candidates, {best}>"

    def charts(self, others: Sequence[Report]) -> list[dict[str, Any]]:
        """The output SQNR of each candidate."""
        able = [each for each in self._best_first() if isfinite(each.sqnr)]
        drawn = [(each.name, each.sqnr, f"{decibel(each.sqnr)} dB") for each in able]
        return bars("Output SQNR of each candidate", "The best first.", drawn)

    def meant(self, column: Column, key: Sequence[str] = ()) -> Column:
        """The user's own columns are candidates."""
        if column.name not in custom_names(self.rows):
            return column
        return replace(column, show=decibel, unit="dB", worse="smaller", importance=5)

    def _title(self, sort: str) -> str:
        count = counted(len(self.candidates), "candidate")
        return f"{self.model}: {count} on {data_read(self.batches, self.samples)}, the best first"

    def _before(self) -> Iterator[Block]:
        yield Table(self.shown("candidates"), self._best_first())

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        title = wrap("SQNR in dB at each layer, cumulative, the worst first" if sort == "worst" else "", width)
        return sections([title, self._table(sort, limit, width)])

    def _ordered(self, sort: str) -> tuple[Sequence[CandidateRow], str | None]:
        if sort == "worst":
            return sorted(self.rows, key=self.worst_of), None
        return Report._ordered(self, sort)[0], None

    def _table(self, sort: str, limit: int | None, width: int) -> str:
        # A candidate's column stays in its place.
        return table(self.shown(), self._ordered(sort)[0], None, limit, width)

    def _summary(self) -> Sequence[str]:
        best = self.best
        failed = {candidate.name: candidate.note for candidate in self.candidates if candidate.note}
        # NaN from a single candidate is the most severe; a candidate that never ran cannot be recommended.
        ran = dict.fromkeys(each.candidate for each in self.set_apart if each.candidate)
        loud = [f"{name} fails {failed[name]}." for name in ran if name in failed]
        quiet = [f"{name} failed: {note}" for name, note in failed.items() if name not in ran]
        if best is None:
            nothing = "No candidate has an SQNR at the output." if self.rows else "No candidate could be run."
            return [*loud, nothing, *quiet]
        lines = [*loud, f"Most accurate: {best.name}, {decibel(best.sqnr)} dB at the output, {_size(best)}."]
        near = [other for other in self.candidates if other is not best and best.sqnr - other.sqnr <= CLOSE]
        for other in near:
            lines.append(f"{other.name} is within {CLOSE:g} dB of it ({decibel(other.sqnr)} dB), {_size(other)}.")
        return [*lines, *quiet]

    def _best_first(self) -> list[Candidate]:
        """Failed candidates have no number, and come last."""
        return sorted(self.candidates, key=lambda candidate: (isnan(candidate.sqnr), -candidate.sqnr))


def _size(candidate: Candidate) -> str:
    return f"{candidate.quantized_ops} of {candidate.ops} convs, linears and the like quantized"
