"""Packages of AOTInductor are read without running them."""

from __future__ import annotations

import copy
import dataclasses
import operator
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2qa
from pt2qa_x86.backend import X86Backend

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A bias of eight elements, which Inductor writes into the code, and longer ones.

    A layer that is called twice stays in float.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 24, 1)
        self.twice, self.last = nn.Linear(24, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.wide(F.relu(self.first(x)))).mean((2, 3))
        result: Tensor = self.last(self.twice(torch.relu(self.twice(x))))
        return result


def pair_of(scale: float = 1.0) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return pt2qa.quantize(pt2qa.capture(Net().eval(), X), "x86", [scale * X], progress=False)


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    return pair_of()


@pytest.fixture(scope="module", params=[True, False], ids=["int8", "float"])
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """Compiled by torch alone, with freezing, without which Inductor has no int8 kernels, and without."""
    from torch._inductor import aoti_compile_and_package, config

    path = tmp_path_factory.mktemp("packages") / "model.pt2"
    with torch.no_grad(), config.patch(freezing=request.param), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch, of its own code
        aoti_compile_and_package(torch.export.export(pair_of().quantized, (X,)), package_path=str(path))
    return path, request.param


def changed(pair: pt2qa.QuantizedPair, name: str, change: Callable[[Tensor], Tensor]) -> pt2qa.QuantizedPair:
    graph = copy.deepcopy(pair.quantized)
    value = operator.attrgetter(name)(graph)
    value.data = change(value.data)
    return dataclasses.replace(pair, quantized=graph)


def told(path: Path, pair: pt2qa.QuantizedPair) -> list[tuple[str, str]]:
    return [(node.name, what) for node, what in X86Backend().open(path).differences(pair.converted)]


def test_a_package_of_this_pair_holds_its_numbers(pair: pt2qa.QuantizedPair, package: tuple[Path, bool]) -> None:
    path, kernels = package
    assert told(path, pair) == []
    report = pt2qa.compare_deployed(pair, [X], deployed=path, progress=False)
    assert report.facts[-1] == "read, not run, it holds this pair's weights, biases, scales and limits"
    assert report.facts[2].startswith("3 int8 kernels, compiled for " if kernels else "no int8 kernel, compiled for ")
    first, *lines = X86Backend().inspect(path)
    assert first.startswith("model.pt2: 3 int8 kernels" if kernels else "model.pt2: no int8 kernel")
    scale, zero_point = next(
        node.args[1:3] for node in pair.converted.graph.nodes if "quantize_per_tensor" in str(node.target)
    )
    shown = f"qconv_pointwise: input scale {scale:.6g}, zero point {zero_point}; weight int8 (8, 3, 3, 3), scale in the"
    assert lines[0].startswith(shown) == kernels
    assert "constant int8 (24, 24): -128..127" in lines
    assert ("constant int8 (8, 3, 3, 3): -128..127" in lines) != kernels


def test_another_calibration_is_found(package: tuple[Path, bool]) -> None:
    path, kernels = package
    other = pair_of(3.0)
    found = told(path, other)
    places = [node.args[0] for node in other.converted.graph.nodes if node.name.startswith("quantize_per_tensor")]
    assert len(found) == len(places) == 5
    held = [what for _, what in found if re.match(r"its input has scale \S+, zero point \d+, here ", what)]
    assert len(held) == (3 if kernels else 0)
    assert all(re.match(r"its output's scale, \S+ here, is not in it", what) for _, what in found if what not in held)
    report = pt2qa.compare_deployed(other, [X], deployed=path, progress=False)
    assert report.facts[-1].startswith("read, not run, it holds something else than this pair, so it was not made from")
    assert "the kernels" not in report.summary()


def test_other_weights_and_biases_are_found(pair: pt2qa.QuantizedPair, package: tuple[Path, bool]) -> None:
    path, _ = package
    names = {
        node.target: operator.attrgetter(node.target)(pair.quantized)
        for node in pair.quantized.graph.find_nodes(op="get_attr")
    }
    for shape, op in (((8, 3, 3, 3), "conv2d"), ((10, 24), "linear_2")):
        weight = next(name for name, value in names.items() if value.shape == shape)
        (found,) = told(path, changed(pair, weight, lambda value: value.clamp(-100, 100)))
        assert found[0] == op
        assert re.fullmatch(r"\d+\.\d% of its weights differ", found[1])
    for size, op in ((8, "conv2d"), (24, "conv2d_1"), (10, "linear_2")):
        bias = next(name for name in names if name.endswith("bias") and names[name].shape == (size,))
        assert told(path, changed(pair, bias, lambda value: 2 * value)) == [(op, "its bias is not in it")]
        scale = next(name for name in names if "scale" in name and names[name].shape == (size,))
        assert told(path, changed(pair, scale, lambda value: 1.01 * value)) == [
            (op, "its weight's scales are not in it")
        ]


def test_a_zero_point_is_read_where_a_kernel_has_one(pair: pt2qa.QuantizedPair, package: tuple[Path, bool]) -> None:
    path, kernels = package
    if not kernels:
        pytest.skip("loops have it among other numbers")
    graph = copy.deepcopy(pair.quantized)
    for node in graph.graph.nodes:
        if node.name == "dequantize_per_tensor_default":
            node.args = (*node.args[:2], node.args[2] + 1, *node.args[3:])
    (found,) = told(path, dataclasses.replace(pair, quantized=graph))
    assert found[0] == "conv2d"


def test_a_package_in_another_form_is_not_compared(package: tuple[Path, bool], tmp_path: Path) -> None:
    path, _ = package
    stripped = tmp_path / "model.pt2"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(stripped, "w") as part:
        for name in whole.namelist():
            if not name.endswith(".cpp"):
                part.writestr(name, whole.read(name))
    with pytest.raises(pt2qa.DeploymentError, match="its constants cannot be read: "):
        X86Backend().inspect(stripped)
    report = pt2qa.compare_deployed(pair_of(), [X], deployed=stripped, progress=False)
    assert report.facts[-1].startswith("not compared with what the pair holds: its constants cannot be read: ")
