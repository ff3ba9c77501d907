"""Calibration: batches through a prepared graph, and proof that every observer saw some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from tqdm import tqdm

from pt2qa._capture.program import Capture
from pt2qa._graph.internals.torch import pytree
from pt2qa._quantize.prepare_check import prepared_names
from pt2qa._simulator.batches import Batch, as_call
from pt2qa.errors import QuantizeError


def find_observers(prepared: GraphModule) -> dict[str, Node]:
    """The observer (or fake-quantize) modules of a prepared graph by attribute name, with a node that calls each."""
    modules = dict(prepared.named_modules(remove_duplicate=False))
    return {
        str(node.target): node
        for node in prepared.graph.nodes
        if node.op == "call_module" and hasattr(modules.get(str(node.target)), "calculate_qparams")
    }


def calibrate(
    capture: Capture,
    prepared: GraphModule,
    batches: Iterable[Batch],
    quantizer: str,
    *,
    first: Callable[[tuple[Any, ...], dict[str, Any], Any], None],
    progress: bool | None,
) -> None:
    """Runs every batch through a prepared graph.

    Args:
        capture: checks the batches.
        prepared: the graph whose observers learn.
        batches: read once.
        quantizer: its name, for the progress bar.
        first: called with the inputs and the outputs of the first batch.
        progress: whether to show a progress bar; None: where stderr is a terminal.

    Raises:
        QuantizeError: a batch failed, there was none, or observers never saw a value; the message names them.
        BatchError: a batch does not fit what was captured.
    """
    observers = find_observers(prepared)
    modules = dict(prepared.named_modules(remove_duplicate=False))
    sharing: dict[int, list[str]] = {}
    for target in observers:
        sharing.setdefault(id(modules[target]), []).append(target)
    seen: set[str] = set()

    def note(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not (args and isinstance(args[0], Tensor) and not args[0].numel()):
            seen.update(sharing[id(module)])

    hooks = [modules[targets[0]].register_forward_hook(note) for targets in sharing.values()]
    done = 0
    try:
        disable = None if progress is None else not progress
        for batch in tqdm(batches, desc=f"calibrate {quantizer}", unit="batch", disable=disable, leave=False):
            args, kwargs = as_call(batch, prepared)
            capture.check_batch(args, kwargs)
            outputs = _run(prepared, args, kwargs, done)
            if not done:
                first(args, kwargs, outputs)
            done += 1
    finally:
        for hook in hooks:
            hook.remove()
    if not done:
        raise QuantizeError(
            "calibration gave no batch, so no scale is known. Pass at least one batch of typical inputs; an iterator "
            "that was read before is empty."
        )
    missed = sorted({place_of(node, prepared) for target, node in observers.items() if target not in seen})
    if missed:
        raise QuantizeError(
            f"{len(missed)} of {len(observers)} observers never saw a value in {done} calibration batches: "
            f"{', '.join(missed[:8])}{' …' if len(missed) > 8 else ''}. Calibrate with batches that reach these ops."
        )


def _run(prepared: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Any:
    try:
        with torch.no_grad():
            return prepared(*args, **kwargs)
    except Exception as error:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        broken = any(leaf.is_floating_point() and not bool(leaf.isfinite().all()) for leaf in leaves)
        cause = "its inputs hold NaN or infinity, for which no scale fits" if broken else "see the traceback above"
        raise QuantizeError(
            f"calibration batch {number} (counted from 0) failed with {type(error).__name__}: {error}; {cause}."
        ) from error


def place_of(observer: Node, prepared: GraphModule) -> str:
    """Where an observer stands: the op whose output it sees, or the name of the weight."""
    source = observer.args[0]
    assert isinstance(source, Node)
    return str(source.target) if source.op == "get_attr" else prepared_names(prepared).get(source.name, source.name)
