"""Imports point one way.  The table below is the architecture; a new module must take its place in it.

Each test looks at all modules and lists everything that is wrong.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

FRONT_DOOR = "pt2qa"
LAYERS: dict[str, tuple[str, ...]] = {
    "foundations": (
        "pt2qa._noise",
        "pt2qa._printable",
        "pt2qa.errors",
        "pt2qa._decibels",
        "pt2qa._exclusion",
        "pt2qa._grouping",
        "pt2qa._ambient",
        "pt2qa._interrupts",
    ),
    "reports": ("pt2qa._report", "pt2qa.overrides.plan"),
    "graphs": (
        "pt2qa._metrics",
        "pt2qa.metrics",
        "pt2qa._graph",
        "pt2qa.plugins",
        "pt2qa._capture",
        "pt2qa._ranks",
        "pt2qa._simulator",
        "pt2qa.overrides",
    ),
    "quantization": ("pt2qa._quantize",),
    "analyses": (
        *("pt2qa._layers", "pt2qa._weights", "pt2qa._sensitivity", "pt2qa._bad_cases", "pt2qa._annotations"),
        *("pt2qa._candidates", "pt2qa._profile", "pt2qa._trials", "pt2qa._repair", "pt2qa._reconfigure"),
        "pt2qa._check",
        *("pt2qa._conformance", "pt2qa._overlays", "pt2qa._two_graphs", "pt2qa._deployed", "pt2qa._runtimes"),
        "pt2qa._diagnosis",
    ),
    "public names": ("pt2qa.report", "pt2qa.testing", "pt2qa._quant_analysis", FRONT_DOOR),
    "names of other tools": ("pt2qa.compat",),
    "command line": ("pt2qa.cli", "pt2qa.__main__"),
}
"""A layer may import only itself and those above, and packages of one layer import each other one way.

A name stands for the module and everything below it, but for what has a name of its own in the table.
"""

PLUGIN_MAY_IMPORT = ("pt2qa.errors", "pt2qa.plugins")
ON_TOP = ("pt2qa_torchao", "pt2qa_probe")
"""No plug-ins: their functions are made of public ones, and may import what users do."""
PLUGINS = sorted(
    path.name for path in (ROOT / "quantizers").iterdir() if path.is_dir() and path.name.startswith("pt2qa")
)
TORCH_FREE = (
    *(
        "pt2qa._noise",
        "pt2qa._printable",
        "pt2qa.errors",
        "pt2qa._decibels",
        "pt2qa._grouping",
        "pt2qa._interrupts",
        "pt2qa._report",
        "pt2qa.overrides.plan",
    ),
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


@functools.cache
def imports_of(path: Path) -> list[Import]:
    """The imports of a module, those too that a package makes on first use, which its stub lists."""
    stub, package = path.with_suffix(".pyi"), name_of(path, ROOT)
    package = package if path.name == "__init__.py" else package.rpartition(".")[0]
    lazy = re.sub(r"from \.(?! )", f"from {package}.", stub.read_text()) if stub.exists() else ""
    lazy = lazy.replace("from . import", f"from {package} import")
    return list(_imports(ast.parse(path.read_text() + lazy), at_import=True))


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
    homes = [entry for entry in LEVEL if module == entry or (entry != FRONT_DOOR and module.startswith(f"{entry}."))]
    return max(homes, key=len, default=None)


LEVEL = {entry: level for level, layer in enumerate(LAYERS.values()) for entry in layer}
"""How far down in the table an entry stands."""


def circles(graph: Mapping[str, Set[str]]) -> list[str]:
    """Each circle as ``a -> b -> a``."""
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            found.append(" -> ".join((*above[above.index(name) :], name)))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    return found


def listed(found: list[str]) -> str:
    return "".join(f"\n  {each}" for each in found)


def test_every_module_has_its_place_and_every_place_its_module() -> None:
    homeless = [module for module in LIBRARY if home_of(module) is None]
    assert not homeless, f"add to LAYERS, above everything that imports them:{listed(homeless)}"
    gone = [entry for entry in LEVEL if entry not in LIBRARY]
    assert not gone, f"take out of LAYERS what is not there:{listed(gone)}"


def test_imports_point_to_the_same_or_earlier_layers() -> None:
    wrong = [
        f"{module}, line {found.line} imports {found.target}"
        for module in LIBRARY
        for found in imports_of(LIBRARY[module])
        if (target := home_of(found.target)) and LEVEL[target] > LEVEL[home_of(module) or target]
    ]
    assert not wrong, f"imports of a later layer:{listed(wrong)}"


def test_packages_of_one_layer_import_each_other_one_way() -> None:
    graph: dict[str, set[str]] = {entry: set() for entry in LEVEL}
    for module in LIBRARY:
        if home := home_of(module):
            targets = {target for found in imports_of(LIBRARY[module]) if (target := home_of(found.target))}
            graph[home] |= {target for target in targets - {home} if LEVEL[target] == LEVEL[home]}
    assert not circles(graph), f"packages in a circle:{listed(circles(graph))}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        # In functions and for types, too: a module that needs another to say what it is has no place of its own.
        module: {found.target for found in imports_of(LIBRARY[module]) if found.target in LIBRARY}
        - {FRONT_DOOR, module}
        for module in LIBRARY
    }
    assert not circles(graph), f"modules in a circle:{listed(circles(graph))}"


def test_the_library_names_no_plugin() -> None:
    wrong = [
        f"{module} names {plugin}"
        for module, path in LIBRARY.items()
        for plugin in PLUGINS
        if plugin in path.read_text()
    ]
    assert not wrong, listed(wrong)


def test_a_plugin_imports_only_the_protocol_and_errors() -> None:
    wrong = [
        f"{module}, line {found.line} imports {found.target}"
        for module, path in PLUGIN_FILES.items()
        for found in imports_of(path)
        if (package := found.target.partition(".")[0]) in (FRONT_DOOR, *PLUGINS)
        and found.target not in (*PLUGIN_MAY_IMPORT, *((FRONT_DOOR,) if module.startswith(ON_TOP) else ()))
        and package != module.partition(".")[0]
    ]
    assert not wrong, f"a plug-in may import {' and '.join(PLUGIN_MAY_IMPORT)} only:{listed(wrong)}"


def test_what_the_command_line_loads_does_not_import_torch() -> None:
    loaded = {module: path for module, path in LIBRARY.items() if home_of(module) in TORCH_FREE}
    fronts = [name for plugin in PLUGINS for name in (plugin, f"{plugin}.plugin", f"{plugin}.backend")]
    loaded |= {name: PLUGIN_FILES[name] for name in fronts if name in PLUGIN_FILES}
    heavy = [
        f"{module}, line {found.line} imports {found.target}"
        for module, path in loaded.items()
        for found in imports_of(path)
        if found.at_import and found.target.partition(".")[0] in ("torch", "torchao", "executorch")
    ]
    assert not heavy, f"these are loaded without torch:{listed(heavy)}"
