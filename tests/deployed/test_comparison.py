"""The comparison against a backend that computes the converted graph itself, with faults planted into it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

import pt2qa
from pt2qa.plugins import Ran
from pt2qa.report import DeployedReport
from tests.models import Linears, NestedOutputs
from tests.sweep.quantizer import Everything

Fault = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exact:
    """Runs the converted graph; ``faults`` change what a node returns.

    Attributes:
        lost: by node, why its value cannot be observed.
        changes: batches, from 0, in which observing changes the outputs.
        returned: what happens to the outputs.
    """

    faults: Mapping[str, Fault] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[int, ...] = ()
    returned: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda outputs: outputs
    interrupted: bool = False

    name: ClassVar[str] = "exact"
    suffixes: ClassVar[tuple[str, ...]] = ()
    saves: ClassVar[bool] = True

    def missing(self) -> str:
        return ""

    def lower(self, graph: GraphModule, inputs: Sequence[Any], taps: Sequence[str], **_: Any) -> ExactProgram:
        assert self.lost.keys() <= set(taps)
        return ExactProgram(self, graph, {name: self.lost.get(name, "") for name in taps})

    def load(self, folder: Path) -> ExactProgram:
        raise NotImplementedError

    def open(self, path: Path) -> ExactProgram:
        raise NotImplementedError


@dataclass
class ExactProgram:
    backend: Exact
    graph: GraphModule
    taps: Mapping[str, str]
    ran: int = 0
    delegated: frozenset[int] = frozenset()
    facts: tuple[str, ...] = ()

    def run(self, inputs: Sequence[Any]) -> Ran:
        values: dict[str, Tensor] = {}
        faults = self.backend.faults

        class Nodes(Interpreter):
            def run_node(self, node: Node) -> Any:
                result = super().run_node(node)
                values[node.name] = faults[node.name](result) if node.name in faults else result
                return values[node.name]

        with torch.no_grad():
            outputs = self.backend.returned(tuple(Nodes(self.graph).run(*inputs)))
        self.ran += 1
        if self.ran - 1 in self.backend.changes:
            return Ran(outputs, changed=True)
        return Ran(outputs, {name: values[name] for name, why in self.taps.items() if not why})

    def save(self, folder: Path) -> None:
        (folder / "half").write_text("")
        if self.backend.interrupted:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pair(x: Tensor) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    shapes = {"x": {0: torch.export.Dim("rows")}}
    return pt2qa.quantize(pt2qa.capture(Linears().eval(), x, dynamic_shapes=shapes), "xnnpack", [x], progress=False)


def compared(pair: pt2qa.QuantizedPair, *batches: Any, **options: Any) -> DeployedReport:
    return pt2qa.compare_deployed(pair, batches, backend=Exact(**options), progress=False)


INPUT, HIDDEN, LAST = "quantize_per_tensor_default", "quantize_per_tensor_default_1", "quantize_per_tensor_default_2"
NAMES = ["x", "relu", "second/linear"]


def shifted(steps: int) -> Fault:
    return lambda integers: (integers.int() + steps).clamp(-128, 127).to(torch.int8)


def test_equal_kernels(pair: pt2qa.QuantizedPair, x: Tensor) -> None:
    report = compared(pair, x, x[:3])
    assert [row.name for row in report.rows] == NAMES
    assert [row.isolated_max_lsb for row in report.rows] == [0, 0, 0]
    assert report.outputs[0].isolated_sqnr == report.stages[-1].step_sqnr == float("inf")
    assert report.suspects == ()
    assert "The kernels are right: on the same inputs, 3 of 3 integer values are equal bit for bit." in report.summary()


def test_integers_of_a_float16_value_are_read_as_the_graph_reads_them() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).half().float() * 1.3

    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    pair = pt2qa.quantize(pt2qa.capture(Half().eval(), values), Everything(), [values], progress=False)
    assert [row.isolated_max_lsb for row in compared(pair, values).rows] == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_only_the_faulty_kernel_is_accused(pair: pt2qa.QuantizedPair, x: Tensor, place: int) -> None:
    report = compared(pair, x, faults={[INPUT, HIDDEN, LAST][place]: shifted(3)})
    assert [row.isolated_max_lsb for row in report.rows] == [3 * (number == place) for number in range(3)]
    assert [row.name for row in report.suspects] == [NAMES[place]]
    assert f"Op: {NAMES[place]}: its kernel and the converted graph compute different values" in " ".join(
        report.summary().split()
    )


def test_single_steps_that_grow_accuse_nobody(pair: pt2qa.QuantizedPair, x: Tensor) -> None:
    report = compared(pair, x, faults={INPUT: shifted(1)})
    assert report.suspects == ()
    summary = " ".join(report.summary().split())
    assert "2 of 3 integer values are equal bit for bit; the rest is within one LSB, with at most 99 % of" in summary
    assert "only single-LSB differences growing along the graph" in summary


def test_a_value_that_is_not_observed_joins_the_next(pair: pt2qa.QuantizedPair, x: Tensor) -> None:
    report = compared(pair, x, faults={HIDDEN: shifted(30)}, lost={HIDDEN: "out of reach"})
    assert [row.note for row in report.rows] == ["", "out of reach", "measured together with relu, not observed"]
    assert report.rows[2].isolated_max_lsb > 1
    assert report.suspects == ()
    summary = " ".join(report.summary().split())
    assert "The kernels that could be observed are right" in summary
    assert "Not judged, as unobserved roundings lie in between: second/linear." in summary
    assert "Counts: 3 values, 1 not observed" in summary


def test_outputs_behind_the_last_observed_values_are_judged() -> None:
    x = torch.randn(3, 16)
    pair = pt2qa.quantize(pt2qa.capture(NestedOutputs().eval(), x), "xnnpack", [x], progress=False)
    assert compared(pair, x).suspects == ()
    report = compared(pair, x, returned=lambda outputs: (*outputs[:3], ~outputs[3]))
    assert [row.name for row in report.suspects] == ["output.rest[2]"]


def test_a_batch_whose_observation_changes_the_outputs_has_no_inner_values(
    pair: pt2qa.QuantizedPair, x: Tensor
) -> None:
    faulty = {INPUT: shifted(3)}
    report = compared(pair, x, x[:3], faults=faulty, changes=(0,))
    assert report.rows[1:] == compared(pair, x[:3], faults=faulty).rows[1:]
    assert (
        "observing changed the program's outputs on this data: 1 of 2 batches have no intermediate values"
        in report.notes
    )
    nothing = compared(pair, x, changes=(0,))
    assert not any(row.is_measured for row in nothing.rows)
    assert "No intermediate value could be compared." in nothing.summary()


def test_nan_of_the_backend_alone_is_set_apart(pair: pt2qa.QuantizedPair, x: Tensor) -> None:
    def spoiled(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.full_like(each, torch.nan) if len(each) == 3 else each for each in outputs)

    report = compared(pair, x, x[:3], returned=spoiled)
    (apart,) = report.set_apart
    assert (apart.batch, apart.side, apart.what, apart.name) == (1, "deployed", "NaN or infinite", "output")
    assert report.rows == compared(pair, x).rows
    assert "in the deployed program alone, first at output (batch 1)" in report.summary()


def test_empty_batches_are_set_apart_and_not_run(pair: pt2qa.QuantizedPair, x: Tensor) -> None:
    def refuses(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert len(outputs[0]), "an empty batch was run"
        return outputs

    report = compared(pair, x, x[:0], returned=refuses)
    assert [apart.what for apart in report.set_apart] == ["no samples"]
    assert report.rows == compared(pair, x).rows
    with pytest.raises(pt2qa.BatchError, match="every batch is empty"):
        compared(pair, x[:0])


def test_after_an_interrupt_the_report_covers_what_was_finished(pair: pt2qa.QuantizedPair, x: Tensor) -> None:
    def batches() -> Iterator[Tensor]:
        yield x
        raise KeyboardInterrupt

    report = pt2qa.compare_deployed(pair, batches(), backend=Exact(), progress=False)
    assert report.rows == compared(pair, x).rows
    assert "interrupted: covers the 1 batch that was finished" in report.notes


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda outputs: (*outputs, *outputs), r"returned 2 outputs; the model returns 1 \(output\)"),
        (lambda outputs: (outputs[0][:, :1],), r"output: the deployed program returned float32 of shape \(8, 1\)"),
        (lambda outputs: (outputs[0].double(),), r"returned float64 of shape \(8, 4\), the model float32"),
    ],
)
def test_other_outputs_are_refused(pair: pt2qa.QuantizedPair, x: Tensor, returned: Any, message: str) -> None:
    with pytest.raises(pt2qa.DeploymentError, match=message):
        compared(pair, x, returned=returned)


def test_two_threads(pair: pt2qa.QuantizedPair, x: Tensor) -> None:
    found: dict[int, DeployedReport] = {}

    def compare(number: int) -> None:
        found[number] = compared(pair, x, faults={INPUT: shifted(number)})

    threads = [threading.Thread(target=compare, args=(number,)) for number in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, report in found.items():
        assert report.rows == compared(pair, x, faults={INPUT: shifted(number)}).rows
    assert len(found) == 2


# -- the folder --------------------------------------------------------------------------------------------------------


def saved(pair: pt2qa.QuantizedPair, x: Tensor, folder: Path, **options: Any) -> DeployedReport:
    return pt2qa.compare_deployed(pair, [x], backend=Exact(**options), program=folder, progress=False)


def test_an_interrupted_save_leaves_nothing(pair: pt2qa.QuantizedPair, x: Tensor, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        saved(pair, x, tmp_path / "program", interrupted=True)
    assert list(tmp_path.iterdir()) == []


def test_the_one_that_was_written_first_stays(pair: pt2qa.QuantizedPair, x: Tensor, tmp_path: Path) -> None:
    folder = tmp_path / "program"

    @dataclass(frozen=True)
    class Slow(Exact):
        """Another process writes the folder while this one lowers."""

        def lower(self, *args: Any, **options: Any) -> ExactProgram:
            saved(pair, x, folder)
            (folder / "first").touch()
            return super().lower(*args, **options)

    report = pt2qa.compare_deployed(pair, [x], backend=Slow(), program=folder, progress=False)
    assert report.rows
    assert (folder / "first").exists()
    assert list(tmp_path.iterdir()) == [folder]
    assert json.loads((folder / "pt2qa.json").read_text())["backend"] == "exact"


def test_a_folder_that_cannot_be_written_is_refused_before_the_lowering(
    pair: pt2qa.QuantizedPair, x: Tensor, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    @dataclass(frozen=True)
    class Never(Exact):
        def lower(self, *args: Any, **options: Any) -> ExactProgram:
            raise AssertionError("lowered")

    with pytest.raises(pt2qa.DeploymentError, match="the lowered program cannot be written"):
        pt2qa.compare_deployed(pair, [x], backend=Never(), program=tmp_path / "file" / "program", progress=False)
