"""From a pair, or a capture and a quantizer, to an annotation report."""

# No `from __future__ import annotations` here: the function below has its name.
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch.fx import GraphModule

from pt2qa._ambient import torch_defaults
from pt2qa._annotations.report import AnnotationCoverage, AnnotationReport, AnnotationRow, ModuleCalls
from pt2qa._annotations.values import AnnotatedValue, SpecResolver, missing_values, values_in_graph, values_in_program
from pt2qa._capture.program import Capture
from pt2qa._exclusion import exports
from pt2qa._graph.handles import OpName, name_of, walk
from pt2qa._graph.internals.nodes import clean_path, module_stack
from pt2qa._grouping import grouped
from pt2qa._quantize.pairing import QuantizedPair, fingerprint, identity_of
from pt2qa._report.prose import few
from pt2qa._report.rows import Environment
from pt2qa._simulator.products import Read, is_quantized
from pt2qa.errors import SelectionError
from pt2qa.overrides import OverridePlan
from pt2qa.overrides.edited import annotations_of
from pt2qa.plugins import describe, resolve


@torch_defaults
@exports
def annotations(
    subject: QuantizedPair | Capture, quantizer: Any = None, *, qat: bool = False, overrides: OverridePlan | None = None
) -> AnnotationReport:
    """Lists for every place of a model what its quantizer annotates, and what the converted model does.

    Args:
        subject: a pair from :func:`pt2qa.quantize`, which its quantizer annotates again; one from :func:`pt2qa.pair`,
            where only the converted graph is known; or a capture, before any calibration.
        quantizer: with a capture, as :func:`pt2qa.quantize` takes it.
        qat: with a capture, as ``prepare_qat_pt2e`` annotates it.
        overrides: with a capture, edits to its annotations.

    Returns:
        A row for each op's inputs, weights and output, those that stay float included; the calls of each module; and
        how many ops of each type are quantized.

    Raises:
        SelectionError: a capture without a quantizer, or a pair with one.
        QuantizeError: the quantizer failed, or an edit changes nothing or cannot be made.
        PluginError: there is no such quantizer, or the backend does not support an edit.

    >>> [(row.role, row.dtype) for row in annotations(capture, "xnnpack").rows]
    [('output', 'int8'), ('input', 'int8'), ('weight', 'int8'), ('bias', 'float32'), ('output', 'int8')]
    """
    if isinstance(subject, QuantizedPair):
        if quantizer is not None or qat or overrides is not None:
            raise SelectionError(
                f"got a pair, made by {subject.quantizer}, and quantizer, qat or overrides, which need a capture. Call "
                "pt2qa.annotations(pair), or pass a capture and a quantizer."
            )
        return _of_pair(subject)
    if not isinstance(subject, Capture):
        raise SelectionError(
            f"got {type(subject).__name__}, expected what pt2qa.quantize or pt2qa.pair returned, or a capture and a "
            "quantizer"
        )
    if quantizer is None:
        raise SelectionError("got a capture without a quantizer. Call pt2qa.annotations(capture, quantizer).")
    return _of_capture(subject, quantizer, qat, overrides)


def _of_pair(pair: QuantizedPair) -> AnnotationReport:
    known = None if pair.recipe is None else pair.recipe.annotations
    notes = pair.notes
    if known is None:
        notes += (
            "the pair was not made by pt2qa.quantize: its annotations, observers and shared scales are not known",
        )
    graph = pair.reference if pair.float_graph is None else pair.float_graph
    return _report(
        graph,
        pair.names,
        values_in_program(pair.program, pair.names, (pair.reference, graph)),
        SpecResolver(known, pair.sites),
        basis="converted" if known is None else "annotated and converted",
        notes=tuple(dict.fromkeys(notes)),
        **identity_of(pair),
    )


def _of_capture(capture: Capture, quantizer: Any, qat: bool, overrides: OverridePlan | None) -> AnnotationReport:
    plugin = resolve(quantizer)
    known = annotations_of(capture, plugin, () if overrides is None else overrides.edits, qat=qat)
    graph = capture.module()
    return _report(
        graph,
        capture.names,
        values_in_graph(known.graph.nodes, capture.names),
        SpecResolver(known, None),
        basis="annotated",
        notes=(),
        quantizer=describe(plugin) + (" for QAT" if qat else ""),
        model=capture.model,
        environment=Environment.here(fingerprint(graph)),
    )


_Listed = tuple[AnnotatedValue, AnnotationRow]


def _report(
    captured: GraphModule,
    names: Mapping[int, OpName],
    values: Iterable[AnnotatedValue],
    resolver: SpecResolver,
    **facts: Any,
) -> AnnotationReport:
    """The report on the values of the quantized graph, in the order of the captured one.

    Ops that the captured graph lacks follow what precedes them.
    """
    values = list(values)
    owners = {value.name: value.owner for value in values}
    missing = missing_values(captured, names, owners.values())
    handles = {name.name: handle for handle, name in names.items()}
    found: list[tuple[int, _Listed]] = []
    last = -1
    for value in (*values, *missing.values()):
        handle = handles.get(value.owner)
        last = last if handle is None else handle
        row = resolver.row(value, "" if handle is None else names[handle].module)
        found.append((last, (value, row)))
    listed = [each for _, each in sorted(found, key=lambda item: item[0])]
    quantized = {owners[row.name] for _, row in listed if row.quantized and row.role != "output"}
    return AnnotationReport(
        rows=tuple(row for _, row in listed),
        modules=_module_calls(captured, names, set(owners.values()), quantized),
        coverage=_coverage(listed, set(missing), facts["basis"] != "converted"),
        **facts,
    )


def _coverage(listed: Iterable[_Listed], missing: Collection[str], known: bool) -> tuple[AnnotationCoverage, ...]:
    """By kind of op, the most frequent first; as ``pair.coverage`` counts."""
    ops: dict[str, dict[str, list[_Listed]]] = {}
    for value, row in listed:
        if value.owner and row.op != "input" and row.name not in missing:
            ops.setdefault(row.op, {}).setdefault(value.owner, []).append((value, row))
    found = []
    for op, alike in sorted(ops.items(), key=lambda item: -len(item[1])):
        asked = sum(any(row.annotated for _, row in own) for own in alike.values())
        done = sum(any(is_quantized(op, reads) for reads in _reads(own)) for own in alike.values())
        floating = sum(not any(row.quantized for _, row in own) for own in alike.values())
        found.append(AnnotationCoverage(op, len(alike), asked if known else -1, done, floating))
    return tuple(found)


def _reads(listed: Iterable[_Listed]) -> Collection[list[Read]]:
    """What an op reads; of one that was decomposed, part by part."""
    parts: dict[str, list[Read]] = defaultdict(list)
    for value, row in listed:
        parts[row.name] += [Read(row.argument, value.constant, row.quantized)] if row.argument >= 0 else []
    return parts.values()


def _module_calls(
    graph: GraphModule, names: Mapping[int, OpName], present: Collection[str], quantized: Collection[str]
) -> tuple[ModuleCalls, ...]:
    """The modules of a captured graph in the order in which they are called, then those that are never called.

    A module is found by the ops that it calls or the parameters that it holds: one with neither is not listed.
    ``present`` are the ops that are left in the graph that is quantized, ``quantized`` those that read a rounded value.
    """
    calls: dict[str, set[str]] = defaultdict(set)
    types: dict[str, str] = {}
    ops: dict[str, list[str]] = defaultdict(list)
    for placed in walk(graph):
        name = name_of(placed.node, names)
        if placed.node.op != "call_function" or name is None:
            continue
        for key, (raw_path, kind) in module_stack(placed.node).items():
            path = clean_path(raw_path)
            calls[path].add(str(key))
            types[path] = str(getattr(kind, "__qualname__", kind)).rpartition(".")[2]
            ops[path].append(name)

    def counted(path: str, among: Collection[str]) -> int:
        return sum(name in among for name in ops[path])

    called = [
        ModuleCalls(path, types[path], len(keys), counted(path, present), counted(path, quantized), "")
        for path, keys in calls.items()
        if path
    ]
    return (*called, *_never_called(graph, names, set(calls)))


def _never_called(graph: GraphModule, names: Mapping[int, OpName], called: Collection[str]) -> list[ModuleCalls]:
    """Modules with parameters or buffers of their own that call no op."""
    state = graph.state_dict(keep_vars=True)
    # A module with two paths is called by one of them.
    theirs = {id(tensor) for name, tensor in state.items() if name.rpartition(".")[0] in called}
    others = (name.rpartition(".")[0] for name, tensor in state.items() if id(tensor) not in theirs)
    paths = dict.fromkeys(path for path in others if path and path not in called)
    readers = grouped(
        (str(node.target).rpartition(".")[0], name)
        for node in graph.graph.find_nodes(op="get_attr")
        for user in node.users
        if (name := name_of(user, names)) is not None
    )
    read_by = {path: few(list(dict.fromkeys(readers[path]))) for path in paths}
    told = {
        path: f"its parameters are read by {by}" if by else "nothing reads its parameters"
        for path, by in read_by.items()
    }
    return [ModuleCalls(path, "", 0, 0, 0, f"never called; {text}") for path, text in told.items()]
