"""What the XNNPACK backend observes: values of copies that it removes, and taps that it must give up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.fx.graph import CodeGen

import pt2qa
from pt2qa.plugins import Ran
from pt2qa_xnnpack import lowering
from pt2qa_xnnpack.backend import XNNPACKBackend, XNNPACKProgram
from pt2qa_xnnpack.internals import reason_of
from tests.flows import unedited_pair


class Copies(nn.Module):
    """A linear among copies, which XNNPACK removes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x.clone()).clone())


def silent(what: str) -> None:
    pass


def test_values_and_their_copies_are_all_observed() -> None:
    x = torch.randn(2, 4)
    graph = torch.export.export(Copies().eval(), (x,)).module(check_guards=False)
    output = graph.graph.output_node()
    output.args = (tuple(output.args[0]),)
    graph.graph.set_codegen(CodeGen())
    graph.recompile()
    values: dict[str, Any] = {}

    class Nodes(Interpreter):
        def run_node(self, node: Node) -> Any:
            values[node.name] = super().run_node(node)
            return values[node.name]

    with torch.no_grad():
        Nodes(graph).run(x, enable_io_processing=False)
    taps = ["clone", "linear", "clone_1", "relu"]
    program = XNNPACKBackend().lower(graph, (x,), taps, dynamic_shapes=None, progress=silent)
    assert program.taps == dict.fromkeys(taps, "")
    assert program.positions["linear"] == program.positions["clone_1"]
    assert program.positions["relu"] == 0
    ran = program.run((x,))
    assert not ran.changed
    assert sorted(ran.values) == sorted(taps)
    for name, value in ran.values.items():
        assert torch.allclose(value, values[name], atol=1e-6), name


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y


def test_a_model_that_returns_a_value_twice_is_lowered() -> None:
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    pair = pt2qa.quantize(pt2qa.capture(Twice().eval(), x), "xnnpack", [x], progress=False)
    report = pt2qa.compare_deployed(pair, [x], progress=False)
    assert report.rows
    assert all(row.isolated_sqnr > 30 for row in report.rows)


class TwoCalls(nn.Module):
    """A conv1d that ExecuTorch's quantizer annotates at its first call only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), self.conv(0.1 * x)


def test_a_failed_lowering_says_why_where_and_that_the_float_model_is_lowered() -> None:
    x = torch.randn(2, 3, 8)
    pair = pt2qa.quantize(pt2qa.capture(TwoCalls().eval(), x), "xnnpack", [x], progress=False)
    with pytest.raises(pt2qa.DeploymentError) as raised:
        pt2qa.compare_deployed(pair, [x], progress=False)
    told = str(raised.value)
    assert "Weight and Input should both be quantized" in told
    assert re.search(r", at \S*conv", told)
    assert "In float, without any rounding, it is lowered" in told


def test_the_error_that_began_it_is_kept() -> None:
    def fails() -> None:
        node = torch.fx.Graph().call_function(torch.ops.aten.permute_copy.default, ())
        try:
            raise AssertionError(f"cannot convert {node}")
        except AssertionError as error:
            raise RuntimeError("preprocess failed") from error

    with pytest.raises(RuntimeError) as raised:
        fails()
    told = reason_of(raised.value)
    assert told == (
        "RuntimeError: preprocess failed; it began with AssertionError: cannot convert permute_copy_default, "
        "at aten::permute_copy"
    )


def made(data: bytes = b"", missing: tuple[str, ...] = ()) -> lowering._Lowered:
    return lowering._Lowered(data, frozenset(), 1, (), (), missing, ())


def test_taps_that_change_the_outputs_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def observed(graph: Any, inputs: Any, taps: Sequence[str], *_: Any) -> tuple[bytes, dict[str, int]]:
        return b"observed", {name: position for position, name in enumerate(taps, 1)}

    def run(program: XNNPACKProgram, inputs: Any) -> Ran:
        return Ran((), changed="bad" in program.positions)

    monkeypatch.setattr(lowering, "_lowered", lambda *_: made())
    monkeypatch.setattr(lowering, "_observed", observed)
    monkeypatch.setattr(XNNPACKProgram, "run", run)
    program = lowering.lower(None, (), ["a", "bad", "c", "d"], None, silent)  # type: ignore[arg-type]
    assert program.taps == {"a": "", "bad": lowering.DISTURBS, "c": "", "d": ""}
    assert not program.run(()).changed


def test_a_tap_with_which_the_program_does_not_run_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(program: XNNPACKProgram, inputs: Any) -> Ran:
        if "bad" in program.positions:
            raise pt2qa.DeploymentError("execute() failed with error 0x10")
        return Ran(())

    monkeypatch.setattr(lowering, "_lowered", lambda *_: made())
    monkeypatch.setattr(lowering, "_observed", lambda *args: (b"", dict.fromkeys(args[2], 1)))
    monkeypatch.setattr(XNNPACKProgram, "run", run)
    program = lowering.lower(None, (), ["a", "b", "bad", "c", "d"], None, silent)  # type: ignore[arg-type]
    assert program.taps == {"a": "", "b": "", "bad": lowering.FAILS, "c": "", "d": ""}


def test_the_input_of_a_dynamic_convolution_cannot_be_returned_and_its_output_can() -> None:
    """ExecuTorch returns it with the channels last in a tensor that has them first."""
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).eval()
    x = torch.randn(2, 8, 6, 5, generator=torch.Generator().manual_seed(0))
    pair = pt2qa.quantize(pt2qa.capture(model, x), "xnnpack:mode=dynamic", [x], progress=False)
    report = pt2qa.compare_deployed(pair.as_deployed(), [x], progress=False)
    relu, conv = report.rows
    assert relu.note == lowering.FAILS
    assert conv.isolated_sqnr > 100


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        return self.conv(y) + y


def test_an_image_that_executorch_returns_in_another_layout_is_named_and_its_reader_is_not() -> None:
    """The same with sizes that do not give it away: the program itself runs, and its output is wrong."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 8, 8)
    pair = unedited_pair(Residual(), x, "dynamic")
    report = pt2qa.compare_deployed(pair, [x], backend="xnnpack", progress=False)
    assert report.stage == "deployed"
    assert [row.name for row in report.suspects] == ["relu"]
    assert next(row for row in report.rows if row.op == "conv2d").isolated_sqnr < 10


def test_a_program_for_which_there_is_no_kernel_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_lowered", lambda *_: made(missing=("aten::cumsum",)))
    with pytest.raises(pt2qa.DeploymentError, match=r"no kernel for aten::cumsum\. Run the program where there is one"):
        lowering.lower(None, (), [], None, silent)  # type: ignore[arg-type]


def test_taps_without_a_kernel_are_lost_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered(graph: Sequence[str], *_: Any) -> lowering._Lowered:
        outputs = ("", *("quantized_decomposed::quantize_per_tensor" if name == "outside" else "" for name in graph))
        missing = ("quantized_decomposed::quantize_per_tensor",) if "outside" in graph else ()
        return lowering._Lowered(b"observed", frozenset(), 1, (), outputs, missing, ())

    graph = torch.export.export(nn.ReLU(), (torch.ones(1),)).module(check_guards=False)
    monkeypatch.setattr(lowering, "_lowered", lowered)
    monkeypatch.setattr(lowering, "with_outputs", lambda graph, names: names)
    lost: dict[str, str] = {}
    found = lowering._observed(graph, (), ["inside", "outside", "later"], None, lost)
    assert found == (b"observed", {"inside": 1, "later": 2})
    assert lost == {"outside": lowering.NO_KERNEL}


class Keeps(nn.Module):
    """Writes a state to its second input, and returns something else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) + state)
        out: Tensor = self.second(hidden)
        state.copy_(hidden * 2)
        return out


def test_what_a_model_writes_to_its_input_is_not_taken_for_its_output() -> None:
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(2)]
    before = [state.clone() for _, state in batches]
    pair = pt2qa.quantize(pt2qa.capture(Keeps().eval(), batches[0]), "xnnpack", batches, progress=False)
    report = pt2qa.compare_deployed(pair, batches, progress=False)
    assert all(torch.equal(state, kept) for (_, state), kept in zip(batches, before, strict=True))
    assert report.facts[1] == "it returns what it writes to its inputs before its outputs: state"
    assert not report.suspects
    assert [row.name for row in report.outputs] == ["output"]
    assert report.outputs[0].isolated_sqnr == float("inf")
    written = {row.name: row for row in report.rows}["mul"]
    assert written.is_measured
    assert written.isolated_max_lsb <= 1
