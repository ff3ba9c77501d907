"""Internals of torchao.  It takes seconds to import, so functions import it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule


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

    _fuse_conv_bn_(graph_module)
    _fuse_linear_bn_(graph_module)


def fold_quantized_weights(graph_module: GraphModule) -> None:
    """Computes the quantize ops of constants, in place, as ``convert_pt2e`` does last unless told not to."""
    from torchao.quantization.pt2e.constant_fold import constant_fold
    from torchao.quantization.pt2e.quantize_pt2e import _quant_node_constraint

    constant_fold(graph_module, _quant_node_constraint)
