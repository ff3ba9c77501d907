"""What is wrong with a model or a quantizer and costs no accuracy, or does not get as far."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import HistogramObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

import pt2qa
from tests.diagnosis.faults import fault
from tests.diagnosis.planted_in_models import PER_TENSOR, modules
from tests.diagnosis.subject import Altered, Graph, Planted, Subject


@fault("a channel whose weights become zero, and nothing misses it", finding="dead-channel")
def dead_channel(subject: Subject) -> Planted:
    product, norm, reader = modules(subject, subject.net.links[0])
    source = product if norm is None else norm
    with torch.no_grad():
        source.weight[1] /= 400
        source.bias[1] = 0
        reader.weight[:, 1] = 0
    name = subject.op_at(subject.net.links[0].product)

    def edit(graph: Graph) -> None:
        graph.op(name).meta["quantization_annotation"].input_qspec_map[graph.weight_of(name)] = PER_TENSOR

    subject.altered(edit)
    return subject.planted([name])


@fault("an op is left in float between quantized ones", finding="float-island")
def float_island(subject: Subject) -> Planted | None:
    if subject.net.name not in ("plain", "residual", "linears") or subject.backend != "xnnpack":
        return None  # x86 takes a SiLU together with the linear before it
    subject.replace_model(_with_silu(subject.model()))
    return subject.planted()


def _with_silu(model: nn.Module) -> nn.Module:
    """The model with another activation at its end, and a linear behind it, neither of which costs much."""
    outputs = 10 if hasattr(model, "fc") else 8
    return nn.Sequential(model, nn.SiLU(), nn.Linear(outputs, 32)).eval()


@fault("a setting names a module that there is not", error="nowhere")
def unmatched_module(subject: Subject) -> Planted:
    subject.quantizer = pt2qa.quantizer(subject.backend, modules={"nowhere": None})
    return subject.planted()


@fault("a filter of the quantizer matches nothing", finding="unmatched-filter")
def unmatched_filter(subject: Subject) -> Planted | None:
    if subject.backend != "x86":
        return None
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    quantizer.set_module_name_qconfig("nowhere", None)
    subject.quantizer = quantizer
    return subject.planted()


@fault("an op that only moves values has a scale of its own", finding="mixed-parameters")
def broken_sharing(subject: Subject) -> Planted | None:
    if subject.net.name not in ("cat", "transformer") or subject.backend != "xnnpack":
        return None
    name = "max_pool2d" if subject.net.name == "cat" else "layers.0.attention/view"

    def edit(graph: Graph) -> None:
        spec = QuantizationSpec(torch.int8, HistogramObserver, -127, 127, torch.per_tensor_affine)
        graph.op(name).meta["quantization_annotation"].output_qspec = spec

    subject.altered(edit)
    return subject.planted([name])


@fault("ops that are quantized in one mode of torch.export only", finding="strict-differs")
def strict_differs(subject: Subject) -> Planted | None:
    if subject.net.name != "transformer" or subject.backend != "x86":
        return None
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    subject.replace_model(nn.Sequential(layer).eval().requires_grad_(False))
    return subject.planted()


class InPlace(nn.Module):
    """A gate that is multiplied in place."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x)
        value *= self.gate(x).sigmoid()
        return self.last(value)


@fault("an op in the in-place form that the quantizer does not know", finding="in-place-spelling")
def in_place_twin(subject: Subject) -> Planted | None:
    if subject.net.name != "linears" or subject.backend != "x86":
        return None
    torch.manual_seed(0)
    subject.replace_model(InPlace().eval())
    return subject.planted(["mul"])


class Rewriting(Altered):
    """Changes a weight in its own pass before it annotates."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        model = super().transform_for_annotation(model)
        weight = next(node for node in model.graph.nodes if node.op == "get_attr" and "weight" in str(node.target))
        owner, _, attribute = str(weight.target).rpartition(".")
        with torch.no_grad():
            module = model.get_submodule(owner)
            setattr(module, attribute, nn.Parameter(getattr(module, attribute) * 1.1, requires_grad=False))
        return model


@fault("prepare changes what the model computes", error="prepare|changed|changes")
def prepare_changes(subject: Subject) -> Planted:
    subject.quantizer = Rewriting(subject.quantizer, subject.capture(), lambda graph: None)
    return subject.planted()


@fault("a sample of the evaluation data has a NaN", note="NaN")
def nan_sample(subject: Subject) -> Planted:
    batch = subject.evaluation[1].clone()
    batch[2].flatten()[0] = float("nan")
    subject.evaluation = [subject.evaluation[0], batch, *subject.evaluation[2:]]
    return subject.planted()
