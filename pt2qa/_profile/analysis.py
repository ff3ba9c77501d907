"""The profiler: what every op of a graph reads and makes, over any number of batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._exclusion import computes
from pt2qa._profile.plan import make_plan, parameter_names
from pt2qa._profile.report import Profile
from pt2qa._profile.summaries import profile_of
from pt2qa._profile.target import ProfileTarget, Side, node_names, target_of
from pt2qa._profile.watch import ValueStatistics, Wanted, Watch
from pt2qa._report.prose import counted, few
from pt2qa._simulator.accumulate import accumulate, refuse_empty
from pt2qa._simulator.batches import Batch, as_batch, buffers_kept, count_samples, flatten_batch
from pt2qa._simulator.nonfinite import is_empty
from pt2qa._simulator.outputs import structured
from pt2qa.errors import BatchError, CaptureError


def profile(
    subject: Any,
    batches: Iterable[Any],
    *,
    side: Side | None = None,
    prefixes: Sequence[str] = (),
    ops: Collection[str] = (),
    histograms: bool = True,
    per_channel: bool = False,
    with_stack: bool = False,
    inputs_of: Callable[[Any], Batch] | None = None,
    progress: bool | None = None,
) -> Profile:
    """Measures what every op of a graph reads and makes: range, mean, variance, quantiles, zeros, NaN, saturation.

    Each batch runs through the graph once.  A value is measured once, when it is produced, however many ops read it.
    Only statistics are kept, so memory does not grow with the batches.  Weights are measured once.

    Args:
        subject: a :class:`pt2qa.QuantizedPair`, a :class:`pt2qa.Capture`, or a graph: captured, prepared, converted or
            an ``ExportedProgram``.  It is not changed: observers of a prepared graph do not see the batches, and
            buffers that forward writes to start every batch from the values they had.
        batches: iterable of batches, read once; batches may differ in size where the graph allows it.
        side: for a pair, ``"reference"`` (the default) or ``"quantized"``.
        prefixes: module paths (``layer1``) or op names; only ops under them get rows.
        ops: kinds of op (``conv2d``; ``input`` for the model's inputs); only they get rows.
        histograms: also count values in bins: quantiles, peaks, plots, distances between profiles.
        per_channel: also measure each channel: axis 1 for model inputs and convolutions' outputs, the last for
            linears' and attention's, axis 0 or the quantized axis for weights.  Other ops take their input's axis.
        with_stack: also look up the line of the model's code that calls each op.
        inputs_of: maps an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        progress: whether to show a progress bar; None: if stderr is a terminal.

    Returns:
        The profile.  Interrupted with Ctrl-C after at least one batch, it covers the finished batches and says so.

    Raises:
        BatchError: there is no batch, or one does not fit the graph.
        CaptureError: the subject is not a graph.
        SelectionError: a prefix or op type matches nothing, or there is no such side.
    """
    profiler = Profiler(
        subject,
        side=side,
        prefixes=prefixes,
        ops=ops,
        histograms=histograms,
        per_channel=per_channel,
        with_stack=with_stack,
    )
    notes = accumulate(profiler, batches, title="profile", purpose="profile", inputs_of=inputs_of, progress=progress)
    return profiler.profile(notes=notes)


class Profiler:
    """Watches the calls of a graph: ``with Profiler(graph) as p: graph(x)``, then ``p.profile()``.

    Inside the ``with``, :attr:`graph` computes what it always does, observers and buffers included, and its values are
    measured.  Calls that raise are not counted.  Arguments and errors as for :func:`profile`.

    Attributes:
        graph: the graph whose calls are watched: the one given, ``pair.reference`` or ``pair.quantized``, or a new
            graph for a capture.

    >>> import pt2qa
    >>> capture = pt2qa.capture(torch.nn.Linear(2, 1).eval(), torch.zeros(3, 2))
    >>> with pt2qa.Profiler(capture) as profiler:
    ...     _ = profiler.graph(torch.ones(3, 2))
    >>> profiler.profile().find("linear", "input").mean
    1.0
    """

    def __init__(
        self,
        subject: Any,
        *,
        side: Side | None = None,
        prefixes: Sequence[str] = (),
        ops: Collection[str] = (),
        histograms: bool = True,
        per_channel: bool = False,
        with_stack: bool = False,
    ) -> None:
        self._target: ProfileTarget = target_of(subject, side)
        self.graph: GraphModule = self._target.graph
        floats = self._target.floats
        parameters = parameter_names(floats, node_names(floats, subject.names)) if floats is not self.graph else None
        self._plan = make_plan(
            self.graph, self._target.names, prefixes=prefixes, ops=ops, parameters=parameters, with_stack=with_stack
        )
        self._wanted = Wanted(histograms, per_channel)
        self._done = _Done()

    @property
    def batches(self) -> int:
        """How many batches, or calls, were measured."""
        return self._done.batches

    @property
    def samples(self) -> int:
        """How many samples they had."""
        return self._done.samples

    def add(self, batch: Batch) -> None:
        """Runs a batch and measures it; the graph's buffers stay as they are, and observers do not see it.

        Raises:
            BatchError: the batch does not fit the graph.
        """
        values = self._target.values(batch)
        if self._plan.writes:
            values = [value.clone() if isinstance(value, Tensor) else value for value in values]
        with buffers_kept(self.graph, self._plan.writes), torch.no_grad():
            self._run(values, observes=False)

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

    def profile(self, *, notes: Sequence[str] = ()) -> Profile:
        """What was measured so far.

        Args:
            notes: what else the reader of the report must know.

        Raises:
            BatchError: nothing was measured.
        """
        if not self.batches:
            raise BatchError("no batch to profile. Pass at least one; an iterator that was read before is empty.")
        refuse_empty(self.batches, len(self._done.empty))
        said = (*self._done.notes(), *notes)
        return profile_of(self._target, self._plan, self._done.seen, self._wanted, self.batches, self.samples, said)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        values = flatten_batch(self.graph, as_batch(args, kwargs, self.graph))
        return structured(self.graph, self._run(values, observes=True))

    @computes
    def _run(self, values: Sequence[Any], *, observes: bool) -> Any:
        done = self._done
        watch = Watch(self.graph, self._plan, self._wanted, done.seen, observes=observes)
        outputs = watch.run(*values, enable_io_processing=False)
        seen = {**done.seen, **watch.found}
        seen |= {number: done.seen[number].merge(watch.found[number]) for number in done.seen.keys() & watch.found}
        # One assignment, so that an interrupted batch counts in all values or in none.
        samples = count_samples(list(values))
        made = (each for number, each in watch.found.items() if not self._plan.values[number].constant)
        has_nan = any(each.statistics.nans for each in made)
        self._done = _Done(
            seen,
            done.batches + 1,
            done.samples + samples,
            (*done.empty, *([done.batches] if is_empty(samples, outputs) else [])),
            (*done.with_nan, *([done.batches] if has_nan else [])),
        )
        return outputs


@dataclass(frozen=True, slots=True)
class _Done:
    """What was measured so far; ``empty`` and ``with_nan`` are numbers of batches, from 0."""

    seen: dict[int, ValueStatistics] = field(default_factory=dict)
    batches: int = 0
    samples: int = 0
    empty: tuple[int, ...] = ()
    with_nan: tuple[int, ...] = ()

    def notes(self) -> Iterator[str]:
        """Which batches are empty, and on which values are NaN."""
        total = counted(self.batches, "batch", "batches")
        for what, found in (("no samples", self.empty), ("NaN", self.with_nan)):
            if found:
                yield f"{what} in {len(found)} of {total}: {few([f'batch {number}' for number in found])}"
