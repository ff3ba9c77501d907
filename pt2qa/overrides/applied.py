"""A plan in flows that pt2qa does not run: a quantizer for any ``prepare``, also inside an exporter's recipe."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from pt2qa._graph.handles import OpName, assign_handles, names_of, remove_handles
from pt2qa.overrides.edited import EditedQuantizer
from pt2qa.overrides.plan import Edit
from pt2qa.overrides.printed import changed_specs
from pt2qa.plugins import QuantizerPlugin, resolve


@dataclass(eq=False, repr=False)
class PlannedQuantizer(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """Applies the same edits to every model that it is given.

    Each model gets an :class:`EditedQuantizer` of its own.  Ops are found by their handles; a graph without handles has
    them while it is annotated.

    Args:
        quantizer: as :func:`pt2qa.quantize` takes it.
        edits: the edits, in order.
        qat: whether it is for ``prepare_qat_pt2e``.

    Raises:
        PluginError: there is no such quantizer.
    """

    quantizer: InitVar[Any]
    edits: tuple[Edit, ...]
    qat: bool = field(kw_only=True)
    _plugin: QuantizerPlugin = field(init=False)
    _edited: EditedQuantizer | None = field(default=None, init=False)
    _bodies: weakref.WeakSet[GraphModule] = field(default_factory=weakref.WeakSet, init=False)
    _numbered: bool = field(default=False, init=False)

    def __post_init__(self, quantizer: Any) -> None:
        self._plugin = resolve(quantizer)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Applies the quantizer's own rewriting of the graph before annotation."""
        if model not in self._bodies:
            self._edited = self._begin(model)
        return self._current.transform_for_annotation(model)

    def annotate(self, model: GraphModule) -> GraphModule:
        """Lets the quantizer annotate, then edits the annotations; changes ``model`` in place, as torchao expects."""
        begun = self._edited is not None and self._edited.annotations is None and names_of(model)
        if not begun and model not in self._bodies:
            self._edited = self._begin(model)
        model = self._current.annotate(model)
        # prepare goes on with the bodies of the model's loops, which no edit reaches.
        self._bodies.update(part for part in model.modules() if isinstance(part, GraphModule) and part is not model)
        if self._numbered:
            remove_handles(model)
        return model

    def validate(self, model: GraphModule) -> None:
        """Runs the quantizer's own checks of an annotated graph."""
        self._current.validate(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, edge_or_node_to_obs_or_fq: Any) -> None:
        """Lets the quantizer change its observers before they are inserted."""
        self._current.prepare_obs_or_fq_callback(model, edge_or_node_to_obs_or_fq)

    def changed_specs(self, graph: GraphModule) -> str:
        """See :func:`pt2qa.overrides.printed.changed_specs`; ``graph`` has handles."""
        return changed_specs(graph, self._plugin, self.edits, names_of(graph), qat=self.qat)

    @property
    def _current(self) -> EditedQuantizer:
        assert self._edited is not None, "prepare has the model annotated first"
        return self._edited

    def _begin(self, model: GraphModule) -> EditedQuantizer:
        """The quantizer of a new model; numbers its ops, in place, if they have no handles."""
        names = names_of(model)
        self._numbered = not names
        if not names:
            assign_handles(model)
            names = names_of(model)
        quantizer = self._plugin.build(model, qat=self.qat)
        return EditedQuantizer(quantizer, self._plugin, self.edits, {**_folded(model, names), **names}, qat=self.qat)


def _folded(model: GraphModule, names: Mapping[int, OpName]) -> dict[int, OpName]:
    """The names of the batch norms that prepare folded before any quantizer saw the graph, under negative numbers.

    Their statistics are still in the model.
    """
    known = {name.name for name in names.values()}
    buffers = [name.rpartition(".") for name, _ in model.named_buffers(remove_duplicate=False)]
    modules = [module for module, _, buffer in buffers if buffer == "running_mean"]
    found = [OpName(f"{module}/batch_norm", module, "", "batch_norm") for module in modules]
    return {-number: name for number, name in enumerate(found, start=1) if name.name not in known}
