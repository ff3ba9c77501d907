"""Internals of torch: names without a public equivalent, re-exported (``as``) or wrapped for what pt2qa needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode as detect_fake_mode  # what traced values were made under, to trace one more
from torch._ops import HigherOrderOperator as HigherOrderOperator  # the type of torch.ops.higher_order.cond
from torch._ops import OpOverload as OpOverload  # the type of torch.ops.aten.relu.default; instances are public
from torch._ops import OpOverloadPacket as OpOverloadPacket  # the type of torch.ops.aten.relu
from torch._subclasses import FakeTensor as FakeTensor  # the type of traced values
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the ops of quantized_decomposed
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every op that runs
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass  # holds others
from torch.utils.flop_counter import flop_registry as flop_registry  # by op; FlopCounterMode fails on nested graphs

pytree = _pytree
"""Nested inputs and outputs as flat lists; other libraries do not know the classes that models register."""

BATCHING = "torch._functorch.predispatch"
"""The module of the ops around those that ``torch.vmap`` batches."""

BatchNorm = _BatchNorm
Dropout = _DropoutNd
InstanceNorm = _InstanceNorm
"""The classes that all modules of a kind derive from."""

QUANTIZED_DECOMPOSED = torch.ops.quantized_decomposed
"""The ops that ``convert_pt2e`` writes; torch registers them where a private module is imported."""


def arguments_of(target: object) -> Sequence[Any]:
    """The arguments in an op's schema, with name, type, default and alias; none without a schema, as for Python's add.

    ``torch.library`` writes schemas but cannot read them.
    """
    return target._schema.arguments if isinstance(target, OpOverload) else ()


def results_of(target: OpOverload) -> Sequence[Any]:
    return target._schema.returns


def version_of(value: Tensor) -> int:
    """How often the memory of a tensor was written to, through views as well: autograd counts it."""
    return value._version


def is_mutable(target: OpOverload) -> bool:
    return bool(target._schema.is_mutable)


def same_overload(target: OpOverload, name: str) -> OpOverload | None:
    """The overload of another op that has the name of this one: ``add_.Tensor``, ``add``; None if it has none."""
    packet = getattr(getattr(torch.ops, target.namespace), name, None)
    found = getattr(packet, overload_name(target), None)
    return found if isinstance(found, OpOverload) else None


def overload_name(target: OpOverload) -> str:
    """``Tensor`` of ``aten.add.Tensor``."""
    return str(target._overloadname)


def is_composite(target: OpOverload) -> bool:
    """Whether an op is written in terms of others, and may thus return its input itself though its schema denies it."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))


def calling_convention(graph_module: GraphModule) -> _PyTreeInfo | None:
    """How a graph of ``torch.export`` is called: ``orig_args``, the names of its inputs, ``in_spec`` and ``out_spec``.

    None for a graph whose inputs and outputs are not nested, as ``torch.fx`` makes it; ``call_spec`` has the same of an
    exported program, but not of its ``module()``.
    """
    codegen = graph_module.graph._codegen
    return codegen.pytree_info if isinstance(codegen, _PyTreeCodeGen) else None


def with_graph(program: ExportedProgram, graph_module: GraphModule, signature: Any) -> ExportedProgram:
    """A program with another graph and the same parameters, buffers and constants; it cannot be built without this."""
    state, constants = dict(program.state_dict), dict(program.constants)
    return program._update(graph_module, signature, state_dict=state, constants=constants)


def storage_number(tensor: Tensor) -> int:
    """A number for the memory of a tensor, fake ones too, the same for its views; ``data_ptr`` knows no fake memory."""
    return int(tensor.untyped_storage()._cdata)


def size_hint(size: int | torch.SymInt) -> int:
    """A size of the example inputs, without specializing a symbolic one; 1 if it depends on data."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def size_expression(size: torch.SymInt) -> Any:
    """A symbolic size as sympy's expression, which ``ExportedProgram.range_constraints`` knows it by."""
    return size.node.expr


def sizes_of(value: Tensor) -> list[int]:
    """The shape of a traced value, dynamic sizes as in :func:`size_hint`."""
    return [size_hint(size) for size in value.shape]


def dynamic_dimensions(values: Sequence[Any]) -> tuple[Any, ...]:
    """For each traced input, its varying dimensions as ``torch.export.export`` takes them: dimension to ``Dim``.

    Equal sizes share one ``Dim``, with the upper bound that the capture gave it; derived ones are left to torch.
    """
    known: dict[Any, Any] = {}

    def dimension(size: Any) -> Any:
        expression = size.node.expr
        if not expression.is_Symbol:
            return torch.export.Dim.AUTO
        if expression not in known:
            upper = size.node.shape_env.var_to_range[expression].upper
            bound = {"max": int(upper)} if upper.is_Integer else {}
            known[expression] = torch.export.Dim(f"size{len(known)}", **bound)
        return known[expression]

    return tuple(
        {
            number: dimension(size)
            for number, size in enumerate(value.shape if isinstance(value, Tensor) else ())
            if isinstance(size, torch.SymInt)
        }
        for value in values
    )


def is_alone(tensor: Tensor) -> bool:
    """Whether nothing else has the tensor's memory: no view of it, no graph that is to be differentiated."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)  # the tensor, and the name in this function


def instructions_found() -> Mapping[str, bool]:
    """Which instructions for int8 products torch sees on this machine, by the names that Linux gives them."""
    return {"avx512_vnni": torch.cpu._is_vnni_supported(), "amx_int8": torch.cpu._is_amx_tile_supported()}
