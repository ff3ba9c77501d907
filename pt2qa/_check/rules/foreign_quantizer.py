"""A quantizer and a ``prepare`` from different packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pt2qa._check.context import CheckContext, UnavailableError
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """A quantizer that derives from another package's ``Quantizer``."""
    if context.quantizer is None:
        known = context.given == "pair" and context.pair.recipe is not None
        raise DoesNotApplyError("to quantizers that made a pair" if known else "without a quantizer: give quantizer=")
    if not is_foreign(context.quantizer):
        return
    try:
        context.plugin  # noqa: B018  it is refused, and the reason is kept
    except UnavailableError:
        yield Found("", context.failures["quantizer"])


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


RULE = Rule(
    id="foreign-quantizer",
    severity="error",
    title="quantizer and prepare come from different packages",
    why="Each package keeps annotations in classes of its own: prepare_pt2e of torchao then sees none or fails at the "
    "first, and the model stays in float (pytorch#160095).",
    fix="take the quantizer that derives from torchao.quantization.pt2e.quantizer.Quantizer: those of torchao and "
    "executorch do, those of torch.ao do not",
    find=find,
)
