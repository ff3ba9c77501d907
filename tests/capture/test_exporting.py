from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from pt2qa import capture
from pt2qa.errors import CaptureError


def test_a_model_in_training_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.ReLU(), nn.ReLU(), nn.ReLU())
    with pytest.raises(CaptureError) as caught:
        capture(model, torch.ones(1, 2))
    assert str(caught.value) == (
        "6 modules are in training mode: the model itself, '0', '1', '2', '3' and 1 more. Call model.eval() first, for "
        "quantization-aware training too: pt2qa.quantize(..., qat=True) trains the exported graph."
    )


def test_one_submodule_in_training_mode_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    model[1].train()
    with pytest.raises(CaptureError, match=r"1 module is in training mode: '1'\. Call model\.eval"):
        capture(model, torch.ones(1, 2))
    with pytest.raises(CaptureError, match="training mode"):
        capture(symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Dropout())), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.relu, "model is of type builtin_function_or_method; expected an nn.Module in eval mode"),
        (
            torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)),
            r"is an ExportedProgram; .* or program\.module\(\)",
        ),
    ],
)
def test_what_is_no_module_is_refused(model: object, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.ones(1, 2))  # type: ignore[arg-type]


def test_the_reasons_that_torch_lists_are_shown() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(nn.Linear(2, 2).eval(), torch.ones(3, 2), dynamic_shapes=({1: torch.export.Dim("width")},))
    assert "Constraints violated (width)" in str(caught.value)
    assert "constant (2)" in str(caught.value)


def test_a_function_that_is_batched_is_refused_before_its_graph_fails() -> None:
    """prepare_pt2e removes the ops between which torch.vmap works, since nothing reads them."""

    class Batched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda row: row * row.sum())(x)  # type: ignore[no-any-return]

    x = torch.randn(2, 3)
    graph = torch.export.export(Batched(), (x,)).module()
    graph.graph.eliminate_dead_code()  # type: ignore[operator, union-attr]
    graph.recompile()  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="vmap"):
        graph(x)
    with pytest.raises(CaptureError, match=r"forward calls torch\.vmap.* Write the function for a whole batch instead"):
        capture(Batched().eval(), x)
