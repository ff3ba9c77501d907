"""Exporting to ONNX, and running the model in ONNX Runtime here.

The runtime has no tracer.  So a second model is exported that also returns the values to be observed.  It is trusted
only while its own outputs equal the first one's bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pt2qa.errors import DeploymentError
from pt2qa.plugins import Ran, check_options, same_outputs

if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from torch.fx import GraphModule

MODEL, OBSERVED, INDEX = "model.onnx", "observed.onnx", "onnxruntime.json"
NEEDS = ("onnxruntime", "onnx", "onnxscript")


@dataclass(frozen=True, kw_only=True)
class ONNXRuntimeBackend:
    """ONNX Runtime's CPU kernels, for graphs that ``torch.onnx`` exports; see :class:`pt2qa.plugins.Backend`.

    Args:
        optimization: how far ONNX Runtime may change the graph. ``"all"``: as it ships, with quantized kernels.
            ``"none"``: each node by itself, in float between a dequantize and a quantize node.
        int8_activations: keep int8 values as they are, as on Arm. On x86, ONNX Runtime turns them into uint8 first.

    Raises:
        PluginError: an option's value is not one of those above.

    >>> ONNXRuntimeBackend().suffixes
    ('.onnx',)
    """

    name: ClassVar[str] = "ONNX Runtime"
    suffixes: ClassVar[tuple[str, ...]] = (".onnx",)
    saves: ClassVar[bool] = True

    optimization: Literal["all", "none"] = field(
        default="all", metadata={"help": "how far ONNX Runtime may change the graph; none: no quantized kernels"}
    )
    int8_activations: bool = field(
        default=False, metadata={"help": "keep int8 activations, which it turns into uint8 on x86"}
    )

    def __post_init__(self) -> None:
        check_options(self)

    def missing(self) -> str:
        """Why models cannot run here; empty if they can."""
        absent = [package for package in NEEDS if find_spec(package) is None]
        return f"{', '.join(absent)} not installed: pip install 'pt2qa[onnxruntime]'" if absent else ""

    def lower(
        self,
        graph: GraphModule,
        inputs: Sequence[Any],
        taps: Sequence[str],
        *,
        dynamic_shapes: tuple[Any, ...] | None,
        progress: Callable[[str], None],
    ) -> ONNXRuntimeProgram:
        """Exports the graph twice, as it is and with the taps as further outputs."""
        # torch.onnx takes seconds to import.
        from pt2qa_onnxruntime.lowering import lower

        return lower(self, graph, inputs, taps, dynamic_shapes, progress)

    def load(self, folder: Path) -> ONNXRuntimeProgram:
        """Reads a folder that :meth:`ONNXRuntimeProgram.save` wrote."""
        try:
            index = json.loads((folder / INDEX).read_text())
            return ONNXRuntimeProgram(
                self,
                (folder / MODEL).read_bytes(),
                (folder / OBSERVED).read_bytes(),
                tuple(map(str, index["observed"])),
                {str(name): str(reason) for name, reason in index["lost"].items()},
                frozenset(map(int, index["delegated"])),
                tuple(map(str, index["facts"])),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DeploymentError(
                f"{folder}: not a program that pt2qa saved ({type(error).__name__}: {error}). Lower the model again."
            ) from error

    def open(self, path: Path) -> ONNXRuntimeProgram:
        """An ``.onnx`` file that was made elsewhere, with its weights inside."""
        from pt2qa_onnxruntime.kernels import Kernels

        try:
            data = path.read_bytes()
        except OSError as error:
            raise DeploymentError(f"{path}: cannot be read: {error}") from error
        program = ONNXRuntimeProgram(self, data)
        try:
            facts = Kernels.of(program).facts
        except DeploymentError as error:
            raise DeploymentError(f"{path}: {error}") from error
        return ONNXRuntimeProgram(self, data, facts=(f"{path.name} {program.signature()}", *facts))

    def inspect(self, path: Path) -> tuple[str, ...]:
        """What an ``.onnx`` file holds, and the kernels that ONNX Runtime makes of it, one a line."""
        from pt2qa_onnxruntime.kernels import Kernels

        program = self.open(path)
        return (*program.facts, *Kernels.of(program).lines)


@dataclass(frozen=True)
class ONNXRuntimeProgram:
    """An exported model; see :class:`pt2qa.plugins.DeployedProgram`.

    Attributes:
        backend: the options it runs with.
        model: what ships, as the bytes of an ``.onnx`` file.
        observed: the model that also returns the tapped values, after its own outputs.
        tapped: the taps, in the order of these outputs.
        lost: by tap, why it cannot be observed.
    """

    backend: ONNXRuntimeBackend
    model: bytes = field(repr=False)
    observed: bytes = field(default=b"", repr=False)
    tapped: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    delegated: frozenset[int] = frozenset()
    facts: tuple[str, ...] = ()
    _sessions: dict[bytes, InferenceSession] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def taps(self) -> Mapping[str, str]:
        """Why each tap cannot be observed; empty for those that can."""
        return {**dict.fromkeys(self.tapped, ""), **self.lost}

    @property
    def size(self) -> int:
        """Bytes of the file that ships."""
        return len(self.model)

    def run(self, inputs: Sequence[Any]) -> Ran:
        """Runs both models on a batch."""
        outputs = self._execute(self.model, inputs)
        if not self.tapped:
            return Ran(outputs)
        every = self._execute(self.observed, inputs)
        values = dict(zip(self.tapped, every[len(outputs) :], strict=True))
        return Ran(outputs, values, changed=not same_outputs(outputs, every[: len(outputs)]))

    def run_alone(self, inputs: Sequence[Any]) -> Ran:
        """Runs a batch with nothing observed."""
        return Ran(self._execute(self.model, inputs))

    def save(self, folder: Path) -> None:
        """Writes ``model.onnx``, ``observed.onnx`` and an index."""
        (folder / MODEL).write_bytes(self.model)
        (folder / OBSERVED).write_bytes(self.observed)
        index = {
            "observed": list(self.tapped),
            "lost": dict(self.lost),
            "delegated": sorted(self.delegated),
            "facts": list(self.facts),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1))

    def signature(self) -> str:
        """What the model takes and returns."""
        session = self._session(self.model)
        taken, returned = (
            ", ".join(f"{each.name} {each.type}{each.shape}" for each in side) or "nothing"
            for side in (session.get_inputs(), session.get_outputs())
        )
        return f"takes {taken} and returns {returned}"

    def _session(self, model: bytes) -> InferenceSession:
        if model not in self._sessions:
            from pt2qa_onnxruntime.kernels import session_of

            self._sessions[model] = session_of(self.backend, model)
        return self._sessions[model]

    def _execute(self, model: bytes, inputs: Sequence[Any]) -> tuple[Any, ...]:
        import torch

        session = self._session(model)
        names = [each.name for each in session.get_inputs()]
        given = [each for each in inputs if isinstance(each, torch.Tensor)]
        if len(names) != len(given):
            raise DeploymentError(f"the model takes {len(names)} tensors ({', '.join(names)}), and gets {len(given)}")
        try:
            arrays = [each.detach().contiguous().numpy() for each in given]
            found = session.run(None, dict(zip(names, arrays, strict=True)))
        except Exception as error:  # onnxruntime's have no base of their own
            raise DeploymentError(f"ONNX Runtime could not run the model: {error}; it {self.signature()}") from error
        return tuple(torch.from_numpy(each) for each in found)


BACKEND = ONNXRuntimeBackend()
