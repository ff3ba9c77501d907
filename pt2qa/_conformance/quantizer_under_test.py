"""What is checked: a quantizer, or a function that makes one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from pt2qa.plugins import BackendSpec, QuantizerPlugin, describe, resolve, spec_of


@dataclass(frozen=True)
class QuantizerUnderTest:
    """Anything :func:`pt2qa.quantize` takes, or a function without arguments that returns it."""

    quantizer: Any
    qat: bool = False
    given_spec: BackendSpec | None = None

    @property
    def makes_new_ones(self) -> bool:
        """Whether each graph gets a new quantizer."""
        return self._factory or not isinstance(self.quantizer, Quantizer)

    def plugin(self) -> QuantizerPlugin:
        """The quantizer as a plug-in: a new one if it can be made, else the given object.

        Raises:
            PluginError: it is not a quantizer.
        """
        return resolve(self.quantizer() if self._factory else self.quantizer)

    @functools.cached_property
    def spec(self) -> BackendSpec | None:
        """What the backend takes: as given, else as the plug-in or the quantizer states it."""
        return spec_of(self.plugin()) if self.given_spec is None else self.given_spec

    @property
    def name(self) -> str:
        """Its name in reports."""
        return describe(self.plugin()) + (" for QAT" if self.qat else "")

    @property
    def note(self) -> str:
        """How quantizers were made for the graphs."""
        if self._factory:
            made = getattr(self.quantizer, "__qualname__", type(self.quantizer).__name__)
            return f"each graph was annotated by a new quantizer from {made}()"
        if self.makes_new_ones:
            return "each graph was annotated by a new quantizer from the plug-in"
        return "all graphs were annotated by the one object that was given; pass a function to have a new one for each"

    @property
    def _factory(self) -> bool:
        if isinstance(self.quantizer, type):
            return True
        return callable(self.quantizer) and not isinstance(self.quantizer, Quantizer | QuantizerPlugin)


@dataclass(frozen=True)
class ChangedPlugin:
    """A plug-in whose quantizer is changed after it is built."""

    plugin: QuantizerPlugin
    change: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """As the plug-in's."""
        return self.plugin.name

    @property
    def summary(self) -> str:
        """As the plug-in's."""
        return self.plugin.summary

    def build(self, graph: GraphModule, *, qat: bool) -> Any:
        """The plug-in's quantizer, changed by ``change``."""
        return self.change(self.plugin.build(graph, qat=qat))
