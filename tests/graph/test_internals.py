"""What pt2qa takes for granted of the internals of torch and torchao: the name of a failing test says what broke."""

from __future__ import annotations

import copy
import io
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.exir import to_edge
from executorch.exir.delegate import executorch_call_delegate
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.flop_counter import FlopCounterMode
from torchao.quantization import pt2e
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)

from pt2qa._graph.internals.executorch import aten_op, is_delegate
from pt2qa._graph.internals.nodes import (
    ANNOTATION,
    CUSTOM,
    HANDLE,
    MODULE_STACK,
    SOURCES,
    STACK_TRACE,
    VALUE,
    calls_guards,
    clean_path,
    module_stack,
    origin_of,
)
from pt2qa._graph.internals.torch import (
    QUANTIZED_DECOMPOSED,
    BatchNorm,
    Dropout,
    FakeTensor,
    HigherOrderOperator,
    InstanceNorm,
    OpOverload,
    OpOverloadPacket,
    arguments_of,
    calling_convention,
    detect_fake_mode,
    dynamic_dimensions,
    flop_registry,
    instructions_found,
    is_alone,
    is_composite,
    is_mutable,
    overload_name,
    pytree,
    results_of,
    same_overload,
    size_expression,
    size_hint,
    storage_number,
    with_graph,
)
from pt2qa._graph.internals.torchao import (
    fold_batch_norms,
    fold_quantized_weights,
    is_fake_quantize,
    is_logger,
    is_observer,
    maker_of,
    range_keeper,
    rounds_now,
    without_observing,
)
from pt2qa._simulator.products import FlopCounter

ATEN = torch.ops.aten
X = torch.linspace(-1, 1, 12).reshape(3, 4)
INT8 = QuantizationSpec(
    dtype=torch.int8,
    observer_or_fake_quant_ctr=pt2e.MinMaxObserver.with_args(eps=2**-12),
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_tensor_affine,
)


class Net(nn.Module):
    """A linear that is called twice, and a keyword input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, shift: Tensor) -> dict[str, Tensor]:
        return {"y": self.fc(self.fc(x).relu_()) + shift}


class Folded(nn.Module):
    """A convolution with a batch norm to fold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))  # type: ignore[no-any-return]


class Int8(Quantizer):  # type: ignore[misc]
    """Rounds the input and the weight of linears."""

    def __init__(self, spec: QuantizationSpec = INT8) -> None:
        super().__init__()
        self.spec = spec

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in calls(model.graph, ATEN.linear.default):
            node.meta[ANNOTATION] = QuantizationAnnotation(dict.fromkeys(node.args[:2], self.spec), _annotated=True)
        return model

    def validate(self, model: GraphModule) -> None:
        pass


def export(*, strict: bool = False) -> ExportedProgram:
    shapes = {"x": {0: Dim("batch")}, "shift": None}
    return torch.export.export(Net().eval(), (X,), {"shift": torch.ones(4)}, dynamic_shapes=shapes, strict=strict)


def calls(graph: torch.fx.Graph, target: Any) -> list[Node]:
    return graph.find_nodes(op="call_function", target=target)  # type: ignore[no-any-return]


def ops(graph: torch.fx.Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def prepared_net(spec: QuantizationSpec = INT8, *, qat: bool = False) -> GraphModule:
    graph = export().module(check_guards=False)
    found: GraphModule = (prepare_qat_pt2e if qat else prepare_pt2e)(graph, Int8(spec))
    found(X, shift=torch.ones(4))
    return found


def observer_of_x(graph: GraphModule) -> nn.Module:
    (reader,) = (user for user in graph.graph.find_nodes(op="placeholder")[0].users if user.op == "call_module")
    return graph.get_submodule(str(reader.target))


def called(graph: GraphModule) -> list[nn.Module]:
    return [graph.get_submodule(str(node.target)) for node in graph.graph.nodes if node.op == "call_module"]


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return export()


@pytest.fixture(scope="module")
def prepared() -> GraphModule:
    return prepared_net()


# -- what stands in the nodes of a graph -------------------------------------------------------------------------------


def test_export_still_stores_the_traced_value_under_this_key(program: ExportedProgram) -> None:
    linear = calls(program.graph, ATEN.linear.default)[0]
    assert isinstance(linear.meta[VALUE], FakeTensor)
    assert linear.meta[VALUE].dtype is torch.float32
    assert linear.meta[VALUE].shape[1] == 4


@pytest.mark.parametrize("strict", [False, True])
def test_export_still_stores_path_and_class_of_each_module_around_an_op(strict: bool) -> None:
    first, second = (module_stack(node) for node in calls(export(strict=strict).graph, ATEN.linear.default))
    for stack in (first, second):
        assert [clean_path(path) for path, _ in stack.values()] == ["", "fc"]
        assert list(stack.values())[1][1] in (nn.Linear, "torch.nn.modules.linear.Linear")
    assert list(first)[1] != list(second)[1], "each call has a key of its own"


def test_export_still_stores_the_lines_that_called_an_op(program: ExportedProgram) -> None:
    linear = calls(program.graph, ATEN.linear.default)[0]
    assert Path(__file__).name in linear.meta[STACK_TRACE]
    assert "self.fc(self.fc(x).relu_())" in linear.meta[STACK_TRACE]


def test_export_still_says_all_of_the_origin_of_an_op_under_these_keys(program: ExportedProgram) -> None:
    assert {MODULE_STACK, STACK_TRACE} < origin_of(ops(program.graph)[0]).keys()
    assert len(origin_of(ops(program.graph)[0])) == 3


def test_strict_export_still_stores_the_source_fn_stack_under_this_key() -> None:
    linear = calls(export(strict=True).graph, ATEN.linear.default)[0]
    assert linear.meta[SOURCES][-1][1] is nn.Linear


def test_matchers_of_source_partitions_still_read_this_key(program: ExportedProgram) -> None:
    from torch.fx.passes.utils.source_matcher_utils import get_source_partitions

    graph = copy.deepcopy(program).graph
    for number, node in enumerate(ops(graph)):
        node.meta[SOURCES] = [(str(number), nn.Hardswish if node.target is ATEN.linear.default else F.relu)]
    assert len(get_source_partitions(graph, [nn.Hardswish])[nn.Hardswish]) == 2


def test_custom_metadata_still_survives_copies_files_prepare_and_convert() -> None:
    program = export()
    for number, node in enumerate(ops(program.graph)):
        node.meta[CUSTOM] = {"mine": number}
    file = io.BytesIO()
    torch.export.save(copy.deepcopy(program), file)
    file.seek(0)
    graph = prepare_pt2e(torch.export.load(file).module(check_guards=False), Int8())
    graph(X, shift=torch.ones(4))
    converted = convert_pt2e(graph)
    assert [node.meta[CUSTOM]["mine"] for node in calls(converted.graph, ATEN.linear.default)] == [0, 2]


def test_torchao_still_has_its_handles_under_these_keys() -> None:
    program = export()
    pt2e.generate_numeric_debug_handle(program)
    assert all(isinstance(node.meta[CUSTOM][HANDLE], int) for node in ops(program.graph))


def test_prepare_still_reads_annotations_under_this_key(prepared: GraphModule) -> None:
    assert len(called(prepared)) == 3  # two inputs, and the weight once


def test_modules_of_programs_still_check_their_inputs_in_this_node(program: ExportedProgram) -> None:
    assert sum(calls_guards(node) for node in program.module().graph.nodes) == 1
    assert not any(calls_guards(node) for node in program.module(check_guards=False).graph.nodes)


# -- torch -------------------------------------------------------------------------------------------------------------


def test_pytree_still_flattens_inputs_as_export_does(program: ExportedProgram) -> None:
    leaves, spec = pytree.tree_flatten(((X,), {"shift": X}))
    assert len(leaves) == 2
    assert spec == program.call_spec.in_spec
    assert (spec.child(0).num_children, spec.child(0).type, list(spec.child(1).context)) == (1, tuple, ["shift"])


def test_pytree_still_tells_the_path_to_each_leaf() -> None:
    paths = [path for path, _ in pytree.tree_flatten_with_path({"a": [1, 2]})[0]]
    assert paths[1] == (pytree.MappingKey("a"), pytree.SequenceKey(1))
    assert pytree.keystr(paths[1]) == "['a'][1]"


def test_the_ops_of_graphs_are_still_of_these_types() -> None:
    assert isinstance(ATEN.relu.default, OpOverload)
    assert isinstance(ATEN.relu, OpOverloadPacket)
    assert ATEN.relu_.default.overloadpacket.__name__ == "relu_"
    assert isinstance(torch.ops.higher_order.cond, HigherOrderOperator)


def test_one_more_op_can_still_be_traced_on_traced_values(program: ExportedProgram) -> None:
    value = ops(program.graph)[0].meta[VALUE]
    mode = detect_fake_mode([value])
    assert mode is not None
    with mode:
        assert isinstance(ATEN.cat.default([value, value], 1), FakeTensor)


def test_make_fx_still_traces_composite_ops_whole() -> None:
    graph = make_fx(lambda x: F.linear(x, x), pre_dispatch=True)(X).graph
    assert [node.target for node in ops(graph)] == [ATEN.linear.default]


def test_symbolic_sizes_can_still_be_compared_without_pinning_them_down() -> None:
    program = export()
    size = program.graph.find_nodes(op="placeholder")[2].meta[VALUE].shape[0]
    assert isinstance(size, torch.SymInt)
    assert statically_known_true(size == size)
    assert not statically_known_true(size == 3)
    assert program.module()(torch.ones(5, 4), shift=torch.ones(4))["y"].shape == (5, 4)


@pytest.mark.parametrize(("dim", "bound"), [(Dim("n"), None), (Dim("n", max=7), 7), (Dim.AUTO, None)])
def test_the_range_of_a_symbolic_size_can_still_be_asked(dim: Any, bound: int | None) -> None:
    program = torch.export.export(nn.ReLU(), (torch.ones(3, 4),), dynamic_shapes=({0: dim},))
    values = [node.meta[VALUE] for node in program.graph.find_nodes(op="placeholder")]
    sizes, none = dynamic_dimensions([*values, 1])
    assert (list(sizes), none) == ([0], {})
    assert sizes[0].max == (bound or Dim("unbounded").max)
    again = torch.export.export(program.module(), (torch.ones(3, 4),), dynamic_shapes=dynamic_dimensions(values))
    assert isinstance(again.graph.find_nodes(op="placeholder")[0].meta[VALUE].shape[0], torch.SymInt)


def test_equal_symbolic_sizes_share_one_dimension() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    n = Dim("n")
    program = torch.export.export(Add(), (torch.ones(3), torch.ones(3)), dynamic_shapes=({0: n}, {0: n}))
    first, second = dynamic_dimensions([node.meta[VALUE] for node in program.graph.find_nodes(op="placeholder")])
    assert first[0] is second[0]


def test_the_example_size_behind_a_symbol_can_still_be_asked() -> None:
    program = export()
    size = program.graph.find_nodes(op="placeholder")[2].meta[VALUE].shape[0]
    assert (size_hint(size), size_hint(7)) == (3, 7)
    assert size_expression(size) in program.range_constraints
    assert program.module()(torch.ones(5, 4), shift=torch.ones(4))["y"].shape == (5, 4)


def test_sizes_that_depend_on_data_still_have_no_hint() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    program = torch.export.export(Chosen(), (X,))
    (chosen,) = calls(program.graph, ATEN.index.Tensor)
    assert size_hint(chosen.meta[VALUE].shape[0]) == 1


def test_modules_of_a_kind_still_derive_from_these_classes() -> None:
    assert all(issubclass(kind, BatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert all(issubclass(kind, Dropout) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))
    assert all(issubclass(kind, InstanceNorm) for kind in (nn.InstanceNorm1d, nn.InstanceNorm2d))


def test_flops_still_have_formulas_by_op() -> None:
    assert flop_registry[ATEN.mm](X, X.T, out_val=X @ X.T) == 2 * 3 * 4 * 3


@pytest.mark.parametrize("op", [lambda: F.linear(X, X), lambda: F.conv2d(X[None, None], torch.ones(2, 1, 3, 3))])
def test_a_dispatch_mode_still_counts_the_flops_of_composite_ops(op: Any) -> None:
    counter = FlopCounter()
    with counter:
        op()
    with FlopCounterMode(display=False) as expected:
        op()
    assert counter.total == expected.get_total_flops() > 0


def test_convert_still_writes_these_ops(prepared: GraphModule) -> None:
    graph = convert_pt2e(copy.deepcopy(prepared)).graph
    assert len(calls(graph, QUANTIZED_DECOMPOSED.quantize_per_tensor.default)) == 2
    assert QUANTIZED_DECOMPOSED.quantize_per_tensor(X, 0.5, 0, -128, 127, torch.int8).dtype is torch.int8


def test_the_softmax_of_attention_still_gives_zeros_where_all_is_masked() -> None:
    assert ATEN._safe_softmax(torch.full((1, 3), -torch.inf), -1).tolist() == [[0, 0, 0]]


def test_schemas_still_tell_names_defaults_and_writes_of_arguments() -> None:
    found = arguments_of(ATEN.add_.Tensor)
    assert [argument.name for argument in found] == ["self", "other", "alpha"]
    assert found[0].alias_info.is_write
    assert found[1].alias_info is None
    assert (found[2].has_default_value(), found[2].default_value, found[2].kwarg_only) == (True, 1, True)
    assert [str(argument.type) for argument in found] == ["Tensor", "Tensor", "number"]
    assert arguments_of(max) == ()


def test_schemas_still_tell_views_from_results_that_were_written() -> None:
    (view,), (written,), (fresh,) = (
        results_of(target) for target in (ATEN.view.default, ATEN.relu_.default, ATEN.relu.default)
    )
    assert not view.alias_info.is_write
    assert written.alias_info.is_write
    assert fresh.alias_info is None
    assert (is_mutable(ATEN.relu_.default), is_mutable(ATEN.relu.default)) == (True, False)


def test_overloads_still_have_names_that_other_ops_share() -> None:
    assert overload_name(ATEN.add_.Tensor) == "Tensor"
    assert same_overload(ATEN.add_.Tensor, "add") is ATEN.add.Tensor
    assert same_overload(ATEN.add_.Tensor, "nothing") is None


def test_composite_ops_can_still_be_told_from_those_with_kernels() -> None:
    assert [is_composite(target) for target in (ATEN.dropout.default, ATEN.reshape.default, ATEN.mm.default)] == [
        True,
        True,
        False,
    ]


def test_graphs_of_programs_still_know_how_they_are_called(program: ExportedProgram) -> None:
    convention = calling_convention(program.module())
    assert convention is not None
    assert list(convention.orig_args) == ["x", "shift"]
    assert convention.in_spec == program.call_spec.in_spec
    assert convention.out_spec == pytree.tree_structure({"y": X})


def test_traced_graphs_still_have_no_such_convention() -> None:
    assert calling_convention(torch.fx.symbolic_trace(nn.ReLU())) is None


def test_a_program_can_still_be_given_another_graph(program: ExportedProgram) -> None:
    graph = copy.deepcopy(program.graph_module)
    for node, copied in zip(program.graph.nodes, graph.graph.nodes, strict=True):
        copied.name = node.name
    made = with_graph(program, graph, copy.deepcopy(program.graph_signature))
    assert made.graph is not program.graph
    assert made.state_dict["fc.weight"] is program.state_dict["fc.weight"]
    assert torch.equal(made.module()(X, shift=X[0])["y"], program.module()(X, shift=X[0])["y"])


def test_views_of_traced_values_still_have_the_storage_of_what_they_look_at(program: ExportedProgram) -> None:
    value = ops(program.graph)[0].meta[VALUE]
    assert storage_number(value) == storage_number(value.view(-1)) != storage_number(ops(program.graph)[2].meta[VALUE])


def test_torch_still_tells_the_instructions_of_this_machine() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    if "flags" not in flags:
        pytest.skip("no list of flags to compare with")
    assert instructions_found()["avx512_vnni"] == ("avx512_vnni" in flags)
    assert isinstance(instructions_found()["amx_int8"], bool)


# -- torchao -----------------------------------------------------------------------------------------------------------


def test_all_that_prepare_puts_in_is_still_known_as_an_observer(prepared: GraphModule) -> None:
    assert called(prepared)
    assert all(is_observer(module) for module in called(prepared))
    assert not any(is_observer(module) for module in (None, nn.Linear(1, 1), nn.ReLU(), nn.BatchNorm2d(1)))


@pytest.mark.parametrize("base", [pt2e.ObserverBase, pt2e.FakeQuantizeBase, pt2e.AffineQuantizedObserverBase])
def test_every_base_class_of_observers_still_asks_for_what_they_are_known_by(base: type) -> None:
    assert "calculate_qparams" in base.__abstractmethods__  # type: ignore[attr-defined]


def test_fake_quantize_ops_still_have_the_switches_that_they_are_known_by(prepared: GraphModule) -> None:
    module = called(prepared_net(qat_spec(), qat=True))[0]
    assert is_observer(module)
    assert is_fake_quantize(module)
    assert not is_fake_quantize(called(prepared)[0])
    assert rounds_now(module)
    assert not rounds_now(module.apply(pt2e.disable_fake_quant))


def qat_spec() -> QuantizationSpec:
    fake = pt2e.FusedMovingAvgObsFakeQuantize.with_args(observer=pt2e.MovingAverageMinMaxObserver)
    return QuantizationSpec(torch.int8, fake, -128, 127, torch.per_tensor_affine)


def test_fake_quantize_ops_still_round_as_before_when_they_no_longer_observe() -> None:
    module = called(prepared_net(qat_spec(), qat=True))[0]
    scale = float(module.scale)
    fixed = without_observing(module)
    assert torch.equal(fixed(X * 100), fixed(X * 100))
    assert float(fixed.scale) == float(module.scale) == scale
    assert float(fixed(X * 100).max()) < 10


def test_observers_still_keep_the_range_that_they_saw_under_these_names(prepared: GraphModule) -> None:
    for graph in (prepared, prepared_net(qat_spec(), qat=True)):
        keeper = range_keeper(observer_of_x(graph))
        assert keeper is not None
        assert (float(keeper.min_val), float(keeper.max_val)) == (-1, 1)
    assert range_keeper(pt2e.FixedQParamsObserver(0.5, 0, torch.int8)) is None


def test_torchao_still_compares_graphs_with_this_logger() -> None:
    program = export()
    pt2e.generate_numeric_debug_handle(program)
    graph = pt2e.prepare_for_propagation_comparison(program.module(check_guards=False))
    assert called(graph)
    assert all(is_logger(module) for module in called(graph))
    assert not is_logger(nn.ReLU())


def test_specs_still_tell_what_they_make_observers_with() -> None:
    again = pt2e.MinMaxObserver.with_args(eps=1.0).with_args(dtype=torch.int8)
    spec = QuantizationSpec(torch.int8, again, -128, 127, torch.per_tensor_affine)
    assert maker_of(INT8) == (pt2e.MinMaxObserver, {"eps": 2**-12})
    assert maker_of(spec) == (pt2e.MinMaxObserver, {"eps": 1.0, "dtype": torch.int8})
    assert maker_of(FixedQParamsQuantizationSpec(torch.int8, 0.5, 0, -128, 127)) == (None, {})


def test_batch_norms_can_still_be_folded_as_prepare_does() -> None:
    x = torch.ones(1, 1, 4, 4)
    graph = torch.export.export(Folded().eval(), (x,)).module(check_guards=False)
    before = graph(x)
    fold_batch_norms(graph)
    assert [node.target for node in ops(graph.graph)] == [ATEN.conv2d.default]
    torch.testing.assert_close(graph(x), before)


def test_quantized_weights_can_still_be_folded_as_convert_does(prepared: GraphModule) -> None:
    folded = convert_pt2e(copy.deepcopy(prepared), fold_quantize=False)
    wanted = convert_pt2e(copy.deepcopy(prepared))
    assert len(ops(folded.graph)) > len(ops(wanted.graph))
    ran = []

    def call(op: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(op)
        return op(*args, **kwargs)

    folded = fold_quantized_weights(folded, call)
    assert ran == [QUANTIZED_DECOMPOSED.quantize_per_tensor.default], "nothing is dequantized"
    assert "fc.weight" in dict(wanted.named_parameters())
    assert "fc.weight" not in dict(folded.named_parameters()), "nothing reads it"
    assert [node.target for node in ops(folded.graph)] == [node.target for node in ops(wanted.graph)]
    assert torch.equal(folded(X, shift=X[0])["y"], wanted(X, shift=X[0])["y"])


def test_ops_of_an_edge_program_wrap_ops_of_torch_and_a_delegate_is_known_by_name() -> None:
    program = to_edge(torch.export.export(nn.Linear(2, 2).eval(), (torch.ones(1, 2),)))
    targets = [node.target for node in program.exported_program().graph.nodes if node.op == "call_function"]
    assert not any(isinstance(target, OpOverload) for target in targets)
    assert [aten_op(target) for target in targets][-1] is torch.ops.aten.addmm.default
    assert aten_op(torch.ops.aten.relu.default) is torch.ops.aten.relu.default
    assert aten_op(operator.getitem) is operator.getitem
    assert is_delegate(executorch_call_delegate)
    assert not any(is_delegate(target) for target in targets)


def test_export_still_names_no_module_for_the_sizes_that_it_asks_for() -> None:
    class Halved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(2 * x.shape[0], -1)

    program = torch.export.export(Halved(), (torch.ones(3, 4),), dynamic_shapes=({0: Dim("rows", min=2)},))
    (size,) = calls(program.graph, ATEN.sym_size.int)
    assert [clean_path(path) for path, _ in module_stack(size).values()] == [""]


def test_torch_still_counts_who_has_the_memory_of_a_tensor() -> None:
    memory = torch.ones(4)
    assert is_alone(memory)
    others = [memory[1:], memory.numpy(), (memory * torch.ones(4, requires_grad=True)).sum(), memory.untyped_storage()]
    while others:
        assert not is_alone(memory)
        others.pop()
    assert is_alone(memory)
