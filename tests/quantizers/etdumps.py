"""An ETDump, made with executorch's own schema from a run of the edge program, is compared value by value."""

from __future__ import annotations

import copy
import importlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.devtools import Inspector, generate_etrecord, parse_etrecord
from executorch.devtools.etdump import schema_flatcc as schema
from executorch.devtools.etdump.serialize import serialize_to_etdump_flatcc
from executorch.devtools.inspector.numerical_comparator import NumericalComparatorBase
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from executorch.exir.scalar_type import ScalarType
from torch import Tensor, nn
from torch.fx import Interpreter, Node

import pt2qa
from pt2qa.errors import DeploymentError, PluginError

TYPES = {torch.float32: ScalarType.FLOAT, torch.int8: ScalarType.CHAR}


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """The kernels of quantize and dequantize; not at the module's level, which collecting for doctests runs."""
    importlib.import_module("executorch.kernels.quantized")


@dataclass
class Dump:
    """The events of a run, and the buffer of their tensors."""

    buffer: bytearray = field(default_factory=bytearray)
    runs: list[schema.RunData] = field(default_factory=list)

    def add(
        self, values: Sequence[tuple[str, int, Tensor]], outputs: Sequence[Tensor], kernels: Sequence[int] = ()
    ) -> None:
        """A run: name, number and value of each instruction, or of each of a delegate's kernels, and the outputs."""
        ids = kernels or [-1] * len(values)
        events = [self._event(*each, kernel=kernel) for each, kernel in zip(values, ids, strict=True)]
        events += [self._event(None, len(values), value, output=True) for value in outputs]
        self.runs.append(schema.RunData("Execute", len(self.runs), None, events))

    def _event(
        self, name: str | None, number: int, value: Tensor, output: bool = False, kernel: int = -1
    ) -> schema.Event:
        offset = len(self.buffer)
        self.buffer += value.detach().contiguous().numpy().tobytes()
        tensor = schema.Tensor(TYPES[value.dtype], list(value.shape), list(value.stride()), offset)
        entry = schema.Value("Tensor", tensor, None, None, None, None, None, schema.Bool(True) if output else None)
        return schema.Event(None, None, schema.DebugEvent(name, 0, number, kernel, "", entry))

    def save(self, folder: Path) -> None:
        data = serialize_to_etdump_flatcc(schema.ETDumpFlatCC(0, self.runs))
        (folder / "etdump.etdp").write_bytes(struct.pack("<I", len(data)) + data)
        (folder / "debug_output.bin").write_bytes(self.buffer)


class Device(Interpreter):
    """Runs the edge program as the runtime does, instruction by instruction; a fault changes what an op gives."""

    def __init__(self, edge: Any, fault: Callable[[Node, Any], Any]) -> None:
        super().__init__(edge)
        self.fault = fault
        self.found: list[tuple[str, int, Tensor]] = []

    def run_node(self, n: Node) -> Any:
        value = self.fault(n, super().run_node(n))
        if n.op == "call_function" and "view_copy" not in n.name:  # which the runtime has no instruction for
            self.found.append((f"native_call_{n.target._op.name()}", len(self.found), value))
        return value


def state_of(program: torch.export.ExportedProgram) -> list[Tensor]:
    signature, values = program.graph_signature, {**program.state_dict, **program.constants}
    return [values[name] for name in (*signature.parameters, *signature.buffers)]


def right(node: Node, value: Any) -> Any:
    return value


def no_bias(node: Node, value: Any) -> Any:
    return value + 0.5 if node.name == "aten_addmm_default" else value


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, 8, 8) for _ in range(3)]


@pytest.fixture(scope="module")
def pair(batches: list[Tensor]) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.Softmax(-1)).eval()
    return pt2qa.quantize(pt2qa.capture(model, batches[0]), "xnnpack", batches[:1])


@pytest.fixture
def dumped(pair: pt2qa.QuantizedPair, batches: list[Tensor], tmp_path: Path) -> Callable[..., Path]:
    def make(fault: Callable[[Node, Any], Any] = right, runs: int = 2) -> Path:
        exported = torch.export.export(pair.converted, (batches[0],))
        edge = to_edge(exported, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        before = copy.deepcopy(edge)
        generate_etrecord(str(tmp_path / "etrecord.bin"), before, edge.to_executorch())
        program, dump = before.exported_program(), Dump()
        for batch in batches[1 : 1 + runs]:
            device = Device(program.graph_module, fault)
            outputs = device.run(*state_of(program), batch)
            dump.add(device.found, outputs)
        dump.save(tmp_path)
        return tmp_path / "etdump.etdp"

    return make


def compared(pair: pt2qa.QuantizedPair, batches: list[Tensor], path: Path, **how: Any) -> Any:
    return pt2qa.compare_deployed(pair, batches[1:3], deployed=path, progress=False, **how)


def test_the_values_inside_are_compared(
    pair: pt2qa.QuantizedPair, batches: list[Tensor], dumped: Callable[..., Path]
) -> None:
    report = compared(pair, batches, dumped())
    assert report.facts == ("etdump.etdp: 2 runs and 8 values, recorded on a device",)
    assert [(row.op, row.dtype, row.note) for row in report.rows] == [
        *((op, "int8", "") for op in ("input", "relu", "flatten", "linear")),
        ("softmax", "float32", ""),
    ]
    assert all(row.isolated_max_lsb == 0 for row in report.rows[:-1])
    assert report.rows[-1].isolated_sqnr > 120
    assert report.samples == 4
    assert "The kernels are right" in report.summary()


def test_the_op_with_a_fault_is_named(
    pair: pt2qa.QuantizedPair, batches: list[Tensor], dumped: Callable[..., Path]
) -> None:
    path = dumped(no_bias)
    report = compared(pair, batches, path, etrecord=path.with_name("etrecord.bin"))
    backend = pt2qa.plugins.backends()["xnnpack"]
    assert backend.inspect(path) == report.facts  # type: ignore[attr-defined]
    assert [row.op for row in report.suspects] == ["linear"]


def test_further_runs_are_missed_and_recorded_files_are_needed(
    pair: pt2qa.QuantizedPair, batches: list[Tensor], dumped: Callable[..., Path]
) -> None:
    path = dumped(runs=1)
    with pytest.raises(DeploymentError, match="has 1 run of the model, but there are more batches to compare"):
        compared(pair, batches, path)
    path.with_name("debug_output.bin").rename(path.with_name("elsewhere.bin"))
    with pytest.raises(DeploymentError, match=r"need the file '.*debug_output.bin', too: the runner writes it"):
        compared(pair, batches, path)
    with pytest.raises(DeploymentError, match=r"need the file 'none.bin', too: give it as etrecord="):
        compared(pair, batches, path, etrecord="none.bin")
    path.with_name("debug_output.bin").write_bytes(b"")
    path.write_bytes(b"no ETDump")
    with pytest.raises(DeploymentError, match=r"etrecord.bin: not read: "):
        compared(pair, batches, path)


def test_batches_of_several_runs_of_the_runner_are_numbered_files(
    pair: pt2qa.QuantizedPair, batches: list[Tensor], dumped: Callable[..., Path]
) -> None:
    """The runner runs one batch at a time, and writes over what it finds."""
    path = dumped()
    whole = compared(pair, batches, path)
    exported = torch.export.export(pair.converted, (batches[0],))
    program = to_edge(exported, compile_config=EdgeCompileConfig(_check_ir_validity=False)).exported_program()
    for number, batch in enumerate(batches[1:]):
        device, dump = Device(program.graph_module, right), Dump()
        outputs = device.run(*state_of(program), batch)
        dump.add(device.found, outputs)
        dump.save(path.parent)
        path.rename(path.with_name(f"etdump{number}.etdp"))
        path.with_name("debug_output.bin").rename(path.with_name(f"etdump{number}.bin"))
    report = compared(pair, batches, path.with_name("etdump0.etdp"))
    assert report.facts == ("etdump0.etdp: 2 runs and 8 values, recorded on a device",)
    assert str(report.to_pandas()) == str(whole.to_pandas())


def test_it_cannot_be_run_for_a_metric(pair: pt2qa.QuantizedPair, batches: list[Tensor], tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="recorded outputs cannot be run, so metric= has no model"):
        compared(pair, batches, tmp_path / "etdump.etdp", metric=lambda model: 1.0)


def test_an_etrecord_is_for_etdumps(pair: pt2qa.QuantizedPair, batches: list[Tensor], tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"")
    with pytest.raises(PluginError, match="etrecord"):
        compared(pair, batches, tmp_path / "model.pt2", etrecord="etrecord.bin")


def test_another_model_has_none_of_the_values(batches: list[Tensor], dumped: Callable[..., Path]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.Softmax(-1)).eval()
    other = pt2qa.quantize(pt2qa.capture(model, batches[0]), "xnnpack", [3 * batches[0]])
    report = compared(other, batches, dumped())
    assert [row.note for row in report.rows[:4]] == ["not in the ETDump"] * 4


class Sqnr(NumericalComparatorBase):  # type: ignore[misc]  # executorch has no type information
    def element_compare(self, a: Any, b: Any) -> float:
        return float(pt2qa.sqnr(a, b))


def test_our_numbers_in_executorchs_comparison(
    pair: pt2qa.QuantizedPair, batches: list[Tensor], dumped: Callable[..., Path]
) -> None:
    folder = dumped(no_bias, runs=1).parent
    record = parse_etrecord(str(folder / "etrecord.bin"))
    record.update_representative_inputs([[batches[1]]])
    inspector = Inspector(
        str(folder / "etdump.etdp"), etrecord=record, debug_buffer_path=str(folder / "debug_output.bin")
    )
    found = inspector.calculate_numeric_gap(Sqnr())
    finite = {str(ops[:2]): gap for ops, (gap,) in zip(found["aot_ops"], found["gap"], strict=True) if gap < 200}
    assert len(found) == 8
    assert list(finite) == ["['aten_permute_copy_default', 'aten_addmm_default']", "['aten__softmax_default']"]
    assert finite["['aten__softmax_default']"] == pytest.approx(15.109, abs=0.01)


def test_values_inside_a_delegate(pair: pt2qa.QuantizedPair, batches: list[Tensor], tmp_path: Path) -> None:
    """XNNPACK's reports no value; this is what one reports that numbers its kernels, as Qualcomm's does."""
    exported = torch.export.export(pair.converted, (batches[0],))
    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()], generate_etrecord=True)
    record = lowered.to_executorch().get_etrecord()
    program = record.edge_dialect_program
    by_op = {node.name: node.meta.get("debug_handle") for node in program.graph.nodes}
    fused = (by_op["aten_convolution_default"], by_op["aten_relu_default"])
    record._delegate_map["forward"][0]["delegate_map"] = {10: fused, 11: (by_op["aten_linear_default"],)}
    record.save(tmp_path / "etrecord.bin")
    device, dump = Device(program.graph_module, right), Dump()
    outputs = device.run(*state_of(program), batches[1])
    integers = [value for name, _, value in device.found if "::quantize_per_tensor" in name]
    dump.add([("fused conv", 0, integers[1]), ("linear", 0, integers[3])], outputs, kernels=[10, 11])
    dump.save(tmp_path)
    report = pt2qa.compare_deployed(pair, batches[1:2], deployed=tmp_path / "etdump.etdp", progress=False)
    found = [(row.op, row.delegated, row.isolated_max_lsb) for row in report.rows if row.note != "not in the ETDump"]
    assert found == [("relu", True, 0), ("linear", True, 0)]


def test_apart_there_is_nothing_to_run_and_the_values_are_compared(
    pair: pt2qa.QuantizedPair, batches: list[Tensor], dumped: Callable[..., Path]
) -> None:
    path = dumped()
    reports = [pt2qa.compare_deployed(pair, batches[1:], deployed=path, apart=each) for each in (False, True)]
    here, apart = (str(each.to_pandas()) for each in reports)
    assert here == apart
    assert "not in the ETDump" not in {row.note for row in reports[1].rows[:2]}
