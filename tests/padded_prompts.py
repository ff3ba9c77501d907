"""Prompts of unequal length, padded to one batch, and small decoders that read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pt2qa

WORDS = 24


class Running(nn.Module):
    """A decoder whose tokens meet in running sums, which are the same bits whatever follows a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.value, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        values = self.value(x) * attention_mask.unsqueeze(-1)
        x = x + self.out(values.cumsum(1))
        return {"logits": self.head(self.norm(x))}


class Attending(nn.Module):
    """A decoder with causal attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        samples, tokens = input_ids.shape
        x = self.words(input_ids)
        query, key, value = (
            layer(x).view(samples, tokens, 2, 8).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        hidden = ~(causal & attention_mask[:, None, None, :].bool())
        scores = (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(hidden, -100.0).softmax(-1)
        read = (scores @ value).transpose(1, 2).reshape(samples * tokens, 16)
        return {"logits": self.head(x + self.out(read).view(samples, tokens, 16))}


def prompts(lengths: tuple[int, ...] = (5, 9, 13, 7)) -> list[Tensor]:
    """Prompts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def padded(given: list[Tensor], to: int = 0) -> dict[str, Tensor]:
    """One batch of prompts, padded on the right."""
    ids = torch.zeros(len(given), max(to, *map(len, given)) if len(given) > 1 else max(to, len(given[0]))).long()
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(given):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    return {"input_ids": ids, "attention_mask": mask}


def with_garbage(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same prompts with other tokens at padded positions."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    other = torch.randint(1, WORDS, ids.shape, generator=torch.Generator().manual_seed(1))
    return {**batch, "input_ids": torch.where(mask.bool(), ids, other)}


def quantized(model: nn.Module, quantizer: str, *, dynamic: bool = True) -> pt2qa.QuantizedPair:
    """The model by this quantizer, for any number and length of prompts or for those of :func:`prompts`."""
    batch = padded(prompts())
    axes = {0: torch.export.Dim("prompts", max=64), 1: torch.export.Dim("tokens", min=2, max=64)}
    shapes = {"input_ids": axes, "attention_mask": axes} if dynamic else None
    capture = pt2qa.capture(model.eval(), (), batch, dynamic_shapes=shapes)
    return pt2qa.quantize(capture, quantizer, [batch], progress=False).as_deployed()
