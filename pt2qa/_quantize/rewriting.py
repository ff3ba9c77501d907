"""Capture's rewriting of a program as Python source, for a graph of a plain ``torch.export``.

The functions are those of :mod:`pt2qa._graph.internals.flow_passes`.  Some of them ask capture what may share memory,
which a printed flow does not; so what they make of a model counts only where it was executed and compared: see
:mod:`pt2qa._quantize.plain_flow`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pt2qa._capture.normalise.passes import ATTENTION, RECURRENT
from pt2qa._capture.program import Capture

PARTIAL_WRITE: Final = "partial write"
"""The rule that is a call of torch: ``run_decompositions({})`` makes a program functional."""

_SOURCES: Final = "write_sources(graph_module, OPENED)"
_CALLS: Final = {
    "nested region": "inline_regions(graph_module)",
    "recurrent op": "decompose_recurrent(graph_module, RECURRENT)",
    "attention": "decompose_attention(graph_module)",
    "add of zero": "remove_added_zeros(graph_module)",
    "dead code": "remove_dead_code(graph_module)",
    "scalar": "keep_scalars(graph_module)",
    "padding": "write_out_padding(graph_module)",
    "op source": _SOURCES,
    "shared module": _SOURCES,
}
"""The call of each rule of a change that can be made so, in the order of the passes."""

SOURCE_RULES: Final = ("op source", "shared module")
"""The rules of the one pass that always changes something, recorded or not."""


def recorded(capture: Capture) -> tuple[str, ...]:
    """The rules of a capture's changes that can be written as code, one for each call."""
    changed = {change.rule for change in capture.changes}
    written = {call: rule for rule, call in _CALLS.items() if rule in changed}
    return (*([PARTIAL_WRITE] if PARTIAL_WRITE in changed else []), *written.values())


def rewriting_code(capture: Capture, rules: Collection[str]) -> str:
    """The definition of ``rewrite(graph_module)`` for some of the :func:`recorded` rules; empty if it calls nothing."""
    calls = dict.fromkeys(call for rule, call in _CALLS.items() if rule in rules)
    if not calls:
        return ""
    ops = [target for kind in capture.decompose for target in RECURRENT.get(kind, ())]
    opened = "torch.nn.MultiheadAttention, " if ATTENTION in capture.decompose else ""
    return (
        f"RECURRENT = ({''.join(f'torch.ops.{target}, ' for target in ops)})\n"
        f"OPENED = ({opened})\n\n\n"
        "def rewrite(graph_module):\n"
        '    """Changes how the graph is written, not what it computes, for quantizers that fail or skip ops."""\n'
        + "".join(f"    {call}\n" for call in calls)
    )
