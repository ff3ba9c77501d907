"""The inputs that a device must run, in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._ambient import torch_defaults
from pt2qa._capture.program import Capture
from pt2qa._deployed.recorded import METADATA
from pt2qa._deployed.taps import leaves_of, tensor_outputs
from pt2qa._exclusion import computes
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.atomic import write_atomic
from pt2qa._simulator.accumulate import accumulate
from pt2qa._simulator.batches import Batch, as_call, flatten_batch
from pt2qa._simulator.data import Data
from pt2qa._simulator.verification import digest_of, graph_outputs


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
    that ``batches`` are the same.  Without the metadata, it compares all the same.

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

    >>> import tempfile, torch, pt2qa
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
    """The tensors so far, and what is told about each batch."""

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
