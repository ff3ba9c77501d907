"""The x86 backend: every observed value is the converted graph's, computed anew from the deployed values before it."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import CodeGen, GraphModule, Interpreter, Node
from torch.nn import functional as F

import pt2qa
from pt2qa.errors import DeploymentError, PluginError
from pt2qa.plugins import Backend, DeployedProgram, Ran, backend_of
from pt2qa.plugins.options import parse_options, with_options
from pt2qa_x86 import PLUGIN, X86, X86Backend
from pt2qa_x86.process import ProgramApart
from tests.flows import NARROW
from tests.models import images, residual


class Images(nn.Module):
    """Convolutions with each activation and sum that Inductor fuses, a concatenation, pools, linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.c = nn.Conv2d(16, 16, 1)
        self.d = nn.Conv2d(32, 8, 1)
        self.e = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.f = nn.Linear(8, 8)
        self.g = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu6(self.a(x))
        z = F.hardswish(self.b(y))
        w = F.relu(self.c(z) + y)
        merged = torch.cat([F.max_pool2d(w, 2), F.avg_pool2d(z, 2)], 1)
        wide = F.silu(self.d(merged))
        wide = self.up(self.e(wide) * wide.sigmoid())
        row = wide.mean((2, 3))
        return self.g(F.gelu(self.f(row)) + row), wide


class Tokens(nn.Module):
    """Integer inputs, an attention, a layer norm and linears."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = self.norm(x + torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1) @ self.v(x))
        x = x + self.down(F.gelu(self.up(x)))
        head: Tensor = self.head(x.mean(1))
        return head


class Sums(nn.Module):
    """Linears whose outputs are added to values that are read again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.c, self.d = nn.Linear(16, 16, bias=False), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        y = F.relu(self.b(y) + y) + y
        head: Tensor = self.d(self.c(y) + x)
        return head


TOKENS = torch.arange(14).view(2, 7)
ROWS = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[type[nn.Module] | Any, Tensor]] = {
    "residual": (residual, images(4)),
    "images": (Images, images(2)),
    "tokens": (Tokens, TOKENS),
    "sums": (Sums, ROWS),
}
CASES = [
    ("residual", X86(reduce_range=NARROW)),
    ("images", X86(reduce_range=NARROW)),
    ("tokens", X86(reduce_range=NARROW, op_types={"matmul": {}})),
    ("sums", X86(reduce_range=NARROW)),
    ("sums", X86(mode="dynamic", reduce_range=NARROW)),
    ("sums", X86(mode="weight_only")),
    ("tokens", X86(mode="dynamic", reduce_range=NARROW)),
    ("images", X86(reduce_range=True)),
]


@dataclass(frozen=True)
class Lowered:
    """A converted graph, its program and the names of what is observed."""

    graph: GraphModule
    program: DeployedProgram
    taps: tuple[str, ...]

    def isolated(self, inputs: Sequence[Any]) -> tuple[Ran, dict[str, tuple[Tensor, Tensor]]]:
        """By tap: the deployed value, and the converted op's on the deployed values before it."""
        ran = self.program.run(inputs)
        values: dict[str, tuple[Tensor, Tensor]] = {}

        class Nodes(Interpreter):
            def run_node(self, n: Node) -> Any:
                value = super().run_node(n)
                if n.name not in ran.values:
                    return value
                # In-place ops of the graph write to what this returns.
                values[n.name] = ran.values[n.name], value.clone()
                return ran.values[n.name].clone()

        with torch.no_grad():
            Nodes(self.graph).run(*inputs)
        return ran, values


def converted(model: nn.Module, x: Tensor, plugin: X86) -> GraphModule:
    graph = copy.deepcopy(pt2qa.quantize(pt2qa.capture(model, x), plugin, [x], progress=False).quantized)
    output = graph.graph.output_node()
    leaves = torch.utils._pytree.tree_leaves(output.args[0])
    output.args = (tuple(leaves),)
    graph.graph.set_codegen(CodeGen())
    graph.recompile()
    return graph


def handles_of(graph: GraphModule) -> dict[Node, int]:
    return {
        node: node.meta["custom"]["numeric_debug_handle"]
        for node in graph.graph.nodes
        if node.op == "call_function" and node.meta.get("custom")
    }


def taps_of(graph: GraphModule) -> tuple[str, ...]:
    """Every quantize node and every op with a handle."""
    handles = handles_of(graph)
    return tuple(
        node.name for node in graph.graph.nodes if node in handles or ".quantize_per_tensor" in str(node.target)
    )


def lowered(model: nn.Module, x: Tensor, plugin: X86, backend: X86Backend = PLUGIN.backend) -> Lowered:
    torch.manual_seed(0)
    graph = converted(model.eval(), x, plugin)
    taps = taps_of(graph)
    program = backend.lower(copy.deepcopy(graph), (x,), taps, dynamic_shapes=None, progress=lambda _: None)
    return Lowered(graph, program, taps)


def lsb(pair: tuple[Tensor, Tensor]) -> int:
    return int((pair[0].int() - pair[1].int()).abs().max())


@pytest.fixture(scope="module")
def small() -> Lowered:
    return lowered(residual(), images(4), X86(reduce_range=NARROW))


@pytest.fixture(scope="module")
def apart() -> Lowered:
    """The same in a process with AVX2."""
    return lowered(residual(), images(4), X86(reduce_range=NARROW), X86Backend(isa="avx2"))


# -- what is observed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "plugin"), CASES, ids=[f"{name}-{plugin.mode}" for name, plugin in CASES])
def test_each_value_is_the_one_that_the_converted_op_gives_on_the_same_inputs(name: str, plugin: X86) -> None:
    make, x = MODELS[name]
    torch.manual_seed(0)
    found = lowered(make(), x, plugin)
    ran, values = found.isolated((x,))
    assert values.keys() == {tap for tap, reason in found.program.taps.items() if not reason}
    assert tuple(found.program.taps) == found.taps
    assert not ran.changed
    for tap, (deployed, wanted) in values.items():
        assert deployed.dtype == wanted.dtype
        if wanted.is_floating_point():
            torch.testing.assert_close(deployed, wanted, rtol=1e-4, atol=1e-5, msg=tap)
        else:
            assert lsb((deployed, wanted)) <= 1, tap


def test_what_is_fused_away_is_named_with_the_kernel_that_computes_it(small: Lowered) -> None:
    lost = {name: reason for name, reason in small.program.taps.items() if reason}
    assert lost == {
        "conv2d": "the kernel of relu/relu computes it",
        "relu_": "its kernel returns it rounded",
        "conv2d_1": "the kernel of relu/relu_1 computes it",
        "add": "the kernel of relu/relu_1 computes it",
    }


def test_delegated_are_the_ops_inside_of_kernels(small: Lowered) -> None:
    by_handle = {handle: node.name for node, handle in handles_of(small.graph).items()}
    inside = {by_handle[handle] for handle in small.program.delegated}
    assert inside == {"conv2d", "relu_", "conv2d_1", "add", "relu__1", "linear"}
    assert set(by_handle.values()) - inside == {"mean"}


def test_facts_name_the_kernels(small: Lowered) -> None:
    instructions, kernels, left, shapes = small.program.facts
    assert instructions.startswith("instruction set: ")
    assert kernels.startswith(
        "oneDNN kernels, as torch.compile with freezing calls them: "
        "qconv_pointwise (1), qconv2d_pointwise (1), qlinear_pointwise (1);"
    )
    assert left == "ops with quantized weights that stay in float: none"
    assert shapes == "lowered for each shape of the inputs: 1"


@pytest.mark.parametrize("mode", ["static", "dynamic", "weight_only"])
def test_linears_on_inputs_of_three_dimensions_run_in_kernels(mode: Any) -> None:
    torch.manual_seed(0)
    found = lowered(Sums(), ROWS.view(2, 3, 16), X86(mode=mode)).program
    names = {"static": "qlinear", "dynamic": "qlinear", "weight_only": "dynamic_fp16"}
    assert names[mode] in found.facts[1]
    assert found.facts[2].endswith(" stay in float: none")


def test_other_batch_sizes_are_lowered_when_they_come(small: Lowered) -> None:
    program = replace(small.program)  # type: ignore[type-var]
    x = images(4)[:3]
    _, values = replace(small, program=program).isolated((x,))
    assert all(len(deployed) == 3 for deployed, _ in values.values())
    assert max(lsb(pair) for pair in values.values() if pair[1].dtype == torch.uint8) <= 1
    assert program.facts[-1] == "lowered for each shape of the inputs: 2"


def test_inputs_are_left_as_they_were_and_runs_repeat(small: Lowered) -> None:
    x = images(4, seed=3)
    kept = x.clone()
    first, second = small.program.run((x,)), small.program.run((x,))
    assert torch.equal(x, kept)
    assert all(torch.equal(a, b) for a, b in zip(first.outputs, second.outputs, strict=True))
    assert all(torch.equal(first.values[name], second.values[name]) for name in first.values)


# -- faults ------------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Three convolutions with relu: Inductor fuses relu and rounding into the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(i, 8, 3, padding=1) for i in (3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


def test_fused_kernels_exceed_the_range_that_reduce_range_gives() -> None:
    torch.manual_seed(0)
    found = lowered(Chain(), images(4), X86(reduce_range=True))
    _, values = found.isolated((images(4) * 3,))
    assert max(int(deployed.max()) for deployed, _ in values.values() if deployed.dtype == torch.uint8) > 127
    beyond = {name: lsb(pair) for name, pair in values.items() if pair[1].dtype == torch.uint8 and lsb(pair) > 1}
    assert beyond.keys() == {"quantize_per_tensor_default_1", "quantize_per_tensor_default_2"}
    assert int(values["quantize_per_tensor_default"][0].max()) == 127


class Heavy(nn.Module):
    """Linears that sum inputs at the upper end; all weights of the first are the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 8)
        nn.init.ones_(self.a.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


def test_sums_of_two_products_saturate_without_vnni_and_only_there(apart: Lowered) -> None:
    x = torch.rand(64, 32, generator=torch.Generator().manual_seed(0))
    worst = {}
    for isa in ("native", "avx2"):
        torch.manual_seed(0)
        found = lowered(Heavy(), x, X86(), X86Backend(isa=isa))
        _, values = found.isolated((x,))
        worst[isa] = {name: lsb(pair) for name, pair in values.items() if pair[1].dtype == torch.uint8}
        assert ("saturate" in found.program.facts[0]) == (isa == "avx2" or NARROW)
    hit = "quantize_per_tensor_default_1"
    assert worst["avx2"].pop(hit) > 20
    assert max(worst["avx2"].values()) <= 1
    if not NARROW:
        assert max(worst["native"].values()) <= 1


def test_the_cause_of_such_a_difference_is_found_by_experiment() -> None:
    torch.manual_seed(0)
    x = torch.rand(64, 32)
    pair = pt2qa.quantize(pt2qa.capture(Heavy().eval(), x), X86(), [x], progress=False)
    report = pt2qa.compare_deployed(pair, [x], backend="x86:isa=avx2", progress=False)
    assert {row.name: row.cause for row in report.suspects}["relu"] == "sums of two of its products saturate at 16 bits"


# -- a process of its own ----------------------------------------------------------------------------------------------


def test_a_process_of_its_own_gives_the_same_taps_and_values_where_nothing_saturates(
    small: Lowered, apart: Lowered
) -> None:
    x = images(4, seed=9)
    assert apart.program.taps == small.program.taps
    assert apart.program.delegated == small.program.delegated
    assert apart.program.facts[1] == small.program.facts[1]
    here, there = small.program.run((x,)), apart.program.run((x,))
    assert here.values.keys() == there.values.keys()
    assert torch.equal(here.values["quantize_per_tensor_default"], there.values["quantize_per_tensor_default"])
    assert apart.program.run((images(3),)).outputs[0].shape == (3, 4)
    assert apart.program.facts[-1] == "lowered for each shape of the inputs: 2"


def test_errors_of_the_other_process_come_here_and_it_goes_on(apart: Lowered) -> None:
    with pytest.raises(DeploymentError, match="with AVX2: torchao could not lower the model for x86"):
        apart.program.run((torch.zeros(4, 5, 8, 8),))
    assert apart.program.run((images(4),)).outputs[0].shape == (4, 4)


def test_a_process_that_dies_is_reported_with_what_it_wrote() -> None:
    found = lowered(nn.Linear(16, 4), ROWS, X86(), X86Backend(isa="avx2")).program
    assert isinstance(found, ProgramApart)
    folder = found.process.folder
    (folder / "stderr.txt").write_text("out of memory")
    os.kill(found.process.pid, signal.SIGKILL)
    with pytest.raises(DeploymentError, match="the process with AVX2 ended with status -9: out of memory"):
        found.run((ROWS,))
    assert not folder.exists()


def test_the_process_and_its_folder_end_with_the_program() -> None:
    found = lowered(nn.Linear(16, 4), ROWS, X86(), X86Backend(isa="avx2")).program
    assert isinstance(found, ProgramApart)
    pid, folder = found.process.pid, found.process.folder
    found.process.close()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# -- the contract ------------------------------------------------------------------------------------------------------


def test_the_plug_in_offers_it() -> None:
    backend = backend_of(PLUGIN)
    assert isinstance(backend, Backend)
    assert (backend.missing(), backend.suffixes) == ("", (".pt2",))


def test_options_are_read_from_text() -> None:
    backend = PLUGIN.backend
    assert with_options(backend, parse_options(backend, "isa=avx2")) == X86Backend(isa="avx2")
    with pytest.raises(
        PluginError, match=r"^backend 'Inductor with oneDNN': option isa: got 'sse', expected native\|avx2"
    ):
        parse_options(backend, "isa=sse")
    with pytest.raises(PluginError, match=r"^backend 'Inductor with oneDNN' has no option 'cpu'"):
        parse_options(backend, "cpu=avx2")


def test_programs_are_not_saved(small: Lowered, apart: Lowered, tmp_path: Path) -> None:
    for each in (small, apart):
        with pytest.raises(DeploymentError, match="Lowering for x86 takes seconds: lower the model again"):
            each.program.save(tmp_path)
    with pytest.raises(DeploymentError, match="cannot be written"):
        PLUGIN.backend.load(tmp_path)


def test_graphs_that_torchao_cannot_lower_are_errors_with_its_message(small: Lowered) -> None:
    with pytest.raises(DeploymentError, match=r"(?s)torchao could not lower the model for x86: .*weight of size"):
        small.program.run((torch.zeros(4, 5, 8, 8),))


def test_files_that_are_no_compiled_package_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(DeploymentError, match="cannot be read: FileNotFoundError"):
        PLUGIN.backend.open(path)
    path.write_bytes(b"no archive")
    with pytest.raises(DeploymentError, match="cannot be read: ValueError: File is not a zip file"):
        PLUGIN.backend.open(path)
    torch.export.save(torch.export.export(residual(), (images(4),)), path)
    for isa in ("native", "avx2"):
        with pytest.raises(DeploymentError, match="no model that AOTInductor compiled"):
            X86Backend(isa=isa).open(path)
