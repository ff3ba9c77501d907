"""What a comparison adds up: a row for each value that is compared, batch after batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch import Tensor
from torch.utils import _pytree as pytree
from tqdm import tqdm

from pt2qa.compare.selection import Block
from pt2qa.errors import BatchError
from pt2qa.metrics import ErrorSums, Metric, NoiseSums, sums_of_row
from pt2qa.pairing import QuantizedPair
from pt2qa.report import LayerReport, LayerRow
from pt2qa.simulator.batches import Batch, count_samples, read_batches
from pt2qa.simulator.lockstep import Event, lockstep
from pt2qa.simulator.outputs import output_names, plain
from pt2qa.simulator.program import QuantParams, Step


@dataclass(slots=True)
class _Row:
    """What one row of the table adds up.

    Attributes:
        name, module, op, handle, part_of, step: as in :class:`pt2qa.LayerRow`.
        params: of the site where the value is read; None for a raw value.
        group: number of the group that makes the value isolated; None where nothing in its region is quantized.
    """

    name: str
    module: str
    op: str
    handle: int
    params: QuantParams | None
    group: int | None
    custom: dict[str, Metric]
    part_of: str = ""
    step: int = -1
    sums: ErrorSums = field(default_factory=ErrorSums)
    isolated: NoiseSums = field(default_factory=NoiseSums)
    rounding: NoiseSums = field(default_factory=NoiseSums)
    is_block: bool = False
    clamped: int = 0
    clamped_of: int = 0
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    problem: str = ""

    @property
    def scale(self) -> float:
        """What one integer step is worth, the largest of several; nan where nothing says so."""
        return self.params.largest_scale if self.params is not None else math.nan


class Comparison:
    """Rows by the step whose value they compare."""

    def __init__(
        self,
        pair: QuantizedPair,
        steps: frozenset[int],
        blocks: Sequence[Block],
        isolated: bool,
        metrics: dict[str, Metric],
    ) -> None:
        self.pair, self.program, self.with_isolated, self.metrics = pair, pair.program, isolated, metrics
        self.asked = {name: _asked(metric) for name, metric in metrics.items()}
        self.batches = self.samples = 0
        self.without_tensor: dict[int, str] = {}
        self.rows: dict[int, list[_Row]] = {}
        self.module_rows: list[_Row] = []
        self.outputs: list[_Row] = []
        quantized_regions = [region for region in self.program.regions if region.sites]
        self.groups: list[tuple[int, ...]] = [region.steps for region in quantized_regions] if isolated else []
        self.group_of_region = (
            {region.index: number for number, region in enumerate(quantized_regions)} if isolated else {}
        )
        self._plan_rows(steps)
        for block in blocks:
            self._plan_block(block)

    def _plan_rows(self, selected: frozenset[int]) -> None:
        sites_of: dict[int, list[Step]] = {}
        for step in self.program.steps:
            if step.site is not None and step.twin is None:
                sites_of.setdefault(step.reads[0], []).append(step)
        for slot, name, handle in zip(
            self.program.inputs, self.program.input_names, self.program.input_handles, strict=True
        ):
            whole = len(selected) == sum(step.site is None for step in self.program.steps)
            for site in sites_of.get(slot, ()) if whole else ():
                self._plan(site, name, "", "input", handle, None)
        for step in self.program.steps:
            if step.site is None and step.index in selected:
                group = self.group_of_region.get(step.region)
                known = self.pair.names.get(step.handle)
                for place in sites_of.get(step.out, [step]):
                    row = self._plan(place, step.name, step.module, step.op, step.handle, group)
                    if known is not None:
                        row.part_of, row.step = known.part_of, known.step

    def _plan(self, place: Step, name: str, module: str, op: str, handle: int, group: int | None) -> _Row:
        params = self.program.sites[place.site].params if place.site is not None else None
        row = _Row(name, module, op, handle, params, group, dict(self.metrics))
        self.rows.setdefault(place.index, []).append(row)
        return row

    def _plan_block(self, block: Block) -> None:
        """Rows for the values that leave a block."""
        inside = set(block.steps)
        group = len(self.groups)
        self.groups.append(block.steps)
        read_outside = {
            slot for step in self.program.steps if step.site is None and step.index not in inside for slot in step.reads
        }
        read_outside |= {
            leaf.number for leaf in pytree.tree_leaves(plain(self.program.outputs)) if hasattr(leaf, "number")
        }
        own = {self.program.steps[index].out for index in block.steps}
        leaving = [
            step
            for step in self.program.steps
            if step.out in read_outside and (step.index in inside or (step.site is not None and step.reads[0] in own))
        ]
        for number, step in enumerate(leaving):
            source = self.program.steps[self.program.producers[step.reads[0]]] if step.site is not None else step
            name = block.name if len(leaving) == 1 else f"{block.name}[{number}]"
            row = self._plan(step, name, block.path, block.kind, source.handle, group)
            row.is_block = True
            self.module_rows.append(row)

    # -- one batch -----------------------------------------------------------------------------------------------

    def add(self, values: list[Any]) -> None:
        """Adds a batch; a batch that is interrupted leaves nothing behind."""
        updates: list[Callable[[], None]] = []

        def visit(event: Event) -> None:
            for row in self.rows.get(event.step.index, ()):
                update = self._measure(row, event)
                if update is not None:
                    updates.append(update)

        reference, quantized = lockstep(
            self.pair.simulator,
            values,
            visit,
            groups=self.groups,
            rounding=self.with_isolated,
            ranges=True,
            pieces=not self.metrics,
        )
        for update in updates:
            update()
        self._add_outputs(reference, quantized)
        self.batches += 1
        self.samples += count_samples(values)

    def _measure(self, row: _Row, event: Event) -> Callable[[], None] | None:
        reference, quantized = event.reference, event.quantized
        if not isinstance(reference, Tensor) or not isinstance(quantized, Tensor):
            self.without_tensor[event.step.index] = row.name
            return None
        if reference.shape != quantized.shape:
            row.problem = f"shapes differ: {tuple(reference.shape)} and {tuple(quantized.shape)}"
            return None
        others = self._others(row, event, reference)
        sums, noises = sums_of_row(reference, quantized, tuple(others.values()), event.ranges)
        noise = dict(zip(others, noises, strict=True))
        isolated, rounding = noise.get("isolated", NoiseSums()), noise.get("rounding", NoiseSums())
        custom = self._updated(row, reference, quantized, others.get("isolated")) if row.custom else row.custom
        dtype, shape = str(reference.dtype).removeprefix("torch."), event.shape
        # A closure over the event would keep its tensors alive until the batch is done.
        clamped = event.clamped

        def update() -> None:
            row.sums, row.isolated, row.rounding = (
                row.sums.merge(sums),
                row.isolated.merge(isolated),
                row.rounding.merge(rounding),
            )
            row.custom = custom
            row.dtype, row.shape = dtype, shape if row.shape is None else row.shape
            if clamped is not None:
                row.clamped += clamped
                row.clamped_of += sums.count

        return update

    def _updated(self, row: _Row, ref: Tensor, quant: Tensor, isolated: Tensor | None = None) -> dict[str, Metric]:
        """A row's own metrics after one more value, each given what it asks for."""
        scale = None if math.isnan(row.scale) else row.scale
        known = {"isolated": isolated, "scale": scale}
        updated = {}
        for name, metric in row.custom.items():
            update = cast(Callable[..., Metric], metric.update)
            updated[name] = update(ref, quant, **{key: known[key] for key in self.asked[name]})
        return updated

    def _others(self, row: _Row, event: Event, reference: Tensor) -> dict[str, Tensor]:
        """What else is held against the reference: the isolated and the rounded value, where they are asked for."""
        others: dict[str, Tensor] = {}
        if not (self.with_isolated or row.is_block):
            return others
        alone = event.rounded if row.group is None else event.isolated.get(row.group)
        alone = reference if alone is None and row.group is None else alone
        if isinstance(alone, Tensor) and alone.shape == reference.shape:
            others["isolated"] = alone
        if event.rounded is not None:
            others["rounding"] = event.rounded
        return others

    def _add_outputs(self, reference: Any, quantized: Any) -> None:
        pairs = list(zip(pytree.tree_leaves(plain(reference)), pytree.tree_leaves(plain(quantized)), strict=True))
        if not self.outputs:
            names = output_names(self.pair.quantized, len(pairs))
            self.outputs = [_Row(name, "", "output", -1, None, None, dict(self.metrics)) for name in names]
        for row, (ref, quant) in zip(self.outputs, pairs, strict=True):
            if isinstance(ref, Tensor) and isinstance(quant, Tensor) and ref.shape == quant.shape:
                row.sums = row.sums.update(ref, quant)
                row.custom = self._updated(row, ref, quant)
                row.dtype = str(ref.dtype).removeprefix("torch.")
                row.shape = tuple(ref.shape) if row.shape is None else row.shape
            else:
                row.problem = "not a tensor" if not isinstance(ref, Tensor) else "shapes differ"

    # -- the report ----------------------------------------------------------------------------------------------

    def report(self, notes: Sequence[str]) -> LayerReport:
        """What was added up so far; ``notes`` come before its own."""
        rows = [row for place in sorted(self.rows) for row in self.rows[place] if not row.is_block]
        missing = [row for row in rows if row.shape is None and not row.problem]
        extra = list(notes)
        if missing:
            extra.append(f"not compared, no single tensor as output: {_shorten([row.name for row in missing])}")
        for entry in self.pair.coverage:
            if entry.carries_arithmetic and entry.quantized < entry.total:
                extra.append(f"{entry.quantized} of {entry.total} {entry.op} ops are quantized; the rest runs in float")
        return LayerReport(
            rows=tuple(_finish(row) for row in rows if row.shape is not None or row.problem),
            outputs=tuple(_finish(row) for row in self.outputs),
            modules=tuple(_finish(row) for row in self.module_rows),
            unpaired=self.pair.pairing.unpaired,
            notes=tuple(dict.fromkeys(extra)),
            batches=self.batches,
            samples=self.samples,
            quantizer=self.pair.quantizer,
            model=self.pair.model,
            environment=self.pair.environment,
        )


def compare(
    comparison: Comparison,
    batches: Iterable[Any],
    inputs_of: Callable[[Any], Batch] | None,
    progress: bool | None,
    what: str,
) -> LayerReport:
    """Runs a comparison over all batches, of which the first one is verified; ``what`` names the progress bar.

    Raises:
        BatchError: there is no batch, or one does not fit the captured inputs.
        SimulationError: the simulator does not compute what the converted graph computes.
    """
    pair = comparison.pair
    notes = [*pair.notes, *pair.program.notes]
    bar = tqdm(
        read_batches(batches, inputs_of),
        desc=f"compare {what}",
        unit="batch",
        disable=None if progress is None else not progress,
        leave=False,
    )
    try:
        for batch in bar:
            if not comparison.batches:
                notes += pair.verify(batch)
            comparison.add(pair.values(batch))
    except KeyboardInterrupt:
        if not comparison.batches:
            raise
        notes.append(f"interrupted: covers the {comparison.batches} batches that were finished")
    if not comparison.batches:
        raise BatchError("no batch to compare on. Pass at least one; an iterator that was read before is empty.")
    return comparison.report(notes)


_EXTRAS = ("isolated", "scale")
"""What a metric is given beside the two tensors where its ``update`` names it."""


def _asked(metric: Metric) -> tuple[str, ...]:
    """Which of the extras a metric names; see :class:`pt2qa.Metric`."""
    parameters = inspect.signature(metric.update).parameters
    return tuple(name for name in _EXTRAS if name in parameters)


def _finish(row: _Row) -> LayerRow:
    sums, params, scale = row.sums, row.params, row.scale
    observed_at: Literal["dq", "raw"] = "raw" if params is None else "dq"
    seen = sums.count > 0
    note = "; ".join(part for part in (row.problem, sums.reason) if part)
    return LayerRow(
        handle=row.handle,
        name=row.name,
        module=row.module,
        op=row.op,
        observed_at=observed_at,
        dtype=row.dtype if params is None else params.dtype,
        scale=scale,
        zero_point=params.single_zero_point if params is not None else math.nan,
        shape=row.shape or (),
        sqnr=sums.sqnr,
        isolated_sqnr=row.isolated.sqnr,
        rounding_sqnr=row.rounding.sqnr,
        mse=sums.mse,
        cosine=sums.cosine,
        l1=sums.l1,
        atol=sums.atol,
        max_lsb=sums.atol / scale if scale > 0 else math.nan,
        saturation=row.clamped / row.clamped_of if row.clamped_of else math.nan,
        ref_min=sums.ref_min if seen else math.nan,
        quant_min=sums.quant_min if seen else math.nan,
        ref_max=sums.ref_max if seen else math.nan,
        quant_max=sums.quant_max if seen else math.nan,
        ref_mean=sums.ref_mean,
        quant_mean=sums.quant_mean,
        range_use=_range_use(sums, params),
        note=note,
        part_of=row.part_of,
        step=row.step,
        custom={name: float(metric.compute()) for name, metric in row.custom.items()},
    )


def _range_use(sums: ErrorSums, params: QuantParams | None) -> float:
    """Share of the integers between ``quant_min`` and ``quant_max`` that the reference values span."""
    if (
        params is None
        or not isinstance(params.scale, float)
        or not isinstance(params.zero_point, int)
        or not sums.count
    ):
        return math.nan
    low, high = (
        min(max(round(value / params.scale) + params.zero_point, params.quant_min), params.quant_max)
        for value in (sums.ref_min, sums.ref_max)
    )
    return (high - low) / (params.quant_max - params.quant_min)


def _shorten(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
