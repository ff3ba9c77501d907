"""Prepare and convert give the same with shortcuts as without: code, constants, metadata, names, scales."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.quantizer import xnnpack_quantizer_utils
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torchao.quantization.pt2e import HistogramObserver, qat_utils, utils
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from pt2qa._graph.internals import shortcuts as module
from pt2qa._graph.internals.shortcuts import shortcuts
from pt2qa.plugins import resolve

X = torch.linspace(-3, 3, 2 * 4 * 5 * 5).reshape(2, 4, 5, 5)


@pytest.fixture(autouse=True)
def _torchao_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns are traced anew, which a fixture of all tests avoids."""
    for user in (qat_utils, xnnpack_quantizer_utils):
        monkeypatch.setattr(user, "_get_aten_graph_module_for_pattern", utils._get_aten_graph_module_for_pattern)


class Net(nn.Module):
    """Batch norms to fold, with and without bias, fused and shared scales, a scalar, dead code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x)).relu()
        _ = y.exp()
        z = torch.cat([self.bn2(self.conv2(y)) + 0.5 * y, y], 1)
        return self.fc(nn.functional.adaptive_avg_pool2d(z, 1).flatten(1))  # type: ignore[no-any-return]


def flow(quantizer: str, qat: bool, through: Callable[[], Any]) -> tuple[str, GraphModule, Tensor]:
    """The prepared code, the converted graph, and the next random number."""
    model = Net().train(qat)
    graph = copy.deepcopy(torch.export.export(model, (X,)).module(check_guards=False))
    plugin = resolve(quantizer)
    quantizer_object = plugin.build(graph, qat=qat)
    torch.manual_seed(1)
    with through():
        prepared = (prepare_qat_pt2e if qat else prepare_pt2e)(graph, quantizer_object)
    code = prepared.code
    prepared(X)
    with through():
        converted = convert_pt2e(prepared)
    return code, converted, torch.rand(1)


def described(graph_module: GraphModule) -> list[object]:
    """All that is known of the nodes, without the numbers by which torch knows objects."""

    def text(value: Any) -> object:
        if isinstance(value, Tensor):
            return value.shape, value.dtype, value.stride()
        if isinstance(value, list):
            return [text(one) for one in value]
        if hasattr(value, "from_node"):
            return value.name, str(value.target), value.pass_name, text(value.from_node)
        return str(value)

    return [
        (
            *map(str, (node.op, node.name, node.target, node.args, node.kwargs)),
            {k: text(v) for k, v in node.meta.items()},
        )
        for node in graph_module.graph.nodes
    ]


# QAT's hundred patterns take torchao half a minute.
@pytest.mark.parametrize(
    ("quantizer", "qat"), [("xnnpack", False), ("x86", False), pytest.param("xnnpack", True, marks=pytest.mark.zoo)]
)
def test_shortcuts_change_nothing(quantizer: str, qat: bool) -> None:
    code, plain, random = flow(quantizer, qat, contextlib.nullcontext)
    for _ in range(2):  # patterns are traced, and known
        short_code, short, short_random = flow(quantizer, qat, shortcuts)
        assert short_code == code
        assert short.code == plain.code
        assert described(short) == described(plain)
        assert short.meta.keys() == plain.meta.keys()
        assert random == short_random
        constants, others = plain.state_dict(), short.state_dict()
        assert list(constants) == list(others)
        assert all(torch.equal(others[name], value) for name, value in constants.items())
        assert torch.equal(short(X), plain(X))


class Normed(nn.Module):
    """A batch norm that nothing can be folded into, before two readers of one value."""

    def __init__(self, *, rooted: bool) -> None:
        super().__init__()
        self.norm, self.conv, self.other = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.rooted = rooted

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).relu()
        y = self.conv(y) + self.other(y)
        return y.abs().sqrt() if self.rooted else y


# A hundred patterns, which take torchao half a minute.
@pytest.mark.zoo
@pytest.mark.parametrize("rooted", [False, True])
def test_a_batch_norm_that_was_not_trained_needs_no_patterns(rooted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.export.export(Normed(rooted=rooted).eval(), (X,)).module()
    prepared = prepare_pt2e(graph, resolve("xnnpack").build(graph, qat=False))
    prepared(X)
    searched: list[Any] = []
    search, fold = qat_utils.replace_pattern_with_filters, qat_utils._fold_conv_bn_qat_helper

    def counted(*args: Any, **options: Any) -> Any:
        searched.append(args)
        return search(*args, **options)

    monkeypatch.setattr(qat_utils, "replace_pattern_with_filters", counted)
    torch.manual_seed(1)
    plain, random = convert_pt2e(copy.deepcopy(prepared)), torch.rand(1)
    count = len(searched)
    assert count > 40
    torch.manual_seed(1)
    with shortcuts():
        short = convert_pt2e(copy.deepcopy(prepared))
    assert torch.rand(1) == random
    assert len(searched) == (2 * count if rooted else count)
    assert qat_utils._fold_conv_bn_qat_helper is fold
    assert any("batch_norm" in str(node.target) for node in short.graph.nodes)
    assert short.code == plain.code
    assert described(short) == described(plain)
    assert torch.equal(short(X), plain(X))


def test_patterns_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> GraphModule:
        inputs = [torch.randn(1, 1, 3, 3), torch.randn(1, 1, 1, 1), *(torch.randn(1) for _ in range(5))]
        pattern = qat_utils._get_conv_bn_pattern(torch.nn.functional.conv2d)
        export = inspect.unwrap(utils._get_aten_graph_module_for_pattern)  # conftest keeps what it returns
        return export(pattern, tuple(inputs))  # type: ignore[no-any-return]

    plain = traced()
    monkeypatch.setattr(module, "_patterns", {})
    with shortcuts():
        found = [traced(), traced()]
    assert len(module._patterns) == 1
    assert found[0] is not found[1], "a match edits its pattern"
    for short in found:
        assert short.code == plain.code
        assert described(short) == described(plain)
        assert (short._in_spec, short._out_spec) == (plain._in_spec, plain._out_spec)


def test_patterns_of_one_spelling_are_told_apart() -> None:
    from torchao.quantization.pt2e import WrapperModule

    def pattern(function: Callable[[Tensor], Tensor]) -> nn.Module:
        return WrapperModule(lambda x: function(x) + 1)  # type: ignore[no-any-return]

    with shortcuts():
        found = [
            str(torch.export.export(pattern(each), (torch.zeros(size),)).graph)
            for each in (torch.relu, torch.tanh)
            for size in (2, 3)
        ]
    assert ["relu" in text for text in found] == [True, True, False, False]
    assert len(set(found)) >= 2


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("seed", range(4))
def test_the_range_of_a_histogram_is_the_same(seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    data = (torch.randn(999), torch.randn(999).relu(), torch.randn(99) * torch.randn(99).exp(), torch.ones(3))[seed]
    observer = HistogramObserver(eps=2**-12)
    observer(data * scale)
    observer(data * scale * 1.3)
    expected = observer._non_linear_param_search()
    with shortcuts():
        found = observer._non_linear_param_search()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_graph_can_be_called_before_the_end_and_has_its_code_after() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
    with shortcuts():
        last = next(node for node in traced.graph.nodes if node.name == "_1")
        last.replace_all_uses_with(last.args[0])
        traced.graph.eliminate_dead_code()
        traced.recompile()
        assert torch.equal(traced(X), X.relu())
        traced.recompile()
    assert "self.1" not in traced.code.replace('getattr(self, "1")', "self.1")
    assert not module._State.stale


def test_after_an_exception_a_graph_runs_as_edited() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
    with contextlib.suppress(ZeroDivisionError), shortcuts():
        traced.graph.output_node().args = (next(iter(traced.graph.nodes)),)
        traced.recompile()
        raise ZeroDivisionError
    assert torch.equal(traced(X), X)


def test_other_threads_take_no_shortcut_and_nothing_stays_replaced() -> None:
    names = [GraphModule.recompile, Graph.lint, Graph.eliminate_dead_code, torch.export.export]
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
    placeholder = next(iter(traced.graph.nodes))
    traced.graph.output_node().append(placeholder)  # read before it is there
    found: list[str] = []

    def elsewhere() -> None:
        with contextlib.suppress(RuntimeError):
            traced.graph.lint()
            found.append("not checked")

    with shortcuts():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        traced.graph.lint()
    assert not found
    assert names == [GraphModule.recompile, Graph.lint, Graph.eliminate_dead_code, torch.export.export]
