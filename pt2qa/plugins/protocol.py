"""What a quantizer plug-in is, any torchao quantizer object as one, and what runs a plug-in's models: a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pt2qa.errors import PluginError
from pt2qa.plugins.backend_spec import BackendSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule


@runtime_checkable
class QuantizerPlugin(Protocol):
    """A configured quantizer: an instance of a frozen dataclass whose fields are its options.

    A package offers a plug-in through an entry point in the group ``pt2qa.quantizers`` that names an *instance with
    default options*; :func:`pt2qa.plugins.quantizer` replaces fields in it. ``name`` equals the entry point's name. A
    field can have a help text: ``field(metadata={"help": "..."})``.

    The following members, for override plans and the structure check, are optional
    (:mod:`pt2qa.plugins.registry` has the defaults):

    - ``levels: ClassVar[tuple[str, ...]]``: the kinds of edit worth trying op by op; by default
      ``("float", "observer")``.
    - ``fusable: ClassVar[tuple[tuple[str, str], ...]]``: pairs of op types, such as ``("conv2d", "hardtanh")``, that
      the backend runs as one kernel although the quantizer rounds between them. Others are refused.
    - ``dynamic_axes(node) -> tuple[int, ...]``: the axes along which the values of a dynamic input share a scale in the
      kernel of the op that reads it, where that is not the whole tensor, counted from the last: ``(-1,)`` for a scale
      for each row. :meth:`pt2qa.QuantizedPair.as_deployed` computes so.
    - ``int32_bias: ClassVar[bool]``: whether kernels with static scales add biases to 32-bit integer sums, which a bias
      can exceed, and not to float ones.
    - ``missing() -> str``: why it cannot quantize here, such as packages that are not installed; empty if it can.
      Commands that take all installed quantizers leave it out.
    - ``takes() -> tuple[str, ...]``: the op types that it quantizes with these options, for the error message if a
      model has none.
    - ``unsupported_reason(kind, node) -> str``: why an op cannot take an edit (``dynamic``, ``int8``, ``int16``,
      ``observer``); empty if it can. ``node`` is a node of the graph that is being annotated.
    - ``quantizer_code(plan, graph, *, qat=False) -> str``: Python source that sets ``quantizer`` to one with a plan's
      edits, for an export flow without pt2qa; if it reads that name first, it is the one that the user configured.
    - ``rules() -> tuple[Rule, ...]``: additional rules of the structure check for this backend.
    - ``spec: ClassVar[BackendSpec]``: what the backend's kernels take, as data, for the check and the conformance kit;
      see :class:`pt2qa.plugins.BackendSpec`.
    - ``quantizer_classes: ClassVar[tuple[str, ...]]``: paths of the torchao quantizers that annotate for this backend.
      An object of one, or of a subclass, that is given in place of the plug-in has its ``spec``, ``rules``, ``backend``
      and all else here that is about the kernels.
    - ``before_convert() -> Callable[[GraphModule], list[tuple[Node, str]]]``: a function that edits a calibrated graph
      in place where the backend would compute something else than the graph says, without changing any number, and
      returns what it did to which op. Its module needs torch alone: printed code has its source.
    - ``backend: ClassVar[Backend]``: lowers converted graphs and runs them, for :func:`pt2qa.compare_deployed`; see
      :class:`pt2qa.plugins.Backend`.

    >>> from dataclasses import dataclass
    >>> from typing import ClassVar
    >>> @dataclass(frozen=True)
    ... class Nothing:
    ...     name: ClassVar[str] = "nothing"
    ...     summary: ClassVar[str] = "leaves every op in float"
    ...     loud: bool = False
    ...
    ...     def build(self, graph, *, qat):
    ...         raise NotImplementedError
    >>> isinstance(Nothing(), QuantizerPlugin)
    True
    """

    @property
    def name(self) -> str:
        """Short name, as users type it."""

    @property
    def summary(self) -> str:
        """One line: what it quantizes, and for which hardware."""

    def build(self, graph: GraphModule, *, qat: bool) -> Any:
        """A torchao ``Quantizer`` for one graph.

        Args:
            graph: the captured float graph, before ``prepare``; only to check names, never to be changed.
            qat: whether the quantizer is for ``prepare_qat_pt2e``.

        Raises:
            PluginError: the backend does not support the options, or they name something that the graph does not have.
        """


@dataclass(frozen=True)
class GenericPlugin:
    """A configured torchao ``Quantizer`` object as a plug-in; its name is the name of its class.

    Args:
        quantizer: an instance of a subclass of ``torchao.quantization.pt2e.quantizer.Quantizer``.

    Raises:
        PluginError: it is a class, or derives from another package's ``Quantizer``. ``prepare_pt2e`` and the quantizer
            must come from the same package, or ``convert_pt2e`` does not see the observers.

    >>> from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer
    >>> GenericPlugin(X86InductorQuantizer()).name
    'X86InductorQuantizer'
    """

    quantizer: Any

    def __post_init__(self) -> None:
        from torchao.quantization.pt2e.quantizer import Quantizer

        if isinstance(self.quantizer, Quantizer):
            return
        if isinstance(self.quantizer, type):
            raise PluginError(
                f"got the class {_path(self.quantizer)}, expected an instance of it: "
                f"write {self.quantizer.__qualname__}() and configure it"
            )
        foreign = [base for base in type(self.quantizer).__mro__ if base.__name__ == "Quantizer"]
        if foreign or hasattr(self.quantizer, "annotate"):
            base = f"derives from {_path(foreign[0])}" if foreign else "does not derive from it"
            raise PluginError(
                f"got {_path(type(self.quantizer))}, expected {_path(Quantizer)}: it {base}. pt2qa prepares with "
                "torchao, and a quantizer of another package would silently leave the model in float; "
                "use this backend's quantizer for torchao"
            )
        raise PluginError(
            f"got {self.quantizer!r} ({_path(type(self.quantizer))}), expected the name of a quantizer plug-in, a "
            "plug-in, or a torchao Quantizer object"
        )

    @property
    def name(self) -> str:
        """The quantizer's class name."""
        return type(self.quantizer).__name__

    @property
    def spec(self) -> BackendSpec | None:
        """What the backend takes, if the quantizer has an attribute ``spec`` that states it."""
        spec = getattr(self.quantizer, "spec", None)
        return spec if isinstance(spec, BackendSpec) else None

    @property
    def summary(self) -> str:
        """Where the quantizer's class comes from."""
        return f"{_path(type(self.quantizer))}, as it was configured"

    def build(self, graph: GraphModule, *, qat: bool) -> Any:
        """The quantizer itself."""
        set_up_for_qat = getattr(getattr(self.quantizer, "global_config", None), "is_qat", None)
        if isinstance(set_up_for_qat, bool) and set_up_for_qat != qat:
            raise PluginError(
                f"{self.name} was configured with is_qat={set_up_for_qat}, but qat={qat} was requested: "
                f"configure it with is_qat={qat}, or quantize with qat={set_up_for_qat}"
            )
        return self.quantizer


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True, slots=True)
class Ran:
    """What a deployed program computed on one batch.

    Attributes:
        outputs: the model's outputs, flat, in the order of the graph's.
        values: the observed values by the name of their node in the converted graph: integers at a quantize node, the
            op's own output at any other.
        changed: whether observing changed the outputs, so that ``values`` are not those of the deployed model.
    """

    outputs: tuple[Tensor, ...]
    values: Mapping[str, Tensor] = field(default_factory=dict)
    changed: bool = False


@runtime_checkable
class DeployedProgram(Protocol):
    """A lowered model that is ready to run.

    Optional: ``differences(graph) -> list[tuple[Node, str]]``: what a program that was made elsewhere holds otherwise
    than a converted graph, by the op of the graph, read without running it; a third element, True, says that lowering
    that very graph makes it so.  It raises DeploymentError if the two cannot be compared.  ``run_alone(inputs) ->
    Ran``: the outputs of a batch, with nothing observed, where that is faster.  ``size: int``: its bytes in a file.
    ``observe(graph, taps)``: of recorded values, once before ``run``: the converted graph and, by the name of each node
    whose value is wanted, that of its op in reports.
    """

    @property
    def taps(self) -> Mapping[str, str]:
        """By the name of each node that was to be observed: why it cannot be; empty if it can."""

    @property
    def delegated(self) -> frozenset[int]:
        """Handles of the ops that the backend's own kernels compute; all others are left to the fallback.

        -1 if they compute all ops without a handle, into which a quantizer may have taken others apart.
        """

    @property
    def facts(self) -> tuple[str, ...]:
        """What a reader must know about what ran: instruction set, number of delegates, ops left over."""

    def run(self, inputs: Sequence[Any]) -> Ran:
        """Runs one batch.

        Args:
            inputs: the model's inputs, flat, in the order of the graph's placeholders.

        Raises:
            DeploymentError: the backend failed; the message has its error.
        """

    def save(self, folder: Path) -> None:
        """Writes the program into an empty folder, for :meth:`Backend.load`.

        Raises:
            DeploymentError: programs of this backend cannot be written.
        """


@runtime_checkable
class Backend(Protocol):
    """Lowers converted graphs and runs them: an instance of a frozen dataclass whose fields are its options.

    A plug-in offers one as ``backend``; ``backend="x86:isa=avx2"`` sets its options by text.  Optional: ``inspect(path)
    -> tuple[str, ...]``: what an artefact holds, in lines; ``record(path, inputs) -> tuple[str, ...]``: after writing
    what they need, the commands that run it on a device with a file of :func:`pt2qa.record_inputs`; ``script``: code
    without pt2qa that defines ``deployed(part, inputs)``, which lowers an exported module and returns what it computes
    there, for :func:`pt2qa.reduce`.
    """

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """File suffixes of the artefacts that it can run, such as ``.pte``."""

    @property
    def saves(self) -> bool:
        """Whether its programs can be written to a folder and loaded again."""

    def missing(self) -> str:
        """Why it cannot run on this machine; empty if it can."""

    def lower(
        self,
        graph: GraphModule,
        inputs: Sequence[Any],
        taps: Sequence[str],
        *,
        dynamic_shapes: tuple[Any, ...] | None,
        progress: Callable[[str], None],
    ) -> DeployedProgram:
        """Lowers a converted graph.

        Args:
            graph: the converted graph with flat inputs and a flat tuple of outputs, and handles; a copy, free to edit.
            inputs: an example batch, flat.
            taps: names of the nodes whose values are to be observed.
            dynamic_shapes: for each input, as for ``torch.export.export``; None if all sizes are fixed.
            progress: is told what is being done now.

        Raises:
            DeploymentError: the graph cannot be lowered; the message has the backend's error.
        """

    def load(self, folder: Path) -> DeployedProgram:
        """Reads what :meth:`DeployedProgram.save` wrote.

        Raises:
            DeploymentError: it is damaged or from another backend.
        """

    def open(self, path: Path) -> DeployedProgram:
        """A program that was made elsewhere; nothing in it is observed but its outputs.

        Raises:
            DeploymentError: it cannot be read.
        """
