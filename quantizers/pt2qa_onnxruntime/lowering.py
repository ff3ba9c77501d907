"""From a converted graph to two ONNX models: the model, and the model with further outputs.

Imported when a model is lowered, since torch.onnx takes seconds to import.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import onnx
import torch
from torch.fx import GraphModule

from pt2qa.errors import DeploymentError
from pt2qa.plugins import handle_of, observing, with_outputs
from pt2qa_onnxruntime.backend import ONNXRuntimeBackend, ONNXRuntimeProgram
from pt2qa_onnxruntime.kernels import Kernels, dequantized_outputs, optimized_graph

OPSET = 21
"""The first with 16-bit and 4-bit integers."""

DISTURBS = "the model computes other outputs where it is returned"
EARLY = "ONNX Runtime rounds it where it is made, and not where the graph does"
FAILS = "the model does not run where it is returned"


def lower(
    backend: ONNXRuntimeBackend,
    graph: GraphModule,
    inputs: Sequence[Any],
    taps: Sequence[str],
    dynamic_shapes: tuple[Any, ...] | None,
    progress: Callable[[str], None],
) -> ONNXRuntimeProgram:
    """See :meth:`pt2qa.plugins.Backend.lower`."""
    progress("exporting the model")
    program = exported(graph, inputs, dynamic_shapes)
    nodes = program.exported_program.graph.nodes
    handles = {node.name: handle for node in nodes if (handle := handle_of(node)) is not None}
    plain = ONNXRuntimeProgram(backend, program.model_proto.SerializeToString())
    plain.run(inputs)
    kernels = Kernels.of(plain)
    states = dict[int, list[bool]]()
    for name, on_integers in kernels.nodes.items():
        if name in handles:
            states.setdefault(handles[name], []).append(on_integers)
    delegated = frozenset(handle for handle, each in states.items() if all(each))
    lost: dict[str, str] = {}
    found = replace(plain, lost=lost, delegated=delegated, facts=(*kernels.facts, *_lost_limits(graph)))
    progress(f"exporting it with {len(taps)} taps")
    every = exported(with_outputs(graph, taps), inputs, dynamic_shapes).model_proto
    own = len(every.graph.output) - len(taps)
    position = {name: own + number for number, name in enumerate(taps)}
    copies = dequantized_outputs(every)

    def attempt(names: list[str]) -> tuple[ONNXRuntimeProgram, str]:
        wanted = [name for name in names if name not in lost]
        observed = _returning(every, [*range(own), *(position[name] for name in wanted)])
        tried = replace(found, observed=observed, tapped=tuple(wanted))
        try:
            changed = tried.run(inputs).changed
        except DeploymentError:
            return tried, FAILS
        moved = dequantized_outputs(optimized_graph(backend, observed))[own:]
        early = [name for name, each in zip(wanted, moved, strict=True) if each and not copies[position[name]]]
        lost.update(dict.fromkeys(early, EARLY))
        return attempt(wanted) if early else (tried, DISTURBS if changed else "")

    return observing(taps, attempt, lost) or found


def exported(
    graph: GraphModule, inputs: Sequence[Any], dynamic_shapes: tuple[Any, ...] | None
) -> torch.onnx.ONNXProgram:
    """A graph as torch.onnx exports it.

    Raises:
        DeploymentError: it does not.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(graph, tuple(inputs), dynamic_shapes=dynamic_shapes)
            found = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
    except Exception as error:
        raise DeploymentError(f"torch.onnx could not export the model: {_reason(error)}") from error
    assert found is not None, "it is None only if it was written to a file"
    return found


def _reason(error: BaseException) -> str:
    """The error that began it; the others repeat the program that was exported."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"


def _returning(model: onnx.ModelProto, outputs: Sequence[int]) -> bytes:
    """A model that returns some of its outputs."""
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    del copied.graph.output[:]
    copied.graph.output.extend(model.graph.output[position] for position in outputs)
    return bytes(copied.SerializeToString())


def limits_of(graph: GraphModule) -> dict[str, tuple[int, int, torch.dtype]]:
    """By quantize node, the limits of its integers where they are not those of their dtype.

    torch.onnx writes the scale and the zero point of a value alone.
    """
    narrow = {}
    for node in graph.graph.nodes:
        if "quantize_per_tensor" in str(node.target) and "dequantize" not in str(node.target):
            low, high, dtype = node.args[3:6]
            if (low, high) != (torch.iinfo(dtype).min, torch.iinfo(dtype).max):
                narrow[node.name] = low, high, dtype
    return narrow


def _lost_limits(graph: GraphModule) -> Iterator[str]:
    if narrow := limits_of(graph):
        limits = ", ".join(f"{low}..{high} of {dtype}" for low, high, dtype in dict.fromkeys(narrow.values()))
        limits = limits.replace("torch.", "")
        yield f"torch.onnx leaves out the limits of integers: {limits}, of {len(narrow)} values"
