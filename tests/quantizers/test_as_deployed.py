"""``pair.as_deployed()`` computes dynamic layers as XNNPACK's kernels do, and says so; the pair itself does not."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._quantize.quantization import with_numbers
from pt2qa.errors import PairingError
from pt2qa.plugins import op_type
from tests.flows import direct_sqnr, quantized_pair
from tests.models import Linears
from tests.quantizers.device import XNNPACKDevice

CASES = {
    "rows": (nn.Linear(16, 8), (5, 16), 1),
    "rows of sequences": (nn.Linear(16, 8), (3, 5, 16), 1),
    "images": (nn.Conv2d(3, 4, 3, padding=1), (5, 3, 6, 6), 3),
    "pixels": (nn.Conv2d(3, 4, 1), (5, 3, 6, 6), 3),
    "images, 1 x 1 with stride": (nn.Conv2d(3, 4, 1, stride=2), (5, 3, 6, 6), 3),
    "images, 1 x 1 with padding": (nn.Conv2d(3, 4, 1, padding=1), (5, 3, 6, 6), 3),
    "images, 1 x 1 in groups": (nn.Conv2d(4, 4, 1, groups=2), (5, 4, 6, 6), 3),
    "images, transposed": (nn.ConvTranspose2d(3, 4, 3), (5, 3, 6, 6), 3),
}
NOTE = (
    "the backend's kernels have a scale for each row of the input of a linear (2 inputs), where this graph has one for "
    "the tensor; pair.as_deployed() simulates the kernels"
)


def slices_of_different_size(shape: tuple[int, ...], axes: int) -> Tensor:
    """Normal random values; the largest of a slice is a million times that of another."""
    sizes = torch.logspace(-3, 3, torch.Size(shape[:-axes]).numel()).view(*shape[:-axes], *[1] * axes)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * sizes


def worst_slice(device: Tensor, simulated: Tensor, axes: int) -> float:
    """SQNR of the slice that agrees least, in dB: the large slices must not hide the small ones."""
    pairs = zip(device.flatten(0, -axes - 1), simulated.flatten(0, -axes - 1), strict=True)
    return min(direct_sqnr(*pair) for pair in pairs)


@pytest.mark.parametrize("case", CASES)
def test_the_simulation_as_deployed_is_what_the_device_computes(case: str) -> None:
    model, shape, axes = CASES[case]
    x = slices_of_different_size(shape, axes)
    pair = quantized_pair(model.eval(), x, "xnnpack:mode=dynamic")
    computed = XNNPACKDevice(pair.quantized, x)(x)
    simulated = pair.as_deployed().simulator.run([x])[0]
    assert worst_slice(computed, simulated, axes) > 100
    assert worst_slice(computed, pair.simulator.run([x])[0], axes) < 30


def test_every_integer_is_that_of_the_device() -> None:
    """Twelve decades, ties between two steps, rows of one sign, rows of zeros: the identity shows each integer."""
    model = nn.Linear(16, 16, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(torch.eye(16))
    generator = torch.Generator().manual_seed(0)
    decades = torch.randn(2000, 16, generator=generator) * torch.logspace(-6, 6, 2000)[:, None]
    ties = torch.randint(-74, 437, (2000, 16), generator=generator) / 2
    ties[:, 0], ties[:, 1] = -37.0, 218.0
    rest = torch.cat([torch.zeros(1, 16), torch.full((1, 16), 5.0), -torch.rand(100, 16, generator=generator)])
    x = torch.cat([decades, ties, rest])
    pair = quantized_pair(model, x, "xnnpack:mode=dynamic")
    simulated, computed = pair.as_deployed().simulator.run([x])[0], XNNPACKDevice(pair.quantized, x)(x)
    steps = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)).clamp(min=1e-30) / 255
    assert float(((simulated - computed).abs() / steps[:, None]).max()) < 0.01


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    return quantized_pair(Linears(), slices_of_different_size((5, 16), 1), "xnnpack:mode=dynamic")


def test_reports_say_what_they_simulate(pair: pt2qa.QuantizedPair) -> None:
    x = slices_of_different_size((5, 16), 1)
    plain = pt2qa.compare_layers(pair, [x], progress=False)
    deployed = pt2qa.compare_layers(pair.as_deployed(), [x], progress=False)
    assert plain.notes == (NOTE,)
    assert deployed.notes[0] == (
        "as deployed: the backend's kernels have a scale for each row of the input of a linear (2 inputs), as does "
        "this simulation; convert_pt2e has one for the tensor"
    )
    assert NOTE not in deployed.notes
    assert (plain.quantizer, deployed.quantizer) == ("xnnpack:mode=dynamic", "xnnpack:mode=dynamic, as deployed")


def test_other_analyses_take_it(pair: pt2qa.QuantizedPair) -> None:
    x, deployed = slices_of_different_size((5, 16), 1), pair.as_deployed()
    assert deployed.pairing.pairs == pair.pairing.pairs
    assert deployed.pairing.unpaired == ()
    ranked = pt2qa.sensitivity(deployed, [x], progress=False)
    assert {row.name for row in ranked.rows} == {"x", "first/linear", "relu", "second/linear"}
    schemes = {place.scheme for place in pt2qa.annotations(deployed).rows if place.role == "input" and place.dynamic}
    assert schemes == {"per_slice"}
    assert pt2qa.find_bad_cases(deployed, [x], progress=False).rows


def outlier_pair() -> tuple[pt2qa.QuantizedPair, list[Tensor]]:
    """Weights with one outlier, which is what the device loses by, and rows over two decades."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    with torch.no_grad():
        model[2].weight[3, 5] = 4.0
    batches = [torch.randn(6, 32) * torch.logspace(-1, 1, 6)[:, None] for _ in range(6)]
    return pt2qa.quantize(pt2qa.capture(model, batches[0]), "xnnpack:mode=dynamic", batches, progress=False), batches


def of_the_device(pair: pt2qa.QuantizedPair, batches: list[Tensor]) -> float:
    """SQNR of what ExecuTorch's runtime computes of the graph that is to be lowered."""
    assert pair.float_graph is not None
    device = XNNPACKDevice(pair.converted, batches[0])
    runs = [(pair.float_graph(x), device(x)) for x in batches]
    return direct_sqnr(*(torch.cat(side) for side in zip(*runs, strict=True)))


def test_reconfigure_reaches_the_target_on_the_device() -> None:
    pair, batches = outlier_pair()
    deployed = pair.as_deployed()
    before = of_the_device(pair, batches)
    found = pt2qa.reconfigure(deployed, batches, target=before + 4, repairs=(), progress=False)
    assert (found.met, found.code_verified) == (1, "equal")
    assert found.pair.origin is not None
    device = of_the_device(found.pair, batches)
    assert device >= before + 4
    assert pt2qa.compare_layers(found.pair, batches, progress=False).sqnr == pytest.approx(device, abs=0.05)
    assert pair.capture is not None
    again = pt2qa.quantize(pair.capture, "xnnpack:mode=dynamic", batches, overrides=found.plan, progress=False)
    assert torch.equal(again.quantized(batches[0]), found.pair.converted(batches[0]))


@pytest.mark.parametrize("methods", [["equalization"], ["biases"]])
def test_repair_measures_what_the_device_gains(methods: list[str]) -> None:
    pair, batches = outlier_pair()
    found = pt2qa.repair(pair.as_deployed(), batches, methods=methods, progress=False)
    quality = {stage.name: stage.quality for stage in found.stages}
    assert quality["before"] == pytest.approx(of_the_device(pair, batches), abs=0.05)
    assert quality["converted"] == pytest.approx(of_the_device(found.pair, batches), abs=0.05)


def test_other_biases_are_those_of_quantizing_again_and_nothing_is_calibrated() -> None:
    pair, batches = outlier_pair()
    values = base64.b64encode(torch.linspace(-1, 1, 64).numpy().tobytes()).decode()
    plan = pt2qa.OverridePlan((pt2qa.Edit("bias", ("2/linear",), values=values),))
    new = with_numbers(pair.as_deployed(), plan)
    assert new is not None
    assert new.origin is not None
    assert pair.capture is not None
    again = pt2qa.quantize(pair.capture, "xnnpack:mode=dynamic", batches, overrides=plan, progress=False)
    for side, own in ((new, again.as_deployed()), (new.origin.pair, again)):
        assert torch.equal(side.quantized(batches[0]), own.quantized(batches[0]))
    assert not torch.equal(new.quantized(batches[0]), pair.as_deployed().quantized(batches[0]))
    assert new.quantizer == "xnnpack:mode=dynamic, as deployed"


def test_diagnose_leads_there_and_finds_there_what_is_left() -> None:
    pair, batches = outlier_pair()
    plain = pt2qa.diagnose(pair, batches, verify_code=False, progress=False)
    assert plain.rows[0].cause == "dynamic-by-row"
    assert plain.next_command == "pt2qa.diagnose(pair.as_deployed(), batches)"
    found = pt2qa.diagnose(pair.as_deployed(), batches, target=35, verify_code=False, progress=False)
    assert (found.rows[0].cause, found.rows[0].name) == ("precision", "2/linear")
    assert of_the_device(found.pair, batches) > 35
    assert not found.asides


def test_check_looks_at_the_graph_that_is_lowered() -> None:
    pair, _ = outlier_pair()
    plain, deployed = (pt2qa.check(each, progress=False) for each in (pair, pair.as_deployed()))
    assert deployed.rows == tuple(row for row in plain.rows if row.rule != "xnnpack-dynamic-slices")
    assert not [row for row in deployed.rows if row.severity == "error"]


def test_one_row_has_no_note_and_static_pairs_stay_themselves() -> None:
    x = torch.randn(1, 16)
    assert quantized_pair(nn.Linear(16, 4), x, "xnnpack:mode=dynamic").notes == ()
    static = quantized_pair(nn.Linear(16, 4), x, "xnnpack")
    assert static.as_deployed() is static
    x86 = quantized_pair(nn.Linear(16, 4), x, "x86:mode=dynamic")
    assert x86.as_deployed() is x86


def test_a_pair_from_elsewhere_must_be_told_the_kernels(pair: pt2qa.QuantizedPair) -> None:
    assert pair.capture is not None
    elsewhere = pt2qa.pair(pair.capture.module(), pair.quantized)
    with pytest.raises(PairingError, match=r"pass the quantizer of its backend: pair\.as_deployed\(quantizer\)"):
        elsewhere.as_deployed()
    x = slices_of_different_size((5, 16), 1)
    expected = pair.as_deployed().simulator.run([x])[0]
    assert torch.equal(elsewhere.as_deployed("xnnpack").simulator.run([x])[0], expected)


class ReadTwice(nn.Module):
    """A linear that is called twice on one value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        return self.fc(y) + self.fc(y)


@dataclass(frozen=True)
class RowsOnly:
    """A plug-in whose kernels scale the rows of nothing but a linear."""

    name: ClassVar[str] = "rows"
    summary: ClassVar[str] = "rows"

    def dynamic_axes(self, node: torch.fx.Node) -> tuple[int, ...]:
        return (-1,) if op_type(node) == "linear" else ()

    def build(self, graph: object, *, qat: bool) -> object:
        raise NotImplementedError


def test_a_plug_in_declares_its_slices_and_readers_of_one_value_share_them() -> None:
    x = slices_of_different_size((5, 16), 1)
    pair = quantized_pair(ReadTwice(), x, "xnnpack:mode=dynamic")
    deployed = pair.as_deployed(RowsOnly())
    targets = [str(node.target) for node in deployed.quantized.graph.nodes]
    assert targets.count("pt2qa.quantize_per_slice.default") == 1
    conv = quantized_pair(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6), "xnnpack:mode=dynamic")
    assert conv.as_deployed(RowsOnly()) is conv
