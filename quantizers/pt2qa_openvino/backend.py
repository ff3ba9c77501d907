"""Converting to OpenVINO's IR, and running the model on its CPU plug-in here.

The plug-in has no tracer.  So a second model is converted that also returns the values to be observed.  It is trusted
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
    from openvino import CompiledModel
    from torch import Tensor
    from torch.fx import GraphModule

MODEL, OBSERVED, INDEX = "model.xml", "observed.xml", "openvino.json"
WEIGHTS = ".bin"


@dataclass(frozen=True, kw_only=True)
class OpenVINOBackend:
    """The kernels of OpenVINO's CPU plug-in; see :class:`pt2qa.plugins.Backend`.

    Args:
        precision: the type in which ops compute that are not on integers, OpenVINO's ``INFERENCE_PRECISION_HINT``.
            ``"auto"``: its own choice, bfloat16 on CPUs that have it. A type that the CPU lacks is replaced by
            OpenVINO; the facts name the one that was taken.
        dynamic_quantization: let OpenVINO quantize the input of a linear that has int8 weights and a float input, in
            groups of 32 values, as it does by default.
        int8_kernels: whether ops compute on integers. Without, each computes in float between two roundings.

    Raises:
        PluginError: an option's value is not one of those above.

    >>> OpenVINOBackend().suffixes
    ('.xml',)
    """

    name: ClassVar[str] = "OpenVINO"
    suffixes: ClassVar[tuple[str, ...]] = (".xml",)
    saves: ClassVar[bool] = True

    precision: Literal["f32", "bf16", "f16", "auto"] = field(
        default="f32", metadata={"help": "type in which ops compute that are not on integers; auto: its choice"}
    )
    dynamic_quantization: bool = field(
        default=False, metadata={"help": "let it quantize the float inputs of linears with int8 weights"}
    )
    int8_kernels: bool = field(default=True, metadata={"help": "whether ops compute on integers; false: all in float"})

    def __post_init__(self) -> None:
        check_options(self)

    def missing(self) -> str:
        """Why models cannot run here; empty if they can."""
        return "" if find_spec("openvino") else "openvino not installed: pip install 'pt2qa[openvino]'"

    def lower(
        self,
        graph: GraphModule,
        inputs: Sequence[Any],
        taps: Sequence[str],
        *,
        dynamic_shapes: tuple[Any, ...] | None,
        progress: Callable[[str], None],
    ) -> OpenVINOProgram:
        """Converts the graph twice, as it is and with the taps as further outputs."""
        from pt2qa_openvino.lowering import lower

        return lower(self, graph, inputs, taps, dynamic_shapes, progress)

    def load(self, folder: Path) -> OpenVINOProgram:
        """Reads a folder that :meth:`OpenVINOProgram.save` wrote."""
        try:
            index = json.loads((folder / INDEX).read_text())
            return OpenVINOProgram(
                self,
                IR.read(folder / MODEL),
                IR.read(folder / OBSERVED),
                tuple(Tap.of(each) for each in index["observed"]),
                {str(name): str(reason) for name, reason in index["lost"].items()},
                frozenset(map(int, index["delegated"])),
                tuple(map(str, index["facts"])),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DeploymentError(
                f"{folder}: not a program that pt2qa saved ({type(error).__name__}: {error}). Lower the model again."
            ) from error

    def open(self, path: Path) -> OpenVINOProgram:
        """An ``.xml`` file that was made elsewhere, with its weights in the ``.bin`` file of the same name."""
        from pt2qa_openvino.kernels import Kernels

        try:
            model = IR.read(path)
        except OSError as error:
            raise DeploymentError(f"{path}: cannot be read: {error}") from error
        program = OpenVINOProgram(self, model)
        try:
            facts = Kernels.of(program).facts
        except DeploymentError as error:
            raise DeploymentError(f"{path}: {error}") from error
        return OpenVINOProgram(self, model, facts=(f"{path.name} {program.signature()}", *facts))

    def inspect(self, path: Path) -> tuple[str, ...]:
        """What an ``.xml`` file holds, and the kernels that OpenVINO makes of it, one a line."""
        from pt2qa_openvino.kernels import Kernels

        program = self.open(path)
        return (*program.facts, *Kernels.of(program).lines)


@dataclass(frozen=True, slots=True)
class IR:
    """A model in OpenVINO's intermediate representation.

    Attributes:
        graph: the bytes of its ``.xml`` file.
        weights: those of its ``.bin`` file.
    """

    graph: bytes = field(default=b"", repr=False)
    weights: bytes = field(default=b"", repr=False)

    @classmethod
    def read(cls, path: Path) -> IR:
        """Reads both files; a model without constants may have one only."""
        weights = path.with_suffix(WEIGHTS)
        return cls(path.read_bytes(), weights.read_bytes() if weights.exists() else b"")

    def write(self, path: Path) -> None:
        """Writes both files."""
        path.write_bytes(self.graph)
        path.with_suffix(WEIGHTS).write_bytes(self.weights)


@dataclass(frozen=True, slots=True)
class Tap:
    """An observed value: OpenVINO returns what its integers stand for.

    Attributes:
        node: the name of its node.
        scale: of its integers; 0.0 if it is a float value.
        zero_point: the integer of 0.0.
        low: the least integer.
        high: the largest.
        dtype: their dtype, such as ``int8``.
    """

    node: str
    scale: float = 0.0
    zero_point: int = 0
    low: int = 0
    high: int = 0
    dtype: str = ""

    @classmethod
    def of(cls, fields: Sequence[Any]) -> Tap:
        """One from :attr:`fields`, as JSON has them."""
        node, scale, zero_point, low, high, dtype = fields
        return cls(str(node), float(scale), int(zero_point), int(low), int(high), str(dtype))

    @property
    def fields(self) -> tuple[Any, ...]:
        """What :meth:`of` takes."""
        return self.node, self.scale, self.zero_point, self.low, self.high, self.dtype

    def value(self, returned: Tensor) -> Tensor:
        """What is observed: the integers at a quantize node."""
        import torch

        if not self.scale:
            return returned
        integers = (returned.double() / self.scale).round_().add_(self.zero_point).clamp_(self.low, self.high)
        dtype: torch.dtype = getattr(torch, self.dtype)
        return integers.to(dtype)


@dataclass(frozen=True)
class OpenVINOProgram:
    """A converted model; see :class:`pt2qa.plugins.DeployedProgram`.

    Attributes:
        backend: the options it runs with.
        model: what ships.
        observed: the model that also returns the tapped values, after its own outputs.
        tapped: the taps, in the order of these outputs.
        lost: by tap, why it cannot be observed.
    """

    backend: OpenVINOBackend
    model: IR
    observed: IR = field(default_factory=IR)
    tapped: tuple[Tap, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    delegated: frozenset[int] = frozenset()
    facts: tuple[str, ...] = ()
    _compiled: dict[IR, CompiledModel] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def taps(self) -> Mapping[str, str]:
        """Why each tap cannot be observed; empty for those that can."""
        return {**{tap.node: "" for tap in self.tapped}, **self.lost}

    @property
    def size(self) -> int:
        """Bytes of the two files that ship."""
        return len(self.model.graph) + len(self.model.weights)

    def run(self, inputs: Sequence[Any]) -> Ran:
        """Runs both models on a batch."""
        outputs = self._execute(self.model, inputs)
        if not self.tapped:
            return Ran(outputs)
        every = self._execute(self.observed, inputs)
        returned = zip(self.tapped, every[len(outputs) :], strict=True)
        values = {tap.node: tap.value(value) for tap, value in returned}
        return Ran(outputs, values, changed=not same_outputs(outputs, every[: len(outputs)]))

    def run_alone(self, inputs: Sequence[Any]) -> Ran:
        """Runs a batch with nothing observed."""
        return Ran(self._execute(self.model, inputs))

    def save(self, folder: Path) -> None:
        """Writes ``model.xml`` and ``observed.xml``, each with its ``.bin``, and an index."""
        self.model.write(folder / MODEL)
        self.observed.write(folder / OBSERVED)
        index = {
            "observed": [tap.fields for tap in self.tapped],
            "lost": dict(self.lost),
            "delegated": sorted(self.delegated),
            "facts": list(self.facts),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1))

    def compiled(self, model: IR) -> CompiledModel:
        """One of the two models, ready to run.

        Raises:
            DeploymentError: OpenVINO does not compile it.
        """
        if model not in self._compiled:
            from pt2qa_openvino.kernels import compiled

            self._compiled[model] = compiled(self.backend, model)
        return self._compiled[model]

    def signature(self) -> str:
        """What the model takes and returns."""
        found = self.compiled(self.model)
        taken, returned = (
            ", ".join(f"{each.element_type.get_type_name()}{each.partial_shape}" for each in side) or "nothing"
            for side in (found.inputs, found.outputs)
        )
        return f"takes {taken} and returns {returned}"

    def _execute(self, model: IR, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        import torch

        found = self.compiled(model)
        given = [each for each in inputs if isinstance(each, torch.Tensor)]
        if len(found.inputs) != len(given):
            raise DeploymentError(
                f"the model takes {len(found.inputs)} tensors, and gets {len(given)}; it {self.signature()}"
            )
        taken = [_given(each.detach().contiguous()) for each in given]
        if any(map(_differ, found.inputs, taken)):  # then OpenVINO would read and write beyond its memory
            got = ", ".join(f"{each.element_type.get_type_name()}{list(each.shape)}" for each in taken)
            raise DeploymentError(f"the model gets {got}; it {self.signature()}")
        try:
            request = found.create_infer_request()
            request.infer(taken)
            return tuple(_taken(request.get_output_tensor(number)) for number in range(len(found.outputs)))
        except Exception as error:  # openvino's are RuntimeError, TypeError and ValueError
            raise DeploymentError(f"OpenVINO could not run the model: {error}; it {self.signature()}") from error


def _given(tensor: Tensor) -> Any:
    """A tensor as OpenVINO takes it; NumPy has no bfloat16."""
    import openvino
    import torch

    if tensor.dtype == torch.bfloat16:
        return openvino.Tensor(tensor.view(torch.int16).numpy(), tensor.shape, openvino.Type.bf16)
    return openvino.Tensor(tensor.numpy())


def _taken(tensor: Any) -> Tensor:
    """A copy of what OpenVINO returns, which shows the bits of bfloat16 as float16."""
    import openvino
    import torch

    found = torch.from_numpy(tensor.data.copy())
    return found.view(torch.bfloat16) if tensor.element_type == openvino.Type.bf16 else found


def _differ(taken: Any, given: Any) -> bool:
    """Whether a tensor is of another type or shape than an input of a model takes."""
    import openvino

    shape = openvino.PartialShape(list(given.shape))
    return taken.element_type != given.element_type or not taken.partial_shape.compatible(shape)


BACKEND = OpenVINOBackend()
