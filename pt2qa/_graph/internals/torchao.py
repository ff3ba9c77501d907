"""Internals of torchao.  It takes seconds to import, so that functions import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule


def is_observer(module: object) -> bool:
    """Whether a module is an observer or a fake-quantize op, of torchao, of torch or of somebody else.

    They have no public base class in common; ``convert`` asks each for its scale and zero point.
    """
    return isinstance(module, nn.Module) and hasattr(module, "calculate_qparams")


def is_fake_quantize(module: object) -> bool:
    """Whether an observer rounds what it sees, too: fake-quantize ops alone have a switch for that."""
    return is_observer(module) and hasattr(module, "fake_quant_enabled")


def rounds_now(module: Any) -> bool:
    """Whether a fake-quantize op is switched on; torchao has functions to switch it, and none to ask."""
    return is_fake_quantize(module) and bool(module.fake_quant_enabled.flatten()[0])


def stop_observing(fake_quantize: Any) -> None:
    """Lets a fake-quantize op round with the scale that it has, in place, whatever its class."""
    fake_quantize.observer_enabled.zero_()


def observed_range(module: Any) -> tuple[Tensor, Tensor] | None:
    """The smallest and largest values that an observer saw, one for each channel; None where it keeps no range.

    Of a fake-quantize op that is what its observer saw.  Before the first value they are +inf and -inf, or empty.
    """
    observer = module.activation_post_process if hasattr(module, "activation_post_process") else module
    if not hasattr(observer, "min_val") or not hasattr(observer, "max_val"):
        return None
    return observer.min_val, observer.max_val


def is_logger(module: nn.Module) -> bool:
    """Whether torchao's ``prepare_for_propagation_comparison`` put a module in; it hands on what it is given."""
    from torchao.quantization.pt2e._numeric_debugger import OutputLogger

    return isinstance(module, OutputLogger)


def maker_of(spec: Any) -> tuple[Any, Mapping[str, Any]]:
    """What a spec makes its observer with: the class or function, and the arguments that ``with_args`` bound to it.

    The class is None where a spec makes none, as one with a fixed scale.
    """
    maker = getattr(spec, "observer_or_fake_quant_ctr", None)
    from torchao.quantization.pt2e.observer import PartialWrapper

    return (maker.p.func, maker.p.keywords) if isinstance(maker, PartialWrapper) else (maker, {})


def fold_batch_norms(graph_module: GraphModule) -> None:
    """Folds batch norms into convolutions and linears as ``prepare_pt2e`` does first of all, in place."""
    from torchao.quantization.pt2e.quantize_pt2e import _fuse_conv_bn_, _fuse_linear_bn_

    _fuse_conv_bn_(graph_module)
    _fuse_linear_bn_(graph_module)


def fold_quantized_weights(graph_module: GraphModule) -> None:
    """Computes the quantize ops of constants, in place, as ``convert_pt2e`` does last of all unless told not to."""
    from torchao.quantization.pt2e.constant_fold import constant_fold
    from torchao.quantization.pt2e.quantize_pt2e import _quant_node_constraint

    constant_fold(graph_module, _quant_node_constraint)
