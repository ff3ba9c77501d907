"""Each pass on a graph written by hand: what it changes, what it leaves, and that the outputs stay the same."""

from __future__ import annotations

import base64
import copy
import operator
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F
from torchao.quantization import pt2e

from pt2qa._graph.internals import flow_runtime
from pt2qa._graph.internals.flow_passes import (
    adds_zero,
    alike,
    attention_in_ops,
    by_rank,
    calling_class,
    decompose_attention,
    decompose_recurrent,
    inline_regions,
    keep_scalars,
    masked_product,
    remove_added_zeros,
    remove_dead_code,
    source_of,
    takes_two_tensors,
    unread_write,
    write_out_padding,
    write_sources,
)
from pt2qa._graph.internals.nodes import MODULE_STACK, SOURCES, VALUE

ATEN = torch.ops.aten


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- formulas ----------------------------------------------------------------------------------------------------------

QUERY, KEY, VALUES = normal(2, 4, 5, 8), normal(2, 4, 7, 8, seed=1), normal(2, 4, 7, 3, seed=2)
HIDES = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) > 0.4
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "scaled by zero": {"scale": 0.0},
    "causal": {"is_causal": True},
    "with a mask": {"attn_mask": HIDES},
    "with a hidden row": {"attn_mask": HIDES & (torch.arange(5) != 2)[:, None]},
    "with a sum": {"attn_mask": normal(5, 7, seed=4)},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_ops_is_attention(name: str) -> None:
    options = dict(ATTENTION[name])
    expected = F.scaled_dot_product_attention(QUERY, KEY, VALUES, **options)
    mask = options.pop("attn_mask", None)
    torch.testing.assert_close(attention_in_ops(QUERY, KEY, VALUES, mask, **options), expected)


def test_attention_of_groups_of_heads() -> None:
    key, value = KEY[:, :2], VALUES[:, :2]
    expected = F.scaled_dot_product_attention(QUERY, key, value, enable_gqa=True)
    torch.testing.assert_close(attention_in_ops(QUERY, key, value, enable_gqa=True), expected)


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 1), (1, 0.25), (2, 3)])
def test_a_masked_product_is_baddbmm(beta: float, alpha: float) -> None:
    query, key, mask = normal(2, 5, 8), normal(2, 8, 7, seed=1), normal(2, 5, 7, seed=2)
    expected = torch.baddbmm(mask, query, key, beta=beta, alpha=alpha)
    torch.testing.assert_close(masked_product(mask, query, key, beta=beta, alpha=alpha), expected)


# -- graphs ------------------------------------------------------------------------------------------------------------


def exported(forward: Callable[..., Any], *inputs: Tensor, strict: bool = False, **parts: nn.Module) -> GraphModule:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, *values: Tensor) -> Any:
            return forward(self, *values)

    return torch.export.export(Model().eval(), inputs, strict=strict).module(check_guards=False)  # type: ignore[return-value]


def targets(graph: GraphModule) -> list[str]:
    ops = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    return [str(target).removeprefix("aten.") if "aten." in str(target) else target.__name__ for target in ops]


def unchanged(graph: GraphModule, change: Callable[[GraphModule], Any], *inputs: Tensor) -> Any:
    """What a pass returns; the graph computes the same before and after."""
    before = graph(*(each.clone() for each in inputs))
    found = change(graph)
    graph.graph.lint()
    torch.testing.assert_close(graph(*(each.clone() for each in inputs)), before)
    return found


def regions(model: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = model.fc(x)
        with torch.autocast("cpu", enabled=False):
            z = y.relu()
            w = z + 1
    return z * w, y


def test_regions_are_put_into_the_graph_one_in_the_other() -> None:
    graph, x = exported(regions, normal(3, 4), fc=nn.Linear(4, 4)), normal(3, 4)
    assert [name for name in targets(graph) if name.startswith("wrap")]
    unchanged(graph, inline_regions, x)
    assert targets(graph) == ["linear.default", "relu.default", "add.Tensor", "mul.Tensor"]
    assert not [child for child in graph.children() if isinstance(child, GraphModule)]
    assert len(graph.graph.find_nodes(op="get_attr")) == 2


def test_an_autocast_region_that_is_on_stays() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x.relu()  # type: ignore[no-any-return]

    graph = exported(forward, normal(3, 4))
    unchanged(graph, inline_regions, normal(3, 4))
    assert [name for name in targets(graph) if name.startswith("wrap_with_autocast")]


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_recurrent_ops_are_decomposed_where_they_are_asked_for() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        return model.lstm(x)[0] + model.gru(x)[0]

    parts = {"lstm": nn.LSTM(4, 4), "gru": nn.GRU(4, 4)}
    graph, x = exported(forward, normal(3, 2, 4), **parts), normal(3, 2, 4)
    unchanged(graph, lambda each: decompose_recurrent(each, [ATEN.lstm.input]), x)
    names = targets(graph)
    assert "gru.input" in names
    assert "lstm.input" not in names
    assert names.count("linear.default") == 4  # of the inputs at once, of the state in each of three steps
    unread = [node for node in graph.graph.nodes if node.op == "call_function" and not node.users]
    assert "lstm" not in {flow_runtime.module_of(node)[0] for node in unread}
    inner = [node for node in graph.graph.nodes if node.target is ATEN.linear.default]
    assert {flow_runtime.module_of(node) for node in inner} == {("lstm", "LSTM")}
    assert [tuple(node.meta[VALUE].shape) for node in inner] == [(3, 2, 16), *[(1, 2, 16)] * 3]


def test_attention_is_decomposed_and_other_products_only_in_its_module() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        return F.scaled_dot_product_attention(x, x, x) + torch.bmm(x, x.transpose(1, 2)) @ x

    graph, x = exported(forward, normal(2, 5, 8)), normal(2, 5, 8)
    changed = unchanged(graph, decompose_attention, x)
    assert [str(node.target) for node in changed] == ["aten.scaled_dot_product_attention.default"]
    assert targets(graph).count("bmm.default") == 1
    assert targets(graph).count("softmax.int") == 1
    for mask in (None, normal(5, 5)):
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        graph = exported(lambda model, x, m=mask: model.a(x, x, x, attn_mask=m)[1], x, a=attention)
        found = unchanged(graph, decompose_attention, x)
        kind = "aten.bmm.default" if mask is None else "aten.baddbmm.default"
        assert kind in [str(node.target) for node in found]
        assert not {"bmm.default", "baddbmm.default"} & set(targets(graph))


class By:
    """A graph that is written op by op, with traced values."""

    def __init__(self, *inputs: Tensor) -> None:
        self.graph, self.held = Graph(), nn.Module()
        self.inputs = [self.graph.placeholder(f"x{number}") for number in range(len(inputs))]
        for node, value in zip(self.inputs, inputs, strict=True):
            node.meta[VALUE] = value

    def attr(self, name: str, value: Tensor) -> Node:
        self.held.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta[VALUE] = value
        return node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)

        def value(each: Any) -> Any:
            found = each.meta[VALUE]
            return found.clone() if isinstance(found, Tensor) else found

        own, named = torch.fx.map_arg((args, kwargs), value)
        node.meta[VALUE] = target(*own, **named)
        return node

    def module(self, *outputs: Node) -> GraphModule:
        self.graph.output(outputs)
        return GraphModule(self.held, self.graph)


def test_zeros_are_added_to_nothing() -> None:
    x = normal(2, 3)
    by = By(x)
    relu = by(ATEN.relu.default, by.inputs[0])
    removed = [by(ATEN.add.Tensor, relu, 0), by(ATEN.add.Scalar, relu, 0.0), by(ATEN.add.Tensor, by.inputs[0], 0)]
    kept = [
        by(ATEN.add.Tensor, relu, 1),
        by(ATEN.add.Tensor, relu, 0.5),
        by(ATEN.add.Tensor, by(ATEN.gt.Scalar, relu, 0), 0),  # integers of booleans
        by(ATEN.add.Tensor, relu, by(ATEN.neg.default, relu)),
        by(ATEN.sub.Tensor, relu, 0),
        by(ATEN.add.Tensor, relu, False),
    ]
    last = by(ATEN.add.Tensor, by.inputs[0], 0)  # the model returns it, so it is a copy
    used = [by(ATEN.neg.default, each) for each in (*removed, *kept)]
    module = by.module(*used, last)
    assert [adds_zero(node) for node in (*removed, *kept, last)] == [True] * 3 + [False] * 5 + [True, False]
    two = copy.deepcopy(module)
    assert unchanged(module, remove_added_zeros, x) == [*removed, kept[-1]]
    assert unchanged(two, lambda each: remove_added_zeros(each, lambda graph, node: True), x) == []
    assert targets(module).count("add.Tensor") == 5
    assert targets(two).count("add.Tensor") == 8


def test_values_are_alike_in_dtype_and_every_size() -> None:
    x = torch.ones(2, 3)
    others = (x.double(), torch.ones(2), torch.ones(2, 4), torch.ones(4, 3), torch.ones(2, 3, 1))
    assert alike(x, x + 1)
    assert not any(alike(x, other) for other in others)


def test_ops_without_effect_are_removed() -> None:
    x = normal(2, 3)
    by = By(x)
    relu = by(ATEN.relu.default, by.inputs[0])
    dead = by(ATEN.exp.default, relu)
    written = by(ATEN.neg.default, relu)
    write = by(ATEN.add_.Tensor, written, 1)
    needed = by(ATEN.sin.default, relu)
    by(ATEN.mul_.Tensor, needed, 2)  # others read what it writes to
    by(ATEN.mul_.Tensor, by.inputs[0], 2)  # an input
    module = by.module(by(ATEN.cos.default, needed))
    assert unread_write(module) is write
    assert unchanged(module, remove_dead_code, x) == [dead, written, write]
    assert unread_write(module) is None
    assert targets(module) == ["relu.default", "sin.default", "mul_.Tensor", "mul_.Tensor", "cos.default"]


def test_scalars_stay_scalars_where_the_result_is_not_float32() -> None:
    x, count = normal(3), torch.arange(3)
    by = By(x, count)
    changed = [by(ATEN.add.Tensor, by.inputs[1], 1), by(ATEN.mul.Tensor, by.inputs[1], 2)]
    kept = [
        by(ATEN.add.Tensor, by.inputs[0], 1),
        by(ATEN.mul.Tensor, by.inputs[1], by.inputs[1]),
        by(ATEN.sub.Tensor, by.inputs[1], 1),
        by(ATEN.add.Tensor, by.inputs[1], 0.5),
    ]
    module = by.module(*changed, *kept)
    assert unchanged(module, keep_scalars, x, count) == changed
    assert [node.target for node in changed] == [ATEN.add.Scalar, ATEN.mul.Scalar]


@pytest.mark.parametrize(
    ("rank", "settings", "padding"),
    [
        (2, (None, [1, 1], "same", [1, 1], 1), [1, 2]),
        (2, (None, [1, 1], "same", [2, 1], 1), [2, 2]),
        (2, (None, [1, 1], "same", [2], 1), [2, 4]),
        (2, (None, [2, 1], "valid", [1, 1], 1), [0, 0]),
        (2, (), [0, 0]),
        (2, (None, [1, 1], "same", [1, 1], 2), [1, 2]),
        (1, (None, [1], "same"), [1]),
        (3, (None, [1, 1, 1], "same"), [1, 2, 0]),
    ],
)
def test_padding_is_written_in_numbers(rank: int, settings: tuple[Any, ...], padding: list[int]) -> None:
    groups = settings[4] if len(settings) > 4 else 1
    x, weight = normal(2, 4, *[9] * rank), normal(4, 4 // groups, *(3, 5, 1)[:rank])
    by = By(x)
    conv = by(getattr(ATEN, f"conv{rank}d").padding, by.inputs[0], by.attr("weight", weight), *settings)
    module = by.module(conv)
    if settings and any(dilated * (size - 1) % 2 for dilated, size in zip([1] * rank, weight.shape[2:], strict=True)):
        return
    assert unchanged(module, write_out_padding, x) == [conv]
    assert conv.target is getattr(ATEN, f"conv{rank}d").default
    stride, dilation = (settings[1] if settings else [1] * rank), (settings[3] if len(settings) > 3 else [1] * rank)
    assert conv.args[2:] == (None, stride, padding, dilation, groups)


def test_padding_that_differs_between_the_sides_stays() -> None:
    x = normal(1, 2, 9, 9)
    by = By(x)
    conv = by(ATEN.conv2d.padding, by.inputs[0], by.attr("weight", normal(2, 2, 3, 2)), None, [1, 1], "same")
    assert unchanged(by.module(conv), write_out_padding, x) == []
    assert conv.target is ATEN.conv2d.padding


# -- sources -----------------------------------------------------------------------------------------------------------


def called_by(node: Node, kind: Any, path: str = "part", key: str = "") -> Node:
    node.meta[MODULE_STACK] = {"root": ("", "Model"), key or path: (path, kind)}
    return node


def test_the_source_of_an_op() -> None:
    x, image = normal(2, 3), normal(1, 4, 5, 5)
    by = By(x, image)
    first, second = by.inputs
    norm = (torch.ones(4), torch.zeros(4), torch.zeros(4), torch.ones(4), False, 0.1, 1e-5, False)
    relu = by(ATEN.relu.default, first)
    tanh = by(ATEN.hardtanh.default, first, 0, 6)
    cases: list[tuple[Node, Any, Any]] = [
        (relu, None, nn.ReLU),
        (relu, nn.ReLU, nn.ReLU),
        (relu, nn.Tanh, nn.ReLU),
        (relu, nn.LSTM, nn.ReLU),
        (relu, nn.Softmax, nn.Softmax),
        (tanh, nn.ReLU6, nn.ReLU6),
        (tanh, None, nn.Hardtanh),
        (by(ATEN.batch_norm.default, second, *norm), None, nn.BatchNorm2d),
        (by(ATEN.batch_norm.default, by(ATEN.select.int, second, 2, 0), *norm), None, nn.BatchNorm1d),
        (by(ATEN.batch_norm.default, by(ATEN.unsqueeze.default, second, 2), *norm), None, nn.BatchNorm3d),
        (by(ATEN.batch_norm.default, second, *norm), nn.BatchNorm3d, nn.BatchNorm3d),
        (by(ATEN.add.Tensor, relu, first), None, operator.add),
        (by(ATEN.add.Tensor, relu, 1), None, ATEN.add.Tensor),
        (by(ATEN.mul_.Tensor, relu, first), nn.ReLU, operator.mul),
        (by(ATEN.add.Scalar, relu, 1), None, ATEN.add.Scalar),
        (by(ATEN.sigmoid.default, relu), None, torch.sigmoid),
        (by(ATEN.sigmoid.default, relu), nn.LSTM, nn.LSTM),
        (by(ATEN.sigmoid.default, relu), nn.GRUCell, nn.GRUCell),
        (by(ATEN.celu.default, relu), None, torch.celu),
        (by(operator.add, 1, 2), None, "builtin_function_or_method.add"),
        (by(ATEN.clone.default, relu), nn.Dropout, nn.Dropout),
    ]
    for node, caller, expected in cases:
        assert source_of(node, caller) is expected or source_of(node, caller) == expected, (node, caller)
    assert by_rank(relu, (nn.ReLU,)) is nn.ReLU
    assert [takes_two_tensors(node) for node, _, expected in cases if expected in (operator.add, ATEN.add.Tensor)] == [
        True,
        False,
    ]


class Own(nn.Linear):
    """A class that no quantizer knows."""


def test_the_class_that_called_an_op() -> None:
    by = By(normal(2, 3))
    node = by(ATEN.relu.default, by.inputs[0])
    assert calling_class(node) is None
    for kind, expected in (
        (nn.ReLU, nn.ReLU),
        ("torch.nn.modules.activation.ReLU", nn.ReLU),
        (nn.Sequential, None),
        ("torch.nn.modules.container.Sequential", None),
        (Own, None),
        (f"{Own.__module__}.Own", None),
        ("torch.nn.modules.activation.Nothing", None),
        ("torch.nn.modules.activation.torch", None),
        (dict, None),
    ):
        assert calling_class(called_by(node, kind)) is expected, kind


def test_sources_are_written_for_each_call_of_a_module() -> None:
    by = By(normal(2, 3))
    (x,) = by.inputs
    x.meta[SOURCES] = [("old", "old")]
    softmax = [called_by(by(ATEN.softmax.int, x, 1), nn.Softmax, "s", f"s@{call}") for call in (0, 0, 1)]
    relu = called_by(by(ATEN.relu.default, x), nn.ReLU, "r")
    again = called_by(by(ATEN.relu_.default, relu), nn.ReLU, "r")
    tanh = called_by(by(ATEN.tanh.default, x), nn.ReLU, "t")
    split = by(ATEN.split.Tensor, x, 1)
    part = by(operator.getitem, split, 0)
    state = called_by(by(ATEN.sigmoid.default, x), nn.LSTM, "l")
    graph = by.module(*softmax, again, tanh, part, state)
    renamed, calls = write_sources(graph, opened=(nn.LSTM,))
    assert renamed == [(tanh, nn.Tanh)]
    assert calls == {("r", "relu"): 2}
    assert SOURCES not in x.meta
    first = softmax[0].name
    assert [node.meta[SOURCES] for node in softmax] == [
        [(first, nn.Softmax)],
        [(first, nn.Softmax)],
        [(softmax[2].name, nn.Softmax)],
    ]
    assert relu.meta[SOURCES] == [(relu.name, nn.ReLU)]
    assert part.meta[SOURCES] == split.meta[SOURCES]
    assert part.meta[SOURCES] is not split.meta[SOURCES]
    assert state.meta[SOURCES] == [(state.name, torch.sigmoid)]


# -- parameters --------------------------------------------------------------------------------------------------------


def in_base64(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def layers(
    forward: Callable[[Any, Tensor], Tensor], x: Tensor, **parts: nn.Module
) -> tuple[GraphModule, dict[str, Node]]:
    graph = exported(forward, x, **parts)
    return graph, flow_runtime.ops_by_name(graph.graph)


@pytest.mark.parametrize("bias", [True, False])
def test_numbers_are_added_to_biases(bias: bool) -> None:
    x = normal(2, 3)
    linear = nn.Linear(3, 4, bias=bias).half().float()
    graph, ops = layers(lambda model, x: model.fc(x).relu(), x, fc=linear)
    before = linear(x).detach()
    numbers = [1.0, -2.0, 0.5, 3.0]
    flow_runtime.add_to_biases(graph, ops, [("fc/linear", in_base64(*numbers)), ("fc/linear", in_base64(*numbers))])
    torch.testing.assert_close(graph(x).detach(), (before + 2 * torch.tensor(numbers)).relu())
    name = "fc.bias" if bias else "bias_of_fc_linear"
    assert graph.get_parameter(name).dtype == torch.float32
    assert not graph.get_parameter(name).requires_grad
    if bias:
        assert torch.equal(graph.get_parameter(name), linear.bias.detach() + 2 * torch.tensor(numbers))
        assert linear.bias is not graph.get_parameter(name)


def test_a_bias_that_is_none_between_other_arguments() -> None:
    x, conv = normal(1, 2, 4, 4), nn.Conv2d(2, 3, 3, bias=False, padding=1, stride=2)
    graph, ops = layers(lambda model, x: model.conv(x), x, conv=conv)
    flow_runtime.add_to_biases(graph, ops, [("conv/conv2d", in_base64(1, 2, 3))])
    torch.testing.assert_close(graph(x), conv(x) + torch.tensor([1.0, 2, 3]).reshape(3, 1, 1))


def test_scales_and_shifts_of_parameters_of_any_rank() -> None:
    x = normal(1, 4, 5, 5)
    first, second = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 3, groups=2)
    graph, ops = layers(lambda model, x: model.b(model.a(x)), x, a=first, b=second)
    before = graph(x)
    factors = in_base64(2.0, 0.5, 4.0, 1.0, 8.0, 0.25)
    changes: list[flow_runtime.Change] = [
        ("scale", "a/conv2d", 1, 0, 1.0, factors),
        ("scale", "a/conv2d", 2, 0, 1.0, factors),
        ("scale", "b/conv2d", 1, 1, -1.0, factors),
    ]
    flow_runtime.change_parameters(graph, ops, changes)
    torch.testing.assert_close(graph(x), before)
    numbers = torch.tensor([2.0, 0.5, 4.0, 1.0, 8.0, 0.25])
    assert torch.equal(graph.get_parameter("a.weight"), first.weight.detach() * numbers.reshape(6, 1, 1, 1))
    wanted = second.weight.detach() / torch.stack([numbers[:3], numbers[3:]]).repeat_interleave(2, 0)[..., None, None]
    torch.testing.assert_close(graph.get_parameter("b.weight").detach(), wanted)


def test_scaled_by_element_by_row_or_by_channel_of_groups() -> None:
    value = torch.arange(12.0).reshape(2, 3, 2)
    by_row, by_element = torch.tensor([2.0, 3.0]), torch.arange(12.0)
    assert torch.equal(flow_runtime.scaled(value, by_row, 0), value * by_row[:, None, None])
    assert torch.equal(flow_runtime.scaled(value, by_element, 0), value * by_element.reshape(2, 3, 2))
    three, six = torch.tensor([1.0, 2, 3]), torch.arange(6.0)
    assert torch.equal(flow_runtime.scaled(value, three, 1), value * three[:, None])
    assert torch.equal(flow_runtime.scaled(value, six, 1), value * six.reshape(2, 3, 1))
    assert flow_runtime.floats(in_base64(0.5, -3.0)).tolist() == [0.5, -3.0]
    integers = torch.tensor([[3, 4], [5, 6]], dtype=torch.int8)
    found = flow_runtime.in_float(integers, torch.tensor([0.5, 2.0]), torch.tensor([1, 2]))
    assert found.tolist() == [[1.0, 1.5], [6.0, 8.0]]
    assert flow_runtime.in_float(integers, torch.tensor([0.5]), torch.tensor([1])).tolist() == [[1.0, 1.5], [2.0, 2.5]]


def test_weights_get_the_values_of_integers() -> None:
    weight, observer = (
        normal(2, 3),
        pt2e.PerChannelMinMaxObserver(dtype=torch.int8, qscheme=torch.per_channel_symmetric),
    )
    observer(weight)
    by = By(normal(4, 3))
    held = by.attr("weight", weight)
    del by.held.weight
    by.held.weight, by.held.observer = nn.Parameter(weight), observer
    seen = by.graph.call_module("observer", (held,))
    linear = by.graph.call_function(ATEN.linear.default, (by.inputs[0], seen))
    graph = by.module(linear)
    integers = torch.tensor([[1, -2, 3], [100, -128, 0]], dtype=torch.int8)
    text = base64.b64encode(integers.numpy().tobytes()).decode()
    flow_runtime.set_integers(graph, {"linear": linear}, [("linear", text)])
    assert torch.equal(graph.get_parameter("weight"), integers * observer.calculate_qparams()[0][:, None])
    assert flow_runtime.parameter_of(seen) == "weight"
    linear.args = (by.inputs[0], held)
    with pytest.raises(
        ValueError, match="linear: the quantizer leaves its weight in float here, so it has no integers"
    ):
        flow_runtime.set_integers(graph, {"linear": linear}, [("linear", text)])


def test_a_buffer_stays_a_buffer_and_other_graphs_keep_theirs() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    flow_runtime.set_parameters(model, {"0.running_mean": torch.ones(2), "0.weight": torch.full((2,), 3.0)})  # type: ignore[arg-type]
    assert set(dict(model.named_buffers())) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert model[0].running_mean.tolist() == [1, 1]  # type: ignore[union-attr, operator]
    assert (model[0].weight.tolist(), model[0].weight.requires_grad) == ([3, 3], False)
