"""Every column of the layer table, and what can be asked of compare_layers."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2qa
from tests.flows import direct_sqnr, quantized_pair, residual_pair
from tests.models import Counter, Linears, NestedOutputs, Recurrent, images, residual
from tests.recomputation import Recomputation

BATCHES = [images(seed=seed) for seed in (1, 2, 3)]


def layers(pair: pt2qa.QuantizedPair, batches: Any, **options: Any) -> pt2qa.LayerReport:
    return pt2qa.compare_layers(pair, batches, progress=False, **options)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_every_column_equals_numpy_in_float64(quantizer: str) -> None:
    pair = residual_pair(quantizer)
    values = [Recomputation(pair, batch) for batch in BATCHES]
    report = layers(pair, BATCHES)
    assert len(report.rows) == 8
    for row in report.rows:
        kept = [batch.of(row) for batch in values]
        ref, quant, isolated, rounded = (
            np.concatenate([batch[side].double().numpy().ravel() for batch in kept]) for side in range(4)
        )

        def sqnr(other: np.ndarray[Any, Any], ref: np.ndarray[Any, Any] = ref) -> float:
            noise = float(np.sum((ref - other) ** 2))
            return 10 * math.log10(float(np.sum(ref**2)) / noise) if noise else math.inf

        expected = {
            "sqnr": sqnr(quant),
            "isolated_sqnr": sqnr(isolated),
            "mse": np.mean((ref - quant) ** 2),
            "l1": np.mean(np.abs(ref - quant)),
            "atol": np.max(np.abs(ref - quant)),
            "cosine": np.dot(ref, quant) / (np.linalg.norm(ref) * np.linalg.norm(quant)),
            "ref_min": ref.min(),
            "quant_min": quant.min(),
            "ref_max": ref.max(),
            "quant_max": quant.max(),
            "ref_mean": ref.mean(),
            "quant_mean": quant.mean(),
        }
        if row.observed_at == "dq":
            expected |= {"rounding_sqnr": sqnr(rounded), "max_lsb": expected["atol"] / row.scale}
        else:
            assert math.isnan(row.rounding_sqnr)
            assert math.isnan(row.max_lsb)
        for name, value in expected.items():
            assert getattr(row, name) == pytest.approx(value, rel=1e-6, abs=1e-6), (row.name, name)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_what_a_row_says_beside_its_errors_is_of_the_graphs(quantizer: str) -> None:
    pair = residual_pair(quantizer)
    values = [Recomputation(pair, batch) for batch in BATCHES]
    report = layers(pair, BATCHES)
    for row in report.rows:
        known, ref = pair.names[row.handle], torch.stack([batch.of(row)[0] for batch in values]).double()
        assert (row.name, row.module, row.op, row.shape) == (known.name, known.module, known.op, tuple(ref.shape[1:]))
        assert (row.part_of, row.step, row.note, row.nonfinite, row.custom) == ("", -1, "", False, {})
        site = next((s.params for s in pair.sites if s.name == row.name and s.kind == "activation"), None)
        if site is None or row.observed_at == "raw":
            assert (site, row.observed_at, row.dtype) == (None, "raw", "float32")
            numbers = row.scale, row.zero_point, row.saturation, row.range_use, row.excess_lsb
            assert all(map(math.isnan, numbers)), row.name
            continue
        assert (row.dtype, row.scale, row.zero_point) == (site.dtype, site.scale, site.zero_point)
        steps = ref / row.scale + row.zero_point
        low, high = site.quant_min, site.quant_max
        spanned = steps.round().clamp(low, high)
        assert row.range_use == pytest.approx(float(spanned.max() - spanned.min()) / (high - low)), row.name
        excess = max(float(steps.max()) - high, low - float(steps.min()), 0.0)
        assert row.excess_lsb == pytest.approx(excess, rel=1e-4, abs=1e-4), row.name
    (output,) = report.outputs
    of_output = output.handle, output.module, output.op, output.observed_at, output.shape, output.inputs
    assert of_output == (-1, "", "output", "raw", (2, 4), "")
    assert math.isnan(output.input_sqnr)


def test_rows_name_what_they_read() -> None:
    report = layers(residual_pair(), BATCHES)
    sqnr = {row.name: row.sqnr for row in report.rows}
    relu, again = "relu/relu", "relu/relu_1"
    before = {relu: "conv1/conv2d", "conv2/conv2d": relu, "add": f"conv2/conv2d, {relu}", again: "add", "mean": again}
    before |= {"x": "", "conv1/conv2d": "x", "fc/linear": "mean"}
    assert {row.name: row.inputs for row in report.rows} == before
    of_region = before | {relu: "x", again: before["add"]}
    smallest = {
        name: min((sqnr[each] for each in read.split(", ") if each), default=math.inf)
        for name, read in of_region.items()
    }
    assert {row.name: row.input_sqnr for row in report.rows} == smallest
    assert {row.name for row in report.rows if row.answers_for} == sqnr.keys() - {"conv1/conv2d", "add"}
    assert all(row.answers_for in ("", row.name) for row in report.rows)


def test_a_value_of_one_element_has_every_number() -> None:
    batch = torch.linspace(-1, 2, 4)[None]
    row = layers(quantized_pair(nn.Linear(4, 1), batch), [3 * batch]).rows[-1]
    assert row.shape == (1, 1)
    assert row.ref_min == row.ref_max == row.ref_mean
    assert (row.saturation, row.range_use) == (1.0, 0.0)
    assert row.excess_lsb > 1


class Behind(nn.Module):
    """Float ops behind the last value that is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).sin().cos()


def test_a_float_op_that_reads_no_rounded_value_has_no_error_by_itself() -> None:
    batch = torch.randn(4, 8)
    row = next(row for row in layers(quantized_pair(Behind(), batch), [batch]).rows if row.op == "cos")
    assert row.observed_at == "raw"
    assert row.isolated_sqnr == math.inf
    assert math.isfinite(row.sqnr)


def test_the_models_own_error_equals_a_direct_computation() -> None:
    for quantizer in ("xnnpack", "x86"):
        pair = residual_pair(quantizer)
        report = layers(pair, BATCHES)
        whole = torch.cat(BATCHES)
        assert report.outputs[0].name == "output"
        reference, quantized = (torch.cat([graph(b) for b in BATCHES]) for graph in (pair.reference, pair.quantized))
        assert whole.shape[0] == report.samples == 6
        assert report.sqnr == pytest.approx(direct_sqnr(reference, quantized), abs=1e-6)


def test_the_columns_of_the_table_are_the_documented_ones() -> None:
    frame = layers(residual_pair(), BATCHES[:1]).to_pandas()
    assert " ".join(frame.columns) == (
        "handle name module op observed_at dtype scale zero_point shape sqnr isolated_sqnr rounding_sqnr mse cosine l1 "
        "atol max_lsb saturation ref_min quant_min ref_max quant_max ref_mean quant_mean"
    )
    conv = frame.set_index("name").loc["conv2/conv2d"]
    assert (conv["module"], conv["op"], conv["observed_at"], conv["dtype"]) == ("conv2", "conv2d", "dq", "int8")
    assert conv["shape"] == (2, 8, 8, 8)
    assert conv["handle"] == next(step.handle for step in residual_pair().program.steps if step.name == "conv2/conv2d")


def test_saturation_counts_the_values_that_the_clamp_moved() -> None:
    """Calibrated on small values, run on large ones: the share outside the range; zeros of a relu are not saturated."""
    pair = quantized_pair(residual(), images() * 0.25)
    large = images(seed=7)
    report = layers(pair, [large])
    row = report.rows[0]
    site = next(s for s in pair.sites if s.name == "x").params
    steps = (large * (1 / site.scale)).round() + site.zero_point  # type: ignore[operator]
    outside = ((steps < site.quant_min) | (steps > site.quant_max)).double().mean()
    assert row.saturation == pytest.approx(float(outside))
    assert row.saturation > 0.1
    fine = {r.name: r for r in layers(pair, [images() * 0.25]).rows}
    assert fine["relu/relu"].saturation < 0.05
    assert fine["relu/relu"].quant_min == 0


def test_chunks_of_the_data_give_the_numbers_of_the_whole() -> None:
    dim = torch.export.Dim("batch")
    pair = quantized_pair(residual(), (images(6),), dynamic_shapes=({0: dim},))
    data = images(11, seed=4)
    whole = layers(pair, [data])
    ragged = layers(pair, [data[:8], data[8:]])
    assert (ragged.batches, ragged.samples, whole.samples) == (2, 11, 11)
    for one, other in zip(whole.rows, ragged.rows, strict=True):
        for column in ("sqnr", "isolated_sqnr", "rounding_sqnr", "mse", "l1", "cosine", "saturation", "ref_mean"):
            expected = getattr(one, column)
            assert getattr(other, column) == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True), (
                one.name,
                column,
            )


def test_cumulative_columns_alone() -> None:
    full, cumulative = (layers(residual_pair(), BATCHES, isolated=isolated) for isolated in (True, False))
    assert all(math.isnan(row.isolated_sqnr) and math.isnan(row.rounding_sqnr) for row in cumulative.rows)
    assert [row.sqnr for row in cumulative.rows] == [row.sqnr for row in full.rows]


# -- selections -------------------------------------------------------------------------------------------------------


def test_filters_by_module_prefix_and_op_type() -> None:
    pair = residual_pair()
    assert [row.name for row in layers(pair, BATCHES, prefixes=["conv1", "fc"]).rows] == ["conv1/conv2d", "fc/linear"]
    assert [row.name for row in layers(pair, BATCHES, ops=["conv2d"]).rows] == ["conv1/conv2d", "conv2/conv2d"]
    only = layers(pair, BATCHES, prefixes=["conv2"], ops=["conv2d"])
    assert [row.name for row in only.rows] == ["conv2/conv2d"]
    full = {row.name: row for row in layers(pair, BATCHES).rows}
    # The row that it reads is not in the report.
    assert only.rows[0] == dataclasses.replace(full["conv2/conv2d"], inputs="")


def test_ops_may_be_given_by_class_function_or_overload() -> None:
    pair = residual_pair()
    kinds: dict[Any, list[str]] = {
        nn.Conv2d: ["conv1/conv2d", "conv2/conv2d"],
        nn.Linear: ["fc/linear"],
        F.linear: ["fc/linear"],
        torch.relu_: ["relu/relu", "relu/relu_1"],
        torch.ops.aten.relu.default: ["relu/relu", "relu/relu_1"],
        torch.ops.aten.conv2d: ["conv1/conv2d", "conv2/conv2d"],
        operator.add: ["add"],
    }
    for kind, names in kinds.items():
        assert [row.name for row in layers(pair, BATCHES[:1], ops=[kind], isolated=False).rows] == names
    with pytest.raises(pt2qa.SelectionError, match=r"no op type is called 'Conv3d'\. Closest names: conv2d"):
        layers(pair, BATCHES[:1], ops=[nn.Conv3d])


def test_filters_that_match_nothing_list_near_names() -> None:
    pair = residual_pair()
    with pytest.raises(pt2qa.SelectionError, match=r"no module or op is called 'conv'\. Closest names: conv"):
        layers(pair, BATCHES, prefixes=["conv"])
    with pytest.raises(pt2qa.SelectionError, match=r"no op type is called 'conv3d'\. Closest names: conv2d"):
        layers(pair, BATCHES, ops=["conv3d"])
    with pytest.raises(
        pt2qa.SelectionError, match=r"no module path or class is called 'Residuals'\. Closest names: Residual"
    ):
        layers(pair, BATCHES, modules=["Residuals"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 3, padding=1)
        self.conv2 = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(torch.relu(self.conv1(x)))


def test_whole_blocks_run_on_the_references_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    pair = quantized_pair(model, images())
    by_class, by_path = (layers(pair, BATCHES, modules=[name]).modules for name in ("Block", "1"))
    assert [(row.name, row.op) for row in by_class] == [("0", "Block"), ("1", "Block")]
    assert by_path == by_class[1:]
    second = by_class[1]
    rows = {row.name: row for row in layers(pair, BATCHES).rows}
    assert second.sqnr == rows["1/add"].sqnr
    # alone it is worse than its last op alone, and better than everything before it together
    assert second.sqnr < second.isolated_sqnr < rows["1/add"].isolated_sqnr
    assert by_class[0].isolated_sqnr == pytest.approx(by_class[0].sqnr)
    # independently: the block's own converted ops, fed with the quantized reference input
    sites = [site for site in pair.sites if site.kind != "activation" and site.name.startswith("1")]
    inside = {site.index for site in sites} | {s.index for s in pair.sites if s.name.startswith("1")}
    inside |= {s.index for s in pair.sites if s.name == "0/add"}
    noise = signal = 0.0
    for batch in BATCHES:
        alone, reference = pair.simulator.run([batch], on=inside)[0], pair.reference(batch).detach()
        noise += float(((alone.double() - reference.double()) ** 2).sum())
        signal += float((reference.double() ** 2).sum())
    assert second.isolated_sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-6)


# -- custom metrics ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShareOff:
    """Share of values that are off by more than a bound."""

    bound: float
    off: int = 0
    count: int = 0

    def update(self, reference: Tensor, quantized: Tensor) -> ShareOff:
        off = int(((reference - quantized).abs() > self.bound).sum())
        return dataclasses.replace(self, off=self.off + off, count=self.count + reference.numel())

    def merge(self, other: ShareOff) -> ShareOff:
        return dataclasses.replace(self, off=self.off + other.off, count=self.count + other.count)

    def compute(self) -> float:
        return self.off / self.count if self.count else math.nan


def test_a_users_metric_is_a_column() -> None:
    empty = ShareOff(0.01)
    assert isinstance(empty, pt2qa.Metric)
    pair = residual_pair()
    report = layers(pair, BATCHES, metrics={"share_off": empty})
    assert empty == ShareOff(0.01)
    assert list(report.to_pandas().columns)[-1] == "share_off"
    row = next(row for row in report.rows if row.name == "fc/linear")
    values = [Recomputation(pair, batch).of(row) for batch in BATCHES]
    ref, quant = (torch.cat([batch[side].flatten() for batch in values]) for side in (0, 1))
    assert row.custom["share_off"] == pytest.approx(float(((ref - quant).abs() > 0.01).double().mean()))
    with pytest.raises(pt2qa.SelectionError, match=r"the metric names \['sqnr'\] are columns"):
        layers(pair, BATCHES, metrics={"sqnr": empty})


class Psnr(ShareOff):
    """A metric that says which of its values are the bad ones."""

    worse: Literal["smaller", "larger"] = "smaller"


class Odd(ShareOff):
    """A metric with a word that means nothing."""

    worse = "low"


def test_a_metric_says_which_values_are_worse(tmp_path: Path) -> None:
    report = layers(residual_pair(), BATCHES, metrics={"psnr": Psnr(0.01), "share_off": ShareOff(0.01)})
    assert (report.smaller_is_worse, report.larger_is_worse) == (("psnr",), ())
    report.save(tmp_path / "report.safetensors")
    loaded = pt2qa.load(tmp_path / "report.safetensors")
    assert isinstance(loaded, pt2qa.LayerReport)
    assert loaded.smaller_is_worse == ("psnr",)
    with pytest.raises(pt2qa.SelectionError, match=r"'odd' has worse = 'low'\. Expected 'smaller' or 'larger', or no"):
        layers(residual_pair(), BATCHES, metrics={"odd": Odd(0.01)})


@dataclass(frozen=True)
class OwnShare:
    """What an op adds by itself, as a share of all the error that arrives there; counts what it was given, too."""

    own: float = 0.0
    whole: float = 0.0
    scales: frozenset[float | None] = frozenset()

    def update(
        self, reference: Tensor, quantized: Tensor, *, isolated: Tensor | None = None, scale: float | None = None
    ) -> OwnShare:
        assert isolated is None or isolated.shape == reference.shape
        own = math.nan if isolated is None else float(((isolated.double() - reference.double()) ** 2).sum())
        whole = float(((quantized.double() - reference.double()) ** 2).sum())
        return OwnShare(self.own + own, self.whole + whole, self.scales | {scale})

    def merge(self, other: OwnShare) -> OwnShare:
        return OwnShare(self.own + other.own, self.whole + other.whole, self.scales | other.scales)

    def compute(self) -> float:
        return self.own / self.whole if self.whole else math.nan


def test_a_metric_may_ask_for_the_isolated_value_and_the_scale() -> None:
    assert isinstance(OwnShare(), pt2qa.Metric)
    pair = residual_pair()
    report = layers(pair, BATCHES, metrics={"own": OwnShare(), "off": ShareOff(0.01)}, modules=["conv2"])
    for row in (*report.rows, *report.modules):
        # both SQNRs have the reference's power above the line
        assert row.custom["own"] == pytest.approx(10 ** ((row.sqnr - row.isolated_sqnr) / 10), rel=1e-5), row.name
    assert math.isnan(report.outputs[0].custom["own"])
    alone = layers(pair, BATCHES, metrics={"off": ShareOff(0.01)})
    assert [row.custom["off"] for row in alone.rows] == [row.custom["off"] for row in report.rows]


def test_a_metric_that_asks_for_the_isolated_value_gets_none_where_it_is_not_run() -> None:
    report = layers(residual_pair(), BATCHES, metrics={"own": OwnShare()}, modules=["conv2"], isolated=False)
    assert all(math.isnan(row.custom["own"]) for row in report.rows)
    assert all(row.custom["own"] > 0 for row in report.modules)


def test_a_metric_is_given_the_rows_scale() -> None:
    @dataclass(frozen=True)
    class Scale:
        seen: tuple[float | None, ...] = ()

        def update(self, reference: Tensor, quantized: Tensor, *, scale: float | None = None) -> Scale:
            return Scale((*self.seen, scale))

        def merge(self, other: Scale) -> Scale:
            return Scale(self.seen + other.seen)

        def compute(self) -> float:
            return math.nan if None in self.seen else float(sum(self.seen) / len(self.seen))  # type: ignore[arg-type]

    example = (torch.randn(4, 16),)
    for quantizer in ("xnnpack", pt2qa.quantizer("xnnpack", mode="dynamic")):
        for row in layers(quantized_pair(Linears(), example, quantizer), [example], metrics={"unit": Scale()}).rows:
            assert row.custom["unit"] == pytest.approx(row.scale, nan_ok=True)


# -- recurrent ops that are taken apart --------------------------------------------------------------------------------


def test_the_parts_of_an_lstm_are_rows_with_their_steps() -> None:
    torch.manual_seed(0)
    example = (torch.randint(0, 10, (5, 3)), torch.zeros(2, 3, 8), torch.ones(2, 3, 8))
    capture = pt2qa.capture(Recurrent().eval(), example, decompose="lstm")
    pair = pt2qa.quantize(capture, "x86", [example], progress=False)
    report = layers(pair, [example])
    parts = report.to_pandas(extended=True).query("part_of == 'rnn/lstm'")
    assert sorted(set(parts["step"])) == [-1, 0, 1, 2, 3, 4]
    assert list(parts[parts["op"] == "linear"]["step"]) == [-1, 0, 1, 2, 3, 4] * 2
    assert {row.part_of for row in report.rows if row.module != "rnn"} == {""}
    text = report.table(limit=None)
    assert "rnn/lstm (5 steps)" in text
    assert "rnn/linear_1 " not in text
    assert "rnn/linear_1 " in report.opened("rnn/lstm").table(limit=None)


# -- shapes of models and data ----------------------------------------------------------------------------------------


def test_nested_outputs_get_a_row_each() -> None:
    """Trap 10: tuples and dicts of tensors, integers and booleans."""
    example = (torch.randn(4, 16),)
    report = layers(quantized_pair(NestedOutputs(), example), [example])
    names = [row.name for row in report.outputs]
    assert names == ["output.logits", "output.rest[0]", "output.rest[1]", "output.rest[2]"]
    dtypes = {row.name: row.dtype for row in report.rows}
    assert dtypes["argmax"] == "int64"
    assert dtypes["gt"] == "bool"
    assert any("not compared, no single tensor as output: chunk" in note for note in report.notes)
    assert report.sqnr == min(row.sqnr for row in report.outputs)


def test_several_inputs_and_an_lstm_that_stays_float() -> None:
    """Trap 25: aten.lstm is opaque to every quantizer; the report says so."""
    example = (torch.randint(0, 10, (5, 3)), torch.zeros(2, 3, 8), torch.ones(2, 3, 8))
    report = layers(quantized_pair(Recurrent(), example, pt2qa.quantizer("xnnpack", mode="dynamic")), [example])
    assert "0 of 1 lstm ops are quantized; the rest runs in float" in report.notes
    assert [row.name for row in report.outputs] == ["output[0]", "output[1]", "output[2]"]
    decoder = next(row for row in report.rows if row.name == "decoder/linear")
    assert 20 < decoder.isolated_sqnr < 70


def test_a_zero_output_is_nan_with_a_reason_and_ranks_last() -> None:
    """Trap 10: a head that is zero at the start."""

    class ZeroHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.head = nn.Linear(16, 4)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(x)) * torch.zeros(4)

    example = (torch.randn(4, 16),)
    report = layers(quantized_pair(ZeroHead(), example), [example])
    head = next(row for row in report.rows if row.name == "head/linear")
    assert head.sqnr == math.inf or (math.isnan(head.sqnr) and head.note)
    assert report.worst(1)[0].name == "first/linear"


def test_a_masked_attention_score_keeps_its_infinities() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.query(x) @ self.key(x).transpose(-1, -2)
            mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
            return scores.masked_fill(~mask, -math.inf).softmax(-1)

    example = (torch.randn(2, 5, 16),)
    report = layers(quantized_pair(Masked(), example, "x86"), [example])
    masked = next(row for row in report.rows if row.op == "masked_fill")
    assert masked.note == "20 equal NaN or infinite values left out"
    assert masked.nonfinite
    assert math.isfinite(masked.sqnr)


def test_a_buffer_that_forward_writes_to_starts_anew_for_each_batch() -> None:
    pair = quantized_pair(Counter(), images(), "x86")
    before = pair.quantized.state_dict()["calls"].clone()
    report = layers(pair, BATCHES)
    assert torch.equal(pair.quantized.state_dict()["calls"], before)
    assert report.sqnr == pytest.approx(layers(pair, BATCHES[::-1]).sqnr)
    assert "forward writes to calls; every batch is compared from the captured state" in report.notes


def test_no_batch_is_an_error() -> None:
    with pytest.raises(pt2qa.BatchError, match="no batch to compare on"):
        layers(residual_pair(), [])
    with pytest.raises(pt2qa.BatchError, match=r"shape \[2, 3, 9, 9\]; captured with \[2, 3, 8, 8\]"):
        layers(residual_pair(), [torch.randn(2, 3, 9, 9)])


def test_an_interrupt_keeps_the_batches_that_were_finished() -> None:
    def interrupted() -> Iterator[Tensor]:
        yield from BATCHES[:2]
        raise KeyboardInterrupt

    report = layers(residual_pair(), interrupted())
    assert report.batches == 2
    assert "interrupted: covers the 2 batches that were finished" in report.notes
    assert [row.sqnr for row in report.rows] == [row.sqnr for row in layers(residual_pair(), BATCHES[:2]).rows]


def test_a_fused_op_that_is_not_exact_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = quantized_pair(Linears(), (torch.randn(4, 16),))
    monkeypatch.setattr(
        "pt2qa._simulator.fused.quantize_dequantize", lambda x, *args, **options: x + 0.001, raising=True
    )
    report = layers(pair, [(torch.randn(4, 16),)])
    assert (
        "at x the fused quantize op gives other values than the converted ops; the converted ops are used instead"
    ) in report.notes
    monkeypatch.undo()
    batch = torch.randn(4, 16)
    assert layers(pair, [(batch,)]).sqnr == pytest.approx(
        direct_sqnr(pair.reference(batch), pair.quantized(batch)), abs=1e-6
    )


def test_a_simulator_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = quantized_pair(Linears(), (torch.randn(4, 16),))
    step = next(step for step in pair.program.steps if step.op == "relu")
    monkeypatch.setattr(step, "function", lambda x: x.abs())
    monkeypatch.setattr(step, "in_place", None)
    with pytest.raises(
        pt2qa.SimulationError, match=r"they differ first at relu\. Its numbers would describe another model"
    ):
        layers(pair, [(torch.randn(4, 16),)])
