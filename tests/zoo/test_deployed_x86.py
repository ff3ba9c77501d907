"""The walk over the lowered graph is what Inductor compiles; and what CPUs without VNNI make of MobileNetV2."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from pt2qa.errors import DeploymentError
from pt2qa.plugins import DeployedProgram
from pt2qa_x86 import X86, X86Backend
from tests.quantizers.test_x86_backend import Sums, converted, taps_of
from tests.zoo import pairs

pytestmark = [
    pytest.mark.zoo,
    # torch: Inductor makes constants of a quantized linear's scales.
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
]

X = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Small(nn.Module):
    """Convolutions, one of them depthwise, a residual sum, relu6, a mean and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.b = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.c, self.d = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 32, 1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        y = F.relu(self.c(F.relu6(self.b(y))) + y)
        scores: Tensor = self.head(self.d(y).mean((2, 3)))
        return scores


@pytest.fixture(scope="module")
def graph() -> GraphModule:
    torch.manual_seed(1)
    return converted(Small().eval(), X, X86())


@pytest.fixture(scope="module")
def walked(graph: GraphModule) -> Tensor:
    (output,) = _lowered(graph, X).run((X,)).outputs
    return output  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Inductor fuses int8 kernels only where it may take weights for constants."""
    from torch._inductor import config

    with torch.no_grad(), config.patch(freezing=True):
        yield


def _lowered(graph: GraphModule, x: Tensor, isa: Any = "native") -> DeployedProgram:
    graph = copy.deepcopy(graph)
    return X86Backend(isa=isa).lower(graph, (x,), taps_of(graph), dynamic_shapes=None, progress=lambda _: None)


def test_the_walk_is_what_torch_compile_computes_bit_for_bit(graph: GraphModule, walked: Tensor) -> None:
    (compiled,) = torch.compile(copy.deepcopy(graph))(X)
    assert torch.equal(compiled, walked)


@pytest.mark.parametrize("plugin", [X86(), X86(mode="dynamic")], ids=["static", "dynamic"])
def test_the_walk_is_what_torch_compile_computes_of_linears_on_three_dimensions(plugin: X86) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    graph = converted(Sums().eval(), x, plugin)
    # What Inductor compiled adds the last sum into the model's input, in place.
    (compiled,) = torch.compile(copy.deepcopy(graph))(x.clone())
    assert torch.equal(compiled, _lowered(graph, x).run((x,)).outputs[0])


def test_the_walk_is_what_aotinductor_computes_bit_for_bit(graph: GraphModule, walked: Tensor, tmp_path: Path) -> None:
    package = tmp_path / "small.pt2"
    torch._inductor.aoti_compile_and_package(torch.export.export(graph, (X,)), package_path=str(package))
    program = X86Backend().open(package)
    assert program.facts[0] == "small.pt2: compiled by AOTInductor"
    assert torch.equal(program.run((X,)).outputs[0], walked)
    (narrow,) = X86Backend(isa="avx2").open(package).run((X,)).outputs
    if torch.cpu.get_capabilities()["avx512_vnni"]:
        assert pairs.decibels([walked], [narrow]) < 60
    else:
        assert torch.equal(narrow, walked)
    with pytest.raises(DeploymentError, match="unmatched dim value at 0, expected: 4, but got: 2"):
        program.run((X[:2],))


@pytest.mark.parametrize(("isa", "low", "high"), [("native", 16, 18.5), ("avx2", 6, 9)])
def test_mobilenet_loses_eight_decibels_without_vnni(isa: str, low: float, high: float) -> None:
    if isa == "native" and not torch.cpu.get_capabilities()["avx512_vnni"]:
        pytest.skip("this CPU has no VNNI")
    pair, captured = pairs.pair_of("mobilenet_v2", "x86"), pairs.captured("mobilenet_v2")
    program = _lowered(pair.quantized, captured.batches[0], isa)
    quantize = [name for name, reason in program.taps.items() if name.startswith("quantize") and not reason]
    assert len(quantize) == len([name for name in program.taps if name.startswith("quantize")]) == 55
    deployed = [program.run((batch,)).outputs[0] for batch in captured.batches]
    reference = [captured.model(batch) for batch in captured.batches]
    assert low < pairs.decibels(reference, deployed) < high
    assert 16 < pairs.decibels(reference, [pair.quantized(batch) for batch in captured.batches]) < 18.5
