"""``pt2qa.diagnose``: hypotheses from all instruments, each remedy measured, alone and in sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pt2qa._ambient import torch_defaults
from pt2qa._check.analysis import check
from pt2qa._check.report import Findings
from pt2qa._check.rules import RULES
from pt2qa._deployed.report import DeployedReport
from pt2qa._diagnosis.case import Case
from pt2qa._diagnosis.hypotheses.stages import Kernels
from pt2qa._diagnosis.report import AsideRow, Diagnosis
from pt2qa._diagnosis.search import Search
from pt2qa._diagnosis.verdict import next_command, search_target, story_of, target_of, unit_of, verdict_of
from pt2qa._diagnosis.worth import LEAST, MACS, Worth
from pt2qa._quantize.pairing import QuantizedPair, check_pair, identity_of
from pt2qa._quantize.plain_flow import kept_flow
from pt2qa._ranks import everywhere, in_step
from pt2qa._repair.methods import QUICK, methods_named
from pt2qa._report.base import Report
from pt2qa._report.notes import Note
from pt2qa._report.prose import counted
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data, Mask
from pt2qa._trials.judge import Judge
from pt2qa._trials.treatment import Target, Treatment, read_target
from pt2qa.errors import SelectionError
from pt2qa.plugins import Backend, rules_of


@torch_defaults
@in_step
@torch.no_grad()
def diagnose(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    evaluation: Iterable[Any] | None = None,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    target: Target | float | str | None = None,
    deployed: bool | str | Backend | DeployedReport = False,
    findings: Findings | None = None,
    repairs: Sequence[str] | None = (),
    least: float = LEAST,
    macs: float = MACS,
    verify_code: bool = True,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
) -> Diagnosis:
    """Finds what causes the error of a quantized model, and measures what helps.

    Hypotheses come from all analyses: stages, ranges, the error budget, weights, the quantizer's configuration, single
    samples and sites.  Each remedy is measured, alone and after those above it: on the simulator if it only switches
    sites or replaces their parameters, else by quantizing again.  Only remedies that help become rows.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.
        batches: inputs as the model receives them in use, a list or a loader that starts over.  The analyses read them,
            and remedies may calibrate on them.
        evaluation: data on which quality is measured; None: ``batches``.
        metric: a function of a model, larger is better, such as top-1 accuracy on your own data; it decides in place of
            the SQNR of the worst output.
        target: the quality to reach, in dB or in the unit of ``metric``, or a :class:`pt2qa.Target`; None: what 8 bits
            give with ranges that fit the data.
        deployed: whether to lower the model and compare the kernels, too; a backend as for
            :func:`pt2qa.compare_deployed`, True for the plug-in's own; or its report for this pair.
        findings: of :func:`pt2qa.check` for this pair; None: the rules whose findings are errors run here.
        repairs: methods of :func:`pt2qa.repair` to try, such as ``("ranges", "biases")``; None: its default.
            Each takes 15 to 30 more runs of the model on the calibration batches, which are not in
            ``diagnosis.forwards``.
        least: the error that a row must remove: the root mean square of the output's error as a share of the output's,
            0.01 for 1 %; that is ``10**(-SQNR / 20)``, so 1.7 dB at 25 dB and 6 dB at 34 dB. Half of it is enough for
            what no sound model has. With ``metric``, the share of the float model's value that 8 bits may cost.
        macs: the error, in the same unit, that it must remove to take all multiply-accumulates out of int8; in
            proportion for fewer.
        verify_code: whether to execute ``diagnosis.code``, the pair with all remedies as code for a plain export flow.
        inputs_of: maps an item of ``batches`` and ``evaluation`` to a batch.
        mask: which positions count, in both, as in :func:`pt2qa.compare_layers`: in SQNR, ranges and the error budget.
            Calibration sees all positions, as the kernels do, and ``metric`` has to leave padding out by itself.
        progress: whether to show progress; None: if stderr is a terminal.

    Returns:
        The causes, ranked; ``diagnosis.pair`` is quantized with all remedies that are options, edits or calibration
        data, and ``diagnosis.reports`` has the reports of the analyses.

    Raises:
        SelectionError: an invalid target, or no floating-point output and no metric; there is no such repair; ``mask``
            names no input, or ``deployed`` is a report, which may have been made without it.
        BatchError: there is no batch, or the float model returns NaN on all of them.
        SimulationError: the simulator does not reproduce the converted graph.

    >>> narrow, data = [torch.rand(8, 4) * 0.1], [torch.rand(8, 4)]
    >>> capture = pt2qa.capture(torch.nn.Linear(4, 4).eval(), data[0])
    >>> pair = pt2qa.quantize(capture, "xnnpack", narrow, progress=False)
    >>> pt2qa.diagnose(pair, data, progress=False).rows[0].cause
    'narrow-calibration'
    """
    check_pair(pair)
    if mask is not None and isinstance(deployed, DeployedReport):
        raise SelectionError(
            "deployed: got a report, which does not record its mask. With mask=, expected True or a backend, so that "
            "the kernels are compared with the same mask."
        )
    _refuse_reports_of_others(pair, findings, deployed)
    aim, methods = _aim(metric, target), methods_named(repairs, "repairs", QUICK)
    data = Data("batches", batches, inputs_of, mask, progress)
    measured = Data("evaluation", batches if evaluation is None else evaluation, inputs_of, mask, progress)
    # Measured on MobileNetV2 and EfficientNet-Lite0; what is needed depends on what is found.
    title = "diagnose: about 40 model runs, and one quantization per free remedy"
    judge = Judge(pair, measured, aim, title)
    reference = judge.reference
    judge.outputs(reference.first.values)
    notes: list[str] = []
    now = judge.outcome(Treatment())
    case = Case(pair, judge, data, now)
    worth = Worth(least, macs)
    search = Search(case, _needed(aim, judge, worth), methods, worth)
    reports: dict[str, Report] = {}
    interrupted, structure, kernels = False, findings, None
    try:
        search.run()
        if deployed:
            kernels = Kernels(case, None if deployed is True else deployed)
            reports["deployed"] = search.look_at_kernels(kernels)
        if structure is None:
            structure = check(pair, rules=_errors_of(pair), progress=False)
        final, after = search.final()
        if kernels is not None and final is not None:
            search.look_again(kernels, final)
    except KeyboardInterrupt:
        notes.append(Note("interrupted: some remedies were not measured", "interrupted"))
        interrupted = True
        final, after = search.so_far()
    judge.bar.close()
    if evaluation is None and search.state.data is not None:
        notes.append("the new calibration data were also the evaluation data; pass evaluation= to measure on others")
    if structure is not None:
        reports["findings"] = structure
    errors = [] if structure is None else [row for row in structure.rows if row.severity == "error"]
    but = f" But pt2qa.check finds {counted(len(errors), 'error')}." if errors and not search.rows else ""
    budget = case.budget
    if budget is not None:
        reports["budget"] = budget
    plan = judge.plan(search.state) if search.state.all_edits else None
    about = f"{pair.model}, quantized by {pair.quantizer} with the remedies of a diagnosis."
    flow = None
    if final is not None:
        flow, unverified = kept_flow(final, about, verify_code and not interrupted, progress=False)
        flow = replace(flow, verified="not run: interrupted") if interrupted else flow
        notes += unverified
    diagnosis = Diagnosis(
        rows=tuple(search.rows),
        tried=tuple(search.tried),
        figures=tuple(search.figures(after)),
        asides=tuple(AsideRow(row.rule, row.name, row.why, row.fix) for row in errors),
        verdict=reference.health.before(verdict_of(search, after, interrupted=interrupted)) + but,
        next_command=next_command(search, after, interrupted=interrupted)
        or (but and "pt2qa.check(pair)")
        or ("pt2qa.diagnose(pair, batches)" if search.beyond else ""),  # without a target, remedies are measured
        unit=unit_of(case),
        target=target_of(search),
        story=story_of(search, after),
        met=-1 if search.needed is None else int(now.value >= search.needed),
        budget="" if budget is None else budget.in_short(),
        plan_json="" if plan is None else plan.to_json(),
        code="" if flow is None else flow.code,
        code_verified="" if flow is None else flow.verified,
        forwards=sum(everywhere(judge.forwards)),
        quantizations=judge.quantizations,
        batches=sum(everywhere(sum(1 for _ in reference))),
        samples=now.samples,
        notes=tuple(dict.fromkeys((*pair.notes, *judge.notes, *notes, *case.notes, *search.notes()))),
        **identity_of(pair),
        set_apart=reference.health.set_apart,
        input_ranges=reference.health.input_ranges,
    )
    aimed_at = None if interrupted else search_target(search, after)
    return diagnosis.with_evidence(final, reports, aimed_at, [each.treatment for each in search.taken])


def _refuse_reports_of_others(pair: QuantizedPair, findings: Findings | None, deployed: Any) -> None:
    own = (pair.environment.fingerprint, pair.quantizer)
    if findings is not None and findings.environment.fingerprint != own[0]:
        raise SelectionError(
            f"findings: got those of another model, {findings.model}. Pass pt2qa.check(pair), or leave it out."
        )
    if isinstance(deployed, DeployedReport) and (deployed.environment.fingerprint, deployed.quantizer) != own:
        raise SelectionError(
            f"deployed: got the report of another pair, {deployed.model} quantized by {deployed.quantizer}. Pass "
            "pt2qa.compare_deployed(pair, batches), or True."
        )


def _aim(metric: Callable[..., float] | None, target: Target | float | str | None) -> Target | None:
    if isinstance(target, Target) and metric is not None and target.metric not in (None, metric):
        raise SelectionError("metric: got another one than target= has. Pass only one of them.")
    if metric is None:
        return None if target is None else read_target(target)
    name = getattr(metric, "__name__", type(metric).__name__)
    if isinstance(target, Target):
        return replace(target, metric=metric)
    if target is None:
        return Target(-math.inf, metric=metric, name=name)
    if isinstance(target, bool) or not isinstance(target, (int, float)):
        raise SelectionError(f"target: got {target!r}, expected a number in the unit of the metric.")
    return Target(float(target), metric=metric, name=name)


def _needed(aim: Target | None, judge: Judge, worth: Worth) -> float | None:
    """None without a target; a metric without one must nearly keep the float model's value."""
    if aim is None:
        return None
    if aim.metric is None:
        return aim.at_least
    if math.isinf(aim.at_least):
        value = judge.of_float()
        return value - worth.least * abs(value)
    return aim.at_least * (judge.of_float() if aim.of_float else 1.0)


def _errors_of(pair: QuantizedPair) -> list[str]:
    own = () if pair.recipe is None else rules_of(pair.recipe.plugin)
    return [rule.id for rule in (*RULES.values(), *own) if rule.severity == "error"]
