"""The specs of XNNPACK and x86 are what their kernels take: broken lines are named, and the kernels go wrong there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec, SharedQuantizationSpec

import pt2qa
from pt2qa.errors import DeploymentError
from pt2qa.overrides.broken_lines import BrokenLine, broken_lines
from pt2qa.plugins import BackendSpec, OpSpec, TensorSpec, op_type, spec_of
from pt2qa.testing import MODELS
from tests.check.quantizers import DYNAMIC, INT8, UINT8, Annotates
from tests.flows import NARROW
from tests.models import images, residual

BACKENDS = {"xnnpack": INT8, "x86": replace(UINT8, quant_max=127) if NARROW else UINT8}
SYMMETRIC = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0)
AFFINE = replace(SYMMETRIC, qscheme=torch.per_channel_affine)
AXIS_1 = replace(SYMMETRIC, ch_axis=1)
PER_TENSOR = QuantizationSpec(torch.int8, MinMaxObserver, -127, 127, torch.per_tensor_symmetric)
PER_TENSOR_AFFINE = replace(PER_TENSOR, qscheme=torch.per_tensor_affine, quant_min=-128)


def products(activation: Any, weight: Any, output: Any = None) -> Annotates:
    """Rounds what convolutions and linears read, and what they give."""

    def annotate(nodes: dict[str, Node]) -> dict[Node, tuple[dict[Node, Any], Any]]:
        return {
            node: ({node.all_input_nodes[0]: activation, node.all_input_nodes[1]: weight}, output)
            for node in nodes.values()
            if node.op == "call_function" and op_type(node) in ("conv2d", "linear")
        }

    return Annotates(annotate)


def broken(model: nn.Module, example: Tensor, quantizer: Any, spec: BackendSpec | str) -> tuple[BrokenLine, ...]:
    taken = spec_of(pt2qa.quantizer(spec)) if isinstance(spec, str) else spec
    assert taken is not None
    return broken_lines(pt2qa.overrides.annotations_of(pt2qa.capture(model.eval(), example), quantizer), taken)


CONV = nn.Conv2d(4, 4, 3)
IMAGE = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("backend", "weight", "differs", "says"),
    [
        ("xnnpack", AFFINE, ("scheme",), "its weight is int8, per channel (axis 0), affine, -127..127"),
        ("xnnpack", AXIS_1, ("axis",), "its weight is int8, per channel (axis 1), symmetric, -127..127"),
        ("xnnpack", PER_TENSOR_AFFINE, ("scheme", "range"), "its weight is int8, per tensor, affine, -128..127"),
        ("x86", AFFINE, ("scheme",), "its weight is int8, per channel (axis 0), affine, -127..127"),
        ("x86", PER_TENSOR, ("axis",), "its weight is int8, per tensor, symmetric, -127..127"),
    ],
)
def test_a_weight_that_the_kernel_does_not_take_is_quoted(
    backend: str, weight: Any, differs: tuple[str, ...], says: str
) -> None:
    activation = BACKENDS[backend]
    (line,) = broken(CONV, IMAGE, products(activation, weight, activation), backend)
    assert (line.name, line.differs, line.found) == ("conv2d", differs, says)
    quoted = {
        "xnnpack": "conv2d (static): weight int8, per channel (axis 0) or per tensor, symmetric, -127..127",
        "x86": "conv2d: weight int8, per channel (axis 0), symmetric, -128..127 or -127..127",
    }[backend]
    assert str(line).endswith(f'says "{quoted}"')


def test_the_kernel_that_takes_the_input_is_quoted() -> None:
    (line,) = broken(CONV, IMAGE, products(DYNAMIC, PER_TENSOR), "xnnpack")
    assert str(line.line) == "conv2d (dynamic): weight int8, per channel (axis 0), symmetric, -127..127"
    assert not broken(CONV, IMAGE, products(DYNAMIC, SYMMETRIC), "xnnpack")


def test_dtype_and_range_of_activations_and_a_rounded_bias() -> None:
    narrow = replace(INT8, quant_min=-64, quant_max=63)
    for activation, differs in ((UINT8, ("dtype", "range")), (narrow, ("range",))):
        found = broken(CONV, IMAGE, products(activation, SYMMETRIC, activation), "xnnpack")
        assert [(line.line.part, line.differs) for line in found] == [("input", differs), ("output", differs)]

    def with_bias(nodes: dict[str, Node]) -> dict[Node, tuple[dict[Node, Any], Any]]:
        (node,) = (node for node in nodes.values() if node.op == "call_function")
        source, weight, bias = node.all_input_nodes
        return {node: ({source: INT8, weight: SYMMETRIC, bias: PER_TENSOR}, INT8)}

    (line,) = broken(CONV, IMAGE, Annotates(with_bias), "xnnpack")
    assert str(line.line) == "conv2d (static): bias float32"
    assert line.differs == ("dtype",)


class Joined(nn.Module):
    """Two convolutions, and a function of what they give."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.join = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.first(x), 2 * self.second(x))


def move(op: str, activation: Any, *, shared: bool) -> Annotates:
    """Rounds what an op reads and gives: with one scale, or each with its own."""
    other = replace(activation, qscheme=torch.per_tensor_symmetric)

    def annotate(nodes: dict[str, Node]) -> dict[Node, tuple[dict[Node, Any], Any]]:
        (node,) = (node for node in nodes.values() if node.op == "call_function" and op_type(node) == op)
        first, *rest = node.all_input_nodes
        same: Any = SharedQuantizationSpec((first, node)) if shared else other
        return {node: ({first: activation, **dict.fromkeys(rest, same)}, same)}

    return Annotates(annotate)


def join(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([left, right], 1)


MOVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cat": join,
    "max_pool2d": lambda left, right: F.max_pool2d(left, 2, 2),
    "reshape": lambda left, right: left.reshape(1, -1),
    "permute": lambda left, right: left.permute(0, 2, 3, 1),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cat_with_scales_of_its_own_is_quoted(backend: str) -> None:
    (line,) = broken(Joined(join), IMAGE, move("cat", BACKENDS[backend], shared=False), backend)
    assert (line.name, line.differs) == ("cat", ("sharing",))
    assert str(line) == (
        "separate scales for its input first/conv2d, its input mul and its output; the spec of "
        f'{spec_of(pt2qa.quantizer(backend)).name} says "cat: one scale for all inputs and the output"'  # type: ignore[union-attr]
    )
    assert not broken(Joined(join), IMAGE, move("cat", BACKENDS[backend], shared=True), backend)


def test_what_is_fused_is_rounded_after_the_activation_alone() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
    (line,) = broken(model, IMAGE, products(INT8, SYMMETRIC, INT8), "xnnpack")
    assert (line.name, line.differs, line.found) == ("0/conv2d", ("fusion",), "it is rounded before the relu")
    assert str(line.line) == "conv2d (static): fused with the relu after it"

    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            before = CONV(x)
            return before, before.relu()

    assert not broken(Both(), IMAGE, products(INT8, SYMMETRIC, INT8), "xnnpack")


def test_a_spec_says_nothing_of_what_it_does_not_name() -> None:
    assert not broken(CONV, IMAGE, products(UINT8, AFFINE), BackendSpec("npu", (OpSpec(ops=("linear",)),)))
    spec = BackendSpec("npu", (OpSpec(ops=("conv2d",), weight=(TensorSpec("int8", "affine", 1, -127, 127),)),))
    assert not broken(CONV, IMAGE, products(UINT8, AXIS_1), spec)
    assert str(broken(CONV, IMAGE, products(UINT8, SYMMETRIC), spec)[0].line).startswith("conv2d: weight int8, per")


MODES = ("xnnpack", "xnnpack:per_channel=false", "xnnpack:mode=dynamic", "x86", "x86:mode=dynamic")


@pytest.mark.parametrize("options", MODES)
def test_the_plugins_fit_their_specs(options: str) -> None:
    assert not broken(residual(), images(), options, options.partition(":")[0])


def test_weight_only_and_reduced_ranges_fit() -> None:
    for options in ("x86:mode=weight_only", "x86:reduce_range=true"):
        assert not broken(nn.Linear(4, 2), torch.randn(1, 4), options, "x86")


# -- on the device -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """What became of a lowered model: the largest error in shares of the output's mean, or why it does not run."""

    error: float
    kernels: int
    refusal: str


def deployed(model: nn.Module, example: Tensor, quantizer: Any, backend: str) -> Device:
    pair = pt2qa.quantize(pt2qa.capture(model.eval(), example), quantizer, [example], progress=False)
    converted: GraphModule = pair.quantized
    lowers = pt2qa.plugins.backend_of(pt2qa.quantizer(backend))
    assert lowers is not None
    try:
        program = lowers.lower(converted, [example], [], dynamic_shapes=None, progress=lambda text: None)
        output = program.run([example]).outputs[0]
    except DeploymentError as error:
        return Device(float("nan"), 0, str(error))
    expected = converted(example).detach()
    return Device(float((output - expected).abs().max() / expected.abs().mean()), len(program.delegated), "")


@pytest.fixture(scope="module")
def skewed() -> nn.Module:
    """A convolution whose weights are not centred, so that their zero points matter."""
    torch.manual_seed(0)
    model = nn.Conv2d(4, 4, 3)
    with torch.no_grad():
        model.weight.add_(0.1)
        model.weight[0].mul_(3)
    return model


@pytest.mark.parametrize(
    ("backend", "weight", "becomes"),
    [
        ("xnnpack", SYMMETRIC, "right"),
        ("xnnpack", PER_TENSOR, "right"),
        ("xnnpack", AFFINE, "wrong"),
        ("xnnpack", AXIS_1, "refused"),
        ("xnnpack", PER_TENSOR_AFFINE, "refused"),
        ("x86", SYMMETRIC, "right"),
        ("x86", AFFINE, "wrong"),
        ("x86", AXIS_1, "wrong"),
        ("x86", PER_TENSOR, "in float"),
    ],
)
def test_what_kernels_make_of_weights(backend: str, weight: Any, becomes: str, skewed: nn.Module) -> None:
    quantizer = products(BACKENDS[backend], weight, BACKENDS[backend])
    assert bool(broken(skewed, IMAGE, quantizer, backend)) == (becomes != "right")
    found = deployed(copy.deepcopy(skewed), IMAGE, quantizer, backend)
    if becomes == "refused":
        assert found.refusal
    elif becomes == "wrong":
        assert found.error > 0.3
    else:
        assert found.error < (0.1 if NARROW and backend == "x86" else 0.05)  # a step
        assert bool(found.kernels) == (becomes == "right")


FOUR_BITS = replace(SYMMETRIC, quant_min=-8, quant_max=7)


@pytest.mark.parametrize(
    ("model", "weight", "fits"),
    [(nn.Linear(6, 8), FOUR_BITS, True), (CONV, FOUR_BITS, False), (CONV, PER_TENSOR, False)],
    ids=["linear in four bits", "convolution in four bits", "one scale for the weight"],
)
def test_what_xnnpack_takes_with_dynamic_inputs(model: nn.Module, weight: Any, fits: bool) -> None:
    quantizer = products(DYNAMIC, weight)
    # A single row, as each has a scale of its own on the device.
    example = IMAGE[0, 0, :1] if isinstance(model, nn.Linear) else IMAGE
    assert bool(broken(model, example, quantizer, "xnnpack")) != fits
    found = deployed(copy.deepcopy(model), example, quantizer, "xnnpack")
    assert bool(found.refusal) != fits
    assert not fits or found.error < 0.05


@pytest.mark.parametrize("op", MOVES)
def test_xnnpack_does_not_load_a_move_with_two_scales(op: str) -> None:
    torch.manual_seed(0)
    model = Joined(MOVES[op])
    assert "could not load" in deployed(model, IMAGE, move(op, INT8, shared=False), "xnnpack").refusal


def test_x86_fails_where_a_convolution_reads_int8(skewed: nn.Module) -> None:
    assert deployed(copy.deepcopy(skewed), IMAGE, products(INT8, SYMMETRIC), "x86").refusal


@pytest.mark.conformance
@pytest.mark.parametrize("qat", [False, True])
@pytest.mark.parametrize("options", [*MODES, "x86:reduce_range=true"])
def test_the_plugins_fit_their_specs_on_every_model(options: str, qat: bool) -> None:
    spec = spec_of(pt2qa.plugins.resolve(options))
    assert spec is not None
    for model in MODELS.values():
        capture = pt2qa.capture(
            model.build(), model.batches()[0], dynamic_shapes=model.dynamic_shapes, decompose=model.decompose
        )
        annotations = pt2qa.overrides.annotations_of(capture, options, qat=qat)
        assert not broken_lines(annotations, spec), model.name
