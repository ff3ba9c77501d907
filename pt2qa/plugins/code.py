"""Override plans as Python source, for an export flow that does not use pt2qa."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pt2qa._near_names import did_you_mean
from pt2qa.errors import SelectionError
from pt2qa.overrides.plan import OBSERVERS
from pt2qa.plugins.code_template import IMPORTS, SOURCE
from pt2qa.plugins.scopes import called_modules, modules_of, op_type

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from pt2qa.overrides.plan import Edit, OverridePlan


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

    >>> import torch, pt2qa
    >>> capture = pt2qa.capture(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.zeros(1, 4))
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


def edited_quantizer_code(plan: OverridePlan, graph: GraphModule, base: Base) -> str:
    """A plan as a quantizer that edits another one's annotations.

    It can express every edit, for quantizers that annotate weights where they are read, as torchao's do.

    Args:
        plan: the edits.
        graph: the captured float graph, with handles.
        base: the quantizer that annotates.

    Raises:
        SelectionError: the plan names an op that the graph does not have.
    """
    known = ops_by_name(graph)
    for edit in plan.edits:
        for name in edit.ops:
            if name not in known:
                raise SelectionError(f"{edit}: the model has no op {name!r}{did_you_mean(name, known)}")
    unnamed = [edit for edit in plan.edits if any(name.endswith("]") for name in edit.ops)]
    lines = [f"        {_call(edit, known)}" for edit in plan.edits if edit not in unnamed]
    head = [f"# {base.remark}."] if base.remark else []
    head += [
        f"# Not included: {edit}. A single output of an op with several has no name outside of pt2qa."
        for edit in unnamed
    ]
    if not lines:
        return "\n".join([*head, *base.imports, *([""] if base.imports else []), f"quantizer = {base.expression}", ""])
    body = needed(SOURCE.replace("{edits}", "\n".join(lines)), ("Edited",))
    imports = needed_imports(IMPORTS, body)
    return "\n".join([*head, *imports, *base.imports, "", *body, "", f"quantizer = Edited({base.expression})", ""])


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


def _call(edit: Edit, known: dict[str, NamedOp]) -> str:
    """The line of source for an edit."""
    # A batch norm is folded into its convolution before a quantizer sees the graph.
    ops = [f"ops[{name!r}]" for name in edit.ops if known[name].op != "batch_norm"]
    joined = ", ".join(ops)
    if edit.kind == "fuse":
        return f"fuse(graph, {joined})"
    if edit.kind == "observer":
        return f"set_observer(graph, [{joined}], {OBSERVERS[edit.observer]})"
    if edit.kind == "range":
        return f"set_range(graph, [{joined}], {edit.scale!r}, {edit.zero_point})"
    function = {"float": "leave_in_float", "dynamic": "make_dynamic", "int16": "make_int16"}[edit.kind]
    return f"{function}(graph, [{joined}])"


def needed(source: str, roots: Collection[str]) -> list[str]:
    """The lines of a source without the functions, classes and constants that nothing in it calls.

    Args:
        source: definitions and assignments of constants.
        roots: the names from which the others are called.
    """
    parts = {_name_of(part): part for part in ast.parse(source).body}
    wanted, open_names = set[str](), list(roots)
    while open_names:
        name = open_names.pop()
        if name not in wanted:
            wanted.add(name)
            open_names += [used for used in _names_in(parts[name]) if used in parts]
    lines = source.splitlines()
    kept = [lines[part.lineno - 1 : part.end_lineno] for name, part in parts.items() if name in wanted]
    return [line for part in kept for line in ("", *part, "")][1:]


def _name_of(part: ast.stmt) -> str:
    if isinstance(part, ast.FunctionDef | ast.ClassDef):
        return part.name
    assert isinstance(part, ast.Assign)
    assert isinstance(part.targets[0], ast.Name)
    return part.targets[0].id


def needed_imports(imports: Collection[str], body: Collection[str]) -> list[str]:
    """The imports that a source needs, without unused names; those of the standard library come first."""
    used = _names_in(ast.parse("\n".join(body)))
    kept = []
    for part in ast.parse("\n".join(imports)).body:
        assert isinstance(part, ast.Import | ast.ImportFrom)
        part.names = [alias for alias in part.names if (alias.asname or alias.name.partition(".")[0]) in used]
        if part.names:
            kept.append(ast.unparse(part))
    return kept


def _names_in(tree: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
