"""A device without hardware: what it computes is the CPU's, bit for bit, but no op takes a tensor of the CPU as well.

Its tensors wrap those of the CPU and have the device ``sim``.  Like a GPU's, they mix with the CPU's only where torch
lets them: numbers (tensors without dimensions), indices, and copies.  ``numpy()`` refuses them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

MIXING = (
    "aten::_to_copy",
    "aten::copy_",
    "aten::index",
    "aten::index_put_",
    "aten::index_put",
    "aten::_index_put_impl_",
)
FORBIDDEN: set[torch.dtype] = set()
"""Dtypes that the device lacks."""


class Simulated(torch.Tensor):
    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Simulated:
        if raw.dtype in FORBIDDEN:
            raise TypeError(f"the device has no {raw.dtype}")
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.shape,
            raw.stride(),
            raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("sim:0"),
        )
        made.raw = raw
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            new = Simulated(self.raw.clone()).requires_grad_(self.requires_grad)
            new.__dict__.update({name: value for name, value in self.__dict__.items() if name != "raw"})
            memo[id(self)] = new
        return memo[id(self)]

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def resize_(self, *shape: Any, **options: Any) -> Simulated:  # type: ignore[override]
        self.raw.resize_(*shape, **options)
        self.follow()
        return self

    def follow(self) -> None:
        """Takes the shape of the wrapped tensor, if an op has resized it."""
        if self.shape != self.raw.shape:
            raw = self.raw
            self.data = Simulated(raw)
            self.raw = raw

    def tolist(self) -> Any:
        return self.raw.tolist()

    def new_tensor(self, data: Any, **options: Any) -> Any:
        return torch.tensor(data, **({"dtype": self.dtype} | options)).to("sim")

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert sim:0 device type tensor to numpy. Use Tensor.cpu() first.")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    own = [each for each in tensors if isinstance(each, Simulated)]
    if own and name not in MIXING and any(each.dim() for each in tensors if not isinstance(each, Simulated)):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found sim:0 and cpu")
    result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
    if name == "aten::copy_":
        return args[0]
    device = kwargs.get("device")
    leaves_device = name == "aten::_to_copy" and (not own if device is None else device.type != "sim")
    if name == "aten::_local_scalar_dense" or leaves_device:
        return result
    for each in own:
        if each.raw is result:
            each.follow()
            return each
    return tree_map(lambda each: Simulated(each) if isinstance(each, torch.Tensor) else each, result)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "sim":
        return torch.device("cpu")
    return value.raw if isinstance(value, Simulated) else value


def simulate() -> None:
    """Makes the device known to torch, for the rest of the process."""
    _setup_privateuseone_for_python_backend("sim")
    made = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        # torch's own would call the device's kernels without Python.
        return made(data, **options) if device is None else made(data, **options).to(device)

    torch.tensor = tensor  # type: ignore[assignment]
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    simulate.library = library  # type: ignore[attr-defined]
