"""One reference forward that records the backward pass, run with several gradients at once.

Each op gets its own autograd graph, from copies of its inputs that need a gradient to its output.  In the backward pass
all gradients of a value are available at once, so whatever is measured with them (the error of a site) is computed once
for all and freed at once, as are the op's graph and the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.torch import pytree
from pt2qa._simulator.program import Program, Slot, Step
from pt2qa._simulator.simulator import Body, Simulator, Values, bind
from pt2qa.errors import SimulationError


class WithoutGradient(SimulationError):
    def __init__(self, reason: str) -> None:
        super().__init__(f'{reason}. Use method="exact".')
        self.reason = reason


Gradients = list[list[Tensor] | None]
"""Of one value: for each floating-point tensor one gradient per vector; None if no gradient reaches it."""


_Record = tuple[dict[int, list[Tensor]], list[Tensor]]
"""The inputs of an op by slot, and its outputs, in an autograd graph of its own."""


class GradientRun:
    """The reference on one batch, and its backward pass; :class:`WithoutGradient` if an op has none.

    Memory: every value of the reference, as in one training step without parameter gradients; in the backward pass, the
    gradients of the live values for each vector.
    """

    def __init__(self, simulator: Simulator, values: Sequence[Any]) -> None:
        self.simulator, self.program = simulator, simulator.program
        self.tracked = tracked_slots(self.program)
        self.env = simulator.environment(values, False)
        for constant in self.program.constants:
            value = self.env[constant.slot]
            if isinstance(value, Body) or (constant.site is not None and not isinstance(value, Tensor)):
                place = f"{constant.reader} ({constant.op})"
                raise WithoutGradient(f"{place} has no gradient here: it calls a nested graph that is quantized")
            # Not detach: verification meanwhile runs the graphs, which restore the buffers they write to, and autograd
            # would count that as a change.
            self.env[constant.slot] = value.data if isinstance(value, Tensor) else value
        self._records: dict[int, _Record] = {}
        self._gradients: dict[int, Gradients] = {}
        self._fresh: set[int] = set()
        for step in self.program.steps:
            self._forward(step)

    def outputs(self) -> Any:
        """The reference's outputs; only before :meth:`backward`, which frees them."""
        return bind(self.program.outputs, self.env)

    def _forward(self, step: Step) -> None:
        if step.site is not None:
            self.env[step.out] = self.env[step.reads[0]]
            return
        reads = [slot for slot in step.reads if slot in self.tracked and float_tensors(self.env[slot])]
        if not reads or formula_of(step, self.env) is not None:
            with torch.no_grad():
                self._hold(step, self.simulator.call(step, laid_out_inputs(step, self.env), False))
            return
        if step.mutates:
            raise WithoutGradient(f"{step.name} writes to a value that other ops share, which gradients cannot follow")
        own = dict(laid_out_inputs(step, self.env))
        inputs: dict[int, list[Tensor]] = {}
        for slot in reads:
            own[slot] = pytree.tree_map_only(Tensor, needing_gradient, own[slot])
            inputs[slot] = float_tensors(own[slot])
        with torch.enable_grad(), _named(step):
            result = self.simulator.call(step, own, False)
        self._hold(step, pytree.tree_map_only(Tensor, Tensor.detach, result))
        self._records[step.index] = inputs, float_tensors(result)

    def _hold(self, step: Step, result: Any) -> None:
        leaves = pytree.tree_leaves(result) if step.out in self.tracked else []
        if any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in leaves):
            raise WithoutGradient(f"{step.name} returns complex numbers, which are not differentiated here")
        self.env[step.out] = result

    def backward(self, vectors: dict[int, Gradients], visit: Callable[[Step, Gradients], None]) -> None:
        """Runs the backward pass once for all vectors, from gradients at the output slots.

        ``visit`` is called for every step whose output a gradient reached, last first, while ``env`` has its inputs.
        """
        self._gradients = dict(vectors)
        for step in reversed(self.program.steps):
            gradients = self._gradients.pop(step.out, None)
            if gradients is not None:
                visit(step, gradients)
                fresh = step.out in self._fresh
                if step.site is not None:
                    # A duplicate of an earlier site passes its gradient on, so that both are one.
                    self._add(step.reads[0] if step.duplicate_of is None else step.duplicate_of, gradients, fresh)
                elif (formula := formula_of(step, self.env)) is None:
                    self._through(step, gradients)
                elif step.reads[0] in self.tracked:
                    assert gradients[0] is not None  # it is the only one
                    self._add(step.reads[0], [formula(step, self.env, gradients[0], fresh)], fresh=True)
            self._records.pop(step.index, None)
            self.env[step.out] = None

    def _through(self, step: Step, gradients: Gradients) -> None:
        if step.index not in self._records:
            return
        inputs, outputs = self._records[step.index]
        arrived = [
            (output, leaf)
            for output, leaf in zip(outputs, gradients, strict=True)
            if leaf is not None and output.requires_grad
        ]
        if not arrived:
            return
        leaves = [tensor for tensors in inputs.values() for tensor in tensors]
        with _named(step):
            found = iter(gradients_of([output for output, _ in arrived], leaves, [leaf for _, leaf in arrived]))
        for slot, tensors in inputs.items():
            self._add(slot, [next(found) for _ in tensors])

    def _add(self, slot: int, gradients: Gradients, fresh: bool = False) -> None:
        """Adds to the gradients of a slot; ``fresh`` ones share no memory and have no other reader."""
        if slot not in self.tracked or all(leaf is None for leaf in gradients):
            return
        known = self._gradients.get(slot)
        if known is not None:
            fresh = None not in known and None not in gradients
            pairs = zip(known, gradients, strict=True)
            gradients = [_sum(left, right, slot in self._fresh) for left, right in pairs]
        self._gradients[slot] = gradients
        (self._fresh.add if fresh else self._fresh.discard)(slot)


def gradients_of(outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Sequence[Tensor]]) -> Gradients:
    """The gradients of inputs for each vector; ``vectors`` are by output, and the autograd graph is freed."""
    rows: list[tuple[Tensor, ...]] = []
    for own in zip(*vectors, strict=True):
        more = len(rows) + 1 < len(vectors[0])
        rows.append(torch.autograd.grad(outputs, inputs, own, retain_graph=more, allow_unused=True))
    return [None if leaf[0] is None else list(leaf) for leaf in zip(*rows, strict=True)]


def tracked_slots(program: Program) -> frozenset[int]:
    """Slots whose gradient is needed: results of sites, results of ops that read a quantized constant, and everything
    downstream of them.
    """
    sites = {constant.slot for constant in program.constants if constant.site is not None}
    tracked: set[int] = set()
    for step in program.steps:
        if step.site is not None or sites.intersection(step.constants) or tracked.intersection(step.reads):
            tracked.add(step.out)
    return frozenset(tracked)


def float_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def needing_gradient(tensor: Tensor) -> Tensor:
    """The same memory as a leaf of a new autograd graph."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _sum(left: list[Tensor] | None, right: list[Tensor] | None, may_overwrite: bool) -> list[Tensor] | None:
    if left is None or right is None:
        return right if left is None else left
    # Gradients may be views of each other, so add out of place unless the left one has no other reader.
    return [a.add_(b) if may_overwrite else a + b for a, b in zip(left, right, strict=True)]


@contextmanager
def _named(step: Step) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
        raise WithoutGradient(f"{step.name} ({step.op}) has no gradient here: {error}") from error


# -- ops whose gradient is one kernel, called for all vectors without an autograd graph -------------------------------

# A gradient with no other reader is overwritten: a fresh tensor of tens of megabytes costs several times as much as the
# kernel, since the system allocates its memory page by page.

_aten = torch.ops.aten

TOGETHER = 8 << 20
"""Maximum bytes of a convolution's gradients that are copied into one batch: for small ones, reordering the weights
takes as long as multiplying by them."""

Formula = Callable[[Step, Values, list[Tensor], bool], list[Tensor]]
"""Maps a step, its input values, the gradients of its output for each vector, and whether these may be overwritten, to
the gradients of its first input.  The result has no other reader."""


def formula_of(step: Step, env: Values) -> Formula | None:
    """The backward formula of an op that reads one value; None if autograd is needed."""
    formula = _FORMULAS.get(step.function)
    if formula is None or step.kwargs or len(step.reads) != 1 or step.args[0] != Slot(step.reads[0]):
        return None
    value = env[step.reads[0]]
    return formula if value.is_floating_point() and (formula is not _conv2d or value.dim() == 4) else None


def _pointwise(
    kernel: Any, defaults: Sequence[float], step: Step, env: Values, gradients: list[Tensor], may_overwrite: bool
) -> list[Tensor]:
    value, limits = env[step.reads[0]], [*step.args[1:], *defaults[len(step.args) - 1 :]]
    if may_overwrite:
        return [kernel(gradient, value, *limits, grad_input=gradient) for gradient in gradients]
    return [kernel(gradient, value, *limits) for gradient in gradients]


def _conv2d(step: Step, env: Values, gradients: list[Tensor], may_overwrite: bool) -> list[Tensor]:
    shape, weight = env[step.reads[0]].shape, env[step.args[1].number]
    defaults: tuple[Any, ...] = ([1, 1], [0, 0], [1, 1], 1)
    stride, padding, dilation, groups = (*step.args[3:], *defaults[max(0, len(step.args) - 3) :])
    largest = max(shape.numel(), gradients[0].numel()) * weight.element_size()
    some = max(1, TOGETHER // largest)
    found: list[Tensor] = []
    for start in range(0, len(gradients), some):
        own = gradients[start : start + some]
        # The kernel uses only the shape and layout of the input, so its memory is never written.
        size = (len(own) * shape[0], *shape[1:])
        like: Any = torch.empty(size, dtype=weight.dtype, device=weight.device, memory_format=torch.channels_last)
        output = torch.cat(own) if len(own) > 1 else own[0]
        arguments = (None, stride, padding, dilation, False, [0, 0], groups, [True, False, False])
        found += _aten.convolution_backward(output, like, weight, *arguments)[0].split(shape[0])
    return found


_FORMULAS: dict[Any, Formula] = {
    _aten.relu.default: functools.partial(_pointwise, _aten.threshold_backward, (0,)),
    _aten.hardtanh.default: functools.partial(_pointwise, _aten.hardtanh_backward, (-1, 1)),
    _aten.conv2d.default: _conv2d,
}


# -- memory layouts: channels last for convolutions and the ops between them, contiguous for the rest -----------------

# With channels last, a forward and a backward pass take about half the time on CPUs, since oneDNN need not reorder.
# Results differ in the last bits, which is fine for an estimate; the exact method computes what the simulator computes.

_ANY_LAYOUT = {
    *("relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "silu", "elu", "leaky_relu", "tanh", "clamp"),
    *("add", "sub", "mul", "div", "cat", "batch_norm", "dropout", "clone", "mean", "gelu"),
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d"),
}


def laid_out_inputs(step: Step, env: Values) -> Mapping[int, Any]:
    """The inputs of an op by slot, in the layout of the op; constants are unchanged."""
    name, inputs = op_of(step.function), {slot: env[slot] for slot in (*step.constants, *step.reads)}
    for slot in step.reads:
        value = inputs[slot]
        if isinstance(value, Tensor) and value.dim() == 4 and value.layout == torch.strided:
            if name == "conv2d":
                inputs[slot] = value.contiguous(memory_format=torch.channels_last)
            elif name not in _ANY_LAYOUT:
                inputs[slot] = value.contiguous()
    return inputs
