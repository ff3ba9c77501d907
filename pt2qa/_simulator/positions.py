"""Positions that count: a mask of samples and positions, applied to every value that has these axes.

A padded batch computes values at positions that no prompt has.  They belong to no sum, so each value is reduced to its
elements at the positions that count before anything is measured.  Where a value has the axes of samples and positions
is read from the graph.  With a dynamic length, sizes are symbols, so an axis is one of positions if its size is the
symbol of the mask's.  With a fixed length, axes are known by their size alone.  Where features may have that size, too,
only values of shape (samples, positions, ...) are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree, size_expression
from pt2qa._report.prose import few
from pt2qa._simulator.batches import Batch, input_names
from pt2qa._simulator.lockstep import Event, Visit
from pt2qa._simulator.outputs import plain
from pt2qa._simulator.products import PRODUCTS
from pt2qa._simulator.program import Program, Slot, Step
from pt2qa.errors import BatchError, SelectionError

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

    def silenced(self, value: Tensor, keep: Tensor) -> Tensor:
        """The value with zeros in place of the elements that do not count."""
        inside = torch.zeros_like(value, dtype=torch.bool)
        view, index = self._indexed(inside, keep)
        view[index] = True
        return value.masked_fill(~inside, 0)

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


LEADING = Layout(0, (1,))
"""That of logits: (samples, positions, ...)."""


class Positions:
    """A mask, and where the values of a program have its axes.

    Raises:
        SelectionError: there is no input of that name.
    """

    def __init__(self, graph_module: GraphModule, program: Program, mask: Mask) -> None:
        names = input_names(graph_module)
        if isinstance(mask, str) and mask not in names:
            raise SelectionError(
                f"mask: the model has no input {mask!r}; it has {', '.join(names)}. Name one of them, or pass a "
                "function of a batch that returns a bool tensor of shape (samples, positions)."
            )
        self.graph_module, self.program, self.mask, self.names = graph_module, program, mask, names
        self.name = mask if isinstance(mask, str) else getattr(mask, "__name__", type(mask).__name__)
        self.layouts: dict[int, Layout] | None = None
        self.placeholder = -1

    def of(self, batch: Batch, values: Sequence[Any]) -> Counted:
        """The positions of a batch that count; ``values`` are its flat inputs.

        Raises:
            BatchError: the mask is no tensor of zeros and ones that fits the batch, or leaves no position.
        """
        keep = self._keep(batch)
        shapes = [tuple(value.shape[:2]) if isinstance(value, Tensor) else () for value in values]
        if self.layouts is None:
            if keep.shape not in shapes:
                raise BatchError(
                    f"mask has the shape {tuple(keep.shape)}; expected (samples, positions), the first two axes of an "
                    f"input, whose shapes begin with {[shape for shape in shapes if shape]}."
                )
            self.placeholder = shapes.index(tuple(keep.shape))
            self.layouts = _Layouts(self.graph_module, self.program, self.placeholder).found()
        elif shapes[self.placeholder] != tuple(keep.shape):
            raise BatchError(
                f"mask has the shape {tuple(keep.shape)}; expected {shapes[self.placeholder]}, the first two axes of "
                f"the input {self.program.input_names[self.placeholder]!r}."
            )
        return Counted(keep, self.layouts, self.program)

    def note(self, slots: Iterable[int], what: str = "values") -> list[str]:
        """How many of some values cannot be masked, once a batch was seen."""
        every = list(dict.fromkeys(slots))
        missing = [slot for slot in every if slot not in (self.layouts or {})]
        if not missing:
            return []
        names = few([self._name(slot) for slot in missing], 3)
        have = "has" if len(missing) == 1 else "have"
        return [
            f"mask: {len(missing)} of {len(every)} {what} {have} no certain axes of samples and positions, so all "
            f"positions count: {names}"
        ]

    def _name(self, slot: int) -> str:
        producer = self.program.producers.get(slot)
        if producer is None:
            return dict(zip(self.program.inputs, self.program.input_names, strict=True)).get(slot, "a constant")
        return self.program.steps[producer].name

    def _keep(self, batch: Batch) -> Tensor:
        if callable(self.mask):
            mask = self.mask(batch)
        elif isinstance(batch, Mapping):
            mask = batch[self.mask]
        else:
            mask = (batch if isinstance(batch, (tuple, list)) else (batch,))[self.names.index(self.mask)]
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
            raise BatchError("mask leaves no position of a batch. Leave such a batch out.")
        return keep


@dataclass(frozen=True)
class Counted:
    """The positions of one batch that count.

    Attributes:
        keep: bool, of shape (samples, positions).
        layouts: by slot, where values have these axes.
    """

    keep: Tensor
    layouts: Mapping[int, Layout]
    program: Program

    def of(self, slot: int, value: Any) -> Any:
        """The elements of a slot's value that count; the value itself if it has no such axes."""
        layout = self.layouts.get(slot)
        return value if layout is None or not isinstance(value, Tensor) else layout.counted(value, self.keep)

    def filled(self, slot: int, value: Tensor) -> Tensor:
        """A slot's value with copies of elements that count in place of the others; as it is without such axes."""
        layout = self.layouts.get(slot)
        return value if layout is None else layout.filled(value, self.keep)

    def inputs(self, values: Sequence[Any]) -> list[Any]:
        """A batch's flat inputs, as far as they count."""
        return [self.of(slot, value) for slot, value in zip(self.program.inputs, values, strict=True)]

    def at(self, step: Step, value: Tensor) -> Tensor:
        """The elements of a step's value that count."""
        return self.of(step.out, value)  # type: ignore[no-any-return]

    def visiting(self, visit: Visit) -> Visit:
        """A visitor that receives only what counts."""

        def narrowed(event: Event) -> None:
            if event.step.out not in self.layouts or event.reference.shape != event.quantized.shape:
                visit(event)
                return

            def counted(value: Any) -> Any:
                return self.of(event.step.out, value)

            isolated = {group: counted(value) for group, value in event.isolated.items()}
            rounded = counted(event.rounded)
            quantized = event.quantized
            reference = counted(event.reference)
            quantized = reference if quantized is event.reference else counted(quantized)
            visit(
                replace(event, reference=reference, quantized=quantized, isolated=isolated, rounded=rounded, ranges=())
            )

        return narrowed

    def outputs(self, outputs: Any) -> list[Any]:
        """The leaves of what the graph returned, as far as they count."""
        leaves, layouts = pytree.tree_leaves(plain(outputs)), self.layouts_of_outputs()
        return [
            leaf if layout is None or not isinstance(leaf, Tensor) else layout.counted(leaf, self.keep)
            for leaf, layout in zip(leaves, layouts, strict=True)
        ]

    def tensors(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The flat outputs that are tensors, as far as they count."""
        slots = [leaf.number for leaf in pytree.tree_leaves(plain(self.program.outputs)) if isinstance(leaf, Slot)]
        return [self.of(slot, value) for slot, value in zip(slots, outputs, strict=True)]

    def selected(self, result: Any, *, processed: bool) -> Any:
        """The outputs as the user sees them, as far as they count; ``processed`` by a function of the user's."""
        return self._each(Layout.counted, result, processed)

    def silenced(self, result: Any, *, processed: bool) -> Any:
        """The same in its own shape, with zeros for what does not count."""
        return self._each(Layout.silenced, result, processed)

    def _each(self, change: Callable[[Layout, Tensor, Tensor], Tensor], result: Any, processed: bool) -> Any:
        leaves, spec = pytree.tree_flatten(result)
        layouts = self.leading(result) if processed else self.layouts_of_outputs()
        pairs = zip(leaves, layouts, strict=True)
        return pytree.tree_unflatten([leaf if at is None else change(at, leaf, self.keep) for leaf, at in pairs], spec)

    def layouts_of_outputs(self) -> list[Layout | None]:
        """Of each leaf of what the graph returns; None where it has no certain axes."""
        leaves = pytree.tree_leaves(plain(self.program.outputs))
        return [self.layouts.get(leaf.number) if isinstance(leaf, Slot) else None for leaf in leaves]

    def leading(self, result: Any) -> list[Layout | None]:
        """Of each leaf of what a user's function made of the outputs: of those that begin with the mask's axes."""
        return [
            LEADING if isinstance(leaf, Tensor) and leaf.shape[:2] == self.keep.shape else None
            for leaf in pytree.tree_leaves(result)
        ]


class _Layouts:
    """Finds where the values of a program have the axes of a mask, from the shapes that the graph records."""

    def __init__(self, graph_module: GraphModule, program: Program, placeholder: int) -> None:
        self.program = program
        self.nodes = {node.name: node for node in graph_module.graph.nodes}
        inputs = graph_module.graph.find_nodes(op="placeholder")
        self.inputs = [self._sizes(node.name) for node in inputs]
        masked = self.inputs[placeholder]
        if masked is None or len(masked) < 2:
            raise SelectionError(
                "mask: the graph does not record the shapes of its inputs, so the axes of positions are not known. "
                "Pass a graph that torch.export made."
            )
        self.samples, self.tokens = masked[:2]
        self.known: dict[int, Layout] = {}
        self.by_size = isinstance(self.tokens, int)
        self.certain = not self.by_size or not self._may_be_features(self.tokens)

    def found(self) -> dict[int, Layout]:
        """By slot; without those of values that have no certain axes."""
        for slot, sizes in zip(self.program.inputs, self.inputs, strict=True):
            self._add(slot, self._layout(sizes, ()))
        for step in self.program.steps:
            if step.site is not None:
                self._add(step.out, self.known.get(step.reads[0]))
            else:
                self._add(step.out, self._layout(self._sizes(step.node), step.reads))
        return self.known

    def _add(self, slot: int, layout: Layout | None) -> None:
        if layout is not None:
            self.known[slot] = layout

    def _sizes(self, name: str) -> list[Any] | None:
        value = self.nodes[name].meta.get(VALUE) if name in self.nodes else None
        if not isinstance(value, Tensor):
            return None
        return [size if isinstance(size, int) else size_expression(size) for size in value.shape]

    def _may_be_features(self, size: int) -> bool:
        """Whether an axis of features, a part of it or the axis of samples can have a size, too."""
        sizes = {self.samples}
        for constant in self.program.constants:
            if isinstance(constant.reference, Tensor):
                if constant.op in PRODUCTS:
                    sizes.update(constant.reference.shape)
                elif constant.op == "embedding":
                    sizes.add(constant.reference.shape[-1])
        return any(isinstance(each, int) and each % size == 0 for each in sizes)

    def _layout(self, sizes: list[Any] | None, reads: Sequence[int]) -> Layout | None:
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
        if len(batch) != 1 or (batch[0][1] > 1 and not self._samples_first(batch[0][0], reads)):
            return None
        return Layout(batch[0][0], tokens, repeats=batch[0][1])

    def _order(self, axis: int, reads: Sequence[int]) -> Literal["", "samples first", "positions first"]:
        """In which order a value has samples and positions in one axis: that of the value that it is read from."""
        for source in (self.known[slot] for slot in reads if slot in self.known):
            if source.merged:
                return source.merged
            if source.batch == axis:
                return "samples first"
            if source.tokens == (axis,):
                return "positions first"
        return ""

    def _samples_first(self, axis: int, reads: Sequence[int]) -> bool:
        """Whether heads that are folded into the axis of samples follow each other within a sample."""
        return any(self.known[slot].batch == axis for slot in reads if slot in self.known)
