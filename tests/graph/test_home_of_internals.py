"""Nothing but the modules made for it reaches for the internals of torch, torchao and executorch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
HOMES = (
    "pt2qa/_graph/internals",
    *(f"quantizers/pt2qa_{plugin}/internals.py" for plugin in ("arm", "openvino", "probe", "x86", "xnnpack")),
)
FILES = [path for folder in ("pt2qa", "quantizers") for path in sorted((ROOT / folder).rglob("*.py"))]
OWN = ("pt2qa", "pt2qa_arm", "pt2qa_probe", "pt2qa_x86", "pt2qa_xnnpack", "__future__")

UNSTABLE = ("torch.ao", "torch.fx.experimental", "torch.utils.flop_counter", "torchao.quantization.pt2e.constant_fold")
"""Modules with public names that are not documented, or that torch announces to go."""

KEYS = frozenset(
    {"nn_module_stack", "stack_trace", "torch_fn", "source_fn_stack", "numeric_debug_handle", "quantization_annotation"}
    | {"_guards_fn"}
)
ATTRIBUTES = frozenset(
    {"pytree_info", "calculate_qparams", "activation_post_process", "fake_quant_enabled", "observer_enabled"}
    | {"module_name_qconfig", "module_function_to_aten_operator_type"}
)


def found_in(source: str) -> list[str]:
    """What a file uses of internals, each with its line."""
    return [f"line {line}: {what}" for line, what in _found(ast.parse(source))]


def _found(tree: ast.AST) -> Iterator[tuple[int, str]]:
    own = {call.func for call in ast.walk(tree) if isinstance(call, ast.Call) and _calls_base(call)}
    for node in ast.walk(tree):
        if node in own:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name) for name in _imported(node) if _is_internal(name))
        elif isinstance(node, ast.Attribute) and (node.attr in ATTRIBUTES or _reaches_inside(node)):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in KEYS | ATTRIBUTES:
            yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Subscript | ast.Call) and _reads_metadata(node):
            yield node.lineno, ast.unparse(node)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [f"{module}{alias.name}" for alias in node.names]


def _is_internal(name: str) -> bool:
    parts = name.split(".")
    return parts[0] not in OWN and (any(map(_is_private, parts)) or name.startswith(UNSTABLE))


def _calls_base(node: ast.Call) -> bool:
    """Whether this calls a base class's method, ``Base._method(self, ...)``: dataclasses with slots have no super()."""
    return bool(node.args) and isinstance(node.args[0], ast.Name) and node.args[0].id == "self"


def _reaches_inside(node: ast.Attribute) -> bool:
    """Whether this is a private attribute, and not an object's own."""
    own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return _is_private(node.attr) and not own


def _is_private(name: str) -> bool:
    # NamedTuple's methods are public; the underscore keeps them apart from fields.  So is os._exit.
    public = ("_asdict", "_fields", "_replace", "_exit")
    return name.startswith("_") and not name.startswith("__") and name not in public


def _reads_metadata(node: ast.Subscript | ast.Call) -> bool:
    """Whether this is ``node.meta["..."]`` or ``node.meta.get("...")``."""
    if isinstance(node, ast.Subscript):
        holder, key = node.value, node.slice
    elif isinstance(node.func, ast.Attribute) and node.args:
        holder, key = node.func.value, node.args[0]
    else:
        return False
    return isinstance(holder, ast.Attribute) and holder.attr == "meta" and isinstance(key, ast.Constant)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("import torch._dynamo as d", "torch._dynamo"),
        ("from torch.ao.quantization import MinMaxObserver", "torch.ao.quantization.MinMaxObserver"),
        ("schema = node.target._schema", "node.target._schema"),
        ("node.meta['val']", "node.meta['val']"),
        ("node.meta.get('val')", "node.meta.get('val')"),
        ("getattr(module, 'calculate_qparams', None)", "'calculate_qparams'"),
        ("node.target == '_guards_fn'", "'_guards_fn'"),
    ],
)
def test_the_check_finds(source: str, what: str) -> None:
    assert found_in(source) == [f"line 1: {what}"]


def test_internals_are_used_in_their_home_alone() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {what}"
        for path in FILES
        if not str(path.relative_to(ROOT)).startswith(HOMES)
        for what in found_in(path.read_text())
    ]
    assert not wrong, f"these belong in {HOMES[0]} (a plug-in's in its internals.py), with a test:\n" + "\n".join(wrong)


@pytest.mark.parametrize("home", HOMES)
def test_every_home_is_there(home: str) -> None:
    assert (ROOT / home).exists()
