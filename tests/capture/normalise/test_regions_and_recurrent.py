from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from pt2qa import capture
from pt2qa._graph.handles import names_of
from pt2qa.errors import CaptureError
from tests.capture.models import QUANTIZERS, Forward, annotated_names, image, quantized_sqnr, rules

LINEARS = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}


@pytest.mark.parametrize(("name", "strict"), [("x86", False), ("x86", True), ("xnnpack", False)])
def test_a_forward_under_no_grad_is_quantized_trap_15(name: str, strict: bool) -> None:
    model = Forward(torch.no_grad()(lambda m, x: m.relu(m.conv(x))), conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU())
    captured = capture(model, image(), strict=strict)
    assert [str(change) for change in captured.changes] == [
        "nested region: wrap_with_set_grad_enabled: its 2 ops are now in the graph around the no_grad or enable_grad "
        "region"
    ]
    assert captured.unanalysed == ()
    assert [op.name for op in captured.names.values()] == ["x", "conv/conv2d", "relu/relu"]
    assert annotated_names(model, image(), name, strict=strict) == {"conv/conv2d", "relu/relu"}


@pytest.mark.parametrize("strict", [False, True])
def test_regions_within_regions_with_several_outputs_are_inlined(strict: bool) -> None:
    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            y = m.a(x)
            with torch.enable_grad():
                z = m.b(y) + 1
        with torch.autocast("cpu", enabled=False):
            return m.b(z), y

    captured = capture(Forward(forward, **LINEARS), torch.randn(2, 4), strict=strict)
    assert captured.unanalysed == ()
    assert [op.name for op in captured.names.values()] == ["x", "a/linear", "b/linear", "add", "b/linear_1"]
    assert captured.program.graph_signature.user_outputs == tuple(
        node.name for node in captured.program.graph.output_node().args[0]
    )
    assert not list(captured.program.graph_module.children())


def test_an_autocast_region_is_listed_as_not_analysed() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.a(x)
        return m.b(y.float())

    captured = capture(Forward(forward, **LINEARS), torch.randn(2, 4))
    assert captured.unanalysed == ("wrap_with_autocast.body/linear",)
    assert captured.changes == ()


def test_an_op_before_a_region_that_nothing_reads_is_removed() -> None:
    """torch.export does not enter it among the users of what it reads."""

    def forward(m: Forward, x: torch.Tensor) -> torch.Tensor:
        y = m.first(x)
        y - y
        with torch.no_grad():
            return m.second(y)

    captured = capture(Forward(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 2)), torch.randn(2, 4))
    assert [op.op for op in captured.names.values() if op.op != "input"] == ["linear", "linear"]


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return Forward(lambda m, x: m.fc(m.rnn(x)[0]), rnn=kind(8, 4, 2, batch_first=True), fc=nn.Linear(4, 2))


def test_an_lstm_stays_float_unless_decomposed_trap_25() -> None:
    model, x = recurrent(nn.LSTM), torch.randn(2, 3, 8)
    assert {op for op in annotated_names(model, x, "x86") if "rnn" in op} == set()
    captured = capture(model, x, decompose=("lstm",))
    assert captured.changes[0].rule == "recurrent op"
    assert captured.changes[0].what == "decomposed into 8 linears and the ops between them"
    linears = [op.name for op in captured.names.values() if op.op == "linear"]
    assert linears == ["rnn/linear", *(f"rnn/linear_{i}" for i in range(1, 8)), "fc/linear"]
    assert quantized_sqnr(captured, model, "x86", x) > 25
    graph = captured.module()
    file = io.BytesIO()
    torch.export.save(captured.program, file)
    file.seek(0)
    assert names_of(torch.export.load(file)) == names_of(graph) == captured.names


@pytest.mark.parametrize(("kind", "key"), [(nn.GRU, "gru"), (nn.RNN, "rnn"), (nn.LSTM, "lstm")])
@pytest.mark.parametrize("strict", [False, True])
def test_recurrent_ops_are_taken_apart_in_both_modes_trap_25(kind: type[nn.RNNBase], key: str, strict: bool) -> None:
    captured = capture(recurrent(kind), torch.randn(2, 3, 8), strict=strict, decompose=key)
    assert sum(op.op == "linear" for op in captured.names.values()) == 9


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 3), ({"bidirectional": True}, 3), ({"proj_size": 2}, 3), ({"bias": False}, 3), ({"num_layers": 3}, 3)],
    ids=str,
)
def test_parts_say_which_op_and_which_step_they_are_of(options: dict[str, Any], steps: int) -> None:
    rnn = nn.LSTM(8, 4, **({"num_layers": 2} | options), batch_first=True)
    captured = capture(Forward(lambda m, x: m.rnn(x)[0], rnn=rnn), torch.randn(2, steps, 8), decompose="lstm")
    parts = [op for op in captured.names.values() if op.part_of]
    assert {op.part_of for op in parts} == {"rnn/lstm"}
    # nn.LSTM itself makes the states that it is not given
    assert [op.name for op in captured.names.values() if not op.part_of] == ["x", "rnn/zeros", "rnn/zeros_1"]
    tanhs = [op.step for op in parts if op.op == "tanh"]
    layers = rnn.num_layers * (2 if rnn.bidirectional else 1)
    assert tanhs == [step for step in range(steps) for _ in range(2)] * layers
    # what is computed for the whole sequence at once is of no step
    assert {op.step for op in parts if op.op == "cat"} == {-1}
    assert [op.step for op in parts if op.op == "linear"].count(-1) == layers


def test_two_calls_of_one_module_are_two_ops_with_steps() -> None:
    model = Forward(lambda m, x: m.rnn(m.rnn(x)[0])[0], rnn=nn.GRU(4, 4, batch_first=True))
    captured = capture(model, torch.randn(2, 3, 4), decompose="gru")
    assert {op.part_of for op in captured.names.values() if op.part_of} == {"rnn/gru", "rnn/gru_1"}
    file = io.BytesIO()
    torch.export.save(captured.program, file)
    file.seek(0)
    assert names_of(torch.export.load(file)) == captured.names


def test_an_lstm_under_no_grad_is_taken_apart_too_traps_15_and_25() -> None:
    model = Forward(torch.no_grad()(lambda m, x: m.rnn(x)[0]), rnn=nn.LSTM(8, 4))
    captured = capture(model, torch.randn(2, 3, 8), decompose="lstm")
    assert [change.rule for change in captured.changes[:2]] == ["nested region", "recurrent op"]
    assert "dead code" not in dict(rules(captured))


def test_only_the_recurrent_op_changes_trap_36() -> None:
    """``run_decompositions`` would also rewrite batch norms, flattens and in-place ops."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.relu(m.bn(m.conv(x))).flatten(2)
        return m.rnn(y.transpose(1, 2))[0]

    parts = {"conv": nn.Conv2d(3, 8, 7), "bn": nn.BatchNorm2d(8), "relu": nn.ReLU(inplace=True)}
    captured = capture(Forward(forward, rnn=nn.LSTM(8, 4), **parts), image(), decompose="lstm")
    ops = {str(node.target) for node in captured.program.graph.nodes if node.op == "call_function"}
    assert {"aten.batch_norm.default", "aten.relu_.default", "aten.flatten.using_ints"} <= ops


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(CaptureError, match=r"decompose has \['lstms'\]; expected any of \['lstm', 'gru', 'rnn', "):
        capture(recurrent(nn.LSTM), torch.randn(2, 3, 8), decompose="lstms")


@pytest.mark.parametrize("kinds", ["lstm", ("lstm", "rnn"), ["attention"]], ids=str)
def test_a_kind_that_the_model_does_not_have_is_an_error_that_says_what_it_has(kinds: Any) -> None:
    listed = re.escape(str([kinds] if isinstance(kinds, str) else list(kinds)))
    has = r"nothing of that kind to decompose; it has .*gru \(1\).*\. Leave decompose out"
    with pytest.raises(CaptureError, match=f"decompose={listed}: the model has {has}"):
        capture(recurrent(nn.GRU), torch.randn(2, 3, 8), decompose=kinds)


def test_of_several_kinds_the_model_needs_one() -> None:
    captured = capture(recurrent(nn.GRU), torch.randn(2, 3, 8), decompose=("lstm", "gru", "rnn"))
    assert any(change.rule == "recurrent op" for change in captured.changes)


def test_the_batch_of_a_recurrent_op_may_be_dynamic_trap_25() -> None:
    model = recurrent(nn.LSTM)
    captured = capture(model, torch.randn(2, 3, 8), dynamic_shapes=({0: Dim("batch")},), decompose="lstm")
    x = torch.randn(5, 3, 8)
    torch.testing.assert_close(captured.module()(x), model(x))


def test_ops_in_branches_and_loops_are_listed_as_not_analysed_trap_24() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        start = (torch.tensor(0), x)
        _, y = while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, m.a(t).relu()), start)
        return m.b(torch.cond(x.sum() > 0, lambda t: m.a(t), lambda t: t - 1, (x,)) + y)

    captured = capture(Forward(forward, **LINEARS), torch.randn(2, 4))
    assert captured.unanalysed == (
        "while_loop.cond/lt",
        "while_loop.body/add",
        "while_loop.body/linear",
        "while_loop.body/relu",
        "cond.true/linear",
        "cond.false/sub",
    )
    assert ("scalar", "while_loop.body/add") in rules(captured)


def test_graphs_share_no_nested_graph_with_the_program_trap_24() -> None:
    """``prepare_pt2e`` edits the bodies of loops, so a second quantizer would find the first one's observers."""
    from torch._higher_order_ops.while_loop import while_loop

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        start = (torch.tensor(0), x)
        return m.b(while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, m.a(t).relu()), start)[1])

    model, x = Forward(forward, **LINEARS), torch.randn(2, 4)
    captured = capture(model, x)
    for name in QUANTIZERS:
        assert quantized_sqnr(captured, model, name, x) > 20
    captured.program.validate()
