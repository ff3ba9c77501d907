"""What a plug-in needs to run its models: it lowers a converted graph to its backend's kernels, and runs these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule


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
    than a converted graph, by the op of the graph, read without running it.  It raises DeploymentError if the two
    cannot be compared.  ``run_alone(inputs) -> Ran``: the outputs of a batch, with nothing observed, where that is
    faster.  ``size: int``: its bytes in a file.
    """

    @property
    def taps(self) -> Mapping[str, str]:
        """By the name of each node that was to be observed: why it cannot be; empty if it can."""

    @property
    def delegated(self) -> frozenset[int]:
        """Handles of the ops that the backend's own kernels compute; all others are left to the fallback."""

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
    -> tuple[str, ...]``: what an artefact holds, in lines.
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
