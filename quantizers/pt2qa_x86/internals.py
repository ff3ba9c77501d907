"""What this plug-in uses from torch and torchao that has no public name, and how lowered graphs are read."""

from __future__ import annotations

import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule, Node

_CUSTOM: Final = "custom"
_HANDLE: Final = "numeric_debug_handle"
_MARK: Final = "pt2qa_node"


# -- lowering ----------------------------------------------------------------------------------------------------------


def lowered_graph(graph: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """What ``torch.compile`` with freezing compiles: torchao's lowering, with linears on inputs of any dimensions.

    The fusions look for ``aten.reshape`` around a linear whose input has more than two dimensions.  ``torch.compile``
    makes views reshapes before it fuses (``_freeze`` in ``torch/_inductor/freezing.py``); torchao's function does not,
    and leaves these linears in float.  So it is called with that step before its fusions.

    From torch 2.14 on the fusions are torchao's, and only an import of its quantizer registers them.
    """
    import torch
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

    names = lower_pt2e_quantized_to_x86.__globals__
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

    def fuse(module: GraphModule, examples: Sequence[Any]) -> None:
        for node in module.graph.nodes:
            if node.target in views:
                node.target = torch.ops.aten.reshape.default
        names["freezing_passes"](module, examples)

    lower = FunctionType(lower_pt2e_quantized_to_x86.__code__, {**names, "freezing_passes": fuse})
    return lower(graph, tuple(inputs))  # type: ignore[no-any-return]


# -- graphs ------------------------------------------------------------------------------------------------------------


def mark_nodes(graph: GraphModule) -> None:
    """Writes each op's name where exports, decompositions and Inductor's fusions keep it.

    A fused kernel gets the marks of the last op that it replaces, so its mark says which value it computes: each pass
    in ``torchao/quantization/pt2e/inductor_passes/x86.py`` takes over the ``meta`` of the match's output.
    """
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.meta[_CUSTOM] = {**(node.meta.get(_CUSTOM) or {}), _MARK: node.name}


def mark_of(node: Node) -> str:
    """The name that :func:`mark_nodes` gave to the op of which this node has the value; empty if there is none."""
    return str((node.meta.get(_CUSTOM) or {}).get(_MARK, ""))


def kernel_of(node: Node) -> str:
    """The name of oneDNN's kernel that a node calls, such as ``qconv_pointwise``; empty for all other nodes."""
    namespace, _, name = op_of(node).partition("::")
    return name if namespace == "onednn" else ""


def op_of(node: Node) -> str:
    """The name of a node's op with its namespace, such as ``aten::mean``; empty for what is no op."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)


def argument(node: Node, name: str) -> Any:
    """An op's argument by its name in the schema; None if it has no such argument."""
    named = dict(zip((each.name for each in node.target._schema.arguments), node.args, strict=False))  # type: ignore[union-attr]
    return named.get(name)


def written(target: Any) -> frozenset[int]:
    """Positions of the arguments that an op writes to.

    oneDNN adds to the second operand of a fused addition in place.  The schema of its linear does not say so.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return frozenset()
    said = {number for number, each in enumerate(schema.arguments) if each.alias_info and each.alias_info.is_write}
    added = {number for number, each in enumerate(schema.arguments) if each.name in ("qaccum", "other")}
    return frozenset(said | added) if schema.name.startswith("onednn::") else frozenset(said)


# -- compiled packages -------------------------------------------------------------------------------------------------


def is_compiled(path: Path) -> bool:
    """Whether a file is a package of AOTInductor; exported programs have the same suffix.

    Raises:
        ValueError: it is no archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/aotinductor/" in name for name in archive.namelist())
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error


def compiled_package(path: Path) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """A package of AOTInductor as a function of flat inputs, whose shapes, strides and types it checks.

    Packages check nothing unless this variable is set, and read past the end of inputs that are smaller.
    """
    from torch._inductor import aoti_load_package

    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    loader: Any = aoti_load_package(str(path)).loader
    return lambda inputs: loader.boxed_run(list(inputs))


def package_of(path: Path) -> tuple[str, dict[str, Tensor], str]:
    """The C++ code of a package, its constants by their names there, and the instruction set that it is for.

    The library is loaded, and nothing in it is run. It hands out constants by the model's names for them, which several
    have in common, but weights that oneDNN packed in no other way. The others are read where they are stored.
    """
    import ctypes

    import torch

    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = [name for name in archive.namelist() if "/aotinductor/" in name]
        code = {name: archive.read(name).decode() for name in names if name.endswith(".cpp")}
        (wrapper,) = (text for text in code.values() if "constants_info_" in text or "AOTInductorModel::" in text)
        (library,) = (archive.extract(name, folder) for name in names if name.endswith(".so"))
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(library, 1)  # owns its constants
        packed = runner.extract_constants_map(False)
        first, last = (
            ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(library), f"_binary_constants_bin_{end}"))
            for end in ("start", "end")
        )
        data = bytearray(ctypes.string_at(first, last - first))
        constants, at = {}, 0
        for told in _constants_told(wrapper):
            size, dtype = int(told["data_size"]), getattr(torch, told["dtype"].removeprefix("cached_torch_dtype_"))
            if told["layout"].endswith("_strided)"):
                shape, stride = (tuple(map(int, re.findall(r"\d+", told[key]))) for key in ("shape", "stride"))
                found = torch.frombuffer(data, dtype=dtype, offset=at, count=size // dtype.itemsize)
                constants[told["name"]] = found.as_strided(shape, stride)
            else:
                constants[told["name"]] = packed[told["original_fqn"]].to_dense()
            at += size
        (told,) = (json.loads(archive.read(name)) for name in names if name.endswith("wrapper_metadata.json"))
    return "\n".join(code.values()), constants, str(told["AOTI_CPU_ISA"])


def _constants_told(wrapper: str) -> list[dict[str, str]]:
    """What the code of a package says of each constant, in the order in which they are stored."""
    found: dict[int, dict[str, str]] = {}
    for number, key, value in re.findall(r"constants_info_\[(\d+)\]\.(\w+) = (.*);", wrapper):
        found.setdefault(int(number), {})[key] = value.strip('"')
    return [found[number] for number in sorted(found)]
