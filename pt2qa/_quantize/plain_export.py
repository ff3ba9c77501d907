"""What a quantizer finds in the plain ``torch.export`` of a model, which capture rewrote: a flow without pt2qa has it.

Each op that only one of the two graphs shows to the quantizer makes another quantized model.
"""

from __future__ import annotations

import copy
from collections import Counter

from torch.fx import GraphModule

from pt2qa._capture.program import Capture
from pt2qa._graph.handles import op_of
from pt2qa._report.prose import few
from pt2qa._simulator.products import PRODUCTS
from pt2qa._simulator.quant_ops import asks
from pt2qa.errors import Pt2qaError
from pt2qa.plugins import QuantizerPlugin

_ADVICE = "export capture.program, not the model, to deploy what was measured"


def rewriting_notes(
    capture: Capture, plugin: QuantizerPlugin, here: Counter[str] | None, *, qat: bool
) -> tuple[str, ...]:
    """A note where capture's rewriting changed what a quantizer annotates; measured once for each quantizer object.

    Args:
        capture: keeps the plain export where it changed anything.
        plugin: the quantizer.
        here: what it annotated in the captured program, see :func:`annotated_ops`; None: it is annotated once more,
            which takes seconds with quantizers that match patterns.
        qat: as ``prepare_qat_pt2e`` annotates.
    """
    if capture.plain is None:
        return ()
    known = capture.known_to_plain
    key = (id(plugin), qat)
    if key not in known:
        # The quantizer is kept, so that its id is not given to another.
        known[key] = plugin, _compared(capture, plugin, here, qat)
    return tuple(filter(None, [known[key][1]]))


def _compared(capture: Capture, plugin: QuantizerPlugin, here: Counter[str] | None, qat: bool) -> str:
    assert capture.plain is not None
    here = annotated_ops(_annotate(capture.module(), capture, plugin, qat)) if here is None else here
    try:
        plain = annotated_ops(_annotate(capture.plain.module(check_guards=False), capture, plugin, qat))
    except Pt2qaError as error:
        return f"{plugin.name} fails on the plain torch.export of the model ({error}); {_ADVICE}"
    changed = [op for op in here | plain if here[op] != plain[op]]
    if not changed:
        return ""
    changed.sort(key=lambda op: op not in PRODUCTS)
    kinds = few([f"{op} {plain[op]} -> {here[op]}" for op in changed])
    return (
        f"capture's rewriting changed how many ops {plugin.name} annotates, against a plain torch.export: {kinds}; "
        f"{_ADVICE}"
    )


def _annotate(graph: GraphModule, capture: Capture, plugin: QuantizerPlugin, qat: bool) -> GraphModule:
    from pt2qa.overrides.edited import annotate

    return annotate(copy.deepcopy(graph), plugin, (), capture.names, qat=qat)


def annotated_ops(graph: GraphModule) -> Counter[str]:
    """By kind, the ops at which a quantizer asks for a rounded value."""
    return Counter(
        op_of(node.target)
        for node in graph.graph.nodes
        if node.op == "call_function"
        and (annotation := node.meta.get("quantization_annotation")) is not None
        and asks(annotation)
    )
