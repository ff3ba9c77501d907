"""The pairs of ops in a model that its backend runs as one kernel although its quantizer rounds between them."""

from __future__ import annotations

from typing import Any

from pt2qa._capture.program import Capture
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.edited import annotations_of
from pt2qa.overrides.plan import Edit


def fusions(capture: Capture, quantizer: Any) -> tuple[Edit, ...]:
    """The ``fuse`` edits that are possible in a model, in graph order.

    Args:
        capture: the captured model.
        quantizer: as :func:`pt2qa.quantize` takes it; a plug-in that declares no pairs to fuse yields none.

    Raises:
        QuantizeError: the quantizer cannot annotate the model.
        PluginError: there is no such quantizer.
    """
    return fusions_in(annotations_of(capture, quantizer))


def fusions_in(annotations: Annotations) -> tuple[Edit, ...]:
    """The ``fuse`` edits that are possible in an annotated model, in graph order."""
    nodes = annotations.ground.nodes
    pairs = annotations.ground.fusable or ()
    edits = [
        Edit("fuse", (nodes[reader].name, node.name))
        for node in nodes.values()
        for reader in node.inputs
        if (nodes[reader].op, node.op) in pairs and not node.constant
    ]
    # Others have more readers, or nothing is rounded in between.
    return tuple(edit for edit in edits if annotations.after(edit) is not None)
