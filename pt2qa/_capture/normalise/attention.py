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

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.decomposition import put_instead, trace
from pt2qa._capture.normalise.editing import names_by_node
from pt2qa._graph.handles import module_of
from pt2qa._graph.internals.torch import SAFE_SOFTMAX

ATTENTION = "attention"
"""The kind that ``capture(decompose=...)`` takes."""
MODULE = nn.MultiheadAttention
"""The module that it opens."""

RULE: Final = "attention"


def decompose_attention(program: ExportedProgram) -> tuple[Change, ...]:
    """Replaces attention with matrix products and the ops between them, in place.

    This covers every ``scaled_dot_product_attention`` and the batched products of ``nn.MultiheadAttention``.
    """
    wanted = [
        node
        for node in program.graph.nodes
        if node.target in _ANYWHERE or (node.target in _IN_MODULE and module_of(node)[1] == MODULE.__name__)
    ]
    names = names_by_node(program) if wanted else {}
    changes = []
    for node in wanted:
        decomposition, what = _ANYWHERE.get(node.target) or _IN_MODULE[node.target]
        put_instead(program, node, trace(node, decomposition))
        changes.append(Change(RULE, names[node], what))
    return tuple(changes)


def attention_in_ops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,  # a model with dropout in eval mode is random, which capture refuses
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    divisor = math.sqrt(query.shape[-1]) if scale is None else 1 / scale if scale else math.inf
    scores = torch.matmul(query, key.transpose(-2, -1)) / divisor
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is None:
        return torch.matmul(torch.softmax(scores, -1), value)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores - -mask
    # If a mask hides a whole row, the op returns zeros.
    return torch.matmul(SAFE_SOFTMAX(scores, -1), value)


def masked_product(mask: Tensor, query: Tensor, key: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    scores = torch.matmul(query, key)
    scores = scores if alpha == 1 else scores * alpha
    return scores - -(mask if beta == 1 else mask * beta)


_Decomposition = tuple[Callable[..., Any], str]

_ANYWHERE: dict[Any, _Decomposition] = {
    torch.ops.aten.scaled_dot_product_attention.default: (
        attention_in_ops,
        "decomposed into two matmuls and the ops between them",
    )
}
_IN_MODULE: dict[Any, _Decomposition] = {
    torch.ops.aten.bmm.default: (torch.matmul, "written as a matmul"),
    torch.ops.aten.baddbmm.default: (masked_product, "written as a matmul and a mask"),
}
