"""``pt2qa.check``: runs the rules on whatever is known about a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from pt2qa._ambient import torch_defaults
from pt2qa._capture.exporting import refuse_quantized
from pt2qa._capture.program import Capture
from pt2qa._check.context import CheckContext, UnavailableError, kind_of
from pt2qa._check.cpu import cpu_features
from pt2qa._check.report import Finding, Findings, RuleOutcome, errors_first
from pt2qa._check.rules import RULES
from pt2qa._exclusion import exports
from pt2qa._graph.subclasses import refuse_subclasses
from pt2qa._near_names import question
from pt2qa._quantize.pairing import fingerprint
from pt2qa._ranks import alone
from pt2qa._report.rows import Environment
from pt2qa._report.set_apart import DataHealth
from pt2qa._simulator import quant_ops
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data
from pt2qa.errors import PluginError, Pt2qaError, SelectionError
from pt2qa.plugins import DoesNotApplyError, Found, Rule, describe, rules_of


@torch_defaults
@exports
def check(
    subject: Any,
    args: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    quantizer: Any = None,
    qat: bool = False,
    batches: Iterable[Any] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    dynamic_shapes: Any = None,
    cpu: str | Collection[str] | None = None,
    model: nn.Module | None = None,
    rules: Collection[str] | None = None,
    silence: Collection[str] = (),
    progress: bool | None = None,
) -> Findings:
    """Finds what will go wrong when a model is quantized, and how to fix it.  Changes nothing.

    The more it is given, the more rules apply: a model alone, a model with example inputs, with a quantizer, a pair,
    a pair with data.

    Args:
        subject: an ``nn.Module``, what :func:`pt2qa.capture` or :func:`pt2qa.quantize` returned, an ``ExportedProgram``
            or its graph as ``torch.export`` made it, or a prepared graph with observers.
        args: for a model, example inputs as :func:`pt2qa.capture` takes them.
        kwargs: for a model, keyword example inputs.
        quantizer: as :func:`pt2qa.quantize` takes it, for rules on what it annotates; a pair knows its own.
        qat: whether it is for quantization-aware training; a pair knows.
        batches: for a pair, data for the rules on values.
        inputs_of: maps an item of ``batches`` to a batch.
        dynamic_shapes: for a model, as :func:`pt2qa.capture` takes it.
        cpu: the CPU that the model will run on: names of features as Linux lists them (``{"avx2", "avx512_vnni"}``), or
            ``"vnni"`` or ``"no-vnni"``; None: this machine's.
        model: for a capture, a graph or a pair, the model it was made from, for the rules on modules.
        rules: ids of the rules to run; None for all.
        silence: findings to hide: the id of a rule, or ``rule:pattern`` with a pattern for names
            (``dead-channel:features.*``).  They are counted.
        progress: whether to show progress; None: if stderr is a terminal.

    Returns:
        The findings, errors first, and the outcome of each rule.

    Raises:
        SelectionError: ``subject`` cannot be checked, an argument is of no use with it, or there is no such rule or CPU
            feature.
        CaptureError: eager mode, FX or torchao's ``quantize_`` prepared or quantized the model.

    >>> import torch
    >>> import pt2qa
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout())
    >>> [finding.name for finding in pt2qa.check(model, rules=["train-mode"])]
    ['1']
    """
    if batches is not None:
        alone("check with data")
    kind = kind_of(subject)
    if kind is None:
        raise SelectionError(
            f"got a {type(subject).__name__}, expected an nn.Module, a Capture, a QuantizedPair, an ExportedProgram or "
            "a GraphModule"
        )
    if kind == "model":
        refuse_quantized(subject)
    elif kind in ("program", "graph", "prepared"):
        refuse_subclasses(subject)
    for_model = {"args": args, "kwargs": kwargs, "dynamic_shapes": dynamic_shapes}
    ignored = [] if kind == "model" else [name for name, given in for_model.items() if given is not None]
    if ignored:
        data = " Pass data as batches=." if kind == "pair" and "args" in ignored else ""
        raise SelectionError(
            f"{ignored[0]}: only a model is called with example inputs, and a {type(subject).__name__} was given.{data}"
        )
    if kind == "model" and args is None and kwargs is None and dynamic_shapes is not None:
        raise SelectionError("dynamic_shapes: without example inputs nothing is captured. Pass args too.")
    if batches is not None and kind != "pair":
        raise SelectionError(
            f"batches: rules look at values in a pair, and a {type(subject).__name__} was given. Pass what "
            "pt2qa.quantize returns."
        )
    if inputs_of is not None and batches is None:
        raise SelectionError("inputs_of: there are no items to take batches from. Pass batches too.")
    if model is not None and kind == "model":
        raise SelectionError("model: the subject is the model itself. Leave model= out.")
    if kind in ("graph", "program") and any(quant_ops.is_dequantize(node) for node in subject.graph.nodes):
        raise SelectionError(
            "got a converted graph, expected a float or a prepared one, or a pair: pt2qa.pair(float_graph, converted)"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise SelectionError(f"model: got a {type(model).__name__}, expected the nn.Module of the capture or pair")
    if model is not None and kind in ("capture", "pair"):
        _check_model(model, subject.capture if kind == "pair" else subject)
    context = CheckContext(
        given=kind,
        value=subject,
        args=args,
        kwargs=kwargs,
        quantizer=quantizer,
        qat=qat or (kind == "pair" and subject.recipe is not None and subject.recipe.qat),
        data=None if batches is None else Data("batches", batches, inputs_of, progress=progress),
        dynamic_shapes=dynamic_shapes,
        cpu=cpu_features(cpu),
        eager=model,
    )
    every = _every_rule(context)
    chosen = list(every) if rules is None else _chosen(rules, every)
    quiet = _silences(silence, every)
    rows: list[Finding] = []
    outcomes: list[RuleOutcome] = []
    for rule_id in chosen:
        found, outcome = _run(every[rule_id], context, quiet)
        rows += found
        outcomes.append(outcome)
    looked = "layers" in vars(context)
    unread = ["batches: none of the rules that ran looks at values"] if batches is not None and not looked else []
    health = context.layers.health if looked else DataHealth(0, 0)
    return Findings(
        rows=errors_first(rows, chosen),
        rules=tuple(outcomes),
        checked=_checked(context, every, outcomes),
        notes=(*(subject.notes if kind == "pair" else ()), *_unheard(quiet, outcomes), *unread),
        quantizer=_quantizer(context),
        model=_model_name(context),
        environment=_environment(context),
        batches=health.batches,
        samples=health.samples,
        set_apart=health.set_apart,
        input_ranges=health.input_ranges,
    )


def _check_model(model: nn.Module, capture: Capture | None) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    missing = (
        [] if capture is None else [name for name in capture.program.graph_signature.parameters if name not in own]
    )
    if missing:
        raise SelectionError(
            f"model: it has no parameter {missing[0]!r}, which the capture has; expected the model that was captured"
        )


def _every_rule(context: CheckContext) -> dict[str, Rule]:
    """pt2qa's rules and the plug-in's, by id."""
    try:
        own = rules_of(context.plugin)
    except UnavailableError:
        own = ()
    every = dict(RULES)
    for rule in own:
        if rule.id in every:
            raise PluginError(f"{context.plugin.name} brings a rule {rule.id!r}, which exists; give it another id")
        every[rule.id] = rule
    return every


def _chosen(rules: Collection[str], every: Mapping[str, Rule]) -> list[str]:
    wanted = [rules] if isinstance(rules, str) else list(rules)
    _check_ids(wanted, every, "rules")
    return [rule for rule in every if rule in wanted]


def _silences(silence: Collection[str], every: Mapping[str, Rule]) -> list[tuple[str, str]]:
    entries = [silence] if isinstance(silence, str) else list(silence)
    pairs = [(rule, pattern or "*") for rule, _, pattern in (entry.partition(":") for entry in entries)]
    _check_ids([rule for rule, _ in pairs], every, "silence")
    return pairs


def _check_ids(ids: Iterable[str], every: Mapping[str, Rule], option: str) -> None:
    for rule in ids:
        if rule not in every:
            near = question(rule, every, 3)
            known = f"; {near}" if near else f". There are {', '.join(every)}"
            raise SelectionError(f"{option}: there is no rule {rule!r}{known}")


def _unheard(quiet: Iterable[tuple[str, str]], outcomes: Iterable[RuleOutcome]) -> Iterator[str]:
    """Silences that match none of their rule's findings: the name is misspelled, or gone."""
    loud = {outcome.rule for outcome in outcomes if outcome.count and not outcome.silenced}
    yield from (f"silence: {rule}:{pattern} is the name of no finding" for rule, pattern in quiet if rule in loud)


def _run(rule: Rule, context: CheckContext, quiet: Iterable[tuple[str, str]]) -> tuple[list[Finding], RuleOutcome]:
    """What a rule found, and its outcome."""
    try:
        for need in rule.needs:
            getattr(context, need)
        found = list(rule.find(context))
    except (UnavailableError, DoesNotApplyError) as reason:
        return [], RuleOutcome(rule.id, rule.title, "not applied", 0, 0, str(reason))
    except Pt2qaError:
        raise
    except Exception as error:
        # One rule that fails must not cost the user the findings of all others.
        text = f"{type(error).__name__}: {error}"
        return [], RuleOutcome(rule.id, rule.title, "failed", 0, 0, " ".join(text.split()))
    # nan, which orders nothing, is unequal to itself.
    found.sort(key=lambda one: -one.value if one.value == one.value else 0.0)
    rows = [_finding(rule, one, context) for one in found]
    patterns = [pattern for silenced, pattern in quiet if silenced == rule.id]
    shown = [row for row in rows if not any(fnmatchcase(row.name, pattern) for pattern in patterns)]
    outcome = RuleOutcome(rule.id, rule.title, "found" if rows else "clear", len(shown), len(rows) - len(shown), "")
    return shown, outcome


def _finding(rule: Rule, found: Found, context: CheckContext) -> Finding:
    return Finding(
        rule=rule.id,
        severity=rule.severity if found.severity is None else found.severity,
        name=found.name,
        source=found.source or context.source_of(found.name),
        why=found.why,
        fix=found.fix or rule.fix,
        value=found.value,
    )


def _checked(context: CheckContext, every: Mapping[str, Rule], outcomes: Iterable[RuleOutcome]) -> tuple[str, ...]:
    """What was given, and what else the rules that ran looked at."""
    ran = [every[outcome.rule].needs for outcome in outcomes if outcome.outcome != "not applied"]
    return tuple(dict.fromkeys((context.given, *(need for needs in ran for need in needs))))


def _quantizer(context: CheckContext) -> str:
    if context.given == "pair" and context.quantizer is None:
        return context.pair.quantizer
    try:
        return describe(context.plugin)
    except UnavailableError:
        return "" if context.quantizer is None else str(context.quantizer)


def _model_name(context: CheckContext) -> str:
    if context.given in ("pair", "capture"):
        return str(context.value.model)
    return type(context.value).__name__ if context.given == "model" else f"the {context.given}"


def _environment(context: CheckContext) -> Environment:
    if context.given == "pair":
        return context.pair.environment
    try:
        return Environment.here(fingerprint(context.graph))
    except UnavailableError:
        return Environment.here("")
