"""Random vectors: signs, orthogonal within a sample, and no more chance than they state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from pt2qa._sensitivity.precision import left_to_chance, random_signs


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_vectors_are_signs_and_orthogonal_within_each_sample(count: int) -> None:
    outputs = [torch.zeros(5, 8, 2), torch.zeros(5, 16)]
    vectors = random_signs(outputs, 5, count, seed=3)
    for output, own in zip(outputs, vectors, strict=True):
        assert len(own) == count
        assert all(vector.shape == output.shape and bool((vector.abs() == 1).all()) for vector in own)
    rows = torch.stack([torch.cat([vectors[0][k].flatten(1), vectors[1][k]], 1) for k in range(count)])
    products = torch.einsum("knd,lnd->nkl", rows, rows)
    assert torch.equal(products, 32 * torch.eye(count).expand(5, count, count))


def test_vectors_are_one_times_rows_of_a_hadamard_matrix_along_all_elements() -> None:
    found = random_signs([torch.zeros(5, 3), torch.zeros(5, 2, 4)], 5, 3, seed=0)
    vectors = torch.cat([torch.stack(own).flatten(2) for own in found], 2)
    rows = hadamard(4)[:3, np.arange(5 * 11) % 4].reshape(3, 5, 11)
    assert (vectors * vectors[:1]).tolist() == rows.tolist()


def test_as_many_vectors_as_outputs_leave_nothing_to_chance() -> None:
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for samples, output in ((6, values), (1, values[:1])):
        (vectors,) = random_signs([output], samples, 4, seed=0)
        squares = torch.stack([(vector * output).sum(1) ** 2 for vector in vectors]).mean(0)
        assert squares.tolist() == pytest.approx((output**2).sum(1).tolist(), rel=1e-5)
    assert left_to_chance([values], 6, 4, apart=True) == 0.0
    assert left_to_chance([torch.zeros(6)], 6, 1, apart=True) == 0.0
    assert left_to_chance([torch.zeros(2)], 1, 1, apart=True) == 1.0


def test_the_variance_is_the_stated_one() -> None:
    values, count = torch.ones(2000, 16), 4
    (vectors,) = random_signs([values], 2000, count, seed=0)
    means = torch.stack([(vector * values).sum(1) ** 2 for vector in vectors]).mean(0)
    # One vector alone has the variance 2 (|y|⁴ - sum y⁴); independent ones would have it divided by their number.
    independent = 2 * (16**2 - 16) / count
    assert means.mean().item() == pytest.approx(16, rel=0.05)
    assert means.var().item() == pytest.approx(left_to_chance([values], 2000, count, apart=True) * independent, rel=0.1)


@pytest.mark.parametrize(("size", "count"), [(6, 4), (10, 8), (10, 10), (12, 3), (5, 1)])
def test_the_variance_is_the_stated_one_where_no_power_of_two_fits(size: int, count: int) -> None:
    # As many vectors as outputs leave something to chance here: they are not orthogonal over ten elements.
    values = torch.randn(20000, size, generator=torch.Generator().manual_seed(0))
    (vectors,) = random_signs([values], len(values), count, seed=0)
    means = torch.stack([(vector * values).sum(1) ** 2 for vector in vectors]).mean(0)
    squares = values.square()
    off = (means - squares.sum(1)).square().mean().item()
    independent = 2 * (squares.sum(1).square() - squares.square().sum(1)).mean().item() / count
    assert off == pytest.approx(left_to_chance([values], len(values), count, apart=True) * independent, rel=0.05)


def test_torchs_own_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = (random_signs([torch.zeros(4, 8)], 4, 2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first[0][1], second[0][1])
    assert not torch.equal(first[0][1], other[0][1])


def test_samples_that_are_not_apart_have_vectors_over_the_whole_batch() -> None:
    outputs = [torch.zeros(4, 3), torch.zeros(2)]
    rows = torch.stack([torch.cat([a.flatten(), b]) for a, b in zip(*random_signs(outputs, 4, 14, 0), strict=True)])
    assert len({tuple(row) for row in rows.tolist()}) == 14
    values = torch.randn(14, generator=torch.Generator().manual_seed(0))
    (vectors,) = random_signs([values], 3, 16, seed=0)
    mean = sum(float(vector @ values) ** 2 for vector in vectors) / 16
    assert mean == pytest.approx(float(values @ values), rel=1e-5)
    number, odd = random_signs([torch.zeros(()), torch.zeros(5)], 3, 8, 0)
    rows = torch.stack([torch.cat([a[None], b]) for a, b in zip(number, odd, strict=True)])
    assert len({tuple(row) for row in (rows * rows[0]).tolist()}) == 8
