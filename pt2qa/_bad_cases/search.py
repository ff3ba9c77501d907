from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._ambient import torch_defaults
from pt2qa._bad_cases.case_metrics import (
    FLIPS,
    AnyMetric,
    CaseMetric,
    OutputPair,
    Scores,
    as_targets,
    chosen_metrics,
    count_labels,
    output_pairs,
)
from pt2qa._bad_cases.predictions import check_names, distinct, predictions
from pt2qa._bad_cases.report import AS_FLOAT32, AS_REAL, BadCases, LabelCounts, StoredCase, key_of, stored_dtype
from pt2qa._bad_cases.standings import CaseKey, Cases, Found, Standing
from pt2qa._capture.inputs import detached
from pt2qa._graph.internals.torch import pytree
from pt2qa._quantize.pairing import QuantizedPair, check_pair, identity_of
from pt2qa._ranks import over_ranks
from pt2qa._report.prose import counted
from pt2qa._report.set_apart import SetApart
from pt2qa._report.sums import QUANTIZATION, Array
from pt2qa._simulator.accumulate import (
    accumulate,
    empty_batch,
    first_fault,
    input_ranges,
    is_empty,
    refuse_empty,
    unlike,
)
from pt2qa._simulator.batches import (
    Batch,
    count_samples,
    has_no_element,
    input_names,
    named_parts,
    output_names,
    plain_batch,
    structured,
)
from pt2qa._simulator.data import Counted, Data, Mask, Positions
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.verification import Outputs, Verification, simulated
from pt2qa.errors import BatchError, SelectionError


@torch_defaults
@over_ranks
def find_bad_cases(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    metric: str | CaseMetric | Sequence[str | CaseMetric] = "sqnr",
    k: int = 1,
    num_steps: int | None = None,
    post_process: Callable[[Any], Any] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    targets_of: Callable[[Any], Any] | None = None,
    classes: Sequence[str] | None = None,
    mask: Mask | None = None,
    feedback: Mapping[str, str] | None = None,
    batch_axis: int | None = 0,
    progress: bool | None = None,
) -> BadCases:
    """Finds the samples on which the quantized model's outputs are furthest from the reference's.

    Each batch runs through both models, and each output is compared sample by sample.  For each metric and output, the
    worst ``k`` samples are kept with their inputs; everything else is released, so memory does not grow with the data.
    Ties go to the earlier sample.  A sample is worst of all if the quantized model returns NaN or infinities where the
    reference is finite.  A sample without a number for another reason (a zero reference, NaN in both) is ranked last.
    Both are counted.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.
        batches: iterable of batches, read once.
        metric: how to rank samples, one or several of ``sqnr`` (dB), ``cosine``, ``l1`` and ``atol``, as in
            ``compare_layers``; ``kl``, for logits, ``KL(softmax(ref) || softmax(quant))`` in nats over the last axis;
            ``flips``; or a :class:`pt2qa.CaseMetric`.
        k: cases to keep for each metric and output.
        num_steps: the most batches to read; None for all.
        post_process: turns a model's outputs, nested as the model returns them, into what is compared: argmax, NMS and
            so on.  It is called for both models.  A result whose batch size differs from the inputs' is ranked whole.
        inputs_of: returns the batch in an item of ``batches``, for loaders that yield ``(input, target)``.
        targets_of: returns an item's integer class targets.  If given, labels that flip are counted, and a ranking
            ``flips`` has the samples that lose the most right labels.
        classes: names of the classes, in the order of an output's scores; rows then have these in place of numbers.
        mask: which positions count, as in :func:`pt2qa.compare_layers`; the others are in no number and no label.  The
            rows then say at which position of a sample the largest value (the token) is another one first, and which
            position has the lowest SQNR.
        feedback: for stateful models, input name → output name, such as ``{"h": "output[1]"}``.  If an item omits such
            an input (or gives None), it is that output of the previous step, separately for each model.  An item that
            gives the input starts a new sequence, so the first one must.
        batch_axis: the axis of inputs and outputs that holds the samples; None to rank batches whole.
        progress: whether to show a progress bar; None: if stderr is a terminal.

    Returns:
        The report.  After Ctrl-C, or if an item cannot be read or does not fit the model, it covers the finished
        batches, if there are any, and says so in its notes.

    Raises:
        BatchError: there is no batch, or the first does not fit the captured inputs or cannot be stored.
        SelectionError: a metric or name is unknown, a number is out of range, or the targets fit no output.
        SimulationError: the simulator does not compute what the converted graph computes.

    >>> cases = pt2qa.find_bad_cases(pair, [x], k=2, progress=False)
    >>> len(cases.rows), cases.batch().shape
    (2, torch.Size([8, 4]))
    """
    check_pair(pair)
    for name, number, least in (("k", k, 1), ("num_steps", num_steps, 1), ("batch_axis", batch_axis, 0)):
        if number is not None and number < least:
            raise SelectionError(f"{name} is {number}; expected {least} or more.")
    metrics = chosen_metrics(metric, with_targets=targets_of is not None)
    if mask is not None and batch_axis not in (0, None):
        raise SelectionError(f"batch_axis is {batch_axis}; with a mask expected 0, or None to rank batches whole.")
    state = Feedback.of(pair.quantized, feedback or {})
    data = Data("batches", batches, inputs_of, mask, progress)
    positions, check = data.positions(pair.quantized, pair.program), Verification(pair.graphs)
    search = _Search(pair, metrics, k, post_process, state, batch_axis, positions, check, distinct(classes or ()))
    steps = search.steps(_read(data, targets_of, num_steps))
    notes = accumulate(search, replace(data, batches=steps, inputs_of=None), title="find bad cases", purpose="search")
    if num_steps is not None and search.batches < num_steps and not (notes or search.stopped):
        notes.append(f"num_steps is {num_steps}, but the data has only {counted(search.batches, 'batch', 'batches')}")
    refuse_empty(search.batches, search.found.set_apart)
    return search.report([*pair.notes, *pair.program.notes, *search.stopped, *notes, *search.check.notes])


def _read(
    data: Data, targets_of: Callable[[Any], Any] | None, most: int | None
) -> Iterator[tuple[Batch, Tensor | None]]:
    items = replace(data, inputs_of=lambda item: item)
    for item in itertools.islice(items, most):
        batch = plain_batch(item if data.inputs_of is None else data.inputs_of(item))
        yield batch, None if targets_of is None else as_targets(targets_of(item))


@dataclass(frozen=True)
class _Step:
    """One batch with the state filled in, the flat inputs of both models, and class targets if there are any."""

    batch: Batch
    reference: list[Any]
    quantized: list[Any]
    targets: Tensor | None


@dataclass
class _Search:
    pair: QuantizedPair
    metrics: Sequence[AnyMetric]
    k: int
    post_process: Callable[[Any], Any] | None
    feedback: Feedback
    axis: int | None
    positions: Positions
    check: Verification
    classes: Sequence[str]
    found: Found = field(default_factory=Found)
    cases: Mapping[CaseKey, CaseBatch] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    states: tuple[State, State] = ({}, {})
    repeats: dict[int, int] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        return self.found.steps

    def steps(self, items: Iterator[tuple[Batch, Tensor | None]]) -> Iterator[_Step]:
        """Batches ready to run, up to an error in reading one or in fitting it to the model, which is noted."""
        while True:
            try:
                step = self._prepared(*next(items))
            except StopIteration:
                return
            except Exception as error:
                if not self.batches:
                    raise
                self.stopped.append(f"stopped at batch {self.batches}, {type(error).__name__}: {error}")
                return
            yield step

    def _prepared(self, batch: Batch, targets: Tensor | None) -> _Step:
        """A batch as the inputs of both models; raises a BatchError where it does not fit or cannot be reported."""
        filled = self.feedback.fill(batch, self.states[0])
        reference = quantized = self.pair.values(filled)
        if not self.found.steps:
            # Inputs that a report cannot store are refused before hours are spent, not after.
            _node(filled, (0, 0), {})
        if self.feedback.sources:
            quantized = self.pair.values(self.feedback.fill(batch, self.states[1]))
        return _Step(filled, reference, quantized, targets)

    def add(self, step: _Step) -> None:
        """Runs both models on a batch, verified, and takes in what their outputs show."""
        if has_no_element(step.reference):
            self._take_empty()
            return
        models = functools.partial(simulated, self.pair.simulator, step.reference, step.quantized)
        self._take(step, self.check.run(models, step.reference, step.quantized))

    def _take_empty(self) -> None:
        self.found = self.found.merge(Found(steps=1, set_apart=(empty_batch(0),)))

    def _take(self, step: _Step, outputs: Outputs) -> None:
        graph = self.pair.quantized
        reference, quantized = structured(graph, outputs.reference), structured(graph, outputs.quantized)
        samples = count_samples(step.reference, self.axis or 0)
        if is_empty(samples, reference):
            self._take_empty()
            return
        kept = self.positions.of(step.batch, step.reference)
        apart = tuple(self._not_finite(step, samples, outputs, kept))
        ranges = () if apart else input_ranges(self.pair.program, step.reference, kept)
        states = self.feedback.state(reference), self.feedback.state(quantized)
        if self.post_process is not None:
            with torch.no_grad():
                reference, quantized = self.post_process(reference), self.post_process(quantized)
        layouts = kept.layouts_of_outputs() if self.post_process is None else kept.leading(reference)
        pairs = list(output_pairs(reference, quantized, self.axis, samples, layouts, kept.keep))
        if not self.found.steps:
            check_names(self.classes, pairs)
        seen = {output.name: predictions(output, step.targets, self.classes) for output in pairs}
        scored = [(output, each.name, each.worst, each.scores(output)) for output in pairs for each in self.metrics]
        counts = {}
        if step.targets is not None:
            for output, own, scores in _labelled(pairs, step.targets, kept.keep):
                counts[output.name] = own
                scored.append((output, FLIPS, "largest", scores))
        standings = {}
        for output, metric, worst, scores in scored:
            nothing = Standing(metric, output.name, worst, self.k)
            standings[metric, output.name] = nothing.of_batch(scores, output, seen[output.name])
        found = self.found.merge(Found(standings, counts, 1, samples, apart, ranges))
        cases = self._cases(found, step, samples)
        # All at once, so that an interrupted batch leaves no trace.
        self.found, self.states, self.cases = found, states, cases

    def _not_finite(self, step: _Step, samples: int, outputs: Outputs, kept: Counted) -> Iterator[SetApart]:
        """What is wrong with a batch on which an output is NaN, or infinite in only one model.

        Post-processing, such as argmax, may hide it, so the outputs before it are looked at.
        """
        pairs = list(zip(*map(kept.outputs, (outputs.reference, outputs.quantized)), strict=True))
        names = output_names(self.pair.quantized, len(pairs))
        wrong = [(name, culprit) for name, both in zip(names, pairs, strict=True) if (culprit := unlike(*both))]
        if wrong:
            # With feedback, the fault may be in the quantized model's own state.
            name, (what, side, _) = wrong[0]
            found = first_fault(self.pair.simulator, step.reference, 0, samples)
            found = found or SetApart(0, samples, -1, side, what, name)
            yield found if self.axis == 0 else replace(found, sample=-1)

    def _cases(self, found: Found, step: _Step, size: int) -> dict[CaseKey, CaseBatch]:
        """The cases in any standing: those kept so far, and copies from this batch."""
        number, first, axis = self.found.steps, self.found.samples, self.axis
        # Samples can be cut out where every input has them along the batch axis; 0-d tensors belong to all of them.
        tensors = [value for value in step.reference if isinstance(value, Tensor) and value.dim()]
        alone = axis is not None and all(each.dim() > axis and each.shape[axis] == size for each in tensors)
        cases: dict[CaseKey, CaseBatch] = {}
        for (batch, sample), index in found.keys.items():
            if batch != number:
                key = (batch, sample) if (batch, sample) in self.cases else (batch, -1)
                cases[key] = self.cases[key]
            elif sample < 0 or not alone:
                cases.setdefault((batch, -1), CaseBatch(detached(step.batch), first, 1))
            else:
                own = detached(cut(step.batch, sample, axis or 0))
                cases[batch, sample] = CaseBatch(own, index, self._repeats(own, size))
        return cases

    def _repeats(self, own: Batch, size: int) -> int:
        """How often a sample must be repeated to fit the model: once, or the captured batch size if that is fixed."""
        if size not in self.repeats:
            try:
                self.pair.values(own)
                self.repeats[size] = 1
            except BatchError:
                self.repeats[size] = size
        return self.repeats[size]

    def report(self, notes: Sequence[str]) -> BadCases:
        order = [*(metric.name for metric in self.metrics), FLIPS]
        standings = sorted(self.found.standings.values(), key=lambda standing: order.index(standing.metric))
        cases: Cases = {key: stored(case, key) for key, case in self.cases.items()}
        settings = {
            QUANTIZATION: self.pair.quantization,
            "metric": ", ".join(metric.name for metric in self.metrics),
            "k": str(self.k),
            "feedback": ", ".join(self.feedback.sources),
            **self.positions.settings,
        }
        if self.post_process is None:
            notes = [*notes, *self.positions.note(slots_in(self.pair.program.outputs), "outputs")]
        return BadCases(
            **self.found.fields(standings, cases, notes, settings),
            batch_axis=-1 if self.axis is None else self.axis,
            **identity_of(self.pair),
        )


def _labelled(
    pairs: Sequence[OutputPair], targets: Tensor, keep: Tensor | None
) -> Iterator[tuple[OutputPair, LabelCounts, Scores]]:
    """The labels of each output that names a class; those at positions that do not count are left out."""
    if keep is not None and targets.shape[:2] == keep.shape:
        targets = targets.masked_fill(~keep.reshape(*keep.shape, *[1] * (targets.dim() - 2)), -1)
    found = [(output, *answer) for output in pairs if (answer := count_labels(output, targets)) is not None]
    if not found:
        shapes = ", ".join(f"{o.name} {tuple(getattr(o.reference, 'shape', ()))}" for o in pairs)
        raise SelectionError(
            f"no output has class scores for targets of shape {tuple(targets.shape)}: {shapes}. Expected scores of "
            "shape (*targets.shape, classes), or integers of the targets' shape; use post_process= to convert."
        )
    yield from found


State = Mapping[str, Any]
"""Fed inputs by name."""


@dataclass(frozen=True)
class Feedback:
    """Which inputs of a step (the keys of ``sources``) are which outputs of the previous step."""

    sources: Mapping[str, str]
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, graph_module: GraphModule, sources: Mapping[str, str]) -> Feedback:
        inputs = tuple(input_names(graph_module))
        unknown = sorted(sources.keys() - set(inputs))
        if unknown:
            raise SelectionError(f"feedback: the model has no input {unknown[0]!r}; it takes {', '.join(inputs)}.")
        return cls(sources, inputs)

    def fill(self, batch: Batch, state: State) -> Batch:
        """A batch, with the state filled in for fed inputs that it omits or gives as None.

        Raises a BatchError where there is no previous step.
        """
        if not self.sources:
            return batch
        values = list(batch) if isinstance(batch, (dict, tuple, list)) else [batch]
        given = dict(batch) if isinstance(batch, dict) else dict(zip(self.inputs, values, strict=False))
        last = len(values)
        for name in sorted(self.sources, key=self.inputs.index):
            last = max(last, self.inputs.index(name) + 1)
            if given.get(name) is not None:
                continue
            if name not in state:
                raise BatchError(
                    f"the first batch has no input {name!r}. feedback takes it from {self.sources[name]} of the "
                    "previous batch, so the first batch of a sequence must include it."
                )
            given[name] = state[name]
        if isinstance(batch, dict):
            return given
        return (*map(given.get, self.inputs[:last]), *values[len(self.inputs) :])

    def state(self, outputs: Any) -> State:
        if not self.sources:
            return {}
        parts = dict(named_parts(outputs))
        for source in self.sources.values():
            if source not in parts:
                raise SelectionError(f"feedback: the model has no output {source!r}; it returns {', '.join(parts)}.")
        return {name: parts[source] for name, source in self.sources.items()}


@dataclass(frozen=True, slots=True)
class CaseBatch:
    """A copy of the inputs of one sample or batch; the sample must be repeated so often to fit the model."""

    batch: Batch
    index: int
    repeats: int


def cut(batch: Batch, sample: int, axis: int) -> Batch:
    return pytree.tree_map_only(Tensor, lambda x: x.narrow(axis, sample, 1) if x.dim() > axis else x, batch)


def stored(case: CaseBatch, key: tuple[int, int]) -> tuple[StoredCase, dict[str, Array]]:
    """A case for the report; raises a BatchError where an input is no tensor that NumPy can hold and no plain value."""
    arrays: dict[str, Array] = {}
    structure = _node(case.batch, key, arrays)
    return StoredCase(*key, case.index, case.repeats, json.dumps(structure)), arrays


def _node(value: Any, key: tuple[int, int], arrays: dict[str, Array]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        number = len(arrays)
        dtype = str(value.dtype).removeprefix("torch.")
        arrays[key_of(*key, number)] = _array(value, dtype)
        return {"tensor": number, "dtype": dtype}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_node(item, key, arrays) for item in value]}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {"dict": [[name, _node(item, key, arrays)] for name, item in value.items()]}
    raise BatchError(
        f"an input is of type {type(value).__name__}, which a report cannot hold; expected tensors, numbers and "
        "strings in tuples, lists and dicts."
    )


def _array(tensor: Tensor, dtype: str) -> Array:
    if not stored_dtype(dtype) or tensor.layout != torch.strided:
        raise BatchError(f"an input has dtype {dtype} and layout {tensor.layout}, which a report cannot hold.")
    if dtype in AS_FLOAT32:
        tensor = tensor.to(torch.float32)
    elif dtype in AS_REAL:
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().cpu().contiguous().numpy()
