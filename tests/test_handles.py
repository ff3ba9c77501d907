from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2qa._capture.program import capture
from pt2qa._graph.handles import (
    assign_handles,
    handle_of,
    input_handles,
    names_of,
    nested_graphs,
    op_of,
    source_line,
    user_inputs,
    walk,
)
from pt2qa._graph.internals.nodes import CUSTOM, HANDLE, clean_path
from tests.capture.models import QUANTIZERS, Forward, Residual, image, quantizer

NAMES = [
    "x",
    "conv1/conv2d",
    "bn1/batch_norm",
    "relu/relu",
    "conv2/conv2d",
    "bn2/batch_norm",
    "add",
    "relu/relu_1",
    "pool/adaptive_avg_pool2d",
    "flatten",
    "fc/linear",
]


def handles(graph: GraphModule | ExportedProgram) -> list[int]:
    graph_module = graph.graph_module if isinstance(graph, ExportedProgram) else graph
    return [handle for placed in walk(graph_module) if (handle := handle_of(placed.node)) is not None]


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


class Branches(nn.Module):
    """A cond in the middle; nested graphs with a linear each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cond(x.sum() > 0, lambda t: self.a(t), lambda t: self.b(t) + 1, (x,))).relu()


@pytest.mark.parametrize("strict", [False, True])
def test_inputs_and_ops_are_numbered_in_graph_order_and_parameters_are_not(strict: bool) -> None:
    captured = capture(Residual(), image(), strict=strict)
    assert handles(captured.program) == list(range(len(NAMES)))
    inputs = user_inputs(captured.program)
    assert [handle_of(node) for node in inputs] == [0]
    parameters = [n for n in captured.program.graph.nodes if n.op == "placeholder" and n not in inputs]
    assert parameters
    assert all(HANDLE not in node.meta.get(CUSTOM, {}) for node in parameters)


@pytest.mark.parametrize("strict", [False, True])
def test_names_are_module_path_op_and_ordinal_in_both_modes(strict: bool) -> None:
    names = capture(Residual(), image(), strict=strict).names
    assert [name.name for name in names.values()] == NAMES
    assert (names[3].module, names[3].module_type, names[3].op) == ("relu", "ReLU", "relu")
    assert (names[0].op, names[6].module) == ("input", "")


def test_inplace_and_out_of_place_spellings_have_the_same_names() -> None:
    spellings = [lambda m, x: m.a(x).relu_().add_(1), lambda m, x: m.a(x).relu() + 1]
    names = [capture(Forward(f, a=nn.Linear(4, 4)), torch.ones(2, 4)).names for f in spellings]
    assert names[0] == names[1]


def test_module_deepcopy_and_reload_keep_handles_and_names_trap_7() -> None:
    captured = capture(Residual(), image())
    expected = captured.names
    assert names_of(captured.module()) == expected
    assert names_of(copy.deepcopy(captured.module())) == expected
    assert names_of(copy.deepcopy(captured.program)) == expected
    loaded = saved_and_loaded(captured.program)
    assert names_of(loaded) == expected
    assert names_of(loaded.module()) == expected


def test_input_handles_lost_in_a_file_are_restored() -> None:
    loaded = saved_and_loaded(capture(Residual(), image()).program)
    assert handle_of(user_inputs(loaded)[0]) is None
    assert input_handles(loaded) == {user_inputs(loaded)[0]: 0}
    assert handles(loaded) == list(range(1, len(NAMES)))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("again_strict", [False, True])
def test_reexport_keeps_handles_and_names_trap_7(strict: bool, again_strict: bool) -> None:
    x = image()
    captured = capture(Residual(), x, strict=strict)
    again = torch.export.export(captured.module(), (x,), strict=again_strict)
    assert names_of(again) == captured.names
    assert input_handles(again) == {user_inputs(again)[0]: 0}
    assert [handle for handle in handles(again) if handle] == list(range(1, len(NAMES)))
    assert capture(captured.module(), x).names == captured.names


def test_the_same_model_gets_the_same_handles_in_another_process() -> None:
    code = (
        "import torch; from pt2qa._capture.program import capture; from tests.capture.models import Residual, image;"
        "print([(h, n.name) for h, n in capture(Residual(), image()).names.items()])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip().splitlines()[-1] == str(list(enumerate(NAMES)))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_prepare_and_convert_keep_handles(name: str) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    captured = capture(Residual(), image())
    batch_norms = {handle for handle, op in captured.names.items() if op.op == "batch_norm"}
    graph = prepare_pt2e(captured.module(), quantizer(name))
    graph(image())
    for stage in (graph, convert_pt2e(graph)):
        found = handles(stage)
        assert len(set(found)) == len(found)
        assert set(found) == set(captured.names) - batch_norms


@pytest.mark.parametrize("name", QUANTIZERS)
def test_qat_keeps_handles_of_the_ops_that_it_replaces_trap_8(name: str) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e

    captured = capture(Residual(), image())
    batch_norms = {handle for handle, op in captured.names.items() if op.op == "batch_norm"}
    graph = prepare_qat_pt2e(copy.deepcopy(captured.module()), quantizer(name, qat=True))
    graph(image())
    found = handles(graph)
    assert len(set(found)) == len(found)
    assert set(found) == set(captured.names)
    if name == "x86":
        return  # convert is the same code for both and takes seconds in QAT
    found = handles(convert_pt2e(graph))
    assert len(set(found)) == len(found)
    assert set(found) == set(captured.names) - batch_norms


@pytest.mark.parametrize("strict", [False, True])
def test_nested_graphs_are_numbered_after_their_owner_trap_24(strict: bool) -> None:
    captured = capture(Branches(), torch.ones(2, 4), strict=strict)
    assert [name.name for name in captured.names.values()] == [
        "x",
        "sum",
        "gt",
        "cond",
        "cond.true/linear",
        "cond.false/linear",
        "cond.false/add",
        "cond[0]",
        "c/linear",
        "relu",
    ]
    assert handles(captured.module()) == list(range(10))
    loaded = saved_and_loaded(captured.program)
    assert names_of(loaded) == captured.names


def test_outputs_of_one_op_keep_their_own_handles_through_a_file_trap_4() -> None:
    captured = capture(Forward(lambda m, x: (torch.max(x, 1)[1], x.chunk(3, 1)[1])), torch.randn(2, 6))
    assert [name.name for name in captured.names.values()] == ["x", "max", "max[1]", "chunk", "chunk[1]"]
    loaded = saved_and_loaded(captured.program)
    getitems = [node for node in loaded.graph.nodes if node.target.__class__.__name__ == "builtin_function_or_method"]
    # A file brings back the outputs that nothing reads, and gives all of them the metadata of the op.
    assert len(getitems) > 2
    assert [handle for node in getitems if (handle := handle_of(node)) is not None] == [2, 4]
    assert names_of(loaded) == captured.names


def test_two_ops_with_one_name_are_told_apart() -> None:
    class Add(nn.Module):
        def forward(self, add: Tensor) -> Tensor:
            return (add + 1) * (add + 2)

    names = [name.name for name in capture(Add().eval(), torch.ones(2)).names.values()]
    assert names == ["add", "add_1", "add_2", "mul"]


def test_assign_handles_renumbers_and_leaves_other_metadata() -> None:
    program = torch.export.export(Residual(), (image(),))
    first = next(node for node in program.graph.nodes if node.op == "call_function")
    first.meta[CUSTOM] = {HANDLE: 77, "mine": 1}
    assign_handles(program)
    assert first.meta[CUSTOM] == {"mine": 1, HANDLE: 1}


def test_a_graph_without_handles_has_no_names() -> None:
    assert names_of(torch.export.export(Residual(), (image(),))) == {}


@pytest.mark.parametrize(
    ("target", "op"),
    [
        (torch.ops.aten.relu_.default, "relu"),
        (torch.ops.aten.add_.Tensor, "add"),
        (torch.ops.aten.__and__.Tensor, "and"),
        (torch.ops.aten._softmax.default, "_softmax"),
        (torch.ops.aten.conv2d, "conv2d"),
        (torch.ops.higher_order.cond, "cond"),
        (torch.ops.higher_order.map_impl, "map"),
        (max, "max"),
    ],
)
def test_op_of_drops_overload_and_in_place_underscore(target: object, op: str) -> None:
    assert op_of(target) == op  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["layer1.0.relu", "L['self'].layer1.0.relu", "layer1.0.relu@1"])
def test_clean_path_takes_off_decorations(path: str) -> None:
    assert clean_path(path) == "layer1.0.relu"


@pytest.mark.parametrize("text", ["", "    y = self.conv(x)\n"], ids=["file that is not there", "file"])
def test_the_line_that_made_a_node_is_known_without_its_text(text: str) -> None:
    node = torch.fx.Graph().placeholder("x")
    frames = [f'File "app.py", line 3, in run\n{text}', f'  File "net.py", line 12, in forward\n{text}']
    node.meta["stack_trace"] = "".join(frames).rstrip("\n")
    assert source_line(node) == "net.py:12"
    assert source_line(node, code=True) == ("net.py:12: y = self.conv(x)" if text else "net.py:12")


def test_a_nested_graph_of_an_unknown_op_has_a_number_for_a_name() -> None:
    graph = torch.fx.Graph()
    x, bodies = graph.placeholder("x"), [graph.get_attr(name) for name in ("first", "second")]
    called = graph.call_function(torch.ops.higher_order.tag_activation_checkpoint, (*bodies, x))
    graph.output(graph.call_function(torch.ops.higher_order.cond, (x, *bodies, (x,))))
    body = torch.fx.Graph()
    body.output(body.placeholder("x"))
    parts = {name: GraphModule({}, body) for name in ("first", "second")}
    module = GraphModule(parts, graph)
    assert [name for name, _ in nested_graphs(called, module)] == ["graph0", "graph1"]
    assert nested_graphs(called.next, module) == [("true", module.first), ("false", module.second)]
    assert nested_graphs(x, module) == []
