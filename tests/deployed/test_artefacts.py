"""Programs that were made elsewhere, and outputs that a device recorded: only outputs are compared."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import operator
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from math import inf, isnan
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pt2qa
from pt2qa.report import DeployedReport
from pt2qa_xnnpack.backend import XNNPACKBackend
from tests.models import images, residual

DATA = [images(4, seed=1), images(3, seed=2)]


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    shapes = {"x": {0: torch.export.Dim("batch", max=8)}}
    return pt2qa.quantize(pt2qa.capture(residual(), images(4), dynamic_shapes=shapes), "xnnpack", [images(4)])


def lowered(pair: pt2qa.QuantizedPair, path: Path, *args: Tensor, dynamic_shapes: object = None) -> Path:
    """A .pte file, as an export flow without pt2qa makes it."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    program = torch.export.export(pair.quantized, args, dynamic_shapes=dynamic_shapes, strict=False)
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    path.write_bytes(edge.to_executorch().buffer)
    return path


@pytest.fixture(scope="module")
def pte(tmp_path_factory: pytest.TempPathFactory, pair: pt2qa.QuantizedPair) -> Path:
    shapes = ({0: torch.export.Dim("batch", max=8)},)
    return lowered(pair, tmp_path_factory.mktemp("elsewhere") / "model.pte", images(4), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def report(pair: pt2qa.QuantizedPair, pte: Path) -> DeployedReport:
    return pt2qa.compare_deployed(pair, DATA, deployed=pte)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, pair: pt2qa.QuantizedPair) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "inputs.safetensors"
    pt2qa.record_inputs(pair, DATA, path)
    return path


@pytest.fixture(scope="module")
def outputs(inputs: Path, pte: Path) -> Path:
    """What the script of :func:`pt2qa.record_inputs` writes, in a process that imports executorch and safetensors."""
    text = inspect.cleandoc(pt2qa.record_inputs.__doc__ or "").split("for a ``.pte``::\n")[1]
    script = textwrap.dedent(text.split("``pt2qa.compare_deployed")[0])
    checked = f"{script}\nimport sys\nassert not any(name.startswith('pt2qa') for name in sys.modules)\n"
    (inputs.parent / "model.pte").write_bytes(pte.read_bytes())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", checked], cwd=inputs.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return inputs.parent / "outputs.safetensors"


def test_a_program_made_elsewhere_is_compared_by_its_outputs(report: DeployedReport) -> None:
    assert not report.rows
    assert not report.unpaired
    (output,) = report.outputs
    assert output.deployed_sqnr > 20
    assert isnan(output.isolated_sqnr)
    assert report.backend == "ExecuTorch with XNNPACK"
    assert "No intermediate value was observed." in report.summary()


def changed(pair: pt2qa.QuantizedPair, name: str, change: Callable[[Tensor], Tensor]) -> pt2qa.QuantizedPair:
    """A copy of a pair with another constant."""
    graph = copy.deepcopy(pair.quantized)
    value = operator.attrgetter(name)(graph)
    value.data = change(value.data)
    return dataclasses.replace(pair, quantized=graph)


def read(pte: Path, graph: torch.fx.GraphModule) -> list[str]:
    return [what for _, what, _ in XNNPACKBackend().open(pte).differences(graph)]


def test_a_file_of_this_pair_holds_its_numbers(pair: pt2qa.QuantizedPair, pte: Path) -> None:
    assert read(pte, pair.quantized) == []
    shown = XNNPACKBackend().inspect(pte)
    assert any(line.startswith("Conv2d: qint8 ") and "; weight qcint8 " in line for line in shown)
    assert any(line.startswith("FullyConnected: ") and "; bias " in line for line in shown)


def test_a_file_of_other_weights_or_another_calibration_is_told_apart_without_running_it(
    pair: pt2qa.QuantizedPair, pte: Path
) -> None:
    bias = next(
        node.args[2].target
        for node in pair.quantized.graph.nodes
        if "linear" in str(node.target) and len(node.args) > 2
    )
    (told,) = read(pte, changed(pair, bias, lambda value: 2 * value).quantized)
    assert told == "its bias is held at 0.5 times its value"
    weights = [node.target for node in pair.quantized.graph.find_nodes(op="get_attr")]
    weight = next(name for name in weights if operator.attrgetter(name)(pair.quantized).dtype == torch.int8)
    (told,) = read(pte, changed(pair, weight, lambda value: value.clamp(-50, 50)).quantized)
    assert re.fullmatch(r"\d+\.\d% of its weights differ", told)
    capture = pt2qa.capture(residual(), images(4), dynamic_shapes={"x": {0: torch.export.Dim("batch", max=8)}})
    other = pt2qa.quantize(capture, "xnnpack", [3 * images(4)])
    told = read(pte, other.quantized)[0]
    assert "its input has scale " in told
    report = pt2qa.compare_deployed(other, DATA, deployed=pte)
    assert report.facts[-1].startswith("read, not run, it holds something else than this pair, so it was not made from")
    assert "the kernels" not in report.summary()


class Outputs(nn.Module):
    """Two outputs of one shape, and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int, Tensor]:
        return self.first(x), x.shape[0], self.second(x)


def test_outputs_in_another_order_are_matched_by_content_and_sizes_are_left_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    pair = pt2qa.quantize(
        pt2qa.capture(Outputs().eval(), x, dynamic_shapes={"x": {0: torch.export.Dim("rows", max=8)}}), "xnnpack", [x]
    )
    first, size, second = pair.quantized(x)
    assert size == 6
    orders = {"right": (first, second), "with a size": (first, torch.tensor(6), second), "turned": (second, first)}
    for name, outputs in orders.items():
        path = tmp_path / f"{name}.safetensors"
        save_file({f"batch0.output{n}": value.clone() for n, value in enumerate(outputs)}, path)
        report = pt2qa.compare_deployed(pair, [x], deployed=path)
        assert [row.cumulative_sqnr for row in report.outputs] == [inf, inf], name
        assert any("in another order" in note for note in report.notes) == (name == "turned")
    other = (first + 1, second + 1)
    save_file({f"batch0.output{n}": value for n, value in enumerate(other)}, tmp_path / "other.safetensors")
    report = pt2qa.compare_deployed(pair, [x], deployed=tmp_path / "other.safetensors")
    assert not any("in another order" in note for note in report.notes)


def test_a_file_in_a_process_of_its_own_is_run_and_read(
    pair: pt2qa.QuantizedPair, pte: Path, report: DeployedReport
) -> None:
    apart = pt2qa.compare_deployed(pair, DATA, deployed=pte, apart=True)
    assert apart.outputs == report.outputs
    assert apart.facts == report.facts


def plain(model: nn.Module, *args: Tensor) -> torch.fx.GraphModule:
    """What torchao's own flow makes of a model."""
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as own
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = own.XNNPACKQuantizer().set_global(own.get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(torch.export.export(model, args).module(), quantizer)
    prepared(*args)
    converted: torch.fx.GraphModule = convert_pt2e(prepared)
    return converted


def plainly_lowered(graphs: dict[str, tuple[torch.fx.GraphModule, tuple[Tensor, ...]]], path: Path) -> Path:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    programs = {name: torch.export.export(graph, args) for name, (graph, args) in graphs.items()}
    edge = to_edge_transform_and_lower(programs, partitioner=[XnnpackPartitioner()])
    path.write_bytes(edge.to_executorch().buffer)
    return path


class Attention(nn.Module):
    """Its delegates do not stand in the order of its linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.value, self.out = nn.Linear(24, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2) / 5, -1)
        result: Tensor = self.out(weights @ self.value(x)).mean(1)
        return result


def test_kernels_in_another_order_are_found_by_their_weights_in_each_method_of_a_file(
    pair: pt2qa.QuantizedPair, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 6, 24)
    attention = plain(model, x)
    both = plainly_lowered({"encode": (pair.quantized, (images(4),)), "forward": (attention, (x,))}, tmp_path / "m.pte")
    own = pt2qa.quantize(pt2qa.capture(model, x), "xnnpack", [x])
    assert read(both, own.quantized) == []
    report = pt2qa.compare_deployed(own, [x], deployed=both)
    assert "methods: encode, forward" in report.facts[0]
    assert report.facts[-1] == "read, not run, it holds this pair's weights, biases, scales and limits"
    shown = XNNPACKBackend().inspect(both)
    assert any(line.startswith("encode: Conv2d: ") for line in shown)
    assert sum(line.startswith("forward: FullyConnected: ") for line in shown) == 4
    weight = next(node.target for node in own.quantized.graph.find_nodes(op="get_attr") if "frozen" in node.target)
    (told,) = read(both, changed(own, weight, lambda value: value.clamp(-100, 100)).quantized)
    assert re.fullmatch(r"\d+\.\d% of its weights differ", told)
    other = plainly_lowered({"encode": (attention, (x,))}, tmp_path / "other.pte")
    with pytest.raises(pt2qa.DeploymentError, match="has no method 'forward', but encode"):
        pt2qa.compare_deployed(own, [x], deployed=other)


class Twice(nn.Module):
    """A linear that is called twice, with inputs of other scales."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear(x * 0.1)


def test_what_lowering_itself_makes_otherwise_does_not_say_that_the_file_is_of_another_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(8, 16)
    path = plainly_lowered({"forward": (plain(model, x), (x,))}, tmp_path / "model.pte")
    own = pt2qa.quantize(pt2qa.capture(model, x), "xnnpack", [x])
    report = pt2qa.compare_deployed(own, [x], deployed=path)
    assert re.fullmatch(
        r"read, not run, it holds something else than this pair: linear/linear_1: its bias is held at 0\.\d+ times its "
        r"value, with the scale of another call, as ExecuTorch holds a shared bias \(xnnpack-shared-bias\)",
        report.facts[-1],
    )
    shown = XNNPACKBackend().inspect(path)
    assert sum("as ExecuTorch holds a shared bias" in line for line in shown) == 1


def test_weights_of_four_bits_are_not_taken_for_equal(tmp_path: Path) -> None:
    from executorch.backends.xnnpack.recipes.xnnpack_recipe_types import XNNPackRecipeType
    from executorch.export import ExportRecipe, export

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval(), torch.randn(8, 64)
    pair = pt2qa.quantize(pt2qa.capture(model, x), "xnnpack:mode=dynamic", [x])
    recipe = ExportRecipe.get_recipe(XNNPackRecipeType.TORCHAO_INT8_DYNAMIC_ACT_INT4_WEIGHT_PER_TENSOR)
    made = export(model=copy.deepcopy(model), example_inputs=[(x,)], export_recipe=recipe)
    (tmp_path / "four.pte").write_bytes(made.get_pte_buffer())
    report = pt2qa.compare_deployed(pair, [x], deployed=tmp_path / "four.pte")
    told = "not compared with what the pair holds: 2 of its 2 weights are not read: qbint4 (64, 64)"
    assert report.facts[-1] == told


def test_a_model_that_returns_a_size_is_lowered(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    capture = pt2qa.capture(Outputs().eval(), x, dynamic_shapes={"x": {0: torch.export.Dim("rows", max=8)}})
    pair = pt2qa.quantize(capture, "xnnpack", [x])
    shapes = ({0: torch.export.Dim("rows", max=8)},)
    path = lowered(pair, tmp_path / "model.pte", x, dynamic_shapes=shapes)
    report = pt2qa.compare_deployed(pair, [x], deployed=path)
    assert len(report.outputs) == 2


def test_what_the_file_holds_is_told(report: DeployedReport) -> None:
    held, signature, read = report.facts
    assert read == "read, not run, it holds this pair's weights, biases, scales and limits"
    assert held.startswith("model.pte: delegates: 2 XnnpackBackend; ops outside: ")
    assert "aten::mean.out" in held
    assert signature == "model.pte takes float32 up to (8, 3, 8, 8) and returns float32 up to (8, 4)"


def test_a_program_for_other_sizes_says_what_it_takes(pair: pt2qa.QuantizedPair, tmp_path: Path) -> None:
    fixed = lowered(pair, tmp_path / "fixed.pte", images(4))
    with pytest.raises(pt2qa.DeploymentError, match=r"could not run it: .*fixed.pte takes float32 \(4, 3, 8, 8\)"):
        pt2qa.compare_deployed(pair, [images(3)], deployed=fixed)


def test_a_plug_in_that_was_not_used_may_run_the_file(pte: Path, report: DeployedReport) -> None:
    capture = pt2qa.capture(residual(), images(4), dynamic_shapes={"x": {0: torch.export.Dim("batch", max=8)}})
    x86 = pt2qa.quantize(capture, "x86", [images(4)])
    assert pt2qa.compare_deployed(x86, DATA, deployed=pte).backend == report.backend


def test_outputs_recorded_elsewhere_give_the_numbers_of_the_program(
    pair: pt2qa.QuantizedPair, report: DeployedReport, outputs: Path
) -> None:
    recorded = pt2qa.compare_deployed(pair, DATA, deployed=outputs)
    assert recorded.stages == report.stages
    assert recorded.outputs == report.outputs
    assert recorded.backend == "recorded outputs"
    assert recorded.facts == ("outputs.safetensors: outputs recorded elsewhere",)


def test_outputs_without_metadata_are_compared_and_that_is_told(
    pair: pt2qa.QuantizedPair, report: DeployedReport, outputs: Path, tmp_path: Path
) -> None:
    save_file(load_file(outputs), tmp_path / "bare.safetensors")
    recorded = pt2qa.compare_deployed(pair, DATA, deployed=str(tmp_path / "bare.safetensors"))
    assert recorded.outputs == report.outputs
    assert recorded.facts == ("bare.safetensors: outputs recorded elsewhere; the file does not identify their inputs",)


def test_the_file_of_inputs_describes_what_to_run_and_what_to_return(pair: pt2qa.QuantizedPair, inputs: Path) -> None:
    with safe_open(inputs, "pt") as file:
        told = json.loads(file.metadata()["pt2qa"])
        assert sorted(file.keys()) == ["batch0.input0", "batch1.input0"]
        assert torch.equal(file.get_tensor("batch1.input0"), DATA[1])
    assert told[1]["inputs"] == [{"key": "batch1.input0", "name": "x", "dtype": "float32", "shape": [3, 3, 8, 8]}]
    assert told[1]["outputs"] == [{"key": "batch1.output0", "name": "output", "dtype": "float32", "shape": [3, 4]}]


def test_a_capture_and_its_pair_record_the_same(pair: pt2qa.QuantizedPair, inputs: Path, tmp_path: Path) -> None:
    assert pair.capture is not None
    items = ((x, "label") for x in DATA)
    pt2qa.record_inputs(pair.capture, items, tmp_path / "capture.safetensors", inputs_of=lambda item: item[0])
    assert (tmp_path / "capture.safetensors").read_bytes() == inputs.read_bytes()


class Counted(nn.Module):
    """An integer input, a number, and two outputs of different type."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, ids: Tensor, factor: int, x: Tensor) -> dict[str, Tensor]:
        y = self.fc(self.table(ids) * factor + x)
        return {"y": y, "best": y.argmax(-1)}


def test_numbers_among_the_inputs_and_nested_outputs_are_described(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = (torch.arange(5), 2, torch.ones(5, 4))
    capture = pt2qa.capture(Counted().eval(), batch)
    pt2qa.record_inputs(capture, [batch], tmp_path / "inputs.safetensors")
    with safe_open(tmp_path / "inputs.safetensors", "pt") as file:
        (told,) = json.loads(file.metadata()["pt2qa"])
        assert sorted(file.keys()) == ["batch0.input0", "batch0.input2"]
    assert told["inputs"][1] == {"name": "factor", "value": 2}
    assert [(each["key"], each["name"], each["dtype"]) for each in told["outputs"]] == [
        ("batch0.output0", "output.y", "float32"),
        ("batch0.output1", "output.best", "int64"),
    ]


def test_inputs_are_checked_before_anything_is_written(pair: pt2qa.QuantizedPair, tmp_path: Path) -> None:
    path = tmp_path / "inputs.safetensors"
    with pytest.raises(pt2qa.BatchError, match="captured with"):
        pt2qa.record_inputs(pair, [images(2), torch.ones(2, 3, 7, 7)], path)
    with pytest.raises(pt2qa.BatchError, match="no batch to record"):
        pt2qa.record_inputs(pair, [], path)
    with pytest.raises(pt2qa.ReportError, match="create it first"):
        pt2qa.record_inputs(pair, [images(2)], tmp_path / "nowhere" / "inputs.safetensors")
    assert not list(tmp_path.iterdir())


def renamed(found: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {new if name == old else name: value for name, value in found.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: {}, "is empty; expected the outputs of each batch"),
        (lambda found: renamed(found, "batch1.output0", "batch1.input0"), "has a tensor 'batch1.input0'; expected"),
        (
            lambda found: renamed(found, "batch0.output0", "batch2.output0"),
            "has no tensor 'batch0.output0', but has others",
        ),
        (
            lambda found: renamed(found, "batch1.output0", "batch1.output1"),
            "has no tensor 'batch1.output0', but has others",
        ),
        (lambda found: {"batch0.output0": found["batch0.output0"]}, "of 1 batch, but there are more to compare"),
        (lambda found: found | {"batch2.output0": found["batch0.output0"].clone()}, "of 3 batches; 2 were given"),
        (lambda found: found | {"batch0.output1": torch.ones(1)}, "batch 0: the deployed program returned 2 outputs"),
        (
            lambda found: found | {"batch1.output0": found["batch1.output0"].half()},
            r"batch 1, output: the deployed program returned float16 of shape \(3, 4\), the model float32",
        ),
        (
            lambda found: found | {"batch1.output0": found["batch1.output0"][:2].contiguous()},
            r"batch 1, output: the deployed program returned float32 of shape \(2, 4\), the model float32 .* \(3, 4\)",
        ),
    ],
    ids=["empty", "inputs", "no-batch", "no-output", "too-few", "too-many", "two-outputs", "dtype", "shape"],
)
def test_outputs_that_do_not_fit_are_refused(
    pair: pt2qa.QuantizedPair,
    outputs: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    message: str,
) -> None:
    save_file(change(load_file(outputs)), tmp_path / "changed.safetensors")
    with pytest.raises(pt2qa.DeploymentError, match=message):
        pt2qa.compare_deployed(pair, DATA, deployed=tmp_path / "changed.safetensors")


def test_outputs_of_other_inputs_are_refused(pair: pt2qa.QuantizedPair, outputs: Path) -> None:
    with pytest.raises(pt2qa.DeploymentError, match="batch 1 was computed from other inputs"):
        pt2qa.compare_deployed(pair, [DATA[0], images(3, seed=5)], deployed=outputs)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.pte", None, r"gone.pte: no such file. Expected \.pte \(.*\), \.pt2 \(.*\), or \.safetensors"),
        ("model.tflite", b"x", r"model.tflite: no installed backend runs such a file. Expected .*\.pte.*record-inputs"),
        ("model.pte", b"x", "not a .pte file of ExecuTorch"),
        ("model.pt2", b"x", r"model.pt2: (no model that AOTInductor compiled|cannot be read)"),
        ("outputs.safetensors", b"x", "not a safetensors file"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    pair: pt2qa.QuantizedPair, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(pt2qa.DeploymentError, match=message):
        pt2qa.compare_deployed(pair, DATA, deployed=tmp_path / name)


def test_arguments_that_exclude_each_other_are_refused(
    pair: pt2qa.QuantizedPair, outputs: Path, pte: Path, tmp_path: Path
) -> None:
    with pytest.raises(pt2qa.DeploymentError, match="got deployed= and program=, expected one of them"):
        pt2qa.compare_deployed(pair, DATA, deployed=pte, program=tmp_path / "program")
    with pytest.raises(pt2qa.DeploymentError, match=r"omit backend='xnnpack'"):
        pt2qa.compare_deployed(pair, DATA, deployed=outputs, backend="xnnpack")
    with pytest.raises(pt2qa.DeploymentError, match="deployed: got bytes, expected the path"):
        pt2qa.compare_deployed(pair, DATA, deployed=b"model.pte")  # type: ignore[arg-type]


def test_a_backend_that_cannot_run_here_names_the_other_way(
    pair: pt2qa.QuantizedPair, pte: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(XNNPACKBackend, "missing", lambda self: "there is no delegate")
    with pytest.raises(pt2qa.DeploymentError, match=r"cannot run here: there is no delegate\. Run .*record-inputs"):
        pt2qa.compare_deployed(pair, DATA, deployed=pte)


def test_a_file_that_returns_something_else_is_found_by_its_stage(pair: pt2qa.QuantizedPair, outputs: Path) -> None:
    """A device that returns noise: the stage is named, and no op."""
    changed = outputs.with_name("noisy.safetensors")
    save_file({name: value + 10 for name, value in load_file(outputs).items()}, changed)
    report = pt2qa.compare_deployed(pair, DATA, deployed=changed)
    assert report.stage == "deployed"
    assert not report.suspects
    assert isnan(report.outputs[0].isolated_sqnr)
