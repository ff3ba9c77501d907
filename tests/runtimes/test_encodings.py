"""Encodings beside a float ONNX model: those of its QDQ nodes, and applied, the outputs of the converted graph."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

import pt2qa
from tests.runtimes.nets import NETS, quantized

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

LOST = {
    ("block", "xnnpack"): ("x: node_layer_norm reads it in float, too",),
    ("block", "x86"): ("add: node_add_1 reads it in float, too",),
}

Array = np.ndarray[Any, Any]
Scale = tuple[tuple[float, ...], tuple[int, ...], int]
"""Scales, zero points and the smallest integer."""


def rounded_by_nodes(pair: pt2qa.QuantizedPair, x: Tensor) -> tuple[dict[str, Scale], list[Scale]]:
    """What the QDQ nodes of an export without pt2qa say: by the tensor that is rounded, and of the constants."""
    program = torch.onnx.export(torch.export.export(pair.converted, (x,)), dynamo=True, opset_version=21, verbose=False)
    assert program is not None
    graph = program.model_proto.graph
    constants = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}

    def said(node: Any) -> Scale:
        scale, zero_point = (constants[name].reshape(-1) for name in node.input[1:])
        return tuple(scale.tolist()), tuple(zero_point.tolist()), int(np.iinfo(zero_point.dtype).min)

    def tensor(name: str) -> str:
        node = makers.get(name)
        if node is None or node.op_type != "DequantizeLinear":
            return name
        return tensor(makers[node.input[0]].input[0])

    rounds = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    stored = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in constants]
    found = {tensor(node.input[0]): said(node) for node in rounds}
    of_constants = [scale for name, scale in found.items() if name in constants]
    return {k: v for k, v in found.items() if k not in constants}, [*of_constants, *map(said, stored)]


def decoded(document: dict[str, Any], part: str) -> dict[str, tuple[list[float], list[int]]]:
    """Scales and offsets of a document before version 2.0.0."""
    found = document[part]
    if document["version"] == "1.0.0":
        return {each["name"]: (each["scale"], each["offset"]) for each in found}
    return {name: ([each["scale"] for each in own], [each["offset"] for each in own]) for name, own in found.items()}


def write(pair: pt2qa.QuantizedPair, folder: Path, version: Any = "1.0.0") -> tuple[Any, dict[str, Any]]:
    from pt2qa_onnxruntime import write_encodings

    told = write_encodings(pair, folder, version=version)
    return told, json.loads((folder / "model.encodings").read_text())


def applied(folder: Path, document: dict[str, Any], x: Tensor) -> list[Array]:
    """The outputs of ``model.onnx`` with each encoded tensor rounded as AIMET does: unsigned, plus an offset."""
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    graph = model.graph
    encoded = decoded(document, "activation_encodings")
    for name, (scale, offset) in decoded(document, "param_encodings").items():
        (constant,) = (each for each in graph.initializer if each.name == name)
        value = onnx.numpy_helper.to_array(constant)
        shape = next((1,) * axis + (-1,) + (1,) * (value.ndim - axis - 1) for axis in axes(graph, name))
        scales, offsets = (np.array(each).reshape(shape if len(each) > 1 else ()) for each in (scale, offset))
        integers = np.rint(value / scales)
        again = (integers.clip(offsets, offsets + 2 ** bits(document, name) - 1) * scales).astype(np.float32)
        if name.startswith("dequantize"):  # others are float constants, which the graph rounds as it runs
            np.testing.assert_array_equal(again, value)
        constant.CopyFrom(onnx.numpy_helper.from_array(again, name))
    nodes = []
    for node in (*graph.node,):
        own = onnx.NodeProto()
        own.CopyFrom(node)
        own.input[:] = [f"{name}_rounded" if name in encoded else name for name in node.input]
        nodes.append(own)
    rounding = {}
    for name, ((scale,), (offset,)) in encoded.items():
        for part, value in (("scale", np.float32(scale)), ("zero", np.uint8(-offset))):
            graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), f"{name}_{part}"))
        settings = [f"{name}_scale", f"{name}_zero"]
        rounding[name] = [
            onnx.helper.make_node("QuantizeLinear", [name, *settings], [f"{name}_integers"]),
            onnx.helper.make_node("DequantizeLinear", [f"{name}_integers", *settings], [f"{name}_rounded"]),
        ]
    del graph.node[:]
    graph.node.extend(each for value in graph.input for each in rounding.get(value.name, ()))
    for node in nodes:
        graph.node.extend([node, *(each for name in node.output for each in rounding.get(name, ()))])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {session.get_inputs()[0].name: x.numpy()}))


def axes(graph: Any, name: str) -> list[int]:
    """Where the channels of a weight are, by the op that reads it."""
    found = [node for node in graph.node if name in node.input]
    turned = {each.name: each.i for node in found for each in node.attribute}.get("transB", 0)
    size = next(len(each.dims) for each in graph.initializer if each.name == name)
    known = {"ConvTranspose": 1, "Gemm": 1 - turned, "MatMul": size - 1}
    return [0 if size < 2 else known.get(node.op_type, 0) for node in found]


def bits(document: dict[str, Any], name: str) -> int:
    return next(int(each["bw"]) for each in document["param_encodings"] if each["name"] == name)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86", "tosa"])
@pytest.mark.parametrize("net", NETS)
def test_scales_are_those_of_the_nodes_and_applied_they_give_the_outputs(
    net: str, quantizer: str, tmp_path: Path
) -> None:
    pair, (x, _) = quantized(net, quantizer)
    activations, constants = rounded_by_nodes(pair, x)
    for version in ("0.6.1", "1.0.0"):
        told, document = write(pair, tmp_path / version, version)
        found = decoded(document, "activation_encodings")
        for name, (scale, zero_point, low) in activations.items():
            assert found[name] == (list(scale), [low - each for each in zero_point])
        params = decoded(document, "param_encodings")
        assert sorted(params.values()) == sorted(
            (list(scale), [low - each for each in zero_point]) for scale, zero_point, low in constants
        )
        assert (told.activations, told.params) == (len(found), len(params))
    told, newest = write(pair, tmp_path / "2.0.0", "2.0.0")
    by_name = {each["name"]: each for each in newest["encodings"]}
    for name, ((scale,), (zero_point,), _) in activations.items():
        assert (by_name[name]["y_scale"], by_name[name]["y_zero_point"]) == (scale, zero_point)
    assert told.lost == LOST.get((net, quantizer), ())
    if not told.lost:
        outputs = pair.quantized(x)
        wanted = outputs.values() if isinstance(outputs, dict) else [outputs]
        for value, expected in zip(applied(tmp_path / "1.0.0", document, x), wanted, strict=True):
            assert pt2qa.sqnr(expected, torch.from_numpy(value)) > 80


@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0"])
def test_aimet_loads_them_and_gives_the_outputs(version: str, tmp_path: Path) -> None:
    """Not installed by ``make runtimes``: ``pip install --no-deps aimet-onnx bokeh hvplot``, with what these import."""
    aimet = pytest.importorskip("aimet_onnx.quantsim")
    pair, (x, _) = quantized("cnn", "xnnpack")
    write(pair, tmp_path, version)
    sim = aimet.QuantizationSimModel(onnx.load(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    aimet.load_encodings_to_sim(sim, str(tmp_path / "model.encodings"), strict=False)
    (value,) = sim.session.run(None, {"x": x.numpy()})
    assert pt2qa.sqnr(pair.quantized(x), torch.from_numpy(value)) > 80


class TwoScales(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """Rounds the input of two linears otherwise for each."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        ops = [node for node in model.graph.nodes if node.op == "call_function"]
        for node, scheme in zip(ops, (torch.per_tensor_affine, torch.per_tensor_symmetric), strict=False):
            spec = QuantizationSpec(torch.int8, MinMaxObserver.with_args(eps=2**-12), -128, 127, scheme)
            node.meta["quantization_annotation"] = QuantizationAnnotation({node.args[0]: spec}, _annotated=True)
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        """Nothing to check."""


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def test_what_the_format_cannot_say_is_named(tmp_path: Path) -> None:
    x = torch.rand(5, 4)
    pair = pt2qa.quantize(pt2qa.capture(TwoLinears().eval(), x), TwoScales(), [x])
    told, _ = write(pair, tmp_path)
    assert told.lost == ("x: it is rounded with several scales, and has the encoding of the first",)
    assert str(told).startswith("1 activations and 0 parameters. Not expressed: 1\n  x: it is rounded")
    narrow, _ = quantized("cnn", "x86:reduce_range=true")
    told, _ = write(narrow, tmp_path)
    assert set(told.lost) >= {"x: its integers are limited to 0..127"}
    assert len([each for each in told.lost if "0..127" in each]) == told.activations


def test_what_is_not_exported_or_no_version_is_an_error(tmp_path: Path) -> None:
    dynamic, _ = quantized("cnn", "xnnpack:mode=dynamic")
    with pytest.raises(pt2qa.DeploymentError, match=r"could not export the model: .*choose_qparams"):
        write(dynamic, tmp_path)
    with pytest.raises(pt2qa.DeploymentError, match=r"version: got .1\.0., expected one of 0\.6\.1, 1\.0\.0, 2\.0\.0"):
        write(dynamic, tmp_path, "1.0")
    assert not list(tmp_path.iterdir())


def test_a_write_that_is_interrupted_leaves_both_files_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    pair, _ = quantized("cnn", "x86")
    write(pair, tmp_path, "1.0.0")
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(pair, tmp_path, "2.0.0")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
