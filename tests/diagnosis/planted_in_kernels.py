"""Faults that only the backend's kernels show: what converts well and computes something else on the device."""

from __future__ import annotations

import torch
from torchao.quantization.pt2e import PerChannelMinMaxObserver

from pt2qa_x86 import X86Backend
from tests.diagnosis.faults import fault
from tests.diagnosis.planted_in_models import modules
from tests.diagnosis.subject import Graph, Planted, Subject, changed


@fault("a weight scale so small that the int32 bias overflows", "deployed-kernel")
def overflowing_bias(subject: Subject) -> Planted | None:
    if subject.backend != "xnnpack" or subject.net.name not in ("linears", "lstm"):
        return None
    product, _, reader = modules(subject, subject.net.links[0])
    with torch.no_grad():
        product.weight[2] *= 1e-8
        product.bias[2] = 3
        reader.weight[:, 2] = reader.weight.abs().max()
    name = subject.op_at(subject.net.links[0].product)

    def edit(graph: Graph) -> None:
        specs = graph.op(name).meta["quantization_annotation"].input_qspec_map
        weight = graph.weight_of(name)
        maker = PerChannelMinMaxObserver.with_args(eps=2.0**-40)
        specs[weight] = changed(observer_or_fake_quant_ctr=maker)(specs[weight])

    subject.altered(edit)
    return subject.planted(subject.places_at(subject.net.links[0]), deployed="xnnpack")


@fault("sums of products saturate on a CPU without VNNI", "saturation")
def saturating_sums(subject: Subject) -> Planted | None:
    if subject.backend != "x86" or subject.net.name not in ("plain", "linears"):
        return None
    with torch.no_grad():
        for link in subject.net.links:
            weight = modules(subject, link)[2].weight
            weight.copy_(weight.abs().clamp(min=0.8 * float(weight.abs().max())) * torch.sign(weight.mean()))
    return subject.planted([name.name for name in subject.capture().names.values()], deployed=X86Backend(isa="avx2"))
