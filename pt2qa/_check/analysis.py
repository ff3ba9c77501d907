"""``pt2qa.check``: runs the rules on whatever is known about a model and about the CPU that it will run on."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from pt2qa._ambient import torch_defaults
from pt2qa._capture.exporting import refuse_quantized
from pt2qa._capture.program import Capture
from pt2qa._check.context import CheckContext, kind_of
from pt2qa._check.report import Finding, Findings, RuleOutcome, errors_first
from pt2qa._check.rules import RULES
from pt2qa._exclusion import exports
from pt2qa._graph.internals.torch import instructions_found
from pt2qa._graph.subclasses import refuse_subclasses
from pt2qa._printable import question
from pt2qa._quantize.pairing import fingerprint
from pt2qa._ranks import alone
from pt2qa._report.rows import Environment
from pt2qa._report.set_apart import DataHealth, as_fields
from pt2qa._simulator import quant_ops
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data
from pt2qa.errors import PluginError, Pt2qaError, SelectionError
from pt2qa.plugins import DoesNotApplyError, Rule, describe, rules_of

_NAMED = {"vnni": frozenset({"avx512_vnni"}), "no-vnni": frozenset({"avx2"})}
_CPUINFO = Path("/proc/cpuinfo")


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

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout())
    >>> [finding.name for finding in pt2qa.check(model, rules=["train-mode"])]
    ['1']
    """
    if batches is not None:
        alone("check with data")
    kind, got = kind_of(subject), f"got {type(subject).__name__}"
    if kind is None:
        raise SelectionError(
            f"{got}, expected an nn.Module, a Capture, a QuantizedPair, an ExportedProgram or a GraphModule"
        )
    if kind == "model":
        refuse_quantized(subject)
    elif kind in ("program", "graph", "prepared"):
        refuse_subclasses(subject)
    example = {"args": args, "kwargs": kwargs, "dynamic_shapes": dynamic_shapes}
    given = [name for name, value in example.items() if value is not None]
    data = " Pass data as batches=." if kind == "pair" and "args" in given else ""
    exported = kind in ("graph", "program")
    for wrong, why in (
        (given and kind != "model", f"{''.join(given[:1])}: {got}; only a model takes example inputs.{data}"),
        (given == ["dynamic_shapes"], "dynamic_shapes: nothing is captured without example inputs. Pass args, too."),
        (batches is not None and kind != "pair", f"batches: {got}; pass the pair that pt2qa.quantize returns."),
        (inputs_of is not None and batches is None, "inputs_of: there are no batches to map. Pass batches, too."),
        (model is not None and kind == "model", "model: the subject is the model itself. Leave model= out."),
        (
            exported and any(quant_ops.is_dequantize(node) for node in subject.graph.nodes),
            "got a converted graph, expected a float or a prepared one, or a pair: pt2qa.pair(float_graph, converted)",
        ),
        (
            model is not None and not isinstance(model, nn.Module),
            f"model: got {type(model).__name__}, expected the nn.Module of the capture or pair",
        ),
    ):
        if wrong:
            raise SelectionError(why)
    if model is not None and kind in ("capture", "pair"):
        _check_model(model, subject.capture if kind == "pair" else subject)
    as_deployed = kind == "pair" and subject.origin is not None
    context = CheckContext(
        given=kind,
        value=subject.origin.pair if as_deployed else subject,
        as_deployed=as_deployed,
        args=() if args is None and kwargs is not None else args,
        kwargs=kwargs,
        quantizer=quantizer,
        qat=qat or (kind == "pair" and subject.recipe is not None and subject.recipe.qat),
        data=None if batches is None else Data("batches", batches, inputs_of, progress=progress),
        dynamic_shapes=dynamic_shapes,
        cpu=cpu_features(cpu),
        eager=model,
    )
    every = _every_rule(context)
    chosen = list(every) if rules is None else _known(rules, every, "rules")
    quiet = [(rule, pattern or "*") for rule, _, pattern in (entry.partition(":") for entry in _listed(silence))]
    _known([rule for rule, _ in quiet], every, "silence")
    rows: list[Finding] = []
    outcomes: list[RuleOutcome] = []
    for rule_id in chosen:
        found, outcome = _run(every[rule_id], context, quiet)
        rows += found
        outcomes.append(outcome)
    ran = [every[outcome.rule] for outcome in outcomes if outcome.outcome != "not applied"]
    # The name of a silence that matches nothing is misspelled, or gone.
    loud = {outcome.rule for outcome in outcomes if outcome.count and not outcome.silenced}
    unmatched = [f"silence: {rule}:{pattern} matches no finding" for rule, pattern in quiet if rule in loud]
    looked = "layers" in vars(context)
    unread = ["batches: no rule that ran reads data"] if batches is not None and not looked else []
    health = context.layers.health if looked else DataHealth(0, 0)
    return Findings(
        rows=errors_first(rows, chosen),
        rules=tuple(outcomes),
        checked=tuple(dict.fromkeys((kind, *(need for rule in ran for need in rule.needs)))),
        notes=(*(subject.notes if kind == "pair" else ()), *unmatched, *unread),
        **_about(context),
        **as_fields(health),
    )


def _check_model(model: nn.Module, capture: Capture | None) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    for name in () if capture is None else capture.program.graph_signature.parameters:
        if name not in own:
            raise SelectionError(f"model: it lacks the capture's parameter {name!r}; expected the captured model")


def _every_rule(context: CheckContext) -> dict[str, Rule]:
    every, plugin = dict(RULES), context.known("plugin")
    for rule in rules_of(plugin):
        if rule.id in every:
            raise PluginError(f"{plugin.name} has a rule {rule.id!r}, which exists already; give it another id")
        every[rule.id] = rule
    return every


def _listed(entries: Collection[str]) -> list[str]:
    return [entries] if isinstance(entries, str) else list(entries)


def _known(wanted: Collection[str], every: Mapping[str, Rule], option: str) -> list[str]:
    """The ids in the order of the rules."""
    wanted = _listed(wanted)
    for rule in wanted:
        if rule not in every:
            near = question(rule, every, 3)
            known = f"; {near}" if near else f". There are {', '.join(every)}"
            raise SelectionError(f"{option}: there is no rule {rule!r}{known}")
    return [rule for rule in every if rule in wanted]


def _run(rule: Rule, context: CheckContext, quiet: Iterable[tuple[str, str]]) -> tuple[list[Finding], RuleOutcome]:
    try:
        for need in rule.needs:
            getattr(context, need)
        found = list(rule.find(context))
    except DoesNotApplyError as reason:
        return [], RuleOutcome(rule.id, rule.title, "not applied", 0, 0, str(reason))
    except Pt2qaError:
        raise
    except Exception as error:
        # One rule that fails must not cost the user the findings of all others.
        text = f"{type(error).__name__}: {error}"
        return [], RuleOutcome(rule.id, rule.title, "failed", 0, 0, " ".join(text.split()))
    # nan, which orders nothing, is unequal to itself.
    found.sort(key=lambda one: -one.value if one.value == one.value else 0.0)
    rows = []
    for one in found:
        about = one.name, one.source or context.source_of(one.name), one.why, one.fix or rule.fix, one.value
        rows.append(Finding(rule.id, one.severity or rule.severity, *about))
    patterns = [pattern for silenced, pattern in quiet if silenced == rule.id]
    shown = [row for row in rows if not any(fnmatchcase(row.name, pattern) for pattern in patterns)]
    outcome = RuleOutcome(rule.id, rule.title, "found" if rows else "clear", len(shown), len(rows) - len(shown), "")
    return shown, outcome


def _about(context: CheckContext) -> dict[str, Any]:
    given, value, plugin = context.given, context.value, context.known("plugin")
    said = describe(plugin) if plugin is not None else "" if context.quantizer is None else str(context.quantizer)
    if given == "pair":
        environment, said = value.environment, value.quantizer if context.quantizer is None else said
    else:
        graph = context.known("graph")
        environment = Environment.here("" if graph is None else fingerprint(graph))
    kind = type(value).__name__ if given == "model" else f"the {given}"
    name = str(value.model) if given in ("pair", "capture") else kind
    return {"quantizer": said, "model": name, "environment": environment}


def cpu_features(cpu: str | Collection[str] | None) -> frozenset[str]:
    """The features of a CPU, as Linux names them.

    Args:
        cpu: the features; or ``"vnni"`` or ``"no-vnni"``; None: this machine's.

    Raises:
        SelectionError: it is neither a collection of names nor one of the two words.

    >>> sorted(cpu_features("vnni"))
    ['avx512_vnni']
    """
    if cpu is None:
        return _of_this_machine()
    if isinstance(cpu, str):
        if cpu not in _NAMED:
            raise SelectionError(
                f"cpu: got {cpu!r}, expected 'vnni', 'no-vnni', or the features as a set: {{'avx2', 'avx512_vnni'}}"
            )
        return _NAMED[cpu]
    names = frozenset(str(name).lower() for name in cpu)
    if wrong := sorted(name for name in names if not re.fullmatch(r"[a-z0-9_.]+", name)):
        raise SelectionError(
            f"cpu: {wrong[0]!r} is not the name of a CPU feature; expected names such as 'avx512_vnni'"
        )
    return names


def _of_this_machine() -> frozenset[str]:
    """What the kernel lists; if it lists nothing, what torch detects."""
    lines = _CPUINFO.read_text(errors="replace").splitlines() if _CPUINFO.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    if flags:
        return frozenset(flags.partition(":")[2].lower().split())
    return frozenset({platform.machine().lower(), *(name for name, there in instructions_found().items() if there)})
