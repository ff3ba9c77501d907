"""torchvision definitions with random weights: the shapes matter here, not the numbers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

BATCH = 8


def images(seed: int = 0) -> Tensor:
    """Random images of shape (8, 3, 224, 224)."""
    return torch.randn(BATCH, 3, 224, 224, generator=torch.Generator().manual_seed(seed))


@functools.cache
def torchvision_model(name: str) -> nn.Module:
    """A torchvision model with random weights and batch-norm statistics; works without torchvision's compiled ops."""
    _declare_compiled_ops()
    from torchvision import models

    torch.manual_seed(0)
    model: nn.Module = getattr(models, name)()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


@functools.cache
def _declare_compiled_ops() -> torch.library.Library:
    """Declares the compiled ops that torchvision's Python code refers to; they live as long as the library object."""
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
