"""Internals of torchao.  It takes seconds to import, so functions import it."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2qa._graph.internals.shortcuts import replaced, shortcuts


def is_observer(module: object) -> bool:
    """Whether a module is an observer or a fake-quantize op, of torchao, torch or another package.

    They have no public base class in common; ``convert`` asks each for its scale and zero point.
    """
    return isinstance(module, nn.Module) and hasattr(module, "calculate_qparams")


def is_fake_quantize(module: object) -> bool:
    """Whether an observer also rounds what it sees: only fake-quantize ops have a switch for that."""
    return is_observer(module) and hasattr(module, "fake_quant_enabled")


def rounds_now(module: Any) -> bool:
    """Whether a fake-quantize op is switched on; torchao has functions to set it, but none to query it."""
    return is_fake_quantize(module) and bool(module.fake_quant_enabled.flatten()[0])


def without_observing(fake_quantize: Any) -> Any:
    """A copy of a fake-quantize op that rounds with the scale that it has."""
    fixed = copy.deepcopy(fake_quantize)
    fixed.observer_enabled.zero_()
    return fixed


def range_keeper(module: Any) -> Any | None:
    """What keeps the tensors ``min_val`` and ``max_val``: an observer, or a fake-quantize op's; else None."""
    observer = getattr(module, "activation_post_process", module)
    ends = (getattr(observer, name, None) for name in ("min_val", "max_val"))
    return observer if all(isinstance(end, Tensor) for end in ends) else None


def is_logger(module: nn.Module) -> bool:
    """Whether torchao's ``prepare_for_propagation_comparison`` inserted a module; it passes on its input."""
    from torchao.quantization.pt2e._numeric_debugger import OutputLogger

    return isinstance(module, OutputLogger)


def maker_of(spec: Any) -> tuple[Any, Mapping[str, Any]]:
    """What a spec makes its observer with: the class or function, and the arguments that ``with_args`` bound to it.

    The class is None if a spec makes none, as with a fixed scale.
    """
    maker: Any = getattr(spec, "observer_or_fake_quant_ctr", None)
    keywords: dict[str, Any] = {}
    while isinstance(bound := getattr(maker, "p", None), functools.partial):
        maker, keywords = bound.func, bound.keywords | keywords
    return maker, keywords


def fold_batch_norms(graph_module: GraphModule) -> None:
    """Folds batch norms into convolutions and linears as ``prepare_pt2e`` does first, in place."""
    from torchao.quantization.pt2e.quantize_pt2e import _fuse_conv_bn_, _fuse_linear_bn_

    with shortcuts():
        _fuse_conv_bn_(graph_module)
        _fuse_linear_bn_(graph_module)


def fold_quantized_weights(graph_module: GraphModule, call: Callable[..., Any]) -> GraphModule:
    """A copy with the integers of quantized constants in place of their quantize ops, as ``convert_pt2e`` folds them.

    ``call`` takes an op and its arguments, and runs it.  torchao also dequantizes each weight, for nothing, and leaves
    the float weights of submodules in the graph module although nothing reads them.
    """
    from torchao.quantization.pt2e.quantize_pt2e import _quant_node_constraint

    folding = importlib.import_module("torchao.quantization.pt2e.constant_fold")

    class Folder(folding.ConstantFolder):  # type: ignore[misc, name-defined]
        def _deduce_value(self, node: Node) -> Any:
            return self.unknown_value if self.is_impure(node) else super()._deduce_value(node)

        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return call(target, *args, **kwargs)

    folded = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    with replaced(folding, "ConstantFolder", Folder):
        folding.constant_fold(folded, _quant_node_constraint)
    result = GraphModule(folded, folded.graph)
    result.meta.update(graph_module.meta)
    return result


def statistics_of(module: Any) -> dict[str, Tensor]:
    """What an observer, or that of a fake-quantize op, has learned from data; empty if its parameters are fixed."""
    keeper = range_keeper(module)
    names = () if keeper is None else ("min_val", "max_val", "histogram")
    return {name: getattr(keeper, name).clone() for name in names if hasattr(keeper, name)}


def set_statistics(module: Any, parts: Sequence[tuple[int, dict[str, Tensor]]]) -> None:
    """Gives an observer the statistics of all parts of the data.

    Ranges are exact.  Moving averages are weighted by the numbers of batches, and histograms counted again in the bins
    of the whole range, as torchao does from batch to batch; both depend on the order of batches in one process, too.

    Args:
        module: an observer or a fake-quantize op, changed in place.
        parts: for each, how many batches it had, and what :func:`statistics_of` returned.
    """
    keeper = range_keeper(module)
    seen = [(batches, part) for batches, part in parts if part and (part["min_val"] <= part["max_val"]).any()]
    if keeper is None or not seen:
        return
    lowest, highest = (torch.stack([part[name] for _, part in seen]) for name in ("min_val", "max_val"))
    if hasattr(keeper, "averaging_constant"):
        weights = torch.tensor([float(batches) for batches, _ in seen], dtype=lowest.dtype, device=lowest.device)
        weights = (weights / weights.sum()).reshape(-1, *[1] * (lowest.dim() - 1))
        low, high = (lowest * weights).sum(0), (highest * weights).sum(0)
    else:
        low, high = lowest.amin(0), highest.amax(0)
    if hasattr(keeper, "histogram"):
        empty = torch.zeros_like(keeper.histogram)
        combined = sum(
            keeper._combine_histograms(part["histogram"], part["min_val"], part["max_val"], empty, low, high)
            for _, part in seen
        )
        keeper.histogram.detach_().resize_(combined.shape).copy_(combined)
    for name, value in (("min_val", low), ("max_val", high)):
        own = getattr(keeper, name)
        own.detach_().resize_(value.shape).copy_(value)
