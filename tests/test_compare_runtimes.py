"""One converted graph on several runtimes: whose kernel is at fault."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.fx import GraphModule

import pt2qa
from pt2qa._deployed.deployment import lowerable
from pt2qa.report import RuntimeReport
from tests.interpreted import Interpreted, Program
from tests.models import images, residual

DATA = [images(4, seed=1), images(3, seed=2)]


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    shapes = {"x": {0: torch.export.Dim("batch", max=8)}}
    return pt2qa.quantize(pt2qa.capture(residual(), images(4), dynamic_shapes=shapes), "xnnpack", [images(4)])


def seven_more(value: Tensor) -> Tensor:
    return (value.short() + 7).clamp(-128, 127).to(torch.int8)


@pytest.fixture(scope="module")
def place(pair: pt2qa.QuantizedPair) -> tuple[str, str]:
    """The quantize node of the second convolution, and the name of its row."""
    observed = next(each for each in lowerable(pair).values if each.owner is not None and "conv2" in each.owner.name)
    assert observed.owner is not None
    return observed.node, observed.owner.name


@pytest.fixture(scope="module")
def report(pair: pt2qa.QuantizedPair, place: tuple[str, str]) -> RuntimeReport:
    backends = {
        "right": Interpreted(),
        "wrong": Interpreted({place[0]: seven_more}),
        "also right": Interpreted(),
        "absent": Interpreted(broken="it has no such op"),
    }
    return pt2qa.compare_runtimes(pair, DATA, backends, metric=lambda model: float(model(DATA[0]).max()))


def test_dynamic_scales_of_one_runtime_are_by_design_and_no_fault_of_any() -> None:
    x = torch.randn(4, 8) * torch.tensor([[0.01], [1.0], [1.0], [100.0]])
    dynamic = pt2qa.quantize(pt2qa.capture(torch.nn.Linear(8, 2).eval(), x), "xnnpack:mode=dynamic", [x])
    backends = {"xnnpack": "xnnpack", "graph": Interpreted()}
    for pair in (dynamic, dynamic.as_deployed()):  # which computes as one of them, and is compared as it was converted
        said = " ".join(pt2qa.compare_runtimes(pair, [x], backends).summary().split())
        assert "linear: 1 of 2 compute what the converted graph says, and xnnpack (" in said
        assert "something else, by design. Cause: its input has a scale for each row" in said
        assert "at fault" not in said


def test_a_planted_fault_is_that_of_its_runtime_and_of_its_op_alone(
    report: RuntimeReport, place: tuple[str, str]
) -> None:
    assert [(row.name, row.differ, row.right) for row in report.rows if row.differ] == [(place[1], ("wrong",), 2)]
    assert report.disagreements == 1
    said = " ".join(report.summary().split())
    others = f"{place[1]}: 2 of 3 compute what the converted graph says"
    assert said.startswith(f"{others}, and wrong (7 LSB) something else: its kernel is at fault.")


def test_each_runtime_has_its_figures_and_the_one_that_fails_its_reason(
    report: RuntimeReport, pair: pt2qa.QuantizedPair
) -> None:
    right, wrong, also, absent = report.runtimes
    assert right.apart == also.apart == float("inf")
    assert wrong.apart < 40
    assert right.sqnr == pytest.approx(pt2qa.compare_deployed(pair, DATA, backend=Interpreted()).sqnr)
    assert (right.different, wrong.different) == (0, 1)
    assert right.observed == right.values == len(report.rows) - 1
    assert (right.bytes, right.batches, right.backend) == (1000, 2, "the graph itself")
    assert 0 < right.seconds < 1
    with torch.no_grad():
        assert right.value == pytest.approx(float(pair.quantized(DATA[0]).max()))
    assert absent.note == "it has no such op"
    assert "absent did not run: it has no such op" in report.summary()


def test_rows_say_what_each_kernel_differs_by(report: RuntimeReport, place: tuple[str, str]) -> None:
    row = next(row for row in report.rows if row.name == place[1])
    assert (row.custom["right LSB"], row.custom["wrong LSB"]) == (0, 7)
    assert row.custom["right dB"] == float("inf")
    assert row.custom["wrong dB"] < 40
    assert "absent LSB" not in row.custom


def test_where_all_differ_no_kernel_is_blamed(pair: pt2qa.QuantizedPair, place: tuple[str, str]) -> None:
    wrong = Interpreted({place[0]: seven_more})
    both = pt2qa.compare_runtimes(pair, DATA, {"a": wrong, "b": wrong})
    assert f"{place[1]}: no runtime computes what the converted graph says: a (7 LSB), b (7 LSB)." in both.summary()
    alone = pt2qa.compare_runtimes(pair, DATA, {"a": wrong, "b": Interpreted(broken="no")})
    assert "no other was observed there" in alone.summary()


def test_a_runtime_that_saw_nothing_there_is_no_witness(pair: pt2qa.QuantizedPair, place: tuple[str, str]) -> None:
    class Blind(Interpreted):
        def lower(self, graph: GraphModule, inputs: Sequence[Any], taps: Sequence[str], **given: Any) -> Program:
            return super().lower(graph, inputs, [name for name in taps if name != place[0]], **given)

    backends = {"right": Interpreted(), "wrong": Interpreted({place[0]: seven_more}), "blind": Blind()}
    said = " ".join(pt2qa.compare_runtimes(pair, DATA, backends).summary().split())
    assert said.startswith(
        f"{place[1]}: 1 of 2 compute what the converted graph says, and wrong (7 LSB) something else"
    )
    assert "its kernel is at fault. Not observed there: blind." in said


def test_where_none_differs_the_error_is_quantization_s(pair: pt2qa.QuantizedPair) -> None:
    report = pt2qa.compare_runtimes(pair, DATA, {"a": Interpreted(), "b": Interpreted()})
    assert report.disagreements == 0
    assert "a, b compute what the converted graph says" in report.summary()
    assert report.grade() == "good"


def test_a_runtime_that_fails_on_a_batch_is_left_out(
    pair: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Program.run

    def failing(self: Program, inputs: list[Tensor]) -> object:
        if self.size == 1 and len(inputs[0]) == 3:
            raise pt2qa.DeploymentError("not for batches of 3")
        return run(self, inputs)

    class Small(Interpreted):
        def lower(self, *args: object, **given: object) -> Program:
            made = super().lower(*args, **given)  # type: ignore[arg-type]
            return Program(made.graph, made.wrong, made.taps, size=1)

    monkeypatch.setattr(Program, "run", failing)
    report = pt2qa.compare_runtimes(pair, DATA, {"a": Interpreted(), "b": Small()})
    assert [each.note for each in report.runtimes] == ["", "not for batches of 3"]
    assert {name for row in report.rows for name in row.custom} == {"a LSB", "a dB"}
    with pytest.raises(pt2qa.DeploymentError, match="b: not for batches of 3"):
        pt2qa.compare_runtimes(pair, DATA, {"b": Small()})


def test_what_cannot_be_compared_is_refused(pair: pt2qa.QuantizedPair) -> None:
    with pytest.raises(pt2qa.SelectionError, match="there is no backend"):
        pt2qa.compare_runtimes(pair, DATA, [])
    with pytest.raises(pt2qa.PluginError, match="no backend is named 'xnpack'; did you mean 'xnnpack'"):
        pt2qa.compare_runtimes(pair, DATA, ["xnpack"])
    with pytest.raises(pt2qa.BatchError, match="no batch"):
        pt2qa.compare_runtimes(pair, [], ["xnnpack"])
    with pytest.raises(pt2qa.DeploymentError, match="a: no such op; b: nor this"):
        pt2qa.compare_runtimes(pair, DATA, {"a": Interpreted(broken="no such op"), "b": Interpreted(broken="nor this")})


def test_a_report_is_saved_and_read(report: RuntimeReport, tmp_path: Path) -> None:
    report.save(tmp_path / "runtimes.safetensors")
    again = pt2qa.load(tmp_path / "runtimes.safetensors")
    assert isinstance(again, RuntimeReport)
    assert again.text(limit=None, width=200) == report.text(limit=None, width=200)


def test_the_command_takes_several_backends(tmp_path: Path) -> None:
    from pt2qa.cli import main

    (tmp_path / "flow.py").write_text(
        "import torch\nfrom torch import nn\nimport pt2qa\n"
        "def flow():\n"
        "    torch.manual_seed(0)\n"
        "    x = torch.randn(4, 8)\n"
        "    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (x,), [x]\n"
    )
    flow, out = f"{tmp_path}/flow.py:flow", f"{tmp_path}/out"
    asked = ["deploy", flow, "-q", "xnnpack", "-b", "xnnpack", "-b", "x86", "-o", out]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert re.search(r"2 runtimes on 1 batch", done.output)
    assert f"pt2qa gate {out}/runtimes.safetensors --require 'disagreements<=0'" in done.stderr
    assert isinstance(pt2qa.load(tmp_path / "out" / "runtimes.safetensors"), RuntimeReport)
    refused = CliRunner().invoke(main, [*asked, "--program", f"{tmp_path}/program"])
    assert refused.exit_code == 2
    assert "give one --backend with --deployed or --program" in refused.output
