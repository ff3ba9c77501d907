"""Imports point one way.  The table below is the architecture; a new module must take its place in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FRONT_DOOR = "pt2qa"
LAYERS: tuple[tuple[str, ...], ...] = (
    ("pt2qa._printable",),
    ("pt2qa.errors",),
    ("pt2qa._decibels", "pt2qa._exclusion"),
    ("pt2qa._report",),
    ("pt2qa._report.gating.requirement",),
    ("pt2qa._metrics", "pt2qa.overrides.plan"),
    ("pt2qa._graph",),
    ("pt2qa.plugins",),
    ("pt2qa._capture",),
    ("pt2qa._simulator",),
    ("pt2qa.overrides",),
    ("pt2qa._quantize",),
    ("pt2qa._layers", "pt2qa._sensitivity", "pt2qa._bad_cases", "pt2qa._annotations"),
    ("pt2qa._weights", "pt2qa._candidates", "pt2qa._profile", "pt2qa._reconfigure"),
    ("pt2qa._check", "pt2qa._conformance"),
    ("pt2qa._report.diffs",),
    ("pt2qa._report.gating", "pt2qa._report.html", "pt2qa._report.events", "pt2qa._overlays"),
    ("pt2qa.report", "pt2qa.testing", "pt2qa._quant_analysis"),
    (FRONT_DOOR,),
    ("pt2qa.cli",),
    ("pt2qa.__main__",),
)
"""Each may import only what stands above it, and itself.  A name stands for the module and everything below it."""

PLUGIN_MAY_IMPORT = ("pt2qa.errors", "pt2qa.plugins")
PLUGINS = sorted(
    path.name for path in (ROOT / "quantizers").iterdir() if path.is_dir() and path.name.startswith("pt2qa")
)
TORCH_FREE = (
    *("pt2qa._printable", "pt2qa.errors", "pt2qa._decibels", "pt2qa._report", "pt2qa.overrides.plan"),
    *("pt2qa.report", "pt2qa.plugins", "pt2qa.cli", "pt2qa.__main__", FRONT_DOOR),
)
"""What ``pt2qa show`` and ``pt2qa quantizers`` load: these import torch only inside functions or for types."""


@dataclass(frozen=True)
class Import:
    """One imported module: where, and whether it is imported when the file is (not in a function, not for types)."""

    target: str
    line: int
    at_import: bool


def name_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


LIBRARY = {name_of(path, ROOT): path for path in sorted((ROOT / "pt2qa").rglob("*.py"))}
PLUGIN_FILES = {
    name_of(path, ROOT / "quantizers"): path
    for plugin in PLUGINS
    for path in sorted((ROOT / "quantizers" / plugin).rglob("*.py"))
}


def imports_of(path: Path) -> list[Import]:
    return list(_imports(ast.parse(path.read_text()), at_import=True))


def _imports(node: ast.AST, *, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative imports are not used here"
            yield from (
                Import(_target(child.module or "", alias.name), child.lineno, at_import) for alias in child.names
            )
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(child, at_import=False)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from _imports(ast.Module([statement], []), at_import=False)
            for statement in child.orelse:
                yield from _imports(ast.Module([statement], []), at_import=at_import)
        else:
            yield from _imports(child, at_import=at_import)


def _target(module: str, name: str) -> str:
    """``from pt2qa.report import table`` imports a module, ``from pt2qa.report import load`` a function of one."""
    full = f"{module}.{name}"
    if module == FRONT_DOOR and name == "__version__":
        return full
    return full if full in LIBRARY or full in PLUGIN_FILES else module


def home_of(module: str) -> str | None:
    """The entry of the table that a module belongs to: the longest name that it begins with."""
    entries = [entry for layer in LAYERS for entry in layer]
    homes = [entry for entry in entries if module == entry or (entry != FRONT_DOOR and module.startswith(f"{entry}."))]
    return max(homes, key=len, default=None)


def layer_of(entry: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if entry in layer)


@pytest.mark.parametrize("module", LIBRARY)
def test_every_module_has_its_place(module: str) -> None:
    assert home_of(module) is not None, (
        f"{module} is in no layer of LAYERS in tests/test_import_order.py: add it, above everything that imports it"
    )


@pytest.mark.parametrize("entry", [entry for layer in LAYERS for entry in layer])
def test_every_place_has_its_module(entry: str) -> None:
    assert entry in LIBRARY, f"LAYERS in tests/test_import_order.py names {entry}, which is not there: take it out"


@pytest.mark.parametrize("module", LIBRARY)
def test_imports_point_to_earlier_layers(module: str) -> None:
    home = home_of(module)
    assert home is not None
    wrong = []
    for found in imports_of(LIBRARY[module]):
        target = home_of(found.target)
        if target is not None and target != home and layer_of(target) >= layer_of(home):
            wrong.append(f"line {found.line} imports {found.target}")
    assert not wrong, f"{module} may import only from layers above {home}: {'; '.join(wrong)}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {found.target for found in imports_of(path) if found.at_import and found.target in LIBRARY}
        for module, path in LIBRARY.items()
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle of imports: {' -> '.join((*above[above.index(module) :], module))}"
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", LIBRARY)
def test_the_library_names_no_plugin(module: str) -> None:
    text = LIBRARY[module].read_text()
    assert not [plugin for plugin in PLUGINS if plugin in text]


@pytest.mark.parametrize("module", PLUGIN_FILES)
def test_a_plugin_imports_only_the_protocol_and_errors(module: str) -> None:
    own = module.partition(".")[0]
    wrong = [
        f"line {found.line} imports {found.target}"
        for found in imports_of(PLUGIN_FILES[module])
        if found.target.partition(".")[0] in (FRONT_DOOR, *PLUGINS)
        and found.target not in PLUGIN_MAY_IMPORT
        and found.target.partition(".")[0] != own
    ]
    assert not wrong, f"{module} may import {' and '.join(PLUGIN_MAY_IMPORT)} only: {'; '.join(wrong)}"


LOADED = [module for module in LIBRARY if home_of(module) in TORCH_FREE]


@pytest.mark.parametrize("module", [*LOADED, *PLUGINS, *(f"{plugin}.plugin" for plugin in PLUGINS)])
def test_what_the_command_line_loads_does_not_import_torch(module: str) -> None:
    heavy = [
        f"line {found.line} imports {found.target}"
        for found in imports_of(LIBRARY.get(module) or PLUGIN_FILES[module])
        if found.at_import and found.target.partition(".")[0] in ("torch", "torchao", "executorch")
    ]
    assert not heavy, f"{module} is loaded without torch: {'; '.join(heavy)}"
