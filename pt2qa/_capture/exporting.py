"""``torch.export``, with errors that say what to try, and the comparison of its program with the model."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

from pt2qa._capture.changes import graph_modules
from pt2qa._capture.inputs import detached
from pt2qa._graph.agreement import agreement_in, compare_outputs, difference
from pt2qa._graph.handles import is_quantization, op_of
from pt2qa._graph.internals.nodes import calls_guards
from pt2qa._graph.internals.torch import BATCHING, pytree
from pt2qa._graph.subclasses import refuse_subclasses
from pt2qa._report.prose import counted, few
from pt2qa.errors import CaptureError

_QUANTIZED = (
    *("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.", "torch.ao.nn.qat.", "torch.ao.nn.intrinsic.qat."),
    *("torch.ao.quantization.observer", "torch.ao.quantization.fake_quantize"),
)
"""Where the modules are that eager mode and FX put in: packed integers, observers, fake quantization."""

_FLOAT = ("FloatFunctional", "FXFloatFunctional")
"""Of these, what people write in a float model: sums and concatenations, which eager mode can only replace so."""


def check_model(model: object) -> nn.Module:
    if isinstance(model, ExportedProgram):
        raise CaptureError(
            "model is an ExportedProgram; expected the nn.Module that it was made from. ",
            "Pass that module, or program.module().",
        )
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model is of type {type(model).__name__}; expected an nn.Module in eval mode.")
    refuse_quantized(model)
    # For a graph from torch.export, the flag means nothing, and eval() raises NotImplementedError.
    training = [] if _is_exported(model) else [name for name, part in model.named_modules() if part.training]
    if training:
        names = few([repr(name) if name else "the model itself" for name in training])
        raise CaptureError(
            f"{counted(len(training), 'module is', 'modules are')} in training mode: {names}. ",
            "Call model.eval() first, for quantization-aware training too: pt2qa.quantize(..., qat=True) trains the "
            "exported graph.",
        )
    return model


def refuse_quantized(model: nn.Module) -> None:
    refuse_subclasses(model)
    parts = {name: type(part) for name, part in model.named_modules()}
    made = {
        name: kind
        for name, kind in parts.items()
        if kind.__module__.startswith(_QUANTIZED) and kind.__name__ not in _FLOAT
    }
    if made:
        kinds = few([f"{name or 'the model itself'} ({kind.__name__})" for name, kind in made.items()])
        raise CaptureError(
            f"the model was prepared or quantized by eager mode or FX already: {kinds}. ",
            "Pass the float model that it was made from; pt2qa quantizes with prepare_pt2e and convert_pt2e.",
        )
    graphs = (part for part in model.modules() if isinstance(part, GraphModule))
    ops = Counter(op_of(node.target) for graph in graphs for node in graph.graph.nodes if is_quantization(node))
    if ops:
        counts = ", ".join(f"{count} {op}" for op, count in ops.most_common())
        raise CaptureError(
            f"the model is a graph that is quantized already ({counts}). ",
            "Pass the float model; to compare it with its float graph, use pt2qa.pair(float_graph, converted).",
        )


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    strict: bool,
    outputs: Any = None,
) -> ExportedProgram:
    """``outputs`` are what the model returns on these inputs."""
    with warnings.catch_warnings():
        # nn.LSTM and nn.GRU rebuild this list of their own weights in forward; it is not state.
        warnings.filterwarnings(
            "ignore", message=r"The tensor attributes? (self\.\S*_flat_weights\S*,? ?(and )?)+ .*assigned"
        )
        # Dynamo reads the .grad of the inputs of a cond or a loop.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        try:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict)
        except Exception as error:
            if foreign := _foreign_outputs(outputs):
                raise CaptureError(
                    f"torch.export.export cannot return what forward does: {few(foreign)}. It takes tensors, numbers, "
                    "strings and None, in tuples, lists and dicts. ",
                    "Wrap the model in a module whose forward returns what you want to compare; models of transformers "
                    "return no cache with use_cache=False.",
                ) from error
            other = (
                "strict=False, which runs the Python of the forward instead of analysing it"
                if strict
                else "strict=True, which analyses the Python of the forward instead of running it"
            )
            raise CaptureError(
                f"torch.export.export failed with {type(error).__name__}: {_first_lines(error)}\n",
                f"Try {other}",
                ". What a forward may do is described at https://docs.pytorch.org/docs/stable/export.html; "
                "torch's whole message is above this one.",
            ) from error
    nodes = itertools.chain.from_iterable(each.graph.nodes for each in graph_modules(program))
    if any(getattr(node.target, "__module__", "") == BATCHING for node in nodes):
        raise CaptureError(
            "forward calls torch.vmap, or an associative_scan that does: where it begins and ends are ops that nothing "
            "reads, so prepare_pt2e removes them, and the graph fails. ",
            "Write the function for a whole batch instead.",
        )
    _read_as_buffers(program, model)
    return program


def _foreign_outputs(outputs: Any) -> list[str]:
    known = (Tensor, int, float, complex, str, bytes, type(None))
    kinds = [type(leaf).__name__ for leaf in pytree.tree_leaves(outputs) if not isinstance(leaf, known)]
    return [f"a {kind}" for kind in dict.fromkeys(kinds)]


def _read_as_buffers(program: ExportedProgram, model: nn.Module) -> None:
    """Makes constants that are buffers of the model read as such, in place.

    A buffer that forward also reaches past the module, as through a cache object, is traced as a constant unless
    ``strict=True``; what forward writes to it would be no state.
    """
    buffers = {id(buffer): name for name, buffer in model.named_buffers()}
    specs = program.graph_signature.input_specs
    names = {spec.target: spec.arg.name for spec in specs if spec.kind is InputKind.BUFFER}
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in [each for each in specs if each.kind is InputKind.CONSTANT_TENSOR]:
        held = names.get(buffers.get(id(program.constants[str(spec.target)])))
        if held is not None:
            constant = nodes[spec.arg.name]
            constant.replace_all_uses_with(nodes[held])
            program.graph.erase_node(constant)
            specs.remove(spec)
            del program.constants[str(spec.target)]
    program.graph_module.recompile()


def _is_exported(model: nn.Module) -> bool:
    return isinstance(model, GraphModule) and all(
        node.op != "call_module" or calls_guards(node) for node in model.graph.nodes
    )


def _first_lines(error: Exception) -> str:
    """torch adds pages of advice to its errors."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:3]) or "no message"


AGREEMENT_DB = 100.0
"""Below this, a float32 program computes something else: kernels that merely sum in another order agree to 120 dB."""


class State:
    """A copy of a model's current buffers, to restore them later; in a ``with``, when that ends."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [
            (f"{path}.{name}" if path else name, module, name, value, value.detach().clone())
            for path, module in model.named_modules()
            for name, value in module.named_buffers(recurse=False, remove_duplicate=False)
        ]

    def changed(self) -> tuple[str, ...]:
        return tuple(
            path
            for path, module, name, value, saved in self._saved
            if getattr(module, name, None) is not value or difference(value, saved, math.inf)
        )

    def restore(self) -> None:
        changed = set(self.changed())
        for path, module, name, value, saved in self._saved:
            # Tracing records gradients on a buffer that forward reaches past the module, as through a cache object.
            if value.grad_fn is not None:
                value.detach_()
            if path in changed:
                setattr(module, name, value)
                with torch.no_grad():
                    value.copy_(saved)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.restore()


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a model or graph returns for copies of the inputs."""
    args, kwargs = detached((args, kwargs))
    return detached(function(*args, **kwargs))


def run_eager(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        with torch.no_grad():
            return run(model, args, kwargs)
    except Exception as error:
        raise CaptureError(
            f"the model fails on its example inputs, before any export: {type(error).__name__}: {error}. ",
            "Call model(*args, **kwargs) to see where.",
        ) from error


def check_stateless(
    model: nn.Module, state: State, eager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """The buffers that the run that returned ``eager`` changed after ``state``; restores them."""
    changed = state.changed()
    found = compare_outputs(eager, run_eager(model, args, kwargs), AGREEMENT_DB) if changed else None
    state.restore()
    if found is not None:
        raise CaptureError(
            f"the model keeps state: forward changes its buffers {few([repr(name) for name in changed])}, and {found} "
            "between two runs of one input. ",
            "pt2qa compares runs of one input: take the state as an input and return the new one.",
        )
    return changed


def check_agreement(
    model: nn.Module, state: State, eager: Any, program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuses a program whose outputs are not its model's: floats to :data:`AGREEMENT_DB`, all others exactly.

    ``eager`` is what the model returned, and ``state`` are its buffers before that run.
    """
    least = agreement_in(program.graph, AGREEMENT_DB)
    with torch.no_grad():
        captured = run(program, args, kwargs)
        found = compare_outputs(eager, captured, least)
        if found is None:
            return
        own = compare_outputs(eager, run(model, args, kwargs), least)
        state.restore()
    # torch.export traces with gradients on.  Without them, torch.nn's transformer layers take another path, which
    # writes zeros where a mask covers the input.
    traced = run(model, args, kwargs)
    state.restore()
    if own is None and compare_outputs(traced, captured, least) is None:
        return
    if own is not None:
        raise CaptureError(
            f"the model is not deterministic: {own} between two runs of one input in eval mode. It is "
            "random (torch.rand, a dropout that ignores eval()) or keeps state in Python attributes. ",
            "pt2qa compares runs of one input: make forward deterministic.",
        )
    raise CaptureError(
        f"the captured program does not compute what the model computes: {found} on the example "
        "inputs. Values that forward reads from outside, branches on values and writes to views of a tensor are the "
        "usual causes. ",
        "Try the other strict=, and compare torch.export.export(model, args).module() with the model.",
    )
