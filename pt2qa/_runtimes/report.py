"""The report of one converted graph on several runtimes, op by op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, nan
from typing import Annotated, ClassVar, Final

from pt2qa._deployed.report import BY_DESIGN
from pt2qa._report.base import Block, DataReport, Grade, Report, Table, data_read
from pt2qa._report.prose import counted, decibel, few, megabytes, number
from pt2qa._report.rows import Column, Count, Row, check_custom, column, custom_names, derived
from pt2qa._report.storage import register

LSB, DB = " LSB", " dB"
"""How the columns of a runtime end: its largest difference in integer steps, and its isolated SQNR."""

NAMED: Final = 3
"""Ops that the verdict names."""


def _milliseconds(seconds: float) -> str:
    return number(1e3 * seconds)


@dataclass(frozen=True, slots=True, eq=False)
class RuntimeRow(Row):
    """One value of the model, with what each runtime's kernel differs by from the converted graph, on its own inputs.

    Args:
        handle: of the op, in graph order; -1 for an output.
        name: as reports show it.
        module: path of the module that calls the op.
        op: what it does; ``output`` for outputs.
        right: how many runtimes compute what the converted graph does, to one integer step or 60 dB.
        differ: the runtimes that compute something else.
        cause: what their kernels do instead, as an experiment showed; empty if unknown.
        custom: ``NAME LSB``, the largest difference in integer steps, and ``NAME dB``, the isolated SQNR, for each
            runtime; nan where it was not observed alone.
    """

    shown: ClassVar[tuple[str, ...]] = ("name", "op", "right", "differ")

    handle: Annotated[int, column(worse="smaller")]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=20)]
    module: str
    op: Annotated[str, column(importance=1, shrinks_to=10)]
    right: Annotated[int, column(importance=6, worse="smaller")]
    differ: Annotated[tuple[str, ...], column(importance=7, optional=True, shrinks_to=24)]
    cause: Annotated[str, column(extended=True)] = ""
    custom: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class RuntimeSummary(Row):
    """One runtime.

    Args:
        name: as it was asked for, such as ``onnxruntime:optimization=none``.
        backend: what it calls itself.
        sqnr: of its worst output against the first stage, which is the eager model if the pair knows it, dB.
        apart: of its worst output against the converted graph, dB.
        value: of the metric; nan without one.
        different: how many values its kernels compute otherwise than the converted graph.
        observed: how many values were observed.
        values: how many there are.
        seconds: of one batch with nothing observed, the shortest of three; nan if it cannot be run so.
        bytes: of the program; 0 if it is not known.
        batches: how many it ran.
        note: why it did not run; empty if it did.
    """

    shown: ClassVar[tuple[str, ...]] = ("name", "sqnr", "apart", "value", "different", "observed", "seconds", "bytes")

    name: Annotated[str, column("runtime", key=True, importance=0, shrinks_to=24)]
    backend: str
    sqnr: Annotated[float, column("SQNR\ndB", unit="dB", importance=0)] = nan
    apart: Annotated[float, column("converted\ndB", unit="dB", importance=1)] = nan
    value: Annotated[float, column("metric", show=number, importance=2, worse="smaller")] = nan
    different: Annotated[int, column("ops that\ndiffer", importance=1)] = 0
    observed: Annotated[int, column(importance=5, worse="smaller")] = 0
    values: Annotated[int, column(importance=6)] = 0
    seconds: Annotated[float, column("ms for\na batch", show=_milliseconds, importance=4)] = nan
    bytes: Annotated[int, column("program\nMB", show=megabytes, importance=3)] = 0
    batches: Count = 0
    note: Annotated[str, column(optional=True)] = ""


@register("runtimes", schema=1, oldest=1)
@dataclass(frozen=True, slots=True, repr=False)
class RuntimeReport(DataReport):
    """What several runtimes make of one converted graph.

    What :func:`pt2qa.compare_runtimes` returns.  Its other fields are those of :class:`pt2qa.report.DataReport`.

    Args:
        rows: each value that any of them observed, in graph order, then the outputs.
        runtimes: in the order given.
        facts: what ran: instruction set, kernels, ops left over.
        metric: the name of the user's metric; empty without one.

    Raises:
        ReportError: the rows do not have the same runtimes.
    """

    instead_of_merging: ClassVar[str] = "Run compare_runtimes once, in one process with all batches."
    usual_measures: ClassVar[tuple[str, ...]] = ("runtimes.sqnr", "runtimes.different")
    ties: ClassVar[str] = "handle"

    rows: tuple[RuntimeRow, ...]
    runtimes: tuple[RuntimeSummary, ...]
    facts: tuple[str, ...] = ()
    metric: str = ""

    def __post_init__(self) -> None:
        check_custom(RuntimeRow, self.rows)

    @derived(unit="dB", judged=True)
    def sqnr(self) -> float:
        """The smallest output SQNR of those that ran, dB; nan if none has one."""
        return min((each.sqnr for each in self.runtimes if not isnan(each.sqnr)), default=nan)

    @derived(judged=True)
    def disagreements(self) -> int:
        """How many values some runtime computes otherwise than the converted graph."""
        return sum(bool(row.differ) for row in self.rows)

    def grade(self) -> Grade:
        usual = Report.grade(self)
        if usual == "bad" or self.disagreements:
            return "bad"
        return "warning" if self.set_apart or any(each.note for each in self.runtimes) else "good"

    def meant(self, column: Column, key: Sequence[str] = ()) -> Column:
        """The columns of a runtime are its differences."""
        if column.name not in custom_names(self.rows):
            return column
        if column.name.endswith(LSB):
            return replace(column, header=f"{column.name.removesuffix(LSB)}\nLSB", importance=5)
        header = f"{column.name.removesuffix(DB)}\ndB"
        return replace(column, header=header, show=decibel, unit="dB", worse="smaller", importance=4)

    def _headline(self) -> str:
        return f"<RuntimeReport of {self.model}: {len(self.runtimes)} runtimes, {self.disagreements} disagreements>"

    def _title(self, sort: str) -> str:
        count = counted(len(self.runtimes), "runtime")
        how = self._how(sort, "those that differ first")
        return f"{self.model}, quantized by {self.quantizer}: {count} on {data_read(self.batches, self.samples)}, {how}"

    def _ran(self) -> Sequence[str]:
        return self.facts

    def _before(self) -> Iterator[Block]:
        columns = [each for each in self.shown("runtimes") if self.metric or each.name != "value"]
        yield Table(columns, self.runtimes)

    def _ordered(self, sort: str) -> tuple[Sequence[RuntimeRow], str | None]:
        if sort == "worst":
            return sorted(self.rows, key=lambda row: (not row.differ, row.right)), None
        return Report._ordered(self, sort)[0], None

    def _summary(self) -> Sequence[str]:
        """Whose kernel is at fault."""
        failed = [f"{each.name} did not run: {each.note}" for each in self.runtimes if each.note]
        ran = [each.name for each in self.runtimes if not each.note]
        wrong = [row for row in self.rows if row.differ]
        if not wrong:
            what = (
                f"compute{'s' if len(ran) == 1 else ''} what the converted graph says, wherever a kernel was observed"
            )
            return [f"{few(ran)} {what}: what the output lost is quantization's.", *failed]
        lines = [self._about(row) for row in wrong[:NAMED]]
        more = [f"And {counted(len(wrong) - NAMED, 'more value')}."] if len(wrong) > NAMED else []
        return [*lines, *more, *failed]

    def _about(self, row: RuntimeRow) -> str:
        off = [f"{name} ({_how_far(row.custom, name)})" for name in row.differ]
        why = f" Cause: {row.cause}." if row.cause else ""
        ran = [each.name for each in self.runtimes if not each.note]
        unseen = [name for name in ran if isnan(row.custom[name + LSB]) and isnan(row.custom[name + DB])]
        why += f" Not observed there: {few(unseen)}." if unseen else ""
        if row.right:
            others = f"{row.right} of {row.right + len(row.differ)} compute what the converted graph says"
            blame = ", by design" if BY_DESIGN in row.cause else ": its kernel is at fault" if len(off) == 1 else ""
            return f"{row.name}: {others}, and {few(off)} something else{blame}.{why}"
        if len(off) > 1:
            return f"{row.name}: no runtime computes what the converted graph says: {few(off)}.{why}"
        return (
            f"{row.name}: {off[0]} computes something else than the converted graph; no other was observed there.{why}"
        )


def _how_far(custom: dict[str, float], name: str) -> str:
    lsb = custom.get(name + LSB, nan)
    return f"{decibel(custom.get(name + DB, nan))} dB" if isnan(lsb) else f"{number(lsb)} LSB"
