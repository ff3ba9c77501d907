"""What the plug-ins take for granted of the internals of their libraries: a failing test's name says what broke."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

from pt2qa_x86.internals import configured_modules, function_of
from pt2qa_xnnpack.internals import keep_in_float, shape_of

X = torch.ones(2, 4)


def test_settings_of_the_x86_quantizer_still_know_linear_by_this_function() -> None:
    config = get_default_x86_inductor_quantization_config(is_dynamic=True)
    quantizer = X86InductorQuantizer().set_function_type_qconfig(function_of("linear"), config)
    assert function_of("linear") in (F.linear, nn.Linear)
    graph = torch.export.export(nn.Linear(4, 2).eval(), (X,)).module(check_guards=False)
    prepared = prepare_pt2e(graph, quantizer)
    assert any(node.op == "call_module" for node in prepared.graph.nodes)


def test_the_x86_quantizer_still_keeps_the_modules_that_it_was_told_of() -> None:
    quantizer = X86InductorQuantizer()
    assert list(configured_modules(quantizer)) == []
    quantizer.set_module_name_qconfig("head", None)
    assert list(configured_modules(quantizer)) == ["head"]


def test_xnnpack_still_leaves_ops_alone_that_are_marked_as_settled() -> None:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    class Joined(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x + 1])

    graph = torch.export.export(Joined(), (X,)).module(check_guards=False)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    for node in graph.graph.nodes:
        if node.op == "call_function":
            keep_in_float(node)
    quantizer.annotate(graph)
    observed = prepare_pt2e(graph, quantizer)
    assert not any(node.op == "call_module" for node in observed.graph.nodes)


def test_export_still_stores_shapes_where_the_plug_in_reads_them() -> None:
    graph = torch.export.export(nn.Linear(4, 2).eval(), (X,)).module(check_guards=False).graph
    (linear,) = graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert [tuple(shape_of(node) or ()) for node in linear.all_input_nodes] == [(2, 4), (2, 4), (2,)]
