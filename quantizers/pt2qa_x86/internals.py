"""What this plug-in uses from torchao's x86 quantizer beyond its public methods."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer


def function_of(op: str) -> Callable[..., Any]:
    """The function or module class by which the quantizer's settings know an op: ``nn.Linear`` for ``linear``.

    ``set_function_type_qconfig`` accepts no others, and their list is not public.
    """
    known: Mapping[Callable[..., Any], object] = X86InductorQuantizer.module_function_to_aten_operator_type
    return next(function for function, target in known.items() if str(target).split(".")[1] == op)


def configured_modules(quantizer: X86InductorQuantizer) -> Collection[str]:
    """The paths passed to ``set_module_name_qconfig``; it overwrites silently, and no public name lists them."""
    return quantizer.module_name_qconfig  # type: ignore[no-any-return]
