"""Module by module: a float block beside its quantized block, on the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pt2qa._layers.analysis import named_metrics
from pt2qa._layers.comparison import Comparison, compare
from pt2qa._layers.report import LayerReport
from pt2qa._layers.selection import find_blocks
from pt2qa._metrics import Metric
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.batches import Batch


def compare_modules(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    modules: Sequence[str | type],
    metrics: Mapping[str, Metric] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    progress: bool | None = None,
) -> LayerReport:
    """Compares whole modules: each call of them is run quantized on the inputs that it has in the reference.

    This is :func:`pt2qa.compare_layers` for its rows of modules alone, without the time that rows of ops take.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.
        batches: iterable of batches, read once.
        modules: module paths (``layer2``), classes (``nn.LSTM``) or their names (``BasicBlock``).
        metrics: more columns: name → a :class:`pt2qa.Metric` in its empty state.
        inputs_of: from an item of ``batches`` to a batch.
        progress: whether to show a progress bar; None: where stderr is a terminal.

    Returns:
        A report whose rows are the values that leave the modules, ``isolated_sqnr`` being the float module against the
        quantized one on the same input and ``sqnr`` the two models at that place.  ``op`` is the module's class.

    Raises:
        BatchError: there is no batch, or one does not fit the captured inputs.
        SelectionError: a module matches nothing, or a metric's name is taken.
        SimulationError: the simulator does not compute what the converted graph computes.

    >>> import torch, pt2qa
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    >>> x = torch.linspace(-1, 1, 32).reshape(8, 4)
    >>> pair = pt2qa.quantize(pt2qa.capture(model, x), "xnnpack", [x], progress=False)
    >>> [row.name for row in pt2qa.compare_modules(pair, [x], modules=[torch.nn.Linear]).rows]
    ['0', '2']
    """
    blocks = find_blocks(pair.program, modules)
    report = compare(
        Comparison(pair, frozenset(), blocks, False, named_metrics(metrics)), batches, inputs_of, progress, "modules"
    )
    return replace(report, rows=report.modules, modules=())
