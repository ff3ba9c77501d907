"""From a capture to a :class:`QuantizedPair`: prepare, calibrate, convert."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from pt2qa._capture.program import Capture
from pt2qa._exclusion import exports
from pt2qa._graph.handles import CUSTOM, OpName, op_of
from pt2qa._quantize.calibration import calibrate, find_observers, place_of
from pt2qa._quantize.conversion_check import check_runs, refuse_float64, refuse_float64_observers
from pt2qa._quantize.pairing import QuantizedPair, Recipe
from pt2qa._quantize.plain_export import annotated_ops, rewriting_notes
from pt2qa._quantize.prepare_check import check_prepared
from pt2qa._simulator import quant_ops
from pt2qa._simulator.batches import Batch, read_batches
from pt2qa.errors import PairingError, Pt2qaError, QuantizeError
from pt2qa.overrides import Edit, OverridePlan
from pt2qa.plugins import QuantizerPlugin, describe, resolve
from pt2qa.plugins.abilities import taken_by


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
        overrides: edits to what the quantizer annotates, made in their order.
        qat: prepare for quantization-aware training.
        train: with ``qat``, a function that trains the prepared graph in place, between prepare and calibration.  It
            gets the graph in training mode; without it, the fake-quantize ops are calibrated only.
        inputs_of: from an item of ``calibration`` to a batch, for loaders that yield ``(input, target)``.
        progress: whether to show a progress bar; None: where stderr is a terminal.

    Returns:
        The pair of reference and quantized graph.  After QAT the reference holds the trained weights.

    Raises:
        QuantizeError: the quantizer failed or annotated nothing, the model computes in float64, prepare changed the
            model's numbers, the converted graph cannot run, calibration gave no batch, observers never saw a value, or
            an edit of ``overrides`` changes nothing or cannot be made.
        SelectionError: an edit names an op that the model does not have.
        BatchError: a batch does not fit the captured inputs.
        PluginError: there is no such quantizer, or it was given options it does not have, or an edit asks for what the
            backend does not have.
    """
    plugin = resolve(quantizer)
    if overrides is not None and not isinstance(overrides, OverridePlan):
        raise QuantizeError(f"overrides: got {overrides!r}, expected an OverridePlan or None")
    if train is not None and not qat:
        raise QuantizeError("train was given without qat=True. Pass qat=True to train the prepared graph.")
    float_graph = capture.module()
    edits = overrides.edits if overrides is not None else ()
    refuse_float64(float_graph)
    prepared = _prepare(plugin, float_graph, edits, capture.names, qat)
    # QAT puts other nodes in the places of conv and batch norm, and edits are no part of the quantizer.
    annotated = None if qat or edits else annotated_ops(prepared)
    if not find_observers(prepared):
        raise QuantizeError(
            f"{plugin.name} annotated 0 of {_count_ops(float_graph)} ops: the model would stay in float. "
            f"{_takes_and_has(plugin, float_graph)}. Check the quantizer's settings and module names{_nested(capture)}."
        )

    observed = [(place_of(node, prepared), node.args[0]) for node in find_observers(prepared).values()]
    refuse_float64_observers([(place, node) for place, node in observed if isinstance(node, Node)], plugin.name)

    # Some quantizers calibrate with fake-quantize ops, too; they are off while prepare is checked.
    fake = qat or _fake_quantizes(prepared)

    first: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def check(args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        first.append((args, kwargs))
        if not fake:
            check_prepared(float_graph, prepared, args, kwargs, outputs, plugin.name)

    if fake:
        _check_fake_quantize_off(float_graph, prepared, capture, plugin.name)
    if qat:
        _train(prepared, train)
    calibrate(capture, prepared, read_batches(calibration, inputs_of), plugin.name, first=check, progress=progress)
    reference, quantized = _convert(prepared, plugin.name)
    check_runs(quantized, *first[0], capture.names, plugin.name)
    result = QuantizedPair(
        reference=reference,
        quantized=quantized,
        names=capture.names,
        quantizer=describe(plugin) + (" after QAT" if qat else ""),
        model=capture.model,
        float_graph=float_graph,
        capture=capture,
        notes=(
            *_notes(capture),
            *rewriting_notes(capture, plugin, annotated, qat=qat),
            *_override_notes(overrides, describe(plugin)),
        ),
        recipe=Recipe(plugin, None if isinstance(calibration, Iterator) else calibration, qat, train, inputs_of, edits),
    )
    try:
        result.program  # noqa: B018  lowering finds now what would otherwise surface in the first analysis
    except PairingError as error:
        raise QuantizeError(f"{plugin.name}: {error}") from error
    return result


def _prepare(
    plugin: QuantizerPlugin, float_graph: GraphModule, edits: tuple[Edit, ...], names: Mapping[int, OpName], qat: bool
) -> GraphModule:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e

    # prepare folds batch norms into the graph it is given, and QAT trains its parameters: work on a copy of both.
    graph = copy.deepcopy(float_graph)
    torchao_quantizer = plugin.build(graph, qat=qat)
    if edits:
        from pt2qa.overrides.edited import EditedQuantizer

        torchao_quantizer = EditedQuantizer(torchao_quantizer, plugin, edits, names, qat=qat)
    try:
        return (prepare_qat_pt2e if qat else prepare_pt2e)(graph, torchao_quantizer)  # type: ignore[no-any-return]
    except Pt2qaError:
        raise
    except Exception as error:
        raise QuantizeError(
            f"{plugin.name} could not prepare the model: {type(error).__name__}: {str(error) or 'no message'}. "
            "The traceback above this one shows the op it stumbled on."
        ) from error


def _count_ops(graph_module: GraphModule) -> int:
    return sum(node.op == "call_function" for node in graph_module.graph.nodes)


def _takes_and_has(plugin: QuantizerPlugin, graph_module: GraphModule) -> str:
    """Which kinds of op a quantizer takes as it is configured, where it says so, and which a graph has."""
    counts = Counter(op_of(node.target) for node in graph_module.graph.nodes if node.op == "call_function")
    has = f"the model has {', '.join(f'{op} ({count})' for op, count in counts.most_common()) or 'no op'}"
    takes = taken_by(plugin)
    return f"With these options it takes {', '.join(takes)}; {has}" if takes else has[0].upper() + has[1:]


def _nested(capture: Capture) -> str:
    count = len(capture.unanalysed)
    return f"; {count} ops are inside nested graphs (cond, loops), which quantizers do not enter" if count else ""


def _notes(capture: Capture) -> tuple[str, ...]:
    notes = []
    if capture.unanalysed:
        shown = ", ".join(capture.unanalysed[:5]) + (" …" if len(capture.unanalysed) > 5 else "")
        notes.append(f"not analysed, inside nested graphs: {len(capture.unanalysed)} ops ({shown})")
    if capture.stateful:
        names = ", ".join(capture.stateful)
        notes.append(f"forward writes to {names}; every batch is compared from the captured state")
    return tuple(notes)


def _override_notes(overrides: OverridePlan | None, quantizer: str) -> tuple[str, ...]:
    if overrides is None or not overrides.edits:
        return ()
    counts = Counter(edit.kind for edit in overrides.edits)
    notes = [f"overrides: {', '.join(f'{count} {kind}' for kind, count in counts.items())}"]
    if overrides.quantizer and overrides.quantizer != quantizer:
        notes.append(f"the overrides were made for {overrides.quantizer}, and are applied to {quantizer}")
    return tuple(notes)


# -- quantization-aware training ---------------------------------------------------------------------------------------


def _fake_quantizes(prepared: GraphModule) -> bool:
    from torchao.quantization.pt2e import FakeQuantizeBase

    return any(isinstance(module, FakeQuantizeBase) for module in prepared.modules())


def _check_fake_quantize_off(float_graph: GraphModule, prepared: GraphModule, capture: Capture, name: str) -> None:
    """Checks a prepared graph on the example inputs with fake quantization off; leaves it in eval mode."""
    from torchao.quantization.pt2e import disable_fake_quant, disable_observer, enable_fake_quant, enable_observer

    _switch(prepared, "eval")
    prepared.apply(disable_fake_quant).apply(disable_observer)
    with torch.no_grad():
        outputs = prepared(*capture.args, **capture.kwargs)
        check_prepared(float_graph, prepared, capture.args, capture.kwargs, outputs, name)
    prepared.apply(enable_fake_quant).apply(enable_observer)


def _train(prepared: GraphModule, train: Callable[[GraphModule], None] | None) -> None:
    if train is None:
        return
    _switch(prepared, "train")
    train(prepared)
    _switch(prepared, "eval")


def _switch(prepared: GraphModule, mode: Literal["eval", "train"]) -> None:
    """Puts a prepared graph into a mode, in place; its batch norms keep their handles.

    torchao puts new batch norms in the places of the old ones, which know nothing of where they come from.
    """
    from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train

    known = {key: [dict(node.meta) for node in nodes] for key, nodes in _batch_norms(prepared).items()}
    (move_exported_model_to_eval if mode == "eval" else move_exported_model_to_train)(prepared)
    for key, nodes in _batch_norms(prepared).items():
        for node, meta in zip(nodes, known[key], strict=True):
            node.meta |= {name: meta[name] for name in (CUSTOM, "nn_module_stack") if name in meta}


def _batch_norms(graph_module: GraphModule) -> dict[str, list[Node]]:
    """The batch norms of a graph by the buffer of their running mean, in graph order."""
    found: dict[str, list[Node]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and op_of(node.target) == "batch_norm":
            found.setdefault(str(getattr(node.args[3], "target", "")), []).append(node)
    return found


# -- convert -----------------------------------------------------------------------------------------------------------


def _convert(prepared: GraphModule, name: str) -> tuple[GraphModule, GraphModule]:
    """Reference and quantized graph.

    ``convert_pt2e`` is asked not to fold the weights: that graph holds the float weights and every quantize op, so that
    taking the quantization out gives the reference, after QAT too, and folding the rest gives what it usually returns.
    """
    from torchao.quantization.pt2e.constant_fold import constant_fold
    from torchao.quantization.pt2e.quantize_pt2e import _quant_node_constraint, convert_pt2e

    try:
        unfolded = convert_pt2e(prepared, fold_quantize=False)
        reference = quant_ops.strip_quantization(unfolded)
        quantized = GraphModule(unfolded, copy.deepcopy(unfolded.graph))
        quantized.meta.update(unfolded.meta)
        constant_fold(quantized, _quant_node_constraint)
    except Exception as error:
        raise QuantizeError(f"convert_pt2e failed for {name}: {type(error).__name__}: {error}.") from error
    return reference, quantized
