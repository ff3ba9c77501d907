"""Profiles of a graph, and of what a backend's kernels write: the values that are observed in the lowered program."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._ambient import torch_defaults
from pt2qa._deployed.analysis import explained
from pt2qa._deployed.deployment import Lowerable, ObservedValue, backend_for, lowerable, program_for, run_program
from pt2qa._exclusion import computes
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._grouping import grouped
from pt2qa._profile.measuring import Measurements, ProfileTarget, Side, node_names, target_of
from pt2qa._profile.plan import Plan, Value, make_plan, parameter_names
from pt2qa._profile.report import Profile
from pt2qa._profile.values import ValueStatistics, Wanted, Watch, measured
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import NoBatchError, over_ranks
from pt2qa._report.prose import counted, few
from pt2qa._report.selection import OpKind
from pt2qa._simulator.accumulate import accumulate, peeked
from pt2qa._simulator.batches import Batch, as_batch, buffers_kept, flatten_batch, structured
from pt2qa._simulator.data import Data, Inside, Mask
from pt2qa._simulator.program import QuantParams
from pt2qa.errors import CaptureError, DeploymentError, SelectionError
from pt2qa.plugins import Backend, DeployedProgram


@torch_defaults
@over_ranks
def profile(
    subject: Any,
    batches: Iterable[Any],
    *,
    side: Side | None = None,
    prefixes: Sequence[str] = (),
    ops: Collection[OpKind] = (),
    histograms: bool = True,
    per_channel: bool = False,
    with_stack: bool = False,
    backend: str | Backend | None = None,
    program: str | os.PathLike[str] | None = None,
    apart: bool = False,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
) -> Profile:
    """Measures what every op of a graph reads and makes: range, mean, variance, quantiles, zeros, NaN, saturation.

    Each batch runs through the graph once.  A value is measured once, when it is produced, however many ops read it.
    Only statistics are kept, so memory does not grow with the batches.  Weights are measured once.

    With ``side="deployed"`` the converted graph is lowered, as for :func:`pt2qa.compare_deployed`, and the values are
    those that the backend's kernels write.  Notes say which values cannot be observed.

    Args:
        subject: a :class:`pt2qa.QuantizedPair`, a :class:`pt2qa.Capture`, or a graph: captured, prepared, converted or
            an ``ExportedProgram``.  It is not changed: observers of a prepared graph do not see the batches, and
            buffers that forward writes to start every batch from the values they had.
        batches: iterable of batches, read once; batches may differ in size where the graph allows it.
        side: for a pair, ``"reference"`` (the default), ``"quantized"`` or ``"deployed"``.
        prefixes: module paths (``layer1``) or op names; only ops under them get rows.
        ops: kinds of op as in :func:`pt2qa.compare_layers`, and ``input`` for the model's inputs; only they get rows.
        histograms: also count values in bins: quantiles, peaks, plots, distances between profiles.
        per_channel: also measure each channel: axis 1 for model inputs and convolutions' outputs, the last for
            linears' and attention's, axis 0 or the quantized axis for weights.  Other ops take their input's axis.
        with_stack: also look up the line of the model's code that calls each op.
        backend: what lowers and runs the deployed side; None: the backend of the pair's plug-in.
        program: folder of the lowered program.  If it exists, nothing is lowered; else it is written.
        apart: whether the deployed side is lowered and run in a process of its own, as in :func:`compare_deployed`.
        inputs_of: maps an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        mask: which positions count, as in :func:`pt2qa.compare_layers`; the others are in no number.
        progress: whether to show a progress bar; None: if stderr is a terminal.

    Returns:
        The profile.  Interrupted with Ctrl-C after at least one batch, it covers the finished batches and says so.

    Raises:
        BatchError: there is no batch, or one does not fit the graph.
        CaptureError: the subject is not a graph.
        SelectionError: a prefix or op type matches nothing, or there is no such side or input for ``mask``.
        DeploymentError: the deployed side cannot be lowered or run, or nothing in it can be observed.

    >>> report = pt2qa.profile(capture, [x], progress=False)
    >>> report.find("input").min, report.find("input").max
    (-1.0, 1.0)
    """
    data = Data("batches", batches, inputs_of, mask, progress)
    chosen: Any = {"prefixes": prefixes, "ops": ops, "with_stack": with_stack}
    if side == "deployed":
        wanted = Wanted(histograms, per_channel)
        return profile_deployed(target_of(subject, side), subject, data, backend, program, apart, wanted, **chosen)
    if backend is not None or program is not None or apart:
        raise SelectionError("backend=, program= and apart= apply to side='deployed' only")
    profiler = Profiler(subject, side=side, histograms=histograms, per_channel=per_channel, mask=mask, **chosen)
    notes = accumulate(profiler, data, title="profile", purpose="profile")
    return profiler.profile(notes=notes)


class Profiler:
    """Watches the calls of a graph: ``with Profiler(graph) as p: graph(x)``, then ``p.profile()``.

    Inside the ``with``, :attr:`graph` computes what it always does, observers and buffers included, and its values are
    measured.  Calls that raise are not counted.  Arguments and errors as for :func:`profile`; the deployed side is not
    a graph.

    Attributes:
        graph: the graph whose calls are watched: the one given, ``pair.reference`` or ``pair.quantized``, or a new
            graph for a capture.

    >>> capture = pt2qa.capture(torch.nn.Linear(2, 1).eval(), torch.zeros(3, 2))
    >>> with pt2qa.Profiler(capture) as profiler:
    ...     _ = profiler.graph(torch.ones(3, 2))
    >>> profiler.profile().find("linear", "input").mean
    1.0
    """

    @torch_defaults
    def __init__(
        self,
        subject: Any,
        *,
        side: Side | None = None,
        prefixes: Sequence[str] = (),
        ops: Collection[OpKind] = (),
        histograms: bool = True,
        per_channel: bool = False,
        with_stack: bool = False,
        mask: Mask | None = None,
    ) -> None:
        if side == "deployed":
            raise SelectionError("side: a Profiler watches a graph; use pt2qa.profile(pair, batches, side='deployed')")
        target = target_of(subject, side)
        self.graph: GraphModule = target.graph
        floats = target.floats
        parameters = parameter_names(floats, node_names(floats, subject.names)) if floats is not self.graph else {}
        self._plan = make_plan(
            self.graph, target.names, prefixes=prefixes, ops=ops, parameters=parameters, with_stack=with_stack
        )
        self._measured = Measurements(target, self._plan, Wanted(histograms, per_channel), mask)

    @property
    def batches(self) -> int:
        """How many batches, or calls, were measured."""
        return self._measured.batches

    @property
    def samples(self) -> int:
        """How many samples they had."""
        return self._measured.samples

    @torch_defaults
    def add(self, batch: Batch) -> None:
        """Runs a batch and measures it; the graph's buffers stay as they are, and observers do not see it.

        Raises:
            BatchError: the batch does not fit the graph.
        """
        values = self._measured.target.values(batch)
        if self._measured.takes_empty(values):
            return
        if self._plan.writes:
            values = [value.clone() if isinstance(value, Tensor) else value for value in values]
        with buffers_kept(self.graph, self._plan.written), torch.no_grad():
            self._run(batch, values, observes=False)

    def __enter__(self) -> Profiler:
        if "forward" in vars(self.graph):
            raise CaptureError("another Profiler watches this graph; leave its with block first")
        # A module looks up forward on itself before its class.
        self.graph.forward = self._forward
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self.graph.forward

    @torch_defaults
    def profile(self, *, notes: Sequence[str] = ()) -> Profile:
        """What was measured so far.

        Args:
            notes: what else the reader of the report must know.

        Raises:
            BatchError: nothing was measured.
        """
        if not self.batches:
            raise NoBatchError("no batch to profile. Pass at least one; an iterator that was read before is empty.")
        return self._measured.profile(after=notes)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = as_batch(args, kwargs, self.graph)
        return structured(self.graph, self._run(batch, flatten_batch(self.graph, batch), observes=True))

    @computes
    def _run(self, batch: Batch, values: Sequence[Any], *, observes: bool) -> Any:
        measured, inside = self._measured, self._measured.axes.of(batch, values)
        watch = Watch(self.graph, self._plan, measured.wanted, measured.seen, inside, observes=observes)
        outputs = watch.run(*values)
        measured.take(values, watch.found, outputs, inside)
        return outputs


def profile_deployed(
    target: ProfileTarget,
    pair: QuantizedPair,
    data: Data,
    backend: str | Backend | None,
    program: str | os.PathLike[str] | None,
    apart: bool,
    wanted: Wanted,
    **chosen: Any,
) -> Profile:
    """The deployed side of :func:`pt2qa.profile`; ``chosen`` are the options of :func:`make_plan`."""
    plan = make_plan(target.graph, target.names, **chosen)
    first, every = peeked(data, "profile")
    place, runs_on = lowerable(pair), backend_for(pair, backend, apart)
    with explained(pair, runs_on, first):
        runs = program_for(pair, place, runs_on, first, program, data.progress)
        profiler = _DeployedProfiler(target, pair, plan, place, runs, wanted, data.mask)
        notes = accumulate(profiler, every, title="profile", purpose="profile")
    return profiler.profile([f"run by {runs_on.name}", *runs.facts, *notes])


class _DeployedProfiler(Measurements):
    """Which values of a plan are observed, in ``taps`` by number, why the others are not, and their statistics.

    In its ``plan``, a value that is observed before a kernel rounds it is a float value.
    """

    def __init__(
        self,
        target: ProfileTarget,
        pair: QuantizedPair,
        plan: Plan,
        place: Lowerable,
        program: DeployedProgram,
        wanted: Wanted,
        mask: Mask | None,
    ) -> None:
        self.program = program
        self._taps = {tap.step.node: tap for tap in place.values}
        results = {tap.step.out: tap for tap in place.values}
        steps = (step for step in pair.program.steps if step.duplicate_of is not None)
        self._taps |= {step.node: results[step.duplicate_of] for step in steps if step.duplicate_of in results}
        self._reasons = dict(program.taps)
        self._fused = {step.node: f"inside the kernel that writes {last}" for step, last in place.fused}
        self.taps: dict[int, ObservedValue] = {}
        self._missing: dict[int, str] = {}
        values = list(plan.values)
        for number, value in enumerate(plan.values):
            if value.constant or not isinstance(value.source.meta.get(VALUE), Tensor):
                continue
            tap = self._taps.get(value.node.name) or self._taps.get(value.source.name)
            reason = self._why_not(value, tap)
            if tap is None or reason:
                self._missing[number] = reason
                continue
            self.taps[number] = tap
            values[number] = replace(value, params=tap.params)
        super().__init__(target, replace(plan, values=tuple(values)), wanted, mask)

    def _why_not(self, value: Value, tap: ObservedValue | None) -> str:
        if value.reader is not None:
            return "it is modified in place before it is read"
        if tap is not None:
            return tap.refused or self._reasons.get(tap.node, "the backend does not say whether it observes it")
        if value.source.op == "placeholder":
            return "an input that no kernel rounds"
        return self._fused.get(value.node.name, "it is neither quantized nor a float value that a kernel writes")

    def _not_observed(self) -> Iterator[str]:
        names = self.plan.names
        for reason, found in grouped((why, names[number]) for number, why in self._missing.items()).items():
            yield f"not observed, {counted(len(found), 'value')}: {reason}: {few(found)}"
        if fixed := sum(value.constant for value in self.plan.values):
            yield f"not observed, {counted(fixed, 'value')}: weights and constants, which the program holds"

    def add(self, batch: Batch) -> None:
        values = self.target.values(batch)
        if self.takes_empty(values):
            return
        inside = self.axes.of(batch, values)
        ran = run_program(self.program, values)
        found = {number: self._measured(number, ran.values, inside) for number in (() if ran.changed else self.taps)}
        self.take(values, found, ran.outputs, inside, changed=ran.changed)

    def _measured(self, number: int, values: Mapping[str, Tensor], inside: Inside) -> ValueStatistics:
        tap, value = self.taps[number], self.plan.values[number]
        seen = values[tap.node]
        clamped = None
        if tap.params is not None and not seen.is_floating_point():
            clamped = count_at_ends(inside.of(value.node.name, seen), tap.params)
        return measured(value, tap.value(seen), self.wanted, clamped, inside)

    def profile(self, before: Sequence[str] = (), after: Sequence[str] = ()) -> Profile:
        said = [*before, *self._not_observed()]
        report = super().profile(said, after)
        if not self.seen:
            why = "; ".join([*said, *self.notes()])
            raise DeploymentError(f"no value of the deployed program was observed: {why}")
        return report


def count_at_ends(integers: Tensor, params: QuantParams) -> int:
    """How many integers lie at or beyond an end of the range; those at an end that stands for 0.0 do not count.

    After a relu, that end holds all that was negative, and was not clamped by the rounding.
    """
    low = params.quant_min - (params.quant_min == params.zero_point)
    high = params.quant_max + (params.quant_max == params.zero_point)
    # In a wider type, since the ends may lie outside that of the integers.
    steps = integers.int()
    return int(((steps <= low) | (steps >= high)).sum())
