"""The faults: a node of a module's syntax tree gives way to one that looks alike and does something else."""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SWAPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "inf": "nan",
    "nan": "inf",
    "amin": "amax",
    "amax": "amin",
    "first": "last",
    "last": "first",
    "reference": "quantized",
    "quantized": "reference",
}


@dataclass(frozen=True)
class Mutation:
    """A fault: the file and its number in it, the line, and what stands there before and after.

    ``called``: whether the line is of a function, so that a test that minds the fault runs it.
    """

    path: str
    number: int
    line: int
    before: str
    after: str
    called: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


def mutations(path: str, source: str) -> list[Mutation]:
    """All faults of a module, in the order of its lines."""
    found, tree = [], ast.parse(source)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    called = {line for body in bodies for line in range(body[0].lineno, (body[-1].end_lineno or 0) + 1)}
    for number, (_, parent, node, other) in enumerate(_faults(tree)):
        line = getattr(node, "lineno", getattr(parent, "lineno", 0))
        texts = _short(ast.unparse(node)), _short(ast.unparse(other))
        found.append(Mutation(path, number, line, *texts, line in called))
    return found


def mutated(mutation: Mutation, source: str) -> str:
    """The source of the module with the fault in it."""
    tree = ast.parse(source)
    put, _, _, other = next(itertools.islice(_faults(tree), mutation.number, None))
    put(other)
    return ast.unparse(tree)


def _faults(tree: ast.AST) -> Iterator[tuple[Callable[[ast.AST], None], ast.AST, ast.AST, ast.AST]]:
    """Each fault: what puts a node in place, the parent, the node, and the one that may stand in its place."""
    for parent, name, index, node in _places(tree):
        for other in _others(node):
            yield functools.partial(_put, parent, name, index), parent, node, other


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) < 100 else f"{line[:100]} ..."


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Each node with the field that holds it; texts, types, assertions and what only errors say are left out."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "keywords_of_class") or isinstance(tree, ast.JoinedStr):
            continue
        if isinstance(tree, (ast.Raise, ast.Import, ast.ImportFrom, ast.Assert)):
            continue
        if isinstance(tree, ast.AnnAssign) and name == "target":
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(node, ast.AST) and not _is_text(node) and not _is_strict(tree, node):
                yield tree, name, index if isinstance(value, list) else None, node
                yield from _places(node)


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def _is_strict(tree: ast.AST, node: ast.AST) -> bool:
    """Whether a node is ``strict=True`` of a zip, which is an assertion, too."""
    is_zip = isinstance(tree, ast.Call) and getattr(tree.func, "id", "") == "zip"
    strict = isinstance(node, ast.keyword) and node.arg == "strict" and getattr(node.value, "value", False)
    return is_zip and bool(strict)


def _put(parent: ast.AST, name: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def _others(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    changed = copy.copy(node)
    match node:
        case ast.Compare(ops=[only]) if type(only) in SWAPPED:
            changed.ops = [SWAPPED[type(only)]()]
            yield changed
        case ast.BoolOp() | ast.BinOp() if type(node.op) in SWAPPED:
            changed.op = SWAPPED[type(node.op)]()
            yield changed
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp():
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            yield changed
        case ast.If() | ast.While() if not isinstance(node.test, ast.Name) or node.test.id != "TYPE_CHECKING":
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            yield changed
        case ast.Return(value=ast.AST() as value) if not isinstance(value, ast.Constant) or value.value is not None:
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield ast.Name(NAMES[name], ast.Load())
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in NAMES:
            changed.attr = NAMES[name]
            yield changed
        case ast.comprehension(ifs=[_, *_]):
            changed.ifs = node.ifs[1:]
            yield changed
