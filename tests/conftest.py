"""What holds for every test: the same random numbers in each, no chatter from third parties, no export done twice."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.metadata
import linecache
import logging
import sys
import typing
from collections.abc import Callable, Hashable, Iterator
from types import CodeType
from typing import Any

import pytest

# On import these log which optional libraries of other platforms they did not find.
for _name in ("torch", "torchao", "executorch"):
    logging.getLogger(_name).setLevel(logging.ERROR)


# Scripts of their own: one rewords what is imported after it (see test_wording.py), one imports OpenVINO.
collect_ignore = ["reworded.py", "runtimes/without_vnni.py"]


def pytest_collectstart(collector: pytest.Collector) -> None:
    # From torch 2.14 on, a process has threads for gradients if an export comes before its first backward pass, and
    # what is forked from it then has no gradients: the ranks of tests/distributed are. Modules export when collected.
    if isinstance(collector, pytest.Module) and "report" not in collector.path.parts:
        _differentiate()


@functools.cache
def _differentiate() -> None:
    import torch

    torch.ones(1, requires_grad=True).sum().backward()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many browser tests ran: without a browser they are skipped, and a run without them looks like any other."""
    counts = {
        outcome: sum("browser" in getattr(each, "keywords", ()) for each in terminalreporter.getreports(outcome))
        for outcome in ("passed", "failed", "skipped")
    }
    if any(counts.values()):
        terminalreporter.write_line(f"browser tests: {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}")


LONGEST = (
    *("tests/test_wording.py", "tests/mutants/", "tests/devices/", "tests/test_memory.py", "tests/distributed/"),
    *("tests/test_docs.py", "tests/soak/", "tests/conformance/", "tests/test_plain_flow.py", "tests/test_packaging.py"),
)
"""Files of half a minute and more come first: begun last, one process would work on them and the other have nothing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    # What is loaded stays to the end; looking through it again, for garbage, took a tenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def _seed() -> None:
    # Looked up, not imported: the tests of reports take a second, and without torch they stay that fast.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _patterns_exported_once() -> Iterator[None]:
    """Training finds convolutions with batch norms by a hundred patterns, and a reference representation its ops.

    torchao exports them in each prepare and convert, and strictly, which takes 20 seconds; the graphs are the same ones
    otherwise.
    """
    users = (
        "torchao.quantization.pt2e.utils",
        "torchao.quantization.pt2e.qat_utils",
        "torchao.quantization.pt2e.reference_representation_rewrite",
        "executorch.backends.xnnpack.quantizer.xnnpack_quantizer_utils",
    )
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            once = _once()
            for user in users:
                patch.setattr(f"{user}._get_aten_graph_module_for_pattern", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _code_compiled_once() -> Iterator[None]:
    """Graphs are copied again and again, and torch.fx compiles the code of each copy."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            from torch.fx import graph_module

            compiled: dict[str, CodeType] = {}

            def run(source: str, namespace: dict[str, Any], fields: dict[str, Any] | None = None) -> None:
                key = graph_module._loader.cache(source, namespace, fields)
                if source not in compiled:
                    compiled[source] = compile(source, key, "exec", dont_inherit=True)
                exec(compiled[source], namespace)

            patch.setattr(graph_module, "_exec_with_source", run)
        yield


@pytest.fixture(autouse=True, scope="session")
def _ops_listed_once() -> Iterator[None]:
    """Each export asks forty times for all ops that have a decomposition, and looks for changes of each source file."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            import torch
            from torch._export import utils

            materialize, known = utils._materialize_cpp_cia_ops, set[Hashable]()

            def once() -> None:
                # Ops come with modules, or are defined one by one.
                defined = (len(sys.modules), frozenset(torch.library._defs), frozenset(torch.library._impls))
                if defined not in known:
                    materialize()
                    known.clear()
                    known.add(defined)

            patch.setattr(utils, "_materialize_cpp_cia_ops", once)
            patch.setattr(linecache, "checkcache", lambda filename=None: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_described_anew() -> Iterator[None]:
    """What never changes: where a node comes from, which each copy of it copies; a type hint; what pip installed.

    torch replaces the kernels of all its ops in each decomposition, by a function with two type hints.  The entry
    points are read from a file of each installed package.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            from torch.fx.traceback import NodeSource

            patch.setattr(NodeSource, "__deepcopy__", lambda self, copied: self, raising=False)
            patch.setattr("torch._ops.Callable", typing.Callable)  # which keeps its hints
            installed = functools.cache(lambda path, group: importlib.metadata.entry_points(group=group))
            patch.setattr("pt2qa.plugins.registry.entry_points", lambda group: installed(tuple(sys.path), group))
        yield


def _once() -> Callable[..., Any]:
    import torch
    from torchao.quantization.pt2e.utils import _get_aten_graph_module_for_pattern as export

    exported: dict[Hashable, Any] = {}
    plain = functools.partial(torch.export.export, strict=False)

    @functools.wraps(export)
    def once(pattern: Any, inputs: tuple[Any, ...], is_cuda: bool = False, **options: Any) -> Any:
        function = getattr(pattern, "fn", None)
        if function is None:  # a module of a backend's own
            return export(pattern, inputs, is_cuda, **options)
        enclosed = tuple(cell.cell_contents for cell in function.__closure__ or ())
        shapes = tuple((name, getattr(each, "shape", each)) for name, each in [*enumerate(inputs), *options.items()])
        key = (function.__code__, enclosed, shapes, is_cuda)
        if key not in exported:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.export, "export", lambda *given, strict, **also: plain(*given, **also))
                exported[key] = export(pattern, inputs, is_cuda, **options)
        return copy.deepcopy(exported[key])  # a match edits its pattern

    return once
