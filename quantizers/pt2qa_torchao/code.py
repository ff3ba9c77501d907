"""A call of ``quantize_`` as Python source."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
from collections.abc import Mapping
from typing import Any

import torch

SAID = ("dtype", "granularity", "group_size")
"""Ends of the names of what a reader looks for in a config, and is written whether it is the default or not."""


def call_of(configs: Mapping[str, Any]) -> str:
    """Source that quantizes ``model`` in place: the config of each module, by its name; None keeps it in float."""
    found = [config for config in configs.values() if config is not None]
    distinct = [config for number, config in enumerate(found) if config not in found[:number]]
    imports: dict[str, set[str]] = {"torchao.quantization": {"FqnToConfig", "quantize_"}}
    lines = [f"config_{number} = {_source(config, imports)}" for number, config in enumerate(distinct, 1)]
    entries = [
        f"    {json.dumps(name)}: {None if config is None else f'config_{distinct.index(config) + 1}'},"
        for name, config in configs.items()
    ]
    torch_too = ["import torch"] if any("torch." in line for line in lines) else []
    froms = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
    call = ["quantize_(model, FqnToConfig({", *entries, "}), filter_fn=None)"]
    return "\n".join([*torch_too, *froms, "", *lines, *call, ""])


def _source(value: Any, imports: dict[str, set[str]]) -> str:
    """An expression for a config or what it holds; notes the classes that it names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = [
            f"{field.name}={_source(own, imports)}"
            for field in dataclasses.fields(value)
            if (own := getattr(value, field.name)) != field.default or (field.name.endswith(SAID) and own is not None)
        ]
        return f"{_named(type(value), imports)}({', '.join(given)})"
    if isinstance(value, enum.Enum):
        return f"{_named(type(value), imports)}.{value.name}"
    return repr(value)


def _named(kind: type, imports: dict[str, set[str]]) -> str:
    public = importlib.import_module("torchao.quantization")
    module = public.__name__ if getattr(public, kind.__name__, None) is kind else kind.__module__
    imports.setdefault(module, set()).add(kind.__name__)
    return kind.__name__


def run(code: str, model: torch.nn.Module) -> None:
    """Quantizes a model in place, as the code says."""
    exec(code, {"model": model})
