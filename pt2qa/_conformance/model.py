"""What a conformance model is: a small module that shows one pattern, with inputs, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]
MODULE = "module"
"""The spelling that all properties except ``spelling`` use."""


@dataclass(frozen=True, eq=False)
class ConformanceModel:
    """A small model that shows one pattern.

    Args:
        name: short, as used in test ids: ``conv_bn_relu``.
        pattern: what it shows, in one line.
        make: makes the module; its parameters are drawn from a fixed seed.
        inputs: makes one batch of inputs; two batches are drawn for calibration, from fixed seeds.
        spellings: other ways to write the same computation, by name.  Their ops must come in the same
            order, and their parameters must be made in the same order, so that both have the same values.
        dynamic_shapes: as ``torch.export.export`` takes it.
        decompose: recurrent ops to decompose, as :func:`pt2qa.capture` takes it.

    >>> import torch
    >>> from pt2qa.testing import ConformanceModel
    >>> model = ConformanceModel("doubled", "adds a value to itself", torch.nn.Identity, lambda: (torch.randn(2),))
    >>> model.batches()[0][0].shape
    torch.Size([2])
    """

    name: str
    pattern: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    spellings: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    dynamic_shapes: Any = None
    decompose: tuple[str, ...] = ()

    def build(self, spelling: str = MODULE) -> nn.Module:
        """The module in eval mode; batch norms have statistics as if trained.

        Args:
            spelling: a key of ``spellings``; without it, what ``make`` makes.
        """
        make = self.make if spelling == MODULE else self.spellings[spelling]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()
            # Nontrivial running means and variances, so that folding has an effect.
            for name, buffer in model.named_buffers():
                if name.rpartition(".")[2] == "running_mean":
                    buffer.normal_(0.0, 0.2)
                elif name.rpartition(".")[2] == "running_var":
                    buffer.uniform_(0.5, 1.5)
        return model.eval()

    def batches(self) -> tuple[Inputs, Inputs]:
        """Two batches of inputs; the first one is the example for export."""
        drawn = []
        with torch.random.fork_rng(devices=[]):
            for seed in (1, 2):
                torch.manual_seed(seed)
                drawn.append(self.inputs())
        return drawn[0], drawn[1]
