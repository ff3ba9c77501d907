"""The spec that is probed of a backend is what its kernels take, and finds the mistakes that it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner
from torch.fx import GraphModule, Interpreter, Node

import pt2qa
from pt2qa.errors import DeploymentError
from pt2qa.plugins import BackendSpec, OpSpec, Ran, TensorSpec, handle_of, op_type
from pt2qa.testing import check_quantizer
from pt2qa_probe import __main__ as command
from pt2qa_probe import code_of, probe, probing
from pt2qa_probe.cases import FLOAT, INT32, Case
from pt2qa_probe.probing import INT8, UINT8, WEIGHT, Probe, named
from tests.conformance.quantizers import AffineWeights, Honest, SharesNoCat, WrongAxis


class Kernels(Interpreter):
    """Ignores the limits of integers, and the zero points of weights."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "quantize_per_tensor" in str(target) and args[3:5] == (-64, 63):
            args = (*args[:3], -128, 127, *args[5:])
        if "dequantize_per_channel" in str(target):
            args = (*args[:2], torch.zeros_like(args[2]), *args[3:])
        return super().call_function(target, args, kwargs)


@dataclass(frozen=True)
class Npu:
    """Convolutions and linears on int8 with symmetric weights along axis 0, a ReLU after them, and cat of one scale."""

    name: ClassVar[str] = "npu"
    suffixes: ClassVar[tuple[str, ...]] = ()
    saves: ClassVar[bool] = False
    lowered: ClassVar[list[int]] = []

    def missing(self) -> str:
        return ""

    def lower(
        self, graph: GraphModule, inputs: Sequence[Any], taps: Sequence[str], *, dynamic_shapes: Any, progress: Any
    ) -> Program:
        self.lowered.append(len(graph.graph.output_node().all_input_nodes))
        taken = [node for node in graph.graph.nodes if node.op == "call_function" and self.takes(node)]
        taken += [user for node in taken for user in node.users if op_type(user) == "relu" and op_type(node) != "cat"]
        return Program(graph, frozenset(handle for node in taken if (handle := handle_of(node)) is not None))

    def takes(self, node: Node) -> bool:
        sources = [source for source in node.all_input_nodes if source.op == "call_function"]
        if op_type(node) == "cat":
            if len({source.args[1:5] for source in (*sources, *node.users)}) > 1:
                raise DeploymentError("npu: cat has several scales")
            return all(self.is_int8(source) for source in sources)
        if op_type(node) not in ("conv2d", "linear"):
            return False
        _, weight, bias = node.all_input_nodes
        if "per_channel" in str(weight.target) and weight.args[3] != 0:
            raise DeploymentError("npu: weights along axis 1")
        return self.is_int8(sources[0]) and "per_channel" in str(weight.target) and self.adds(bias)

    def adds(self, bias: Node) -> bool:
        return bias.op == "get_attr"

    def is_int8(self, node: Node) -> bool:
        return str(node.target).endswith("dequantize_per_tensor.default") and node.args[5] == torch.int8

    def load(self, folder: Path) -> Any:
        raise NotImplementedError

    open: Callable[..., Any] = load


@dataclass(frozen=True)
class Program:
    """The graph, run by the kernels."""

    graph: GraphModule
    delegated: frozenset[int]
    taps: ClassVar[dict[str, str]] = {}
    facts: ClassVar[tuple[str, ...]] = ()

    def run(self, inputs: Sequence[Any]) -> Ran:
        return Ran(tuple(Kernels(self.graph).run(*inputs)))

    def save(self, folder: Path) -> None:
        raise NotImplementedError


OPS = ("conv2d", "linear", "cat", "gelu")
WEIGHTS = (WEIGHT, replace(WEIGHT, quant_min=-128), replace(WEIGHT, quant_min=-8, quant_max=7))


@pytest.fixture(scope="module")
def probed() -> tuple[BackendSpec, dict[str, str]]:
    found = Probe(Npu())
    return found.spec(OPS, progress=False), found.refused


def test_the_spec_is_what_the_kernels_take(probed: tuple[BackendSpec, dict[str, str]]) -> None:
    assert probed[0] == BackendSpec(
        "npu",
        (
            OpSpec(
                ops=("conv2d", "linear"), input=(INT8,), weight=WEIGHTS, bias=(FLOAT,), output=(INT8,), fused=("relu",)
            ),
            OpSpec(ops=("cat",), input=(INT8,), output=(INT8,), one_scale=True),
        ),
    )
    assert probed[1] == {"gelu": "computed in float, or otherwise than the graph says"}
    assert len(Npu.lowered) < 100


@dataclass(frozen=True)
class IntegerBias(Npu):
    """Adds biases to sums of integers, and takes no float ones."""

    def adds(self, bias: Node) -> bool:
        return "dequantize" in str(bias.target) and bias.args[6] == torch.int32


def test_biases_of_32_bits_are_probed() -> None:
    (op,) = Probe(IntegerBias()).spec(["linear"], progress=False).ops
    assert (op.ops, op.weight, op.bias) == (("linear",), WEIGHTS, (replace(INT32, axis=0),))


def test_its_source_makes_it(probed: tuple[BackendSpec, dict[str, str]]) -> None:
    namespace: dict[str, Any] = {}
    exec(code_of(probed[0]), namespace)
    assert namespace["SPEC"] == probed[0]


@pytest.mark.parametrize(
    ("quantizer", "model"),
    [(AffineWeights, "depthwise"), (WrongAxis, "linear"), (SharesNoCat, "cat"), (Honest, "linear")],
    ids=["affine", "axis", "cat", "none"],
)
def test_it_finds_the_mistakes_of_a_quantizer(
    quantizer: type[Honest], model: str, probed: tuple[BackendSpec, dict[str, str]]
) -> None:
    found = check_quantizer(quantizer, models=[model], properties=["backend_spec"], spec=probed[0], progress=False)
    assert bool(found.failures) == (quantizer is not Honest)


@pytest.mark.parametrize(
    ("backend", "case", "fits"),
    [
        ("xnnpack", Case("linear", INT8, INT8, WEIGHT), True),
        ("xnnpack", Case("linear", INT8, INT8, TensorSpec("int8", "affine", 0, -128, 127)), False),
        ("xnnpack", Case("conv2d", INT8, INT8, replace(WEIGHT, axis=1)), False),
        ("xnnpack", Case("cat", INT8, INT8), False),
        ("x86", Case("conv2d", replace(UINT8, quant_max=127), UINT8, WEIGHT), True),
        ("x86", Case("linear", UINT8, UINT8, replace(WEIGHT, axis=None)), False),
    ],
)
def test_cases_on_backends(backend: str, case: Case, fits: bool) -> None:
    found = Probe(named(backend))
    assert found.taken([case]) == ([case] if fits else [])


def test_what_is_no_backend_or_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pt2qa.PluginError, match="no backend is named 'npux'"):
        probe("npux")
    monkeypatch.setattr(Npu, "missing", lambda self: "no driver")
    with pytest.raises(DeploymentError, match="npu cannot run here: no driver"):
        probe(Npu())


def test_the_command_prints_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "backends", lambda: {"npu": Npu()})
    found = CliRunner().invoke(command.main, ["npu", "cat", "gelu"])
    assert found.exit_code == 0
    assert found.output.splitlines()[:4] == [
        "# Probed with tiny models; check each line:",
        "#   cat: input int8, per tensor, affine, -128..127",
        "#   cat: output int8, per tensor, affine, -128..127",
        "#   cat: one scale for all inputs and the output",
    ]
    namespace: dict[str, Any] = {}
    exec(found.output, namespace)
    assert namespace["SPEC"].ops == (OpSpec(ops=("cat",), input=(INT8,), output=(INT8,), one_scale=True),)
    assert "no backend is named 'x'" in CliRunner().invoke(command.main, ["x"]).output
    refused = CliRunner().invoke(command.main, ["npu", "cat", "cta"])
    assert refused.exit_code == 1
    assert "no op to probe is named 'cta'. Ops: conv2d, " in refused.output
