"""Every number against an independent float64 NumPy/SciPy computation, and chunked = whole."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torchao.quantization.utils import compute_error

from pt2qa import metrics
from pt2qa._decibels import decibels
from pt2qa._metrics import (
    CHUNK,
    ErrorSums,
    NoiseSums,
    chunks,
    differing,
    divergence,
    error_sums,
    noise_sums,
    sums_of_row,
)

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


# -- every field ------------------------------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan


def fields(reference: Tensor, quantized: Tensor) -> dict[str, float]:
    """All fields of :class:`ErrorSums`, by NumPy in float64."""
    ref, quant = (t.detach().double().flatten().numpy() for t in (reference, quantized))
    finite = np.isfinite(ref) & np.isfinite(quant)
    same = (ref == quant) | (np.isnan(ref) & np.isnan(quant))
    r, q = ref[finite], quant[finite]
    d = r - q
    return {
        "count": r.size,
        "signal": r @ r,
        "noise": d @ d,
        "quant_signal": q @ q,
        "product": r @ q,
        "absolute": np.abs(d).sum(),
        "atol_seen": np.abs(d).max(initial=0.0),
        "ref_sum": r.sum(),
        "quant_sum": q.sum(),
        "ref_min": r.min(initial=INF),
        "ref_max": r.max(initial=-INF),
        "quant_min": q.min(initial=INF),
        "quant_max": q.max(initial=-INF),
        "excluded": int((~finite & same).sum()),
        "nonfinite": int((~finite & ~same).sum()),
    }


def lopsided(size: int, *, zeros: int = 0, both: int = 0, alone: int = 0) -> tuple[Tensor, Tensor]:
    """A tensor of unlike ends and its quantized one, with zeros, common infinities and NaN, and such in one alone."""
    generator = torch.Generator().manual_seed(size)
    reference = torch.randn(size, generator=generator) * 2 + 0.5
    quantized = reference.mul(31).round().div(31) * 1.02 - 0.01
    reference[:zeros] = quantized[:zeros] = 0
    reference[5 : 5 + both] = quantized[5 : 5 + both] = INF
    if both:
        reference[5] = quantized[5] = NAN
    quantized[-1 - alone : -1] = -INF
    return reference, quantized


CASES = {
    "small": lopsided(7),
    "small with a mask": lopsided(30, both=3),
    "small with one infinity": lopsided(30, both=2, alone=1),
    "one chunk, whole rows": lopsided(1024),
    "one chunk, part of a row": lopsided(1024 + 61),
    "a mask": lopsided(2000, both=4),
    "infinities alone": lopsided(2000, alone=3),
    "zeros": lopsided(2000, zeros=1999),
    "two chunks": lopsided(CHUNK + 1100, zeros=3),
    "a mask in the first of two chunks": lopsided(CHUNK + 2000, both=9),
    "nothing but a mask": (torch.full((9,), -INF), torch.full((9,), -INF)),
    "nothing finite in one": (torch.ones(9), torch.full((9,), NAN)),
    "nothing": (torch.ones(0), torch.ones(0)),
    "all zero": (torch.zeros(2000), torch.zeros(2000)),
    "zero becomes one": (torch.zeros(2000), torch.ones(2000)),
    "one becomes zero": (torch.ones(2000), torch.zeros(2000)),
    "opposite": (torch.ones(2000), -torch.ones(2000)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_field_of_the_sums_equals_numpy(name: str) -> None:
    reference, quantized = CASES[name]
    for pair in ((reference, quantized), (quantized, reference), (reference.double(), quantized.double())):
        sums = error_sums(*pair)
        for field, expected in fields(*pair).items():
            assert getattr(sums, field) == pytest.approx(expected, rel=2e-6, abs=1e-9), (field, name)
    halved = ErrorSums().update(reference[:5], quantized[:5]).update(reference[5:], quantized[5:])
    for field, expected in fields(reference, quantized).items():
        assert getattr(halved, field) == pytest.approx(expected, rel=2e-6, abs=1e-9), (field, name)


@pytest.mark.parametrize("name", CASES)
def test_the_sums_of_other_values_of_a_row_leave_out_what_is_infinite_in_each_pair(name: str) -> None:
    reference, quantized = CASES[name]
    other = quantized * 1.5
    own, noises = sums_of_row(reference, reference, (quantized, other, reference))
    assert own == error_sums(reference, reference)
    pairs = noise_sums((reference, quantized, other), ((0, 1), (0, 2), (0, 0)))
    for found in (noises, pairs):
        for noise, value in zip(found, (quantized, other, reference), strict=True):
            expected = fields(reference, value)
            for field in ("signal", "count", "noise"):
                wanted = NAN if field == "noise" and expected["nonfinite"] else expected[field]
                assert getattr(noise, field) == pytest.approx(wanted, rel=2e-6, abs=1e-9, nan_ok=True), field
            if expected["count"] and expected["noise"] and expected["signal"] and not expected["nonfinite"]:
                wanted = 10 * math.log10(expected["signal"] / expected["noise"])
                assert noise.sqnr == pytest.approx(wanted, abs=1e-5)


def test_ranges_that_are_known_are_taken_as_they_are() -> None:
    reference, quantized = CASES["one chunk, whole rows"]
    sums, _ = sums_of_row(reference, quantized, (), ranges=((-9.0, 8.0), (-7.0, 6.0)))
    assert (sums.ref_min, sums.ref_max, sums.quant_min, sums.quant_max) == (-9.0, 8.0, -7.0, 6.0)
    with pytest.raises(ValueError, match=r"cannot compare shape \(3,\) with reference shape \(2,\)"):
        sums_of_row(torch.ones(2), torch.ones(2), (torch.ones(2), torch.ones(3)))


def test_numbers_of_sums_by_hand() -> None:
    sums = ErrorSums(4, 16.0, 1.0, 9.0, 6.0, 2.0, 0.75, 8.0, 6.0)
    assert (sums.mse, sums.l1, sums.atol, sums.cosine) == (0.25, 0.5, 0.75, 0.5)
    assert (sums.ref_mean, sums.quant_mean, sums.sqnr) == (2.0, 1.5, pytest.approx(10 * math.log10(16)))
    # Rounding may take a cosine out of its range.
    assert ErrorSums(1, 1.0, 0.0, 1.0, 1.001).cosine == 1.0
    assert ErrorSums(1, 1.0, 0.0, 1.0, -1.001).cosine == -1.0
    assert NoiseSums(16.0, 1.0, 4).sqnr == pytest.approx(10 * math.log10(16))
    assert NoiseSums(0.0, 0.0, 1).sqnr == INF


@pytest.mark.parametrize("broken", [ErrorSums(), ErrorSums(4, 16.0, 1.0, 9.0, 6.0, 2.0, 0.75, nonfinite=1)])
def test_sums_of_nothing_or_with_an_infinity_in_one_alone_have_no_numbers(broken: ErrorSums) -> None:
    assert all(math.isnan(getattr(broken, name)) for name in OF_TENSORS)
    assert all(math.isnan(getattr(ErrorSums(), name)) for name in ("ref_mean", "quant_mean"))
    assert (ErrorSums().ref_min, ErrorSums().ref_max, ErrorSums().quant_min) == (INF, -INF, INF)


@pytest.mark.parametrize(
    ("sums", "reason"),
    [
        (ErrorSums(4, 1.0, 1.0), ""),
        (ErrorSums(4, 0.0, 0.0), ""),
        (ErrorSums(4, 0.0, 1.0), "the reference is all zero"),
        (ErrorSums(), "no elements"),
        (ErrorSums(excluded=2), "no finite values; 2 equal NaN or infinite values left out"),
        (ErrorSums(nonfinite=2), "2 values are NaN or infinite in one of the two only"),
        (
            ErrorSums(4, 0.0, 1.0, excluded=1, nonfinite=3),
            "3 values are NaN or infinite in one of the two only; the reference is all zero; "
            "1 equal NaN or infinite values left out",
        ),
    ],
)
def test_why_a_number_is_missing(sums: ErrorSums, reason: str) -> None:
    assert sums.reason == reason


def test_tensors_of_one_layout_are_read_without_a_copy() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    column = torch.randn(6, 4)[:, 0]
    for tensors in ((image, image.clone()), (image.transpose(0, 1), image.transpose(0, 1)), (column[None, :1],)):
        (chunk,) = chunks(tensors)
        assert [part.data_ptr() for part in chunk] == [each.data_ptr() for each in tensors]
    # Of unlike layouts, elements still come in one order.
    ((left, right),) = chunks((image, image.contiguous()))
    assert torch.equal(left, right)
    assert [len(part) for (part,) in chunks((torch.ones(2 * CHUNK + 1),))] == [CHUNK, CHUNK, 1]


def test_divergence_is_that_of_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 3, 4, 6, generator=generator) * 3
    expected = scipy.stats.entropy(
        *(scipy.special.softmax(each.double().numpy(), -1) for each in (logits, other)), axis=-1
    )
    assert divergence(logits, other).dtype == torch.float64
    assert divergence(logits, other).numpy() == pytest.approx(expected, rel=1e-12)
    half = divergence(logits.half(), other.half().requires_grad_())
    assert half.numpy() == pytest.approx(expected, rel=0.02)
    # A class that the reference rules out costs nothing; one that the other alone rules out costs everything.
    masked, bare = logits.clone(), other.clone()
    masked[..., 0] = -INF
    bare[..., 0] = -INF
    assert divergence(masked, bare).numpy() == pytest.approx(
        scipy.stats.entropy(
            *(scipy.special.softmax(each[..., 1:].double().numpy(), -1) for each in (logits, other)), axis=-1
        )
    )
    assert bool((divergence(masked, other).isfinite()).all())
    assert bool((divergence(logits, bare) == INF).all())
    assert bool((divergence(logits, logits + 0.5) >= 0).all())
