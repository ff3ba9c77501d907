"""What a ``.pte`` file holds for XNNPACK: kernels with weights, biases, scales, zero points and limits, read unrun.

The delegate's own graph is a flatbuffer behind a header, in ExecuTorch's own schema; constants are named data of the
file. Read with ExecuTorch 1.4.1.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa.errors import DeploymentError
from pt2qa.plugins import attribute_of, op_type
from pt2qa_xnnpack.internals import (
    METHOD,
    delegate_as_json,
    is_channel_dequantize,
    is_dequantize,
    is_quantize,
    program_file,
    rounding_of,
)
from pt2qa_xnnpack.plugin import PRODUCTS
from pt2qa_xnnpack.separation import clamp_of

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "qint8": torch.int8,
    "qcint8": torch.int8,
    "qint32": torch.int32,
    "qcint32": torch.int32,
}
UNLIMITED = (-inf, inf)
FOREIGN = "with the scale of another call, as ExecuTorch holds a shared bias (xnnpack-shared-bias)"
STACKED = "as ExecuTorch holds stacked activations (xnnpack-stacked-activations)"


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a delegate's graph: ``constant`` as it is stored, None for an activation or four-bit weights."""

    dtype: str
    sizes: tuple[int, ...]
    scale: Tensor | None = None
    zero_point: int = 0
    constant: Tensor | None = None

    def __str__(self) -> str:
        told = f"{self.dtype} {self.sizes}"
        if self.scale is None:
            return told
        low, high = float(self.scale.min()), float(self.scale.max())
        return f"{told}, scale {low:.6g}" + (f"..{high:.6g}" if low < high else f", zero point {self.zero_point}")


@dataclass(frozen=True, eq=False)
class Kernel:
    """A node of a delegate's graph; a product has a ``weight``, and ``bias`` as the real values that it adds.

    ``foreign``: its bias was made with the scale of an earlier kernel, whose bias it is, too: a fault of ExecuTorch.
    """

    op: str
    inputs: tuple[Value, ...]
    output: Value
    limits: tuple[float, float] = UNLIMITED
    weight: Value | None = None
    bias: Tensor | None = None
    foreign: bool = False

    def __str__(self) -> str:
        told = f"{self.op}: {'; '.join(map(str, self.inputs))} -> {self.output}"
        told += "" if self.weight is None else f"; weight {self.weight}"
        if self.bias is not None:
            told += f"; bias {float(self.bias.min()):.4g}..{float(self.bias.max()):.4g}"
            told += f", {FOREIGN}" if self.foreign else ""
        return told + ("" if self.limits == UNLIMITED else "; limits {:g}..{:g}".format(*self.limits))


def kernels_of(data: bytes, method: str = METHOD) -> Iterator[Kernel]:
    """The kernels of all XNNPACK delegates of a method of a ``.pte`` file, in order."""
    from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader

    file = program_file(data)
    named = file.named_data
    stored = {} if named is None else {key: named.buffers[entry.buffer_index] for key, entry in named.pte_data.items()}
    (plan,) = (each for each in file.program.execution_plan if each.name == method)
    for delegate in plan.delegates:
        if delegate.id == "XnnpackBackend":
            payload = bytes(file.program.backend_delegate_data[delegate.processed.index].data)
            header = XNNHeader.from_bytes(payload[: XNNHeader.EXPECTED_LENGTH])
            graph = _decoded(payload[header.flatbuffer_offset :][: header.flatbuffer_size])
            yield from _kernels(graph, stored, payload[header.constant_data_offset :])


def _decoded(flatbuffer: bytes) -> dict[str, Any]:
    text = delegate_as_json(flatbuffer)
    # flatc writes numbers that JSON does not have, and Python reads them under another name.
    found: dict[str, Any] = json.loads(
        re.sub(r"(?<=: )\+?(-?)inf\b", r"\1Infinity", re.sub(r"(?<=: )nan\b", "NaN", text))
    )
    for value, scale in zip(found["xvalues"], _scales(flatbuffer), strict=True):
        if scale is not None:
            value["xvalue_union"]["quant_params"]["scale"] = scale
    return found


def _scales(flatbuffer: bytes) -> Iterator[float | None]:
    """The scale of each value that has a single one, read as it is stored: flatc prints six decimals."""

    def number(form: str, at: int) -> Any:
        return struct.unpack_from(f"<{form}", flatbuffer, at)[0]

    def field(table: int, index: int) -> int:
        """Where a table has a field; 0 if it has the default."""
        fields = table - number("i", table)
        offset = number("H", fields + 4 + 2 * index) if 4 + 2 * index < number("H", fields) else 0
        return table + offset if offset else 0

    def target(at: int) -> int:
        return int(at + number("I", at))

    def kind(table: int, index: int) -> int:
        return number("B", at) if (at := field(table, index)) else 0

    values = target(field(target(0), 2))
    for place in range(number("I", values)):
        value = target(values + 4 + 4 * place)
        quantized = target(field(value, 1)) if kind(value, 0) == 2 else 0
        if not quantized or kind(quantized, 1) != 2:  # PerTensorQuant in the union XNNQuantParams
            yield None
            continue
        scale = field(target(field(quantized, 2)), 0)
        yield number("f", scale) if scale else 0.0


def _kernels(graph: Mapping[str, Any], stored: Mapping[str, bytes], after: bytes) -> Iterator[Kernel]:
    blobs = [
        stored.get(each["named_key"], b"") if each.get("named_key") else after[each["offset"] :][: each["size"]]
        for each in graph["constant_data"]
    ]
    values = {value.pop("id_out"): _value(value, blobs) for value in map(_flat, graph["xvalues"])}
    first = dict[int, Tensor]()
    for node in graph["xnodes"]:
        own, given = node["xnode_union"], node.get("output_min_max")
        inputs = [values[own[key]] for key in own if re.fullmatch(r"input\d?_id", key) and own[key] in values]
        weight, bias = values.get(own.get("filter_id")), values.get(own.get("bias_id"))
        limits = (float(given["output_min"]), float(given["output_max"])) if given else UNLIMITED
        op, output = node["xnode_union_type"].removeprefix("XNN"), values[own["output_id"]]
        step = None if bias is None else _step(inputs[0], weight)
        foreign = step is not None and not torch.allclose(
            first.setdefault(own["bias_id"], step), step, rtol=1e-5, atol=0
        )
        yield Kernel(op, tuple(inputs), output, limits, weight, _added(step, weight, bias), foreign)


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    union = value["xvalue_union"]
    return {**union.get("tensor_value", union), "quant": union.get("quant_params")}


def _value(value: Mapping[str, Any], blobs: Sequence[bytes]) -> Value:
    dtype, quant = value["datatype"].removeprefix("xnn_datatype_"), value["quant"] or {}
    sizes, scale = tuple(value["dims"]), None
    if "scale_buffer_idx" in quant and dtype != "qbint4":
        scale = _numbers(blobs[quant["scale_buffer_idx"]], torch.float32)
    elif isinstance(quant.get("scale"), float | int):
        scale = torch.tensor([quant["scale"]], dtype=torch.float32)
    blob = blobs[value["constant_buffer_idx"]]
    constant = _numbers(blob, _DTYPES[dtype]).reshape(sizes) if blob and dtype in _DTYPES else None
    return Value(dtype, sizes, scale, quant.get("zero_point", 0), constant)


def _numbers(blob: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(blob), dtype=dtype)


def _step(source: Value, weight: Value | None) -> Tensor | None:
    """What an integer of a product's bias stands for."""
    if weight is None or weight.scale is None or source.scale is None:
        return None
    return source.scale.double() * weight.scale.double()


def _added(step: Tensor | None, weight: Value | None, bias: Value | None) -> Tensor | None:
    """What a product adds: integers times its own input's and weight's scale, whatever scale they were made with."""
    if bias is None or bias.constant is None or weight is None:
        return None
    return bias.constant.double() * (1 if bias.constant.is_floating_point() or step is None else step)


# -- compared with a converted graph -----------------------------------------------------------------------------------


def differences(data: bytes, graph: GraphModule) -> Iterator[tuple[Node, str, bool]]:
    """What a file holds otherwise than a converted graph, product by product, and whether its lowering made that.

    Raises:
        DeploymentError: it cannot be read, has more products, or weights that are not read here.
    """
    try:
        found = [kernel for kernel in kernels_of(data) if kernel.weight is not None]
    except Exception as error:
        raise DeploymentError(f"its delegates cannot be read: {type(error).__name__}: {error}") from error
    nodes = [node for node in graph.graph.nodes if op_type(node) in PRODUCTS]
    if len(found) > len(nodes):
        raise DeploymentError(
            f"its XNNPACK delegates have {len(found)} convolutions and linears, and the graph {len(nodes)}"
        )
    pairs = _matched(found, nodes, graph)
    for node in nodes:
        kernel = pairs.get(node)
        # A float op may be left to portable kernels.
        weight, _ = _weight(node, graph)
        integers = weight is not None and not weight.is_floating_point()
        lost = ["no kernel has a weight of its shape"] if integers else []
        if told := lost if kernel is None else _told(kernel, node, graph):
            yield node, "; ".join(told), all(each.endswith((FOREIGN, STACKED)) for each in told)
    unread = [kernel for kernel in found if kernel.weight is not None and kernel.weight.constant is None]
    if unread:
        raise DeploymentError(f"{len(unread)} of its {len(found)} weights are not read: {unread[0].weight}")


def _matched(kernels: Sequence[Kernel], nodes: Sequence[Node], graph: GraphModule) -> dict[Node, Kernel]:
    """Which kernel computes which product: by weights, since delegates do not stand in the order of the graph."""
    likely = sorted(
        (*distance, place, number)
        for place, node in enumerate(nodes)
        for number, kernel in enumerate(kernels)
        if (distance := _distance(kernel, node, graph)) is not None
    )
    pairs: dict[Node, Kernel] = {}
    used = set[int]()
    for *_, place, number in likely:
        if nodes[place] not in pairs and number not in used:
            pairs[nodes[place]] = kernels[number]
            used.add(number)
    return pairs


def _distance(kernel: Kernel, node: Node, graph: GraphModule) -> tuple[float, int] | None:
    """The share of weights that differ in a corner, and how much else does if none do; None for another shape."""
    assert kernel.weight is not None
    (expected, _), held = _weight(node, graph), kernel.weight.constant
    if expected is None:
        return 1.0, 0
    if sorted(size for size in kernel.weight.sizes if size > 1) != sorted(size for size in expected.shape if size > 1):
        return None
    if held is None or expected.dtype != held.dtype:
        return 1.0, 0
    corner = (slice(16),) * held.dim()
    share = min(float((each[corner] != held[corner]).double().mean()) for each in _turned(expected, held))
    return share, 0 if share else len(_told(kernel, node, graph))


def _told(kernel: Kernel, node: Node, graph: GraphModule) -> list[str]:
    told = [each for each in (_of_weight(kernel, node, graph), _of_bias(kernel, node, graph)) if each]
    return [*told, *_of_scales(kernel, node), *_of_limits(kernel, node)]


def _weight(node: Node, graph: GraphModule) -> tuple[Tensor | None, Tensor | None]:
    """A product's weight, as integers with their scales if it is rounded; None if it is computed."""
    read: Any = node.args[1]
    rounded = is_channel_dequantize(read) or is_dequantize(read)
    expected = attribute_of(graph, read.args[0] if rounded else read)
    scale = attribute_of(graph, read.args[1]) if rounded else None
    if rounded and scale is None:
        scale = torch.tensor([float(read.args[1])])
    return expected, scale


def _turned(expected: Tensor, held: Tensor) -> list[Tensor]:
    """A weight in each order of its dimensions that has the shape of another."""
    expected = expected.reshape(*expected.shape, *[1] * (held.dim() - expected.dim()))
    turned = (expected.permute(way) for way in itertools.permutations(range(expected.dim())))
    return [each for each in turned if each.shape == held.shape]


def _of_weight(kernel: Kernel, node: Node, graph: GraphModule) -> str:
    expected, scale = _weight(node, graph)
    assert kernel.weight is not None
    held = kernel.weight.constant
    if expected is None or held is None:
        return ""
    alike = _turned(expected, held)
    if not alike or expected.dtype != held.dtype:
        return f"weight {kernel.weight}, here {str(expected.dtype).removeprefix('torch.')} {tuple(expected.shape)}"
    share = min(float((each != held).double().mean()) for each in alike)
    told = f"{share:.1%} of its weights differ" if share else ""
    if not told and scale is not None and kernel.weight.scale is not None:
        ratio = kernel.weight.scale.double().cpu() / scale.double().flatten().cpu()
        told = "" if torch.allclose(ratio, torch.ones_like(ratio), rtol=1e-5) else "its weight's scales differ"
    return told


def _of_bias(kernel: Kernel, node: Node, graph: GraphModule) -> str:
    expected = attribute_of(graph, node.args[2] if len(node.args) > 2 else None)
    if expected is None or kernel.bias is None or expected.shape != kernel.bias.shape:
        return "" if expected is None or kernel.bias is not None else "it has no bias"
    wanted, step = expected.double(), _step(kernel.inputs[0], kernel.weight)
    step = torch.zeros(()) if step is None else step
    if bool(((kernel.bias - wanted).abs() <= 0.51 * step + 1e-6 * wanted.abs()).all()):
        return ""
    factor = float((kernel.bias * wanted).sum() / (wanted**2).sum())
    same = torch.allclose(kernel.bias, factor * wanted, atol=float(kernel.bias.abs().max()) * 1e-2)
    told = f"its bias is held at {factor:.3g} times its value" if same else "its bias differs"
    return f"{told}, {FOREIGN}" if kernel.foreign else told


def _of_scales(kernel: Kernel, node: Node) -> Iterator[str]:
    reader: Any = node
    while reader is not None and not is_quantize(reader):
        readers = list(reader.users)
        reader = readers[0] if len(readers) == 1 and (is_quantize(readers[0]) or clamp_of(readers[0])) else None
    for what, value, own in (("input", kernel.inputs[0], node.args[0]), ("output", kernel.output, reader)):
        expected = rounding_of(own)
        if expected is None or value.scale is None:
            continue
        held = float(value.scale), value.zero_point
        if abs(held[0] / expected.scale - 1) > 1e-5 or held[1] != expected.zero_point:
            yield "its {} has scale {:.6g}, zero point {}, here {:.6g}, {}".format(what, *held, *expected[:2])


def _of_limits(kernel: Kernel, node: Node) -> Iterator[str]:
    expected, reader, stacked = UNLIMITED, next(iter(node.users), None), -1
    while reader is not None and len(reader.all_input_nodes[0].users) == 1 and (own := clamp_of(reader)) is not None:
        expected = min(max(expected[0], own[0]), own[1]), max(min(expected[1], own[1]), own[0])
        reader, stacked = next(iter(reader.users), None), stacked + 1
    # A clamp of its own kernel is another way to compute the same.
    if kernel.limits != UNLIMITED and kernel.limits != expected:
        told = "its limits are {:g}..{:g}, here {:g}..{:g}".format(*kernel.limits, *expected)
        wider = kernel.limits[0] <= expected[0] and kernel.limits[1] >= expected[1]
        yield f"{told}, {STACKED}" if stacked > 0 and wider else told
