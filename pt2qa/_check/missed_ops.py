"""Why a quantizer misses ops of a program that ``torch.export`` wrote."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from pt2qa._capture.normalise import write_sources
from pt2qa._check.context import CheckContext
from pt2qa._check.rewriting import EVERY_PASS
from pt2qa._graph.handles import handle_of, module_of, op_of
from pt2qa._graph.internals.nodes import SOURCES, module_stack
from pt2qa.errors import Pt2qaError

_BUT_SOURCES = tuple(run for run in EVERY_PASS if run is not write_sources)


class Reasons:
    """Why a quantizer misses ops of a program.

    What the program says about an op may differ harmlessly from what quantizers look for.  So each difference is put
    back alone into the program as capture would write it: an op missed then is missed because of it.

    Args:
        context: a program or graph whose annotations are known, before and after capture's passes.
        lost: names of the ops that are missed.
    """

    def __init__(self, context: CheckContext, lost: frozenset[str]) -> None:
        self._subject, self._lost = context, lost
        self._rewritten = dict(self._named(context.rewritten.module()))
        self._calls = Counter(path for path, _ in {_stack(node)[-1] for node in context.nodes.values() if _stack(node)})
        self._said = {name: text for name in self._rewritten if (text := self._difference(name))}
        others = [change.rule for run in _BUT_SOURCES for change in context.rewritten.changes[run]]
        self._rules = ", ".join(dict.fromkeys(others)) or "op source"
        without = context.annotated_after(*_BUT_SOURCES) if others else None
        # An op annotated with torch.export's sources is not missed because of them.
        self._other_reason = frozenset() if without is None else lost & without.ops.keys()
        groups: dict[str, set[str]] = defaultdict(set)
        for name, text in self._said.items():
            groups[text].add(name)
        self._missed: dict[str, frozenset[str]] = {}
        # The largest first, which usually explain everything: each try costs an annotation.
        waiting = set(lost - self._other_reason)
        for text in sorted(groups, key=lambda text: (len(groups[text]), len(groups[text] & lost)), reverse=True):
            if waiting:
                self._missed[text] = self._missed_with(groups[text])
                waiting -= self._missed[text]

    def of(self, name: str, node: Node) -> str:
        """The reason for one op."""
        new = self._rewritten[name]
        if new.target != node.target:
            return f"it is written as {node.target}, the quantizer looks for {new.target}"
        if name in self._other_reason:
            return f"pt2qa.capture makes it visible ({self._rules})"
        own = self._said.get(name, "")
        if name in self._missed.get(own, ()):
            return own
        guilty = [text for text, missed in self._missed.items() if name in missed]
        if not guilty:
            return "it is quantized only beside quantized ops, of which several are missed"
        worst = max(guilty, key=lambda text: len(self._missed[text]))
        op = next(op_of(self._rewritten[other].target) for other, text in self._said.items() if text == worst)
        return f"it is quantized only beside a quantized op, and of the {op} there {worst}"

    def _difference(self, name: str) -> str:
        """How the program's description of an op differs from what quantizers look for; empty if it does not."""
        node, source = self._subject.nodes.get(name), self._rewritten[name].meta.get(SOURCES)
        wanted = source[-1][1] if source else None
        if node is None or not (isinstance(wanted, type) or wanted in (operator.add, operator.mul)):
            return ""
        given = node.meta.get(SOURCES)
        if given:
            said = _label(given[-1][1])
            return (
                ""
                if said == _label(wanted)
                else f"source_fn_stack says {said}, the quantizer looks for {_label(wanted)}"
            )
        said = module_of(node)[1] or "nothing"
        if said != _label(wanted):
            return (
                f"nn_module_stack says {said}, the quantizer looks for {_label(wanted)} by exact class "
                "(strict=False writes no source_fn_stack)"
            )
        calls = self._calls[_stack(node)[-1][0]]
        return f"nn_module_stack has {calls} calls of one {said}, which make one partition" if calls > 1 else ""

    def _missed_with(self, names: set[str]) -> frozenset[str]:
        """The ops missed when only these ops keep the sources that torch.export wrote."""
        graph = self._subject.rewritten.module()
        for name, node in self._named(graph):
            if name in names:
                given = self._subject.nodes[name].meta.get(SOURCES)
                node.meta = {key: value for key, value in node.meta.items() if key != SOURCES}
                node.meta |= {SOURCES: given} if given else {}
        try:
            annotated = self._subject.annotate(graph, self._subject.rewritten.names)
        except Pt2qaError:
            return frozenset()  # alone it stops the quantizer, which is not what happened
        return self._lost - annotated.ops.keys()

    def _named(self, graph: GraphModule) -> Iterator[tuple[str, Node]]:
        names = self._subject.rewritten.names
        for node in graph.graph.nodes:
            handle = handle_of(node)
            if handle is not None and handle in names:
                yield names[handle].name, node


def _stack(node: Node) -> list[tuple[str, str]]:
    """The modules that called an op, outermost first: path, and a key that differs from call to call."""
    stack: Mapping[str, Any] = module_stack(node)
    return [(str(path), str(key)) for key, (path, _) in stack.items()]


def _label(source: Any) -> str:
    return str(getattr(source, "__name__", source))
