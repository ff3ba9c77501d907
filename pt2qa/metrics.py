"""What a quantized tensor lost: the numbers of the reports, for two tensors at hand.

Each function takes the reference first, which is the signal.  The sums run over all elements in float64, as in every
report, whose accumulators these functions share.  Places where both tensors hold the same infinity, or both NaN, are
left out; one where they hold different ones, or only one of them does, makes the number nan.  Nothing to compare gives
nan, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pt2qa._metrics import ErrorSums, error_sums

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["atol", "cosine", "l1", "mse", "sqnr"]


def sqnr(reference: Tensor | ArrayLike, quantized: Tensor | ArrayLike) -> float:
    """Signal-to-quantization-noise ratio.

    ``10·log10(Σ reference² / Σ (reference − quantized)²)``

    Args:
        reference: the signal; any shape, any dtype, any device.
        quantized: its quantized counterpart, of the same shape.

    Returns:
        Decibels: 6.02 for each bit.  inf for identical tensors, nan where the reference is all zero and the other not.

    Raises:
        ValueError: the shapes differ.

    Source:
        ``compute_error`` of ``torchao.quantization.utils``, which computes in the dtype of the tensors.

    >>> reference = torch.tensor([3.0, 4.0])
    >>> round(sqnr(reference, torch.tensor([3.0, 3.5])), 2)
    20.0
    >>> sqnr(reference, reference), sqnr([0.0, 0.0], [0.0, 0.1])
    (inf, nan)
    """
    return _sums(reference, quantized).sqnr


def mse(reference: Tensor | ArrayLike, quantized: Tensor | ArrayLike) -> float:
    """Mean squared error.

    ``Σ (reference − quantized)² / n``

    Args:
        reference: any shape, any dtype, any device.
        quantized: its quantized counterpart, of the same shape.

    Returns:
        In the square of the tensors' unit; 0 for identical tensors.

    Raises:
        ValueError: the shapes differ.

    Source:
        ``torch.nn.functional.mse_loss``.

    >>> mse(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5]))
    0.125
    """
    return _sums(reference, quantized).mse


def l1(reference: Tensor | ArrayLike, quantized: Tensor | ArrayLike) -> float:
    """Mean absolute error.

    ``Σ |reference − quantized| / n``

    Args:
        reference: any shape, any dtype, any device.
        quantized: its quantized counterpart, of the same shape.

    Returns:
        In the tensors' unit; 0 for identical tensors.

    Raises:
        ValueError: the shapes differ.

    Source:
        ``torch.nn.functional.l1_loss``.

    >>> l1(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5]))
    0.25
    """
    return _sums(reference, quantized).l1


def atol(reference: Tensor | ArrayLike, quantized: Tensor | ArrayLike) -> float:
    """Largest absolute error: the ``atol`` with which ``torch.allclose(..., rtol=0)`` just holds.

    ``max |reference − quantized|``

    Args:
        reference: any shape, any dtype, any device.
        quantized: its quantized counterpart, of the same shape.

    Returns:
        In the tensors' unit; 0 for identical tensors.

    Raises:
        ValueError: the shapes differ.

    Source:
        ``torch.allclose``.

    >>> atol(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5]))
    0.5
    """
    return _sums(reference, quantized).atol


def cosine(reference: Tensor | ArrayLike, quantized: Tensor | ArrayLike) -> float:
    """Cosine similarity of the two flattened tensors.

    ``Σ reference·quantized / (√Σ reference² · √Σ quantized²)``

    Args:
        reference: any shape, any dtype, any device.
        quantized: its quantized counterpart, of the same shape.

    Returns:
        −1..1: 1 for tensors that differ by a positive factor alone, nan where one of them is all zero.

    Raises:
        ValueError: the shapes differ.

    Source:
        ``torch.nn.functional.cosine_similarity``.

    >>> cosine(torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0]))
    1.0
    >>> round(cosine([3.0, 4.0], [4.0, 3.0]), 2)
    0.96
    """
    return _sums(reference, quantized).cosine


def _sums(reference: Tensor | ArrayLike, quantized: Tensor | ArrayLike) -> ErrorSums:
    return error_sums(_tensor(reference), _tensor(quantized))


def _tensor(values: Tensor | ArrayLike) -> Tensor:
    """NumPy reads what is no tensor, since it takes Python's numbers for float64."""
    return values if isinstance(values, Tensor) else torch.tensor(np.asarray(values))
