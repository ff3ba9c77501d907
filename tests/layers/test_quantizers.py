"""Several quantizers in one pass give what each gives alone, and one that fails does not keep the others back."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._report.html.page import sections_of
from pt2qa._simulator.simulator import Simulator
from pt2qa.report import SetApart
from tests.models import images, residual
from tests.simulator.test_nonfinite import Logarithm


@pytest.fixture(scope="module")
def capture() -> pt2qa.Capture:
    return pt2qa.capture(residual(), images(), dynamic_shapes=({0: torch.export.Dim("batch")},))


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    return [images(4, seed=3), images(2, seed=4)]


SPECS = {
    "per channel": "xnnpack",
    "per tensor": "xnnpack:per_channel=false",
    "x86": "x86",
    "dynamic": "x86:mode=dynamic",
}


@pytest.fixture(scope="module")
def report(capture: pt2qa.Capture, batches: list[Tensor]) -> pt2qa.CandidateReport:
    return pt2qa.compare_quantizers(capture, SPECS, batches, progress=False)


@pytest.mark.parametrize("name", SPECS)
def test_each_column_is_what_compare_layers_gives_alone(
    name: str, report: pt2qa.CandidateReport, capture: pt2qa.Capture, batches: list[Tensor]
) -> None:
    alone = pt2qa.compare_layers(pt2qa.quantize(capture, SPECS[name], batches, progress=False), batches, isolated=False)
    column = {row.name: row.custom[name] for row in report.rows}
    for row in (*alone.outputs, *(row for row in alone.rows if row.op != "input")):
        assert column[row.name] == pytest.approx(row.sqnr, rel=1e-9), row.name
    candidate = next(candidate for candidate in report.candidates if candidate.name == name)
    assert candidate.sqnr == pytest.approx(alone.sqnr, rel=1e-9)


def test_candidates_as_deployed_have_the_kernels_scales() -> None:
    x = torch.randn(4, 8) * torch.tensor([[0.01], [1.0], [1.0], [100.0]])
    torch.manual_seed(0)
    capture = pt2qa.capture(nn.Linear(8, 2).eval(), x)
    asked = ["xnnpack:mode=dynamic", "xnnpack"]
    report = pt2qa.compare_quantizers(capture, asked, [x], as_deployed=True, progress=False)
    for name, candidate in zip(asked, report.candidates, strict=True):
        pair = pt2qa.quantize(capture, name, [x], progress=False).as_deployed()
        assert candidate.sqnr == pytest.approx(pt2qa.compare_layers(pair, [x], progress=False).sqnr, abs=1e-9)
    assert "xnnpack:mode=dynamic: as deployed: the backend's kernels" in str(report)
    assert (
        report.candidates[0].sqnr > pt2qa.compare_quantizers(capture, asked, [x], progress=False).candidates[0].sqnr + 3
    )


def test_the_candidates_are_described(report: pt2qa.CandidateReport) -> None:
    per_channel, _, x86, dynamic = report.candidates
    assert (per_channel.quantized_ops, per_channel.ops) == (3, 3)
    assert (dynamic.quantized_ops, dynamic.weights) == (1, 1)
    assert x86.quantizer == "x86"
    parameters = 3 * 8 * 9 + 8 + 8 * 8 + 8 + 8 * 4 + 4
    weights = 3 * 8 * 9 + 8 * 8 + 8 * 4
    assert x86.bytes == weights + 4 * (parameters - weights)
    assert report.best == max(report.candidates, key=lambda candidate: candidate.sqnr)
    assert (report.batches, report.samples) == (2, 6)


def test_the_float_model_runs_once_for_all(
    capture: pt2qa.Capture, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = {name: pt2qa.quantize(capture, spec, batches, progress=False) for name, spec in SPECS.items()}
    for pair in pairs.values():
        pair.verify(batches[0])
    runs = []
    walk = Simulator.walk
    monkeypatch.setattr(Simulator, "walk", lambda self, values, on=True: (runs.append(on), walk(self, values, on))[1])
    pt2qa.compare_quantizers(capture, pairs, batches, progress=False)
    assert runs.count(False) == len(batches)
    assert runs.count(True) == len(batches) * len(pairs)


def test_one_that_fails_is_listed_with_its_error(capture: pt2qa.Capture, batches: list[Tensor]) -> None:
    report = pt2qa.compare_quantizers(capture, {"bad": "x86:modules=nothing", "good": "x86"}, batches, progress=False)
    bad, good = report.candidates
    assert "modules" in bad.note
    assert isnan(bad.sqnr)
    assert good == report.best
    assert f"bad failed: {bad.note}".split()[:3] == report.summary().splitlines()[-1].split()[:3]
    with pytest.raises(pt2qa.QuantizeError, match=r"^bad: .*modules"):
        pt2qa.compare_quantizers(capture, {"bad": "x86:modules=nothing"}, batches, progress=False)


def test_independent_ops_may_run_in_another_order() -> None:
    """A value that comes too early waits, as a copy that later steps cannot overwrite."""
    from pt2qa._candidates.analysis import _Runner
    from pt2qa._simulator.program import Step

    early, late = torch.ones(2), torch.zeros(2)

    def walk():  # type: ignore[no-untyped-def]
        yield Step(0, 0, (), torch.relu), early
        early.fill_(9.0)
        yield Step(1, 1, (), torch.relu), late
        return "done"

    runner = _Runner(walk(), {0: "early", 1: "late"})
    assert torch.equal(runner.value("late"), late)
    assert torch.equal(runner.value("early"), torch.ones(2))
    assert runner.finish() == "done"


def test_what_cannot_be_compared_is_refused(capture: pt2qa.Capture, batches: list[Tensor]) -> None:
    with pytest.raises(pt2qa.SelectionError, match=r"two candidates are called 'x86'\. Pass a dict"):
        pt2qa.compare_quantizers(capture, ["x86", "x86"], batches)
    with pytest.raises(pt2qa.SelectionError, match="there is no candidate"):
        pt2qa.compare_quantizers(capture, [], batches)
    with pytest.raises(pt2qa.BatchError, match="calibration is of type list_iterator, which can be read only once"):
        pt2qa.compare_quantizers(capture, ["x86"], iter(batches))
    other = pt2qa.quantize(pt2qa.capture(residual(), images()), "x86", [images()], progress=False)
    with pytest.raises(pt2qa.SelectionError, match="other: the pair was made from another capture, or trained"):
        pt2qa.compare_quantizers(capture, {"other": other}, batches)


def test_nested_outputs_and_values_that_are_no_tensors() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            left, right = self.fc(x).chunk(2, dim=1)
            return {"left": left, "right": right + 1}

    torch.manual_seed(0)
    x = torch.randn(3, 4)
    report = pt2qa.compare_quantizers(pt2qa.capture(Two().eval(), x), ["x86", "xnnpack"], [x], progress=False)
    assert [row.name for row in report.rows if row.op == "output"] == ["output.left", "output.right"]
    assert any("no single tensor" in note for note in report.notes)


def test_interrupted_it_covers_the_finished_batches(capture: pt2qa.Capture, batches: list[Tensor]) -> None:
    def interrupted():  # type: ignore[no-untyped-def]
        yield batches[0]
        raise KeyboardInterrupt

    report = pt2qa.compare_quantizers(capture, ["x86"], batches, interrupted(), progress=False)
    assert report.batches == 1
    assert "interrupted: covers the 1 batch that was finished" in report.notes


def test_an_output_that_is_infinite_has_no_number_whichever_candidate_comes_first() -> None:
    class Logarithm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.fc(x)
            return y, y.abs().log()

    model = Logarithm().eval()
    with torch.no_grad():
        model.fc.weight.fill_(1.0)
        model.fc.bias.zero_()
    x = torch.tensor([[1e-4], [1.0], [-1.0], [0.3]])
    same = {"a": "xnnpack", "b": "xnnpack"}
    report = pt2qa.compare_quantizers(pt2qa.capture(model, x), same, [x], progress=False)
    second = next(row for row in report.rows if row.name == "output[1]")
    assert all(map(isnan, second.custom.values()))
    assert all(isnan(candidate.sqnr) for candidate in report.candidates)
    assert report.best is None


def test_a_weight_with_several_readers_is_stored_once() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(4, 8).eval(), torch.randn(6, 2, 4)
    capture = pt2qa.capture(model, x, decompose="lstm")
    (candidate,) = pt2qa.compare_quantizers(capture, ["x86:mode=dynamic"], [x], progress=False).candidates
    assert candidate.bytes == 4 * 8 * 4 + 4 * 8 * 8 + 4 * 2 * 4 * 8


# -- batches that are empty or not finite ------------------------------------------------------------------------------


def test_a_spoilt_or_empty_batch_is_in_no_candidates_numbers() -> None:
    capture = pt2qa.capture(residual(), (images(6),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    good, spoilt = [images(3, seed=1), images(3, seed=2)], images(3)
    spoilt[2, 0, 0, 0] = torch.nan
    pairs = {name: pt2qa.quantize(capture, name, good, progress=False) for name in ("xnnpack", "x86")}
    report = pt2qa.compare_quantizers(capture, pairs, good, [good[0], spoilt, spoilt[:0], good[1]], progress=False)
    clean = pt2qa.compare_quantizers(capture, pairs, good, progress=False)
    assert report.set_apart == (SetApart(1, 3, 2, "batch", "NaN", "x"), SetApart(2, 0, -1, "batch", "no samples"))
    assert (report.rows, report.candidates) == (clean.rows, clean.candidates)
    assert (report.batches, report.samples, report.batches_apart) == (4, 9, 2)
    assert report.summary().splitlines()[:3] == [
        "The input data contain NaN or infinities in 1 of 4 batches: NaN in the input x (batch 1, sample 2).",
        "No samples in 1 of 4 batches: batch 2.",
        "The numbers are of the other 2 batches, 6 samples; 0.00 % of the input values outside the calibrated range.",
    ]
    with pytest.raises(pt2qa.BatchError, match=r"every batch is empty \(1 read\)"):
        pt2qa.compare_quantizers(capture, pairs, good, [spoilt[:0]], progress=False)
    nothing = pt2qa.compare_quantizers(capture, pairs, good, [spoilt], progress=False)
    assert nothing.best is None
    assert nothing.summary().splitlines()[-1] == "No candidate has an SQNR at the output."
    assert not pt2qa.gate(nothing, require="sqnr>=0").passed


def test_a_candidate_that_fails_on_one_batch_is_never_the_best_and_the_others_keep_that_batch(tmp_path: Path) -> None:
    example = torch.linspace(0.5, 4, 16).reshape(4, 4)
    capture = pt2qa.capture(Logarithm().eval(), (example,))
    # Calibrated on small values the second rounds 1e-3 to something else than zero, and clamps all else.
    pairs = {
        "accurate": pt2qa.quantize(capture, "xnnpack", [example], progress=False),
        "poor": pt2qa.quantize(capture, "xnnpack", [example / 400], progress=False),
    }
    tiny = torch.ones(4, 4)
    tiny[2, 3] = 1e-3
    report = pt2qa.compare_quantizers(capture, pairs, [example], [example, tiny], progress=False)
    assert report.set_apart == (SetApart(1, 4, 2, "quantized", "infinite", "log", candidate="accurate"),)
    accurate, poor = report.candidates
    assert isnan(accurate.sqnr)
    assert report.best == poor
    first = pt2qa.compare_quantizers(capture, pairs, [example], [example], progress=False)
    assert first.best is not None
    assert first.best.name == "accurate"
    for row, row_of_first in zip(report.rows, first.rows, strict=True):
        assert row.custom["accurate"] == row_of_first.custom["accurate"]
    alone = pt2qa.compare_quantizers(capture, {"poor": pairs["poor"]}, [example], [example, tiny], progress=False)
    assert poor == alone.candidates[0]
    fault = "on 1 of 2 batches: infinite in accurate alone, first at log (batch 1, sample 2)"
    assert accurate.note == fault
    said = report.summary().splitlines()
    assert said[0].startswith("96.88 % of the values of x, which are 0.001 to 4, lie ")
    assert said[2] == f"accurate fails {fault}."
    assert pt2qa.gate(report, require="sqnr>=-100").passed
    assert not pt2qa.gate(report, require="accurate:candidates.sqnr>=-100").passed
    assert sections_of([report])[0].verdict == "warning"
    report.save(tmp_path / "candidates.safetensors")
    loaded = pt2qa.load(tmp_path / "candidates.safetensors")
    assert isinstance(loaded, pt2qa.CandidateReport)
    assert (loaded.set_apart, str(loaded)) == (report.set_apart, str(report))


def test_an_output_that_is_no_tensor_does_not_hide_the_best_candidate() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, None, int]:
            return self.fc(x), None, 3

    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    capture = pt2qa.capture(Optional().eval(), x)
    report = pt2qa.compare_quantizers(capture, {"one": "xnnpack", "two": "x86"}, [x], [x], progress=False)
    assert [row.name for row in report.rows if row.op == "output"] == ["output[0]"]
    assert "Most accurate: " in report.summary()
