"""The LSTM of PyTorch's Numeric Suite tutorial in the PT2E flow: weights, outputs, and modules on the same input.

Run it with ``python examples/numeric_suite_lstm.py``; it takes a few seconds. ``docs/numeric_suite.md`` explains why
some numbers differ from the tutorial's.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

import pt2qa

TOKENS, INPUT, HIDDEN, LAYERS = 10, 512, 256, 5

PUBLISHED = {
    "LSTM weights": "48.1",
    "decoder weight": "48.3",
    "LSTM output": "55.4",
    "decoder output": "41.6",
    "decoder alone": "39.2",
}
"""In dB, as the tutorial prints them for one token; "decoder alone" is the result of its ``compare_model_stub``."""

QUANTIZERS = {
    "XNNPACK": pt2qa.quantizer("xnnpack", mode="dynamic"),
    "x86": pt2qa.quantizer("x86", mode="dynamic"),
    "x86, 7 bits": pt2qa.quantizer("x86", mode="dynamic", reduce_range=True),
}

State = tuple[Tensor, Tensor]


class LSTMModel(nn.Module):
    """Embedding, LSTM and decoder: tokens (steps, N) and two states (layers, N, hidden) in; scores and states out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, INPUT)
        self.rnn = nn.LSTM(INPUT, HIDDEN, LAYERS)
        self.decoder = nn.Linear(HIDDEN, TOKENS)
        for weight in (self.encoder.weight, self.decoder.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Scores of the next token, and the new state."""
        output, state = self.rnn(self.encoder(tokens), state)
        return self.decoder(output), state


def batches() -> list[tuple[Tensor, State]]:
    """Each token alone, at the start of a sequence."""
    zeros = [(torch.zeros(LAYERS, 1, HIDDEN), torch.zeros(LAYERS, 1, HIDDEN)) for _ in range(TOKENS)]
    return [(torch.tensor([[token]]), state) for token, state in enumerate(zeros)]


def figures(pair: pt2qa.QuantizedPair) -> dict[str, float]:
    """The tutorial's figures for a quantized model, in dB, over all tokens."""
    weights = [row for row in pt2qa.compare_weights(pair).rows if row.quantized]
    layers = pt2qa.compare_layers(pair, batches(), progress=False)
    (decoder,) = pt2qa.compare_modules(pair, batches(), modules=[nn.Linear], progress=False).rows
    # The LSTM's output before the decoder rounds it: the product that is the last layer's hidden state.
    output = [row for row in layers.rows if row.part_of == "rnn/lstm" and row.op == "mul"][-1]
    return {
        "LSTM weights": min(row.sqnr for row in weights if row.module == "rnn"),
        "decoder weight": next(row.sqnr for row in weights if row.module == "decoder"),
        "LSTM output": output.sqnr,
        "decoder output": layers.sqnr,
        "decoder alone": decoder.isolated_sqnr,
    }


def main(seed: int = 0) -> dict[str, dict[str, float]]:
    """Prints the figures next to the published ones, and returns them by quantizer."""
    for name in ("torch", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(seed)
    capture = pt2qa.capture(LSTMModel().eval(), batches()[0], decompose="lstm")
    found = {
        name: figures(pt2qa.quantize(capture, quantizer, batches(), progress=False))
        for name, quantizer in QUANTIZERS.items()
    }
    print("".join(f"{title:>16}" for title in ("SQNR, dB", "published", *found)))
    for figure, published in PUBLISHED.items():
        print("".join(f"{cell:>16}" for cell in (figure, published, *(f"{own[figure]:.1f}" for own in found.values()))))
    return found


if __name__ == "__main__":
    main()
