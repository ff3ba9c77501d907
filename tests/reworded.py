"""A plug-in of pytest that imports pt2qa with every sentence in it garbled: ``pytest -p tests.reworded tests/merge``.

Each sentence is garbled by its place, so that two that read alike no longer do. What stays: docstrings, which columns
are described by; the members of literals, which are kinds; and Python code in strings.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

PACKAGE = Path(__file__).parent.parent / "pt2qa"
SENTENCE = re.compile(r"[^\W\d_]{2,}[,;:.]? |: $| [^\W\d_]{2,}")
WORD = re.compile(r"\{[^}]*\}|[^\W\d_]{3,}")


def _literals() -> set[str]:
    """The members of all literal types."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    literals = [node for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "Literal"]
    constants = [each for node in literals for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return {each.value for each in constants if isinstance(each.value, str)}


def _is_code(text: str) -> bool:
    try:
        ast.parse(text.strip())
    except SyntaxError:
        return False
    return True


class Rewording(ast.NodeTransformer):
    """Garbles the sentences of a module."""

    def __init__(self, kinds: set[str]) -> None:
        self.kinds, self.garbled = kinds, 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Docstrings stay."""
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A list of names that is written in one text stays, and so does what other packages write."""
        stays = isinstance(node.func, ast.Attribute) and node.func.attr in ("split", "filterwarnings")
        return node if stays else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """The same text with other words, if it is a sentence or a part of one."""
        text = node.value
        if not isinstance(text, str) or text in self.kinds or not SENTENCE.search(text) or _is_code(text):
            return node
        self.garbled += 1
        mark = f"{node.lineno:x}".translate(str.maketrans("0123456789", "ghijklmnop"))
        words = WORD.sub(lambda word: word[0] if word[0][0] == "{" else f"{word[0][::-1]}{mark}", text)
        return ast.copy_location(ast.Constant(words), node)


class _Loader(SourceFileLoader):
    kinds = _literals()

    def get_code(self, fullname: str) -> CodeType | None:
        """The module's code, garbled and not kept in a file."""
        path = Path(self.get_filename(fullname))
        if path.parent.name in FOLDERS or path.name in FILES:
            return super().get_code(fullname)
        tree = Rewording(self.kinds).visit(ast.parse(path.read_text(encoding="utf-8")))
        return compile(tree, str(path), "exec")


FOLDERS = ("plugins", "html")
FILES = ("plain_flow.py", "slice_ops.py", "__init__.py")
"""Where strings are parts of programs and pages, or lists of names."""


class _Finder(PathFinder):
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module of pt2qa with its sentences garbled."""
        spec = super().find_spec(name, path, target) if name.partition(".")[0] == "pt2qa" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def _raises(expected: Any, *args: Any, match: object = None, **given: Any) -> Any:
    """``pytest.raises`` of an error with any text."""
    return RAISES(expected, *args, **given)


assert "pt2qa" not in sys.modules, "pt2qa is imported already"
RAISES = pytest.raises
pytest.raises = _raises
sys.meta_path.insert(0, _Finder())
