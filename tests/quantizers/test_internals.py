"""What the plug-ins take for granted of the internals of their libraries: a failing test's name says what broke."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

from pt2qa.plugins import handle_of
from pt2qa_x86.configure import function_of
from pt2qa_xnnpack.internals import (
    contents_of,
    keep_in_float,
    merged_in_delegate,
    op_name,
    outputs_by_delegate,
    programs_of_delegates,
    runtime,
    shape_of,
)

X = torch.ones(2, 4)


def test_settings_of_the_x86_quantizer_still_know_linear_by_this_function() -> None:
    config = get_default_x86_inductor_quantization_config(is_dynamic=True)
    quantizer = X86InductorQuantizer().set_function_type_qconfig(function_of("linear"), config)
    assert function_of("linear") in (F.linear, nn.Linear)
    graph = torch.export.export(nn.Linear(4, 2).eval(), (X,)).module(check_guards=False)
    prepared = prepare_pt2e(graph, quantizer)
    assert any(node.op == "call_module" for node in prepared.graph.nodes)


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


# -- ExecuTorch --------------------------------------------------------------------------------------------------------


class Outside(nn.Module):
    """A linear, for which XNNPACK has a kernel, and a cumulative sum, for which it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).cumsum(1)


@pytest.fixture(scope="module")
def partitioned() -> list[dict[str, list[str]]]:
    """What the delegates of the lowered program return, by their tags."""
    return []


@pytest.fixture(scope="module")
def lowered(partitioned: list[dict[str, list[str]]]) -> Any:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    class Watched(XnnpackPartitioner):  # type: ignore[misc]
        def partition(self, exported_program: Any) -> Any:
            result = super().partition(exported_program)
            found = outputs_by_delegate(result.tagged_exported_program.graph_module)
            partitioned.append({tag: [op_name(node) for node in nodes] for tag, nodes in found.items()})
            return result

    program = torch.export.export(Outside().eval(), (X,))
    for number, node in enumerate(node for node in program.graph.nodes if node.op == "call_function"):
        node.meta["custom"] = {"numeric_debug_handle": number}
    return to_edge_transform_and_lower(program, partitioner=[Watched()])


def test_partitioners_still_tag_nodes_and_ops_still_have_these_names(
    lowered: Any, partitioned: list[dict[str, list[str]]]
) -> None:
    assert [list(each.values()) for each in partitioned] == [[["aten::linear"]]]
    outside = [op_name(node) for node in lowered.exported_program().graph.nodes]
    assert [name for name in outside if name] == ["aten::cumsum"]


def test_handles_still_reach_delegates_and_the_ops_outside(lowered: Any) -> None:
    program = lowered.exported_program()
    (inside,) = programs_of_delegates(program.graph_module)
    linear, cumsum = 0, 1
    assert linear in {handle_of(node) for node in inside.graph.nodes}
    assert cumsum in {handle_of(node) for node in program.graph.nodes if op_name(node)}


def test_a_file_still_tells_its_delegates_and_the_ops_outside(lowered: Any) -> None:
    contents = contents_of(bytes(lowered.to_executorch().buffer))
    assert contents[:2] == (("XnnpackBackend",), ("aten::cumsum.out",))


def test_the_runtime_still_tells_its_backends_and_kernels() -> None:
    assert runtime().backend_registry.is_available("XnnpackBackend")
    assert "aten::cumsum.out" in runtime().operator_registry.operator_names


LOADS = """
import sys, warnings
warnings.simplefilter("ignore")
from pt2qa_xnnpack.internals import runtime, without_counting
program = runtime().load_program(sys.argv[1])
with without_counting():
    method = program.load_method("forward")
    print("[cpuinfo_utils.cpp:72] Out of memory", file=sys.stderr)
    print("[cpu", end="", file=sys.stderr)
print("]", file=sys.stderr)
"""


def test_a_first_load_counts_no_cores_aloud_and_everything_else_is_said(lowered: Any, tmp_path: Path) -> None:
    (tmp_path / "model.pte").write_bytes(lowered.to_executorch().buffer)
    command = [sys.executable, "-c", LOADS, str(tmp_path / "model.pte")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert [line for line in printed if "cpu" in line] == ["[cpuinfo_utils.cpp:72] Out of memory", "[cpu]"]


def test_xnnpack_still_refuses_outputs_that_are_one_value_in_this_function() -> None:
    from executorch.backends.xnnpack.xnnpack_preprocess import generate_node_to_external_map

    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x + 1
            return y, x * 2, y, x

    program = torch.export.export(Same(), (X,))
    for node in program.graph.nodes:
        node.meta["delegation_tag"] = "first"
    with pytest.raises(RuntimeError, match="is already in the inputs") as raised:
        generate_node_to_external_map(program, program.graph_module)
    assert merged_in_delegate(raised.value) == ("first", ((0, 2), (-1, 3)))
    assert merged_in_delegate(ValueError()) is None
