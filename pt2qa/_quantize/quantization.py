"""From a capture to a :class:`QuantizedPair`: prepare, check, calibrate, convert, check, pair."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._ambient import torch_defaults
from pt2qa._capture.inputs import device_of
from pt2qa._capture.program import Capture
from pt2qa._exclusion import exports
from pt2qa._graph.handles import OpName, attribute_of, copy_nodes, copy_to_edit, name_of, op_of, ops_of, share_constants
from pt2qa._graph.internals import flow_runtime
from pt2qa._graph.internals.allocator import return_freed_memory
from pt2qa._graph.internals.flow_runtime import BIAS, set_parameters
from pt2qa._graph.internals.nodes import CUSTOM, MODULE_STACK
from pt2qa._graph.internals.shortcuts import shortcuts
from pt2qa._graph.internals.torchao import fold_quantized_weights, is_observer
from pt2qa._graph.matching import complete_handles
from pt2qa._quantize.calibration import calibrate, read_calls, saw_nonfinite, shared_calibration
from pt2qa._quantize.checks import check_prepared, check_runs, refuse_float64, refuse_float64_observers, rewriting_note
from pt2qa._quantize.deployed import difference_note, sliced_inputs
from pt2qa._quantize.pairing import QuantizedPair, Recipe
from pt2qa._ranks import everywhere, first_anywhere, in_step
from pt2qa._report.notes import Note, notes_without
from pt2qa._report.prose import few
from pt2qa._simulator import quant_ops
from pt2qa._simulator.batches import Batch, buffers_kept, written_buffers
from pt2qa._simulator.data import Data
from pt2qa._simulator.graph_run import call_op
from pt2qa._simulator.quant_ops import is_quantization
from pt2qa._simulator.stored import WEIGHT_CACHE
from pt2qa.errors import PairingError, Pt2qaError, QuantizeError
from pt2qa.overrides import Edit, OverridePlan
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.edited import EditedQuantizer, is_ours
from pt2qa.overrides.points import root_of
from pt2qa.plugins import QuantizerPlugin, describe, resolve
from pt2qa.plugins.registry import edit_before_convert


@torch_defaults
@in_step
@exports
def quantize(
    capture: Capture,
    quantizer: Any,
    calibration: Iterable[Any],
    *,
    overrides: OverridePlan | None = None,
    qat: bool = False,
    train: Callable[[GraphModule], None] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    progress: bool | None = None,
) -> QuantizedPair:
    """Prepares, calibrates and converts a captured model.

    Args:
        capture: what :func:`pt2qa.capture` returned; it is not changed.
        quantizer: the name of a plug-in (``"xnnpack"``, ``"x86"``, ``"xnnpack:per_channel=true"``), a plug-in with
            options (``pt2qa.quantizer("x86", reduce_range=True)``), or any torchao ``Quantizer`` object.
        calibration: iterable of batches; read once.
        overrides: edits to the quantizer's annotations, applied in order.
        qat: prepare for quantization-aware training.
        train: with ``qat``, a function that trains the prepared graph in place, between prepare and calibration.  It
            gets the graph in training mode; without it, the fake-quantize ops are calibrated only.
        inputs_of: maps an item of ``calibration`` to a batch, for loaders that yield ``(input, target)``.
        progress: whether to show a progress bar; None: if stderr is a terminal.

    Returns:
        The pair of reference and quantized graph.  The reference shares its weights with the model, but for those into
        which a batch norm was folded; after QAT it holds the trained weights.  Where the backend would hold a bias that
        several calls share with the scale of one of them, each call has a copy; ``notes`` says so.

    Raises:
        QuantizeError: the quantizer failed or annotated nothing, the model computes in float64, prepare changed the
            model's numbers, the converted graph cannot run, calibration gave no batch, observers never saw a value, or
            an edit of ``overrides`` changes nothing or cannot be made.
        SelectionError: an edit names an op that the model does not have.
        BatchError: a batch does not fit the captured inputs.
        PluginError: there is no such quantizer, or it was given options it does not have, or an edit asks for what the
            backend does not support.

    >>> pair = pt2qa.quantize(capture, "xnnpack", [x], progress=False)
    >>> [(site.name, site.kind) for site in pair.sites]
    [('input', 'activation'), ('0/linear', 'weight'), ('0/linear', 'activation')]
    """
    if not isinstance(capture, Capture):
        raise QuantizeError(
            f"got {type(capture).__name__}, expected a Capture. Make one: pt2qa.capture(model, example_inputs)."
        )
    data = Data("calibration", calibration, inputs_of, progress=progress)
    return _quantize(capture, quantizer, data, overrides, qat, train)


@in_step
@exports
def quantize_again(
    pair: QuantizedPair,
    data: Data,
    *,
    plugin: QuantizerPlugin | None = None,
    overrides: OverridePlan | None = None,
    progress: bool | None = False,
) -> QuantizedPair:
    """The model of a pair that pt2qa quantized, quantized with other options, data or edits; as deployed, if that is.

    An analysis holds several such pairs at a time, so constants that come out equal are shared with the given pair, and
    fewer float values are kept.
    """
    recipe, capture = pair.recipe, pair.capture
    assert recipe is not None, "only a pair with a recipe is quantized again"
    assert capture is not None, "a recipe comes with a capture"
    plugin = recipe.plugin if plugin is None else plugin
    data = replace(data, progress=progress)
    made = _quantize(capture, plugin, data, overrides, recipe.qat, recipe.train, like=pair)
    return made if pair.origin is None else made.as_deployed(pair.plugin)


def _quantize(
    capture: Capture,
    quantizer: Any,
    data: Data,
    overrides: OverridePlan | None,
    qat: bool,
    train: Callable[[GraphModule], None] | None,
    like: QuantizedPair | None = None,
) -> QuantizedPair:
    plugin = resolve(quantizer)
    if overrides is not None and not isinstance(overrides, OverridePlan):
        raise QuantizeError(f"overrides: got {overrides!r}, expected an OverridePlan or None")
    if train is not None and not qat:
        raise QuantizeError("train was given without qat=True. Pass qat=True to train the prepared graph.")
    edits = overrides.edits if overrides is not None else ()
    names, float_graph = capture.names, capture.module()
    refuse_float64(float_graph)
    prepared, edited = _prepare(plugin, float_graph, edits, names, qat)
    if not any(is_observer(module) for module in prepared.modules()):
        raise QuantizeError(
            f"{plugin.name} annotated 0 of {_ops_of(float_graph).total()} ops: the model would stay in float. "
            f"{_takes_and_has(plugin, float_graph)}. Check the quantizer's settings and module names{_nested(capture)}."
        )
    refuse_float64_observers(prepared, names, plugin.name)

    calls = read_calls(capture, float_graph, data)
    own = next(calls, None)
    first = first_anywhere(own)
    if first is None:
        raise QuantizeError(
            "calibration gave no batch, so no scale is known. Pass at least one batch of typical inputs; an iterator "
            "that was read before is empty."
        )
    if qat:
        _switch(prepared, "eval", float_graph)
    state = written_buffers(float_graph)
    with buffers_kept(float_graph, state), buffers_kept(prepared, state):
        check_prepared(float_graph, prepared, first, names, plugin.name)
        if train is not None:
            _switch(prepared, "train", float_graph)
            with torch.enable_grad():
                train(prepared)
            _switch(prepared, "eval", float_graph)
        every = itertools.chain([] if own is None else [own], calls)
        calibrate(prepared, data.bar(f"calibrate {plugin.name}", of=every), names)

    assert edited.annotations is not None, "prepare has the quantizer annotate"
    edit = edit_before_convert(plugin)
    separated = [] if edit is None else edit(prepared)
    give_biases(prepared, edits, names)
    before = make_late_edits(prepared, edits, names)
    reference, quantized = _convert(prepared, plugin.name, saw_nonfinite(prepared, names))
    set_parameters(reference, before)
    if like is not None:
        share_constants(quantized, like.quantized)
    ran = check_runs(quantized, first, names, plugin.name)
    rewriting = rewriting_note(capture, plugin, edited.annotated, qat=qat)
    sliced = difference_note(sliced_inputs(quantized, plugin))
    notes = (
        *_notes(capture),
        *shared_calibration(),
        rewriting,
        *_separated_note(separated, names),
        *override_notes(overrides, describe(plugin), capture.model),
        sliced,
    )
    kept = None if isinstance(data.batches, Iterator) else replace(data, name="calibration", mask=None, progress=False)
    result = QuantizedPair(
        reference=reference,
        quantized=quantized,
        names=names,
        quantizer=describe(plugin) + (" after QAT" if qat else ""),
        model=capture.model,
        float_graph=float_graph,
        capture=capture,
        notes=tuple(filter(None, notes)),
        recipe=Recipe(plugin, edited.annotations, kept, qat, train, edits, edit if separated else None),
        weight_cache=WEIGHT_CACHE if like is None else min(WEIGHT_CACHE // 4, like.weight_cache),
    )
    del prepared
    return_freed_memory()
    try:
        result.program  # noqa: B018  lowering finds now what would otherwise surface in the first analysis
    except PairingError as error:
        raise QuantizeError(f"{plugin.name}: {error}") from error
    result.graphs.accept(*ran)
    _check_same_everywhere(result)
    return result


def _check_same_everywhere(pair: QuantizedPair) -> None:
    found = everywhere((pair.environment.fingerprint, pair.quantization))
    other = [f"rank {rank}" for rank, each in enumerate(found) if each != found[0]]
    if other:
        raise QuantizeError(
            f"the quantized models of rank 0 and of {few(other)} differ. Give all ranks the same model, in the same "
            "state, and the same quantizer."
        )


# -- prepare -----------------------------------------------------------------------------------------------------------


def _prepare(
    plugin: QuantizerPlugin, float_graph: GraphModule, edits: tuple[Edit, ...], names: Mapping[int, OpName], qat: bool
) -> tuple[GraphModule, EditedQuantizer]:
    """A prepared copy of a graph, and the quantizer, which knows what it annotated."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e

    # prepare edits the graph that it is given, and training its parameters.
    graph = copy.deepcopy(float_graph) if qat else copy_to_edit(float_graph)
    quantizer = EditedQuantizer(plugin, edits, names, plugin.build(graph, qat=qat), qat=qat)
    try:
        with shortcuts():
            prepared = (prepare_qat_pt2e if qat else prepare_pt2e)(graph, quantizer)
    except Pt2qaError:
        raise
    except Exception as error:
        if is_ours(error):
            raise
        raise QuantizeError(
            f"torchao could not prepare the model as {plugin.name} annotated it: {type(error).__name__}: "
            f"{str(error) or 'no message'}. See the traceback above this one for the op."
        ) from error
    return prepared, quantizer


def _ops_of(graph_module: GraphModule) -> Counter[str]:
    return Counter(op_of(node.target) for node in graph_module.graph.nodes if node.op == "call_function")


def _takes_and_has(plugin: QuantizerPlugin, graph_module: GraphModule) -> str:
    """Which kinds of op a quantizer supports as configured, if it says so, and which a graph has."""
    counts = _ops_of(graph_module).most_common()
    has = f"the model has {', '.join(f'{op} ({count})' for op, count in counts) or 'no op'}"
    takes: tuple[str, ...] = getattr(plugin, "takes", tuple)()
    return f"With these options it quantizes {', '.join(takes)}; {has}" if takes else has[0].upper() + has[1:]


def _nested(capture: Capture) -> str:
    count = len(capture.unanalysed)
    inside = "are inside nested graphs, of which prepare annotates only those of while_loop and scan"
    return f"; {count} ops {inside}" if count else ""


def _notes(capture: Capture) -> Iterator[str]:
    if capture.unanalysed:
        yield f"without rows, inside nested graphs: {len(capture.unanalysed)} ops ({few(capture.unanalysed)})"
    if capture.stateful:
        yield f"forward writes to {', '.join(capture.stateful)}; every batch is compared from the captured state"
    device = None if capture.eager is None else device_of(capture.eager)
    if device is not None and device.type != "cpu":
        yield f"both models ran on the device {device.type}"


def _separated_note(done: Sequence[tuple[Node, str]], names: Mapping[int, OpName]) -> list[str]:
    told = few([f"{name_of(node, names) or node.name} {what}" for node, what in done])
    return [f"edited for the backend's kernels, without changing a number: {told}"] if done else []


def override_notes(overrides: OverridePlan | None, quantizer: str, model: str) -> list[Note]:
    """What the notes of a pair say of the plan that it was quantized with."""
    if overrides is None or not overrides.edits:
        return []
    counts = Counter(edit.kind for edit in overrides.edits)
    said = [f"overrides: {', '.join(f'{count} {kind}' for kind, count in counts.items())}"]
    if overrides.quantizer and overrides.quantizer != quantizer:
        said.append(f"the overrides were made for {overrides.quantizer}, and are applied to {quantizer}")
    if overrides.model and overrides.model != model:
        said.append(f"the overrides were made for the model {overrides.model}, and are applied to {model}")
    return [Note(text, "overrides") for text in said]


def _switch(prepared: GraphModule, mode: Literal["eval", "train"], float_graph: GraphModule) -> None:
    """Puts a graph that was prepared for training into a mode, in place; its ops keep their handles.

    torchao replaces batch norms and dropouts by new ones, which do not record their origin.
    """
    from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train

    known = {key: [dict(node.meta) for node in nodes] for key, nodes in _batch_norms(prepared).items()}
    (move_exported_model_to_eval if mode == "eval" else move_exported_model_to_train)(prepared)
    for key, nodes in _batch_norms(prepared).items():
        for node, meta in zip(nodes, known[key], strict=True):
            node.meta |= {name: meta[name] for name in (CUSTOM, MODULE_STACK) if name in meta}
    complete_handles(float_graph, prepared)


def _batch_norms(graph_module: GraphModule) -> dict[str, list[Node]]:
    """The batch norms of a graph by the buffer of their running mean, in graph order."""
    found: dict[str, list[Node]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and op_of(node.target) == "batch_norm":
            found.setdefault(str(getattr(node.args[3], "target", "")), []).append(node)
    return found


# -- convert -----------------------------------------------------------------------------------------------------------


def _convert(prepared: GraphModule, name: str, nonfinite: Sequence[str]) -> tuple[GraphModule, GraphModule]:
    """Reference and quantized graph.

    ``convert_pt2e`` is told not to fold the weights: that graph holds the float weights and every quantize op, so
    removing the quantization gives the reference, after QAT too, and folding the rest gives its usual result.
    ``nonfinite`` is what observers without a finite range saw, which is why converting fails, if it does.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    try:
        with shortcuts():
            unfolded = convert_pt2e(prepared, fold_quantize=False)
        # Folding runs what writes to a buffer.
        with shortcuts(), buffers_kept(unfolded, written_buffers(unfolded)):
            quantized = fold_quantized_weights(unfolded, call_op)
    except Exception as error:
        why = f"convert_pt2e failed for {name}: {type(error).__name__}: {error}".rstrip(".")
        if nonfinite:
            why += (
                f". Calibration gave NaN or infinity, for which no scale fits, at {few(nonfinite)}: calibrate with "
                "other inputs, or keep what reads these in float (pt2qa.Edit)"
            )
        raise QuantizeError(f"{why}.") from error
    return quant_ops.strip_quantization(unfolded), quantized


def with_numbers(pair: QuantizedPair, overrides: OverridePlan) -> QuantizedPair | None:
    """What :func:`pt2qa.quantize` makes of ``overrides`` on the same calibration data, without doing so.

    Only where they add ``range``, ``bias`` and ``round`` edits to those of the pair: none changes an op or what an
    observer sees.  The pair's graph is taken with other scales, zero points, biases and integers, and shares everything
    else.  None for other edits, where a bias is quantized, whose scale would follow, and for trained pairs.
    """
    if pair.origin is not None:
        made = with_numbers(pair.origin.pair, overrides)
        return None if made is None else made.as_deployed(pair.plugin)
    recipe = pair.recipe
    if recipe is None or recipe.qat or any(site.kind == "bias" for site in pair.sites):
        return None
    known, added = overrides.edits[: len(recipe.edits)], overrides.edits[len(recipe.edits) :]
    if known != recipe.edits or not {edit.kind for edit in added} <= {"bias", "range", "round"}:
        return None
    annotations = recipe.annotations.with_edits(added)
    ranges = _ranges(pair, recipe.annotations, annotations)
    reference, quantized = map(copy_nodes, (pair.reference, pair.quantized))
    biases = [edit for edit in added if edit.kind == "bias"]
    integers = _integers(quantized, [edit for edit in added if edit.kind == "round"], pair.names)
    if ranges is None or integers is None:
        return None
    if not all(can_add_to_biases(graph, biases, pair.names) for graph in (reference, quantized)):
        return None
    copies = dict(zip(pair.quantized.graph.nodes, quantized.graph.nodes, strict=True))
    _set_ranges(pair, copies, ranges)
    set_parameters(quantized, integers)
    quantized.recompile()
    for graph in (reference, quantized):
        give_biases(graph, biases, pair.names)
    make_late_edits(quantized, biases, pair.names)
    name = describe(recipe.plugin)
    return replace(
        pair,
        reference=reference,
        quantized=quantized,
        notes=(*notes_without("overrides", pair.notes), *override_notes(overrides, name, pair.model)),
        recipe=replace(recipe, annotations=annotations, edits=overrides.edits),
    )


def _ranges(pair: QuantizedPair, before: Annotations, after: Annotations) -> dict[int, tuple[float, int]] | None:
    """Scale and zero point by site, of those whose spec is another; None where a site would not have just these."""
    changed = {point for point, spec in after.specs.items() if spec is not before.specs[point]}
    found = {}
    for index, points in before.points_at(pair.sites).items():
        roots = {root for point in points if (root := root_of(after.specs, point)) is not None}
        if changed.isdisjoint(roots):
            continue
        site, specs = pair.sites[index], [after.specs[root] for root in changed.intersection(roots)]
        wanted = {(float(spec.scale), int(spec.zero_point)) for spec in specs}
        if len(specs) != len(roots) or len(wanted) != 1:
            return None
        if site.kind != "activation" or not isinstance(site.params.scale, float):
            return None
        [found[index]] = wanted
    return found


def _set_ranges(pair: QuantizedPair, copies: Mapping[Node, Node], ranges: Mapping[int, tuple[float, int]]) -> None:
    by_name = {node.name: copies[node] for node in pair.quantized.graph.nodes}
    for step in pair.program.steps:
        if step.site is not None and step.site in ranges:
            rounded = by_name[step.node].args[0]
            assert isinstance(rounded, Node), "a dequantize node reads the quantize node"
            for node in (rounded, *rounded.users):
                value, _, _, *others = node.args
                node.args = (value, *ranges[step.site], *others)


_TAKE_A_BIAS: Final = frozenset(("conv1d", "conv2d", "conv3d", "linear"))
"""With as many channels as the first axis of the weight has."""


def give_biases(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> None:
    """Gives the ops of ``bias`` edits that have no bias one of zeros, in place; their outputs stay as they are."""
    nodes = ops_of(graph, names)
    for name in dict.fromkeys(edit.ops[0] for edit in edits if edit.kind == "bias"):
        if name in nodes and lacks_bias(nodes[name]):
            flow_runtime.give_bias(graph, name, nodes[name])


def make_late_edits(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> dict[str, Tensor]:
    """Makes the ``bias`` and ``round`` edits in place; returns the parameters that were there, by attribute."""
    nodes = ops_of(graph, names)
    before: dict[str, Tensor] = {}
    for edit in edits:
        if edit.kind not in ("bias", "round"):
            continue
        node = nodes.get(edit.ops[0])
        if node is None:
            raise QuantizeError(f"{edit}: the graph that is quantized has no such op")
        is_bias = edit.kind == "bias"
        target = _bias_of(node) if is_bias else _weight_of(graph, node)
        if target is None:
            raise QuantizeError(f"{edit}: it has no {'bias' if is_bias else 'int8 weight'} of its own")
        parameter = graph.get_parameter(target).detach()
        if parameter.numel() != len(edit.numbers):
            raise QuantizeError(f"{edit}: the {'bias' if is_bias else 'weight'} has the shape {tuple(parameter.shape)}")
        before.setdefault(target, parameter)
        make = flow_runtime.add_to_biases if is_bias else flow_runtime.set_integers
        make(graph, nodes, [(edit.ops[0], edit.values)])
    return before


def can_add_to_biases(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> bool:
    """Whether each op of ``bias`` edits is in a graph, without a bias, or with one of its own that is not quantized."""
    nodes = ops_of(graph, names)
    found = [nodes.get(edit.ops[0]) for edit in edits]
    return all(node is not None and (lacks_bias(node) or _bias_of(node) is not None) for node in found)


def _integers(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> dict[str, Tensor] | None:
    """The weights of ``round`` edits, by attribute of a converted graph; None if one is not stored so for its op."""
    nodes, found = ops_of(graph, names), dict[str, Tensor]()
    for edit in edits:
        read: Any = nodes[edit.ops[0]].args[1] if edit.ops[0] in nodes else None
        stored: Any = read.args[0] if isinstance(read, Node) and quant_ops.is_dequantize(read) else None
        before = attribute_of(graph, stored)
        if before is None or len(stored.users) > 1 or before.dtype != torch.int8 or before.numel() != len(edit.numbers):
            return None
        found[str(stored.target)] = torch.tensor(edit.numbers).reshape(before.shape).to(before.device)
    return found


def lacks_bias(node: Node) -> bool:
    """Whether an op with a weight of its own takes a bias and has none."""
    if op_of(node.target) not in _TAKE_A_BIAS or (len(node.args) > BIAS and node.args[BIAS] is not None):
        return False
    source = node.args[1]
    while isinstance(source, Node) and (source.op == "call_module" or is_quantization(source)):
        source = source.args[0]
    return isinstance(source, Node) and source.op == "get_attr"


def _bias_of(node: Node) -> str | None:
    """The parameter that is an op's bias, if no other op reads it; an observer may be between."""
    found = node.args[BIAS] if len(node.args) > BIAS else None
    while isinstance(found, Node) and found.op == "call_module" and len(found.users) == 1:
        found = found.args[0]
    own = isinstance(found, Node) and found.op == "get_attr" and len(found.users) == 1
    return str(found.target) if own and isinstance(found, Node) else None


def _weight_of(prepared: GraphModule, node: Node) -> str | None:
    """The parameter that is an op's weight, observed as int8, if no other op reads it."""
    read = node.args[1] if len(node.args) > 1 else None
    if not isinstance(read, Node) or read.op != "call_module" or len(read.users) != 1:
        return None
    source, observer = read.args[0], prepared.get_submodule(str(read.target))
    assert isinstance(source, Node), "an observer observes a value"
    own = source.op == "get_attr" and len(source.users) == 1 and is_observer(observer)
    known = getattr(observer, "dtype", None) is torch.int8 and getattr(observer, "ch_axis", 0) in (0, -1)
    return str(source.target) if own and known else None
