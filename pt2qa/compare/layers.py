"""Layer by layer: the reference against the quantized model, all errors in one row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import Tensor
from torch.utils import _pytree as pytree
from tqdm import tqdm

from pt2qa.compare.selection import Block, find_blocks, selected_steps
from pt2qa.errors import BatchError, SelectionError
from pt2qa.metrics import ErrorSums, Metric, NoiseSums, sums_of_row
from pt2qa.pairing import QuantizedPair
from pt2qa.report import LayerReport, LayerRow
from pt2qa.simulator.batches import Batch, count_samples, read_batches
from pt2qa.simulator.lockstep import Event, lockstep
from pt2qa.simulator.outputs import output_names, plain
from pt2qa.simulator.program import QuantParams, Step


def compare_layers(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    isolated: bool = True,
    prefixes: Sequence[str] = (),
    ops: Sequence[str] = (),
    modules: Sequence[str] = (),
    metrics: Mapping[str, Metric] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    progress: bool | None = None,
) -> LayerReport:
    """Compares every op's output in the reference and in the quantized model.

    Both run side by side on each batch; a value is compared when it is made and dropped when nothing needs it any more,
    so memory does not grow with layers or batches.  Before the first batch the simulator is checked against the
    converted graph on that batch, bit for bit.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.
        batches: iterable of batches, read once; batches may differ in size where the capture allows it.
        isolated: also run every region on the reference's inputs and round every reference value: the columns
            ``isolated_sqnr`` and ``rounding_sqnr``.  Without, they are nan and the run takes about two thirds.
        prefixes: module paths (``layer1``) or op names; only ops under them are compared.
        ops: kinds of op (``conv2d``); only they are compared.
        modules: module paths (``layer2``) or class names (``BasicBlock``): each call of them is also run whole,
            quantized, on the reference's inputs, and gets a row of its own in ``report.modules``.
        metrics: more columns: name → a :class:`pt2qa.metrics.Metric` in its empty state.
        inputs_of: from an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        progress: whether to show a progress bar; None: where stderr is a terminal.

    Returns:
        The report.  Interrupted with Ctrl-C after at least one batch, it covers the finished batches and says so.

    Raises:
        BatchError: there is no batch, or one does not fit the captured inputs.
        SelectionError: a prefix, op type or module matches nothing, or a metric's name is taken.
        SimulationError: the simulator does not compute what the converted graph computes.
    """
    metrics = dict(metrics or {})
    taken = {column.name for column in fields(LayerRow)} & metrics.keys()
    if taken:
        raise SelectionError(f"the metric names {sorted(taken)} are columns of the layer table. Choose other names.")
    comparison = _Comparison(
        pair, selected_steps(pair.program, prefixes, ops), find_blocks(pair.program, modules), isolated, metrics
    )
    notes = [*pair.notes, *pair.program.notes]
    bar = tqdm(
        read_batches(batches, inputs_of),
        desc="compare layers",
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


@dataclass(slots=True)
class _Row:
    """What one row of the table adds up.

    Attributes:
        label: name, module, op and handle.
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
    sums: ErrorSums = field(default_factory=ErrorSums)
    isolated: NoiseSums = field(default_factory=NoiseSums)
    rounding: NoiseSums = field(default_factory=NoiseSums)
    is_block: bool = False
    clamped: int = 0
    clamped_of: int = 0
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    problem: str = ""


class _Comparison:
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
                for place in sites_of.get(step.out, [step]):
                    self._plan(place, step.name, step.module, step.op, step.handle, group)

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
        custom = {name: metric.update(reference, quantized) for name, metric in row.custom.items()}
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

    def _others(self, row: _Row, event: Event, reference: Tensor) -> dict[str, Tensor]:
        """What else is held against the reference: the isolated and the rounded value, where they are asked for."""
        others: dict[str, Tensor] = {}
        if self.with_isolated or row.is_block:
            alone = event.rounded if row.group is None else event.isolated.get(row.group)
            alone = reference if alone is None and row.group is None else alone
            if isinstance(alone, Tensor) and alone.shape == reference.shape:
                others["isolated"] = alone
        if self.with_isolated and event.rounded is not None:
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
                row.custom = {name: metric.update(ref, quant) for name, metric in row.custom.items()}
                row.dtype = str(ref.dtype).removeprefix("torch.")
                row.shape = tuple(ref.shape) if row.shape is None else row.shape
            else:
                row.problem = "not a tensor" if not isinstance(ref, Tensor) else "shapes differ"

    # -- the report ----------------------------------------------------------------------------------------------

    def report(self, notes: Sequence[str]) -> LayerReport:
        rows = [row for place in sorted(self.rows) for row in self.rows[place] if not row.is_block]
        missing = [row for row in rows if row.shape is None and not row.problem]
        extra = list(notes)
        if missing:
            extra.append(f"not compared, no single tensor as output: {_shorten([row.name for row in missing])}")
        for entry in self.pair.coverage:
            if entry.op.startswith(_COMPUTE_OPS) and entry.quantized < entry.total:
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


_COMPUTE_OPS = ("conv", "linear", "matmul", "bmm", "addmm", "lstm", "gru")
"""Beginnings of the names of ops that carry the arithmetic; one of them in float is worth a note."""


def _finish(row: _Row) -> LayerRow:
    sums, params = row.sums, row.params
    scale = params.largest_scale if params is not None else math.nan
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
