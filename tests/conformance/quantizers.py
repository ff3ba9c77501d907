"""A quantizer that behaves, and others that each break one property."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import FixedQParamsObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from pt2qa.plugins import BackendSpec, OpSpec, TensorSpec

ATEN = torch.ops.aten
ACTIVATION = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
WEIGHT = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0)
TAKEN = TensorSpec("int8", "affine", None, -128, 127)
SPEC = BackendSpec(
    "its backend",
    (
        OpSpec(
            ops=("conv2d", "linear"),
            input=(TAKEN,),
            weight=(TensorSpec("int8", "symmetric", 0, -127, 127),),
            bias=(TensorSpec("float32"),),
            output=(TAKEN,),
        ),
        OpSpec(ops=("cat",), input=(TAKEN,), output=(TAKEN,), one_scale=True),
    ),
)


class Honest(Quantizer):
    """Rounds what convolutions and linears read and what they give, and says so."""

    declared_patterns: ClassVar = (("conv2d",), ("linear",))
    targets: ClassVar = (ATEN.conv2d.default, ATEN.linear.default)
    activation: ClassVar = ACTIVATION
    weight: ClassVar = WEIGHT
    spec: ClassVar = SPEC

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            if node.target in self.targets and self.wants(node):
                self.annotate_op(node)
        return model

    def annotate_op(self, node: Node) -> None:
        source, weight = node.args[:2]
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
            {source: self.activation, weight: self.weight}, self.output_spec(node), _annotated=True
        )

    def wants(self, node: Node) -> bool:
        return True

    def output_spec(self, node: Node) -> Any:
        return self.activation

    def validate(self, model: GraphModule) -> None:
        return None


def convs(model: GraphModule) -> list[Node]:
    return [node for node in model.graph.nodes if node.target is ATEN.conv2d.default]


# -- broken, one property each -----------------------------------------------------------------------------------------


class PromisesMore(Honest):
    """Declares a pattern that it does not annotate."""

    declared_patterns: ClassVar = (("conv2d", "relu"),)


class Refuses(Honest):
    """Cannot annotate a convolution."""

    def annotate_op(self, node: Node) -> None:
        if node.target is ATEN.conv2d.default:
            raise ValueError(f"no kernel for {node.name}")
        super().annotate_op(node)


class ChangesNumbers(Honest):
    """Takes a ReLU for a hard sigmoid."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            if node.target is ATEN.relu.default:
                node.target = ATEN.hardsigmoid.default
        model.recompile()
        return model


class NoScale(MinMaxObserver):
    """An observer that cannot tell a scale."""

    def calculate_qparams(self) -> Any:
        raise ValueError("no scale was found")


class CannotConvert(Honest):
    """Its observer fails in convert."""

    activation: ClassVar = replace(ACTIVATION, observer_or_fake_quant_ctr=NoScale)


class Random(Honest):
    """Adds a little noise, so that two runs differ; what it puts in has the handle of the op before it."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for node in convs(model):
            with model.graph.inserting_after(node):
                noise = model.graph.call_function(ATEN.randn_like.default, (node,))
            with model.graph.inserting_after(noise):
                small = model.graph.call_function(ATEN.mul.Tensor, (noise, 1e-6))
            with model.graph.inserting_after(small):
                noisy = model.graph.call_function(ATEN.add.Tensor, (node, small))
            node.replace_all_uses_with(noisy, delete_user_cb=lambda user, own=(noise, noisy): user not in own)
            for made in (noise, small, noisy):
                made.meta = {key: value for key, value in node.meta.items() if key != Q_ANNOTATION_KEY}
        model.recompile()
        return model

    def output_spec(self, node: Node) -> Any:
        return None


class PutsIn(Honest):
    """Copies what convolutions give; the copies carry no handle."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for node in convs(model):
            with model.graph.inserting_after(node):
                copy = model.graph.call_function(ATEN.clone.default, (node,))
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
            copy.meta["val"] = node.meta["val"]
        model.recompile()
        return model


class SharesNothing(Honest):
    """Asks for a value that the op does not read."""

    def annotate_op(self, node: Node) -> None:
        super().annotate_op(node)
        before = node.args[0]
        if isinstance(before, Node) and before.args and isinstance(before.args[0], Node):
            node.meta[Q_ANNOTATION_KEY].input_qspec_map[before.args[0]] = SharedQuantizationSpec((before, node))


class Circle(Honest):
    """Lets two places share the scale of each other."""

    def annotate_op(self, node: Node) -> None:
        super().annotate_op(node)
        annotation = node.meta[Q_ANNOTATION_KEY]
        annotation.input_qspec_map[node.args[0]] = SharedQuantizationSpec(node)
        annotation.output_qspec = SharedQuantizationSpec((node.args[0], node))


class Integers(Honest):
    """Observes the words of an embedding."""

    targets: ClassVar = (*Honest.targets, ATEN.embedding.default)

    def annotate_op(self, node: Node) -> None:
        if node.target is not ATEN.embedding.default:
            super().annotate_op(node)
            return
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation({node.args[1]: ACTIVATION}, _annotated=True)


class WrongAxis(Honest):
    """Scales weights along the channels that are read."""

    weight: ClassVar = replace(WEIGHT, ch_axis=1)


class AffineWeights(Honest):
    """Gives each weight a zero point, and one scale."""

    weight: ClassVar = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)


class SharesNoCat(Honest):
    """Gives each input and the output of a cat a scale of its own."""

    targets: ClassVar = (*Honest.targets, ATEN.cat.default)

    def annotate_op(self, node: Node) -> None:
        if node.target is not ATEN.cat.default:
            super().annotate_op(node)
            return
        inputs = dict.fromkeys(node.all_input_nodes, ACTIVATION)
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, ACTIVATION, _annotated=True)


class KnowsOneSpelling(Honest):
    """Leaves the output to a ReLU, and knows no in-place one."""

    def output_spec(self, node: Node) -> Any:
        return None if any(user.target is ATEN.relu.default for user in node.users) else self.activation


class NeedsSources(Honest):
    """Finds convolutions by what Dynamo writes."""

    def wants(self, node: Node) -> bool:
        return node.target is not ATEN.conv2d.default or "source_fn_stack" in node.meta


class NeedsRoot(Honest):
    """Knows modules by the keys that the first export gives."""

    def wants(self, node: Node) -> bool:
        return not any(key.startswith("L__self__L__self__") for key in node.meta["nn_module_stack"])


class NeedsTensorMeta(Honest):
    """Needs a field that no file keeps."""

    def wants(self, node: Node) -> bool:
        return "tensor_meta" in node.meta


class InOrder(Honest):
    """Goes through a list of annotators, of which the first has it."""

    def __init__(self) -> None:
        super().__init__()
        self.annotators: list[Callable[[Node], None]] = [self.annotate_op, self.annotate_coarsely]

    def annotate(self, model: GraphModule) -> GraphModule:
        for annotator in self.annotators:
            for node in model.graph.nodes:
                if node.target in self.targets and Q_ANNOTATION_KEY not in node.meta:
                    annotator(node)
        return model

    def annotate_coarsely(self, node: Node) -> None:
        self.annotate_op(node)
        node.meta[Q_ANNOTATION_KEY].output_qspec = None


class Remembers(Honest):
    """Annotates what it has not annotated before, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.done: set[str] = set()

    def wants(self, node: Node) -> bool:
        seen = node.name in self.done
        self.done.add(node.name)
        return not seen


class Insists(Honest):
    """Annotates once more after everybody had their say."""

    def validate(self, model: GraphModule) -> None:
        self.annotate(model)


class Coarse(Honest):
    """Rounds to steps that have nothing to do with the data."""

    activation: ClassVar = replace(
        ACTIVATION, observer_or_fake_quant_ctr=FixedQParamsObserver.with_args(scale=0.5, zero_point=0)
    )


BROKEN: dict[str, tuple[type[Honest], str, str, str]] = {
    "declared": (PromisesMore, "conv_relu", "conv/conv2d", "is rounded: it is not fused with activation/relu"),
    "prepare": (Refuses, "conv_relu", "no kernel for conv2d", "could not annotate the model: ValueError"),
    "calibrated": (ChangesNumbers, "conv_relu", "first at activation/relu", "prepare changed the model"),
    "convert": (CannotConvert, "conv_relu", "no scale was found", "convert_pt2e failed for CannotConvert"),
    "simulator": (
        Random,
        "conv_relu",
        "first at conv/conv2d:randn_like2",
        "does not compute what the converted graph computes",
    ),
    "pairing": (PutsIn, "conv_relu", "clone (clone", "put in by the quantizer"),
    "shared_specs": (
        SharesNothing,
        "depthwise",
        "x → second/conv2d is annotated",
        "second/conv2d does not read that value",
    ),
    "backend_spec": (
        WrongAxis,
        "conv_relu",
        "conv/conv2d: its weight is int8, per channel (axis 1), symmetric, -127..127",
        'says "conv2d: weight int8, per channel (axis 0), symmetric, -127..127"',
    ),
    "spelling": (KnowsOneSpelling, "conv_relu", "nn.ReLU(inplace=True): output of conv/conv2d is int8", "not float"),
    "strict": (NeedsSources, "conv_relu", "with strict=True, 3 places are annotated", "before, nothing is"),
    "re_export": (NeedsRoot, "conv_relu", "after another export, nothing is annotated", "before, 3 places are"),
    "saved": (NeedsTensorMeta, "conv_relu", "after save and load, nothing is annotated", "before, 3 places are"),
    "order": (InOrder, "conv_relu", "with annotators reversed, output of conv/conv2d is float, not int8", ""),
    "reuse": (Remembers, "conv_relu", "one object, the second time: nothing is annotated", "before, 3 places are"),
    "edits": (Insists, "linear", "float: 0/linear: unexpectedly", "weight of 0/linear quantized"),
    "sqnr": (Coarse, "conv_relu", "the worst site is the activation of conv/conv2d", "was expected"),
}
"""By property: what breaks it, the model that shows it, and what the message says: the op, and what is wrong."""
