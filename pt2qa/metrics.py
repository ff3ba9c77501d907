"""What a quantized tensor lost: the numbers of the reports, for two tensors at hand.

Each function takes the reference first, which is the signal.  The sums run over all elements in float64, as in every
report, whose accumulators these functions share.  Places where both tensors hold the same infinity, or both NaN, are
left out; one where they hold different ones, or only one of them does, makes the number nan.  Nothing to compare gives
nan, too.

:func:`log_likelihood`, :func:`next_token_accuracy` and :func:`token_agreement` make metrics of language models:
functions of a model, larger is better, for ``metric=`` and :class:`pt2qa.Target`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pt2qa._ambient import torch_defaults
from pt2qa._metrics import ErrorSums, error_sums, float64

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "atol", "cosine", "l1", "log_likelihood", "mse", "next_token_accuracy", "perplexity", "sqnr", "token_agreement",
]  # fmt: skip

ModelMetric: TypeAlias = Callable[[Callable[..., Any]], float]
"""A function of a model, larger is better; see :class:`pt2qa.Target`."""


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


def log_likelihood(
    prompts: Iterable[Any], *, ids: str = "input_ids", mask: str | None = "attention_mask", logits: str | int = "logits"
) -> ModelMetric:
    """A metric: the mean log-likelihood of each next token, the negative logarithm of the perplexity.

    ``Σ log softmax(logits[t])[ids[t + 1]] / n``, over the n positions t for which t and t + 1 both count

    Args:
        prompts: batches, dicts of inputs, that can be read again and again: ids, integers of shape (samples,
            positions), and a mask of the same shape.
        ids: the key of the tokens.
        mask: the key of the mask, 1 at positions that count; None, or a key that a batch lacks: all do.
        logits: where the model's output has its scores, of shape (samples, positions, tokens): a key or an index.  An
            output that is a tensor is taken as it is.

    Returns:
        A function of a model that gives nats for each token, at most 0; ``math.exp(-number)`` is the perplexity.  nan
        without two positions in a row.

    Source:
        the loss of causal language models in ``transformers``, whose perplexity is the exponential of the loss.

    >>> prompts = [{"input_ids": torch.tensor([[0, 1, 1]]), "attention_mask": torch.tensor([[1, 1, 0]])}]
    >>> certain = lambda input_ids, attention_mask: {"logits": torch.tensor([[[0.0, 0.0]] * 3])}
    >>> round(log_likelihood(prompts)(certain), 4)
    -0.6931
    """

    def likelihoods(model: Callable[..., Any], batch: Mapping[str, Any]) -> Tensor:
        scores, tokens = _next_tokens(model, batch, ids, mask, logits)
        return float64(scores).log_softmax(-1).gather(-1, tokens.unsqueeze(-1))

    return _mean("log_likelihood", prompts, likelihoods)


def perplexity(
    model: Callable[..., Any],
    prompts: Iterable[Any],
    *,
    ids: str = "input_ids",
    mask: str | None = "attention_mask",
    logits: str | int = "logits",
) -> float:
    """The perplexity of a model: ``exp(-log_likelihood)``, smaller is better, at least 1.

    Args:
        model: is called with the inputs of a prompt by name.
        prompts: as in :func:`log_likelihood`.
        ids: the key of the tokens.
        mask: the key of the mask.
        logits: the key or index of the scores.

    >>> prompts = [{"input_ids": torch.tensor([[0, 1, 1]])}]
    >>> round(perplexity(lambda input_ids: torch.zeros(1, 3, 4), prompts), 4)
    4.0
    """
    return math.exp(-log_likelihood(prompts, ids=ids, mask=mask, logits=logits)(model))


def next_token_accuracy(
    prompts: Iterable[Any], *, ids: str = "input_ids", mask: str | None = "attention_mask", logits: str | int = "logits"
) -> ModelMetric:
    """A metric: the share of positions at which the most likely token is the next one of the prompt.

    Args:
        prompts: as in :func:`log_likelihood`.
        ids: the key of the tokens.
        mask: the key of the mask.
        logits: the key or index of the scores.

    Returns:
        A function of a model that gives 0..1; nan without two positions in a row.

    >>> prompts = [{"input_ids": torch.tensor([[0, 1, 0]])}]
    >>> next_token_accuracy(prompts)(lambda input_ids: torch.tensor([[[0.0, 1.0]] * 3]))
    0.5
    """

    def hits(model: Callable[..., Any], batch: Mapping[str, Any]) -> Tensor:
        scores, tokens = _next_tokens(model, batch, ids, mask, logits)
        return scores.argmax(-1) == tokens

    return _mean("next_token_accuracy", prompts, hits)


def token_agreement(
    float_model: Callable[..., Any],
    prompts: Iterable[Any],
    *,
    mask: str | None = "attention_mask",
    logits: str | int = "logits",
) -> ModelMetric:
    """A metric: the share of positions at which a model's most likely token is the float model's.

    Args:
        float_model: the model before quantization, or ``pair.reference``; it runs again for each model measured.
        prompts: as in :func:`log_likelihood`.
        mask: the key of the mask.
        logits: the key or index of the scores.

    Returns:
        A function of a model that gives 0..1; nan if no position counts.

    >>> prompts = [{"x": torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])}]
    >>> token_agreement(lambda x: x, prompts)(lambda x: torch.zeros_like(x))
    0.5
    """

    def agreed(model: Callable[..., Any], batch: Mapping[str, Any]) -> Tensor:
        wanted, found = (_scores(each(**batch), logits).argmax(-1) for each in (float_model, model))
        return (wanted == found)[_counting(batch, mask, wanted)]

    return _mean("token_agreement", prompts, agreed)


def _mean(
    name: str, prompts: Iterable[Any], numbers: Callable[[Callable[..., Any], Mapping[str, Any]], Tensor]
) -> ModelMetric:
    """A metric: the mean of a model's numbers at the positions that count."""

    def metric(model: Callable[..., Any]) -> float:
        total = count = 0.0
        with torch.no_grad():
            for batch in prompts:
                found = numbers(model, batch)
                total, count = total + float(float64(found).sum()), count + found.numel()
        return total / count if count else math.nan

    metric.__name__ = name
    return metric


def _next_tokens(
    model: Callable[..., Any], batch: Mapping[str, Any], ids: str, mask: str | None, logits: str | int
) -> tuple[Tensor, Tensor]:
    """The scores and the next token of each position that counts, as the next one does."""
    tokens = batch[ids]
    counts = _counting(batch, mask, tokens)
    both = counts[:, :-1] & counts[:, 1:]
    return _scores(model(**batch), logits)[:, :-1][both], tokens[:, 1:][both]


def _counting(batch: Mapping[str, Any], mask: str | None, tokens: Tensor) -> Tensor:
    """Which positions count: bool (samples, positions)."""
    return batch[mask].bool() if mask is not None and mask in batch else torch.ones_like(tokens, dtype=torch.bool)


def _scores(outputs: Any, logits: str | int) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[logits]


@torch_defaults
def _sums(reference: Tensor | ArrayLike, quantized: Tensor | ArrayLike) -> ErrorSums:
    return error_sums(_tensor(reference), _tensor(quantized))


def _tensor(values: Tensor | ArrayLike) -> Tensor:
    """NumPy reads what is no tensor, since it takes Python's numbers for float64."""
    return values if isinstance(values, Tensor) else torch.tensor(np.asarray(values))
