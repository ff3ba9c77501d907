"""A quantizer that edits: parameters before it annotates, and annotations before ``prepare`` reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from pt2qa._ambient import torch_defaults
from pt2qa._capture.program import Capture
from pt2qa._exclusion import exports
from pt2qa._graph.annotation import annotated_ops
from pt2qa._graph.copies import copy_to_edit
from pt2qa._graph.handles import OpName
from pt2qa._graph.internals.shortcuts import shortcuts
from pt2qa._graph.internals.torchao import fold_batch_norms
from pt2qa.errors import Pt2qaError, QuantizeError
from pt2qa.overrides.annotations import Annotations, fusions_in, read_annotations
from pt2qa.overrides.norms import change_norms
from pt2qa.overrides.plan import Edit
from pt2qa.overrides.points import write_specs
from pt2qa.plugins import QuantizerPlugin, resolve


@dataclass(eq=False, repr=False)
class EditedQuantizer(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """Wraps a quantizer, counts its annotations, and edits them.

    Attributes:
        annotations: what is annotated, edits included; None before that.
        annotated: by op type, how many ops the quantizer annotated before any edit.
    """

    quantizer: Any
    plugin: QuantizerPlugin
    edits: tuple[Edit, ...]
    names: Mapping[int, OpName]
    qat: bool = field(kw_only=True)
    annotations: Annotations | None = field(default=None, init=False)
    annotated: Counter[str] = field(default_factory=Counter, init=False)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Changes norms, and applies the quantizer's own rewriting of the graph before annotation."""
        if self.annotations is None:
            change_norms(model, self.edits, self.names)
        with self._blamed():
            return self.quantizer.transform_for_annotation(model)  # type: ignore[no-any-return]  # ditto

    def annotate(self, model: GraphModule) -> GraphModule:
        """Lets the quantizer annotate, then edits the annotations; changes ``model`` in place, as torchao expects.

        ``prepare`` calls this again for the bodies of loops, which no edit reaches.
        """
        with self._blamed():
            model = self.quantizer.annotate(model) or model
        if self.annotations is None:
            self.annotated = annotated_ops(model.graph.nodes)
            self.annotations = read_annotations(model, self.plugin, self.names, qat=self.qat)
            if self.edits:
                write_specs(model, self.annotations.specs, self.annotations.with_edits(self.edits).specs)
                self.annotations = read_annotations(model, self.plugin, self.names, qat=self.qat)
        return model

    def validate(self, model: GraphModule) -> None:
        """Runs the quantizer's own checks of an annotated graph."""
        with self._blamed():
            self.quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, edge_or_node_to_obs_or_fq: Any) -> None:
        """Lets the quantizer change its observers before they are inserted."""
        with self._blamed():
            self.quantizer.prepare_obs_or_fq_callback(model, edge_or_node_to_obs_or_fq)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Makes what the quantizer itself raises an error that says so."""
        try:
            yield
        except Pt2qaError:
            raise
        except Exception as error:
            raise QuantizeError(
                f"{self.plugin.name} could not annotate the model: {type(error).__name__}: "
                f"{str(error) or 'no message'}."
            ) from error


def is_ours(error: Exception) -> bool:
    """Whether an error that ``prepare`` raised comes from pt2qa, neither from a quantizer nor from torchao.

    Of the errors that pass through :class:`EditedQuantizer`, those of the quantizer are a :class:`Pt2qaError`.
    """
    return any(frame.f_globals.get("__name__") == __name__ for frame, _ in walk_tb(error.__traceback__))


def annotate(
    graph: GraphModule, plugin: QuantizerPlugin, edits: tuple[Edit, ...], names: Mapping[int, OpName], *, qat: bool
) -> GraphModule:
    """Does what ``prepare`` does before it inserts observers; changes ``graph`` in place."""
    edited = EditedQuantizer(plugin.build(graph, qat=qat), plugin, edits, names, qat=qat)
    with shortcuts():
        if not qat:
            fold_batch_norms(graph)
        graph = edited.transform_for_annotation(graph)
        edited.annotate(graph)
        edited.validate(graph)
    return graph


@torch_defaults
@exports
def annotations_of(capture: Capture, quantizer: Any, edits: Iterable[Edit] = (), *, qat: bool = False) -> Annotations:
    """Annotates a copy of a captured graph as ``prepare`` does, without observers and calibration.

    Args:
        capture: what :func:`pt2qa.capture` returned; it is not changed.
        quantizer: as :func:`pt2qa.quantize` takes it.
        edits: edits to apply, in order.
        qat: annotate as ``prepare_qat_pt2e`` does, which does not fold batch norms first.

    Raises:
        QuantizeError: the quantizer failed, or an edit changes nothing or cannot be made.
        SelectionError: an edit names an op that the model does not have.
        PluginError: there is no such quantizer, or the backend does not support an edit.

    >>> import torch, pt2qa
    >>> capture = pt2qa.capture(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.zeros(1, 4))
    >>> sorted({edge.kind for edge in annotations_of(capture, "xnnpack").edges})
    ['activation', 'weight']
    """
    plugin = resolve(quantizer)
    graph = annotate(copy_to_edit(capture.module()), plugin, tuple(edits), capture.names, qat=qat)
    return read_annotations(graph, plugin, capture.names, qat=qat)


def fusions(capture: Capture, quantizer: Any) -> tuple[Edit, ...]:
    """The ``fuse`` edits that are possible in a model, in graph order.

    The backend runs their ops as one kernel, although its quantizer rounds between them.

    Args:
        capture: the captured model.
        quantizer: as :func:`pt2qa.quantize` takes it; a plug-in that declares no pairs to fuse yields none.

    Raises:
        QuantizeError: the quantizer cannot annotate the model.
        PluginError: there is no such quantizer.

    >>> import torch, pt2qa
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU6()).eval()
    >>> capture = pt2qa.capture(model, torch.zeros(1, 1, 4, 4))
    >>> [edit.ops for edit in fusions(capture, "xnnpack")]
    [('0/conv2d', '1/hardtanh')]
    """
    return fusions_in(annotations_of(capture, quantizer))
