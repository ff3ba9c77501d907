"""Where a model lies, and so where everything that belongs to it runs: inputs are moved there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pt2qa._graph.internals.torch import pytree

Values = TypeVar("Values")


def common_device(values: Iterable[Any]) -> torch.device | None:
    """The one device that all tensors lie on; None if there is no tensor, or if they lie on several."""
    found = {value.device for value in values if isinstance(value, Tensor)}
    return found.pop() if len(found) == 1 else None


def device_of(model: nn.Module) -> torch.device | None:
    """The one device of all parameters and buffers."""
    return common_device([*model.parameters(), *model.buffers()])


def moved(values: Values, device: torch.device | None) -> Values:
    """Nested values with all tensors on a device, except for meta tensors; ``None`` leaves them where they are."""
    if device is None:
        return values
    found: Values = pytree.tree_map_only(Tensor, lambda each: each if each.is_meta else each.to(device), values)
    return found
