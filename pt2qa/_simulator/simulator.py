"""Runs a :class:`Program`: as the reference, as the quantized model, or with any choice of sites."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._exclusion import computes
from pt2qa._graph.internals.torch import pytree
from pt2qa._interrupts import raise_if_interrupted
from pt2qa._simulator.graph_run import GraphRun, out_of_range
from pt2qa._simulator.program import Nested, Program, Site, Slot, Step
from pt2qa._simulator.stored import read
from pt2qa._simulator.strides import copied, copied_together, is_plain, with_strides

Values = Sequence[Any] | Mapping[int, Any]
"""Values by slot number; constants may be :class:`~pt2qa._simulator.stored.Stored`."""


class Simulator:
    """Computes the reference, the quantized model, or the model with any choice of sites quantized.

    Runs record no gradients, never change their inputs, and keep a value only as long as a later step reads it.
    """

    def __init__(self, program: Program, *, fused: bool = True) -> None:
        self.program = program
        self.off: list[Any] = [None] * program.slots
        self.on: list[Any] = [None] * program.slots
        for constant in program.constants:
            self.off[constant.slot], self.on[constant.slot] = constant.reference, constant.stored
            if isinstance(constant.stored, Nested):
                body = Body(Simulator(constant.stored.program), constant.stored.sites, True)
                self.off[constant.slot], self.on[constant.slot] = body.switched(False), body
        self.fused = fused

    @property
    def fused(self) -> bool:
        """Whether the fused ops compute the sites, those of nested graphs too; else the converted ops."""
        return self._fused

    @fused.setter
    def fused(self, fused: bool) -> None:
        self._fused = fused
        for value in self.on:
            if isinstance(value, Body):
                value.simulator.fused = fused

    @computes
    def run(
        self,
        values: Sequence[Any],
        on: bool | Collection[int] = True,
        visit: Callable[[Step, Any], None] = lambda step, value: None,
    ) -> Any:
        """One forward pass over flat inputs, which returns the graph's outputs.

        ``on`` is True for the quantized model, False for the reference, or the indices of the sites to quantize;
        ``visit`` is called with every step and its value, which it must not keep.
        """
        walk = self.walk(values, on)
        with torch.no_grad():
            while True:
                try:
                    step, value = next(walk)
                except StopIteration as end:
                    return end.value
                visit(step, value)

    def walk(
        self, values: Sequence[Any], on: bool | Collection[int] = True
    ) -> Generator[tuple[Step, Any], Any | None, Any]:
        """:meth:`run` step by step: yields each step with its value, which later steps may overwrite.

        A value that is sent back takes its place; it may be overwritten too.  The caller must disable gradients around
        each step.
        """
        program = self.program
        all_on, all_off = on is True, on is False
        chosen = frozenset() if isinstance(on, bool) else frozenset(on)
        env = self.environment(values, on)
        for step in program.steps:
            raise_if_interrupted()
            source, first = step.reads[0] if step.reads else -1, step.duplicate_of
            reuse = step.reuse_all_on if all_on else step.reuse
            if step.site is None:
                env[step.out] = self.call(step, env, reuse)
            elif all_off or not (all_on or step.site in chosen):
                env[step.out] = env[source]
            elif first is not None and (all_on or program.steps[program.producers[first]].site in chosen):
                env[step.out] = env[first]
            else:
                env[step.out] = self.site_function(step)(env[source], out=env[source] if reuse else None)
            instead = yield step, env[step.out]
            if instead is not None:
                env[step.out] = instead
            for slot in step.releases:
                env[slot] = None
        return bind(program.outputs, env)

    def environment(self, values: Sequence[Any], on: bool | Collection[int]) -> list[Any]:
        """The values of all slots before the first step, with these sites on."""
        env = list(self.on if on is True else self.off)
        for constant in self.program.constants:
            site = constant.weight_site if constant.site is None else constant.site
            if not isinstance(on, bool) and site is not None and site in on:
                env[constant.slot] = constant.stored
            if not isinstance(on, bool) and isinstance(constant.stored, Nested):
                env[constant.slot] = self.on[constant.slot].switched(on)
        written = [constant.slot for constant in self.program.constants if constant.mutated]
        for slot, value in zip(written, copied_together([read(env[slot]) for slot in written]), strict=True):
            env[slot] = value
        for slot, value in zip(self.program.inputs, values, strict=True):
            env[slot] = copied(value) if not self.program.may_share and isinstance(value, Tensor) else value
        return env

    def call(self, step: Step, env: Values, reuse: bool) -> Any:
        """Runs an op; with ``reuse`` it may overwrite its first input, if it has an in-place form.

        The output has the strides that the graph's own form of the op returns.
        """
        args, kwargs = bind(step.args, env), bind(step.kwargs, env) if step.kwargs else {}
        if step.in_place is None:
            try:
                return step.function(*args, **kwargs)
            except IndexError as error:
                raise out_of_range(step.name, error) from error
        same_strides = step.keeps_strides or is_plain(args[0])
        if reuse and same_strides:
            return step.in_place(*args, **kwargs)
        result = step.function(*args, **kwargs)
        return with_strides(result, args[0].stride()) if step.keeps_strides else result

    def site_function(self, step: Step) -> Callable[..., Any]:
        """The fused op of a site, or the converted ops if this simulator does not fuse."""
        return step.function if self.fused or step.converted is None else step.converted


@dataclass(frozen=True, slots=True)
class Body:
    """A nested graph as the op around it calls it, with some of its sites on.

    Attributes:
        simulator: of its program; verification may switch fused ops off in it.
        sites: for each of its sites, the number of that site in the program around it.
        on: True for all of its sites, False for none, or their own numbers.
    """

    simulator: Simulator
    sites: tuple[int, ...]
    on: bool | frozenset[int]

    def __call__(self, *values: Any) -> Any:
        return self.simulator.run(values, self.on)

    def switched(self, on: bool | Collection[int]) -> Body:
        """The same with other sites on, given as for the program around it."""
        if isinstance(on, bool):
            return replace(self, on=on)
        return replace(self, on=frozenset(own for own, site in enumerate(self.sites) if site in on))

    def own(self, site: Site) -> Site:
        return self.simulator.program.sites[self.sites.index(site.index)]


def bind(template: Any, env: Values) -> Any:
    kind = type(template)
    if kind is Slot:
        return read(env[template.number])
    if isinstance(template, tuple):
        return tuple([bind(item, env) for item in template])
    if isinstance(template, list):
        return [bind(item, env) for item in template]
    if isinstance(template, dict):
        return {key: bind(item, env) for key, item in template.items()}
    if kind is slice:
        return slice(bind(template.start, env), bind(template.stop, env), bind(template.step, env))
    return template


def tensors_equal(left: Any, right: Any) -> bool:
    """Whether two nested results have the same values; NaN equals NaN."""
    left_leaves, right_leaves = pytree.tree_leaves(left), pytree.tree_leaves(right)
    if len(left_leaves) != len(right_leaves):
        return False
    for a, b in zip(left_leaves, right_leaves, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.dtype != b.dtype or a.shape != b.shape or not (torch.equal(a, b) or _equal_with_nan(a, b)):
                return False
        elif type(a) is not type(b) or a != b:
            return False
    return True


def _equal_with_nan(a: Tensor, b: Tensor) -> bool:
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())


@computes
def graph_values(graph_module: GraphModule, values: Sequence[Any], visit: Callable[[torch.fx.Node, Any], Any]) -> Any:
    """Runs a graph node by node and returns its outputs, flat.

    ``visit`` receives every value as it is computed; what it returns, if not None, takes the value's place.
    """
    with torch.no_grad():
        return GraphRun(graph_module, visit).run(*values)
