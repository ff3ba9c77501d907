"""Override plans as Python source, for an export flow that does not use pt2qa."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pt2qa._printable import did_you_mean
from pt2qa.errors import SelectionError
from pt2qa.overrides.plan import OBSERVERS
from pt2qa.overrides.plan import Edit as Edit
from pt2qa.overrides.plan import OverridePlan as OverridePlan
from pt2qa.plugins.scopes import called_modules, modules_of, op_type

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


@dataclass(frozen=True, slots=True)
class Base:
    """How a quantizer is configured before any edit, as Python source.

    Attributes:
        imports: import statements.
        expression: creates the quantizer.
        remark: what the expression cannot express; empty if it is complete.
    """

    imports: tuple[str, ...]
    expression: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class NamedOp:
    """An op of a captured graph, as plans name it.

    Attributes:
        name: module path, op and ordinal.
        op: its type.
        module: path of the module that calls it; empty at the root.
        node: its node in the captured graph.
    """

    name: str
    op: str
    module: str
    node: Node


def ops_by_name(graph: GraphModule) -> dict[str, NamedOp]:
    """The ops, the inputs and the output of a captured graph by the names that plans use.

    Args:
        graph: with handles.

    >>> list(ops_by_name(capture.module()))
    ['input', 'output', '0/linear']
    """
    from pt2qa._graph.handles import handle_of, names_of

    names = names_of(graph)
    named = [
        NamedOp(names[handle].name, names[handle].op, names[handle].module, node)
        for node in graph.graph.nodes
        if node.op == "call_function" and (handle := handle_of(node)) in names
    ]
    inputs = [NamedOp(str(node.target), "input", "", node) for node in graph.graph.find_nodes(op="placeholder")]
    output = graph.graph.output_node()
    return {op.name: op for op in (*inputs, NamedOp(output.name, "output", "", output), *named)}


def edited_quantizer_code(
    plan: OverridePlan, graph: GraphModule, base: Base, plugin: Any = None, *, qat: bool = False
) -> str:
    """A plan as a quantizer that changes another one's annotations.

    It can express every edit of annotations.

    Args:
        plan: the edits.
        graph: the captured float graph, with handles.
        base: the quantizer that annotates.
        plugin: what made it; None to make it as ``base`` says.
        qat: whether it is for ``prepare_qat_pt2e``.

    Raises:
        SelectionError: the plan names an op that the graph does not have.
        PluginError: the backend does not support an edit.
        QuantizeError: an edit changes nothing, or cannot be made.
    """
    known = ops_by_name(graph)
    for edit in plan.edits:
        for name in edit.ops:
            if name not in known:
                raise SelectionError(f"{edit}: the model has no op {name!r}{did_you_mean(name, known)}")
    head = [f"# {base.remark}."] if base.remark else []
    if not plan.edits:
        return "\n".join([*head, *base.imports, *([""] if base.imports else []), f"quantizer = {base.expression}", ""])
    if plugin is None:
        made: dict[str, Any] = {}
        exec("\n".join([*base.imports, f"quantizer = {base.expression}"]), made)
        plugin = made["quantizer"]
    specs = f"SPECS = {plan.apply_to(plugin, qat=qat).changed_specs(graph)}"
    body = [*needed(specs, ("Edited", "SPECS")), f"quantizer = Edited({base.expression}, SPECS)", ""]
    return "\n".join([*head, *needed_imports([*_SPECS, *base.imports], body), "", *body])


def modules_in_float(
    plan: OverridePlan, graph: GraphModule, starts: Collection[str], reached: Collection[str]
) -> tuple[str, ...]:
    """The modules whose settings express a plan: whole regions in float, each alone in its module.

    A region is an op with the batch norm and the ReLU that follow it.

    Args:
        plan: the edits.
        graph: the captured float graph, with handles.
        starts: types of ops that start a region, and whose annotation does not depend on that of the op before.
        reached: types of the ops that a module's settings affect.

    Returns:
        Paths of modules; empty if settings cannot express the plan: it does more than keep regions in float, a module
        contains other ops, or an op after one would be annotated differently.
    """
    known = ops_by_name(graph)
    names = [name for edit in plan.edits for name in edit.ops]
    if any(edit.kind != "float" for edit in plan.edits) or any(name not in known for name in names):
        return ()
    named = {known[name].node for name in names}
    first = [known[name] for name in names if known[name].op in starts]
    regions = [_region(op.node) for op in first]
    readers = {reader for region in regions for reader in region[-1].users}
    if {node for region in regions for node in region} != named or not all(
        reader.op == "output" or op_type(reader) in starts for reader in readers
    ):
        return ()
    for op in first:
        inside = [node for node in graph.graph.nodes if node.op == "call_function" and op.module in modules_of(node)]
        own = called_modules(op.node)[-1:] == (op.module,)
        if not own or any(op_type(node) in reached and node not in named for node in inside):
            return ()
    return tuple(dict.fromkeys(op.module for op in first))


def _region(start: Node) -> list[Node]:
    region = [start]
    for follower in ("batch_norm", "relu"):
        readers = list(region[-1].users)
        if len(readers) == 1 and op_type(readers[0]) == follower:
            region.append(readers[0])
    return region


_SPECS: Final = (
    f"from torchao.quantization.pt2e.observer import {', '.join(OBSERVERS.values())}",
    "from torchao.quantization.pt2e.observer import PerChannelMinMaxObserver, PlaceholderObserver",
    "from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec, QuantizationSpec",
    "from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec",
    "import torch",
)
"""Imports of what changed specs are made of."""


@functools.cache
def runtime() -> str:
    """The source of all that printed code may call."""
    from pt2qa._graph.internals import flow_passes, flow_quantizer, flow_runtime, nodes

    return "\n".join(map(inspect.getsource, (nodes, flow_runtime, flow_passes, flow_quantizer)))


@dataclass(frozen=True, slots=True)
class _Source:
    """Statements of a source: imports; by name, the lines of definitions and the names that these use."""

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    definitions: Mapping[str, tuple[list[str], list[str]]]

    @classmethod
    def of(cls, text: str) -> _Source:
        parts, lines = ast.parse(text).body, re.sub(r"  # type: ignore.*", "", text).splitlines()
        return cls(
            tuple(part for part in parts if isinstance(part, ast.Import | ast.ImportFrom)),
            {
                name: (lines[first_line(part) - 1 : part.end_lineno], _names_in(part))
                for part in parts
                if (name := _name_of(part))
            },
        )


@functools.cache
def _of_runtime() -> _Source:
    return _Source.of(runtime())


def needed(source: str, roots: Collection[str]) -> list[str]:
    """The lines of the definitions of a source, and of the runtime, that the roots call, directly or not."""
    parts = {**_of_runtime().definitions, **_Source.of(source).definitions}
    wanted, open_names = set[str](), list(roots)
    while open_names:
        name = open_names.pop()
        if name not in wanted:
            wanted.add(name)
            open_names += [used for used in parts[name][1] if used in parts]
    kept = [lines for name, (lines, _) in parts.items() if name in wanted]
    spaced = "\n".join("\n".join(part if len(part) == 1 else ("", "", *part, "", "")) for part in kept)
    return [*re.sub(r"\n{4,}", "\n\n\n", spaced).strip("\n").splitlines(), ""]


def first_line(part: ast.stmt) -> int:
    """The number of the line where a statement begins, with its decorators."""
    decorators: list[ast.expr] = getattr(part, "decorator_list", [])
    return min([part.lineno, *(each.lineno for each in decorators)])


def _name_of(part: ast.stmt) -> str:
    """What a statement defines; empty if nothing."""
    if isinstance(part, ast.FunctionDef | ast.ClassDef):
        return part.name
    targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
    return targets[0].id if isinstance(targets[0], ast.Name) else ""


def needed_imports(imports: Collection[str], body: Collection[str]) -> list[str]:
    """The imports, and those of the runtime, that a source needs, standard library first, but none of pt2qa."""
    used = _names_in(ast.parse("\n".join(body)))
    kept: dict[str, set[str]] = {}
    for part in (*_Source.of("\n".join(imports)).imports, *_of_runtime().imports):
        module = part.module or "" if isinstance(part, ast.ImportFrom) else ""
        if not module.startswith(("pt2qa._", "__future__")):
            for alias in part.names:
                if (alias.asname or alias.name.partition(".")[0]) in used:
                    start = f"from {module} import " if module else f"import {ast.unparse(alias)}"
                    kept.setdefault(start, set()).update([ast.unparse(alias)] if module else [])
    lines = [start + ", ".join(sorted(names)) for start, names in kept.items()]
    lines.sort(key=lambda line: (line.startswith("from"), line))
    own = [line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    return [*own, *([""] if own else []), *(line for line in lines if line not in own)]


def _names_in(tree: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
