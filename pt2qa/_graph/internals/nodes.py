"""What torch and torchao write into the nodes of a graph: keys of ``node.meta``, targets and paths.

No public interface reads any of it.  This file needs neither of them to be imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.fx import Node

VALUE: Final = "val"
"""The traced value: a fake tensor with shape, dtype and strides; nested where an op has several outputs."""

MODULE_STACK: Final = "nn_module_stack"
"""The modules that called an op; see :func:`module_stack`."""

STACK_TRACE: Final = "stack_trace"
"""The lines of Python that called an op, as a traceback prints them."""

SOURCES: Final = "source_fn_stack"
"""By what quantizers that match source partitions know an op: pairs of a label and a class or function."""

CUSTOM: Final = "custom"
"""The one dict of ``node.meta`` that torch and torchao copy to new nodes whatever is in it: pt2qa's own notes."""

HANDLE: Final = "numeric_debug_handle"
"""Where torchao's numeric debugger has its handles in :data:`CUSTOM`; pt2qa reads and writes the same."""

PROVENANCE: Final = "from_node"
"""From which node of which graph torch's passes made a node; see :func:`first_ancestor`."""

ANNOTATION: Final = "quantization_annotation"
"""A quantizer's ``QuantizationAnnotation``."""

_ORIGIN: Final = (MODULE_STACK, STACK_TRACE, "torch_fn")
_GUARDS: Final = "_guards_fn"
_ROOTS: Final = ("L['self']", "L__self__", "_export_root", "_empty_nn_module_stack_from_metadata_hook")
"""How paths begin that torch writes for the model itself; the last is that of ops that no module called."""

_CALL: Final = re.compile(r"@\d+\Z")
"""The number of a second call, at the end of a path; a module's own name may hold an ``@``."""


def calls_guards(node: Node) -> bool:
    """Whether a node is torch's check of the inputs, which ``ExportedProgram.module()`` inserts: it is not an op."""
    return node.op == "call_module" and node.target == _GUARDS


def module_stack(node: Node) -> Mapping[str, tuple[str, type | str]]:
    """The modules around an op, outermost first: a key for each call, with path and class; empty if unknown.

    ``torch.export`` gives each call of a module its own key, and the class as a type or as its qualified name.
    """
    found: Mapping[str, tuple[str, Any]] | None = node.meta.get(MODULE_STACK)
    return {} if found is None else found


def first_ancestor(node: Node) -> tuple[int, str] | None:
    """The graph (its id) and the name of the node that a node goes back to; None if torch noted nothing.

    An exported program's own nodes have no note, those of ``ExportedProgram.module()`` and of whatever is made from it
    go back to them.
    """
    sources: list[Any] | None = node.meta.get(PROVENANCE)
    if not sources:
        return None
    source = sources[-1]
    while source.from_node:
        source = source.from_node[-1]
    return source.graph_id, source.name


def origin_of(node: Node) -> dict[str, Any]:
    """All metadata that says who called an op, and where: what its replacements inherit."""
    return {key: node.meta[key] for key in _ORIGIN if key in node.meta}


def clean_path(path: str) -> str:
    """A module path without the decorations of ``nn_module_stack``: its root, and the number of a second call.

    >>> clean_path("L['self'].layer1.0.relu@1"), clean_path("_export_root.fc"), clean_path("L['self']")
    ('layer1.0.relu', 'fc', '')
    """
    path = _CALL.sub("", path)
    for root in _ROOTS:
        path = path.removeprefix(root).removeprefix(".")
    return path
