"""Decomposes attention on request.

``scaled_dot_product_attention`` is one op with two matrix products inside, which no quantizer sees.  The linears and
batched products of ``nn.MultiheadAttention`` count as part of that module, which quantizers that match modules (x86)
leave in float.  :func:`pt2qa._capture.normalise.sources.write_sources` opens the module; this pass rewrites the ops in
a form that quantizers know.

The formula is that of the op's documentation, ``softmax(q kᵀ · scale + mask) v``, written so that quantizers accept it:

- products are ``matmul``, which x86 knows, and not ``bmm``;
- the scale is a division by its inverse, as in the attention pattern that Inductor fuses; quantizers that annotate
  every ``mul`` (XNNPACK) would round a multiplication;
- the negated mask is subtracted, not added: a quantizer that annotates every ``add`` would let the mask's -inf or -3e38
  determine a scale.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.export import ExportedProgram

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import names_by_node, renew_outputs
from pt2qa._graph.internals import flow_passes

ATTENTION = "attention"
"""The kind that ``capture(decompose=...)`` takes."""
MODULE = nn.MultiheadAttention
"""The module that it opens."""

RULE: Final = "attention"

_ATEN = torch.ops.aten
_WHAT: dict[Any, str] = {
    _ATEN.scaled_dot_product_attention.default: "decomposed into two matmuls and the ops between them",
    _ATEN.bmm.default: "written as a matmul",
    _ATEN.baddbmm.default: "written as a matmul and a mask",
}


def decompose_attention(program: ExportedProgram) -> tuple[Change, ...]:
    """Replaces attention with matrix products and the ops between them, in place.

    This covers every ``scaled_dot_product_attention`` and the batched products of ``nn.MultiheadAttention``.
    """
    names = names_by_node(program)
    changed = flow_passes.decompose_attention(program.graph_module)
    renew_outputs(program)
    return tuple(Change(RULE, names[node], _WHAT[node.target]) for node in changed)
