"""Lowering to TOSA, and running it on Arm's reference model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pt2qa.errors import DeploymentError, PluginError
from pt2qa.plugins import DeployedProgram, check_options
from pt2qa_arm.internals import absent_packages

if TYPE_CHECKING:
    from torch.fx import GraphModule

NOT_SAVED = "the graph around TOSA's delegates is not a file. Lower the model again"
PLAIN = "TOSA-1.0+INT"
WIDE = "TOSA-1.0+INT+int16"


@dataclass(frozen=True, kw_only=True)
class TOSABackend:
    """ExecuTorch's lowering to TOSA, and Arm's reference model of it; see :class:`pt2qa.plugins.Backend`.

    Args:
        specification: the profile of TOSA and its extensions, as Arm's compile specs have it.
        vela: an Ethos-U, such as ``ethos-u55-128``: Vela also compiles the program for it, and the facts have its
            estimate. Empty: it does not.

    Raises:
        PluginError: it is none.

    >>> TOSABackend().specification
    'TOSA-1.0+INT'
    """

    name: ClassVar[str] = "TOSA reference model"
    suffixes: ClassVar[tuple[str, ...]] = ()
    saves: ClassVar[bool] = False

    specification: str = field(default=PLAIN, metadata={"help": "profile of TOSA and its extensions"})

    vela: str = field(default="", metadata={"help": "Ethos-U for which Vela estimates cycles, such as ethos-u55-128"})

    def __post_init__(self) -> None:
        check_options(self)
        check_specification("backend 'tosa'", self.specification)

    def missing(self) -> str:
        """Why models cannot run here; empty if they can."""
        absent = absent_packages()
        return f"{', '.join(absent)} not installed: pip install 'pt2qa[arm]'" if absent else ""

    def lower(
        self,
        graph: GraphModule,
        inputs: Sequence[Any],
        taps: Sequence[str],
        *,
        dynamic_shapes: tuple[Any, ...] | None,
        progress: Callable[[str], None],
    ) -> DeployedProgram:
        """Lowers the graph for the shapes of the example batch; batches of other shapes are lowered when they run."""
        # ExecuTorch takes seconds to import.
        from pt2qa_arm.lowering import lower

        return lower(self.specification, self.vela, graph, inputs, taps, progress)

    def load(self, folder: Path) -> DeployedProgram:
        """Refuses: no program is ever saved."""
        raise DeploymentError(f"{folder}: {NOT_SAVED}")

    def open(self, path: Path) -> DeployedProgram:
        """Refuses: a file has either TOSA alone, without what is around it, or what only a device runs."""
        raise DeploymentError(f"{path}: the TOSA reference model runs what pt2qa lowers, and no files")


def check_specification(who: str, text: str) -> None:
    """Refuses what is no specification of TOSA.

    Raises:
        PluginError: it cannot be read, or it has no integers.
    """
    if text == PLAIN:
        return  # ExecuTorch takes seconds to import
    from executorch.backends.arm.tosa import TosaSpecification

    try:
        integers = TosaSpecification.create_from_string(text).support_integer()
    except ValueError as error:
        raise PluginError(f"{who}: option specification: got {text!r}: {error}. Expected one like {WIDE}") from error
    if not integers:
        raise PluginError(f"{who}: option specification: got {text!r}, which has no integers. Expected one like {WIDE}")


BACKEND = TOSABackend()
