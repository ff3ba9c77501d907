"""From a converted graph to TOSA's flatbuffers, and a walk over the graph around them.

Arm's reference model computes a flatbuffer as TOSA's specification says.  It returns no value inside one, so a second
graph is lowered that also returns the values to be observed; it is trusted only while its own outputs equal the first
one's bit for bit.

Imported when a model is lowered, since ExecuTorch takes seconds to import.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import tosa_reference_model
from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import LoweredBackendModule, get_lowered_backend_modules
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pt2qa.errors import DeploymentError
from pt2qa.plugins import Ran, handle_of, observing, same_outputs, with_outputs
from pt2qa_arm.backend import NOT_SAVED
from pt2qa_arm.internals import op_name, order_of, outputs_of, prints_into, traced, watching

DISTURBS = "the program computes other outputs where it is returned"
FAILS = "the program is not lowered, or does not run, where it is returned"
MOVES = ("expand_copy", "view_copy", "permute_copy", "unsqueeze_copy", "squeeze_copy", "clone")
"""Parts of a decomposed op that may stay outside of its delegate: they compute nothing."""

ROUNDING = "quantized_decomposed::"


def lower(
    specification: str,
    vela: str,
    graph: GraphModule,
    inputs: Sequence[Any],
    taps: Sequence[str],
    progress: Callable[[str], None],
) -> TOSAProgram:
    """See :meth:`pt2qa.plugins.Backend.lower`."""
    first = lowered_for(specification, graph, inputs, taps, progress)
    estimated: tuple[str, ...] = ()
    if vela:
        from pt2qa_arm.vela import estimates

        progress("compiling it with Vela")
        estimated = tuple(estimates(vela, specification, [each.processed_bytes for each in first.model.delegates]))
    return TOSAProgram(graph, specification, tuple(taps), first, estimated)


# -- running -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TOSAProgram:
    """A lowered model; see :class:`pt2qa.plugins.DeployedProgram`.

    Attributes:
        graph: the converted graph.
        specification: of TOSA.
        wanted: names of the nodes to observe.
        first: what was lowered for the example batch.
        estimated: what Vela says of it.
    """

    graph: GraphModule = field(repr=False)
    specification: str
    wanted: tuple[str, ...]
    first: Lowered = field(repr=False)
    estimated: tuple[str, ...] = ()
    _others: dict[tuple[Any, ...], Lowered] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def taps(self) -> Mapping[str, str]:
        """Why each tap cannot be observed; empty for those that can."""
        return {name: self.first.lost.get(name, "") for name in self.wanted}

    @property
    def delegated(self) -> frozenset[int]:
        """Handles of the ops that are in TOSA as a whole."""
        return self.first.model.delegated

    @property
    def facts(self) -> tuple[str, ...]:
        """What ran."""
        return (
            f"TOSA reference model {version('tosa-tools')}, {self.specification}",
            *self.first.model.facts,
            *self.estimated,
            f"lowered for each shape of the inputs: {1 + len(self._others)}",
        )

    @property
    def size(self) -> int:
        """Bytes of the flatbuffers."""
        return sum(len(each.processed_bytes) for each in self.first.model.delegates)

    def run(self, inputs: Sequence[Any]) -> Ran:
        """Runs both graphs on a batch."""
        return self._lowered_for(inputs).run(inputs)

    def run_alone(self, inputs: Sequence[Any]) -> Ran:
        """Runs a batch with nothing observed."""
        return Ran(self._lowered_for(inputs).model.run(inputs))

    def save(self, folder: Any) -> None:
        """Refuses."""
        raise DeploymentError(f"{folder}: {NOT_SAVED}")

    def _lowered_for(self, inputs: Sequence[Any]) -> Lowered:
        shape = _shape_of(inputs)
        if shape == self.first.shape:
            return self.first
        if shape not in self._others:
            found = lowered_for(self.specification, self.graph, inputs, self.wanted, lambda what: None)
            if found.lost != self.first.lost:
                changed = sorted(name for name, _ in found.lost.items() ^ self.first.lost.items())
                raise DeploymentError(
                    f"inputs of shape {shape}: other values can be observed than for the example batch: "
                    f"{', '.join(changed)}. Give batches of one shape"
                )
            self._others[shape] = found
        return self._others[shape]


@dataclass(frozen=True)
class Lowered:
    """A model lowered for inputs of one shape.

    Attributes:
        shape: of the inputs.
        model: the program as it is.
        observed: the program that also returns the tapped values, after its own outputs.
        tapped: the taps, in the order of these outputs.
        lost: by tap, why it cannot be observed.
    """

    shape: tuple[Any, ...]
    model: Delegated
    observed: Delegated | None = None
    tapped: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)

    def run(self, inputs: Sequence[Any]) -> Ran:
        """Runs both programs on a batch."""
        outputs = self.model.run(inputs)
        if self.observed is None:
            return Ran(outputs)
        every = self.observed.run(inputs)
        values = dict(zip(self.tapped, every[len(outputs) :], strict=True))
        return Ran(outputs, values, changed=not same_outputs(outputs, every[: len(outputs)]))


@dataclass(frozen=True)
class Delegated:
    """A lowered program.

    Attributes:
        around: the graph in the edge dialect, which calls the delegates.
        rejected: by node of the graph that was partitioned, why it was left.
    """

    around: GraphModule = field(repr=False)
    rejected: Mapping[Node, str] = field(default_factory=dict, repr=False)

    @cached_property
    def delegates(self) -> list[LoweredBackendModule]:
        """What was lowered to TOSA, each with its flatbuffer."""
        return list(get_lowered_backend_modules(self.around))

    @cached_property
    def outside(self) -> list[Node]:
        """The ops that ATen's kernels compute, without those that move values or round them."""
        nodes = [node for node in self.around.graph.nodes if op_name(node)]
        return [node for node in nodes if not op_name(node).startswith(ROUNDING) and _short(node) not in MOVES]

    @property
    def delegated(self) -> frozenset[int]:
        """Handles of the ops that are in a delegate as a whole; -1 if that is so of all ops without a handle."""
        inside = [node for each in self.delegates for node in each.original_module.graph.nodes if op_name(node)]
        return _handles(inside) - _handles(self.outside)

    @property
    def facts(self) -> Iterator[str]:
        """How much of the model is in TOSA, and why the rest is not."""
        count = len(self.delegates)
        ops = Counter(map(_short, self.outside))
        listed = ", ".join(f"{op} ({number})" for op, number in ops.items())
        what = f"{count} TOSA delegate{'s' * (count != 1)}"
        yield f"{what}; outside, in ATen's kernels: {listed}" if listed else f"{what}, no op outside"
        yield from self.reasons

    @property
    def reasons(self) -> Iterator[str]:
        """Why ops are outside, each once."""
        names = {node.name for node in self.outside}
        yield from dict.fromkeys(
            f"{_short(node)} is not delegated: {' '.join(reason.split())}"
            for node, reason in self.rejected.items()
            if node.name in names
        )

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of a batch, flat."""
        with torch.no_grad():
            return tuple(_Walk(self.around).run(*map(_contiguous, inputs)))


class _Walk(Interpreter):
    """Calls the reference model for each delegate, and ATen's kernels for all other ops."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # it would add a page about the graph to the message of an error

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not executorch_call_delegate:
            return super().call_function(target, args, kwargs)
        delegate, *given = args
        return computed(delegate, given)


def computed(delegate: LoweredBackendModule, given: Sequence[Tensor]) -> list[Tensor]:
    """What the reference model computes for a delegate.

    Raises:
        DeploymentError: it refuses the flatbuffer or the inputs.
    """
    arrays = [each.permute(order_of(each)).contiguous().numpy() for each in given]
    printed = list[str]()
    try:
        with prints_into(printed):
            found, status = tosa_reference_model.run(delegate.processed_bytes, arrays)
    except Exception as error:  # its own have no base
        raise DeploymentError(f"Arm's reference model could not run the program: {error}. {_said(printed)}") from error
    if status != tosa_reference_model.GraphStatus.TOSA_VALID:
        raise DeploymentError(
            f"Arm's reference model says {status.name}, expected TOSA_VALID: TOSA does not define what a device "
            f"computes here. {_said(printed)}"
        )
    sys.stderr.writelines(f"{line}\n" for line in printed)
    returned = outputs_of(delegate.original_module)
    return [_as_traced(array, traced(node)) for array, node in zip(found, returned, strict=True)]


def _said(printed: Sequence[str]) -> str:
    """What the reference model printed about an error: the lines without a place in its sources."""
    return f"It printed: {' '.join(line for line in printed if ' AT /' not in line) or 'nothing'}"


def _as_traced(array: np.ndarray[Any, Any], value: Tensor) -> Tensor:
    """An array of a delegate as the tensor that was traced: its dimensions lie in memory in the tensor's order."""
    order = order_of(value)
    laid_out = torch.from_numpy(array).reshape([value.shape[place] for place in order])
    return laid_out.permute([order.index(place) for place in range(value.dim())])


# -- lowering ----------------------------------------------------------------------------------------------------------


def lowered_for(
    specification: str,
    graph: GraphModule,
    inputs: Sequence[Any],
    taps: Sequence[str],
    progress: Callable[[str], None],
) -> Lowered:
    """The program for inputs of one shape, and the one that also returns the taps.

    Raises:
        DeploymentError: it cannot be lowered, nothing of it becomes TOSA, or it does not run.
    """
    progress("lowering the model")
    lost: dict[str, str] = {}
    found = Lowered(_shape_of(inputs), _delegated(specification, graph, inputs), lost=lost)
    if not found.model.delegates:
        raise DeploymentError(
            f"no op is delegated to {specification}: {_why_not(found.model)}. ExecuTorch's lowering to TOSA takes what "
            "Arm's quantizers marked: quantize the model with 'tosa'"
        )
    found.run(inputs)

    def attempt(wanted: list[str]) -> tuple[Lowered, str]:
        progress(f"lowering it with {len(wanted)} taps")
        try:
            observed = _delegated(specification, with_outputs(graph, wanted), inputs)
            tried = replace(found, observed=observed, tapped=tuple(wanted))
            return tried, DISTURBS if tried.run(inputs).changed else ""
        except DeploymentError:
            return found, FAILS

    return observing(taps, attempt, lost) or found


def _delegated(specification: str, graph: GraphModule, inputs: Sequence[Any]) -> Delegated:
    partitioner, rejected = watching(TosaCompileSpec(specification))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(graph, tuple(map(_contiguous, inputs)))
            edge = to_edge_transform_and_lower(exported, partitioner=[partitioner])
            around = edge.exported_program().module(check_guards=False)
    except Exception as error:
        raise DeploymentError(f"ExecuTorch could not lower the model to TOSA: {_reason(error)}") from error
    assert isinstance(around, GraphModule)
    return Delegated(around, rejected)


def _reason(error: BaseException) -> str:
    """The error that began it, without the page about the graph behind it; the others list the passes before."""
    while (inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = inner
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"


def _why_not(model: Delegated) -> str:
    reasons = [*model.reasons] or ["the partitioner gives no reason"]
    return "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _shape_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(each.shape) if isinstance(each, Tensor) else each for each in inputs)


def _short(node: Node) -> str:
    return op_name(node).partition("::")[2]


def _handles(nodes: Sequence[Node]) -> frozenset[int]:
    computing = (node for node in nodes if not op_name(node).startswith(ROUNDING))
    return frozenset(-1 if (handle := handle_of(node)) is None else handle for node in computing)
