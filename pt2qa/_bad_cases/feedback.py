"""Stateful models: inputs that are outputs of the previous step, separately for each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

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
