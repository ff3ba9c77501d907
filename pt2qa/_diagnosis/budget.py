"""``pt2qa.error_budget``: the output noise split by mechanism and place; and budgets merged."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan, sqrt
from typing import Any, Final, NamedTuple, cast, get_args

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._ambient import torch_defaults
from pt2qa._diagnosis.budget_report import UNATTRIBUTED, BudgetRow, ErrorBudget, Mechanism, share_of
from pt2qa._diagnosis.projected import Method, SiteNoises, site_noises, together
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.torch import HigherOrderOperator, pytree
from pt2qa._quantize.pairing import QuantizedPair, identity_of
from pt2qa._report.notes import joined_notes
from pt2qa._report.sums import pack, settings_of, unpack
from pt2qa._sensitivity.roundings import InSeries, Rounding, Variant, clamping, own_rounding
from pt2qa._sensitivity.site_groups import find_site_groups
from pt2qa._simulator import op_rules
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data, Mask
from pt2qa._simulator.fused import is_elementwise
from pt2qa._simulator.program import Nested, Program, Site, Slot, Step
from pt2qa._simulator.simulator import Simulator
from pt2qa.errors import ReportError, SelectionError

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
            own = clamp = torch.nn.Identity()
        elif site.index in before:
            start = before[site.index].leaves
            own, clamp = InSeries(start, own), InSeries(start, clamp)
        return {f"{site.kind} rounding": Variant(own, clamp), f"{site.kind} clamping": Variant(clamp, start)}

    return mechanisms


def budget_of(pair: QuantizedPair, noises: SiteNoises) -> ErrorBudget:
    """The budget of noises with the variants of :func:`mechanisms_in`, and perhaps others."""
    return ErrorBudget(**split(_rows(pair, noises), noises), **identity_of(pair))


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
            dtype=site.params.dtype,
            site=index,
            **dict.fromkeys(("noise", "noise_share", "error"), nan),
        )


_ALIKE = (
    *("outputs", "method", "projections", "signal", "batches", "samples"),
    *("notes", "set_apart", "input_ranges"),
)
"""The fields of :class:`SiteNoises` that a budget has, too."""


class RowSums(NamedTuple):
    """What a row adds up over batches: its noise, and the variance of that, due to the random projections."""

    site: int = 0
    mechanism: str = ""
    noise: float = 0.0
    variance: float = 0.0


def split(rows: Iterable[Any], noises: SiteNoises) -> dict[str, Any]:
    """The fields of a budget that follow from the noise of its sites; ``rows`` say which those are."""
    places = list(rows)
    sums = [
        RowSums(row.site, row.mechanism, noises.noise[key], noises.variance[key])
        for row in places
        for key in [(row.site, row.mechanism)]
    ]
    share = functools.partial(share_of, whole=noises.measured)
    return {
        "rows": tuple(
            replace(row, noise=own.noise, noise_share=share(own.noise), error=share(sqrt(own.variance)))
            for row, own in zip(places, sums, strict=True)
        ),
        "noise": noises.measured,
        "sums": pack(noises.settings, rows=sums),
        **{name: getattr(noises, name) for name in _ALIKE},
    }


def merged(reports: Sequence[Any], metrics: Mapping[str, Any]) -> Any:
    first = reports[0]
    found = together([_noises_of(report, first.rows) for report in reports])
    notes = joined_notes([report.notes for report in reports])
    return replace(first, **split(first.rows, replace(found, notes=notes)))


def _noises_of(report: Any, rows: Sequence[Any]) -> SiteNoises:
    """The noises that a budget was made of; its sums must have these rows."""
    sums = unpack(report.sums, "rows", RowSums())
    if [(each.site, each.mechanism) for each in sums] != [(row.site, row.mechanism) for row in rows]:
        raise ReportError("cannot merge: a report's sums do not match its rows. Run pt2qa.error_budget again.")
    return SiteNoises(
        noise={(each.site, each.mechanism): each.noise for each in sums},
        variance={(each.site, each.mechanism): each.variance for each in sums},
        measured=report.noise,
        settings=settings_of(report.sums),
        flops={},
        **{name: getattr(report, name) for name in _ALIKE},
    )


MOST = 1 << 16
"""Most values of a site that are tried one by one."""

CLOSE = 1e-3
"""Change, as a share of the scale, up to which a value counts as unchanged."""


@dataclass(frozen=True, slots=True)
class Before:
    """The site before another one.

    ``leaves`` maps the reference's value of the second site to its value with the first one on; ``settles`` says that
    the second site changes none of these.
    """

    site: Site
    leaves: Rounding
    settles: bool


def sites_before(simulator: Simulator) -> dict[int, Before]:
    """By site, the one before it in series; both have fixed scales for their whole tensor.

    Sites are in series if one is behind the other, with only ops between them that pick values or clip them.  A nested
    graph is in series with what it is given and what reads its results.

    Behind a relu that is not fused, a value is rounded that was rounded before it, often alike.  Alone, the second site
    makes the noise of the first; behind it, it adds little or nothing.
    """
    found = {}
    for series in _Series(simulator.program, simulator.program.sites, {}).each():
        for step in series.program.steps:
            if step.site is not None and step.duplicate_of is None and is_elementwise(step.function):
                site, origin = series.sites[step.site], series.origin(step.reads[0])
                if origin is not None:
                    effect = _effect(simulator, *origin, own_rounding(simulator, site))
                    found[site.index] = Before(origin[0], *effect)
    return found


_Origin = tuple[Site, tuple[Step, ...]]
"""A site that a value comes from, through ops that pick, and the clips among them, in order."""


@dataclass(frozen=True, slots=True)
class _Series:
    """A program, its sites as numbered in the outermost one, and where its inputs come from, by slot."""

    program: Program
    sites: Sequence[Site]
    inputs: Mapping[int, _Origin | None]

    def origin(self, slot: int) -> _Origin | None:
        """The site that a value comes from; values that are put together come from one if their sites round alike."""
        producer = self.program.producers.get(slot)
        if producer is None:
            return self.inputs.get(slot)
        step = self.program.steps[producer]
        if step.site is not None:
            return (self.sites[step.site], ()) if is_elementwise(step.function) else None
        if step.op == "cat" and not step.constants:
            return _one_origin([self.origin(read) for read in step.reads])
        if step.function is operator.getitem:
            before = self.program.steps[self.program.producers[step.reads[0]]]
            if bodies := self._bodies(before):  # the first graph of a while_loop only says whether to go on
                giving = bodies[1:] if op_of(before.function) == "while_loop" else bodies
                return _one_origin([None if body is None else body.output(step.args[1]) for body in giving])
        clips = op_rules.keeps_order(step.function)
        if not step.reads or step.args[:1] != (Slot(step.reads[0]),) or not (clips or _picks(step)):
            return None
        found = self.origin(step.reads[0])
        return found if found is None or not clips else (found[0], (*found[1], step))

    def output(self, number: int) -> _Origin | None:
        outputs = self.program.outputs if isinstance(self.program.outputs, list | tuple) else [self.program.outputs]
        return self.origin(outputs[number].number) if isinstance(outputs[number], Slot) else None

    def each(self) -> Iterator[_Series]:
        yield self
        for step in self.program.steps:
            for body in self._bodies(step):
                yield from () if body is None else body.each()

    def _bodies(self, step: Step) -> list[_Series | None]:
        """The nested graphs that a step calls, None for one without sites.

        What a loop carries comes from one site if the loop is given it and returns it rounded alike.
        """
        if not isinstance(step.function, HigherOrderOperator):
            return []
        stored = {constant.slot: constant.stored for constant in self.program.constants}
        called = [stored.get(each.number) if isinstance(each, Slot) else None for each in step.args]
        graphs = [number for number, each in enumerate(called) if isinstance(each, Nested | GraphModule)]
        given = step.args[graphs[-1] + 1 :] if graphs else ()
        origins = [self.origin(each.number) if isinstance(each, Slot) else None for each in pytree.tree_leaves(given)]
        carried = len(given[0]) if op_of(step.function) in ("while_loop", "scan") else 0

        def made(first: Sequence[_Origin | None]) -> list[_Series | None]:
            inputs = [*first, *origins[carried:]]
            return [
                _Series(
                    each.program,
                    [self.sites[own] for own in each.sites],
                    dict(zip(each.program.inputs, inputs, strict=False)),
                )
                if isinstance(each := called[number], Nested)
                else None
                for number in graphs
            ]

        *_, body = made([None] * carried) or [None]
        if body is None:
            return made([None] * carried)
        return made([_one_origin([origins[number], body.output(number)]) for number in range(carried)])


def _one_origin(found: Sequence[_Origin | None]) -> _Origin | None:
    origins = [each for each in found if each is not None]
    alike = {(site.params, *(id(clip) for clip in clips)) for site, clips in origins}
    return origins[0] if len(origins) == len(found) and len(alike) == 1 else None


def _picks(step: Step) -> bool:
    """Whether each value of the result is one of the first argument, or zero, which every site can represent."""
    if step.op == "pad":
        return not any(isinstance(each, int | float) and each for each in step.args[2:])
    return op_rules.only_moves(step.function) or step.op == "max_pool2d"


def _effect(simulator: Simulator, first: Site, clips: Sequence[Step], own: Rounding) -> tuple[Rounding, bool]:
    before, params = own_rounding(simulator, first), first.params

    def clipped(value: Tensor) -> Tensor:
        return functools.reduce(lambda x, step: simulator.call(step, {step.reads[0]: x}, False), clips, value)

    ends = torch.tensor([-torch.inf, torch.inf])
    with torch.no_grad():
        (low, high), (lowest, highest) = (clipped(each).tolist() for each in (ends, before(ends)))
        alike = clipped(before(clipped(ends))).tolist() == [lowest, highest]

    def leaves(value: Tensor) -> Tensor:
        rounded = clipped(before(value))
        if alike:
            return rounded
        # A value at the end of a clip may have been beyond it.
        return torch.where(value >= high, highest, torch.where(value <= low, lowest, rounded))

    scale, zero_point, count = params.scale, params.zero_point, params.quant_max - params.quant_min + 1
    assert isinstance(scale, float)
    assert isinstance(zero_point, int)
    if count > MOST:
        return leaves, False
    with torch.no_grad():
        values = clipped((torch.arange(count) + (params.quant_min - zero_point)) * scale)
        return leaves, torch.allclose(own(values), values, rtol=0.0, atol=CLOSE * scale)
