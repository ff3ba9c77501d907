"""The script of the accuracy-tuning kit's manual runs, and its tables have the numbers of the reports."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub, QuantStub

import pt2qa
from pt2qa.compat.tuning_kit import (
    HbirModelProfiler,
    Metric,
    ModelProfiler,
    QuantAnalysis,
    check_qat_model,
    default_qat_qconfig_setter,
    export,
    prepare,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.relu = nn.ReLU()
        self.quant = QuantStub()
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        x = self.quant(x)
        x = self.conv(x)
        x = self.relu(x)
        x = torch.nn.functional.interpolate(x, scale_factor=1.3, mode="bilinear", align_corners=False)
        return self.dequant(x)


@pytest.fixture(scope="module")
def data() -> Tensor:
    torch.manual_seed(0)
    return torch.rand((1, 3, 32, 32))


@pytest.fixture(scope="module")
def float_net(data: Tensor) -> Net:
    net = Net()
    net(data)
    return net


@pytest.fixture(scope="module")
def qat_net(float_net: Net, data: Tensor) -> Any:
    return prepare(float_net, data, default_qat_qconfig_setter)


@pytest.fixture
def session(float_net: Net, qat_net: Any, tmp_path: Path) -> QuantAnalysis:
    return QuantAnalysis(float_net, qat_net, "fake_quant", out_dir=tmp_path / "floatvsqat")


def test_the_check_is_printed_and_saved(qat_net: Any, data: Tensor, tmp_path: Path, capsys: Any) -> None:
    findings = check_qat_model(qat_net, data, save_results=True, out_dir=tmp_path / "new")
    saved, printed = (tmp_path / "new" / "model_check_result.txt").read_text(), capsys.readouterr().out
    assert findings.of("fixed-batch")
    for text in (saved, printed):
        assert all(part in text for part in ("fixed-batch", "observer", "conv/conv2d"))


def test_the_table_of_layers(session: QuantAnalysis, data: Tensor, capsys: Any) -> None:
    session.set_bad_case(data)
    session.run()
    assert (session.out_dir / "compare_per_layer_out.csv").exists()
    report = session.compare_per_layer()
    written = pd.read_csv(session.out_dir / "compare_per_layer_out.csv", keep_default_na=False)
    frame = report.to_pandas()
    assert list(written)[1:] == [
        *("mod_name", "base_op_type", "analy_op_type", "shape", "quant_dtype", "qscale", "Cosine", "L1", "Atol"),
        *("max_qscale_diff", "base_model_min", "analy_model_min", "base_model_max", "analy_model_max"),
        *("base_model_mean", "analy_model_mean"),
    ]
    assert list(written["Cosine"].astype(float)) == pytest.approx(list(frame["cosine"]))
    assert list(written["base_model_mean"].astype(float)) == pytest.approx(list(frame["ref_mean"]))
    assert list(written["analy_model_max"].astype(float)) == pytest.approx(list(frame["quant_max"]))
    table = (session.out_dir / "compare_per_layer_out.txt").read_text()
    assert table in capsys.readouterr().out
    assert (session.out_dir / "abnormal_layer_advisor.txt").read_text() == f"{report.text(limit=10)}\n"
    assert [row.op for row in session.compare_per_layer(types=["conv2d"]).rows] == ["conv2d"]
    assert [row.name for row in session.compare_per_layer(prefixes=["relu"]).rows] == ["relu/relu"]


def test_sensitivities_are_a_list_with_the_worst_first(session: QuantAnalysis, data: Tensor, capsys: Any) -> None:
    session.set_bad_case(data)
    found = session.sensitivity()
    report = pt2qa.sensitivity(session.session.pair, [data], metric="l1")
    assert [row[3] for row in found] == sorted((row.value for row in report.rows), reverse=True)
    by_place = {(row.name, row.kind): row for row in report.rows}
    for name, kind, op, value, dtype, flops in found:
        row = by_place[name, kind]
        assert (op, value, dtype, flops) == (row.op, row.value, row.dtype, row.flops)
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("sensitive_type", "18432(100.00%)"))


def test_bad_cases_by_three_metrics_in_one_pass(session: QuantAnalysis, data: Tensor, capsys: Any) -> None:
    batches = [data, 2 * data, data / 2]
    found = session.auto_find_bad_case(batches, num_steps=2, metric=Metric.L1)
    assert [row.metric for row in found.rows] == ["l1", "cosine", "atol"]
    assert {row.index for row in found.rows} == {1}
    assert "cosine" in capsys.readouterr().out
    assert session.auto_find_bad_case(batches, metric="COSINE").rows[0].metric == "cosine"
    other = QuantAnalysis(session.session.pair, out_dir=session.out_dir)
    other.load_bad_case()
    other.save_bad_case()
    assert torch.equal(other.session.bad_case.batches()[0], found.batches()[0])  # type: ignore[union-attr]
    other.run(index=1)
    other.clean()
    assert sorted(each.name for each in session.out_dir.iterdir() if each.suffix != ".lock") == [
        *("abnormal_layer_advisor.txt", "compare_per_layer_out.csv", "compare_per_layer_out.txt"),
    ]


@pytest.mark.parametrize(("order", "worst"), [("descending", 1), ("ascending", 2), (None, 1)])
def test_a_metric_of_ones_own(session: QuantAnalysis, data: Tensor, order: Any, worst: int) -> None:
    found = session.auto_find_bad_case(
        [data, 2 * data, data / 2],
        custom_metric_func=lambda float_out, quant_out: quant_out.mean(),
        custom_metric_order_seq=order,
    )
    assert [row.index for row in found.rows] == [worst]


def test_state_of_a_model_goes_on_from_batch_to_batch(tmp_path: Path) -> None:
    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, state: Tensor) -> dict[str, Tensor]:
            state = self.linear(x) + 0.5 * state
            return {"state": state}

    x, state = torch.ones(1, 4), torch.zeros(1, 4)
    pair = pt2qa.quantize(pt2qa.capture(Smoothed().eval(), (x, state)), "xnnpack", [(x, state)])
    session = QuantAnalysis(pair, out_dir=tmp_path)
    batches = [{"x": x, "state": state}, {"x": x}, {"x": x}]
    found = session.auto_find_bad_case(batches, cached_attrs=("state",))
    expected = pt2qa.find_bad_cases(pair, batches, metric=["atol", "cosine", "l1"], feedback={"state": "output.state"})
    assert [row.value for row in found.rows] == [row.value for row in expected.rows]


def test_the_exported_model_is_what_the_kernels_compute(qat_net: Any, data: Tensor, tmp_path: Path) -> None:
    pair = pt2qa.quantize(pt2qa.capture(Net().eval(), data), "xnnpack", [data])
    hbir = export(pair, (data,))
    session = QuantAnalysis(pair, hbir, "export", out_dir=tmp_path / "qatvshbir")
    with pytest.raises(pt2qa.SelectionError, match="no bad case is set"):
        session.run()
    session.set_bad_case(data)
    session.run()
    report = session.compare_per_layer()
    expected = pt2qa.compare_deployed(pair, [data])
    assert isinstance(report, pt2qa.DeployedReport)
    assert [row.deployed_sqnr for row in report.rows] == [row.deployed_sqnr for row in expected.rows]
    with pytest.raises(pt2qa.SelectionError, match="choose layers"):
        session.compare_per_layer(prefixes=["conv"])
    with HbirModelProfiler(hbir, tmp_path / "hbir_dir") as p:
        hbir[0](data)
    profile = p.get_info_manager().table()
    assert profile.side == "deployed"


def test_the_profile_of_a_float_model(float_net: Net, data: Tensor, tmp_path: Path, capsys: Any) -> None:
    with ModelProfiler(float_net, tmp_path / "profiler_dir") as p:
        float_net(data)
        float_net(data / 2)
    p.get_info_manager.table()
    p.get_info_manager.tensorboard()
    text = (tmp_path / "profiler_dir" / "statistic.txt").read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert lines[0] == ["Index", "Op Name", "Mod Name", "Attr", "Dtype", "Scale", "Min", "Max", "Mean", "Var", "Shape"]
    conv = next(line for line in lines if line[1:4] == ["conv2d", "conv", "output"])
    values = torch.cat([float_net.conv(data), float_net.conv(data / 2)]).detach()
    assert [float(cell) for cell in conv[6:9]] == pytest.approx(
        [float(values.min()), float(values.max()), float(values.mean())], rel=1e-4
    )
    assert [line[0] for line in lines[1:4]] == ["0", "1", "1"]
    assert text.strip() in capsys.readouterr().out
    assert list((tmp_path / "profiler_dir" / "tensorboard").rglob("events*"))
    p.get_info_manager.table(out_dir=tmp_path / "stacks", types=["conv2d"], with_stack=True)
    stacks = (tmp_path / "stacks" / "statistic.txt").read_text()
    assert "self.conv(x)" in stacks
    assert "relu" not in stacks


def test_two_saved_profiles_are_compared_without_a_run(
    session: QuantAnalysis, float_net: Net, qat_net: Any, data: Tensor, tmp_path: Path
) -> None:
    for net, folder in ((float_net, "float"), (qat_net, "qat")):
        with ModelProfiler(net, tmp_path / folder):
            net(data)
    session.set_model_profiler_dir(tmp_path / "float", tmp_path / "qat")
    report = session.compare_per_layer()
    assert isinstance(report, pt2qa.ProfileDiff)
    assert {"conv/conv2d", "relu/relu"} <= {row.name for row in report.rows}
    assert not math.isnan(next(row.distance for row in report.rows if row.name == "relu/relu"))


def test_a_device_is_not_used_and_it_says_so(float_net: Net, qat_net: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="device_ids=0 is not used"):
        QuantAnalysis(baseline_model=float_net, analysis_model=qat_net, device_ids=0, out_dir=tmp_path)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda net, x: QuantAnalysis(net), "Net; expected what prepare"),
        (lambda net, x: QuantAnalysis(net, net, "export"), "expected 'export' with what export"),
        (lambda net, x: ModelProfiler(net, ".").profile(), "was not called within"),
        (lambda net, x: check_qat_model(net, x), "Net; expected what prepare"),
    ],
)
def test_what_cannot_be_done_is_said(float_net: Net, data: Tensor, call: Any, named: str) -> None:
    with pytest.raises(pt2qa.Pt2qaError, match=named):
        call(float_net, data)


def test_cached_attributes_belong_into_the_batch(session: QuantAnalysis, data: Tensor) -> None:
    with pytest.raises(pt2qa.SelectionError, match="within the batch"):
        session.set_bad_case(data, baseline_model_cached_attr={"state": 0})
