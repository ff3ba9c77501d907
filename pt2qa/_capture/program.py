"""The capture: an exported program with handles, normalised, and checked against its model."""

from __future__ import annotations

import copy
import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any, Final

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

from pt2qa._ambient import callers_device, torch_defaults
from pt2qa._capture.aliases import Aliases
from pt2qa._capture.changes import Change
from pt2qa._capture.exporting import State, check_agreement, check_model, check_stateless, export, run_eager
from pt2qa._capture.inputs import (
    as_call,
    check_inputs,
    device_of,
    moved,
    refuse_aliases,
    refuse_unusable,
    without_gradients,
)
from pt2qa._capture.normalise import DECOMPOSABLE, normalise
from pt2qa._exclusion import exports
from pt2qa._graph.handles import OpName, assign_handles, handle_of, names_of, op_of, remove_handles, walk
from pt2qa._graph.internals.torch import pytree, with_graph
from pt2qa._graph.subclasses import refuse_subclasses
from pt2qa.errors import CaptureError

_UNQUOTABLE: Final = re.compile(r'["\\\n\r\0\ud800-\udfff]')
"""What a string in double quotes cannot hold as it is."""


@dataclass(frozen=True)
class Capture:
    """A float model as one graph, with a handle on every op.

    What :func:`pt2qa.capture` returns.

    Attributes:
        program: the exported program, normalised.
        args: positional example inputs.
        kwargs: keyword example inputs.
        strict: whether it was exported with ``strict=True``.
        model: the class name of the model, for reports.
        changes: what normalisation did.
        plain: the program before normalisation, as a flow without pt2qa has it; None if nothing was changed.  It
            shares all parameters with ``program``.
        stateful: names of the buffers that forward changes without affecting its outputs.
        eager: the model itself; it is run where its outputs are compared with those of later stages, and not changed.
        dynamic_shapes: which dimensions may vary, as given.
        decompose: the kinds of ops that were decomposed.
    """

    program: ExportedProgram
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)
    strict: bool = False
    model: str = "model"
    changes: tuple[Change, ...] = ()
    stateful: tuple[str, ...] = ()
    plain: ExportedProgram | None = field(default=None, repr=False)
    eager: nn.Module | None = field(default=None, repr=False)
    dynamic_shapes: Any = field(default=None, repr=False)
    decompose: tuple[str, ...] = ()

    def module(self) -> GraphModule:
        """A new graph to run or to prepare.

        It shares parameters and buffers with the model, except for the buffers that it writes to; copy it
        (``copy.deepcopy``) before training it.  It does not check its inputs: see :meth:`check_batch`.
        """
        module = self.program.module(check_guards=False)
        for name, nested in list(module.named_children()):
            if isinstance(nested, GraphModule):
                # torch shares them with the program, and prepare_pt2e edits the bodies of loops.
                setattr(module, name, copy.deepcopy(nested))
        for name in self._written_buffers:
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, module.get_buffer(name).detach().clone())
        return module

    def check_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Checks that inputs fit the captured program.

        Raises:
            BatchError: they do not; the message names the input and says what to do.
        """
        check_inputs(self.program, args, kwargs)

    @functools.cached_property
    def names(self) -> dict[int, OpName]:
        """The name of each handle."""
        return names_of(self.program)

    @functools.cached_property
    def unanalysed(self) -> tuple[str, ...]:
        """Names of the ops inside nested graphs (``cond``, ``while_loop``, ``map``), which have no rows."""
        return tuple(
            self.names[handle].name
            for placed in walk(self.program.graph_module)
            if placed.owner is not None and (handle := handle_of(placed.node)) is not None
        )

    @functools.cached_property
    def _written_buffers(self) -> tuple[str, ...]:
        specs = {
            spec.arg.name: str(spec.target)
            for spec in self.program.graph_signature.input_specs
            if spec.kind is InputKind.BUFFER
        }
        buffers = [node for node in self.program.graph.nodes if node.op == "placeholder" and node.name in specs]
        return tuple(specs[node.name] for node in Aliases(self.program.graph_module).written(buffers))


@torch_defaults
@exports
def capture(
    model: nn.Module,
    args: Any,
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
    decompose: Collection[str] = (),
) -> Capture:
    """Exports a model, gives every op a handle, and rewrites it so that quantizers neither fail nor silently skip ops.

    The program computes what the model computes, which is checked on the example inputs; the model is not changed.  As
    in every function of pt2qa, that is under torch's own defaults: float32, no autocast, whatever the caller has set.

    Args:
        model: an ``nn.Module`` in eval mode.
        args: positional example inputs as a tuple, a single tensor, or a dict of keyword inputs.
        kwargs: keyword example inputs.
        dynamic_shapes: which dimensions may vary, as for ``torch.export.export``: ``{"x": {0: Dim("batch")}}``.
        strict: whether ``torch.export`` analyses the Python code of forward (True) or runs it (False).
        decompose: ops to decompose so that quantizers see what is inside.  Any of ``"lstm"``, ``"gru"`` and ``"rnn"``,
            which are written out step by step for a fixed sequence length; and ``"attention"``, which covers both
            ``scaled_dot_product_attention`` and the linears of ``nn.MultiheadAttention``.

    Returns:
        The capture.

    Raises:
        CaptureError: the model is in training mode, example inputs share memory or are not dense tensors,
            ``torch.export`` failed, there is nothing to decompose, or the program does not compute what the model
            computes.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    >>> captured = pt2qa.capture(model, torch.zeros(1, 4))
    >>> [op.name for op in captured.names.values()]
    ['input', '0/linear', '1/relu', '2/linear']
    """
    model = check_model(model)
    kinds = _kinds(decompose)
    args, kwargs = as_call(args, kwargs)
    refuse_unusable(args, kwargs)
    refuse_aliases(model, args, kwargs)
    args, kwargs = moved(pytree.tree_map_only(Tensor, without_gradients, (args, kwargs)), device_of(model))
    if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        # torch lets no tensor from inference mode into a run that records gradients; those of a copy are others.
        model = copy.deepcopy(model)
    state = State(model)
    # Each run draws different random numbers, which exposes a random model.
    with callers_device(device_of(model)):
        eager = run_eager(model, args, kwargs)
        stateful = check_stateless(model, state, eager, args, kwargs)
        with state:
            program = export(model, args, kwargs, dynamic_shapes, strict, eager)
    plain = _graph_copy(program)
    changes = normalise(program, kinds)
    _check_decomposed(program, kinds, changes)
    assign_handles(program)
    program.validate()
    captured = Capture(
        program,
        args,
        kwargs,
        strict,
        type(model).__name__,
        changes,
        stateful,
        plain if changes else None,
        model,
        dynamic_shapes,
        kinds,
    )
    _check_names(program)
    check_agreement(model, state, eager, captured.module(), args, kwargs)
    return captured


def export_quantized(captured: Capture, model: nn.Module) -> GraphModule:
    """Exports what torchao's ``quantize_`` made of the captured model, as the capture was, without handles.

    Raises:
        CaptureError: ``torch.export`` failed, or the graph does not compute what the model computes.
    """
    from torchao.utils import unwrap_tensor_subclass

    args, kwargs, state = captured.args, captured.kwargs, State(model)
    eager = run_eager(model, args, kwargs)
    state.restore()
    plain = unwrap_tensor_subclass(copy.deepcopy(model))
    program = export(plain, args, kwargs, captured.dynamic_shapes, captured.strict, eager)
    normalise(program, captured.decompose)
    graph = program.module(check_guards=False)
    remove_handles(graph)  # ops that quantize are numbered too
    check_agreement(model, state, eager, graph, args, kwargs)
    return graph


def with_handles(program: ExportedProgram) -> ExportedProgram:
    """Gives every input and op of a program that was exported elsewhere a handle, and changes nothing else.

    By its handles, :func:`pt2qa.pair` knows an op in any graph made from the result, whatever happened to it: prepare,
    calibrate and convert the result, then pair it with the converted graph.  :func:`capture` also rewrites the program
    where quantizers would fail or skip ops, and checks it against the model; this shows a flow as it is.

    Args:
        program: what ``torch.export.export`` returned; it is not changed.

    Returns:
        A copy of the program, with the same parameters.

    Raises:
        CaptureError: it is not an ExportedProgram, or holds weights of torchao's ``quantize_``.

    >>> program = pt2qa.with_handles(torch.export.export(torch.nn.Linear(4, 2), (torch.zeros(1, 4),)))
    >>> [op.name for op in names_of(program).values()]
    ['input', 'linear']
    """
    if not isinstance(program, ExportedProgram):
        raise CaptureError(
            f"program is of type {type(program).__name__}; expected the ExportedProgram of torch.export.export."
        )
    refuse_subclasses(program)
    copied = _graph_copy(program)
    assign_handles(copied)
    return copied


def _check_names(program: ExportedProgram) -> None:
    """Refuses names that change, or are not Python, in the code that torch writes for a graph."""
    signature = program.graph_signature
    held = (*signature.parameters, *signature.buffers, *signature.lifted_tensor_constants)
    odd = {part: None for name in held for part in name.split(".") if not _is_spelled(part)}
    if odd:
        raise CaptureError(
            "torch writes the exported program as Python code, which cannot hold the names "
            f"{', '.join(map(ascii, odd))}. ",
            "Module names with quotes or backslashes, keywords, line breaks and letters that Python reads as others "
            "are such names; rename them.",
        )


def _is_spelled(name: str) -> bool:
    """Whether Python reads a name as torch writes it: as an attribute, or in quotes."""
    if name.isidentifier():
        return not iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return not _UNQUOTABLE.search(name)


def _graph_copy(program: ExportedProgram) -> ExportedProgram:
    """A program with a copy of the graph and the same parameters, buffers and constants."""
    graph_module = copy.deepcopy(program.graph_module)
    for node, copied in zip(program.graph.nodes, graph_module.graph.nodes, strict=True):
        # Copying renames nodes that are named like a builtin, such as "input"; the signature has the original names.
        copied.name = node.name
    graph_module.recompile()
    return with_graph(program, graph_module, copy.deepcopy(program.graph_signature))


def _check_decomposed(program: ExportedProgram, kinds: tuple[str, ...], changes: tuple[Change, ...]) -> None:
    if not kinds or any(change.rule in ("recurrent op", "attention") for change in changes):
        return
    nodes = [placed.node for placed in walk(program.graph_module)]
    counts = Counter(op_of(node.target) for node in nodes if node.op == "call_function")
    has = ", ".join(f"{op} ({count})" for op, count in counts.most_common()) or "no op"
    raise CaptureError(
        f"decompose={list(kinds)}: the model has nothing of that kind to decompose; it has {has}. ",
        "Leave decompose out, or capture the model that has it. Cells (nn.LSTMCell) and ops in nested graphs are not "
        "decomposed.",
    )


def _kinds(decompose: Collection[str]) -> tuple[str, ...]:
    kinds = (decompose,) if isinstance(decompose, str) else tuple(decompose)
    unknown = [kind for kind in kinds if kind not in DECOMPOSABLE]
    if unknown:
        raise CaptureError(f"decompose has {unknown}; expected any of {list(DECOMPOSABLE)}.")
    return kinds
