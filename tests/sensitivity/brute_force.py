"""Sensitivity written out: the whole model once for each place, with float64 sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

import pt2qa
from pt2qa._sensitivity.site_groups import find_site_groups
from pt2qa._simulator.outputs import structured


def noises(
    pair: pt2qa.QuantizedPair,
    batches: Sequence[Any],
    group: Any = None,
    post_process: Callable[[Any], Any] = lambda outputs: outputs,
) -> list[float]:
    """Squared output error of each place, summed over batches."""

    def outputs(batch: Any, on: Any) -> list[Tensor]:
        result = post_process(structured(pair.quantized, pair.simulator.run(pair.values(batch), on=on)))
        return [leaf.double() for leaf in pytree.tree_leaves(result) if leaf.is_floating_point()]

    return [
        sum(
            float(((ref - alone) ** 2).sum())
            for batch in batches
            for ref, alone in zip(outputs(batch, False), outputs(batch, place.sites), strict=True)
        )
        for place in find_site_groups(pair.program, group)
    ]
