"""Which ops of a converted graph quantize, and how to read their parameters."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.operator_schemas import normalize_function

from pt2qa._graph.handles import attribute_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import OpOverload, OpOverloadPacket, overload_name
from pt2qa._simulator.program import QuantParams

_NAMESPACES = ("quantized_decomposed", "torchao", "pt2qa")


def _op_name(node: Node) -> str:
    """Name of a quantization op without namespace and overload; empty for every other node."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, (OpOverload, OpOverloadPacket)):
        return ""
    namespace, _, name = str(target).partition(".")
    return name.partition(".")[0] if namespace in _NAMESPACES else ""


def is_quantize(node: Node) -> bool:
    return _op_name(node).startswith("quantize_")


def is_dequantize(node: Node) -> bool:
    return _op_name(node).startswith("dequantize_")


def is_choose_qparams(node: Node) -> bool:
    return _op_name(node).startswith("choose_qparams")


def is_half_cast(node: Node) -> bool:
    """Whether the node is a cast that ``convert`` inserted to store a value in another float type."""
    return _op_name(node) == "convert_element_type"


def is_quantization(node: Node) -> bool:
    """Whether the node belongs to the quantization, not to the model."""
    return is_quantize(node) or is_dequantize(node) or is_choose_qparams(node) or is_half_cast(node)


def serves_quantization(node: Node) -> bool:
    """Whether a node belongs to the quantization, or takes an output of one that does."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, Node) and is_quantization(source)


def is_static_per_tensor(node: Node) -> bool:
    """Whether the whole tensor has one scale and zero point, which are literals of the graph."""
    return _op_name(node).endswith("quantize_per_tensor") and overload_name(_overload(node)) == "default"


def is_dynamic_per_tensor(node: Node) -> bool:
    """Whether the whole tensor has one scale and zero point, which are computed in the graph."""
    return _op_name(node).endswith("quantize_per_tensor") and overload_name(_overload(node)) == "tensor"


def is_plain_dequantize(node: Node) -> bool:
    """Whether the node computes ``(integers - zero_point) * scale`` in float32, per tensor or per channel."""
    name = _op_name(node)
    plain = name == "dequantize_per_channel" or (name == "dequantize_per_tensor" and is_static_per_tensor(node))
    return plain and not node.kwargs


def _overload(node: Node) -> OpOverload:
    """The overload that a node calls; torchao's reference representation leaves out which, and the scale tells."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target
    computed = "tensor" in target.overloads() and any(isinstance(each, Node) for each in node.args[1:])
    return getattr(target, "tensor" if computed else "default")  # type: ignore[no-any-return]


def chosen_by(node: Node) -> Node | None:
    """The ``choose_qparams`` node of a dynamic quantize node, if it reads the same value that is quantized."""
    picks = [arg for arg in node.args[1:] if isinstance(arg, Node) and arg.target is operator.getitem]
    if len(picks) != 2:
        return None
    sources = {pick.args[0] for pick in picks}
    source = sources.pop()
    if sources or not isinstance(source, Node) or not is_choose_qparams(source) or source.args[0] is not node.args[0]:
        return None
    return source if [pick.args[1] for pick in picks] == [0, 1] else None


def read_params(node: Node, constant: Callable[[Node], Any]) -> QuantParams:
    """The parameters of a quantize, dequantize or cast node.

    ``constant`` returns the constant tensor of an argument node, None if it is computed from the batch.
    """
    arguments = normalize_function(_overload(node), node.args, node.kwargs, normalize_to_only_use_kwargs=True)
    named: dict[str, Any] = dict(arguments.kwargs) if arguments is not None else {}
    dtype = next(
        (named[key] for key in ("input_dtype", "dtype", "output_dtype") if isinstance(named.get(key), torch.dtype)),
        None,
    )
    given = named.get("scale", named.get("scales")), named.get("zero_point", named.get("zero_points"))
    scale, zero_point = (constant(value) if isinstance(value, Node) else value for value in given)
    if _op_name(node).endswith("quantize_per_tensor") and isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
        scale, zero_point = float(scale), int(zero_point)
    params = QuantParams(
        dtype=str(dtype).removeprefix("torch."),
        scale=scale,
        zero_point=zero_point,
        quant_min=int(named.get("quant_min") or 0),
        quant_max=int(named.get("quant_max") or 0),
        axis=named.get("axis"),
        dynamic=scale is None and not is_half_cast(node),
        slice_axes=tuple(named.get("axes", ())),
    )
    shape = tuple(node.meta[VALUE].shape) if VALUE in node.meta else ()
    if "block_size" in named:
        return _in_blocks(params, tuple(named["block_size"]), shape)
    if "group_size" in named:
        return _in_blocks(params, (*[1] * (len(shape) - 1), named["group_size"]), shape)
    return params


def _in_blocks(params: QuantParams, block: tuple[Any, ...], shape: tuple[Any, ...]) -> QuantParams:
    """The parameters of a value with a scale for each block: per tensor or per channel where blocks are that.

    An integer type narrower than that of the tensor is named by its range, such as ``int4`` for -8..7.
    """
    levels = params.quant_max - params.quant_min
    narrow = f"{'uint' if params.quant_min >= 0 else 'int'}{levels.bit_length()}"
    params = replace(params, dtype=narrow if 0 < levels.bit_length() < 8 else params.dtype)
    whole = tuple(axis for axis, (size, own) in enumerate(zip(shape, block, strict=True)) if size == own)
    if not isinstance(params.scale, Tensor) or not all(isinstance(size, int) for size in shape):
        unknown = replace(params, scale=None, zero_point=None, dynamic=True)
        return replace(unknown, slice_axes=() if len(whole) == len(shape) else whole)
    blocks = [size // own for size, own in zip(shape, block, strict=True)]
    zero_point = torch.zeros(1) if params.zero_point is None else torch.as_tensor(params.zero_point)
    scale, zero_point = params.scale.reshape(blocks), zero_point.long().broadcast_to(params.scale.shape).reshape(blocks)
    if scale.numel() == 1:
        return replace(params, scale=float(scale), zero_point=int(zero_point))
    channels = [axis for axis, (count, size) in enumerate(zip(blocks, shape, strict=True)) if count == size > 1]
    if len(channels) == 1 and len(whole) == len(shape) - 1:
        return replace(params, scale=scale.flatten(), zero_point=zero_point.flatten(), axis=channels[0])
    return replace(params, scale=scale, zero_point=zero_point, block=block)


def strip_quantization(graph_module: GraphModule) -> GraphModule:
    """A copy of an unfolded converted graph without its quantization: the float graph as ``prepare`` rewrote it.

    Parameters are shared with the argument; the graphs of higher-order ops are stripped as well.
    """
    stripped = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    stripped.meta.update(graph_module.meta)
    for node in list(stripped.graph.nodes):
        nested = attribute_of(stripped, node)
        if isinstance(nested, GraphModule):
            setattr(stripped, str(node.target), strip_quantization(nested))
        elif is_dequantize(node):
            source = node.args[0]
            if isinstance(source, Node) and is_quantize(source):
                node.replace_all_uses_with(source.args[0])
        elif is_half_cast(node):
            node.replace_all_uses_with(node.args[0])
    stripped.graph.eliminate_dead_code(lambda node: node.is_impure() and not is_quantization(node))
    stripped.recompile()
    return stripped
