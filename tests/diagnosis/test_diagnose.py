"""``pt2qa.diagnose`` on small models with one planted fault each, and on healthy ones."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec

import pt2qa
from pt2qa._diagnosis.causes import CAUSES
from pt2qa._diagnosis.projected import site_noises
from pt2qa._report.notes import Note, kind_of
from pt2qa._trials.judge import Judge
from pt2qa.report import Diagnosis
from tests.check.quantizers import every


class Net(nn.Module):
    """Three convolutions with batch norms, a residual sum, a classifier."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.ReLU, variance: float = 0.1) -> None:
        super().__init__()
        widths = (3, 16, 32, 32)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.acts = nn.ModuleList(activation() for _ in range(3))
        self.fc = nn.Linear(32, 10)
        for norm in self.norms:
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(variance / 2, variance * 2)

    def forward(self, x: Tensor) -> Any:
        for number in range(2):
            x = self.acts[number](self.norms[number](self.convs[number](x)))
        x = x + self.acts[2](self.norms[2](self.convs[2](x)))
        return self.fc(x.mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def data() -> tuple[list[Tensor], list[Tensor]]:
    """Calibration and other batches."""
    torch.manual_seed(1)
    return [torch.rand(8, 3, 12, 12) for _ in range(4)], [torch.rand(8, 3, 12, 12) for _ in range(2)]


def diagnosed(
    model: nn.Module, calibration: Any, batches: Any, quantizer: Any = "xnnpack", **options: Any
) -> Diagnosis:
    pair = pt2qa.quantize(pt2qa.capture(model.eval(), batches[0]), quantizer, calibration, progress=False)
    return pt2qa.diagnose(pair, batches, progress=False, **options)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_healthy_model_has_nothing_to_do(net: nn.Module, data: Any, quantizer: str) -> None:
    found = diagnosed(net, *data, quantizer)
    assert found.rows == ()
    assert found.verdict.startswith("Nothing to do: ")
    assert found.next_command == ""
    assert found.sqnr > 30


@pytest.mark.parametrize(
    ("cause", "calibrated"),
    [
        ("narrow-calibration", lambda own: [batch * 0.3 for batch in own]),
        ("wide-calibration", lambda own: [batch * 10 for batch in own]),
        ("calibration-outlier", lambda own: [*own, own[0] * 30]),
    ],
)
@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_calibration_data_that_does_not_fit(
    net: nn.Module, data: Any, quantizer: str, cause: str, calibrated: Callable[[list[Tensor]], list[Tensor]]
) -> None:
    found = diagnosed(net, calibrated(data[0]), data[1], quantizer)
    assert found.rows[0].cause == cause
    assert found.rows[0].how == "quantized again"
    own = {"capture": found.pair.capture, "calibration": calibrated(data[0]), "batches": data[1]}
    again = eval(found.next_command, {"pt2qa": pt2qa, "diagnosis": found, **own})
    assert torch.equal(again.quantized(data[1][0]), found.pair.quantized(data[1][0]))
    # What it promises is what quantizing with its pair gives.
    [now, after] = (next(row for row in found.figures if row.name == name) for name in ("now", "after"))
    assert after.sqnr - now.sqnr > 10
    outputs = [found.pair.quantized(batch) for batch in data[1]]
    reference = [net(batch) for batch in data[1]]
    assert pt2qa.sqnr(torch.cat(reference), torch.cat(outputs)) == pytest.approx(after.sqnr, abs=0.01)


def test_unfused_activations(data: Any) -> None:
    torch.manual_seed(0)
    found = diagnosed(Net(nn.ReLU6, variance=0.001), *data)
    assert found.rows[0].cause == "unfused-activation"
    assert {edit.kind for edit in found.plan.edits} == {"fuse"}
    assert found.code_verified == "equal"
    assert found.rows[0].gain_in_sequence == pytest.approx(found.sqnr_after - found.sqnr, abs=0.01)


def test_an_outlier_channel(net: nn.Module, data: Any) -> None:
    broken = copy.deepcopy(net)
    with torch.no_grad():
        broken.norms[0].weight[5] *= 300
        broken.norms[0].bias[5] = 300
        broken.convs[1].weight[:, 5] /= 300
    found = diagnosed(broken, *data)
    row = found.rows[0]
    assert (row.cause, row.name) == ("outlier-channel", "acts.0/relu")
    assert "channel 5" in row.evidence
    assert row.gain > 15
    assert row.cost == 0  # its channels can be scaled, which costs nothing
    assert row.low < row.gain < row.high
    assert row.output == ""  # there is one
    file, _, line = row.source.partition(":")
    assert file == Path(__file__).name
    assert "acts" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_a_report_says_all_of_it(net: nn.Module, data: Any, tmp_path: Any) -> None:
    found = diagnosed(net, [batch * 0.3 for batch in data[0]], data[1])
    text = str(found)
    for part in ("narrow-calibration", "Evidence:", "Remedy:", "Measured (quantized again)", "Next: "):
        assert part in text
    found.save(tmp_path / "diagnosis.safetensors")
    loaded = pt2qa.load(tmp_path / "diagnosis.safetensors")
    assert str(loaded) == text
    columns = ("rank", "cause", "name", "module", "evidence", "remedy", "gain", "gain_in_sequence", "cost")
    assert tuple(loaded.to_pandas().columns) == columns
    with pytest.raises(pt2qa.ReportError, match="has no pair"):
        loaded.pair  # noqa: B018


@pytest.mark.parametrize("runs", [2, 4, 6])
def test_ctrl_c_keeps_what_was_found(net: nn.Module, data: Any, monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    measured: list[Any] = []
    outcome = Judge.outcome

    def counted(judge: Judge, treatment: Any) -> Any:
        if treatment not in measured:
            if len(measured) == runs:
                raise KeyboardInterrupt
            measured.append(treatment)
        return outcome(judge, treatment)

    monkeypatch.setattr(Judge, "outcome", counted)
    found = diagnosed(net, [batch * 0.3 for batch in data[0]], data[1])
    assert "interrupted" in map(kind_of, found.notes)
    assert " Interrupted" in found.verdict
    assert found.next_command == "pt2qa.diagnose(pair, batches)"
    assert [row.cause for row in found.rows] == ["narrow-calibration"] * (runs > 2)
    if found.rows:
        assert found.pair.sites
        assert found.code_verified == "not run: interrupted"


def test_ctrl_c_in_the_budget_is_not_ignored(net: nn.Module, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> Any:
        return dataclasses.replace(site_noises(*args, **options), notes=(Note("covers 1 batch", "interrupted"),))

    monkeypatch.setattr("pt2qa._diagnosis.case.site_noises", interrupted)
    found = diagnosed(net, [batch * 0.3 for batch in data[0]], data[1])
    assert " Interrupted" in found.verdict
    assert "budget" not in found.reports


def test_a_target_decides(net: nn.Module, data: Any) -> None:
    narrow = [batch * 0.3 for batch in data[0]]
    met = diagnosed(net, narrow, data[1], target=1.0)
    assert (met.met, met.rows) == (1, ())
    assert "the target is 1; samples like these have " in met.verdict
    missed = diagnosed(net, data[0], data[1], target=200.0)
    assert missed.met == 0
    assert "reconfigure(pair, batches, target=200)" in missed.next_command
    assert missed.search_target == 200


def test_a_metric_decides(net: nn.Module, data: Any) -> None:
    labels = [net(batch).argmax(1) for batch in data[1]]

    def top1(model: Any) -> float:
        right = sum(int((model(batch).argmax(1) == own).sum()) for batch, own in zip(data[1], labels, strict=True))
        return right / 16

    found = diagnosed(net, [batch * 0.02 for batch in data[0]], data[1], metric=top1)
    assert found.unit == "top1"
    assert found.figures[0].value < 1.0
    assert found.rows[0].cause == "narrow-calibration"
    assert found.rows[0].quality == 1.0
    assert found.target == "at least 0.99, 99 % of float"
    assert found.story.startswith("float 1 top1 -> int8 ")
    assert found.story.endswith(" -> with the remedy 1 top1")
    assert not math.isnan(found.sqnr)


def test_a_label_may_be_chance(net: nn.Module, data: Any) -> None:
    """Any change of the model brings the label back, but no remedy makes the outputs much better."""
    pair = pt2qa.quantize(pt2qa.capture(net, data[1][0]), "xnnpack", data[0], progress=False)
    own = [pair.quantized(batch) for batch in data[1]]

    def top1(model: Any) -> float:
        same = all(torch.equal(model(batch), before) for batch, before in zip(data[1], own, strict=True))
        return 15 / 16 if same else 1.0

    found = pt2qa.diagnose(pair, data[1], metric=top1, progress=False)
    assert (found.met, found.rows) == (0, ())


def test_the_page_lists_every_cause() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    assert [f"| `{cause}` | {meaning} |" for cause, meaning in CAUSES.items()] == [
        line for line in page.splitlines() if line.startswith("| `") and line.split("`")[1] in CAUSES
    ]


def test_activations_with_a_scale_for_each_channel_are_told_apart() -> None:
    channels = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -128, 127, torch.per_channel_affine, ch_axis=1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    batches = [torch.linspace(-1, 2, 24).reshape(6, 4), torch.linspace(-3, 1, 24).reshape(6, 4)]
    pair = pt2qa.quantize(pt2qa.capture(model, batches[0]), every("linear", channels), batches, progress=False)
    assert all(site.params.axis == 1 for site in pair.sites if site.kind == "activation")
    assert pt2qa.diagnose(pair, batches, progress=False).sqnr > 20


def test_findings_are_those_of_the_pair(net: nn.Module, data: Any) -> None:
    capture = pt2qa.capture(net, data[0][0])
    pair = pt2qa.quantize(capture, "xnnpack", data[0], progress=False)
    own, rules = pt2qa.check(pair, progress=False), {"progress": False, "verify_code": False}
    assert pt2qa.diagnose(pair, data[1], findings=own, **rules).reports["findings"] is own
    other = pt2qa.quantize(pt2qa.capture(nn.Linear(4, 2).eval(), torch.ones(1, 4)), "xnnpack", [torch.ones(1, 4)])
    with pytest.raises(pt2qa.SelectionError, match="findings: got those of another model"):
        pt2qa.diagnose(pair, data[1], findings=pt2qa.check(other, progress=False), **rules)


def test_the_story_ends_on_the_kernels_of_the_new_pair(net: nn.Module, data: Any) -> None:
    labels = [net(batch).argmax(1) for batch in data[1]]

    def top1(model: Any) -> float:
        right = sum(int((model(batch).argmax(1) == own).sum()) for batch, own in zip(data[1], labels, strict=True))
        return right / 16

    found = diagnosed(net, [batch * 0.02 for batch in data[0]], data[1], metric=top1, deployed=True)
    before, after = (next(row for row in found.figures if row.name == name) for name in ("deployed", "deployed, after"))
    again = pt2qa.compare_deployed(found.pair, data[1], metric=top1, progress=False)
    assert (after.value, after.sqnr) == (again.value, again.sqnr)
    assert before.value == found.reports["deployed"].value < 1.0
    assert found.story.endswith(f" -> with the remedy 1 top1 -> on the kernels {after.value:g} top1")
    told = pt2qa.diagnose(
        pt2qa.quantize(pt2qa.capture(net, data[1][0]), "xnnpack", [batch * 0.02 for batch in data[0]], progress=False),
        data[1],
        deployed=found.reports["deployed"],
        progress=False,
    )
    assert " -> on the kernels " in told.story.split(" -> with the remedy ")[0]


def test_calibration_in_another_unit_is_told_where_the_target_is_met_all_the_same(net: nn.Module, data: Any) -> None:
    met = diagnosed(net, [16 * batch for batch in data[0]], data[1], target=1.0)
    assert met.rows == ()
    (told,) = [note for note in met.notes if "in another unit than the data in use, though the target is met" in note]
    assert met.verdict.startswith("Nothing to do: ")
    assert "in the calibration data are 16" in told
    assert not any("another unit" in note for note in diagnosed(net, *data, target=1.0).notes)


def test_a_target_that_is_met_names_the_values_that_are_clamped(net: nn.Module, data: Any) -> None:
    """Those of the site that clamps most, as compare_layers counts them."""
    pair = pt2qa.quantize(pt2qa.capture(net, data[1][0]), "xnnpack", [batch / 16 for batch in data[0]], progress=False)
    met = pt2qa.diagnose(pair, data[1], metric=lambda model: 1.0, progress=False)
    rows = pt2qa.compare_layers(pair, data[1], progress=False).rows
    most = max((row for row in rows if row.saturation > 0), key=lambda row: row.saturation)
    assert most.saturation > 0.9
    assert f" {100 * most.saturation:.2f} % of the values at {most.name} are outside" in met.verdict
    assert met.verdict.endswith("; no remedy for that was measured.")
    assert (met.rows, met.tried, met.met) == ((), (), 1)
    assert met.next_command == "pt2qa.diagnose(pair, batches)"
