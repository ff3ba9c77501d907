"""Faults put into a converted graph by hand: its numbers are not those that calibration and the weights gave."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa._graph.handles import handle_of
from pt2qa.plugins import resolve
from tests.diagnosis.faults import fault
from tests.diagnosis.subject import Planted, Subject


def edited(subject: Subject, change: Callable[[GraphModule, Node], None], weight: bool = False) -> Planted:
    """A pair whose converted graph was edited at the dequantize of what a product reads, or of its weight."""
    pair = subject.pair()
    link = subject.net.links[0]
    name = subject.op_at(link.reader)
    graph = copy.deepcopy(pair.quantized)
    handle = next(handle for handle, found in pair.names.items() if found.name == name)
    product = next(
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and handle_of(node) == handle and len(node.args) > 1
    )
    change(graph, product.args[int(weight)])
    graph.recompile()
    planted = pt2qa.pair(pair.reference, graph, quantizer=str(subject.quantizer), model=subject.net.name)
    places = (name,) if weight else subject.places_at(link)
    return Planted(planted, subject.calibration, subject.evaluation, places)


def rescaled(factor: float, shift: int = 0) -> Callable[[GraphModule, Node], None]:
    """Another scale and zero point at a quantize and its dequantize."""

    def change(graph: GraphModule, dequantize: Node) -> None:
        for node in (dequantize, dequantize.args[0]):
            value, scale, zero_point, low, high, *rest = node.args
            node.args = (value, scale * factor, min(max(zero_point + shift, low), high), low, high, *rest)

    return change


@fault("a scale of a converted graph is sixteen times too large", "site-range")
def scale_too_large(subject: Subject) -> Planted:
    return edited(subject, rescaled(16))


@fault("a scale of a converted graph is a third of what it should be", "site-range")
def scale_too_small(subject: Subject) -> Planted:
    return edited(subject, rescaled(1 / 3))


@fault("a zero point of a converted graph is wrong", "site-range")
def wrong_zero_point(subject: Subject) -> Planted:
    return edited(subject, rescaled(1, 150))


def buffer_of(graph: GraphModule, node: Node) -> Tensor:
    """The tensor that an attribute node reads."""
    owner, _, attribute = str(node.target).rpartition(".")
    return getattr(graph.get_submodule(owner), attribute)


@fault("bits of a stored weight have flipped", "prepare-changed")
def flipped_bits(subject: Subject) -> Planted:
    def change(graph: GraphModule, dequantize: Node) -> None:
        stored = buffer_of(graph, dequantize.args[0])
        flat = stored.view(-1)
        flat[::17] = flat[::17].bitwise_xor(torch.tensor(0x40, dtype=flat.dtype))

    return edited(subject, change, weight=True)


@fault("the scales of a stored weight are a half too large", "prepare-changed")
def stored_scales(subject: Subject) -> Planted:
    def change(graph: GraphModule, dequantize: Node) -> None:
        buffer_of(graph, dequantize.args[1]).mul_(1.5)

    return edited(subject, change, weight=True)


@fault("a graph was converted without being calibrated", error="saw no value")
def never_calibrated(subject: Subject) -> Planted:
    capture = subject.capture()
    graph = copy.deepcopy(capture.module())
    quantizer = resolve(subject.quantizer).build(graph, qat=False)
    if subject.overrides is not None:
        quantizer = subject.overrides.apply_to(subject.quantizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao warns of just this
        converted = convert_pt2e(prepare_pt2e(graph, quantizer))
    pair = pt2qa.pair(capture.module(), converted, quantizer=str(subject.quantizer), model=subject.net.name)
    return Planted(pair, subject.calibration, subject.evaluation)
