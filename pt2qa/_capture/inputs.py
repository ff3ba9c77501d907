"""Example inputs: their form, names and device, and a check that no two of them are the same tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from pt2qa._graph.internals.torch import is_traceable_wrapper_subclass, pytree
from pt2qa.errors import CaptureError

Values = TypeVar("Values")


def as_call(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs, of a tuple, one tensor or a dict."""
    if isinstance(args, Mapping):
        if kwargs is not None:
            raise CaptureError(
                "args is a dict, which means keyword inputs, and kwargs is given too. ",
                "Pass positional inputs as a tuple in args, or everything in one dict.",
            )
        args, kwargs = (), dict(args)
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, tuple):
        reason = refusal("args", args)
        if reason is not None:
            raise CaptureError(*reason)
        hint = "Pass tuple(args)." if isinstance(args, list) else "Pass (value,) for one input that is not a tensor."
        raise CaptureError(
            f"args is a {type(args).__name__}; expected a tuple of positional inputs, a tensor, or a dict of keyword "
            "inputs. ",
            hint,
        )
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        given = f"dict with the keys {list(kwargs)}" if isinstance(kwargs, dict) else type(kwargs).__name__
        raise CaptureError(f"kwargs is a {given}; expected a dict of input names and values.")
    return args, kwargs


def leaf_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every leaf of nested inputs with its name, such as ``args[1]`` or ``kwargs['state'][0]``."""
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
    return [(("args", "kwargs")[path[0].idx] + pytree.keystr(path[1:]), value) for path, value in leaves]  # type: ignore[attr-defined]


def refusal(name: str, value: object) -> tuple[str, str] | None:
    """Why a value cannot be an input, and what to pass instead, as sentences; None if it can."""
    if isinstance(value, np.ndarray):
        what = f"a NumPy array of shape {list(value.shape)} and dtype {value.dtype}"
        return f"{name} is {what}; expected a tensor. ", "Pass torch.from_numpy(...) of it."
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        return f"{name} is a {type(value).__qualname__}, a tensor subclass; expected a plain tensor.", ""
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        what = f"{name} has the layout {layout}; expected a dense tensor, as quantization takes it. "
        return what, "Pass its to_dense()."
    return None


def without_gradients(value: Tensor) -> Tensor:
    """The tensor, with its memory if possible, for a run that records no gradients of it.

    torch does not allow a tensor from inference mode in a run that records gradients.
    """
    if value.is_inference():
        value = value.clone()
    return value.detach() if value.requires_grad or isinstance(value, nn.Parameter) else value


def refuse_unusable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name, value in leaf_names(args, kwargs):
        reason = refusal(f"example input {name}", value)
        if reason is not None:
            raise CaptureError(*reason)


def refuse_aliases(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses example inputs that share memory with each other, or with a parameter or buffer of the model.

    If one tensor is passed twice, ``torch.export`` turns it into one input; if a parameter is passed as an input, it
    confuses the two.  The program then silently reads the wrong one.
    """
    inputs = [(name, value) for name, value in leaf_names(args, kwargs) if isinstance(value, Tensor)]
    for (first, a), (second, b) in combinations(inputs, 2):
        if share_memory(a, b):
            what = "are the same tensor" if a is b else "share memory"
            raise CaptureError(
                f"example inputs {first} and {second} {what}; expected separate tensors, because torch.export would "
                "make one input of both. ",
                f"Pass {second}.clone().",
            )
    state: list[tuple[str, Tensor]] = [(f"parameter {name!r}", value) for name, value in model.named_parameters()]
    state += [(f"buffer {name!r}", value) for name, value in model.named_buffers()]
    for (what, own), (leaf, value) in product(state, inputs):
        if share_memory(own, value):
            raise CaptureError(
                f"example input {leaf} shares memory with the model's {what}; expected a separate tensor, because "
                "torch.export would take one for the other. ",
                f"Pass {leaf}.detach().clone().",
            )


def share_memory(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if any(t.layout is not torch.strided or not t.numel() or t.device.type == "meta" for t in (a, b)):
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.dtype != b.dtype:
        return True
    used = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool)
    used.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(used.as_strided(b.shape, b.stride(), b.storage_offset()).any())


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
