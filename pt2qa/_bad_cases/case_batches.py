"""Inputs of a step, which may be outputs of the previous one, and of a case: cut out of a batch, copied and stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._bad_cases.rows import AS_FLOAT32, AS_REAL, Array, StoredCase, key_of, stored_dtype
from pt2qa._graph.internals.torch import pytree
from pt2qa._simulator.batches import Batch, input_names
from pt2qa._simulator.outputs import named_parts
from pt2qa.errors import BatchError, SelectionError

State = Mapping[str, Any]
"""Fed inputs by name."""


@dataclass(frozen=True)
class Feedback:
    """Which inputs of a step (the keys of ``sources``) are which outputs of the previous step."""

    sources: Mapping[str, str]
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, graph_module: GraphModule, sources: Mapping[str, str]) -> Feedback:
        inputs = tuple(input_names(graph_module))
        unknown = sorted(sources.keys() - set(inputs))
        if unknown:
            raise SelectionError(f"feedback: the model has no input {unknown[0]!r}; it takes {', '.join(inputs)}.")
        return cls(sources, inputs)

    def fill(self, batch: Batch, state: State) -> Batch:
        """A batch, with the state filled in for fed inputs that it omits or gives as None.

        Raises a BatchError where there is no previous step.
        """
        if not self.sources:
            return batch
        values = list(batch) if isinstance(batch, (dict, tuple, list)) else [batch]
        given = dict(batch) if isinstance(batch, dict) else dict(zip(self.inputs, values, strict=False))
        last = len(values)
        for name in sorted(self.sources, key=self.inputs.index):
            last = max(last, self.inputs.index(name) + 1)
            if given.get(name) is not None:
                continue
            if name not in state:
                raise BatchError(
                    f"the first batch has no input {name!r}. feedback takes it from {self.sources[name]} of the "
                    "previous batch, so the first batch of a sequence must include it."
                )
            given[name] = state[name]
        if isinstance(batch, dict):
            return given
        return (*map(given.get, self.inputs[:last]), *values[len(self.inputs) :])

    def state(self, outputs: Any) -> State:
        if not self.sources:
            return {}
        parts = dict(named_parts(outputs))
        for source in self.sources.values():
            if source not in parts:
                raise SelectionError(f"feedback: the model has no output {source!r}; it returns {', '.join(parts)}.")
        return {name: parts[source] for name, source in self.sources.items()}


@dataclass(frozen=True, slots=True)
class CaseBatch:
    """A copy of the inputs of one sample or batch; the sample must be repeated so often to fit the model."""

    batch: Batch
    index: int
    repeats: int


def cut(batch: Batch, sample: int, axis: int) -> Batch:

    def narrow(value: Any) -> Any:
        return value.narrow(axis, sample, 1) if isinstance(value, Tensor) and value.dim() > axis else value

    return pytree.tree_map(narrow, batch)


def copied(batch: Batch) -> Batch:
    """A copy of a batch: a view would keep the whole batch alive, and loaders may reuse their tensors."""
    return pytree.tree_map(lambda value: value.detach().clone() if isinstance(value, Tensor) else value, batch)


def stored(case: CaseBatch, key: tuple[int, int]) -> tuple[StoredCase, dict[str, Array]]:
    """A case for the report; raises a BatchError where an input is no tensor that NumPy can hold and no plain value."""
    arrays: dict[str, Array] = {}
    structure = _node(case.batch, key, arrays)
    return StoredCase(*key, case.index, case.repeats, json.dumps(structure)), arrays


def _node(value: Any, key: tuple[int, int], arrays: dict[str, Array]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        number = len(arrays)
        dtype = str(value.dtype).removeprefix("torch.")
        arrays[key_of(*key, number)] = _array(value, dtype)
        return {"tensor": number, "dtype": dtype}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_node(item, key, arrays) for item in value]}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {"dict": [[name, _node(item, key, arrays)] for name, item in value.items()]}
    raise BatchError(
        f"an input is a {type(value).__name__}, which a report cannot hold; expected tensors, numbers and strings in "
        "tuples, lists and dicts."
    )


def _array(tensor: Tensor, dtype: str) -> Array:
    if not stored_dtype(dtype) or tensor.layout != torch.strided:
        raise BatchError(f"an input has dtype {dtype} and layout {tensor.layout}, which a report cannot hold.")
    if dtype in AS_FLOAT32:
        tensor = tensor.to(torch.float32)
    elif dtype in AS_REAL:
        tensor = torch.view_as_real(tensor.resolve_conj())
    array: Array = tensor.detach().cpu().contiguous().numpy()
    return array
