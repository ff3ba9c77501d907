from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import pt2qa
from pt2qa import Capture, capture
from pt2qa.errors import BatchError, CaptureError
from tests.capture.models import Forward, Residual, converted, image, rules


class Counting(nn.Module):
    """A buffer that each forward changes; the output may depend on it."""

    def __init__(self, visible: bool) -> None:
        super().__init__()
        self.fc, self.visible = nn.Linear(4, 4), visible
        self.register_buffer("calls", torch.zeros(1))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) + self.calls if self.visible else self.fc(x)


class Text(nn.Module):
    """Keyword inputs, one of them nested, and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.eval()

    def forward(self, tokens: Tensor, *, state: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
        y = self.fc(self.table(tokens)) * scale + state["h"]
        return {"logits": y, "parts": (y.argmax(-1), [y > 0])}


@pytest.mark.parametrize("strict", [False, True])
def test_a_capture_computes_what_the_model_computes(strict: bool) -> None:
    model, x = Residual(), image()
    captured = capture(model, x, strict=strict)
    with torch.no_grad():
        assert torch.equal(captured.module()(x), model(x))
    assert (captured.strict, captured.model) == (strict, "Residual")
    assert captured.unanalysed == captured.stateful == ()


def test_positional_and_keyword_inputs_and_nested_outputs() -> None:
    state = {"h": torch.zeros(2, 3, 4)}
    inputs = ((torch.tensor([[1, 2, 3], [4, 5, 6]]),), {"state": state, "scale": 2.0})
    captured = capture(Text(), *inputs)
    assert [op.name for op in captured.names.values() if op.op == "input"] == ["tokens", "state_h", "scale"]
    assert captured.args == inputs[0]
    assert captured.kwargs == inputs[1]
    captured.check_batch(*inputs)
    alone = capture(Forward(lambda m, x: x + 1), {"x": torch.ones(2)})
    assert alone.args == ()
    assert list(alone.kwargs) == ["x"]


def test_the_model_is_not_changed() -> None:
    model = Counting(visible=False)
    before = copy.deepcopy(model.state_dict())
    captured = capture(model, torch.ones(2, 4))
    graph = captured.module()
    graph(torch.ones(2, 4))
    assert graph.calls.item() == 1
    assert captured.module().calls.item() == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert captured.stateful == ("calls",)


def test_graphs_share_parameters_with_the_model() -> None:
    model = Residual()
    captured = capture(model, image())
    first, second = captured.module(), captured.module()
    assert first.conv1.weight is model.conv1.weight is second.conv1.weight
    assert first is not second


def test_a_model_whose_outputs_depend_on_the_run_before_is_told_so() -> None:
    model = Counting(visible=True)
    with pytest.raises(CaptureError, match="the model keeps state: forward changes its buffers 'calls'") as caught:
        capture(model, torch.ones(2, 4))
    assert "take the state as an input and return the new one" in str(caught.value)
    assert model.calls.item() == 0


@pytest.mark.parametrize("forward", [lambda m, x: x + torch.rand(4), lambda m, x: nn.functional.dropout(x)])
def test_a_random_model_is_told_so_and_random_numbers_are_left_alone(forward: Any) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with pytest.raises(CaptureError, match=r"the model is not deterministic: output has an SQNR of .* dB") as caught:
        capture(Forward(forward), torch.ones(2, 4))
    assert "make forward deterministic" in str(caught.value)
    assert torch.equal(torch.rand(1), expected)


def test_a_program_that_computes_something_else_names_the_output() -> None:
    """Non-strict export runs Python once: a value that Python reads becomes part of the graph."""

    class Switched(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"same": x, "other": x + 1 if torch.compiler.is_exporting() else x}

    with pytest.raises(CaptureError) as caught:
        capture(Switched().eval(), torch.ones(4))
    message = str(caught.value)
    assert message.startswith(
        "the captured program does not compute what the model computes: output.other has an SQNR of 0.0"
    )
    assert "instead of at least 100 dB on the example inputs" in message


def test_a_transformer_layer_that_takes_its_fast_path_agrees() -> None:
    """Without gradients it writes zeros where the mask covers the input; the exported graph does not."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    mask = torch.tensor([[False, False, True], [False, True, True]])
    captured = capture(layer, (torch.randn(2, 3, 8),), {"src_key_padding_mask": mask})
    assert sum(op.op == "linear" for op in captured.names.values()) == 4


def test_a_model_that_fails_on_its_inputs_says_so_first() -> None:
    with pytest.raises(
        CaptureError, match="the model fails on its example inputs, before any export: TypeError"
    ) as caught:
        capture(nn.Linear(2, 2).eval(), (torch.ones(1, 2), torch.ones(1, 2)))
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("strict", "hint"),
    [(False, "Try strict=True, which analyses the Python"), (True, "Try strict=False, which runs the Python")],
)
def test_errors_of_export_keep_their_cause_and_hint_at_the_other_mode(strict: bool, hint: str) -> None:
    model = Forward(lambda m, x: x + 1 if x.sum() > 0 else x)
    with pytest.raises(CaptureError, match=r"^torch\.export\.export failed with ") as caught:
        capture(model, torch.ones(4), strict=strict)
    assert hint in str(caught.value)
    assert "https://docs.pytorch.org/docs/stable/export.html" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ in str(caught.value).splitlines()[0]


@pytest.mark.parametrize("strict", [False, True])
def test_a_result_that_no_program_can_return_is_named(strict: bool) -> None:
    class Cache:
        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    model = Forward(lambda m, x: {"logits": x + 1, "cache": Cache(x)})
    with pytest.raises(CaptureError, match=r"cannot return what forward does: a Cache\..*use_cache=False") as caught:
        capture(model, torch.ones(4), strict=strict)
    assert caught.value.__cause__ is not None


def test_an_exported_graph_can_be_captured_again_trap_37() -> None:
    """Its ``eval()`` raises NotImplementedError, so it must not be asked for."""
    model, x = Residual(), image()
    graph = export(model, (x,)).module()
    assert graph.training
    with pytest.raises(NotImplementedError):
        graph.eval()
    assert capture(graph, x).names == capture(model, x).names


def test_a_saved_program_is_a_capture_again() -> None:
    x = image()
    captured = capture(Residual(), x)
    file = io.BytesIO()
    torch.export.save(captured.program, file)
    file.seek(0)
    again = Capture(torch.export.load(file), captured.args, captured.kwargs)
    assert again.names == captured.names
    graphs = [converted(one.module(), "x86", x) for one in (again, captured)]
    assert torch.equal(graphs[0](x), graphs[1](x))


def test_guards_stay_in_a_quantized_graph_so_graphs_are_made_without_trap_32() -> None:
    """``_guards_fn`` survives prepare and convert, and fails on another batch size without saying what to do."""
    model, x = Forward(lambda m, x: m.conv(x), conv=nn.Conv2d(3, 4, 3)), image(2)
    plain = converted(export(model, (x,)).module(), "x86", x)
    assert any(node.target == "_guards_fn" for node in plain.graph.nodes)
    with pytest.raises(AssertionError, match="Guard failed"):
        plain(image(3))
    captured = capture(model, x)
    graph = converted(captured.module(), "x86", x)
    assert not any(node.op == "call_module" for node in graph.graph.nodes)
    assert graph(image(3)).shape[0] == 3
    with pytest.raises(BatchError, match=r"has shape \[3, 3, 8, 8\]; captured with \[2, 3, 8, 8\]"):
        captured.check_batch((image(3),))


@pytest.mark.parametrize(("name", "strict"), [("x86", False), ("x86", True), ("xnnpack", False)])
def test_a_dynamic_batch_works_through_convert_traps_11_and_32(name: str, strict: bool) -> None:
    model = Residual()
    captured = capture(model, image(4), dynamic_shapes={"x": {0: Dim("batch")}}, strict=strict)
    graph = converted(captured.module(), name, image(4), image(7))
    for batch in (1, 5):
        captured.check_batch((image(batch),))
        assert graph(image(batch)).shape == (batch, 4)


def test_tied_weights_and_parametrised_modules_are_captured_trap_27() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.b(self.a(x)))

    captured = capture(Tied().eval(), torch.randn(1, 2, 4))
    assert ("op source", "conv/conv1d") in rules(captured)


def test_the_package_is_the_function() -> None:
    assert pt2qa.capture(nn.Linear(2, 2).eval(), torch.ones(1, 2)).model == "Linear"  # type: ignore[operator]


def test_module_names_that_no_code_can_hold() -> None:
    model = nn.Sequential()
    model.add_module("a'\"\\b", nn.Linear(4, 4))
    with pytest.raises(pt2qa.CaptureError, match="Module names with quotes or backslashes"):
        pt2qa.capture(model.eval(), torch.zeros(2, 4))


class Remembering(nn.Module):
    """A linear with a table of what it read last, as language models keep keys: a buffer that an object holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(3, 4), persistent=False)
        self.held = [self.table]

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return x @ self.held[0].index_copy_(0, place, self.linear(x)).T


@pytest.mark.parametrize("strict", [False, True])
def test_a_buffer_that_an_object_holds_too_is_state(strict: bool) -> None:
    model, first, second = Remembering().eval(), torch.tensor([0, 1]), torch.tensor([1, 2])
    captured = capture(model, (torch.ones(2, 4), first), strict=strict)
    assert captured.stateful == ("table",)
    assert model.table.grad_fn is None
    assert not model.table.any()
    graph = captured.module()
    expected = graph(torch.ones(2, 4), first)
    assert not expected[:, 2].any()
    graph(torch.ones(2, 4), second)
    assert graph(torch.ones(2, 4), first)[:, 2].any()
    assert not model.table.any()
    assert torch.equal(captured.module()(torch.ones(2, 4), first), expected)
    copy.deepcopy(captured.module())


@pytest.mark.parametrize("strict", [False, True])
def test_every_batch_reads_the_captured_state(strict: bool) -> None:
    """A calibration that filled the table further once left it so in both graphs."""
    model = Remembering().eval()
    batches = [(torch.randn(2, 4), torch.tensor(places)) for places in ([0, 1], [1, 2])]
    captured = capture(model, batches[0], strict=strict)
    pair = pt2qa.quantize(captured, "x86:mode=dynamic", batches)
    with torch.no_grad():
        assert torch.equal(pair.reference(*batches[0]), captured.module()(*batches[0]))
