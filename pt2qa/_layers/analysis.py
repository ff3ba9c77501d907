"""Layer by layer and module by module: reference against quantized model, one row per value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from pt2qa._ambient import torch_defaults
from pt2qa._layers.comparison import Comparison, compare
from pt2qa._layers.reading import find_blocks
from pt2qa._layers.report import LayerReport
from pt2qa._layers.rows import LayerRow
from pt2qa._metrics import Metric
from pt2qa._quantize.pairing import QuantizedPair, check_pair
from pt2qa._ranks import over_ranks
from pt2qa._report.selection import OpKind, select
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data, Mask
from pt2qa.errors import SelectionError


@torch_defaults
@over_ranks
def compare_layers(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    isolated: bool = True,
    prefixes: Sequence[str] = (),
    ops: Sequence[OpKind] = (),
    modules: Sequence[str | type] = (),
    metrics: Mapping[str, Metric] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
) -> LayerReport:
    """Compares every op's output in the reference and in the quantized model.

    Both models run side by side on each batch. A value is compared when it is produced and freed after its last use, so
    memory does not grow with layers or batches.  On the first batch, and on each batch with new dtypes, shapes or
    strides, the outputs of this very run are checked bit for bit against the converted graph and the float graph.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.
        batches: iterable of batches, consumed once; batches may differ in size if the capture allows it.
        isolated: also run every region on the reference's inputs and round every reference value, for ``isolated_sqnr``
            and ``rounding_sqnr``; else these are nan, and the run takes about two thirds of the time.
        prefixes: module paths (``layer1``) or op names; only ops under them are compared.
        ops: op types: a name such as ``conv2d``, the class of the module that calls the op such as ``nn.Conv2d``, a
            function such as ``torch.add``, or an overload; only these are compared.
        modules: module paths (``layer2``), classes or class names (``BasicBlock``): each of their calls is also run
            whole, quantized, on the reference's inputs, and gets its own row in ``report.modules``.
        metrics: extra columns: name → a :class:`pt2qa.Metric` in its empty state.
        inputs_of: maps an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        mask: which positions count: the name of an input of zeros and ones, such as ``attention_mask``, or a function
            of a batch that returns a bool tensor of shape (samples, positions).  The others, such as padding, are in no
            sum, and a metric receives the elements that count, of shape (positions, ...).
        progress: whether to show a progress bar; None: if stderr is a terminal.

    Returns:
        The report.  After Ctrl-C, if at least one batch is finished, it covers the finished batches and says so.

    Raises:
        BatchError: there is no batch, or one does not match the captured inputs.
        SelectionError: a prefix, op type or module matches nothing, or a metric's name is already taken.
        SimulationError: the simulator does not reproduce the converted graph.

    >>> report = pt2qa.compare_layers(pair, [x], progress=False)
    >>> [row.name for row in report.rows], report.sqnr > 20
    (['input', '0/linear'], True)
    """
    check_pair(pair)
    steps = [step for step in pair.program.steps if step.site is None]
    selected = frozenset(steps[position].index for position in select(steps, prefixes, ops))
    blocks = find_blocks(pair.program, modules)
    data = Data("batches", batches, inputs_of, mask, progress)
    return compare(Comparison(pair, data, selected, blocks, isolated, named_metrics(metrics)), "layers")


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

    >>> [row.name for row in pt2qa.compare_modules(pair, [x], modules=[torch.nn.Linear]).rows]
    ['0']
    """
    check_pair(pair)
    blocks = find_blocks(pair.program, modules)
    data = Data("batches", batches, inputs_of, mask, progress)
    return compare(Comparison(pair, data, frozenset(), blocks, False, named_metrics(metrics)), "modules")


def compare_rounding(pair: QuantizedPair, data: Data) -> LayerReport:
    """:func:`compare_layers` with ``rounding_sqnr``, but without ``isolated_sqnr``, which costs more than the rest."""
    steps = frozenset(step.index for step in pair.program.steps if step.site is None)
    return compare(Comparison(pair, data, steps, (), False, {}, rounding=True), "layers")


def named_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """The user's metrics by name; rejects column names and any ``worse`` other than the two allowed."""
    named = dict(metrics or {})
    taken = {column.name for column in fields(LayerRow)} & named.keys()
    if taken:
        raise SelectionError(f"the metric names {sorted(taken)} are columns of the layer table. Choose other names.")
    for name, metric in named.items():
        if (worse := getattr(metric, "worse", None)) not in (None, "smaller", "larger"):
            raise SelectionError(
                f"the metric {name!r} has worse = {worse!r}. Expected 'smaller' or 'larger', or no such attribute."
            )
    return named
