"""Shortcuts through what torchao's flow repeats, to the same graphs, metadata and scales, bit for bit.

``prepare_pt2e`` and ``convert_pt2e`` generate the code of a graph after each of their steps, check the whole graph and
search it for dead code after each folded batch norm, count from zero for each new name, trace the same QAT patterns in
each call, also for graphs with a batch norm of no QAT, and search the range of a histogram with a tensor for each
comparison.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FunctionType
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen

_recompile: Final = GraphModule.recompile
_lint: Final = Graph.lint
_eliminate_dead_code: Final = Graph.eliminate_dead_code
_export: Final = torch.export.export

_patterns: Final[dict[Hashable, ExportedProgram]] = {}
"""The patterns that were traced in this process, by :func:`_key_of` the call."""


class _State:
    """Which thread takes the shortcuts at the moment, graphs without their code, and the last number of each name."""

    owner: ClassVar[int | None] = None
    stale: ClassVar[weakref.WeakSet[GraphModule]] = weakref.WeakSet()
    numbers: ClassVar[weakref.WeakKeyDictionary[nn.Module, dict[str, int]]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Takes them in this thread; graphs have their code when this ends, or when they are called before.

    After an exception a graph has the code that it had, and gets the new one when it is called.
    """
    from torchao.quantization.pt2e import HistogramObserver, qat_utils, utils

    if _State.owner is not None:
        yield
        return
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(GraphModule, "recompile", _compile_later))
            stack.enter_context(replaced(Graph, "lint", _trust))
            stack.enter_context(replaced(Graph, "eliminate_dead_code", _eliminate_unread))
            stack.enter_context(replaced(torch.export, "export", _export_once))
            fold = qat_utils._fold_conv_bn_qat_helper
            stack.enter_context(replaced(qat_utils, "_fold_conv_bn_qat_helper", functools.partial(_fold_if_any, fold)))
            stack.enter_context(replaced(HistogramObserver, "_non_linear_param_search", _search_range))
            for module in (importlib.import_module("torch.ao.quantization.fx.prepare"), utils):
                stack.enter_context(replaced(module, "get_new_attr_name_with_prefix", _namer))
            stack.enter_context(_owned())
            yield
        for graph_module in list(_State.stale):
            # A module whose graph went to another one is not called again.
            if graph_module.graph.owning_module is graph_module:
                _recompile(graph_module)
    finally:
        _State.stale.clear()
        _State.numbers.clear()


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _owned(owner: int | None = None) -> Iterator[None]:
    before, _State.owner = _State.owner, threading.get_ident() if owner is None else owner
    try:
        yield
    finally:
        _State.owner = before


def _is_mine() -> bool:
    return _State.owner == threading.get_ident() and TracingContext.try_get() is None


# -- graphs ------------------------------------------------------------------------------------------------------------


def _compile_later(self: GraphModule) -> Any:
    if not _is_mine():
        return _recompile(self)
    codegen = self.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
    type(self).forward = _compile_and_run
    _State.stale.add(self)
    return None


def _compile_and_run(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
    _State.stale.discard(self)
    _recompile(self)
    return self.forward(*args, **kwargs)


def _trust(self: Graph) -> None:
    if not _is_mine():
        _lint(self)


def _eliminate_unread(self: Graph, is_impure_node: Callable[[Node], bool] | None = None) -> bool:
    """The same, but whether a node is impure is only asked of the few that nothing reads."""
    module = self.owning_module
    nested = module is not None and any(isinstance(child, GraphModule) for child in module.children())
    if is_impure_node is not None or nested or not _is_mine():
        return bool(_eliminate_dead_code(self, is_impure_node))
    before = len(self.nodes)
    for node in reversed(self.nodes):
        if not node.users and not node.is_impure():
            self.erase_node(node)
    return len(self.nodes) < before


def _namer(prefix: str) -> Callable[[nn.Module], str]:
    """What finds the first free attribute of a module, going on from the last one that it found there."""
    prefix = prefix.replace(".", "_")

    def name(module: nn.Module) -> str:
        numbers = _State.numbers.setdefault(module, {})
        number = numbers.get(prefix, 0)
        while hasattr(module, f"{prefix}{number}"):
            number += 1
        numbers[prefix] = number
        return f"{prefix}{number}"

    return name


# -- patterns ----------------------------------------------------------------------------------------------------------


def _export_once(mod: Any, args: Any, kwargs: Any = None, **options: Any) -> ExportedProgram:
    """The program of a pattern, traced once; callers take a graph of their own from it (``module()``)."""
    if not _is_mine():
        return _export(mod, args, kwargs, **options)
    key = _key_of(mod, args, kwargs, options)
    if key in _patterns:
        return _patterns[key]
    with _owned(owner=0):  # torch.export compiles its own graphs at once
        program = _export(mod, args, kwargs, **options)
    if key is not None:
        _patterns[key] = program
    return program


def _fold_if_any(fold: Callable[..., GraphModule], m: GraphModule, *args: Any, **options: Any) -> GraphModule:
    """What torchao does around its QAT patterns, each of which takes the square root of a batch norm's variance."""
    from torchao.quantization.pt2e import qat_utils

    if not _is_mine() or m.graph.find_nodes(op="call_function", target=torch.ops.aten.sqrt.default):
        return fold(m, *args, **options)
    m.graph.eliminate_dead_code()
    qat_utils._duplicate_dequantize_node(m)
    for _ in range(8):
        torch.randn(1)  # the example of a bias, of each pattern that has one
    qat_utils._remove_extra_dequantize(m)
    m.graph.eliminate_dead_code()
    m.recompile()
    return m


def _key_of(mod: Any, args: Any, kwargs: Any, options: Any) -> Hashable | None:
    """What the trace of a pattern depends on; None for a model, or a pattern that cannot be told from others."""
    from torchao.quantization.pt2e import WrapperModule

    if type(mod) is not WrapperModule:
        return None
    try:
        key = tuple(map(_frozen, (mod.fn, args, kwargs, options, mod.training, torch.is_grad_enabled())))
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Hashable:
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, _frozen(value.__defaults__), _frozen(value.__kwdefaults__), _frozen(cells)
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.device, value.requires_grad
    if isinstance(value, Mapping):
        return tuple((name, _frozen(one)) for name, one in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_frozen, value))
    return type(value), value


# -- ranges of histograms ----------------------------------------------------------------------------------------------


def _search_range(self: Any) -> tuple[Tensor, Tensor]:
    """``HistogramObserver._non_linear_param_search``, with Python's floats in place of tensors in its loops."""
    assert self.histogram.size()[0] == self.bins, "bins mismatch"
    bin_width = (self.max_val - self.min_val) / self.bins
    total = torch.sum(self.histogram).item()
    sums = torch.cumsum(self.histogram, dim=0).tolist()
    step, alpha, beta = 1e-5, 0.0, 1.0
    low, high = _float32((alpha + step) * total), _float32((beta - step) * total)
    start, end = 0, self.bins - 1
    best = float("inf")
    while alpha < beta:
        left, right = start, end
        while left < end and sums[left] < low:
            left += 1
        while right > start and sums[right] > high:
            right -= 1
        next_start, next_end = start, end
        if left - start > end - right:
            next_start, alpha = left, alpha + step
            low = _float32((alpha + step) * total)
        else:
            next_end, beta = right, beta - step
            high = _float32((beta - step) * total)
        if (next_start, next_end) == (start, end):
            continue
        norm = self._compute_quantization_error(next_start, next_end)
        if norm > best:
            break
        best, start, end = norm, next_start, next_end
    return self.min_val + bin_width * start, self.min_val + bin_width * (end + 1)


_single: Final = struct.Struct("f")


def _float32(value: float) -> float:
    """A number as a comparison with a float32 tensor takes it."""
    return float(_single.unpack(_single.pack(value))[0])
