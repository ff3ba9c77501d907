"""The report of a comparison with the deployed program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, isinf, isnan, nan, sqrt
from typing import Annotated, Any, ClassVar, Final, Literal

from pt2qa._decibels import LOW_SQNR, agreement, decibels, power
from pt2qa._report.base import Block, DataReport, Grade, Listing, Report, Table, data_read
from pt2qa._report.charts import Event, Runs, along, bars, drawings, pictures, scalars
from pt2qa._report.prose import by_reason, counted, decibel, few, number, share
from pt2qa._report.rows import Row, Unpaired, column, derived, shown_columns
from pt2qa._report.storage import register
from pt2qa._report.table import ranked

BY_DESIGN: Final = "pair.as_deployed() computes so"
"""What the causes say that are not a kernel's fault."""

FLOAT_MATCH_DB: Final = 60.0
"""How closely a kernel's float output must match; other orders of summation leave 100 dB and more."""

LSB: Final = 1.0
"""How far, in integer steps, a kernel may be from the converted graph: two correct kernels may round a tie apart."""


@dataclass(frozen=True, slots=True, eq=False)
class DeployedRow(Row):
    """One value of the deployed program.

    With the values of one place, all of them dequantized where they are integers::

        isolated_*      the converted graph's region on the *deployed* inputs, against the deployed value
        cumulative_sqnr the converted graph's value against the deployed value
        quantized_sqnr  the reference's value against the converted graph's
        deployed_sqnr   the reference's value against the deployed value

    The first one named is the signal of the SQNR, in dB, over all elements of all batches.

    Args:
        handle: the op's handle; -1 for an output.
        name: the op's name.
        module: the module path; empty at the top of the model.
        op: the op, or ``output``.
        observed_at: ``dq``: the integers that a kernel writes, dequantized; ``raw``: an op's own output.
        dtype: of what was observed, such as ``int8``.
        scale: real value of one integer step; nan without one.
        delegated: whether the backend's own kernels compute all of the op; else some or all of it is left to others.
        isolated_max_lsb: largest difference in integer steps; nan without a scale.
        isolated_differing: share of values that differ, 0..1; nan for float values.
        isolated_sqnr, cumulative_sqnr, quantized_sqnr, deployed_sqnr: as above, dB; inf if nothing differs.
        note: why a number is missing, or with which other roundings it was measured.
        cause: of a difference that makes it a suspect: what the kernel does, as an experiment showed; empty if unknown.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("name", "op", "observed_at", "dtype", "delegated", "isolated_max_lsb", "isolated_differing"),
        *("isolated_sqnr", "cumulative_sqnr", "quantized_sqnr", "deployed_sqnr"),
    )

    handle: Annotated[int, column(worse="smaller")]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    module: str
    op: Annotated[str, column(importance=1, shrinks_to=12)]
    observed_at: Annotated[Literal["dq", "raw"], column("at", importance=2)]
    dtype: Annotated[str, column(importance=3)]
    scale: float
    delegated: Annotated[bool, column(importance=4)]
    isolated_max_lsb: Annotated[float, column("isolated\nmax LSB", importance=0)]
    isolated_differing: Annotated[float, column("isolated\ndiffer %", show=share, importance=7)]
    isolated_sqnr: Annotated[float, column("isolated\ndB", unit="dB", importance=8)]
    cumulative_sqnr: Annotated[float, column("cumulative\ndB", unit="dB", importance=6)]
    quantized_sqnr: Annotated[float, column("converted\ndB", unit="dB", importance=5)]
    deployed_sqnr: Annotated[float, column("deployed\ndB", unit="dB", importance=8)]
    note: Annotated[str, column(extended=True)] = ""
    cause: Annotated[str, column(extended=True, since=3)] = ""

    @property
    def is_measured(self) -> bool:
        """Whether it was compared on the deployed inputs."""
        return not isnan(self.isolated_sqnr) or not isnan(self.isolated_max_lsb)

    @property
    def is_suspect(self) -> bool:
        """Whether the kernel computes something else than the converted graph.

        Integers: more than :data:`LSB` apart. Float values: below :data:`FLOAT_MATCH_DB`, in bfloat16 and float16
        fewer.  What was measured together with others has no such limit.  A value that is the converted graph's own is
        right, whatever was observed of its inputs.
        """
        if self.note or self.cumulative_sqnr == inf:
            return False
        if not isnan(self.isolated_max_lsb):
            return self.isolated_max_lsb > LSB
        least = agreement(FLOAT_MATCH_DB, [self.dtype])
        return self.isolated_sqnr < least and not self.cumulative_sqnr >= least


@dataclass(frozen=True, slots=True, eq=False)
class StageRow(Row):
    """One stage of the way to the device, by the model's worst output.

    Args:
        name: ``eager``: the model itself. ``capture``: its exported program. ``prepared``: after the rewriting of
            ``prepare_pt2e``, observers off, or after training. ``converted``: what ``convert_pt2e`` returned.
            ``deployed``: the backend's program.
        step_sqnr: dB, against the stage before; nan at the first.
        sqnr: dB, against the first stage; inf at the first.
        value: of the metric; nan where it was not measured.
    """

    shown: ClassVar[tuple[str, ...]] = ("name", "step_sqnr", "sqnr", "value")

    name: Annotated[str, column(key=True, importance=0)]
    step_sqnr: Annotated[float, column("step\ndB", unit="dB", importance=1)]
    sqnr: Annotated[float, column("from eager\ndB", unit="dB", importance=0)]
    value: Annotated[float, column("metric", show=number, importance=2, since=4)] = nan


SLIGHT: Final = 1e-6
"""Relative noise power, 60 dB, below which a stage is not blamed: rounding of float32 sums."""

DOING: Final = {
    "capture": "torch.export or pt2qa's normalisation changes the model",
    "prepared": "prepare_pt2e rewrites the model, or it was trained",
    "converted": "quantization",
}


def blamed(stages: Sequence[StageRow]) -> StageRow | None:
    """The stage at which the noise at the output changes most; None if it never changes by an amount that matters.

    A stage that takes away at least half of what another one added comes first: the other one's noise is not that of
    the device.
    """
    changes = [
        (power(-row.sqnr) - power(-before.sqnr), row)
        for before, row in pairwise(stages)
        if not isnan(row.sqnr) and not isnan(before.sqnr)
    ]
    most, found = max(changes, key=lambda pair: pair[0], default=(0.0, None))
    if most <= SLIGHT:
        return None
    less, better = min(changes, key=lambda pair: pair[0])
    return better if less < -most / 2 else found


def suspects(rows: Sequence[DeployedRow]) -> tuple[DeployedRow, ...]:
    return tuple(ranked(DeployedRow, [row for row in rows if row.is_suspect], "isolated_sqnr", ties="handle"))


def summary_of(
    rows: Sequence[DeployedRow], outputs: Sequence[DeployedRow], stages: Sequence[StageRow], fused: int
) -> list[str]:
    """The verdict: stage, op, and whether differences are only the growth of single steps."""
    about = [
        _about_stages(stages, "the kernels" if rows else "the program, which was made elsewhere"),
        *_about_kernels(rows, outputs, stages),
        _counts(rows, fused),
    ]
    return [each for each in about if each]


def _about_stages(stages: Sequence[StageRow], deployed: str) -> str:
    if len(stages) < 2 or isnan(stages[-1].sqnr):
        return "No verdict: the outputs have no SQNR."
    first, last = stages[0].name, stages[-1]
    worst = "identical to" if isinf(last.sqnr) else f"{decibel(last.sqnr)} dB from"
    total = f"The {last.name} output is {worst} {'the eager model' if first == 'eager' else f'the {first} one'}"
    found = blamed(stages)
    if found is None:
        return f"{total}; no stage adds noise above {decibels(1.0, SLIGHT):g} dB."
    before = stages[[row.name for row in stages].index(found.name) - 1]
    levels = ("exact" if row.sqnr == inf else f"{decibel(row.sqnr)} dB" for row in (before, found))
    better = f": better than the {before.name} graph says" if found.sqnr > before.sqnr else ""
    doing = deployed if found.name == "deployed" else DOING.get(found.name, "it")
    return f"{total}. Stage: {found.name} ({doing}), from {' to '.join(levels)}{better}."


def _about_kernels(
    rows: Sequence[DeployedRow], outputs: Sequence[DeployedRow], stages: Sequence[StageRow]
) -> list[str]:
    measured = [row for row in rows if row.is_measured]
    if not measured:
        return ["No intermediate value was observed." if not rows else "No intermediate value could be compared."]
    judged = [row for row in (*measured, *outputs) if row.is_measured and not row.note]
    together = [row.name for row in (*measured, *outputs) if row.is_measured and row.note]
    rest = [f"Not judged, as unobserved roundings lie in between: {few(together)}."] if together else []
    if found := suspects(judged):
        return [_accused(found), *rest]
    missing = len(rows) > len(measured) or together
    about = f"{'The kernels that could be observed' if missing else 'The kernels'} are right: on the same inputs, "
    about += "; ".join(_agreement([row for row in judged if row.op != "output"])) + "."
    step = next((row.step_sqnr for row in stages if row.name == "deployed"), inf)
    if step < FLOAT_MATCH_DB and not missing:
        about += (
            f" Deployed and converted outputs are {decibel(step)} dB apart, which is only single-LSB differences "
            "growing along the graph: no op is at fault."
        )
    return [about, *rest]


def _accused(found: Sequence[DeployedRow]) -> str:
    worst, others = found[0], [row.name for row in found[1:]]
    how = (
        f"up to {number(worst.isolated_max_lsb)} LSB apart, in {100 * worst.isolated_differing:.3g} % of its values; "
        if not isnan(worst.isolated_max_lsb)
        else ""
    )
    also = f" Also: {few(others)}." if others else ""
    why = "Cause unknown: no hypothesis that was run gives the deployed value."
    why = f"Cause, as run again with it gives the deployed value: {worst.cause}." if worst.cause else why
    return (
        f"Op: {worst.name}: its kernel and the converted graph compute different values from the same inputs: {how}"
        f"isolated SQNR {decibel(worst.isolated_sqnr)} dB. {why}{also}"
    )


def _agreement(rows: Sequence[DeployedRow]) -> Iterator[str]:
    integers = [row for row in rows if not isnan(row.isolated_max_lsb)]
    floats = [row.isolated_sqnr for row in rows if isnan(row.isolated_max_lsb)]
    equal = sum(row.isolated_max_lsb == 0 for row in integers)
    if integers:
        yield f"{equal} of {counted(len(integers), 'integer value')} {'is' if equal == 1 else 'are'} equal bit for bit"
    if equal < len(integers):
        most = max(row.isolated_differing for row in integers)
        yield f"the rest is within one LSB, with at most {100 * most:.2g} % of a value's elements off"
    if floats:
        close = "equal" if min(floats) == inf else f"within {decibel(min(floats))} dB"
        yield f"{counted(len(floats), 'float value')} {'is' if len(floats) == 1 else 'are'} {close}"


def _counts(rows: Sequence[DeployedRow], fused: int) -> str:
    if not rows:
        return ""
    without = sum(not row.is_measured for row in rows)
    left = sum(not row.delegated for row in rows)
    return (
        f"Counts: {counted(len(rows), 'value')}, {without} not observed; {counted(fused, 'op')} inside kernels; "
        f"{counted(left, 'value')} of ops left to other kernels, completely or partly."
    )


@register("deployed", schema=4, oldest=1, since={"input_ranges": 2})
@dataclass(frozen=True, slots=True, repr=False)
class DeployedReport(DataReport):
    """How far the kernels that ship are from the converted graph, and what each stage costs the output.

    Its other fields are those of :class:`pt2qa.report.DataReport`.

    Args:
        rows: one for each observed value, in graph order; none where only outputs are known.
        outputs: the model's outputs.
        stages: eager, capture, prepared, converted, deployed; the first ones only if the pair knows them.
        unpaired: ops without a value of their own in the program, such as a convolution fused with its relu.
        facts: what ran: instruction set, number of delegates, ops left over.
        backend: what ran it.
        metric: the name of the user's metric, whose values are in ``stages``; empty without one.

    >>> from pt2qa.report import Environment
    >>> empty = DeployedReport((), (), (), (), (), "none", notes=(), environment=Environment.here(""))
    >>> empty.stage
    ''
    """

    instead_of_merging: ClassVar[str] = "Run compare_deployed once, in one process with all batches."
    usual_measures: ClassVar[tuple[str, ...]] = ("isolated_sqnr", "outputs.deployed_sqnr")
    ties: ClassVar[str] = "isolated_max_lsb"

    rows: tuple[DeployedRow, ...]
    outputs: tuple[DeployedRow, ...]
    stages: tuple[StageRow, ...]
    unpaired: tuple[Unpaired, ...]
    facts: tuple[str, ...]
    backend: str
    metric: Annotated[str, column(since=4)] = ""

    @derived(unit="dB", judged=True)
    def sqnr(self) -> float:
        """The deployed model's SQNR in dB against the first stage: the smallest of its outputs; nan if none has one."""
        return self.stages[-1].sqnr if self.stages else float("nan")

    @derived(judged=True)
    def value(self) -> float:
        """The metric of the deployed model; nan without one."""
        return self.stages[-1].value if self.stages else float("nan")

    @derived()
    def suspect_values(self) -> int:
        """How many values a kernel computes otherwise than the converted graph, on the same inputs."""
        return len(self.suspects)

    @property
    def suspects(self) -> tuple[DeployedRow, ...]:
        """The values whose kernel computes something else than the converted graph, lowest isolated SQNR first."""
        return suspects((*self.rows, *self.outputs))

    @property
    def stage(self) -> str:
        """The stage that makes most of the output's error; empty if none does."""
        found = blamed(self.stages)
        return "" if found is None else found.name

    def grade(self) -> Grade:
        usual = Report.grade(self)
        if usual == "bad" or self.suspects:
            return "bad"
        if not self.outputs or isnan(self.sqnr):
            return "warning"
        return "bad" if self.sqnr < LOW_SQNR else "warning" if self.set_apart else "good"

    def _headline(self) -> str:
        what = f"{len(self.rows)} rows, output SQNR {self.sqnr:.4g} dB"
        return f"<DeployedReport of {self.model}, {self.quantizer}, on {self.backend}: {what}>"

    def _title(self, sort: str) -> str:
        read = data_read(self.batches, self.samples)
        how = self._how(sort, "smallest isolated SQNR first")
        what = f"{counted(len(self.rows), 'value')}, {read}, {how}" if self.rows else f"outputs alone, {read}"
        return f"{self.model}, quantized by {self.quantizer}, on {self.backend}: {what}"

    def _ran(self) -> Sequence[str]:
        return self.facts

    def _before(self) -> Iterator[Block]:
        if self.stages:
            columns = [each for each in self.shown("stages") if self.metric or each.name != "value"]
            yield Table(columns, self.stages, f"Stages, by the worst output{self.metric and f', and {self.metric}'}")
        yield Listing("Outputs", [_output_line(row) for row in self.outputs])

    def _after(self, limit: int | None) -> Iterator[Block]:
        yield from self._set_apart()
        missing = [row for row in self.rows if row.note and isnan(row.isolated_sqnr)]
        yield Listing(f"Not observed ({len(missing)})", by_reason((row.note, row.name)[::-1] for row in missing))
        left = [row.name for row in self.rows if not row.delegated]
        yield Listing(f"Left to other kernels, completely or partly ({len(left)})", left)
        yield from self._unpaired()
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        return summary_of(self.rows, self.outputs, self.stages, len(self.unpaired))

    def charts(self, others: Sequence[Report]) -> list[dict[str, Any]]:
        """The noise after each stage, and the kernels along the graph."""
        return [*stage_bars(self.stages), *along_graph(self.rows)]

    def events(self, step: int, per_channel: bool, others: Sequence[Report]) -> Runs:
        """Each number of each value, output and stage, only finite ones, and the charts of the page."""
        numbers = [each.name for each in shown_columns(DeployedRow) if each.type == "float"]
        found = scalars("deployed", self.rows + self.outputs, numbers, step)
        known = [(f"{each}/{row.name}", getattr(row, each)) for row in self.stages for each in ("sqnr", "step_sqnr")]
        found["deployed"] += [Event(f"stages/{tag}", step, value) for tag, value in known if isfinite(value)]
        found["deployed"] += pictures(drawings(self, others), step)
        return found


def _output_line(row: DeployedRow) -> str:
    why = f" ({row.note})" if row.note else ""
    return (
        f"{row.name}: converted {decibel(row.quantized_sqnr)} dB, deployed {decibel(row.deployed_sqnr)} dB, "
        f"{decibel(row.cumulative_sqnr)} dB apart{why}"
    )


def stage_bars(stages: Sequence[StageRow]) -> list[dict[str, Any]]:
    """A bar for each stage after the first: noise at the worst output, as a share of the signal's amplitude."""
    if len(stages) < 2:
        return []
    drawn = [(row.name, sqrt(power(-row.sqnr)), f"{decibel(row.sqnr)} dB") for row in stages[1:]]
    about = (
        f"Noise of the worst output against that of the first stage, {stages[0].name}, in proportion to the signal's "
        "amplitude. The number is its SQNR; inf: identical."
    )
    # Nothing is drawn where there is no number.
    return bars("Error of the output by stage", about, [each for each in drawn if isfinite(each[1])])


def along_graph(rows: Sequence[DeployedRow]) -> list[dict[str, Any]]:
    """What each kernel differs by on the same inputs, in integer steps; and SQNR, for what was measured."""
    charts = []
    if any(isfinite(row.isolated_max_lsb) for row in rows):
        about = (
            "Largest difference between the value that the kernel writes and the converted graph's, computed from the "
            f"kernel's own inputs, in integer steps. Dashed: {LSB:g} LSB, where two correct kernels may round a tie "
            "apart."
        )
        title = "Kernels along the graph, on the same inputs"
        charts.append(along(title, about, [("isolated_max_lsb", "isolated")], line=LSB, unit="LSB"))
    low = f"Dashed: {LOW_SQNR:g} dB, 1 % noise. Identical values (inf) have no mark."
    sides = (("deployed_sqnr", "deployed"), ("quantized_sqnr", "converted"))
    measured = [each for each in sides if any(isfinite(getattr(row, each[0])) for row in rows)]
    if measured:
        about = f"Deployed and converted against the reference, with all error up to here. {low}"
        charts.append(along("Cumulative SQNR along the graph", about, measured))
    if any(isfinite(row.isolated_sqnr) for row in rows):
        about = f"The kernel against the converted graph on the same inputs. {low}"
        charts.append(along("Isolated SQNR along the graph", about, [("isolated_sqnr", "isolated")]))
    return charts
