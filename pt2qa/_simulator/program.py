"""What a simulator runs: a flat list of steps over numbered slots.

Every value of the graph has a slot.  Constants (weights, buffers) are slots that are filled before the first step, with
two values: one for the reference and one for the quantized model.  A :class:`Site` is a place where a value is
quantized; an activation site is a separate step, a weight site belongs to a constant slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.fx import GraphModule

from pt2qa._grouping import grouped
from pt2qa._simulator.stored import Stored, read

SiteKind = Literal["activation", "weight", "bias"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A placeholder, in the arguments of a step, for the value of a slot."""

    number: int


@dataclass(frozen=True, slots=True)
class QuantParams:
    """How one quantize-dequantize pair rounds.

    Attributes:
        dtype: of the quantized values, such as ``int8``; ``float16`` for a value that is stored in half precision.
        scale: one number, one per channel (1-d float tensor), one per block (with as many dimensions as the value has),
            or None if each batch has its own.
        zero_point: like ``scale``.
        quant_min: smallest integer.
        quant_max: largest integer.
        axis: channel axis; None if the whole tensor has one scale.
        dynamic: whether scale and zero point are computed from each batch.
        slice_axes: the axes along which values share a computed scale; empty if the whole tensor does.
        block: the size of the blocks that have a scale each, such as (1, 32) of a linear weight in groups; empty if the
            whole tensor or a channel has one.
    """

    dtype: str
    scale: float | Tensor | None = None
    zero_point: int | Tensor | None = None
    quant_min: int = 0
    quant_max: int = 0
    axis: int | None = None
    dynamic: bool = False
    slice_axes: tuple[int, ...] = ()
    block: tuple[int, ...] = ()

    def along(self, value: Tensor) -> tuple[Any, Any]:
        """Scale and zero point: numbers, or tensors that broadcast against a value."""
        return self._along(self.scale, value), self._along(self.zero_point, value)

    def _along(self, each: Any, value: Tensor) -> Any:
        if not isinstance(each, Tensor) or each.numel() == 1:
            return each
        each = each.to(value.device)
        if self.axis is not None:
            return each.reshape([-1 if axis == self.axis % value.dim() else 1 for axis in range(value.dim())])
        for axis, size in enumerate(self.block):
            each = each.repeat_interleave(size, axis) if size > 1 else each
        return each

    @property
    def largest_scale(self) -> float:
        """The scale, or the largest of several; nan if there is none."""
        if self.scale is None:
            return float("nan")
        return float(self.scale.max()) if isinstance(self.scale, Tensor) else float(self.scale)

    @property
    def single_zero_point(self) -> float:
        """The zero point if the whole tensor has one, else nan."""
        if isinstance(self.zero_point, Tensor):
            values = self.zero_point.unique()
            return float(values[0]) if values.numel() == 1 else float("nan")
        return float("nan") if self.zero_point is None else float(self.zero_point)


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a value is quantized.

    Attributes:
        index: position in ``pair.sites``.
        kind: ``activation``, ``weight`` or ``bias``.
        name: the op whose output this is (activation), or the op that reads it (weight, bias).
        op: that op's type, such as ``conv2d``.
        handle: that op's handle; -1 if it has none.
        readers: names of the ops that read the quantized value.
        params: how it rounds.
        source: slot of the value before rounding; for a constant, the slot of the constant itself.
        result: slot of the value after rounding.
        exact: whether the fused op computes it; otherwise the converted ops themselves do.
        nested: whether it is inside a nested graph, of a loop, say: its error is that of all iterations together, and
            ``source`` and ``result`` are the slot of that graph.
    """

    index: int
    kind: SiteKind
    name: str
    op: str
    handle: int
    readers: tuple[str, ...]
    params: QuantParams
    source: int
    result: int
    exact: bool
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Nested:
    """A nested graph that an op calls, as a program; ``sites`` are its sites' numbers in the program around it."""

    program: Program
    sites: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A slot that is filled before the first step; ``op``, ``handle`` and ``argument`` say where its reader has it.

    Attributes:
        reference: its value in the reference.
        stored: what the quantized model keeps of its own; a :class:`Stored` constant if it is rounded.  Of a nested
            graph with sites, this and the reference are one :class:`Nested`.
        attribute: qualified name in the float model, if known, such as ``layer1.0.conv1.weight``.
        is_parameter: whether it is a Parameter of the float model, not a buffer or a literal.
        reader: name of the op that reads it first; empty if none does.
        site: index of its site; None if it stays in float.
        weight_site: for one that stays in float, the site of the weight that its reader has: with that it is the
            quantized model's, which may be another, such as a repaired bias.
        nested_site: the site of a nested graph that rounds it, where it is an argument of the op, such as a weight.
        mutated: whether the graph writes to it; every run then starts from the captured value.
    """

    slot: int
    reference: Any
    stored: Any
    attribute: str = ""
    is_parameter: bool = False
    reader: str = ""
    op: str = ""
    handle: int = -1
    argument: int = -1
    site: int | None = None
    weight_site: int | None = None
    nested_site: int | None = None
    mutated: bool = False

    @property
    def quantized(self) -> Any:
        """The value that the quantized model reads; of a weight that is not kept in float, made at each call."""
        return read(self.stored)

    @property
    def by_rows(self) -> Any:
        """The value that the quantized model reads, or the :class:`Integers` that it would be made from."""
        return self.stored.by_rows if type(self.stored) is Stored else self.stored


@dataclass(slots=True)
class Step:
    """One op, or one activation site if ``site`` is set.

    Attributes:
        out: slot that it fills.
        reads: slots of activations that it reads, without constants, each once.
        function: the op; for a site, the quantize-dequantize function.
        args, kwargs: its arguments, with :class:`Slot` in place of values.
        name, op, module, handle: as reports show them; see ``pt2qa._graph.handles``.
        module_stack: call keys and ``(path, class)`` of the modules around it, outermost first.
        node: name of the op's node in the converted graph; for a site, that of its dequantize node.
        duplicate_of: slot of an earlier site of the same value with the same parameters, whose result this one has.
        mutates: whether it writes to its first argument (aliases prevent a functional form).
        converted: for a site, the ops of the converted graph that ``function`` must equal.
        in_place: in-place form of ``function``, for inputs that are not read again.
        keeps_strides: whether the graph has the in-place form, so that the output has the strides of the input.
        releases: slots that no later step reads.
        reuse, reuse_all_on: whether no later step reads its first input, for any choice of sites / with all sites on.
    """

    index: int
    out: int
    reads: tuple[int, ...]
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    constants: tuple[int, ...] = ()
    name: str = ""
    op: str = ""
    module: str = ""
    module_type: str = ""
    handle: int = -1
    module_stack: tuple[tuple[str, str, str], ...] = ()
    node: str = ""
    site: int | None = None
    duplicate_of: int | None = None
    region: int = -1
    mutates: bool = False
    converted: Callable[..., Any] | None = None
    in_place: Callable[..., Any] | None = None
    keeps_strides: bool = False
    releases: tuple[int, ...] = ()
    reuse: bool = False
    reuse_all_on: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """The ops that are quantized as one unit, with the sites around them.

    Attributes:
        index: position in ``pair.regions``.
        name: its first op's name.
        ops: names of its ops in graph order.
        steps: their step numbers.
        sites: indices of the sites of its inputs, weights and biases, and of those that quantize its outputs.
    """

    index: int
    name: str
    ops: tuple[str, ...]
    steps: tuple[int, ...]
    sites: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered graph; see :mod:`pt2qa._simulator.lower`."""

    slots: int
    inputs: tuple[int, ...]
    input_names: tuple[str, ...]
    input_handles: tuple[int, ...]
    constants: tuple[Constant, ...]
    steps: tuple[Step, ...]
    sites: tuple[Site, ...]
    regions: tuple[Region, ...]
    outputs: Any
    producers: dict[int, int]
    notes: tuple[str, ...]
    may_share: bool
    weight_cache: int

    @property
    def whole_graphs(self) -> frozenset[int]:
        """The sites that stand for all quantization of a nested graph, whose own sites are not known."""
        graphs = (each.site for each in self.constants if isinstance(each.reference, GraphModule))
        return frozenset(site for site in graphs if site is not None)

    def name_of(self, slot: int) -> str:
        """The name of the op or the input whose value a slot has, rounded or not."""
        if (producer := self.producers.get(slot)) is not None:
            return self.steps[producer].name
        return dict(zip(self.inputs, self.input_names, strict=True)).get(slot, "a constant")

    def readers(self) -> Mapping[int, Sequence[Step]]:
        """The steps that read each slot; none of one that is only returned."""
        return grouped((slot, step) for step in self.steps for slot in step.reads)

    def unrounded(self, slot: int) -> int:
        return unrounded(self.steps, self.producers, slot)


def unrounded(steps: Sequence[Step], producers: Mapping[int, int], slot: int) -> int:
    """The slot of a value before any site rounded it; a site may read the result of another one."""
    while (producer := producers.get(slot)) is not None and steps[producer].site is not None:
        slot = steps[producer].reads[0]
    return slot
