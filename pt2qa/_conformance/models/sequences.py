"""Attention and recurrent ops."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pt2qa._conformance.model import ConformanceModel, Inputs


class Attention(nn.Module):
    """One head of attention, by matmul and softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)
        self.value = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        weights = torch.softmax(torch.matmul(self.query(x), self.key(x).transpose(1, 2)) / 8**0.5, -1)
        return torch.matmul(weights, self.value(x))


class ScaledDotProduct(Attention):
    """The same as one op."""

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


class MultiHead(nn.Module):
    """torch's own module for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


class Recurrent(nn.Module):
    """An LSTM and a linear on what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 6, batch_first=True)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        result: Tensor = self.fc(self.rnn(x)[0])
        return result


def sequences() -> Inputs:
    """Two sequences of three vectors."""
    return (torch.randn(2, 3, 8),)


def short_sequences() -> Inputs:
    """Two sequences of two vectors: an LSTM is written out step by step."""
    return (torch.randn(2, 2, 8),)


SEQUENCES = (
    ConformanceModel("attention", "attention by matmul and softmax", Attention, sequences),
    ConformanceModel("scaled_dot_product", "attention as one op", ScaledDotProduct, sequences),
    ConformanceModel("multihead_attention", "nn.MultiheadAttention", MultiHead, sequences),
    ConformanceModel("lstm", "an LSTM, which is one op", Recurrent, sequences),
    ConformanceModel("lstm_decomposed", "an LSTM taken apart", Recurrent, short_sequences, decompose=("lstm",)),
)
