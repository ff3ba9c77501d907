"""What this plug-in uses of torchao's x86 quantizer beyond its public methods."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer


def function_of(op: str) -> Callable[..., Any]:
    """The function or module class by which the quantizer's settings know an op: ``nn.Linear`` for ``linear``.

    ``set_function_type_qconfig`` takes no other, and its list has no public name.
    """
    known: Mapping[Callable[..., Any], object] = X86InductorQuantizer.module_function_to_aten_operator_type
    return next(function for function, target in known.items() if str(target).split(".")[1] == op)


def configured_modules(quantizer: X86InductorQuantizer) -> Collection[str]:
    """The paths that ``set_module_name_qconfig`` was given; it overwrites in silence, and nothing tells them."""
    return quantizer.module_name_qconfig  # type: ignore[no-any-return]
