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
    """Which inputs of a step are which outputs of the previous step.

    Attributes:
        sources: input name → output name.
        inputs: the model's inputs in order, by the names of forward's parameters.
    """

    sources: Mapping[str, str]
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, graph_module: GraphModule, sources: Mapping[str, str]) -> Feedback:
        """The feedback of a model; raises a SelectionError where it has no such input."""
        inputs = tuple(input_names(graph_module))
        unknown = sorted(sources.keys() - set(inputs))
        if unknown:
            raise SelectionError(f"feedback: no input is called {unknown[0]!r}; the model takes {', '.join(inputs)}.")
        return cls(sources, inputs)

    def fill(self, batch: Batch, state: State) -> Batch:
        """A batch, with the state filled in for fed inputs that it omits or gives as None.

        Raises a BatchError where there is no previous step.
        """
        if not self.sources:
            return batch
        given = dict(batch) if isinstance(batch, dict) else None
        values = [] if given is not None else list(batch) if isinstance(batch, (tuple, list)) else [batch]
        for name in sorted(self.sources, key=self.inputs.index):
            place = self.inputs.index(name)
            if given is None:
                values += [None] * (place + 1 - len(values))
            found = values[place] if given is None else given.get(name)
            if found is None and name not in state:
                raise BatchError(
                    f"the first item gives no input {name!r}; feedback takes it from {self.sources[name]} of the step "
                    "before, so the first step of a sequence needs one."
                )
            if found is None and given is None:
                values[place] = state[name]
            elif found is None and given is not None:
                given[name] = state[name]
        return given if given is not None else tuple(values)

    def state(self, outputs: Any) -> State:
        """The state for the next step, from a run's result; raises a SelectionError where an output does not exist."""
        if not self.sources:
            return {}
        parts = dict(named_parts(outputs))
        for source in self.sources.values():
            if source not in parts:
                raise SelectionError(f"feedback: no output is called {source!r}; the model returns {', '.join(parts)}.")
        return {name: parts[source] for name, source in self.sources.items()}
