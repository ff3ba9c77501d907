"""Where a batch goes wrong: the first NaN, or the first infinity in only one of the two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._simulator import op_rules
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.lockstep import Event, lockstep
from pt2qa._simulator.outputs import plain
from pt2qa._simulator.simulator import Simulator

Side = Literal["batch", "both", "reference", "quantized"]
What = Literal["NaN", "infinite"]


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first value of a batch that is not finite but should be.

    Infinities that both models have at the same positions do not count, because masks consist of them.

    Attributes:
        name: the op or input that produces it.
        side: which model; ``batch`` if the inputs contain it.
        sample: the first sample that has one, from 0 in its batch; -1 if the value has no samples.
        origin: the op or input where the infinities that the op reads begin; empty if the op itself produces them.
    """

    name: str
    side: Side
    what: What
    sample: int
    origin: str = ""


def first_nonfinite(simulator: Simulator, values: Sequence[Any]) -> NonFinite | None:
    """Runs both models again and finds the first value that is NaN in one of them, or infinite in only one."""
    return _Search(simulator, values).run()


class _Search:
    def __init__(self, simulator: Simulator, values: Sequence[Any]) -> None:
        self.simulator, self.program, self.values = simulator, simulator.program, values
        self.samples = count_samples(list(values))
        self.inputs = dict(zip(self.program.inputs, self.program.input_names, strict=True))
        self.origins: dict[int, str] = {}
        """For each slot whose value is not finite, the op or input where that began."""
        self.found: NonFinite | None = None

    def run(self) -> NonFinite | None:
        for (slot, name), value in zip(self.inputs.items(), self.values, strict=True):
            self._look(slot, name, value, value)
        if self.found is None:
            lockstep(self.simulator, self.values, self._visit)
        return self.found

    def _visit(self, event: Event) -> None:
        step = event.step
        if self.found is not None or (step.site is None and op_rules.is_uninitialised(step.function)):
            return
        # At a site, the event compares the value before rounding with the rounded one; the value is its source's.
        slot = step.reads[0] if step.site is not None else step.out
        read = [self.origins[each] for each in step.reads if each in self.origins] if step.site is None else []
        self._look(slot, self.program.name_of(slot), event.reference, event.quantized, next(iter(read), ""))
        if slot in self.origins:
            self.origins[step.out] = self.origins[slot]

    def _look(self, slot: int, name: str, reference: Any, quantized: Any, origin: str = "") -> None:
        pairs = zip(pytree.tree_leaves(plain(reference)), pytree.tree_leaves(plain(quantized)), strict=True)
        for ref, quant in pairs:
            if _is_finite(ref) and _is_finite(quant):
                continue
            self.origins.setdefault(slot, origin or name)
            culprit = unlike(ref, quant)
            if culprit is not None:
                what, side, wrong = culprit
                side = "batch" if slot in self.inputs else side
                sample = sample_of(wrong, self.samples)
                self.found = NonFinite(name, side, what, sample, "" if origin == name else origin)
                return


def sample_of(wrong: Tensor, samples: int) -> int:
    """The first sample with a wrong value; -1 if the value has no samples."""
    if not wrong.dim() or wrong.shape[0] != samples:
        return -1
    return int(wrong.reshape(samples, -1).any(1).nonzero()[0])


def _may_break(value: Any) -> bool:
    # torch cannot test 8-bit float types for NaN.
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.itemsize > 1


def _is_finite(value: Any) -> bool:
    return not _may_break(value) or bool(value.isfinite().all())


def is_empty(samples: int, outputs: Any) -> bool:
    """Whether a batch is empty: it has no sample, and none of its outputs has a finite number.

    A batch in which only the first input has no element, such as a cache that starts empty, is not empty.
    """
    return not samples and not any(
        isinstance(value, Tensor) and bool(value.isfinite().any()) for value in pytree.tree_leaves(plain(outputs))
    )


def unlike(ref: Any, quant: Any) -> tuple[What, Side, Tensor] | None:
    """What is wrong with a value, in which model, and at which elements; nothing is with infinities that both share."""
    if not (_may_break(ref) and _may_break(quant)) or (_is_finite(ref) and _is_finite(quant)):
        return None
    nans = [value.isnan() for value in (ref, quant)]
    what: What = "NaN" if any(bool(each.any()) for each in nans) else "infinite"
    alone = ref != quant if ref.shape == quant.shape else True
    places = nans if what == "NaN" else [value.isinf() & alone for value in (ref, quant)]
    sides = [bool(each.any()) for each in places]
    if not any(sides):
        return None
    side: Side = "both" if all(sides) else "reference" if sides[0] else "quantized"
    return what, side, places[sides.index(True)]
