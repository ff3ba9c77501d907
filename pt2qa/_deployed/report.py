"""The report of a comparison with the deployed program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, sqrt
from typing import Annotated, Any, ClassVar

from pt2qa._decibels import LOW_SQNR, power
from pt2qa._deployed.rows import LSB, DeployedRow, StageRow, blamed, summary_of, suspects
from pt2qa._report.base import Block, DataReport, Grade, Listing, Report, Table, data_read
from pt2qa._report.charts import Event, Runs, along, bars, drawings, pictures, scalars
from pt2qa._report.columns import column, derived, shown_columns
from pt2qa._report.prose import by_reason, counted, decibel
from pt2qa._report.rows import Unpaired
from pt2qa._report.storage import register


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

    def _lead(self) -> Sequence[str]:
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
        found = scalars(self.rows + self.outputs, numbers, step)
        known = [(f"{each}/{row.name}", getattr(row, each)) for row in self.stages for each in ("sqnr", "step_sqnr")]
        found += [Event(f"stages/{tag}", step, value) for tag, value in known if isfinite(value)]
        return {"deployed": [*found, *pictures(drawings(self, others), step)]}


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
