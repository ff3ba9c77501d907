"""Inputs that a device must run, and the outputs that were recorded there: safetensors files, batch by batch.

Tensors are ``batch0.input0`` … and ``batch0.output0``, ``batch0.output1`` … in the order in which the model takes and
returns them, and ``batch0.value.OP`` for the value inside of an op.  The metadata of the inputs, if it was copied to
the outputs, says which inputs each batch was computed from.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._ambient import torch_defaults
from pt2qa._capture.program import Capture
from pt2qa._exclusion import computes
from pt2qa._metrics import error_sums
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.atomic import write_atomic
from pt2qa._report.prose import counted, few
from pt2qa._simulator.accumulate import accumulate
from pt2qa._simulator.batches import Batch, as_call, flatten_batch, leaves_of, tensor_outputs
from pt2qa._simulator.data import Data
from pt2qa._simulator.quant_ops import is_quantize
from pt2qa._simulator.verification import digest_of, graph_outputs
from pt2qa.errors import DeploymentError
from pt2qa.plugins import Ran

SUFFIX: Final = ".safetensors"
RECORDED: Final = (SUFFIX, ".etdp")
"""Suffixes of what was computed elsewhere and cannot be run."""

METADATA: Final = "pt2qa"
"""The key of the description of each batch, in the metadata of both files."""

_NAME: Final = re.compile(r"batch(0|[1-9]\d*)\.(?:output(0|[1-9]\d*)|value\.(.+))")


@dataclass
class RecordedOutputs:
    """A program that returns what a device recorded, batch after batch; see :class:`pt2qa.plugins.DeployedProgram`.

    ``outputs`` says how many each batch has, ``digests`` which inputs it was computed from, if the file does.
    """

    path: Path
    outputs: tuple[int, ...]
    digests: tuple[str, ...]
    facts: tuple[str, ...]
    read: int = 0
    taps: Mapping[str, str] = field(default_factory=dict)
    delegated: frozenset[int] = frozenset()

    def run(self, inputs: Sequence[Any]) -> Ran:
        number = self.read
        if number == len(self.outputs):
            raise DeploymentError(
                f"{self.path}: has the outputs of {counted(number, 'batch', 'batches')}, but there are more to "
                "compare. Pass the batches whose inputs were recorded."
            )
        if self.digests and self.digests[number] != digest_of(inputs):
            raise DeploymentError(
                f"{self.path}: batch {number} was computed from other inputs. Pass the batches whose inputs were "
                "recorded, in the same order; a loader that shuffles gives others each time."
            )
        self.read += 1
        with safe_open(self.path, "pt") as file:
            return Ran(tuple(file.get_tensor(f"batch{number}.output{n}") for n in range(self.outputs[number])))

    def refuse_rest(self) -> None:
        if self.read < len(self.outputs):
            raise DeploymentError(
                f"{self.path}: has the outputs of {counted(len(self.outputs), 'batch', 'batches')}; {self.read} were "
                "given to compare with. Pass all batches whose inputs were recorded."
            )

    def save(self, folder: Path) -> None:
        raise DeploymentError(f"{self.path}: recorded outputs are not a program and cannot be saved.")


@dataclass
class RecordedValues(RecordedOutputs):
    """The same with values inside: ``names`` are those of their ops, as reports show them."""

    names: frozenset[str] = frozenset()
    nodes: dict[Node, str] = field(default_factory=dict)

    def observe(self, graph: GraphModule, taps: Mapping[str, str]) -> None:
        self.nodes = {node: taps[node.name] for node in graph.graph.nodes if taps.get(node.name) in self.names}
        self.taps = {**dict.fromkeys(taps, "not recorded"), **{node.name: "" for node in self.nodes}}
        if lost := sorted(self.names - set(self.nodes.values())):
            self.facts += (f"{self.path.name}: has values of no op that is observed: {few(lost)}",)

    def run(self, inputs: Sequence[Any]) -> Ran:
        prefix, ran = f"batch{self.read}.value.", super().run(inputs)
        with safe_open(self.path, "pt") as file:
            values = {node: file.get_tensor(prefix + name) for node, name in self.nodes.items()}
        for node, value in values.items():
            if not value.is_floating_point():
                raise DeploymentError(
                    f"{self.path}: {prefix}{self.nodes[node]} is {value.dtype}, expected the floats that its integers "
                    "stand for: a device may have other zero points."
                )
            if is_quantize(node):
                values[node] = node.target(value.float(), *node.args[1:], **node.kwargs)  # type: ignore[operator]
        return replace(ran, values={node.name: value for node, value in values.items()})


def read_outputs(path: Path) -> RecordedOutputs:
    """Opens a file of recorded outputs, and checks that no tensor is missing or unknown."""
    try:
        with safe_open(path, "pt") as file:
            names, metadata = list(file.keys()), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise DeploymentError(f"{path}: not a safetensors file: {error}") from error
    found = {name: _NAME.fullmatch(name) for name in names}
    if unknown := [name for name, match in found.items() if match is None]:
        raise DeploymentError(
            f"{path}: has a tensor {unknown[0]!r}; expected the outputs of each batch: batch0.output0, batch0.output1, "
            "batch1.output0 …, and values inside: batch0.value.OP …"
        )
    matches = [match for match in found.values() if match is not None]
    last = dict(sorted((int(match[1]), int(match[2] or 0)) for match in matches))
    batches = 1 + max(last, default=-1)
    counts = tuple(1 + last.get(batch, 0) for batch in range(batches))
    values = frozenset(match[3] for match in matches if match[3])
    wanted = [f"batch{batch}.output{place}" for batch, count in enumerate(counts) for place in range(count)]
    wanted += [f"batch{batch}.value.{name}" for name in sorted(values) for batch in range(batches)]
    if missing := [name for name in wanted if name not in found]:
        raise DeploymentError(f"{path}: has no tensor {missing[0]!r}, but has others of its kind.")
    if not batches:
        raise DeploymentError(f"{path}: is empty; expected the outputs of each batch: batch0.output0 …")
    digests = _digests(path, metadata, batches)
    said = "" if digests else "; the file does not identify their inputs"
    known = path, counts, digests, (f"{path.name}: outputs recorded elsewhere{said}",)
    return RecordedValues(*known, names=values) if values else RecordedOutputs(*known)


def order_of(expected: Sequence[Tensor], found: Sequence[Tensor]) -> tuple[int, ...]:
    """Which of the values that were found is which that was expected; their own order unless all others fit better.

    One that is taken for another must have an SQNR of 3 dB.
    """

    def fit(want: Tensor, got: Tensor) -> float:
        if want.shape != got.shape or want.dtype != got.dtype:
            return -math.inf
        sqnr = error_sums(want, got).sqnr
        return -math.inf if math.isnan(sqnr) else sqnr

    own, order = tuple(range(len(found))), list[int]()
    for want in expected:
        order.append(max((place for place in own if place not in order), key=lambda place: fit(want, found[place])))
    moved = [place for place in own if order[place] != place]
    better = all(
        fit(expected[place], found[order[place]]) > max(3.0, fit(expected[place], found[place])) for place in moved
    )
    return tuple(order) if better else own


def _digests(path: Path, metadata: Mapping[str, str], batches: int) -> tuple[str, ...]:
    if METADATA not in metadata:
        return ()
    try:
        found = tuple(str(batch["digest"]) for batch in json.loads(metadata[METADATA]))
    except (ValueError, TypeError, KeyError) as error:
        raise DeploymentError(
            f"{path}: its metadata {METADATA!r} is not that of recorded inputs ({type(error).__name__}: {error})."
        ) from error
    if len(found) != batches:
        raise DeploymentError(
            f"{path}: has the outputs of {counted(batches, 'batch', 'batches')}; inputs were recorded for {len(found)}."
        )
    return found


@torch_defaults
def record_inputs(
    model: QuantizedPair | Capture,
    batches: Iterable[Any],
    path: str | os.PathLike[str],
    *,
    inputs_of: Callable[[Any], Batch] | None = None,
    progress: bool | None = None,
) -> None:
    """Writes the inputs that a device must run, for a backend that cannot run here, as one safetensors file.

    The tensors are ``batch0.input0``, ``batch0.input1`` …, in the order of the program's inputs.  The metadata entry
    ``pt2qa`` is a JSON list with a dict for each batch: ``inputs`` and ``outputs``, each a list of ``key``, ``name``,
    ``dtype`` and ``shape`` in order (an input that is no tensor has its ``value`` instead of a key, dtype and shape);
    and ``digest``, which identifies the inputs.  On the device, for a ``.pte``::

        import json
        import torch
        from executorch.runtime import Runtime
        from safetensors import safe_open
        from safetensors.torch import save_file

        program = Runtime.get().load_program("model.pte")
        method, outputs = program.load_method("forward"), {}
        with safe_open("inputs.safetensors", "pt") as file:
            metadata = file.metadata()
            for batch in json.loads(metadata["pt2qa"]):
                values = [file.get_tensor(i["key"]) if "key" in i else i["value"] for i in batch["inputs"]]
                tensors = [value for value in method.execute(values) if isinstance(value, torch.Tensor)]
                outputs |= {o["key"]: value for o, value in zip(batch["outputs"], tensors)}
        save_file(outputs, "outputs.safetensors", metadata)

    ``pt2qa.compare_deployed(pair, batches, deployed="outputs.safetensors")`` compares them, and checks by the digests
    that ``batches`` are the same.  Without the metadata, it compares all the same.  The file may also have
    ``batch0.value.OP``, the value inside of an op, in floats, by the name that reports give the op.

    Args:
        model: a pair, or the capture that it was made from.
        batches: iterable of batches, consumed once.
        path: the file, written atomically.
        inputs_of: maps an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        progress: whether to show progress; None: if stderr is a terminal.

    Raises:
        BatchError: there is no batch, or one does not match the captured inputs.
        ReportError: the file cannot be written.
        KeyboardInterrupt: the file is then not written.

    >>> import tempfile
    >>> from safetensors import safe_open
    >>> capture = pt2qa.capture(torch.nn.Linear(4, 2).eval(), torch.ones(1, 4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pt2qa.record_inputs(capture, [torch.ones(1, 4)], f"{folder}/inputs.safetensors")
    ...     with safe_open(f"{folder}/inputs.safetensors", "pt") as file:
    ...         list(file.keys())
    ['batch0.input0']
    """
    recording = _Recording(model)
    data = Data("batches", batches, inputs_of, progress=progress)
    if accumulate(recording, data, title="record inputs", purpose="record"):
        raise KeyboardInterrupt
    write_atomic(path, to_bytes(recording.tensors, {METADATA: json.dumps(recording.told)}))


class _Recording:
    def __init__(self, model: QuantizedPair | Capture) -> None:
        self.capture = model.capture if isinstance(model, QuantizedPair) else model
        self.graph: GraphModule = model.reference if isinstance(model, QuantizedPair) else model.module()
        self.names = [node.name for node in self.graph.graph.find_nodes(op="placeholder")]
        self.tensors: dict[str, Tensor] = {}
        self.told: list[dict[str, Any]] = []

    @property
    def batches(self) -> int:
        return len(self.told)

    @computes
    def add(self, batch: Batch) -> None:
        args, kwargs = as_call(batch, self.graph)
        if self.capture is not None:
            self.capture.check_batch(args, kwargs)
        values = flatten_batch(self.graph, batch)
        outputs = leaves_of(graph_outputs(self.graph, values))
        number = self.batches
        keys = [f"batch{number}.input{place}" for place in range(len(values))]
        named = zip(tensor_outputs(self.graph).values(), outputs, strict=True)
        told = {
            "digest": digest_of(values),
            "inputs": [_about(*each) for each in zip(keys, self.names, values, strict=True)],
            "outputs": [_about(f"batch{number}.output{place}", *each) for place, each in enumerate(named)],
        }
        # safetensors refuses tensors that share memory.
        self.tensors |= {
            key: value.detach().clone(memory_format=torch.contiguous_format)
            for key, value in zip(keys, values, strict=True)
            if isinstance(value, Tensor)
        }
        self.told.append(told)


def _about(key: str, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"name": name, "value": value}
    return {"key": key, "name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
