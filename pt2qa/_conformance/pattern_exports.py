"""Patterns that quantizers export again and again are exported once.

Some quantizers find a pattern by exporting a small function for it, a dozen to hundreds of them at every ``annotate``,
which takes seconds to minutes.  What ``torch.export`` makes of a module without parameters depends on its code, what
that encloses, and the shapes of the inputs alone, so a conformance run does it once.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

_PLAIN = (bool, int, float, str, type(None), type, torch.dtype, torch.device, types.BuiltinFunctionType)
_TORCH_STATE = frozenset(nn.Module().__dict__)


class Pattern:
    """An exported program of which only the graph is wanted.

    Args:
        program: the program.
    """

    def __init__(self, program: Any) -> None:
        self._program = program
        self._module: GraphModule | None = None

    def module(self, **options: Any) -> GraphModule:
        """A fresh graph; with options, the program's own."""
        if options:
            return self._program.module(**options)  # type: ignore[no-any-return]
        if self._module is None:
            self._module = self._program.module()
        return copy.deepcopy(self._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


_EXPORTED: dict[Hashable, Pattern] = {}


class _NotAPattern(Exception):
    """What is exported may depend on more than can be compared."""


@contextlib.contextmanager
def patterns_exported_once() -> Iterator[None]:
    """While it lasts, ``torch.export.export`` gives the same program for the same pattern; not for threads."""
    export = torch.export.export

    def once(mod: nn.Module, args: Any, kwargs: Any = None, **options: Any) -> Any:
        try:
            key = (_key(mod), _key(args), _key(kwargs), _key(options))
        except _NotAPattern:
            return export(mod, args, kwargs, **options)
        if key not in _EXPORTED:
            _EXPORTED[key] = Pattern(export(mod, args, kwargs, **options))
        return _EXPORTED[key]

    torch.export.export = once
    try:
        yield
    finally:
        torch.export.export = export


def _key(value: Any) -> Hashable:
    """Equal for values that export alike.

    Raises:
        _NotAPattern: the value is of a kind that is not known.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, tuple | list):
        return (type(value), *map(_key, value))
    if isinstance(value, dict):
        return (type(value), *((name, _key(item)) for name, item in value.items()))
    if isinstance(value, nn.Module):
        return _module_key(value)
    if isinstance(value, types.FunctionType):
        return (
            value.__code__,
            _key(value.__defaults__),
            _key(value.__kwdefaults__),
            *map(_cell_key, value.__closure__ or ()),
        )
    raise _NotAPattern


def _cell_key(cell: types.CellType) -> Hashable:
    try:
        content = cell.cell_contents
    except ValueError as error:  # nothing was put in yet
        raise _NotAPattern from error
    return _key(content)


def _module_key(module: nn.Module) -> Hashable:
    if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        raise _NotAPattern
    own = {name: value for name, value in vars(module).items() if name not in _TORCH_STATE}
    return _key(type(module).forward), module.training, _key(dict(module.named_children())), _key(own)
