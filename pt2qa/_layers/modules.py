"""Module by module: a float block beside its quantized block, on the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pt2qa._ambient import torch_defaults
from pt2qa._layers.analysis import named_metrics
from pt2qa._layers.comparison import Comparison, compare
from pt2qa._layers.report import LayerReport
from pt2qa._layers.selection import find_blocks
from pt2qa._metrics import Metric
from pt2qa._quantize.pairing import QuantizedPair, check_pair
from pt2qa._ranks import over_ranks
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data
from pt2qa._simulator.positions import Mask


@torch_defaults
@over_ranks
def compare_modules(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    modules: Sequence[str | type],
    metrics: Mapping[str, Metric] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
) -> LayerReport:
    """Compares whole modules: runs each of their calls quantized on the inputs it has in the reference.

    Equivalent to the module rows of :func:`pt2qa.compare_layers`, without the time spent on op rows.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.
        batches: iterable of batches, consumed once.
        modules: module paths (``layer2``), classes (``nn.LSTM``) or their names (``BasicBlock``).
        metrics: extra columns: name → a :class:`pt2qa.Metric` in its empty state.
        inputs_of: maps an item of ``batches`` to a batch.
        mask: which positions count: the name of an input of zeros and ones, such as ``attention_mask``, or a function
            of a batch that returns a bool tensor of shape (samples, positions).  The others, such as padding, are in no
            sum, and a metric receives the elements that count, of shape (positions, ...).
        progress: whether to show a progress bar; None: if stderr is a terminal.

    Returns:
        A report whose rows are the module outputs: ``isolated_sqnr`` compares the float and the quantized module on the
        same input, ``sqnr`` the two models at that point.  ``op`` is the module's class.

    Raises:
        BatchError: there is no batch, or one does not match the captured inputs.
        SelectionError: a module matches nothing, or a metric's name is already taken.
        SimulationError: the simulator does not reproduce the converted graph.

    >>> import torch, pt2qa
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    >>> x = torch.linspace(-1, 1, 32).reshape(8, 4)
    >>> pair = pt2qa.quantize(pt2qa.capture(model, x), "xnnpack", [x], progress=False)
    >>> [row.name for row in pt2qa.compare_modules(pair, [x], modules=[torch.nn.Linear]).rows]
    ['0', '2']
    """
    check_pair(pair)
    blocks = find_blocks(pair.program, modules)
    data = Data("batches", batches, inputs_of, mask, progress)
    return compare(Comparison(pair, data, frozenset(), blocks, False, named_metrics(metrics)), "modules")
