"""A patch of a flow file, for ``git apply``: what its function returns has an override plan, too."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
from pathlib import Path

from pt2qa.cli.flow import REQUIRED, file_and_function
from pt2qa.errors import FlowError

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def patch_of(where: str, plan: Path) -> str:
    """The diff after which the function that ``FLOW.py:function`` names returns the plan of a file.

    Its paths are those of the repository that the flow file is in, or begin at the current folder.

    Raises:
        FlowError: the function is not written so that this is certain to be right; the message says what was found.
    """
    path, name = file_and_function(where)
    before = path.read_bytes()
    given = os.path.relpath(plan.resolve(), path.parent).replace(os.sep, "/")
    after = _changed(before, name, json.dumps(given))
    root = next((each for each in path.parents if (each / ".git").exists()), Path.cwd())
    shown = os.path.relpath(path, root).replace(os.sep, "/")
    old, new = (text.decode().splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{shown}", f"b/{shown}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _changed(source: bytes, name: str, plan: str) -> bytes:
    try:
        source.decode()
        module = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError) as error:
        raise FlowError(f"it is not read as UTF-8: {error}") from error
    found = [each for each in module.body if isinstance(each, ast.FunctionDef) and each.name == name]
    if len(found) != 1:
        raise FlowError(f"{name} has {len(found)} def statements in the file, expected one")
    returned = list(_returned(found[0]))
    if not returned:
        raise FlowError(f"{name} has no return statement")
    for value in reversed(returned):
        source = _with_plan(source, value, plan, name)
    return source


def _returned(node: ast.AST) -> list[ast.expr | None]:
    """What the return statements of a function return, without those of functions inside it."""
    own = [node.value] if isinstance(node, ast.Return) else []
    inner = (each for each in ast.iter_child_nodes(node) if not isinstance(each, _SCOPES))
    return own + [value for each in inner for value in _returned(each)]


def _with_plan(source: bytes, value: ast.expr | None, plan: str, name: str) -> bytes:
    """The source with a plan in one dict or tuple; positions of syntax trees count bytes."""
    lines = source.splitlines(keepends=True)

    def span(node: ast.expr) -> tuple[int, int]:
        ends = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        first, last = (sum(map(len, lines[: line - 1])) + column for line, column in ends)
        return first, last

    text = "None" if value is None else ast.unparse(value)
    if isinstance(value, ast.Dict) and value.values:
        keys = [each.value if isinstance(each, ast.Constant) else None for each in value.keys]
        if "overrides" in keys:
            first, last = span(value.values[keys.index("overrides")])
            return source[:first] + plan.encode() + source[last:]
        start, end, last = *span(value), span(value.values[-1])[1]
        entry = f'"overrides": {plan}'.encode()
        tail = re.fullmatch(rb"\s*,[ \t]*(\r?\n)[ \t]*", source[last : end - 1])
        if tail is None:  # no entry on a line of its own
            return source[:end] + b" | {" + entry + b"}" + source[end:]
        line = lines[value.values[-1].lineno - 1]
        at, indent = source.rindex(b"\n", start, end) + 1, line[: len(line) - len(line.lstrip())]
        return source[:at] + indent + entry + b"," + tail[1] + source[at:]
    if isinstance(value, ast.Tuple) and len(value.elts) in (3, 4) and b"#" not in source[slice(*span(value))]:
        parts = [source[slice(*span(each))] for each in value.elts]
        if not any(isinstance(each, ast.Starred | ast.NamedExpr) for each in value.elts):
            named = zip((*REQUIRED, "inputs_of"), parts, strict=False)
            entries = [f'"{key}": '.encode() + part for key, part in named] + [f'"overrides": {plan}'.encode()]
            first, last = span(value)
            return source[:first] + b"{" + b", ".join(entries) + b"}" + source[last:]
    raise FlowError(f"{name} returns {text:.60}, expected a dict or a tuple that is written there")
