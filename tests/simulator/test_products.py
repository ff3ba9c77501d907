"""One table of the ops that multiply: who reads it agrees on what they are, what they cost and what is rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import pt2qa
from pt2qa._check.products import multiply_adds
from pt2qa._graph.handles import handle_of, op_of
from pt2qa._sensitivity.costs import survey
from pt2qa._simulator.products import PRODUCTS, Read, is_quantized, own_multiply_adds, state_of
from tests.flows import quantized_pair

Product = Callable[..., Tensor]


class Behind(nn.Module):
    """A linear, which every quantizer takes, and a product behind it."""

    def __init__(self, product: Product, *sizes: int) -> None:
        super().__init__()
        self.fc, self.product = nn.Linear(8, 8), product
        self.weights = nn.ParameterList([torch.randn(sizes)] if sizes else [])

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.fc(x), *self.weights)


class Cell(nn.Module):
    """A recurrent cell on the first token."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.fc, self.cell = nn.Linear(8, 8), kind(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.cell(self.fc(x)[:, 0])
        result: Tensor = made[0] if isinstance(made, tuple) else made
        return result


class Recurrent(nn.Module):
    """A recurrent op."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.fc, self.rnn = nn.Linear(8, 8), kind(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.rnn(self.fc(x))[0]
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "scaled_dot_product_attention": lambda: Behind(lambda x: F.scaled_dot_product_attention(x, x, x)),
    "matmul": lambda: Behind(lambda x: x @ x.transpose(1, 2)),
    "mm": lambda: Behind(lambda x: torch.mm(x[0], x[1].t())),
    "bmm": lambda: Behind(lambda x: torch.bmm(x, x.transpose(1, 2))),
    "baddbmm": lambda: Behind(lambda x: torch.baddbmm(x[:, :, :4], x, x.transpose(1, 2))),
    "addmm": lambda: Behind(lambda x: torch.addmm(x[0, :, :4], x[0], x[1].t())),
    "einsum": lambda: Behind(lambda x: torch.einsum("bij,bkj->bik", x, x)),
    "bilinear": lambda: Behind(lambda x, w: F.bilinear(x, x, w), 3, 8, 8),
    "conv_transpose1d": lambda: Behind(F.conv_transpose1d, 4, 5, 3),
    "conv3d": lambda: Behind(lambda x, w: F.conv3d(x[:, None, None], w), 2, 1, 1, 3, 3),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn_tanh": lambda: Recurrent(nn.RNN),
    "lstm_cell": lambda: Cell(nn.LSTMCell),
    "gru_cell": lambda: Cell(nn.GRUCell),
    "rnn_tanh_cell": lambda: Cell(nn.RNNCell),
}
"""By the product that each has beside a linear."""


@pytest.fixture(scope="module", params=MODELS)
def product(request: pytest.FixtureRequest) -> tuple[str, pt2qa.QuantizedPair]:
    """The op, and a pair in which the quantizer takes the linear alone."""
    torch.manual_seed(0)
    return request.param, quantized_pair(MODELS[request.param](), torch.randn(2, 4, 8), "xnnpack:mode=dynamic")


def test_a_product_that_stays_in_float_is_noted(product: tuple[str, pt2qa.QuantizedPair]) -> None:
    """Trap 46: attention, mm, baddbmm, einsum and cells silently stayed in float."""
    op, pair = product
    report = pt2qa.compare_layers(pair, [torch.randn(2, 4, 8)], progress=False)
    assert f"0 of 1 {op} ops are quantized; the rest runs in float" in report.notes
    (entry,) = (entry for entry in pair.coverage if entry.op == op)
    assert entry.carries_arithmetic
    assert not any(" 1 linear ops " in note for note in report.notes)


def test_a_product_has_the_same_multiply_adds_everywhere(product: tuple[str, pt2qa.QuantizedPair]) -> None:
    """torch counts nothing for attention and for recurrent ops: sensitivity and costs took them for free."""
    op, pair = product
    assert pair.float_graph is not None
    counted = survey(pair.simulator, [torch.randn(2, 4, 8)]).flops
    steps = {step.name: counted[step.index] for step in pair.program.steps if step.op == op}
    nodes = {pair.names[handle_of(node) or -1].name: node for node in pair.float_graph.graph.nodes if _is(node, op)}
    assert steps == {name: 2 * multiply_adds(node) for name, node in nodes.items()}
    assert all(steps.values())
    assert len(steps) == 1


def test_formulas_of_our_own_count_the_matrix_products_inside() -> None:
    query, key, value = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 4)
    x, state, inner, outer = torch.ones(6, 2, 3), torch.ones(1, 2, 4), torch.ones(16, 3), torch.ones(16, 4)
    with FlopCounterMode(display=False) as attention:
        query @ key.mT @ value
    with FlopCounterMode(display=False) as steps:
        for each in x:
            F.linear(each, inner), F.linear(state[0], outer)
    assert (
        2 * (own_multiply_adds("scaled_dot_product_attention", [query, key, value]) or 0) == attention.get_total_flops()
    )
    lstm = own_multiply_adds("lstm", [x, state, state, inner, outer, torch.ones(16), torch.ones(16)])
    assert 2 * (lstm or 0) == steps.get_total_flops()


def _is(node: Node, op: str) -> bool:
    return node.op == "call_function" and op_of(node.target) == op


@pytest.mark.parametrize(
    ("op", "reads", "state", "counts"),
    [
        ("conv2d", [(0, False, True), (1, True, True), (2, True, False)], "quantized", True),
        ("conv2d", [(0, False, True), (1, True, False), (2, True, True)], "input only", False),
        ("linear", [(0, False, False), (1, True, True)], "weight only", True),
        ("addmm", [(0, True, False), (1, False, True), (2, True, True)], "quantized", True),
        ("baddbmm", [(0, False, True), (1, False, True), (2, False, False)], "float", False),
        ("scaled_dot_product_attention", [(n, False, n < 3) for n in range(4)], "quantized", True),
        ("matmul", [(0, False, True), (1, False, False)], "float", False),
        ("lstm", [(0, False, True), (1, True, False), (2, True, True), (2, True, False)], "quantized", True),
        ("lstm", [(0, False, True), (2, True, False), (2, True, False)], "input only", False),
        ("bilinear", [(0, False, False), (1, False, True), (2, True, True), (3, True, False)], "input only", True),
        ("scaled_dot_product_attention", [(n, False, n != 0) for n in range(4)], "float", False),
        ("scaled_dot_product_attention", [(n, False, n != 1) for n in range(4)], "float", False),
        ("lstm_cell", [(n, n > 1, n in (0, 4)) for n in range(5)], "input only", False),
        ("lstm_cell", [(n, n > 1, n == 1) for n in range(5)], "input only", False),
        ("lstm_cell", [(n, n > 1, n == 2) for n in range(5)], "weight only", True),
        ("lstm_cell", [(n, n > 1, n == 3) for n in range(5)], "weight only", True),
    ],
)
def test_what_counts_is_what_is_multiplied(
    op: str, reads: list[tuple[int, bool, bool]], state: str, counts: bool
) -> None:
    """Biases and the mask of attention are added."""
    found = [Read(*read) for read in reads]
    assert state_of(op, found) == state
    assert is_quantized(op, found) is counts


def test_an_op_without_arithmetic_counts_where_it_reads_a_rounded_value() -> None:
    assert "add" not in PRODUCTS
    assert is_quantized("add", [Read(0, False, True), Read(1, False, False)])
    assert not is_quantized("add", [Read(0, False, False)])
