"""What ONNX Runtime makes of a model: which ops its kernels compute on integers, and which in float."""

from __future__ import annotations

import ast
import contextlib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime
import torch
from onnx import ModelProto, NodeProto, TensorProto

from pt2qa.errors import DeploymentError

if TYPE_CHECKING:
    from pt2qa_onnxruntime.backend import ONNXRuntimeBackend, ONNXRuntimeProgram

ROUNDING = ("QuantizeLinear", "DequantizeLinear")
INTEGERS = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16)
QUANTIZED = ("QuantizeLinear", "QLinear", "QGemm")
"""How the names of ops begin that make integers of float values, or of integers with scales."""

SCOPES = "pkg.torch.onnx.name_scopes"
"""Where torch.onnx keeps the path of the op that a node was made from; the last part is the name of its node."""


def session_of(backend: ONNXRuntimeBackend, model: bytes) -> onnxruntime.InferenceSession:
    """A session on the CPU.

    Raises:
        DeploymentError: ONNX Runtime does not load the model; the message has the option with which it does.
    """
    try:
        return _loaded(backend, model)
    except Exception as error:  # onnxruntime's have no base of their own
        hint = _hint(backend, model)
        raise DeploymentError(f"ONNX Runtime could not load the model: {error}{hint}") from error


def _loaded(backend: ONNXRuntimeBackend, model: bytes, optimized: str = "") -> onnxruntime.InferenceSession:
    """A session; ``optimized`` is where to write the graph that it runs."""
    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        levels.ORT_ENABLE_ALL if backend.optimization == "all" else levels.ORT_DISABLE_ALL
    )
    options.add_session_config_entry("session.qdqisint8allowed", str(int(backend.int8_activations)))
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised as well
    options.optimized_model_filepath = optimized
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def optimized_graph(backend: ONNXRuntimeBackend, model: bytes) -> ModelProto:
    """The graph that ONNX Runtime runs for a model that it loads."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        _loaded(backend, model, str(path))
        return onnx.load(path)


def dequantized_outputs(model: ModelProto) -> list[bool]:
    """Of each output, whether it is integers that were just dequantized."""
    makers = {name: node for node in model.graph.node for name in node.output}

    def is_dequantized(name: str) -> bool:
        node = makers.get(name)
        if node is not None and node.op_type == "Identity":
            return is_dequantized(node.input[0])
        return node is not None and node.op_type == "DequantizeLinear"

    return [is_dequantized(output.name) for output in model.graph.output]


def _hint(backend: ONNXRuntimeBackend, model: bytes) -> str:
    others = {
        "int8_activations=true": replace(backend, int8_activations=True),
        "optimization=none": replace(backend, optimization="none"),
    }
    for option, other in others.items():
        if other != backend:
            with contextlib.suppress(Exception):  # then it is not the option that helps
                _loaded(other, model)
                return f'. With backend="onnxruntime:{option}" it loads'
    return ""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a loaded model.

    Attributes:
        nodes: by the name of each op's node in the exported program, whether all kernels that compute it take or make
            integers; ops that only change constants are not among them.
        facts: what a reader must know about what runs.
        lines: each kernel with its inputs and outputs.
    """

    nodes: dict[str, bool]
    facts: tuple[str, ...]
    lines: tuple[str, ...]

    @classmethod
    def of(cls, program: ONNXRuntimeProgram) -> Kernels:
        """Loads a program, and reads the graph that ONNX Runtime then runs.

        Raises:
            DeploymentError: it cannot be loaded.
        """
        program.signature()  # says how else it would load if it does not
        optimized = optimized_graph(program.backend, program.model)
        on_integers = _on_integers(optimized)
        computing = [node for node in optimized.graph.node if node.op_type not in ROUNDING]
        counts = {
            kind: Counter(node.op_type for node in computing if on_integers[node.output[0]] == kind)
            for kind in (True, False)
        }
        original = onnx.load_model_from_string(program.model)
        opset = next(each.version for each in original.opset_import if each.domain in ("", "ai.onnx"))
        facts = (
            f"ONNX Runtime {onnxruntime.__version__} on {torch.backends.cpu.get_cpu_capability()}, opset {opset}, "
            f"optimization {program.backend.optimization}",
            f"kernels on integers: {_listed(counts[True])}; in float: {_listed(counts[False])}",
        )
        lines = [
            f"{node.op_type} {node.name}: {', '.join(filter(None, node.input))} -> {', '.join(node.output)}"
            for node in optimized.graph.node
        ]
        return cls(dict(_states(original, on_integers)), facts, tuple(lines))


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{op} ({count})" for op, count in counts.items()) or "none"


def _on_integers(model: ModelProto) -> dict[str, bool]:
    """By the name of each node of a graph that runs, and of each value that it makes, whether it handles integers."""
    graph = model.graph
    values = (*graph.value_info, *graph.input, *graph.output)
    integers = {value.name: value.type.tensor_type.elem_type in INTEGERS for value in values}
    found = dict[str, bool]()
    for node in graph.node:
        for name in node.output:  # a kernel that keeps the layout of another is not described
            kept = node.op_type != "DequantizeLinear" and any(integers.get(read, False) for read in node.input[:1])
            integers.setdefault(name, node.op_type.startswith(QUANTIZED) or kept)
        own = any(integers.get(name, False) for name in (*node.input, *node.output))
        found |= dict.fromkeys((re.split("/|_token_", node.name)[0], *node.output), own)
    return found


def _states(model: ModelProto, on_integers: dict[str, bool]) -> Iterator[tuple[str, bool]]:
    """By the op that a node was made from, whether it is computed on integers.

    A node that is gone is part of the kernel of the one before it, as a ReLU is of its convolution.
    """
    constants = {each.name for each in model.graph.initializer}
    state = dict[str, bool]()  # by the name of a value
    found = dict[str, list[bool]]()
    for node in model.graph.node:
        read = [name for name in node.input if name]
        if all(name in constants for name in read):
            constants.update(node.output)
            continue
        own = next((state[name] for name in read if name in state), False)
        if node.op_type not in ROUNDING:
            own = next((on_integers[name] for name in (node.name, *node.output) if name in on_integers), own)
            found.setdefault(_made_from(node), []).append(own)
        state |= dict.fromkeys(node.output, own)
    return ((name, all(states)) for name, states in found.items())


def _made_from(node: NodeProto) -> str:
    scopes: Any = next((each.value for each in node.metadata_props if each.key == SCOPES), None)
    return node.name if scopes is None else str(ast.literal_eval(scopes)[-1])
