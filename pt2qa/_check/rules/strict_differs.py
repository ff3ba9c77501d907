"""Models that are annotated otherwise when they are exported with ``strict=True``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pt2qa._capture.program import capture
from pt2qa._check.context import CheckContext
from pt2qa.errors import Pt2qaError
from pt2qa.overrides import Annotations
from pt2qa.plugins import DoesNotApplyError, Found, Rule, Severity


def find(context: CheckContext) -> Iterator[Found]:
    """Ops that are annotated in one mode of ``torch.export`` alone, after all that capture does."""
    if context.given != "model":
        raise DoesNotApplyError("to graphs: which mode made them is done")
    here = context.annotations
    try:
        shapes = context.dynamic_shapes
        captured = capture(context.model, context.args, context.keywords, dynamic_shapes=shapes, strict=True)
    except Pt2qaError as error:
        raise DoesNotApplyError("to models that torch.export cannot take with strict=True") from error
    if captured.names == context.capture.names:
        return
    there = context.annotate(captured.module(), captured.names)
    yield from _only(here, there, "strict=False", "note")
    yield from _only(there, here, "strict=True", "warning")


def _only(one: Annotations, other: Annotations, mode: str, severity: Severity) -> Iterator[Found]:
    """What is annotated in one mode alone, those of one kind together."""
    names = [op for name, op in one.ops.items() if name not in other.ops]
    counts = Counter(op.op for op in names)
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    fix = f"capture it with strict={mode == 'strict=True'}: pt2qa.capture(model, args, {mode})"
    for op in names:
        yield Found(
            op.name, f"is annotated where the model is exported with {mode} alone, among {listed}", severity, fix
        )


RULE = Rule(
    id="strict-differs",
    severity="warning",
    title="ops that are annotated in one mode of torch.export only",
    why="torch.export runs the Python of forward, or analyses it with strict=True. A branch on torch.compiler's state, "
    "or a fast path such as that of nn.TransformerEncoderLayer with frozen weights, makes two models of one.",
    fix="capture it in the mode that annotates more, and use that mode wherever the model is exported",
    needs=("capture", "annotations"),
    find=find,
)
