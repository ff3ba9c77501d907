"""Faults between the model, its capture and its prepared graph; the graphs were made by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa.plugins import resolve
from tests.diagnosis.faults import fault
from tests.diagnosis.subject import Graph, Planted, Subject


def by_hand(
    subject: Subject, other: nn.Module | None, change: Callable[[Graph], None] | None = None
) -> pt2qa.QuantizedPair:
    """A pair of the model's capture and of what somebody quantized: another model, or a graph that they changed."""
    capture = subject.capture()
    if other is None:
        graph = capture.module()
    else:
        graph = pt2qa.capture(other, (subject.calibration[0],), decompose=subject.net.decompose).module()
    graph = copy.deepcopy(graph)
    plugin = resolve(subject.quantizer)
    quantizer = plugin.build(graph, qat=False)
    if subject.overrides is not None:
        quantizer = subject.overrides.apply_to(subject.quantizer)
    prepared: GraphModule = prepare_pt2e(graph, quantizer)
    if change is not None:
        change(Graph(prepared, capture.names))
        prepared.recompile()
    with torch.no_grad():
        for batch in subject.calibration:
            prepared(batch)
    return pt2qa.pair(
        capture.module(), convert_pt2e(prepared), quantizer=str(subject.quantizer), model=subject.net.name
    )


@fault("a batch norm was folded with another epsilon", "prepare-changed")
def other_epsilon(subject: Subject) -> Planted | None:
    link = subject.net.links[0]
    if not link.norm:
        return None
    other = copy.deepcopy(subject.model())
    other.get_submodule(link.norm).eps = 0.3
    norm = link.norm
    product = subject.op_at(link.product)
    pair = by_hand(subject, other)
    return Planted(pair, subject.calibration, subject.evaluation, (product, f"{norm}/batch_norm"))


@fault("a batch norm was folded without its mean", "prepare-changed")
def forgotten_mean(subject: Subject) -> Planted | None:
    link = subject.net.links[0]
    if not link.norm:
        return None
    with torch.no_grad():
        subject.model().get_submodule(link.norm).running_mean += 0.4
    other = copy.deepcopy(subject.model())
    other.get_submodule(link.norm).running_mean.zero_()
    product = subject.op_at(link.product)
    pair = by_hand(subject, other)
    return Planted(pair, subject.calibration, subject.evaluation, (product, f"{link.norm}/batch_norm"))


@fault("a pass before the observers scales a value", error="is not the reference graph")
def scaling_pass(subject: Subject) -> Planted:
    link = subject.net.links[0]
    name = subject.op_at(link.product)

    def change(graph: Graph) -> None:
        node = graph.op(name)
        with graph.module.graph.inserting_after(node):
            scaled = graph.module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.8))
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

    pair = by_hand(subject, None, change)
    return Planted(pair, subject.calibration, subject.evaluation, subject.places_at(link))


class Scaled(nn.Module):
    """A net whose output is multiplied by a Python number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net, self.gain = model, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.gain


@fault("the model was changed after it was captured", "capture-changed")
def changed_after_capture(subject: Subject) -> Planted | None:
    if subject.net.name == "heads":
        return None  # it has no single output to multiply
    model = Scaled(subject.model()).eval()
    subject.overrides = subject.nested_overrides("net")
    subject.replace_model(model)
    pair = subject.pair()
    model.gain = 1.3
    return Planted(pair, subject.calibration, subject.evaluation, against=model)
