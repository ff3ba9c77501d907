"""Lowering to oneDNN's int8 kernels, and running them here.

With ``isa`` both happen in a process of its own: oneDNN reads its limit once, before the first kernel.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pt2qa.errors import DeploymentError
from pt2qa.plugins import DeployedProgram, Ran, check_options

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from pt2qa_x86.artefact import Package

SCRIPT = """\
import os

from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

os.environ["ONEDNN_MAX_CPU_ISA"] = "{isa}"  # read before the first kernel


def deployed(part, inputs):
    return lower_pt2e_quantized_to_x86(part, inputs)(*inputs)
"""

NOT_SAVED = "oneDNN's packed weights cannot be written to a file. Lowering for x86 takes seconds: lower the model again"


@dataclass(frozen=True, kw_only=True)
class X86Backend:
    """Inductor's lowering to oneDNN's int8 kernels; see :class:`pt2qa.plugins.Backend`.

    Args:
        isa: ``"native"``: the instructions of this CPU. ``"avx2"``: no more than AVX2, as on a CPU without VNNI, where
            the int16 sums of two products saturate.

    Raises:
        PluginError: ``isa`` is not one of these.

    >>> X86Backend(isa="avx2").suffixes
    ('.pt2',)
    """

    name: ClassVar[str] = "Inductor with oneDNN"
    suffixes: ClassVar[tuple[str, ...]] = (".pt2",)
    saves: ClassVar[bool] = False

    isa: Literal["native", "avx2"] = field(default="native", metadata={"help": "the instructions that oneDNN may use"})

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def script(self) -> str:
        """Code that lowers and runs a module without pt2qa."""
        return SCRIPT.format(isa="AVX2" if self.isa == "avx2" else "ALL")

    def missing(self) -> str:
        """Why models cannot run here; empty if they can."""
        import torch

        if platform.machine().lower() not in ("x86_64", "amd64"):
            return f"this CPU is no x86 but {platform.machine()}"
        if not torch.backends.mkldnn.is_available():
            return "this build of torch has no oneDNN"
        return ""

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
        # torchao takes seconds to import.
        from pt2qa_x86.internals import mark_nodes
        from pt2qa_x86.lowering import lower
        from pt2qa_x86.process import lower_apart

        mark_nodes(graph)
        if self.isa == "native":
            progress("lowering the model")
            return lower(graph, inputs, taps)
        progress(f"lowering the model in a process with {self.isa.upper()}")
        return lower_apart(graph, inputs, taps, dynamic_shapes, self.isa)

    def load(self, folder: Path) -> DeployedProgram:
        """Refuses: no program is ever saved."""
        raise DeploymentError(f"{folder}: {NOT_SAVED}")

    def open(self, path: Path) -> DeployedProgram:
        """A package that AOTInductor compiled."""
        if self.isa != "native":
            from pt2qa_x86.process import open_apart

            return open_apart(path, self.isa)
        return open_package(path)

    def inspect(self, path: Path) -> tuple[str, ...]:
        """What a package holds, kernel by kernel; see :class:`pt2qa.plugins.Backend`."""
        package = open_package(path).package
        return (f"{path.name}: {'; '.join(package.facts)}", *package.lines)


class HasPackage:
    """What reads the package in a file that AOTInductor compiled."""

    path: Path

    @functools.cached_property
    def package(self) -> Package:
        """What it holds; a DeploymentError if it cannot be read."""
        from pt2qa_x86.artefact import Package

        return Package.read(self.path)

    def differences(self, graph: GraphModule) -> list[tuple[Node, str]]:
        """What it holds otherwise than a converted graph; see :class:`pt2qa.plugins.DeployedProgram`."""
        from pt2qa_x86.artefact import differences

        return list(differences(self.package, graph))


@dataclass(frozen=True)
class CompiledPackage(HasPackage):
    """A model that AOTInductor compiled; see :class:`pt2qa.plugins.DeployedProgram`."""

    path: Path
    call: Callable[[Sequence[Any]], Sequence[Any]] = field(repr=False)
    taps: Mapping[str, str] = field(default_factory=dict)
    delegated: frozenset[int] = frozenset()

    @property
    def facts(self) -> tuple[str, ...]:
        """What ran."""
        from pt2qa_x86.lowering import instruction_set

        try:
            held = self.package.facts
        except DeploymentError:  # which the comparison tells
            held = ()
        return f"{self.path.name}: compiled by AOTInductor", instruction_set(), *held

    def run(self, inputs: Sequence[Any]) -> Ran:
        """Runs the package on a batch; numbers among its inputs are compiled into it."""
        import torch

        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        try:
            return Ran(tuple(self.call(tensors)))
        except Exception as error:
            raise DeploymentError(f"{self.path}: AOTInductor's package failed: {error}") from error

    def save(self, folder: Path) -> None:
        """Refuses: the package is the file."""
        raise DeploymentError(f"{folder}: {self.path} is already a file; give it as deployed={str(self.path)!r}")


def open_package(path: Path) -> CompiledPackage:
    """See :meth:`pt2qa.plugins.Backend.open`."""
    from pt2qa_x86.internals import compiled_package, is_compiled

    try:
        if not is_compiled(path):
            raise DeploymentError(
                f"{path}: no model that AOTInductor compiled. Make one of an exported program: "
                "torch._inductor.aoti_compile_and_package(program, package_path=...)"
            )
        return CompiledPackage(path, compiled_package(path))
    except (OSError, RuntimeError, ValueError) as error:
        raise DeploymentError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
