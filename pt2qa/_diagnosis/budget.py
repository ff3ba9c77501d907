"""``pt2qa.error_budget``: the output noise split by mechanism and place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, cast, get_args

from torch import Tensor

from pt2qa._ambient import torch_defaults
from pt2qa._diagnosis.budget_report import UNATTRIBUTED, BudgetRow, ErrorBudget, Mechanism
from pt2qa._diagnosis.in_series import sites_before
from pt2qa._diagnosis.merging import split
from pt2qa._diagnosis.projected import Method, SiteNoises, site_noises
from pt2qa._quantize.pairing import QuantizedPair, identity_of
from pt2qa._sensitivity.roundings import InSeries, Variant, clamping, own_rounding
from pt2qa._sensitivity.site_groups import find_site_groups
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data
from pt2qa._simulator.positions import Mask
from pt2qa._simulator.program import Site
from pt2qa.errors import SelectionError

MECHANISMS: Final[tuple[str, ...]] = get_args(Mechanism)


@torch_defaults
def error_budget(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    method: Method = "auto",
    projections: int | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
) -> ErrorBudget:
    """Splits the output noise into activation and weight rounding, activation and weight clamping, and bias, by site.

    Each part is what one mechanism causes alone, all else as in the float model; the rest of the measured noise is
    interaction.  A site behind another one, as behind a relu that is not fused, counts with what it adds to that.
    Formulas: :class:`pt2qa.report.BudgetRow`.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.
        batches: iterable of batches, consumed once; those without a number are set apart and counted.
        method: ``projection`` estimates all parts at once, from a few backward passes; ``exact`` runs the model about
            twice for each site; ``auto`` projects, but for small models and where an op has no gradient.
        projections: random projections per batch; None: 4, and 8 if the sampling error is above a tenth of all noise.
            The error falls with their square root, and is gone with a power of two that is at least the number of
            elements in a sample's outputs.
        inputs_of: maps an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        mask: which positions count, as in :func:`pt2qa.compare_layers`: only the outputs there have errors.
        progress: whether to show a progress bar; None: if stderr is a terminal.

    Returns:
        The report.  After Ctrl-C, if at least one batch is finished, it covers the finished batches and says so.

    Raises:
        BatchError: there is no batch, none gives a number, or one does not match the captured inputs.
        SelectionError: ``projections`` is not positive, or no output is floating-point; ``mask`` names no input.
        SimulationError: the simulator does not reproduce the converted graph, or an op has no gradient.

    >>> x = torch.linspace(-1, 1, 32).reshape(8, 4)
    >>> pair = pt2qa.quantize(pt2qa.capture(torch.nn.Linear(4, 2).eval(), x), "xnnpack", [x], progress=False)
    >>> budget = pt2qa.error_budget(pair, [3 * x], progress=False)  # calibrated on a third of the values' range
    >>> budget.fault
    'range'
    """
    if method == "exact" and projections is not None:
        raise SelectionError('projections applies only to method="projection"; leave it out for method="exact".')
    data = Data("batches", batches, inputs_of, mask, progress)
    return budget_of(pair, site_noises(pair, data, mechanisms_in(pair), method=method, projections=projections))


def mechanisms_in(pair: QuantizedPair) -> Callable[[Site], Mapping[str, Variant]]:
    before, whole = sites_before(pair.simulator), pair.program.whole_graphs

    def mechanisms(site: Site) -> Mapping[str, Variant]:
        own, clamp, start = own_rounding(pair.simulator, site), clamping(site.params), None
        if site.kind == "bias":
            return {"bias": Variant(own)}
        if site.index in whole:
            return {UNATTRIBUTED: Variant(own)}
        if site.index in before and before[site.index].settles:
            own = clamp = _unchanged
        elif site.index in before:
            start = before[site.index].leaves
            own, clamp = InSeries(start, own), InSeries(start, clamp)
        return {f"{site.kind} rounding": Variant(own, clamp), f"{site.kind} clamping": Variant(clamp, start)}

    return mechanisms


def budget_of(pair: QuantizedPair, noises: SiteNoises) -> ErrorBudget:
    """The budget of noises with the variants of :func:`mechanisms_in`, and perhaps others."""
    return ErrorBudget(
        **split(_rows(pair, noises), noises),
        **identity_of(pair),
    )


def _unchanged(value: Tensor) -> Tensor:
    return value


def _rows(pair: QuantizedPair, noises: SiteNoises) -> Iterator[BudgetRow]:
    """The rows, still without numbers."""
    modules = {place.sites[0]: place.module for place in find_site_groups(pair.program, None)}
    for index, name in sorted(noises.noise):
        if name not in MECHANISMS:
            continue
        site = pair.sites[index]
        yield BudgetRow(
            name=site.name,
            module=modules[index],
            op=site.op,
            kind=site.kind,
            mechanism=cast(Mechanism, name),
            noise=0.0,
            noise_share=0.0,
            dtype=site.params.dtype,
            site=index,
            error=0.0,
        )
