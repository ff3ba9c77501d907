"""Every number against an independent float64 NumPy/SciPy computation, and chunked = whole."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.spatial.distance
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torchao.quantization.utils import compute_error

from pt2qa import metrics
from pt2qa._decibels import decibels
from pt2qa._metrics import CHUNK, ErrorSums, NoiseSums, differing, error_sums, noise_sums, sums_of_row

OF_TENSORS = ("atol", "cosine", "l1", "mse", "sqnr")
"""The metrics of two tensors, in the order of ``metrics.__all__``."""


def quantized_like(reference: Tensor, step: float = 1 / 31) -> Tensor:
    return (reference + 0.01 * torch.randn_like(reference)).div(step).round().mul(step)


def by_numpy(reference: Tensor, quantized: Tensor) -> dict[str, float]:
    ref, quant = (t.double().flatten().numpy() for t in (reference, quantized))
    difference = ref - quant
    return {
        "sqnr": 10 * math.log10(np.sum(ref**2) / np.sum(difference**2)),
        "mse": float(np.mean(difference**2)),
        "l1": float(np.mean(np.abs(difference))),
        "atol": float(np.max(np.abs(difference))),
        "cosine": 1 - float(scipy.spatial.distance.cosine(ref, quant)),
        "ref_min": float(ref.min()),
        "ref_max": float(ref.max()),
        "ref_mean": float(ref.mean()),
        "quant_min": float(quant.min()),
        "quant_max": float(quant.max()),
        "quant_mean": float(quant.mean()),
    }


@pytest.mark.parametrize(
    "shape",
    [(5,), (3, 7), (1024,), (2, 3, 1025), (8, 64, 56, 56), (1_000_003,)],
    ids=lambda shape: "x".join(map(str, shape)),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_numbers_equal_numpy_in_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    reference = torch.randn(shape).relu_().add_(0.1).to(dtype)
    quantized = quantized_like(reference.float()).to(dtype)
    sums = error_sums(reference, quantized)
    for name, expected in by_numpy(reference, quantized).items():
        assert getattr(sums, name) == pytest.approx(expected, rel=1e-6, abs=1e-7), name
    assert sums.sqnr == pytest.approx(by_numpy(reference, quantized)["sqnr"], abs=1e-6)
    assert sums.reason == ""


@pytest.mark.parametrize("size", [(3, 7), (600_000,)], ids=str)
def test_the_functions_agree_with_numpy_and_with_torch(size: tuple[int, ...]) -> None:
    reference = torch.randn(size, dtype=torch.float64)
    quantized = quantized_like(reference)
    by_torch = {
        "sqnr": compute_error(reference, quantized),
        "mse": functional.mse_loss(quantized, reference),
        "l1": functional.l1_loss(quantized, reference),
        "cosine": functional.cosine_similarity(reference.flatten(), quantized.flatten(), dim=0),
    }
    for name in OF_TENSORS:
        value = getattr(metrics, name)(reference, quantized)
        assert value == pytest.approx(by_numpy(reference, quantized)[name], rel=1e-9), name
        assert value == pytest.approx(float(by_torch.get(name, value)), rel=1e-9), name
        assert value == getattr(error_sums(reference, quantized), name), name


def test_the_functions_take_what_numpy_reads_as_float64() -> None:
    assert metrics.mse([0.1, 0.2], [0.1, 0.3]) == pytest.approx(0.005, rel=1e-12)
    frozen = np.array([0.1, 0.2])
    frozen.flags.writeable = False
    assert metrics.l1(frozen, torch.tensor([0.1, 0.3], dtype=torch.float64)) == pytest.approx(0.05, rel=1e-12)
    assert metrics.atol(1, 3) == 2.0
    with pytest.raises(ValueError, match=r"cannot compare shape \(1,\) with reference shape \(2,\)"):
        metrics.sqnr([1.0, 2.0], [1.0])


def test_the_functions_on_degenerate_tensors() -> None:
    ones, zeros = torch.ones(3, requires_grad=True), torch.zeros(3)
    assert [getattr(metrics, name)(ones, ones) for name in OF_TENSORS] == [0.0, 1.0, 0.0, 0.0, math.inf]
    assert metrics.sqnr(zeros, zeros) == math.inf
    assert math.isnan(metrics.sqnr(zeros, ones))
    assert math.isnan(metrics.cosine(zeros, ones))
    assert all(math.isnan(getattr(metrics, name)([], [])) for name in OF_TENSORS)
    assert all(math.isnan(getattr(metrics, name)([1.0, 2.0], [1.0, math.inf])) for name in OF_TENSORS)


def test_float32_sums_of_millions_of_values_keep_seven_digits() -> None:
    """A float32 dot product over this many correlated values is off in the fourth digit."""
    reference = torch.randn(6_000_000).relu_()
    quantized = quantized_like(reference)
    sums = error_sums(reference, quantized)
    exact = reference.double(), quantized.double()
    assert sums.quant_signal == pytest.approx(float((exact[1] ** 2).sum()), rel=1e-7)
    assert sums.noise == pytest.approx(float(((exact[0] - exact[1]) ** 2).sum()), rel=1e-7)


def test_the_reference_is_the_signal() -> None:
    """Trap 9: torchao's logger takes the quantized tensor as the signal."""
    reference, quantized = torch.full((4,), 10.0), torch.full((4,), 1.0)
    assert error_sums(reference, quantized).sqnr == pytest.approx(20 * math.log10(10 / 9))
    assert error_sums(quantized, reference).sqnr == pytest.approx(20 * math.log10(1 / 9))


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, 5000), max_size=6), seed=st.integers(0, 1000))
def test_chunked_equals_whole(cuts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(5000, generator=generator)
    quantized = quantized_like(reference)
    bounds = [0, *sorted(cuts), 5000]
    sums = ErrorSums()
    for start, end in itertools.pairwise(bounds):
        sums = sums.update(reference[start:end], quantized[start:end])
    whole = error_sums(reference, quantized)
    for name in ("count", "ref_min", "ref_max", "quant_min", "quant_max"):
        assert getattr(sums, name) == getattr(whole, name)
    # small chunks subtract in float64, large ones in float32
    for name in ("sqnr", "mse", "l1", "atol", "cosine", "ref_mean", "quant_mean"):
        assert getattr(sums, name) == pytest.approx(getattr(whole, name), rel=1e-6, abs=1e-7)


def test_merge_has_a_neutral_element_and_does_not_care_about_order() -> None:
    left, right = (error_sums(t, quantized_like(t)) for t in torch.randn(2, 3000))
    assert left.merge(ErrorSums()) == left
    assert ErrorSums().merge(left) == left
    assert left.merge(right) == right.merge(left)


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.permute(3, 1, 0, 2),
        lambda t: t[:, ::2],
        lambda t: t.expand(3, *t.shape),
    ],
    ids=["channels_last", "permuted", "strided", "expanded"],
)
def test_any_layout_gives_the_same_numbers(layout) -> None:  # type: ignore[no-untyped-def]
    reference = torch.randn(2, 8, 20, 20)
    quantized = quantized_like(reference)
    sums, plain = (
        error_sums(layout(reference), layout(quantized)),
        error_sums(layout(reference).contiguous(), layout(quantized)),
    )
    assert sums.sqnr == pytest.approx(plain.sqnr, abs=1e-6)
    assert sums.count == plain.count == layout(reference).numel()


# -- trap 10: degenerate tensors -------------------------------------------------------------------------------------


def test_identical_tensors_have_infinite_sqnr() -> None:
    for tensor in (torch.randn(3000), torch.zeros(3000), torch.ones(()), torch.arange(7), torch.tensor([True, False])):
        assert error_sums(tensor, tensor.clone()).sqnr == math.inf


def test_zero_reference_has_no_sqnr_and_says_why() -> None:
    for size in (4, 5000):
        sums = error_sums(torch.zeros(size), torch.full((size,), 0.5))
        assert math.isnan(sums.sqnr)
        assert sums.mse == pytest.approx(0.25, rel=1e-12)
        assert sums.reason == "the reference is all zero"


def test_empty_tensors_have_no_numbers_and_say_why() -> None:
    sums = error_sums(torch.empty(0, 3), torch.empty(0, 3))
    assert math.isnan(sums.sqnr)
    assert math.isnan(sums.ref_mean)
    assert sums.reason == "no elements"


def test_constant_and_zero_dimensional_tensors() -> None:
    sums = error_sums(torch.tensor(2.0), torch.tensor(0.5))
    assert (sums.sqnr, sums.mse, sums.l1) == (pytest.approx(20 * math.log10(2 / 1.5)), 2.25, 1.5)
    assert error_sums(torch.full((2000,), 2.0), torch.full((2000,), 1.0)).l1 == 1.0


def test_integer_boolean_and_complex_tensors() -> None:
    assert error_sums(torch.tensor([3, 4]), torch.tensor([3, 3])).noise == 1.0
    assert error_sums(torch.tensor([True, False]), torch.tensor([True, True])).noise == 1.0
    sums = error_sums(torch.tensor([3 + 4j]), torch.tensor([3 + 3j]))
    assert (sums.signal, sums.noise) == (25.0, 1.0)


def test_equal_infinities_and_nans_are_left_out_and_counted() -> None:
    """An attention mask is -inf on both sides: it is no error."""
    reference = torch.randn(3000)
    reference[:10] = -math.inf
    reference[10] = math.nan
    quantized = reference + 0.01
    sums = error_sums(reference, quantized)
    finite = reference.isfinite()
    assert sums.sqnr == pytest.approx(by_numpy(reference[finite], quantized[finite])["sqnr"], abs=1e-6)
    assert sums.excluded == 11
    assert sums.reason == "11 equal NaN or infinite values left out"


def test_one_sided_infinities_make_the_numbers_nan() -> None:
    reference, quantized = torch.randn(3000), torch.randn(3000)
    quantized[5] = math.nan
    sums = error_sums(reference, quantized)
    assert math.isnan(sums.sqnr)
    assert math.isnan(sums.atol)
    assert sums.reason == "1 values are NaN or infinite in one of the two only"
    assert math.isnan(sums_of_row(reference, reference, (quantized,))[1][0].sqnr)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e20, 1e30, 3e38])
def test_values_whose_squares_leave_float32(scale: float) -> None:
    reference = torch.linspace(0.1, 1, 4096) * scale
    quantized = reference * 0.99
    assert error_sums(reference, quantized).sqnr == pytest.approx(40.0, abs=1e-4)
    assert sums_of_row(reference, reference, (quantized,))[1][0].sqnr == pytest.approx(40.0, abs=1e-4)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot compare shape \(3,\) with reference shape \(2,\)"):
        error_sums(torch.ones(2), torch.ones(3))


def test_noise_sums_agree_with_error_sums() -> None:
    for size in (7, 5000, 600_000):
        reference = torch.randn(size)
        quantized = quantized_like(reference)
        full = error_sums(reference, quantized)
        sums, (same, other) = sums_of_row(reference, reference.clone(), (reference.clone(), quantized))
        assert sums.sqnr == same.sqnr == math.inf
        assert other.sqnr == pytest.approx(full.sqnr, abs=1e-6)
        forth, back = noise_sums((reference, quantized), ((0, 1), (1, 0)))
        assert (forth.sqnr, forth.count) == (pytest.approx(full.sqnr, abs=1e-6), size)
        assert back.signal == pytest.approx(full.quant_signal, rel=1e-6)
    assert math.isnan(NoiseSums().sqnr)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0, 7, CHUNK + 3])
def test_what_differs_is_counted_chunk_by_chunk(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    left = torch.randn(size).to(dtype)
    right = left.clone()
    right[::5] += 0.25
    right[-1:] -= 0.5
    difference = (left - right).abs()
    assert differing(left, right) == (int((left != right).sum()), float(difference.max()) if size else 0.0)


def test_noise_sums_of_pairs_are_nan_where_one_value_alone_is_not_finite() -> None:
    good, bad = torch.ones(5000), torch.ones(5000)
    bad[3] = math.nan
    first, second, same = noise_sums((good, bad), ((0, 1), (1, 0), (1, 1)))
    assert math.isnan(first.noise)
    assert math.isnan(second.noise)
    assert (same.noise, same.count) == (0.0, 4999)


def test_decibels_of_sums() -> None:
    assert decibels(1.0, 0.0) == math.inf
    assert math.isnan(decibels(0.0, 1.0))
    assert math.isnan(decibels(math.nan, 1.0))


def test_squares_that_underflow_beside_zeros_are_a_signal() -> None:
    x = torch.full((1 << 17,), 1e-30)
    x[::2] = 0
    (found,) = noise_sums([x, torch.zeros_like(x)], [(0, 1)])
    assert found.signal == pytest.approx((1 << 16) * 1e-60, rel=1e-5)
    assert found.noise == pytest.approx(found.signal)
