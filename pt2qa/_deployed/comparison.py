"""Accumulates a comparison with a deployed program: one row per observed value, summed over batches.

Four runs of a batch advance together: the reference and the converted graph in lockstep, the deployed program's
observed values, and the *isolated* run.  That one computes the converted graph too, but goes on with the deployed value
wherever one was observed.  So each of its values comes from deployed inputs, and what differs from the deployed value
is this kernel's own doing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from pt2qa._capture.exporting import State, run
from pt2qa._deployed.causes import Region, cause_of
from pt2qa._deployed.deployment import Lowerable, ObservedValue, run_program
from pt2qa._deployed.recorded import order_of
from pt2qa._deployed.report import BY_DESIGN, DeployedReport, DeployedRow, StageRow
from pt2qa._exclusion import computes
from pt2qa._graph.agreement import name_of_dtype
from pt2qa._metrics import NoiseSums, differing, noise_sums
from pt2qa._quantize.pairing import QuantizedPair, identity_of
from pt2qa._report.notes import notes_without
from pt2qa._report.prose import few
from pt2qa._report.rows import Unpaired
from pt2qa._report.set_apart import SetApart, as_fields
from pt2qa._report.sums import EACH, FIRST, LARGEST, Mergeable
from pt2qa._simulator.accumulate import Tally, empty_batch, first_fault, input_ranges, is_empty
from pt2qa._simulator.batches import (
    Batch,
    as_batch,
    as_call,
    count_samples,
    flat_outputs,
    has_no_element,
    leaves_of,
    structured,
    tensor_outputs,
)
from pt2qa._simulator.data import Counted, Mask, Positions
from pt2qa._simulator.lockstep import Event, Lockstep
from pt2qa._simulator.program import QuantParams
from pt2qa._simulator.simulator import tensors_equal
from pt2qa._simulator.verification import TOLERANCE, Outputs, Verification, graph_outputs, kind_of
from pt2qa._trials.judge import SimulatedModel
from pt2qa.errors import DeploymentError, SimulationError
from pt2qa.plugins import DeployedProgram


@dataclass
class Stages:
    """What runs at each stage before the pair's own graphs, and the sums between the outputs of all stages.

    ``sums`` are by stage, of each output against the stage before and against the first.
    """

    pair: QuantizedPair
    notes: list[str] = field(default_factory=list)
    sums: dict[str, list[tuple[NoiseSums, NoiseSums]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.eager: nn.Module | None = None if self.pair.capture is None else self.pair.capture.eager
        if self.eager is None or self.eager.training:
            why = "the pair does not hold the eager model" if self.eager is None else "the model is in training mode"
            self.notes.append(f"{why}: the stages begin with its program")
            self.eager = None

    @computes
    def before(self, batch: Batch, values: list[Any]) -> dict[str, list[Tensor]]:
        """The outputs of the stages that the simulator does not run; ``values`` are the batch, flat."""
        found = {}
        if self.eager is not None:
            with State(self.eager), torch.no_grad():
                found["eager"] = leaves_of(run(self.eager, *as_call(batch, self.pair.quantized)))
        if self.pair.float_graph is not None:
            found["capture"] = leaves_of(graph_outputs(self.pair.float_graph, values))
        return found

    def add(self, outputs: Mapping[str, Sequence[Tensor]]) -> None:
        """Adds the outputs of a batch at each stage, in order, all at once."""
        first, *_ = stages = list(outputs.values())
        sums = {}
        for before, (name, values) in zip([first, *stages], outputs.items(), strict=False):
            new = [noise_sums(each, ((0, 2), (1, 2))) for each in zip(before, first, values, strict=True)]
            known = self.sums.get(name, [(NoiseSums(), NoiseSums())] * len(new))
            sums[name] = [(a.merge(c), b.merge(d)) for (a, b), (c, d) in zip(known, new, strict=True)]
        self.sums = sums

    def rows(self) -> tuple[StageRow, ...]:
        return tuple(
            StageRow(
                name, math.nan if number == 0 else _worst(step for step, _ in sums), _worst(all_ for _, all_ in sums)
            )
            for number, (name, sums) in enumerate(self.sums.items())
        )


def _worst(sums: Any) -> float:
    """The smallest SQNR; nan only if no output has one."""
    return min((each.sqnr for each in sums if not math.isnan(each.sqnr)), default=math.nan)


@dataclass(frozen=True, slots=True)
class _Sums(Mergeable):
    noise: tuple[NoiseSums, ...] = field(default=(NoiseSums(),) * 4, metadata=EACH)
    """Isolated, cumulative, quantized, deployed: see :class:`DeployedRow`."""
    atol: float = field(default=0.0, metadata=LARGEST)
    differing: int = 0
    count: int = 0
    dtype: str = field(default="", metadata=FIRST)
    problem: str = field(default="", metadata=FIRST)

    @property
    def nonfinite(self) -> bool:
        return any(math.isnan(each.noise) for each in self.noise)


@dataclass(frozen=True, slots=True)
class _Measured(Outputs):
    sums: dict[int, _Sums] = field(default_factory=dict)
    outputs: Sequence[Tensor] | None = None
    """Those of the isolated run; None if nothing was observed."""


class Comparison(Tally):
    """The sums of each observed value, by the step that computes it, and of each output."""

    def __init__(
        self, pair: QuantizedPair, lowerable: Lowerable, program: DeployedProgram, backend: str, mask: Mask | None
    ) -> None:
        self.pair, self.lowerable, self.program, self.backend = pair, lowerable, program, backend
        self.positions = Positions(pair.quantized, pair.program, mask)
        self.stages = Stages(pair)
        self.check = Verification(pair.graphs)
        reasons = program.taps
        self.observed = {
            each.step.index: each
            for each in lowerable.values
            if not each.refused and not reasons.get(each.node, "lost")
        }
        self.sums: dict[int, _Sums] = {index: _Sums() for index in self.observed}
        self.outputs: list[_Sums] = []
        self.checked: set[tuple[Any, ...]] = set()
        self.disturbed = 0
        self.causes: dict[int, str] = {}
        self.places = tensor_outputs(pair.quantized)
        self.names = list(self.places.values())
        self.order: tuple[int, ...] = ()

    # -- one batch -----------------------------------------------------------------------------------------------------

    def add(self, batch: Batch) -> None:
        """Runs a batch, verified, and adds the results; an interrupted batch leaves no trace."""
        values = self.pair.values(batch)
        samples = count_samples(values)
        if has_no_element(values) or (not samples and is_empty(samples, self.pair.simulator.run(values))):
            self.took(0, empty_batch(self.batches))
            return
        counted = self.positions.of(batch, values)
        ran = run_program(self.program, values)
        seen = {} if ran.changed else {index: ran.values[observed.node] for index, observed in self.observed.items()}
        measured = self.check.run(functools.partial(self._measure, values, seen, counted), values)
        self._check_isolated(values, seen, measured, counted)
        before = self.stages.before(batch, values)
        prepared, converted = leaves_of(measured.reference), leaves_of(measured.quantized)
        deployed = self._fitting(converted, ran.outputs)
        stages = {**before, "prepared": prepared, "converted": converted, "deployed": deployed}
        every = {name: counted.tensors(found) for name, found in stages.items()}
        alone = [None] * len(deployed) if measured.outputs is None else counted.tensors(measured.outputs)
        three = every["prepared"], every["converted"], every["deployed"]
        outputs = [_output(*each) for each in zip(*three, alone, strict=True)]
        apart = self._why_apart(values, samples, measured, outputs)
        self.outputs = self.outputs or [_Sums()] * len(outputs)
        if apart is None:
            self.stages.add(every)
            for index, sums in measured.sums.items():
                self.sums[index] = self.sums[index].merge(sums)
            self.outputs = [a.merge(b) for a, b in zip(self.outputs, outputs, strict=True)]
            self._explain(values, seen)
        self.disturbed += ran.changed
        self.took(samples, apart, ranges=input_ranges(self.pair.program, values, counted) if apart is None else ())

    def _measure(self, values: list[Any], seen: Mapping[int, Tensor], counted: Counted) -> _Measured:
        """Runs both models and the isolated one; adds nothing yet, so that the run can be checked or repeated."""
        found: dict[int, _Sums] = {}
        walk = self.pair.simulator.walk(values)
        instead: Tensor | None = None

        def visit(event: Event) -> None:
            nonlocal instead
            index = event.step.index
            if index not in seen:
                return
            deployed = self.observed[index].value(seen[index])
            while True:
                step, value = walk.send(instead)
                instead = None
                if step.index == index:
                    break
            kept = functools.partial(counted.of, event.step.out)
            found[index] = _compared(event.reference, event.quantized, value, deployed, kept)
            # A kernel may keep more bits than the dtype that the graph has there.
            instead = deployed.to(value.dtype) if found[index].count else None

        reference, quantized = Lockstep(self.pair.simulator).run(values, visit)
        return _Measured(reference, quantized, (), found, _finish(walk, instead) if found else None)

    @computes
    def _check_isolated(
        self, values: list[Any], seen: Mapping[int, Tensor], measured: _Measured, counted: Counted
    ) -> None:
        """Runs the converted graph's own nodes on the deployed values, for data of each kind: they must agree."""
        kind = kind_of(values)
        if not seen or kind in self.checked:
            return
        self.checked.add(kind)
        at = {self.lowerable.original[self.observed[index].node]: index for index in seen}

        def visit(node: Node, result: Any) -> Tensor | None:
            index = at.get(node.name)
            if index is None or not measured.sums[index].count:
                return None
            observed, expected = self.observed[index], measured.sums[index].noise[0]
            both = tuple(counted.of(observed.step.out, observed.value(each)) for each in (result, seen[index]))
            (sums,) = noise_sums(both, [(0, 1)])
            if abs(sums.noise - expected.noise) > TOLERANCE * sums.noise + 1e-13 * sums.signal:
                raise SimulationError(
                    f"the isolated error of {observed.name} has a squared sum of {expected.noise:.6g}; the "
                    f"converted graph's nodes, run on the deployed values, give {sums.noise:.6g}. The numbers would be "
                    "wrong, so none are reported. Please file a bug with the model."
                )
            return seen[index].to(result.dtype).clone()

        outputs = leaves_of(graph_outputs(self.pair.quantized, values, visit))
        assert measured.outputs is not None
        for name, found, expected in zip(self.names, measured.outputs, outputs, strict=True):
            if not tensors_equal(found, expected):
                raise SimulationError(
                    f"{name}, computed from the deployed values, is not what the nodes of the converted graph compute "
                    "from them. The numbers would be wrong, so none are reported. Please file a bug with the model."
                )

    @computes
    @torch.no_grad()
    def _explain(self, values: list[Any], seen: Mapping[int, Tensor]) -> None:
        """Looks for the cause of each difference that this batch is the first to show."""
        nodes = {node.name: node for node in self.pair.quantized.graph.nodes}
        place = {index: nodes[self.lowerable.original[self.observed[index].node]] for index in seen}
        known: dict[Node, Any] = dict(zip(self.pair.quantized.graph.find_nodes(op="placeholder"), values, strict=True))
        known |= {place[index]: value for index, value in seen.items() if self.sums[index].count}
        for index, deployed in seen.items():
            if index not in self.causes and self._row(self.observed[index]).is_suspect:
                region = Region(self.pair.quantized, place[index], known, deployed, self.pair.names)
                self.causes[index] = cause_of(region)

    def deployed(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program as one calls the model; needs a batch before, which shows the order of its outputs."""
        graph = self.pair.quantized
        values = self.pair.values(as_batch(args, kwargs, graph))
        leaves = list(run_program(self.program, values, observed=False).outputs)
        if self.order:
            leaves = [leaves[place] for place in self.order]
        if len(leaves) != len(flat_outputs(graph.graph.output_node().args[0])):
            every = flat_outputs(self.pair.simulator.run(values))  # numbers and sizes, which it leaves out
            for place, leaf in zip(self.places, leaves, strict=True):
                every[place] = leaf
            leaves = every
        return structured(graph, leaves)

    @torch.no_grad()
    def measured(self, metric: Callable[..., Any]) -> tuple[StageRow, ...]:
        """The stages, with the metric of all but the captured program, which computes what the model does."""
        pair, eager, found = self.pair, self.stages.eager, {}
        if eager is not None:
            with State(eager):
                found["eager"] = float(metric(eager))
        found["prepared"] = float(metric(SimulatedModel(pair, frozenset())))
        found["converted"] = float(metric(SimulatedModel(pair, frozenset(range(len(pair.sites))))))
        found["deployed"] = float(metric(self.deployed))
        return tuple(replace(row, value=found.get(row.name, math.nan)) for row in self.stages.rows())

    def _fitting(self, expected: Sequence[Tensor], outputs: Sequence[Any]) -> list[Tensor]:
        """The outputs of the program that are to be compared, in the model's order."""
        found = leaves_of(outputs)
        returned = flat_outputs(self.pair.quantized.graph.output_node().args[0])
        if len(found) > len(expected) and len(outputs) == len(returned):
            found = [outputs[place] for place in self.places]  # a device may return numbers and sizes as tensors
        if not self.lowerable.values and len(found) == len(expected) > 1:
            self.order = self.order or order_of(expected, found)
            found = [found[place] for place in self.order]
        if len(found) != len(expected):
            raise DeploymentError(
                f"batch {self.batches}: the deployed program returned {len(found)} outputs; the model returns "
                f"{len(expected)} ({', '.join(self.names)})."
            )
        for name, want, got in zip(self.names, expected, found, strict=True):
            if want.shape != got.shape or want.dtype != got.dtype:
                raise DeploymentError(
                    f"batch {self.batches}, {name}: the deployed program returned {_described(got)}, the model "
                    f"{_described(want)}."
                )
        return list(found)

    def _place(self, observed: ObservedValue) -> tuple[int, str, str, str]:
        """Handle, name, module and op of a row."""
        if observed.owner is not None:
            return observed.owner.handle, observed.owner.name, observed.owner.module, observed.owner.op
        program = self.pair.program
        number = program.inputs.index(observed.step.reads[0])
        return program.input_handles[number], program.input_names[number], "", "input"

    def _why_apart(
        self, values: list[Any], samples: int, measured: _Measured, outputs: Sequence[_Sums]
    ) -> SetApart | None:
        names = [self.observed[index].name for index, sums in measured.sums.items() if sums.nonfinite]
        names += [name for name, sums in zip(self.names, outputs, strict=True) if sums.nonfinite]
        if not names:
            return None
        fault = first_fault(self.pair.simulator, values, self.batches, samples)
        return fault or SetApart(self.batches, samples, -1, "deployed", "NaN or infinite", names[0])

    # -- the report ----------------------------------------------------------------------------------------------------

    def report(self, notes: Sequence[str]) -> DeployedReport:
        pair = self.pair
        slots = [observed.step.out for observed in self.observed.values()]
        notes = [*notes, *self.positions.note([*slots, *self._output_slots()])]
        disturbed = (
            f"observing changed the program's outputs on this data: {self.disturbed} of {self.batches} batches have no "
            "intermediate values"
        )
        moved = ", ".join(f"{name} is its output {place}" for name, place in zip(self.names, self.order, strict=False))
        other_order = f"the program returns its outputs in another order, as their values show: {moved}"
        # Where a difference was found that is known of the backend, or none was looked for.
        by_design = (
            not self.observed or pair.origin is not None or any(BY_DESIGN in each for each in self.causes.values())
        )
        return DeployedReport(
            rows=tuple(map(self._row, self.lowerable.values)),
            outputs=tuple(
                _finished((-1, name, "", "output"), None, True, sums, self._together([slot]), "")
                for name, slot, sums in zip(self.names, self._output_slots(), self.outputs, strict=True)
            ),
            stages=self.stages.rows(),
            unpaired=tuple(
                Unpaired(step.handle, step.name, "deployed", f"part of the kernel that writes {last}")
                for step, last in self.lowerable.fused
            ),
            facts=tuple(self.program.facts),
            notes=(
                *(pair.notes if by_design else notes_without("kernels", pair.notes)),
                *pair.program.notes,
                *self.stages.notes,
                *notes,
                *([disturbed] if self.disturbed else []),
                *([other_order] if self.order != tuple(sorted(self.order)) else []),
                *self.check.notes,
            ),
            **as_fields(self.health),
            backend=self.backend,
            **identity_of(pair),
        )

    def _row(self, observed: ObservedValue) -> DeployedRow:
        sums, delegated = self.sums.get(observed.step.index, _Sums()), self.program.delegated
        note = observed.refused or self.program.taps.get(observed.node, "not reported by the backend") or sums.problem
        note = note or (self._together(observed.step.reads) if sums.count else "")
        place = self._place(observed)
        # An input is quantized where the first kernel reads it.
        inside = bool(delegated) if observed.owner is None else place[0] in delegated
        return _finished(place, observed.params, inside, sums, note, self.causes.get(observed.step.index, ""))

    def _output_slots(self) -> list[int]:
        leaves = flat_outputs(self.pair.program.outputs)
        return [leaves[number].number for number in self.places]

    def _together(self, slots: Sequence[int]) -> str:
        """Which roundings lie between these values and the observed ones before them; empty if none do."""
        program, ahead, seen, names = self.pair.program, list(slots), set[int](), []
        unobserved = {each.step.index: each for each in self.lowerable.values if each.params is not None}
        while ahead:
            index = program.producers.get(ahead.pop(), -1)
            if index in seen or index < 0 or (index in self.sums and self.sums[index].count):
                continue
            seen.add(index)
            names += [unobserved[index].name] if index in unobserved else []
            step = program.steps[index]
            ahead += step.reads if step.duplicate_of is None else [step.duplicate_of]
        return f"measured together with {few(names)}, not observed" if names else ""


def _compared(
    reference: Any, quantized: Any, isolated: Any, deployed: Tensor, kept: Callable[[Tensor], Tensor]
) -> _Sums:
    """The sums of one place on one batch, over the elements that are ``kept``."""
    if not isinstance(isolated, Tensor) or isolated.shape != deployed.shape:
        return _Sums(
            problem=f"the deployed value is {_described(deployed)}, the converted graph's {_described(isolated)}"
        )
    reference, quantized, isolated, deployed = map(kept, (reference, quantized, isolated, deployed))
    noise = tuple(noise_sums((isolated, quantized, reference, deployed), ((0, 3), (1, 3), (2, 1), (2, 3))))
    # Most kernels are exact; then nothing needs to be counted.
    count, atol = (0, 0.0) if noise[0].noise == 0.0 else differing(isolated, deployed)
    return _Sums(noise, atol, count, deployed.numel(), name_of_dtype(deployed))


@torch.no_grad()
def _finish(walk: Generator[Any, Tensor | None, Any], instead: Tensor | None) -> list[Tensor]:
    """The outputs of an isolated run, with the last observed value in place of its own."""
    while True:
        try:
            walk.send(instead)
        except StopIteration as end:
            return leaves_of(end.value)
        instead = None


def _output(reference: Tensor, quantized: Tensor, deployed: Tensor, isolated: Tensor | None) -> _Sums:
    (alone,) = [NoiseSums()] if isolated is None else noise_sums((isolated, deployed), [(0, 1)])
    others = noise_sums((reference, quantized, deployed), ((1, 2), (0, 1), (0, 2)))
    return _Sums((alone, *others), count=deployed.numel(), dtype=name_of_dtype(deployed))


def _finished(
    place: tuple[int, str, str, str], params: QuantParams | None, delegated: bool, sums: _Sums, note: str, cause: str
) -> DeployedRow:
    isolated, cumulative, quantized, deployed = (each.sqnr for each in sums.noise)
    scale = math.nan if params is None else params.largest_scale
    in_steps = params is not None and scale > 0 and sums.count > 0
    return DeployedRow(
        *place,
        observed_at="raw" if params is None else "dq",
        dtype=sums.dtype if params is None else params.dtype,
        scale=scale,
        delegated=delegated,
        # Both values lie on one grid of integers; the division of two float32 numbers does not.
        isolated_max_lsb=float(round(sums.atol / scale)) if in_steps else math.nan,
        isolated_differing=sums.differing / sums.count if in_steps else math.nan,
        isolated_sqnr=isolated,
        cumulative_sqnr=cumulative,
        quantized_sqnr=quantized,
        deployed_sqnr=deployed,
        note=note,
        cause=cause,
    )


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{name_of_dtype(value)} of shape {tuple(value.shape)}"
