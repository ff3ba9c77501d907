"""Every message on the page of common errors is raised by code that makes the mistake."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa.plugins import resolve
from tests.flows import residual_pair
from tests.models import Linears, NestedOutputs, Residual, images, residual

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "common_errors.md").read_text()
MESSAGE = re.compile(r"^### ([^\n]*)|^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)

X, ROWS = images(), torch.ones(8, 16)
INT8 = torch.ones(1, 3, 8, 8, dtype=torch.int8)


class Branches(nn.Module):
    """Control flow that depends on a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if x.sum() > 0 else x


class Counting(nn.Module):
    """An output that depends on how often forward ran."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


class Batched(nn.Module):
    """A function of one sample, for all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(torch.relu)(x)


def captured(model: nn.Module | None = None, x: Any = X) -> pt2qa.Capture:
    return pt2qa.capture((residual() if model is None else model).eval(), x)


def prepare(model: Any) -> None:
    prepare_pt2e(model, resolve("xnnpack").build(captured().module(), qat=False))


def prepared(capture: pt2qa.Capture | None = None, quantizer: str = "xnnpack", x: Tensor | None = X) -> GraphModule:
    graph = (capture or captured()).module()
    made = prepare_pt2e(graph, resolve(quantizer).build(graph, qat=False))
    if x is not None:
        made(x)
    return made  # type: ignore[no-any-return]


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(residual_pair().quantized, (X,))


def saved(save: Callable[..., None], value: Any) -> io.BytesIO:
    file = io.BytesIO()
    save(value, file)
    file.seek(0)
    return file


def compared(batches: Any, **options: Any) -> pt2qa.LayerReport:
    return pt2qa.compare_layers(residual_pair(), batches, progress=False, **options)


def branches() -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # torch prints the graph so far
        torch.export.export(Branches(), (X,))


def quantized_eagerly() -> None:
    from torch.ao.quantization import quantize_dynamic

    captured(quantize_dynamic(nn.Sequential(nn.Linear(16, 4)), {nn.Linear}), ROWS)


def prepared_twice() -> None:
    graph = prepared(x=None)
    prepare_pt2e(graph, resolve("xnnpack").build(graph, qat=False))


def uncalibrated() -> None:
    capture = captured()
    with pytest.warns(UserWarning, match="must run observer before calling calculate_qparams"):
        quantized = convert_pt2e(prepared(capture, x=None))
    pt2qa.pair(capture.module(), quantized)


def other_weights() -> None:
    other = residual()
    with torch.no_grad():
        other.fc.weight.neg_()  # type: ignore[union-attr, operator]
    pt2qa.pair(captured(other).module(), residual_pair().quantized)


def lowered_for_x86() -> None:
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

    lower_pt2e_quantized_to_x86(copy.deepcopy(residual_pair().quantized), (X,))(X)


def to_executorch() -> None:
    """In a process of its own: kernels that another test has loaded stay loaded."""
    code = "from executorch.exir import to_edge; from tests.test_common_errors import exported as e; to_edge(e())"
    command = [sys.executable, "-W", "ignore", "-c", f"{code}.to_executorch()"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.rpartition("RuntimeError: ")[2])


@functools.cache
def lowered() -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    program = to_edge_transform_and_lower(exported(), partitioner=[XnnpackPartitioner()]).to_executorch()
    return bytes(program.buffer)  # the cache keeps it: a loaded program reads from this memory


def on_device(batch: Tensor) -> None:
    from executorch.runtime import Runtime

    Runtime.get().load_program(lowered()).load_method("forward").execute([batch])


def dequantize(x: Tensor) -> Any:
    return torch.ops.quantized_decomposed.dequantize_per_tensor(x, 1.0, 0, -128, 127, torch.int8)


def flow() -> None:
    from pt2qa.cli.flow import load_flow

    load_flow("flow.py:flow")


RAISED: dict[str, tuple[Callable[[], Any], ...]] = {
    "Forward branches on a value": (branches,),
    "The model was quantized by eager mode or FX": (quantized_eagerly,),
    "The model is in training mode": (lambda: pt2qa.capture(residual().train(), X),),
    "The example inputs are not a tuple": (lambda: torch.export.export(residual(), X),),  # type: ignore[arg-type]
    "The model keeps state": (lambda: captured(Counting()),),
    "The model calls `torch.vmap`": (lambda: captured(Batched()),),
    "Two example inputs are the same tensor": (lambda: captured(nn.Bilinear(16, 16, 4), (ROWS, ROWS)),),
    "The functions of an older tutorial are gone": (
        lambda: importlib.import_module("torch.ao.quantization.quantize_pt2e"),
    ),
    "Prepare got a model or a program": (lambda: prepare(residual()), lambda: prepare(captured().program)),
    "Prepare ran twice": (prepared_twice,),
    "Convert got a graph that was not prepared": (lambda: convert_pt2e(captured().module()),),
    "Nothing was annotated": (lambda: pt2qa.quantize(captured(nn.ReLU()), "xnnpack", [X], progress=False),),
    "There was no calibration": (lambda: pt2qa.quantize(captured(), "xnnpack", []), uncalibrated),
    "A copy of a dynamically prepared graph is converted": (
        lambda: convert_pt2e(copy.deepcopy(prepared(captured(Linears(), ROWS), "xnnpack:mode=dynamic", ROWS))),
    ),
    "The model computes in float64": (
        lambda: pt2qa.quantize(captured(nn.Linear(16, 4).double(), ROWS.double()), "xnnpack", [ROWS.double()]),
    ),
    "An exported graph is put in eval mode": (lambda: captured().module().eval(),),
    "A value that is not float32 reaches a quantize op": (lambda: residual_pair().quantized(X.double()),),
    "A float value reaches a dequantize op": (lambda: dequantize(X),),
    "Integers reach a float op": (lambda: torch.conv2d(INT8, torch.ones(1, 3, 1, 1)),),
    "Another batch size": (lambda: exported().module()(images(5)), lambda: compared([images(5)])),
    "The batch contains the target": (lambda: compared([(X, torch.zeros(2))]),),
    "One batch instead of a list of batches": (lambda: compared(X),),
    "The program itself is called": (lambda: exported()(X),),
    "The graph is saved without an export": (lambda: saved(torch.export.save, residual_pair().quantized),),
    "The whole graph was pickled": (
        lambda: torch.load(saved(torch.save, residual_pair().quantized)),
        lambda: torch.load(saved(torch.save, residual_pair().quantized), weights_only=False),
    ),
    "A quantized state dict is loaded into the float model": (
        lambda: Residual().load_state_dict(residual_pair().quantized.state_dict()),
    ),
    "A .pt2 file is read with torch.load": (
        lambda: torch.load(saved(lambda program, file: torch.export.save(program, file), exported())),
    ),
    "The graph is scripted": (lambda: torch.jit.script(residual_pair().quantized),),
    "Quantize ops are left to ExecuTorch's own kernels": (to_executorch,),
    "The backend does not take this quantizer's integers": (lowered_for_x86,),
    "The program on the device takes other inputs": (
        lambda: on_device(images(5)),
        lambda: on_device(X.double()),
    ),
    "Graphs have no op in common": (
        lambda: pt2qa.pair(torch.export.export(nn.Tanh(), (X,)).module(), residual_pair().quantized),
    ),
    "The first graph is not the float one": (lambda: pt2qa.pair(residual_pair().quantized, exported()),),
    "The second graph is not quantized": (
        lambda: pt2qa.pair(captured().module(), captured().module()),
        lambda: pt2qa.pair(captured().module(), prepared()),
    ),
    "The quantized graph is a reference representation": (
        lambda: pt2qa.pair(captured().module(), convert_pt2e(prepared(), use_reference_representation=True)),
    ),
    "The graphs hold other weights": (other_weights,),
    "The graphs return different things": (
        lambda: pt2qa.compare_graphs(captured(Linears(), ROWS).module(), captured(NestedOutputs(), ROWS).module(), []),
    ),
    "A name matches nothing": (
        lambda: compared([X], prefixes=["conv3"]),
        lambda: pt2qa.quantize(captured(), "xnpack", [X]),
    ),
    "The flow file is not found": (flow,),
    "A report cannot be read": (lambda: pt2qa.load("layers.safetensors"),),
}
"""What to do for the messages under each heading, in their order."""


def messages() -> dict[str, list[str]]:
    """The messages of the page by heading."""
    found: dict[str, list[str]] = {}
    title = ""
    for heading, message in MESSAGE.findall(PAGE):
        title = heading or title
        found.setdefault(title, []).extend([" ".join(message.split())] if message else [])
    return found


def told(error: BaseException | None) -> str:
    """An error and what caused it, with names of classes."""
    return "" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())} {told(error.__cause__)}"


def test_every_heading_has_its_mistakes() -> None:
    assert {title: len(found) for title, found in messages().items()} == {
        title: len(actions) for title, actions in RAISED.items()
    }


LOADED = ("The whole graph was pickled", 1)
"""What raises nothing from torch 2.15 on."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("title", "number"), [(title, number) for title, actions in RAISED.items() for number in range(len(actions))]
)
def test_the_message_is_raised(title: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the page, "…" stands for anything."""
    monkeypatch.chdir(tmp_path)
    if (title, number) == LOADED and Version(torch.__version__) >= Version("2.15"):
        assert RAISED[title][number]().graph is not None
        return
    with pytest.raises(Exception) as raised:  # noqa: PT011  what is raised is compared with the page
        RAISED[title][number]()
    pattern = ".*".join(map(re.escape, messages()[title][number].split("…")))
    assert re.search(pattern, told(raised.value)), told(raised.value)
