"""One converted graph on several runtimes, in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import nan
from typing import Any

from pt2qa._ambient import torch_defaults
from pt2qa._deployed.analysis import explained
from pt2qa._deployed.apart import RefusedError, seconds_of
from pt2qa._deployed.comparison import Comparison
from pt2qa._deployed.deployment import backend_for, inputs_for, lowerable, program_for
from pt2qa._deployed.report import DeployedReport, DeployedRow
from pt2qa._quantize.pairing import QuantizedPair, check_pair, identity_of
from pt2qa._ranks import alone, in_step
from pt2qa._report.prose import few
from pt2qa._report.set_apart import as_fields
from pt2qa._runtimes.report import DB, LSB, RuntimeReport, RuntimeRow, RuntimeSummary
from pt2qa._simulator.accumulate import accumulate, peeked, refuse_empty
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data, Mask
from pt2qa._trials.treatment import metric_name
from pt2qa.errors import DeploymentError, SelectionError
from pt2qa.plugins import Backend
from pt2qa.plugins import backends as installed


@in_step
@torch_defaults
def compare_runtimes(
    pair: QuantizedPair,
    batches: Iterable[Any],
    backends: Sequence[str] | Mapping[str, str | Backend] | None = None,
    *,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    apart: bool = False,
    progress: bool | None = None,
) -> RuntimeReport:
    """Runs one converted graph on several runtimes, and compares the kernels of each with it, op by op.

    Where one differs and the others do not, its kernel is at fault, and not the quantization.  Each kernel is judged on
    its own inputs, as :func:`pt2qa.compare_deployed` does.

    Args:
        pair: what :func:`pt2qa.quantize` returned; it is not changed.  Of ``pair.as_deployed()``, which computes as one
            backend does, the converted graph is compared.
        batches: iterable of batches, consumed once.
        backends: what :func:`pt2qa.compare_deployed` takes as ``backend``, such as ``["xnnpack", "onnxruntime"]``, or a
            dict from names for the report; None: all that are installed.
        metric: a function of a model, larger is better, measured of each program.
        inputs_of: maps an item of ``batches`` to a batch.
        mask: which positions count, as in :func:`pt2qa.compare_layers`.
        apart: whether each runtime lowers and runs in a process of its own, as in :func:`pt2qa.compare_deployed`: one
            that crashes there is listed with its error.
        progress: whether to show progress; None: if stderr is a terminal.

    Returns:
        The report.  A runtime that cannot run the graph is listed with its error; the others still run.  After Ctrl-C,
        if at least one batch is finished, it covers the finished batches and says so.

    Raises:
        SelectionError: there is no backend.
        PluginError: no backend has such a name.
        DeploymentError: none of them runs the graph.
        BatchError: there is no batch, or one does not match the captured inputs or the mask.
        SimulationError: the simulator does not reproduce the converted graph.

    >>> pt2qa.compare_runtimes(pair, [x], ["xnnpack"], progress=False).disagreements
    0
    """
    alone("compare_runtimes")
    check_pair(pair)
    pair = pair if pair.origin is None else pair.origin.pair  # runtimes have scales of their own, and one graph
    named = _named(backends)
    first, data = peeked(Data("batches", batches, inputs_of, mask, progress), "compare on")
    run = _Runtimes({}, {}, {})
    for name, wanted in named.items():
        try:
            run.backends[name] = backend = backend_for(pair, wanted, apart)
            with explained(pair, backend, first):
                place = lowerable(pair)
                program = program_for(pair, place, backend, first, None, data.progress)
                run.able[name] = Comparison(pair, place, program, backend.name, mask)
        except RefusedError:
            raise
        except DeploymentError as error:
            run.failed[name] = str(error)
    run.refuse_none()
    notes = accumulate(run, data, title="compare runtimes", purpose="compare on")
    leading = max(run.able.values(), key=lambda each: each.batches)
    refuse_empty(leading.batches, leading.health.set_apart)
    reports = {name: each.report(()) for name, each in run.able.items()}
    values = pair.values(first)
    runtimes = []
    for name in named:
        summary = RuntimeSummary(name, "", note=run.failed.get(name, ""))
        if name in reports:
            summary = _summary(name, reports[name], run.able[name], values)
            if metric is not None and not notes:
                summary = replace(summary, value=float(metric(run.able[name].deployed)))
        runtimes.append(summary)
    return RuntimeReport(
        tuple(_joined(reports)),
        tuple(runtimes),
        tuple(f"{name}: {fact}" for name, report in reports.items() for fact in report.facts),
        "" if metric is None else metric_name(metric),
        notes=leading.report(notes).notes,
        **as_fields(leading.health),
        **identity_of(pair),
    )


def _named(backends: Sequence[str] | Mapping[str, str | Backend] | None) -> dict[str, str | Backend]:
    if backends is None:
        backends = [name for name, each in installed().items() if not each.missing()]
    if isinstance(backends, str):
        backends = [backends]
    named: dict[str, str | Backend] = {}
    named.update(backends if isinstance(backends, Mapping) else {name: name for name in backends})
    if not named:
        raise SelectionError("there is no backend. Pass names of backends: pt2qa.plugins.backends() lists them.")
    return named


class _Runtimes:
    """The comparisons with all runtimes, which see each batch one after the other; one that fails is left out."""

    def __init__(self, backends: dict[str, Backend], able: dict[str, Comparison], failed: dict[str, str]) -> None:
        self.backends, self.able, self.failed = backends, able, failed

    @property
    def batches(self) -> int:
        return max((each.batches for each in self.able.values()), default=0)

    def add(self, batch: Batch) -> None:
        for name, comparison in list(self.able.items()):
            try:
                with explained(comparison.pair, self.backends[name], batch):
                    comparison.add(batch)
            except DeploymentError as error:
                self.failed[name] = str(error)
                del self.able[name]
        self.refuse_none()

    def refuse_none(self) -> None:
        if not self.able:
            raise DeploymentError("; ".join(f"{name}: {text}" for name, text in self.failed.items()))


def _summary(name: str, report: DeployedReport, comparison: Comparison, values: Sequence[Any]) -> RuntimeSummary:
    program: Any = comparison.program
    return RuntimeSummary(
        name,
        report.backend,
        report.sqnr,
        report.stages[-1].step_sqnr,
        different=len(report.suspects),
        observed=sum(row.is_measured for row in report.rows),
        values=len(report.rows),
        seconds=seconds_of(program, inputs_for(values)) if hasattr(program, "run_alone") else nan,
        bytes=getattr(program, "size", 0),
        batches=report.batches,
    )


def _joined(reports: Mapping[str, DeployedReport]) -> list[RuntimeRow]:
    """A row for each value that a runtime has, in graph order; all have the rows of one graph."""
    found = []
    for rows in zip(*([*each.rows, *each.outputs] for each in reports.values()), strict=True):
        by_name: dict[str, DeployedRow] = dict(zip(reports, rows, strict=True))
        judged = {name: row for name, row in by_name.items() if row.is_measured and not row.note}
        wrong = {name: row for name, row in judged.items() if row.is_suspect}
        custom = {}
        for name in by_name:
            row = judged.get(name)
            custom[name + LSB] = nan if row is None else row.isolated_max_lsb
            custom[name + DB] = nan if row is None else row.isolated_sqnr
        causes: dict[str, list[str]] = {}
        for name, row in wrong.items():
            if row.cause:
                causes.setdefault(row.cause, []).append(name)
        first = rows[0]
        found.append(
            RuntimeRow(
                first.handle,
                first.name,
                first.module,
                first.op,
                len(judged) - len(wrong),
                tuple(wrong),
                "; ".join(f"{cause} ({few(names)})" for cause, names in causes.items()),
                custom,
            )
        )
    return found
