"""The smallest part of a converted graph that still shows a fault, as a file that runs alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.fx import GraphModule
from tqdm import tqdm

from pt2qa._ambient import torch_defaults
from pt2qa._capture.inputs import detached
from pt2qa._deployed.analysis import compare_deployed
from pt2qa._deployed.deployment import backend_for, inputs_for
from pt2qa._deployed.parts import ABSENT, Fault, Parts
from pt2qa._exclusion import exports
from pt2qa._graph.handles import copy_nodes
from pt2qa._quantize.pairing import QuantizedPair, check_pair
from pt2qa._report.prose import counted, few
from pt2qa._simulator import quant_ops
from pt2qa._simulator.batches import Batch, leaves_of
from pt2qa.errors import BatchError, DeploymentError, SelectionError
from pt2qa.plugins import Backend

PROGRAM, TENSORS, SCRIPT = "part.pt2", "part.safetensors", "run.py"


@dataclass(frozen=True)
class Reduction:
    """The smallest part found that still shows a fault.

    Attributes:
        graph: the part of the converted graph, with flat inputs and a flat tuple of outputs.
        inputs: what it read in the model, as many tensors as the graph has inputs.
        expected: what it should return: the converted part's outputs, or of the fault ``rounding`` the float model's.
        ops: names of its ops, in graph order.
        shows: what is wrong with it, in a sentence.
        fault: as requested.
        of: how many ops the model has.
        tried: how many parts were looked at.
        script: code that defines ``deployed(part, inputs)`` with the backend alone; empty without a backend.

    What :func:`pt2qa.reduce` returns.
    """

    graph: GraphModule
    inputs: tuple[Any, ...]
    expected: tuple[Tensor, ...]
    ops: tuple[str, ...]
    shows: str
    fault: Fault
    of: int
    tried: int
    script: str

    def __str__(self) -> str:
        return (
            f"{counted(len(self.ops), 'op')} of {self.of} (after {counted(self.tried, 'try', 'tries')}): "
            f"{few(self.ops)}. {self.shows}"
        )

    @exports
    def save(self, folder: str | Path) -> Path:
        """Writes the part, its inputs and ``run.py``, which shows the fault without pt2qa, to a new folder.

        Raises:
            DeploymentError: the folder exists, or cannot be written.
        """
        folder = Path(folder)
        program = torch.export.export(copy_nodes(self.graph), self.inputs, strict=False)
        tensors = {f"input{at}": value for at, value in enumerate(self.inputs)}
        tensors |= {f"expected{at}": value for at, value in enumerate(self.expected)}
        try:
            folder.mkdir(parents=True)
            torch.export.save(program, folder / PROGRAM)
            # In memory of its own: the file holds no views.
            save_file({name: detached(value).contiguous() for name, value in tensors.items()}, folder / TENSORS)
            (folder / SCRIPT).write_text(self._code(), encoding="utf-8")
        except OSError as error:
            raise DeploymentError(
                f"{folder}: {error.strerror or error}. Give a folder that does not exist yet."
            ) from error
        return folder

    def _code(self) -> str:
        graph = "".join(f"# {line}".rstrip() + "\n" for line in self.graph.code.strip().splitlines())
        return _CODE.format(shows=self.shows.replace('"""', "'''"), script=self.script or _EAGER, graph=graph)


_EAGER: Final = """\
def deployed(part, inputs):
    return part(*inputs)
"""
_CODE: Final = '''\
"""{shows}"""

from pathlib import Path

import torch
import torchao.quantization.pt2e.quantize_pt2e  # registers the ops of quantized graphs
from safetensors.torch import load_file

{script}

folder = Path(__file__).parent
part = torch.export.load(folder / "part.pt2").module()
tensors = load_file(folder / "part.safetensors")
inputs = tuple(tensors[f"input{{at}}"] for at in range(len(tensors)) if f"input{{at}}" in tensors)
for at, found in enumerate(deployed(part, inputs)):
    expected, found = tensors[f"expected{{at}}"].double(), found.double()
    noise = (expected - found).square().sum()
    apart = f"{{10 * (expected.square().sum() / noise).log10():.1f}} dB" if noise else "nothing"
    print(f"output {{at}}: {{apart}} apart, by {{(expected - found).abs().max():.4g}} at most")

# The part:
{graph}'''


@torch_defaults
def reduce(
    pair: QuantizedPair,
    batch: Batch,
    fault: Fault = "kernel",
    *,
    backend: str | Backend | None = None,
    apart: bool = False,
    progress: bool | None = None,
) -> Reduction:
    """Cuts the smallest part that still shows a fault out of a quantized model, with its weights and its inputs.

    Parts of the converted graph run on the values that they read in the model: first and last ops are taken away by
    halves, then others, as long as the rest shows the same. What is found is no proof that nothing smaller does.

    Args:
        pair: what :func:`pt2qa.quantize` returned; it is not changed.
        batch: one batch, as the model takes it.
        fault: what to look for. ``"kernel"``: the backend's kernels are more than one integer step from the converted
            graph (float values: below 60 dB). ``"lowering"``: the backend refuses the model, or cannot run it, with the
            same message. ``"nonfinite"``: NaN or infinite values from finite ones. ``"rounding"``: the region whose
            rounding costs most, of lowest isolated SQNR.
        backend: as in :func:`pt2qa.compare_deployed`; only for the first two.
        apart: as in :func:`pt2qa.compare_deployed`: for each part, a process of its own.
        progress: whether to show progress; None: if stderr is a terminal.

    Returns:
        The part; :meth:`Reduction.save` writes it as a script.

    Raises:
        SelectionError: the model does not show the fault, or an argument does not belong to it.
        BatchError: the batch is none of the model's, such as a list of batches.
        DeploymentError: no backend runs the model here.

    Source:
        "Simplifying and Isolating Failure-Inducing Input" (Zeller and Hildebrandt, 2002).

    >>> x = torch.linspace(-1, 1, 32).reshape(8, 4)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    >>> pair = pt2qa.quantize(pt2qa.capture(model, x), "x86", [x], progress=False)
    >>> pt2qa.reduce(pair, x, "rounding").ops
    ('0/linear', '1/relu')
    """
    check_pair(pair)
    if fault not in get_args(Fault):
        raise SelectionError(f"unknown fault {fault!r}; expected one of {', '.join(get_args(Fault))}.")
    lowers = fault in ("kernel", "lowering")
    if backend is not None and not lowers:
        raise SelectionError(f'fault="{fault}" is looked for without a backend; leave out backend={backend!r}.')
    try:
        pair.values(batch)
    except BatchError as error:
        one = " reduce looks at one batch; of a list of them, pass one." if isinstance(batch, list) else ""
        raise BatchError(f"{error}{one}") from error
    runs_on, suspects = backend_for(pair, backend, apart) if lowers else None, list[int]()
    if fault == "kernel":
        suspects = [row.handle for row in compare_deployed(pair, [batch], backend=runs_on, progress=False).suspects]
        if not suspects:  # the output alone is no proof: right kernels' single steps grow along the graph
            raise SelectionError(f"{pair.model}: {ABSENT[fault]}.")
    if pair.origin is not None:
        pair = pair.origin.pair  # the part is of the graph that is lowered
    with tqdm(desc="reduce", unit="part", disable=None if progress is None else not progress) as bar:
        parts = Parts(pair, batch, fault, runs_on, bar, suspects)
        chosen = parts.found()
    part, inputs, ends = parts.cut(chosen)
    expected = leaves_of(part(*inputs_for(inputs)))
    if fault == "rounding":  # what is rounded to integers, as the float model has it before
        sources = [next(iter(node.all_input_nodes)) if quant_ops.is_dequantize(node) else node for node in ends]
        sources = [next(iter(node.all_input_nodes)) if quant_ops.is_quantize(node) else node for node in sources]
        expected = [parts.values[node] for node in sources]
    names = [parts.names(chosen), parts.names(parts.order)]
    script = getattr(runs_on, "script", "")
    return Reduction(part, inputs, tuple(expected), names[0], parts.says, fault, len(names[1]), parts.tried, script)
