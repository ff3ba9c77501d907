"""What this plug-in reads of ExecuTorch's Arm backend and of traced graphs that has no public name."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.export import ExportedProgram
    from torch.fx import Node

NEEDS: Final = {"executorch": "executorch", "tosa_reference_model": "tosa-tools", "ml_dtypes": "ml_dtypes"}
"""By module, the package that has it.  Without tosa-tools, which also has the serializer, no quantizer is imported."""


def absent_packages() -> list[str]:
    """The packages that are missing; imports none of them."""
    return [package for module, package in NEEDS.items() if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # a finder may refuse it
        return False


def traced(node: Node) -> Any:
    """What a node was traced with: a tensor without data, or what it returns of these; None if it was not."""
    return node.meta.get("val")


def order_of(value: Tensor) -> tuple[int, ...]:
    """The dimensions of a value in the order in which they lie in memory, which is that of a delegate's arrays."""
    return tuple(value.dim_order())


def op_name(node: Node) -> str:
    """The name of an op in the edge dialect, such as ``aten::mean``; empty for delegates and their outputs."""
    schema = getattr(node.target, "_schema", None)
    return "" if node.op != "call_function" or schema is None else str(schema.name)


def watching(compile_spec: Any) -> tuple[Any, dict[Node, str]]:
    """Arm's partitioner, and where it writes why it leaves a node; it only logs that otherwise."""
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner

    rejected: dict[Node, str] = {}

    class Watching(TOSAPartitioner):  # type: ignore[misc]  # executorch has no type information
        def _tag_module(self, module: Any, containing_program: Any, reporter: Any, *rest: Any) -> set[str]:
            tags: set[str] = super()._tag_module(module, containing_program, reporter, *rest)
            rejected.update(reporter._rejected_nodes)
            return tags

    return Watching(compile_spec), rejected


@contextmanager
def prints_into(lines: list[str]) -> Iterator[None]:
    """Collects what native code prints, which would stand amid the output of a command.

    One line is left out, which comes with every run: ExecuTorch writes TOSA 1.0, and the reference model reads 1.1.
    """
    flush = ctypes.CDLL(None).fflush
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    flush(None)
    own = {place: os.dup(place) for place in (1, 2)}
    try:
        with tempfile.TemporaryFile() as printed:
            for place in own:
                os.dup2(printed.fileno(), place)
            try:
                yield
            finally:
                flush(None)
                for place, kept in own.items():
                    os.dup2(kept, place)
                printed.seek(0)
                found = printed.read().decode(errors="replace").splitlines()
                lines += [line for line in found if line and "Different TOSA spec in flatbuffer" not in line]
    finally:
        for kept in own.values():
            os.close(kept)


def outputs_of(program: ExportedProgram) -> Sequence[Node]:
    """What a delegate returns."""
    returned: Sequence[Node] = program.graph.output_node().args[0]
    return returned
