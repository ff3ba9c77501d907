"""Quantizers that are made for another package's ``prepare``."""

from __future__ import annotations

from typing import Any


def is_foreign(quantizer: Any) -> bool:
    """Whether an object annotates graphs as a quantizer does, but not for torchao's ``prepare_pt2e``.

    >>> from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer
    >>> is_foreign(X86InductorQuantizer()), is_foreign("x86"), is_foreign(None)
    (False, False, False)
    """
    from torchao.quantization.pt2e.quantizer import Quantizer

    if quantizer is None or isinstance(quantizer, (str, type, Quantizer)):
        return False
    named = any(base.__name__ == "Quantizer" for base in type(quantizer).__mro__)
    return named or (hasattr(quantizer, "annotate") and not hasattr(quantizer, "build"))
