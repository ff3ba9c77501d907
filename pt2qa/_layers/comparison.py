"""Accumulates a comparison: one row per compared value, summed over batches."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from pt2qa._graph.handles import OpName
from pt2qa._grouping import grouped
from pt2qa._layers.reading import Block, Reading, nearest_before
from pt2qa._layers.report import LayerReport
from pt2qa._layers.sums import Compared, RowSums, TableName, Totals, packed, tables
from pt2qa._metrics import Metric, NoiseSums, error_sums, sums_of_row
from pt2qa._quantize.pairing import QuantizedPair, identity_of
from pt2qa._report.prose import few
from pt2qa._report.set_apart import SetApart, as_fields
from pt2qa._report.sums import QUANTIZATION
from pt2qa._simulator.accumulate import (
    Tally,
    accumulate,
    empty_batch,
    first_fault,
    input_ranges,
    is_empty,
    refuse_empty,
)
from pt2qa._simulator.batches import Batch, count_samples, has_no_element, output_names
from pt2qa._simulator.data import Counted, Data
from pt2qa._simulator.lifetimes import UNWRITTEN, unwritten_values
from pt2qa._simulator.lockstep import Event, Lockstep
from pt2qa._simulator.program import QuantParams, Step
from pt2qa._simulator.verification import Isolated, Outputs, Verification


@dataclass(slots=True)
class Row:
    """What one row of the table accumulates over the batches that count, and over those that are set ``apart``.

    It compares the value of the step ``place``, None for a model output; ``group`` is the number of the group that
    computes it in isolation, None if nothing in its region is quantized.  The op's region reads the values of the steps
    ``sources``, None standing for model inputs.  ``hidden`` marks a value that is not in the table but that rows read.
    """

    compared: Compared
    totals: Totals
    apart: Totals
    group: int | None = None
    place: Step | None = None
    sources: tuple[int | None, ...] = ()
    is_block: bool = False
    hidden: bool = False
    problem: str = ""

    @property
    def name(self) -> str:
        return self.compared.name

    def summed(
        self, table: TableName, *, sources: tuple[int, ...] | None = None, read: bool = False, note: str = ""
    ) -> RowSums:
        """The row as data, for a table of the report; ``read`` if the value is what one reader reads."""
        known = replace(self.compared, table=table, sources=sources, note=note, problem=self.problem)
        return RowSums(replace(known, observed_at="dq") if read else known, self.totals, self.apart)


def compared(name: OpName, handle: int, params: QuantParams | None, answers_for: str = "") -> Compared:
    """What a row compares, with the parameters of the site that is read there."""
    known = Compared(
        name.name, name.module, name.op, handle, part_of=name.part_of, step=name.step, answers_for=answers_for
    )
    if params is None:
        return known
    low, high = math.nan, math.nan
    if isinstance(params.scale, float) and isinstance(params.zero_point, int):
        low, high = float(params.quant_min - params.zero_point), float(params.quant_max - params.zero_point)
    return replace(
        known,
        observed_at="dq",
        dtype=params.dtype,
        scale=params.largest_scale,
        zero_point=params.single_zero_point,
        low=low,
        high=high,
    )


@dataclass(frozen=True, slots=True)
class _Measured(Outputs):
    seen: Sequence[tuple[Row, Totals]] = ()


class Comparison(Tally):
    """Rows, keyed by the step whose value they compare."""

    def __init__(
        self,
        pair: QuantizedPair,
        data: Data,
        steps: frozenset[int],
        blocks: Sequence[Block],
        isolated: bool,
        metrics: dict[str, Metric],
        *,
        rounding: bool = False,
    ) -> None:
        self.data, self.positions = data, data.positions(pair.quantized, pair.program)
        self.pair, self.program, self.with_isolated, self.metrics = pair, pair.program, isolated, metrics
        self.block_table: TableName = "modules" if steps else "rows"
        self.with_rounding = isolated or rounding
        # Arguments that a metric also gets if its update names them; see pt2qa.Metric.
        self.asked = {
            name: {"isolated", "scale"} & inspect.signature(metric.update).parameters.keys()
            for name, metric in metrics.items()
        }
        self.empty = Totals(custom=dict(metrics))
        self.check = Verification(pair.graphs)
        self.unwritten = {node.name for node in unwritten_values(pair.quantized.graph)}
        self.rows: dict[int, list[Row]] = {}
        self.module_rows: list[Row] = []
        self.outputs: list[Row] = []
        regions = [region for region in self.program.regions if isolated and region.sites]
        self.groups: list[tuple[int, ...]] = [region.steps for region in regions]
        self.group_of_region = {region.index: number for number, region in enumerate(regions)}
        self.reading = Reading(self.program)
        self._plan_rows(steps)
        self._plan_sources()
        for block in blocks:
            self._plan_block(block)

    def _plan_rows(self, selected: frozenset[int]) -> None:
        sites = (step for step in self.program.steps if step.site is not None and step.duplicate_of is None)
        sites_of = grouped((self.program.unrounded(step.reads[0]), step) for step in sites)
        if len(selected) == sum(step.site is None for step in self.program.steps):
            inputs = self.program.inputs, self.program.input_names, self.program.input_handles
            for slot, name, handle in zip(*inputs, strict=True):
                for site in sites_of.get(slot, ()):
                    self._plan(site, OpName(name, "", "", "input"), handle, None)
        for step in self.program.steps:
            if step.site is None and step.index in selected:
                group = self.group_of_region.get(step.region)
                known = self.pair.names.get(step.handle, OpName("", "", "", ""))
                own = replace(known, name=step.name, module=step.module, op=step.op)
                for place in sites_of.get(step.out, [step]):
                    self._plan(place, own, step.handle, group)

    def _plan_sources(self) -> None:
        """Values that rows read but no row compares, such as unselected ops: only their error is computed."""
        sources = {
            source for rows in self.rows.values() for row in rows for source in row.sources if source is not None
        }
        for index in sorted(sources - self.rows.keys()):
            step = self.program.steps[index]
            known = compared(OpName(step.name, step.module, "", step.op), step.handle, None)
            self.rows[index] = [Row(known, self.empty, self.empty, hidden=True)]

    def _plan(self, place: Step, name: OpName, handle: int, group: int | None, is_block: bool = False) -> Row:
        params = self.program.sites[place.site].params if place.site is not None else None
        responsible = name.name if params is not None else self.reading.answers_for(place)
        known = compared(name, handle, params, "" if is_block else responsible)
        row = Row(known, self.empty, self.empty, group, place, self.reading.sources(place), is_block)
        self.rows.setdefault(place.index, []).append(row)
        return row

    def _plan_block(self, block: Block) -> None:
        inside = set(block.steps)
        group = len(self.groups)
        self.groups.append(block.steps)
        read_outside = self.reading.returned | {
            slot for step in self.program.steps if step.site is None and step.index not in inside for slot in step.reads
        }
        own = {self.program.steps[index].out for index in block.steps}
        leaving = [
            step
            for step in self.program.steps
            if step.out in read_outside
            and (step.index in inside or (step.site is not None and self.program.unrounded(step.reads[0]) in own))
        ]
        for number, step in enumerate(leaving):
            made = self.program.unrounded(step.reads[0]) if step.site is not None else step.out
            source = self.program.steps[self.program.producers[made]]
            name = block.name if len(leaving) == 1 else f"{block.name}[{number}]"
            called = OpName(name, block.path, "", block.kind)
            self.module_rows.append(self._plan(step, called, source.handle, group, is_block=True))

    # -- one batch -----------------------------------------------------------------------------------------------

    def add(self, batch: Batch) -> None:
        values = self.pair.values(batch)
        if has_no_element(values):
            self.took(0, empty_batch(self.batches))
            return
        counted = self.positions.of(batch, values)
        measured = self.check.run(functools.partial(self._measure_batch, values, counted), values)
        self._take(values, measured, counted)

    def _measure_batch(self, values: list[Any], counted: Counted) -> _Measured:
        """Runs both models on a batch; adds nothing yet, so that the run can be checked or repeated."""
        seen: list[tuple[Row, Totals]] = []

        def visit(event: Event) -> None:
            for row in self.rows.get(event.step.index, ()):
                totals = self._measure(row, event)
                if totals is not None:
                    seen.append((row, totals))

        run = Lockstep(
            self.pair.simulator,
            groups=self.groups,
            rounding=self.with_rounding,
            ranges=True,
            pieces=not self.metrics and not counted.layouts,
            counted=counted.at if counted.layouts else None,
        )
        reference, quantized = run.run(values, counted.visiting(visit) if counted.layouts else visit)
        return _Measured(reference, quantized, tuple(self._isolated(seen, counted)), seen)

    def _isolated(self, seen: Sequence[tuple[Row, Totals]], counted: Counted) -> Iterator[Isolated]:
        """The isolated errors of a batch, whose rows may come in chunks."""
        noise: dict[int, NoiseSums] = {}
        for row, totals in seen:
            noise[id(row)] = noise.get(id(row), NoiseSums()).merge(totals.isolated)
        for row in {id(row): row for row, _ in seen}.values():
            if row.place is not None and row.group is not None and noise[id(row)].count:
                steps = [self.program.steps[index] for index in self.groups[row.group]]
                yield Isolated(row.name, row.compared.handle, row.place, steps, noise[id(row)], counted.at)

    def _take(self, values: list[Any], measured: _Measured, counted: Counted) -> None:
        seen, outputs = measured.seen, self._measure_outputs(measured.reference, measured.quantized, counted)
        samples = count_samples(values)
        apart = self._why_apart(values, samples, measured, outputs)
        for row, totals in (*seen, *((row, totals) for row, totals, _ in outputs)):
            if apart is None:
                row.totals = row.totals.merge(totals)
            else:
                row.apart = row.apart.merge(totals)
        self.took(samples, apart, ranges=input_ranges(self.program, values, counted) if apart is None else ())

    def _why_apart(
        self, values: list[Any], samples: int, measured: _Measured, outputs: Sequence[tuple[Row, Totals, bool]]
    ) -> SetApart | None:
        """Why a batch is excluded: it is empty, or one of its values is not finite; None for a batch that counts.

        Equal infinities are part of the model (masks), and so are equal NaN that reach no output.
        """
        if is_empty(samples, measured.quantized):
            return empty_batch(self.batches)
        nonfinite = [row.name for row, totals in measured.seen if totals.nonfinite]
        nonfinite += [row.name for row, totals, has_nan in outputs if totals.nonfinite or has_nan]
        if not nonfinite:
            return None
        fault = first_fault(self.pair.simulator, values, self.batches, samples)
        return fault or SetApart(self.batches, samples, -1, "isolated", "NaN or infinite", nonfinite[0])

    def _measure(self, row: Row, event: Event) -> Totals | None:
        reference, quantized = event.reference, event.quantized
        if not isinstance(reference, Tensor) or not isinstance(quantized, Tensor):
            return None
        if event.step.node in self.unwritten:
            row.problem = UNWRITTEN
            return None
        if reference.shape != quantized.shape:
            row.problem = f"shapes differ: {tuple(reference.shape)} and {tuple(quantized.shape)}"
            return None
        others = self._others(row, event, reference)
        sums, noises = sums_of_row(reference, quantized, tuple(others.values()), event.ranges)
        noise = dict(zip(others, noises, strict=True))
        return Totals(
            sums,
            noise.get("isolated", NoiseSums()),
            noise.get("rounding", NoiseSums()),
            self._measured(row, reference, quantized, others.get("isolated")),
            event.clamped or 0,
            sums.count if event.clamped is not None else 0,
            str(reference.dtype).removeprefix("torch."),
            event.shape,
        )

    def _measured(self, row: Row, ref: Tensor, quant: Tensor, isolated: Tensor | None = None) -> dict[str, Metric]:
        """The user's metrics for one value, each with the arguments it names."""
        scale = row.compared.scale
        known = {"isolated": isolated, "scale": None if math.isnan(scale) else scale}
        if row.hidden:
            return self.metrics
        measured = {}
        for name, metric in self.metrics.items():
            update = cast(Callable[..., Metric], metric.update)
            measured[name] = update(ref, quant, **{key: known[key] for key in self.asked[name]})
        return measured

    def _others(self, row: Row, event: Event, reference: Tensor) -> dict[str, Tensor]:
        """What else is compared with the reference: the isolated and the rounded value, if requested."""
        others: dict[str, Tensor] = {}
        if row.hidden or not (self.with_rounding or row.is_block):
            return others
        alone = event.rounded if row.group is None else event.isolated.get(row.group)
        alone = reference if alone is None and row.group is None else alone
        if (self.with_isolated or row.is_block) and isinstance(alone, Tensor) and alone.shape == reference.shape:
            others["isolated"] = alone
        if event.rounded is not None:
            others["rounding"] = event.rounded
        return others

    def _measure_outputs(self, reference: Any, quantized: Any, counted: Counted) -> list[tuple[Row, Totals, bool]]:
        """The sums of each comparable output, and whether it contains NaN; None is no output."""
        sides = counted.outputs(reference), counted.outputs(quantized)
        named = zip(output_names(self.pair.quantized, len(sides[0])), *sides, strict=True)
        returned = [each for each in named if each[1] is not None]
        if not self.outputs:
            known = (compared(OpName(name, "", "", "output"), -1, None) for name, _, _ in returned)
            self.outputs = [Row(each, self.empty, self.empty) for each in known]
        measured = []
        for row, (_, ref, quant) in zip(self.outputs, returned, strict=True):
            if isinstance(ref, Tensor) and isinstance(quant, Tensor) and ref.shape == quant.shape:
                sums, custom = error_sums(ref, quant), self._measured(row, ref, quant)
                dtype = str(ref.dtype).removeprefix("torch.")
                totals = Totals(sums, custom=custom, dtype=dtype, shape=tuple(ref.shape))
                measured.append((row, totals, bool(sums.excluded) and bool(ref.isnan().any())))
            else:
                row.problem = "not a tensor" if not isinstance(ref, Tensor) else "shapes differ"
        return measured

    # -- the report ----------------------------------------------------------------------------------------------

    def report(self, notes: Sequence[str]) -> LayerReport:
        sums = self._sums()
        extra = list(notes)
        if missing := [each.compared.name for each in sums if each.compared.table == "rows" and not each.seen]:
            extra.append(f"not compared, no single tensor as output: {few(missing)}")
        for entry in self.pair.coverage:
            if entry.carries_arithmetic and entry.quantized < entry.total:
                extra.append(f"{entry.quantized} of {entry.total} {entry.op} ops are quantized; the rest runs in float")
        own = {QUANTIZATION: self.pair.quantization, "isolated": str(self.with_isolated)}
        settings = {**own, **self.positions.settings}
        extra += self.positions.note(
            row.place.out for rows in self.rows.values() for row in rows if row.place and row.totals.sums.count
        )
        return LayerReport(
            **tables(sums, only_apart=len(self.health.set_apart) == self.batches),
            unpaired=self.pair.pairing.unpaired,
            notes=tuple(dict.fromkeys(extra)),
            **as_fields(self.health),
            **identity_of(self.pair),
            smaller_is_worse=self._metrics_worse("smaller"),
            larger_is_worse=self._metrics_worse("larger"),
            sums=packed(sums, settings),
        )

    def _sums(self) -> list[RowSums]:
        """The sums of all rows in graph order, then those of whole modules and of outputs."""
        ordered = [row for place in sorted(self.rows) for row in self.rows[place] if not row.is_block]
        # The first row at a place stands for it; the later ones have other scales.
        positions = {id(row): position for position, row in enumerate(ordered)}
        first = {place: positions[id(rows[0])] for place, rows in self.rows.items() if not rows[0].is_block}

        def read(row: Row) -> tuple[int, ...]:
            return tuple(first[source] for source in row.sources if source is not None)

        found = [row.summed("" if row.hidden else "rows", sources=read(row)) for row in ordered]
        shown = {each.compared.name for each in found if each.compared.table and each.seen}
        inputs = nearest_before(self.program, shown)
        return [
            *(each.reading(inputs.get(each.compared.name, ())) for each in found),
            *(row.summed(self.block_table) for row in self.module_rows),
            *(row.summed("outputs") for row in self.outputs),
        ]

    def _metrics_worse(self, way: str) -> tuple[str, ...]:
        return tuple(name for name, metric in self.metrics.items() if getattr(metric, "worse", None) == way)


def compare(comparison: Comparison, what: str) -> LayerReport:
    """Runs a comparison over all batches and verifies its own runs; ``what`` names the progress bar."""
    notes = accumulate(comparison, comparison.data, title=f"compare {what}", purpose="compare on")
    refuse_empty(comparison.batches, comparison.health.set_apart)
    pair = comparison.pair
    return comparison.report([*pair.notes, *pair.program.notes, *notes, *comparison.check.notes])
