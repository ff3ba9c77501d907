"""From a converted graph to two OpenVINO models: the model, and the model with further outputs."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openvino
import torch
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder
from openvino.frontend.pytorch.torchdynamo.export_decompositions import ops_to_not_decompose
from torch.fx import GraphModule, Node

from pt2qa.errors import DeploymentError
from pt2qa.plugins import attribute_of, handle_of, observing, with_outputs
from pt2qa_openvino.backend import IR, MODEL, OpenVINOBackend, OpenVINOProgram, Tap
from pt2qa_openvino.internals import is_tensor, optimize
from pt2qa_openvino.kernels import Kernels, listed, loaded, reason_of

DISTURBS = "the model computes other outputs where it is returned"
CLAMPED = "OpenVINO computes the clamp after it in another way where it is returned"
FAILS = "the model does not run where it is returned"
CLAMPS = ("aten.hardtanh", "aten.relu6", "aten.clamp")


def lower(
    backend: OpenVINOBackend,
    graph: GraphModule,
    inputs: Sequence[Any],
    taps: Sequence[str],
    dynamic_shapes: tuple[Any, ...] | None,
    progress: Callable[[str], None],
) -> OpenVINOProgram:
    """See :meth:`pt2qa.plugins.Backend.lower`."""
    progress("converting the model")
    graph = unfolded(graph)
    exported = _exported(graph, inputs, dynamic_shapes)
    plain = OpenVINOProgram(backend, _optimized(_translated(exported)))
    plain.run(inputs)
    kernels = Kernels.of(plain)
    lost: dict[str, str] = {}
    clamps = _integer_clamps(graph) if backend.int8_kernels else []
    clamped = {str(source.args[0]) for clamp in clamps for source in clamp.all_input_nodes}
    facts = (*kernels.facts, *_truncated_limits(clamps))
    found = replace(plain, lost=lost, delegated=_on_integers(exported, kernels.layers), facts=facts)
    progress(f"converting it with {len(taps)} taps")
    every = _translated(_exported(with_outputs(graph, taps), inputs, dynamic_shapes))
    own = len(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    position = {name: own + number for number, name in enumerate(taps)}
    described = {node.name: _tap(node) for node in graph.graph.nodes if node.name in position}

    def attempt(names: list[str]) -> tuple[OpenVINOProgram, str]:
        wanted = [name for name in names if name not in lost]
        observed = _optimized(every, [*range(own), *(position[name] for name in wanted)])
        tried = replace(found, observed=observed, tapped=tuple(described[name] for name in wanted))
        try:
            changed = tried.run(inputs).changed
        except DeploymentError:
            return tried, FAILS
        if changed and (fused := clamped.intersection(wanted)):
            lost.update(dict.fromkeys(fused, CLAMPED))
            return attempt(wanted)
        return tried, DISTURBS if changed else ""

    return observing(taps, attempt, lost) or found


def unfolded(graph: GraphModule) -> GraphModule:
    """The same with float weights, which quantize nodes round to the integers that were folded.

    OpenVINO takes a pair of quantize and dequantize for one op, and an integer constant for float values.  The pair is
    what ``convert_pt2e(fold_quantize=False)`` leaves.
    """
    graph = with_outputs(graph, ())  # a copy that shares the weights
    for node in list(graph.graph.nodes):
        op = str(node.target).rpartition("quantized_decomposed.")[2]
        if node.op != "call_function" or not op.startswith("dequantize_per") or node.args[0].op != "get_attr":
            continue
        integers, *params = torch.fx.map_arg(node.args, lambda used: attribute_of(graph, used))
        name = f"_float_{node.name}"
        graph.register_buffer(name, node.target(integers, *params, **node.kwargs).detach())
        with graph.graph.inserting_before(node):
            value = graph.graph.get_attr(name)
            if integers.dtype in (torch.int8, torch.uint8):
                quantize = getattr(torch.ops.quantized_decomposed, op.removeprefix("de").partition(".")[0])
                rounded = graph.graph.call_function(quantize.default, (value, *node.args[1:]))
                node.args = (rounded, *node.args[1:])
            else:  # a bias, whose integers have too many levels for OpenVINO
                node.replace_all_uses_with(value)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _tap(node: Node) -> Tap:
    if "quantized_decomposed.quantize_per_tensor" not in str(node.target):
        return Tap(node.name)
    scale, zero_point, low, high, dtype = node.args[1:6]
    return Tap(node.name, *(float(scale), int(zero_point), int(low), int(high)), str(dtype).removeprefix("torch."))  # type: ignore[arg-type]


def _integer_clamps(graph: GraphModule) -> list[Node]:
    """The clamps between two roundings, which OpenVINO computes on integers."""

    def is_rounding(node: Node) -> bool:
        return "quantize_per_tensor" in str(node.target)

    return [
        node
        for node in graph.graph.nodes
        if str(node.target).startswith(CLAMPS)
        and all(is_rounding(each) for each in (*node.all_input_nodes, *node.users))
    ]


def _truncated_limits(clamps: Sequence[Node]) -> Iterator[str]:
    """OpenVINO divides the limits of a clamp by the scale, and does not round what it gets."""
    if clamps:
        kinds = Counter(str(node.target).split(".")[1].rstrip("_") for node in clamps)
        yield f"OpenVINO truncates the limits of clamps on integers, which may be a step off: {listed(kinds)}"


def _exported(graph: GraphModule, inputs: Sequence[Any], dynamic_shapes: tuple[Any, ...] | None) -> GraphModule:
    """The program in the ops that OpenVINO's frontend translates."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(graph, tuple(inputs), dynamic_shapes=dynamic_shapes)
            table = torch.export.default_decompositions()
            for op in ops_to_not_decompose():
                table.pop(op, None)
            exported = program.run_decompositions(table).module(check_guards=False)
    except Exception as error:
        raise DeploymentError(f"torch.export could not export the model: {type(error).__name__}: {error}") from error
    assert isinstance(exported, GraphModule)
    for node in exported.graph.find_nodes(op="placeholder"):
        if not is_tensor(node):
            exported.graph.erase_node(node)
    return exported


def _translated(exported: GraphModule) -> IR:
    """What ``openvino.convert_model`` makes before it optimizes, without reporting it to Intel.

    The frontend fails where one of its values is returned twice.  So an op of its own returns each, and is taken out.
    """
    output = exported.graph.output_node()
    returned = output.args[0]
    with exported.graph.inserting_before(output):
        unsqueeze = torch.ops.aten.unsqueeze.default
        output.args = (tuple(exported.graph.call_function(unsqueeze, (value, 0)) for value in returned),)  # type: ignore[union-attr]
    exported.recompile()
    try:
        frontend = FrontEndManager().load_by_framework("pytorch")
        decoder = TorchFXPythonDecoder(exported, dynamic_shapes=False)  # the frontend does not keep it
        model = frontend.convert(frontend.load(decoder))
    except Exception as error:  # openvino's have no base of their own
        raise DeploymentError(f"OpenVINO could not convert the model: {reason_of(error)}") from error
    for result in model.get_results():
        result.input(0).replace_source_output(result.input_value(0).get_node().input_value(0))
    return _written(model)


def _optimized(translated: IR, outputs: Sequence[int] | None = None) -> IR:
    """The model as ``openvino.convert_model`` returns it, with some of its outputs."""
    model = loaded(translated)
    if outputs is not None:
        for number, result in enumerate(model.get_results()):
            if number not in outputs:
                model.remove_result(result)
    optimize(model)
    return _written(model)


def _written(model: openvino.Model) -> IR:
    """Both files, with all constants as they are: ``openvino.save_model`` would make float16 of float ones."""
    with tempfile.TemporaryDirectory() as folder:
        openvino.serialize(model, Path(folder) / MODEL)
        return IR.read(Path(folder) / MODEL)


def _on_integers(exported: GraphModule, layers: Mapping[str, bool]) -> frozenset[int]:
    """The handles of ops whose kernels read integers.

    An op that is gone is part of the kernel of the one before it, as a ReLU is of its convolution.
    """
    kernels = dict[str, list[bool]]()
    for name, on_integers in layers.items():
        kernels.setdefault(name.partition("/")[0], []).append(on_integers)
    states, found = dict[Node, bool](), dict[int, list[bool]]()
    for node in exported.graph.nodes:
        if node.op != "call_function":
            continue
        rounds = "quantized_decomposed" in str(node.target)
        own = kernels.get(node.name)
        if own is None or rounds:
            own = [next((states[read] for read in node.all_input_nodes if read in states), False)]
        states[node] = all(own)
        if (handle := handle_of(node)) is not None and not rounds:
            found.setdefault(handle, []).append(states[node])
    return frozenset(handle for handle, each in found.items() if all(each))
