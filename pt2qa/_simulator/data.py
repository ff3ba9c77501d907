"""The batches of an analysis, and what its user said of them: which positions count.

A mask of samples and positions is applied to every value that has these axes.  A padded batch computes values at
positions that no prompt has.  They belong to no sum, so each value is reduced to its elements at the positions that
count before anything is measured.  Where a value has the axes of samples and positions is read from the graph.  With a
dynamic length, sizes are symbols, so an axis is one of positions if its size is the symbol of the mask's.  With a fixed
length, axes are known by their size alone.  Where features may have that size, too, only values of shape (samples,
positions, ...) are masked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from tqdm import tqdm

from pt2qa._graph.handles import attribute_of, op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree, size_expression
from pt2qa._graph.internals.torchao import is_observer
from pt2qa._interrupts import raise_if_interrupted
from pt2qa._report.prose import few
from pt2qa._simulator import quant_ops
from pt2qa._simulator.batches import Batch, count_samples, flat_outputs, input_names, plain_batch
from pt2qa._simulator.lockstep import Event, Visit
from pt2qa._simulator.products import PRODUCTS
from pt2qa._simulator.program import Program, Slot, Step
from pt2qa.errors import BatchError, SelectionError


@dataclass(frozen=True, eq=False)
class Data:
    """Batches, made once at the door of an analysis; they start over if what was passed does.

    Attributes:
        name: what they are called in calls.
        batches: a list, a loader or an iterator, as it was passed.
        inputs_of: maps an item of these to a batch.
        mask: which positions count in numbers; None: all do.
        progress: whether to show progress bars; None: if stderr is a terminal.
    """

    name: str
    batches: Iterable[Any] = field(repr=False)
    inputs_of: Callable[[Any], Batch] | None = None
    mask: Mask | None = None
    progress: bool | None = False

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.batches, (Tensor, Mapping, np.ndarray)):
            raise BatchError(
                f"batches is a single {type(self.batches).__name__}; expected an iterable of batches. "
                "Pass [batch] for one."
            )
        if not isinstance(self.batches, Iterable):
            raise BatchError(
                f"batches is of type {type(self.batches).__name__}; expected an iterable of batches, such as a list."
            )
        for item in self.batches:
            raise_if_interrupted()
            yield plain_batch(item) if self.inputs_of is None else self.inputs_of(item)

    def positions(self, quantized: GraphModule, program: Program) -> Positions:
        """Where the values of a pair have the axes of the mask."""
        return Positions(quantized, program, self.mask)

    def bar(self, title: str, unit: str = "batch", *, of: Iterable[Any] | None = None) -> tqdm[Any]:
        """A progress bar, of items that it iterates over or of no known length."""
        return tqdm(
            of, desc=title, unit=unit, disable=None if self.progress is None else not self.progress, leave=False
        )


Mask: TypeAlias = str | Callable[[Batch], Tensor]
"""The name of an input, or a function of a batch: which positions count, of shape (samples, positions)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a value has the axes of a mask.

    Attributes:
        batch: the axis of the samples; None if the model was captured for a single one.
        tokens: the axes of positions: one, or two for the scores of an attention.
        repeats: rows for each sample on the batch axis, as where heads are folded into it.
        merged: the order of an axis that has samples and positions in one, ``tokens[0]``.
    """

    batch: int | None
    tokens: tuple[int, ...]
    repeats: int = 1
    merged: Literal["", "samples first", "positions first"] = ""

    def counted(self, value: Tensor, keep: Tensor) -> Tensor:
        """The elements of a value that count, of shape (positions, ...); ``keep`` is bool (samples, positions)."""
        view, index = self._indexed(value, keep)
        return view[index]

    def filled(self, value: Tensor, keep: Tensor) -> Tensor:
        """The value with copies of elements that count in place of those that do not, which changes no range."""
        found = value.clone()
        view, index = self._indexed(found, keep)
        view[~index] = view[index][0].clone()
        return found

    def zeroed(self, value: Tensor, keep: Tensor) -> Tensor:
        """The value with zeros in place of the elements that do not count."""
        inside = torch.zeros_like(value, dtype=torch.bool)
        view, index = self._indexed(inside, keep)
        view[index] = True
        return value.masked_fill(~inside, 0)

    def axis_of_counted(self, axis: int, dimensions: int) -> int | None:
        """Where an axis of a value is among those of its elements that count; None if it is one of the mask's."""
        rest = [each for each in range(dimensions) if each != self.batch and each not in self.tokens]
        return rest.index(axis) + 1 if axis in rest else None

    def _indexed(self, value: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """A view of a value with the axes of the mask first, and which of its entries count."""
        if self.merged:
            return value.movedim(self.tokens[0], 0), (keep if self.merged == "samples first" else keep.T).flatten()
        rows = keep.repeat_interleave(self.repeats, 0)
        mask = rows.reshape(*rows.shape, *[1] * (len(self.tokens) - 1))
        for number in range(1, len(self.tokens)):
            mask = mask & rows.reshape(len(rows), *(-1 if n == number else 1 for n in range(len(self.tokens))))
        axes = self.tokens if self.batch is None else (self.batch, *self.tokens)
        rest = [axis for axis in range(value.dim()) if axis not in axes]
        return value.permute(*axes, *rest), mask[0] if self.batch is None else mask


_FOLDING = {"view", "reshape", "_unsafe_view", "flatten", "repeat_interleave"}
"""Ops that keep the order of rows where they make more or fewer of them."""

LEADING = Layout(0, (1,))
"""That of logits: (samples, positions, ...)."""


@dataclass(frozen=True)
class Inside:
    """Which positions of one batch count, bool (samples, positions), and where values have these axes.

    The values are those of a graph's nodes, by name, or of a program's slots, by number.  Without a mask all positions
    count: ``keep`` is None, and no value has its axes.
    """

    keep: Tensor | None
    layouts: Mapping[Any, Layout]

    def of(self, key: str | int, value: Any) -> Any:
        """The elements of a value that count; the value itself if it has no such axes."""
        return self._changed(Layout.counted, self.layouts.get(key), value)

    def filled(self, key: str | int, value: Any) -> Any:
        """A value with copies of elements that count in place of the others."""
        return self._changed(Layout.filled, self.layouts.get(key), value)

    def zeroed(self, key: str | int, value: Any) -> Any:
        """A value with zeros in place of the elements that do not count."""
        return self._changed(Layout.zeroed, self.layouts.get(key), value)

    def _changed(self, change: Callable[[Layout, Tensor, Tensor], Tensor], layout: Layout | None, value: Any) -> Any:
        known = layout is not None and self.keep is not None and isinstance(value, Tensor)
        return change(layout, value, self.keep) if known else value  # type: ignore[arg-type]  # known says so

    def axis(self, key: str | int, axis: int, dimensions: int) -> int | None:
        """Where an axis of a value is among those of what counts; None if it has samples or positions."""
        layout = self.layouts.get(key)
        return axis if layout is None else layout.axis_of_counted(axis, dimensions)


class Axes:
    """A mask, if there is one, and where the values of a graph have its axes.

    Attributes:
        settings: the mask's name, for reports; none without a mask.
        layouts: by the name of a node; None before the first batch.

    Raises:
        SelectionError: there is no input of that name.
    """

    def __init__(self, graph_module: GraphModule, mask: Mask | None) -> None:
        names = [] if mask is None else input_names(graph_module)
        if isinstance(mask, str) and mask not in names:
            raise SelectionError(
                f"mask: the model has no input {mask!r}; it has {', '.join(names)}. Name one of them, or pass a "
                "function of a batch that returns a bool tensor of shape (samples, positions)."
            )
        self.graph_module, self.mask, self._inputs = graph_module, mask, names
        name = mask if isinstance(mask, str) else getattr(mask, "__name__", type(mask).__name__)
        self.settings = {} if mask is None else {"mask": name}
        self.layouts: dict[str, Layout] | None = None
        self._masked = -1

    def of(self, batch: Batch, values: Sequence[Any]) -> Inside:
        """The positions of a batch that count, all where it has no samples; ``values`` are its flat inputs.

        Raises:
            BatchError: the mask is no tensor of zeros and ones that fits the batch, or zero everywhere.
        """
        if self.mask is None or not count_samples(list(values)):
            return Inside(None, {})
        keep = self._keep(self.mask, batch)
        shapes = [tuple(value.shape[:2]) if isinstance(value, Tensor) else () for value in values]
        if self.layouts is None:
            if keep.shape not in shapes:
                raise BatchError(
                    f"mask has the shape {tuple(keep.shape)}; expected (samples, positions), the first two axes of an "
                    f"input, whose shapes begin with {[shape for shape in shapes if shape]}."
                )
            self._masked = shapes.index(tuple(keep.shape))
            self.layouts = _Layouts(self.graph_module, self._masked).found
        elif shapes[self._masked] != tuple(keep.shape):
            inputs = self.graph_module.graph.find_nodes(op="placeholder")
            raise BatchError(
                f"mask has the shape {tuple(keep.shape)}; expected {shapes[self._masked]}, the first two axes of the "
                f"input {inputs[self._masked].name!r}."
            )
        return Inside(keep, self.layouts)

    def _keep(self, given: Mask, batch: Batch) -> Tensor:
        if callable(given):
            mask = given(batch)
        elif isinstance(batch, Mapping):
            mask = batch[given]
        else:
            mask = (batch if isinstance(batch, (tuple, list)) else (batch,))[self._inputs.index(given)]
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            got = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise BatchError(f"mask is {got}; expected a bool tensor of shape (samples, positions).")
        keep = mask.bool()
        if mask.is_floating_point() or not torch.equal(keep.to(mask.dtype), mask):
            raise BatchError(
                f"mask has {str(mask.dtype).removeprefix('torch.')} values other than integers 0 and 1; expected True "
                "or 1 at the positions that count, False or 0 at the others."
            )
        if not bool(keep.any()):
            raise BatchError("mask is zero at every position of a batch. Leave that batch out.")
        return keep


def without_axes(names: Sequence[str], count: int, what: str = "values") -> list[str]:
    """That some of so many values cannot be masked, if any."""
    if not names:
        return []
    return [
        f"mask: not applied to {len(names)} of {count} {what}, whose sample and position axes are unknown: "
        f"{few(names, 3)}"
    ]


class Positions(Axes):
    """The same for the values of a program, which are known by their slots."""

    def __init__(self, graph_module: GraphModule, program: Program, mask: Mask | None) -> None:
        super().__init__(graph_module, mask)
        self.program = program

    @functools.cached_property
    def _nodes(self) -> dict[int, str]:
        inputs = (node.name for node in self.graph_module.graph.find_nodes(op="placeholder"))
        own = zip(self.program.inputs, inputs, strict=True)
        return dict(own) | {step.out: step.node for step in self.program.steps}

    def of(self, batch: Batch, values: Sequence[Any]) -> Counted:
        inside = super().of(batch, values)
        layouts = {slot: inside.layouts[node] for slot, node in self._nodes.items() if node in inside.layouts}
        return Counted(inside.keep, layouts, self.program)

    def note(self, slots: Iterable[int], what: str = "values") -> list[str]:
        """How many of some values cannot be masked, once a mask was seen."""
        known = self.layouts
        if known is None:
            return []
        every = list(dict.fromkeys(slots))
        missing = [self.program.name_of(slot) for slot in every if self._nodes.get(slot) not in known]
        return without_axes(missing, len(every), what)


@dataclass(frozen=True)
class Counted(Inside):
    """The same for the slots of a program."""

    program: Program

    def inputs(self, values: Sequence[Any]) -> list[Any]:
        return [self.of(slot, value) for slot, value in zip(self.program.inputs, values, strict=True)]

    def at(self, step: Step, value: Tensor) -> Tensor:
        return self.of(step.out, value)  # type: ignore[no-any-return]

    def visiting(self, visit: Visit) -> Visit:
        """A visitor that receives only what counts."""

        def narrowed(event: Event) -> None:
            if event.step.out not in self.layouts or event.reference.shape != event.quantized.shape:
                visit(event)
                return

            counted = functools.partial(self.of, event.step.out)
            reference = counted(event.reference)
            visit(
                replace(
                    event,
                    reference=reference,
                    quantized=reference if event.quantized is event.reference else counted(event.quantized),
                    isolated={group: counted(value) for group, value in event.isolated.items()},
                    rounded=counted(event.rounded),
                    ranges=(),
                )
            )

        return narrowed

    def outputs(self, outputs: Any) -> list[Any]:
        return self._each(Layout.counted, flat_outputs(outputs), processed=False)  # type: ignore[no-any-return]

    def tensors(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The flat outputs that are tensors, as far as they count."""
        if self.keep is None:
            return list(outputs)
        slots = [leaf.number for leaf in flat_outputs(self.program.outputs) if isinstance(leaf, Slot)]
        return [self.of(slot, value) for slot, value in zip(slots, outputs, strict=True)]

    def selected(self, result: Any, *, processed: bool) -> Any:
        """The outputs as the user sees them, as far as they count; ``processed`` by a function of the user's."""
        return self._each(Layout.counted, result, processed)

    def zeroed_result(self, result: Any, *, processed: bool) -> Any:
        """The same in its own shape, with zeros for what does not count."""
        return self._each(Layout.zeroed, result, processed)

    def _each(self, change: Callable[[Layout, Tensor, Tensor], Tensor], result: Any, processed: bool) -> Any:
        if self.keep is None:
            return result
        leaves, spec = pytree.tree_flatten(result)
        layouts = self.leading(result) if processed else self.layouts_of_outputs()
        return pytree.tree_unflatten([*map(functools.partial(self._changed, change), layouts, leaves)], spec)

    def layouts_of_outputs(self) -> list[Layout | None]:
        """Of each leaf of what the graph returns; None where its axes are unknown."""
        leaves = flat_outputs(self.program.outputs)
        return [self.layouts.get(leaf.number) if isinstance(leaf, Slot) else None for leaf in leaves]

    def leading(self, result: Any) -> list[Layout | None]:
        """Of each leaf of what a user's function made of the outputs: of those that begin with the mask's axes."""
        return [
            LEADING
            if isinstance(leaf, Tensor) and self.keep is not None and leaf.shape[:2] == self.keep.shape
            else None
            for leaf in pytree.tree_leaves(result)
        ]


class _Layouts:
    """Where values have the axes of a mask, from the shapes that the graph records; ``found`` is by node name."""

    def __init__(self, graph_module: GraphModule, masked: int) -> None:
        self.graph_module = graph_module
        nodes = graph_module.graph.nodes
        sizes = {node: _sizes(node) for node in nodes}
        own = sizes[graph_module.graph.find_nodes(op="placeholder")[masked]]
        if own is None or len(own) < 2:
            raise SelectionError(
                "mask: the graph does not record the shapes of its inputs, so the axes of positions are not known. "
                "Pass a graph that torch.export made."
            )
        self.samples, self.tokens = own[:2]
        self.certain = not isinstance(self.tokens, int) or not self._may_be_features(self.tokens)
        self.found: dict[str, Layout] = {}
        modules = dict(graph_module.named_modules(remove_duplicate=False))
        for node in nodes:
            observes = node.op == "call_module" and is_observer(modules.get(str(node.target)))
            if observes or quant_ops.is_quantization(node):
                layout = self.found.get(node.all_input_nodes[0].name)
            else:
                reads = [each.name for each in node.all_input_nodes if each.op != "get_attr"]
                layout = self._layout(sizes[node], reads, op_of(node.target))
            if layout is not None and node.op != "get_attr":
                self.found[node.name] = layout

    def _may_be_features(self, size: int) -> bool:
        """Whether an axis of features, a part of it or the axis of samples can have a size, too."""
        sizes = {self.samples}
        for node in self.graph_module.graph.nodes:
            op = op_of(node.target) if node.op == "call_function" else ""
            if op not in PRODUCTS and op != "embedding":
                continue
            for value in map(self._constant, node.all_input_nodes):
                if isinstance(value, Tensor):
                    sizes.update(value.shape if op in PRODUCTS else value.shape[-1:])
        return any(isinstance(each, int) and each % size == 0 for each in sizes)

    def _constant(self, node: Node) -> Any:
        """The attribute that a node reads, perhaps rounded; None if it is no attribute."""
        while quant_ops.is_quantization(node):
            node = node.all_input_nodes[0]
        return attribute_of(self.graph_module, node)

    def _layout(self, sizes: list[Any] | None, reads: Sequence[str], op: str) -> Layout | None:
        if sizes is None:
            return None
        if not self.certain:
            leads = len(sizes) > 1 and sizes[:2] == [self.samples, self.tokens]
            return LEADING if leads and (len(sizes) > 2 or not reads) and self.tokens not in sizes[2:] else None
        tokens = tuple(axis for axis, size in enumerate(sizes) if size == self.tokens)
        if self.samples == 1:
            return Layout(None, tokens) if tokens else None
        if not tokens:
            merged = [axis for axis, size in enumerate(sizes) if size == self.samples * self.tokens]
            order = self._order(merged[0], reads) if len(merged) == 1 else ""
            return Layout(None, tuple(merged), merged=order) if order else None
        if isinstance(self.samples, int):
            return Layout(0, tokens) if sizes[0] == self.samples else None
        rows = [(axis, size / self.samples) for axis, size in enumerate(sizes) if not isinstance(size, int)]
        batch = [(axis, int(ratio)) for axis, ratio in rows if getattr(ratio, "is_Integer", ratio == 1)]
        if len(batch) != 1 or (batch[0][1] > 1 and not self._samples_first(*batch[0], reads, op)):
            return None
        return Layout(batch[0][0], tokens, repeats=batch[0][1])

    def _order(self, axis: int, reads: Sequence[str]) -> Literal["", "samples first", "positions first"]:
        """In which order a value has samples and positions in one axis: that of the value that it is read from."""
        for source in (self.found[name] for name in reads if name in self.found):
            if source.merged:
                return source.merged
            if source.batch == axis:
                return "samples first"
            if source.tokens == (axis,):
                return "positions first"
        return ""

    def _samples_first(self, axis: int, repeats: int, reads: Sequence[str], op: str) -> bool:
        """Whether heads that are folded into the axis of samples follow each other within a sample.

        Where an op repeats all samples, such as ``cat``, they do not.
        """
        found = [self.found[name] for name in reads if name in self.found]
        return any(each.batch == axis and (each.repeats == repeats or op in _FOLDING) for each in found)


def _sizes(node: Node) -> list[Any] | None:
    """The sizes of a node's value, numbers or expressions; None if it is no tensor, or not known."""
    value = node.meta.get(VALUE)
    if not isinstance(value, Tensor):
        return None
    return [size if isinstance(size, int) else size_expression(size) for size in value.shape]
