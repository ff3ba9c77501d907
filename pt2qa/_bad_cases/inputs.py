"""The inputs of bad cases, as NumPy arrays and a JSON text that describes their nesting; and back to tensors.

The text is one node: ``{"tensor": 0, "dtype": "float32"}`` is array 0 of the case, ``{"value": 3}`` a plain value, and
``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [["name", ...], ...]}`` hold further nodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from pt2qa.errors import ReportError

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

AS_FLOAT32: Final = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
"""dtypes that NumPy lacks and float32 holds exactly."""

AS_REAL: Final = {"complex64": "float32", "complex128": "float64"}
"""Stored with an additional last axis for the real and imaginary part."""

SAME: Final = frozenset(
    {"float16", "float32", "float64", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
)

DEEPEST: Final = 64


def stored_dtype(dtype: str) -> str:
    """The NumPy dtype in which a torch dtype is stored; empty if it cannot be stored.

    >>> stored_dtype("int64"), stored_dtype("bfloat16"), stored_dtype("qint8")
    ('int64', 'float32', '')
    """
    if dtype in SAME:
        return dtype
    return "float32" if dtype in AS_FLOAT32 else AS_REAL.get(dtype, "")


def key_of(batch: int, sample: int, number: int) -> str:
    """The name of a case's array in the file; sample -1 is a whole batch."""
    return f"{batch}/{sample}/{number}"


def check_structure(text: str, prefix: tuple[int, int], arrays: Mapping[str, Array]) -> set[str]:
    """The names of the arrays that a case consists of.

    Raises a ReportError where the text is not what this module describes, or an array is missing or of another dtype.
    """
    leaves: list[tuple[int, str]] = []
    try:
        _filled(json.loads(text), lambda number, dtype: leaves.append((number, dtype)))
    except (ValueError, RecursionError) as error:
        raise ReportError(f"the structure of case {prefix} is damaged: {error}") from error
    names = set()
    for number, dtype in leaves:
        name = key_of(*prefix, number)
        want = stored_dtype(dtype)
        if not want:
            raise ReportError(f"the structure of case {prefix} has the unknown dtype {dtype!r}")
        if name not in arrays:
            raise ReportError(f"the input tensor {name!r} is missing")
        got = arrays[name]
        if got.dtype != np.dtype(want) or (dtype in AS_REAL and (not got.ndim or got.shape[-1] != 2)):
            raise ReportError(f"the input tensor {name!r} is {got.dtype} of shape {got.shape}, expected {want}")
        names.add(name)
    return names


def rebuild(
    text: str, prefix: tuple[int, int], arrays: Mapping[str, Array], repeats: int, axis: int
) -> torch.Tensor | tuple[Any, ...] | list[Any] | dict[str, Any]:
    """The batch of a case, given its structure, as torch tensors with their original dtypes.

    ``prefix`` is the number of the batch and of the sample, which is repeated along the batch axis to fit the model.
    """
    # Imported here: reports are loaded and shown without torch.
    import torch

    def tensor(number: int, dtype: str) -> torch.Tensor:
        # A copy, so that changes by the user do not affect the report.
        stored = torch.from_numpy(np.array(arrays[key_of(*prefix, number)]))
        tensor = (torch.view_as_complex(stored) if dtype in AS_REAL else stored).to(getattr(torch, dtype))
        return tensor.repeat_interleave(repeats, axis) if repeats > 1 and tensor.dim() > axis else tensor

    return _filled(json.loads(text), tensor)  # type: ignore[no-any-return]


def _filled(node: Any, leaf: Callable[[int, str], Any], depth: int = 0) -> Any:
    """A structure with what ``leaf`` makes of a tensor's number and dtype; a ValueError if it is not a structure."""
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    match node:
        case {"tensor": int(number), "dtype": str(dtype)} if len(node) == 2:
            return leaf(number, dtype)
        case {"value": bool() | int() | float() | str() | None as value} if len(node) == 1:
            return value
        case {"tuple": list(items)} if len(node) == 1:
            return tuple(_filled(item, leaf, depth + 1) for item in items)
        case {"list": list(items)} if len(node) == 1:
            return [_filled(item, leaf, depth + 1) for item in items]
        case {"dict": list(items)} if len(node) == 1:
            for item in items:
                if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)):
                    raise ValueError(f"expected pairs of name and value, got {item!r:.60}")
            return {name: _filled(item, leaf, depth + 1) for name, item in items}
        case _:
            raise ValueError(f"expected a tensor, a value, a tuple, a list or a dict, got {node!r:.60}")
