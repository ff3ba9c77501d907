"""The scales of a converted graph as encodings, in AIMET's format, beside the float ONNX model whose tensors they name.

Converters such as Qualcomm's take a float model and a list of encodings. Both are made of one export: its pairs of
QuantizeLinear and DequantizeLinear are taken out, and become the encodings of the tensors that they stood at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from pt2qa.errors import DeploymentError
from pt2qa.plugins import write_atomic
from pt2qa_onnxruntime.lowering import exported, limits_of

MODEL, ENCODINGS = "model.onnx", "model.encodings"
Version = Literal["0.6.1", "1.0.0", "2.0.0"]


@dataclass(frozen=True)
class Encodings:
    """What was written.

    Attributes:
        activations: how many tensors with values have an encoding.
        params: how many weights and biases.
        lost: what the format cannot say, by tensor.
    """

    activations: int
    params: int
    lost: tuple[str, ...]

    def __str__(self) -> str:
        said = "".join(f"\n  {each}" for each in self.lost)
        return f"{self.activations} activations and {self.params} parameters. Not expressed: {len(self.lost)}{said}"


@dataclass(frozen=True)
class _Scale:
    """Scales and zero points: one of each, or one for each channel along an axis."""

    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    dtype: np.dtype[Any]
    axis: int | None

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    @property
    def offset(self) -> list[int]:
        """The integer for 0 as formats before 2.0.0 have it: of unsigned integers, negated."""
        return [int(np.iinfo(self.dtype).min) - each for each in self.zero_point]

    @property
    def symmetric(self) -> bool:
        return self.dtype.kind == "i" and not any(self.zero_point)


def write_encodings(
    pair: Any, folder: str | Path, *, version: Version = "1.0.0", args: tuple[Any, ...] | None = None
) -> Encodings:
    """Writes ``model.onnx``, a float model, and ``model.encodings``: the scales of a pair, by the names of its tensors.

    The weights of the model are those that the converted graph computes with, so rounding them again with their
    encodings gives the same integers. ``qairt-converter --input_network model.onnx --quantization_overrides
    model.encodings`` takes both, and so does AIMET.

    Args:
        pair: what :func:`pt2qa.quantize` returned. A plan of overrides alone has no scales: they come with calibration.
        folder: made if it does not exist.
        version: of the format: ``"0.6.1"``, ``"1.0.0"`` or ``"2.0.0"``. Only the last names the axis of channels; the
            others leave it to the op that reads the weight.
        args: example inputs; None: those of the capture.

    Returns:
        How many encodings were written, and what they cannot say.

    Raises:
        DeploymentError: ``torch.onnx`` does not export the graph, as with dynamic scales.
    """
    if version not in get_args(Version):
        raise DeploymentError(f"version: got {version!r}, expected one of {', '.join(get_args(Version))}")
    if args is None and (pair.capture is None or pair.capture.kwargs):
        raise DeploymentError("args: the pair's capture has no positional inputs to export with; pass some as args=")
    program = exported(pair.converted, pair.capture.args if args is None and pair.capture else args or (), None)
    model = program.model_proto
    taken = _Taken(model, limits_of(program.exported_program.graph_module))
    if version != "2.0.0":
        taken.check_axes()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / MODEL, model.SerializeToString())
    write_atomic(folder / ENCODINGS, json.dumps(_document(taken, version), indent=1))
    return Encodings(len(taken.activations), len(taken.params), tuple(taken.lost))


class _Taken:
    """Takes the pairs of QuantizeLinear and DequantizeLinear out of a model, in place."""

    def __init__(self, model: ModelProto, narrow: dict[str, tuple[int, int, Any]]) -> None:
        self.graph = model.graph
        self.constants = {each.name: numpy_helper.to_array(each) for each in self.graph.initializer}
        self.activations: dict[str, _Scale] = {}
        self.params: dict[str, _Scale] = {}
        self.lost: list[str] = []
        makers = {name: node for node in self.graph.node for name in node.output}
        others = [node for node in self.graph.node if node.op_type != "QuantizeLinear"]
        in_float = {name: node.name for node in others for name in node.input}
        in_float |= {output.name: "the model's output" for output in self.graph.output}
        same: dict[str, str] = {}
        kept: list[NodeProto] = []
        for node in others:
            dequantizes = node.op_type == "DequantizeLinear"
            before = makers.get(node.input[0]) if dequantizes else None
            if dequantizes and node.input[0] in self.constants:
                self._hold(node.output[0], self.constants[node.input[0]], self._scale(node))
            elif before is None or before.op_type != "QuantizeLinear":
                node.input[:] = [same.get(name, name) for name in node.input]
                if not self._turned(node):
                    kept.append(NodeProto())
                    kept[-1].CopyFrom(node)
            else:
                own = same.get(before.input[0], before.input[0])
                same[node.output[0]] = own
                self._name(own, self._scale(node))
                if limits := narrow.get(before.output[0]):
                    self.lost.append(f"{own}: its integers are limited to {limits[0]}..{limits[1]}")
        for output in self.graph.output:
            if output.name in same:
                kept.append(helper.make_node("Identity", [same[output.name]], [output.name]))
                self._name(output.name, {**self.params, **self.activations}[same[output.name]])
        both = [name for name in self.activations if name in in_float and name not in same]
        self.lost += [f"{name}: {in_float[name]} reads it in float, too" for name in both]
        del self.graph.node[:]
        self.graph.node.extend(kept)
        used = {name for node in kept for name in node.input}
        unused = [each for each in self.graph.initializer if each.name not in used]
        for each in unused:
            self.graph.initializer.remove(each)
        self.params = {name: scale for name, scale in self.params.items() if name in used}
        known = {name for node in kept for name in node.output} | {each.name for each in self.graph.output}
        values = [each for each in self.graph.value_info if each.name in known]
        del self.graph.value_info[:]
        self.graph.value_info.extend(values)

    def _scale(self, node: NodeProto) -> _Scale:
        scale, zero_point = (self.constants[name].reshape(-1) for name in node.input[1:3])
        (axis,) = [each.i for each in node.attribute if each.name == "axis"] or [1]
        single = len(scale) == 1 and self.constants[node.input[1]].ndim == 0
        return _Scale(tuple(map(float, scale)), tuple(map(int, zero_point)), zero_point.dtype, None if single else axis)

    def _name(self, name: str, scale: _Scale) -> None:
        known = self.params if name in self.constants else self.activations
        if known.setdefault(name, scale) != scale:
            self.lost.append(f"{name}: it is rounded with several scales, and has the encoding of the first")

    def _hold(self, name: str, integers: np.ndarray[Any, Any], scale: _Scale) -> None:
        """A constant in place of integers and their scale."""
        shape = [1] * integers.ndim
        if scale.axis is not None:
            shape[scale.axis] = -1
        zero_point = np.array(scale.zero_point, np.int64).reshape(shape)
        found = (integers.astype(np.int64) - zero_point).astype(np.float32)
        self._add(name, found * np.array(scale.scale, np.float32).reshape(shape), scale)

    def _add(self, name: str, value: np.ndarray[Any, Any], scale: _Scale) -> None:
        self.constants[name], self.params[name] = value, scale
        self.graph.initializer.append(numpy_helper.from_array(value, name))

    def _turned(self, node: NodeProto) -> bool:
        """Whether it is the transpose of a weight: then the constant is turned."""
        if node.op_type != "Transpose" or node.input[0] not in self.params:
            return False
        order = list(next(each.ints for each in node.attribute if each.name == "perm"))
        scale = self.params[node.input[0]]
        axis = None if scale.axis is None else order.index(scale.axis)
        turned = np.ascontiguousarray(self.constants[node.input[0]].transpose(order))
        self._add(node.output[0], turned, _Scale(scale.scale, scale.zero_point, scale.dtype, axis))
        return True

    def check_axes(self) -> None:
        """Tells the weights whose channels are not along the axis that the op that reads them implies."""
        for node in self.graph.node:
            for name in node.input:
                scale = self.params.get(name)
                if scale is None or scale.axis is None or self.constants[name].ndim == 1:
                    continue
                if scale.axis != _channels(node, self.constants[name].ndim):
                    self.lost.append(
                        f"{name}: its channels are along axis {scale.axis}, which {node.op_type} does not imply"
                    )


def _channels(node: NodeProto, dimensions: int) -> int | None:
    """The axis of the output channels in a weight."""
    turned = any(each.name == "transB" and each.i for each in node.attribute)
    return {"Conv": 0, "ConvTranspose": 1, "Gemm": int(not turned), "MatMul": dimensions - 1}.get(node.op_type)


def _document(taken: _Taken, version: Version) -> dict[str, Any]:
    if version == "2.0.0":
        return {"version": version, "encodings": list(_newest({**taken.activations, **taken.params}))}
    make = _named if version == "1.0.0" else _by_name
    return {
        "version": version,
        "activation_encodings": make(taken.activations),
        "param_encodings": make(taken.params),
    }


def _newest(scales: dict[str, _Scale]) -> Iterator[dict[str, Any]]:
    for name, each in scales.items():
        single = each.axis is None
        yield {
            "name": name,
            "output_dtype": str(each.dtype),
            "y_scale": each.scale[0] if single else list(each.scale),
            "y_zero_point": each.zero_point[0] if single else list(each.zero_point),
            **({} if single else {"axis": each.axis}),
        }


def _named(scales: dict[str, _Scale]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "bw": each.bits,
            "dtype": "INT",
            "enc_type": "PER_TENSOR" if each.axis is None else "PER_CHANNEL",
            "is_sym": each.symmetric,
            "scale": list(each.scale),
            "offset": each.offset,
        }
        for name, each in scales.items()
    ]


def _by_name(scales: dict[str, _Scale]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [
            {
                "bitwidth": each.bits,
                "dtype": "int",
                "is_symmetric": str(each.symmetric),
                "max": scale * (offset + 2**each.bits - 1),
                "min": scale * offset,
                "offset": offset,
                "scale": scale,
            }
            for scale, offset in zip(each.scale, each.offset, strict=True)
        ]
        for name, each in scales.items()
    }
