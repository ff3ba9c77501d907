from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from pt2qa import capture
from tests.capture.models import (
    QUANTIZERS,
    Forward,
    annotated_names,
    converted,
    image,
    prepared,
    quantized_sqnr,
    quantizer,
    rules,
)


def embedding() -> nn.Module:
    return Forward(lambda m, i: m.fc(m.table((i + 1) * 2)), table=nn.Embedding(20, 8), fc=nn.Linear(8, 4))


TOKENS = torch.tensor([[1, 2, 3]])


def test_without_capture_xnnpack_makes_indices_float_trap_30() -> None:
    with pytest.raises((RuntimeError, IndexError), match="indices"):
        prepared(export(embedding(), (TOKENS,)).module(check_guards=False), "xnnpack", TOKENS)


@pytest.mark.parametrize(("name", "strict"), [("x86", False), ("xnnpack", False), ("xnnpack", True)])
def test_index_arithmetic_goes_through_prepare_and_convert_trap_30(name: str, strict: bool) -> None:
    captured = capture(embedding(), TOKENS, strict=strict)
    assert rules(captured) == [("scalar", "add"), ("scalar", "mul")]
    assert quantized_sqnr(captured, captured.module(), name, TOKENS) > 20


@pytest.mark.parametrize("name", QUANTIZERS)
def test_16777217_plus_1_stays_exact_trap_30(name: str) -> None:
    number = torch.tensor([16777217])
    captured = capture(Forward(lambda m, i: i + 1), number)
    assert converted(captured.module(), name, number)(number).item() == 16777218


@pytest.mark.parametrize(
    ("value", "forward"),
    [
        (torch.tensor([3], dtype=torch.int8), lambda m, x: x * 2 + 1),
        (torch.tensor([True, False]), lambda m, x: x + 1),
        (torch.rand(4, dtype=torch.float64), lambda m, x: x * 0.1),
        (torch.rand(4, dtype=torch.float16), lambda m, x: x + 0.1),
        (torch.rand(4, dtype=torch.complex64), lambda m, x: x * 1j),
        (torch.tensor([3]), lambda m, x: torch.add(x, 2, alpha=5)),
    ],
    ids=["int8", "bool", "float64", "float16", "complex", "alpha"],
)
def test_scalars_are_exact_in_every_dtype_but_float32_trap_30(value: torch.Tensor, forward: Any) -> None:
    model = Forward(forward)
    captured = capture(model, value)
    assert {rule for rule, _ in rules(captured)} == {"scalar"}
    result = quantizer("xnnpack").transform_for_annotation(captured.module())(value)
    assert result.dtype == model(value).dtype
    assert torch.equal(result, model(value))


def test_float32_scalars_are_left_to_the_quantizer() -> None:
    model = Forward(lambda m, x: m.fc(x) * 2, fc=nn.Linear(4, 4))
    assert rules(capture(model, torch.rand(2, 4))) == []


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("padding", "dilation", "kernel"), [("same", 1, 3), ("same", 2, (3, 5)), ("valid", 1, 2)])
def test_padding_by_name_is_written_out(padding: str, dilation: int, kernel: Any, strict: bool) -> None:
    conv = nn.Conv2d(3, 6, kernel, padding=padding, dilation=dilation, groups=3, bias=False)
    model = Forward(lambda m, x: m.conv(x), conv=conv)
    with pytest.raises(ValueError, match="is not an aten conv2d operator"):
        prepared(export(model, (image(),), strict=strict).module(check_guards=False), "x86")
    captured = capture(model, image(), strict=strict)
    assert rules(captured) == [("padding", "conv/conv2d")]
    assert annotated_names(model, image(), "x86", strict=strict) == {"conv/conv2d"}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_uneven_same_padding_stays_and_stops_no_quantizer() -> None:
    model = Forward(lambda m, x: m.conv(x), conv=nn.Conv2d(3, 4, 2, padding="same"))
    assert rules(capture(model, image())) == []
    assert annotated_names(model, image(), "x86") == set()
    assert annotated_names(model, image(), "xnnpack") == {"conv/conv2d"}


def test_one_dimensional_convolutions_are_written_out_too() -> None:
    model = Forward(lambda m, x: m.conv(x), conv=nn.Conv1d(3, 4, 5, padding="same"))
    captured = capture(model, torch.randn(2, 3, 16))
    assert captured.changes[0].what == "written out as [2]"
