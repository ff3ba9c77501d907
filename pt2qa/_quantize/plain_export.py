"""What a quantizer finds in the plain ``torch.export`` of a model, before capture's rewriting: the flow without pt2qa.

Each op that the quantizer finds in only one of the two graphs makes the quantized models differ.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from typing import Any

from torch.export import ExportedProgram

from pt2qa._capture.program import Capture
from pt2qa._graph.annotation import annotated_ops
from pt2qa._report.prose import few
from pt2qa._simulator.products import PRODUCTS
from pt2qa.errors import Pt2qaError
from pt2qa.overrides.edited import annotate
from pt2qa.plugins import GenericPlugin, QuantizerPlugin

_ADVICE = "export capture.program, not the model, to deploy what was measured"

_known: weakref.WeakKeyDictionary[ExportedProgram, list[tuple[Any, str]]] = weakref.WeakKeyDictionary()
"""By captured program, what was said of each quantizer: to annotate takes minutes with some."""


def rewriting_note(capture: Capture, plugin: QuantizerPlugin, here: Counter[str], *, qat: bool) -> str:
    """Says how capture's rewriting changed what a quantizer annotates; empty if it did not.

    The plain export is annotated once for each quantizer, as long as that annotates the captured program alike, which
    is what ``here`` says: see :func:`pt2qa._graph.annotation.annotated_ops`.
    """
    if capture.plain is None:
        return ""
    known = _known.setdefault(capture.program, [])
    # A torchao quantizer gets a new plug-in each time; plug-ins with the same options are equal.
    own = weakref.ref(plugin.quantizer) if isinstance(plugin, GenericPlugin) else plugin
    key = own, qat, here
    note = next((note for other, note in known if other == key), None)
    if note is None:
        note = _compared(capture.plain, capture, plugin, here, qat)
        known.append((key, note))
    return note


def _compared(plain: ExportedProgram, capture: Capture, plugin: QuantizerPlugin, here: Counter[str], qat: bool) -> str:
    graph = copy.deepcopy(plain.module(check_guards=False))
    try:
        there = annotated_ops(annotate(graph, plugin, (), capture.names, qat=qat).graph.nodes)
    except Pt2qaError as error:
        return f"{plugin.name} fails on the plain torch.export of the model ({error}); {_ADVICE}"
    changed = sorted((op for op in here | there if here[op] != there[op]), key=lambda op: op not in PRODUCTS)
    if not changed:
        return ""
    kinds = few([f"{op} {there[op]} -> {here[op]}" for op in changed])
    return (
        f"capture's rewriting changed how many ops {plugin.name} annotates, against a plain torch.export: {kinds}; "
        f"{_ADVICE}"
    )
