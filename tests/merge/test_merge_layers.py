"""Layer reports of parts of the data, merged: those of one run; and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import pt2qa
from pt2qa._layers.sums import Totals
from pt2qa._metrics import error_sums
from pt2qa._report.notes import Note
from pt2qa._report.sums import pack, settings_of, unpack
from pt2qa.cli import main
from pt2qa.report import LayerReport
from tests.merge.equal import by_shards, differences, random_shards
from tests.models import images, residual

Analysis = Callable[..., pt2qa.LayerReport]


class Percentile(NamedTuple):
    """A metric whose state is an array."""

    share: float = 0.5
    counts: Tensor = torch.zeros(64, dtype=torch.int64)

    def update(self, reference: Tensor, quantized: Tensor) -> Percentile:
        places = (reference - quantized).abs().clamp(1e-9, 1).log2().mul(-2).long()
        return self._replace(counts=self.counts + torch.bincount(places.flatten(), minlength=64))

    def merge(self, other: Percentile) -> Percentile:
        return self._replace(counts=self.counts + other.counts)

    def compute(self) -> float:
        return float((self.counts.cumsum(0) < self.share * self.counts.sum()).sum())


@dataclass(frozen=True)
class Steps:
    """A metric that is a dataclass of numbers, and asks for the scale and the isolated value."""

    total: float = 0
    count: int = 0

    def update(
        self, reference: Tensor, quantized: Tensor, *, scale: float | None = None, isolated: Tensor | None = None
    ) -> Steps:
        off = reference - (quantized if isolated is None else isolated)
        return Steps(self.total + float(off.abs().double().sum()) / (scale or 1.0), self.count + off.numel())

    def merge(self, other: Steps) -> Steps:
        return Steps(self.total + other.total, self.count + other.count)

    def compute(self) -> float:
        return self.total / self.count if self.count else float("nan")


METRICS: dict[str, Any] = {"median": Percentile(), "99 %": Percentile(0.99), "a/b steps": Steps()}


@pytest.fixture(scope="module")
def layers(pair: pt2qa.QuantizedPair) -> Analysis:
    def compared(batches: list[Tensor], **arguments: Any) -> LayerReport:
        return pt2qa.compare_layers(pair, batches, **{"modules": ["conv1"], **arguments})

    return compared


@pytest.fixture(scope="module")
def whole(layers: Analysis, batches: list[Tensor]) -> LayerReport:
    return layers(batches, metrics=METRICS)


@pytest.mark.parametrize("seed", range(3))
def test_shards_of_any_size_give_what_one_run_gives(layers, batches, whole, seed: int, tmp_path: Path) -> None:
    reports = by_shards(lambda shard: layers(shard, metrics=METRICS), random_shards(batches, seed))
    for number, report in enumerate(reports):
        report.save(tmp_path / f"{number}.safetensors")
    loaded = [pt2qa.load(tmp_path / f"{number}.safetensors") for number in range(len(reports))]
    for shards in (reports, loaded):
        merged = pt2qa.merge(shards, metrics=METRICS)
        assert not differences(merged, whole)
        assert str(merged) == str(whole)
        assert merged.notes == whole.notes


def test_what_was_merged_merges_again_in_any_grouping(layers, batches, whole, tmp_path: Path) -> None:
    one, two, three, *rest = by_shards(lambda shard: layers(shard, metrics=METRICS), [[batch] for batch in batches])
    left = pt2qa.merge([pt2qa.merge([one, two], metrics=METRICS), three], metrics=METRICS)
    left.save(tmp_path / "left.safetensors")
    merged = pt2qa.merge([pt2qa.load(tmp_path / "left.safetensors"), *rest], metrics=METRICS)
    assert not differences(merged, whole)


def test_one_report_is_itself(layers, batches) -> None:
    report = layers(batches[:2])
    assert not differences(pt2qa.merge([report]), report)


def test_batches_set_apart_stay_apart_and_are_numbered_on(layers, batches, not_finite) -> None:
    empty = images(0)
    data = [*batches[:2], not_finite, empty, *batches[2:4], not_finite]
    whole = layers(data)
    assert [apart.batch for apart in whole.set_apart] == [2, 3, 6]
    # The second shard has no batch that counts.
    merged = pt2qa.merge(by_shards(layers, [data[:2], data[2:4], data[4:]]))
    assert not differences(merged, whole)
    assert str(merged) == str(whole)


def test_if_all_batches_are_set_apart_the_rows_are_theirs(layers, not_finite) -> None:
    merged = pt2qa.merge(by_shards(layers, [[not_finite], [not_finite, not_finite]]))
    assert not differences(merged, layers([not_finite] * 3))


@pytest.mark.parametrize(
    "arguments",
    [{"isolated": False}, {"prefixes": ["conv2"], "modules": []}, {"ops": ["relu"]}],
    ids=["cumulative", "prefixes", "ops"],
)
def test_with_other_arguments(layers, batches, arguments: dict[str, Any]) -> None:
    shards = random_shards(batches[:4], 1, 2)
    merged = pt2qa.merge(by_shards(lambda shard: layers(shard, **arguments), shards))
    assert not differences(merged, layers(batches[:4], **arguments))


def test_modules_alone(pair, batches) -> None:
    def modules(shard: list[Tensor]) -> LayerReport:
        return pt2qa.compare_modules(pair, shard, modules=["conv1", "fc"])

    merged = pt2qa.merge(by_shards(modules, random_shards(batches, 2)))
    assert not differences(merged, modules(batches))
    assert [row.name for row in merged.rows] == ["conv1", "fc"]


def test_reports_of_two_graphs(pair, batches) -> None:
    def graphs(shard: list[Tensor]) -> pt2qa.GraphReport:
        return pt2qa.compare_graphs(pair.reference, pair.quantized, shard)

    merged = pt2qa.merge(by_shards(graphs, random_shards(batches, 0)))
    whole = graphs(batches)
    assert not differences(merged, whole)
    assert str(merged) == str(whole)
    with pytest.raises(pt2qa.ReportError, match="graph b of report 2 is"):
        pt2qa.merge([whole, pt2qa.compare_graphs(pair.reference, pair.reference, batches[:1])])


def test_notes_of_one_report_say_whose_they_are(layers, batches) -> None:
    first, second = by_shards(layers, [batches[:1], batches[1:2]])
    second = replace(second, notes=(*second.notes, Note("covers the 1 batch that was finished", "interrupted")))
    notes = pt2qa.merge([first, second]).notes
    assert notes == (*first.notes, "report 2 of 2: covers the 1 batch that was finished")


def test_the_command_prints_and_writes_what_the_call_returns(layers, batches, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, batch in enumerate(batches[:2]):
        layers([batch]).save(f"{number}.safetensors")
    result = CliRunner().invoke(
        main, ["merge", "0.safetensors", "1.safetensors", "-o", "both.safetensors", "--width", "100"]
    )
    page = "pt2qa html both.safetensors -o report.html"
    assert (result.exit_code, result.stderr) == (0, f"wrote both.safetensors\nNext:\n{page}\n")
    whole = layers(batches[:2])
    assert result.stdout == f"{whole.text(width=100)}\n"
    assert not differences(pt2qa.load("both.safetensors"), whole)
    layers(batches[:1], isolated=False).save("other.safetensors")
    result = CliRunner().invoke(main, ["merge", "0.safetensors", "other.safetensors"])
    assert result.exit_code == 2
    assert "isolated of report 2 is 'False', of the first one 'True'" in result.stderr
    assert CliRunner().invoke(main, ["merge", "0.safetensors", "-o", "0.safetensors"]).exit_code == 2


def test_reports_travel_between_processes(layers, batches) -> None:
    reports = by_shards(layers, [batches[:1], batches[1:2]])
    merged = pt2qa.merge([pickle.loads(pickle.dumps(report)) for report in reports])
    assert not differences(merged, layers(batches[:2]))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_reports_that_are_not_of_one_run(layers, pair, capture, batches, tmp_path: Path) -> None:
    report = layers(batches[:1])
    other_ranges = pt2qa.quantize(capture, "xnnpack", [3 * images(4)])
    other = residual()
    with torch.no_grad():
        other.fc.weight.mul_(2)
    other_weights = pt2qa.quantize(pt2qa.capture(other, (images(4),)), "xnnpack", [images(4)])
    x86 = pt2qa.quantize(capture, "x86", [images(4)])
    cases: dict[str, Any] = {
        "kind of report 2 is 'BadCases', of the first one 'LayerReport'": pt2qa.find_bad_cases(pair, batches[:1]),
        "fingerprint of report 2 is": pt2qa.compare_layers(other_weights, [images(4)]),
        "quantizer of report 2 is 'x86', of the first one 'xnnpack'": pt2qa.compare_layers(x86, batches[:1]),
        "quantization (scales, zero points, ranges) of report 2 is": pt2qa.compare_layers(
            other_ranges, batches[:1], modules=["conv1"]
        ),
        "isolated of report 2 is 'False', of the first one 'True'": layers(batches[:1], isolated=False),
        "report 2 compares 3 values, the first one": layers(batches[:1], prefixes=["conv1"], modules=[]),
        "name of 'conv2' is 'conv2' in report 2, 'conv1' in the first one": layers(batches[:1], modules=["conv2"]),
        "model of report 2 is 'Other', of the first one 'Residual'": replace(report, model="Other"),
        "torch of report 2 is '1.0'": replace(report, environment=replace(report.environment, torch="1.0")),
        "report 2 has no sums: an older version": replace(report, sums={}),
    }
    for text, second in cases.items():
        with pytest.raises(pt2qa.ReportError, match=re.escape(text)):
            pt2qa.merge([report, second])


def test_what_cannot_be_merged_at_all(pair) -> None:
    with pytest.raises(pt2qa.ReportError, match=r"no report to merge\. Give one or more"):
        pt2qa.merge([])
    with pytest.raises(pt2qa.ReportError, match=r"cannot merge str, expected reports; pt2qa\.load"):
        pt2qa.merge(["a.safetensors"])  # type: ignore[type-var]
    with pytest.raises(pt2qa.ReportError, match=r"a WeightReport does not add up over batches.*GraphReport"):
        pt2qa.merge([pt2qa.compare_weights(pair)])


def test_what_does_not_add_up_says_what_to_do_instead(pair, batches) -> None:
    diagnosis = pt2qa.diagnose(pair, batches[:1], verify_code=False)
    with pytest.raises(pt2qa.ReportError, match=r"a Diagnosis does not .*\. It is searched\. Merge its evidence, "):
        pt2qa.merge([diagnosis])


def test_a_file_of_an_older_version_says_so() -> None:
    older = replace(pt2qa.load(Path(__file__).parents[1] / "report" / "v0_2_0" / "layers.safetensors"), sums={})
    with pytest.raises(
        pt2qa.ReportError, match="report 1 has no sums: an older version of pt2qa or another program wrote it"
    ):
        pt2qa.merge([older, older])


def test_metrics_must_be_given_and_be_storable(layers, batches) -> None:
    class Plain:
        """A metric whose state is nothing that a file holds."""

        def update(self, reference: Tensor, quantized: Tensor) -> Plain:
            return self

        def merge(self, other: Plain) -> Plain:
            return self

        def compute(self) -> float:
            return 1.0

    class Listed(NamedTuple):
        seen: list[float] = []  # noqa: RUF012 - a mistake that users make

        def update(self, reference: Tensor, quantized: Tensor) -> Listed:
            return self

        merge, compute = Plain.merge, Plain.compute

    with_steps = layers(batches[:1], metrics={"steps": Steps()})
    wanted = r"report 1 has the metrics \['steps'\], given were \[\]\. Pass each .* metrics=\{name: empty state\}"
    with pytest.raises(pt2qa.ReportError, match=wanted):
        pt2qa.merge([with_steps])
    for metric, why in (
        (Plain(), "Plain is neither a NamedTuple"),
        (Listed(), "seen is of type list, expected numbers"),
    ):
        report = layers(batches[:1], metrics={"mine": metric})
        with pytest.raises(pt2qa.ReportError, match=f"cannot merge: metric 'mine': {why}"):
            pt2qa.merge([report, report], metrics={"mine": metric})
    with pytest.raises(pt2qa.ReportError, match="do not fit its kind: no array 'counted/custom/steps/share'"):
        pt2qa.merge([with_steps], metrics={"steps": Percentile()})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda sums: sums.pop("counted/sums/noise"), "no array 'counted/sums/noise'"),
        (lambda sums: sums.update({"counted/sums/noise": np.zeros(2)}), "arrays of different length in 'counted'"),
        (lambda sums: sums.update({"counted/sums/noise": np.zeros((8, 2))}), r"'counted/sums/noise' holds float64"),
        (lambda sums: sums.update({"compared/name": np.zeros(2, np.uint8)}), "no text in 'compared/name'"),
        (
            lambda sums: sums.update({"settings": np.frombuffer(b"[]", np.uint8)}),
            "'settings' holds list, expected a dict",
        ),
    ],
    ids=["missing", "length", "shape", "text", "settings"],
)
def test_sums_that_do_not_fit(layers, batches, change: Callable[[dict[str, Any]], Any], problem: str) -> None:
    report = layers(batches[:1])
    sums = copy.copy(report.sums)
    change(sums)
    with pytest.raises(pt2qa.ReportError, match=problem):
        pt2qa.merge([replace(report, sums=sums)])


# -- accumulators ------------------------------------------------------------------------------------------------------


def test_an_accumulator_is_packed_and_unpacked() -> None:
    empty = Totals(custom={"median": Percentile()})
    seen = replace(empty, sums=error_sums(torch.ones(4), torch.zeros(4)), shape=(2, 2), dtype="float32")
    sums = pack({"a": "b"}, own=[empty, seen], none=[])
    one, two = unpack(sums, "own", empty)
    assert one.sums == empty.sums
    assert (two.sums, two.shape, two.dtype) == (seen.sums, (2, 2), "float32")
    assert one.shape is None
    assert torch.equal(two.custom["median"].counts, Percentile().counts)
    assert unpack(sums, "none", empty) == []
    assert settings_of(sums) == {"a": "b"}
    assert two.merge(empty).sums == empty.merge(two).sums == two.sums
