"""Capture's passes, each on one graph: it is edited in place, and what was changed is returned.

What each is for is said in :mod:`pt2qa._capture.normalise`.  A printed flow runs them, too: see :mod:`.flow_runtime`.
"""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import default_decompositions
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.nn import functional as F

from pt2qa._graph.internals.flow_runtime import module_of, op_of
from pt2qa._graph.internals.nodes import SOURCES, VALUE, module_stack, origin_of

ATEN: Final = torch.ops.aten

# -- nested regions ----------------------------------------------------------------------------------------------------


def inline_regions(graph_module: GraphModule) -> None:
    """Puts the ops of no_grad and switched-off autocast regions into the graph, where quantizers look for ops."""
    while (region := region_in(graph_module)) is not None:
        inline_region(graph_module, region)


def region_in(graph_module: GraphModule) -> Node | None:
    """A grad-mode region, or an autocast region that is off, of which only single results are read; else None."""
    for node in graph_module.graph.nodes:
        if at := body_at(node):
            results: Any = body_of(graph_module, node.args[at]).graph.output_node().args[0]
            taken_apart = all(user.target is operator.getitem for user in node.users)
            if taken_apart and isinstance(results, tuple | list) and all(isinstance(each, Node) for each in results):
                found: Node = node
                return found
    return None


def body_at(node: Node) -> int:
    """Which argument of such a region is its body, before what that reads; 0 for other nodes."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return 1
    return 4 if node.target is torch.ops.higher_order.wrap_with_autocast and node.args[2] is False else 0


def body_of(graph_module: GraphModule, reader: Any) -> GraphModule:
    """The nested graph that a node reads."""
    body: GraphModule = operator.attrgetter(reader.target)(graph_module)
    return body


def inline_region(graph_module: GraphModule, region: Node) -> int:
    """Puts the ops of a region into the graph around it; returns how many they are."""
    arguments: Any = region.args
    reader, *operands = arguments[body_at(region) :]
    body, graph = body_of(graph_module, reader), graph_module.graph
    values = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                values[node] = graph.node_copy(node, values.__getitem__)
            if node.op == "get_attr":
                stem = node.target.replace(".", "_")
                values[node].target = name = next(
                    free for i in range(1, 10**6) if not hasattr(graph_module, free := f"{stem}_{i}")
                )
                setattr(graph_module, name, operator.attrgetter(node.target)(body))
    results: Any = body.graph.output_node().args[0]
    replace_outputs(region, [values[each] for each in results])
    if not reader.users:
        graph.erase_node(reader)
        if not any(node.target == reader.target for node in graph.find_nodes(op="get_attr")):
            delattr(graph_module, reader.target)
    graph_module.recompile()
    return sum(node.op == "call_function" for node in body.graph.nodes)


def replace_outputs(node: Node, outputs: Any) -> None:
    """Makes what reads a node, or the single outputs that are taken of it, read others, and erases it."""
    if isinstance(outputs, Node):
        node.replace_all_uses_with(outputs)
    for user in list(node.users):
        user.replace_all_uses_with(outputs[user.args[1]])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


# -- decompositions ----------------------------------------------------------------------------------------------------


def decompose_recurrent(graph_module: GraphModule, ops: Collection[OpOverload]) -> None:
    """Replaces recurrent ops by the linears of each step and the ops between them, which quantizers know."""
    forms = default_decompositions()
    for node in list(graph_module.graph.nodes):
        if node.target in ops:
            put_instead(graph_module, node, traced(node, forms[node.target]))


def decompose_attention(graph_module: GraphModule) -> list[Node]:
    """Replaces attention by matrix products and the ops between them, which quantizers know."""
    forms: dict[Any, Callable[..., Any]] = {
        ATEN.scaled_dot_product_attention.default: attention_in_ops,
        ATEN.bmm.default: torch.matmul,
        ATEN.baddbmm.default: masked_product,
    }
    changed = []
    for node in list(graph_module.graph.nodes):
        whole = node.target is ATEN.scaled_dot_product_attention.default
        if node.target in forms and (whole or module_of(node)[1] == "MultiheadAttention"):
            put_instead(graph_module, node, traced(node, forms[node.target]))
            changed.append(node)
    return changed


def attention_in_ops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,  # a model with dropout in eval mode is random, which capture refuses
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The formula of ``scaled_dot_product_attention``'s documentation, written so that quantizers accept it."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    divisor = math.sqrt(query.shape[-1]) if scale is None else 1 / scale if scale else math.inf
    scores = torch.matmul(query, key.transpose(-2, -1)) / divisor
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is None:
        return torch.matmul(torch.softmax(scores, -1), value)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores - -mask
    # If a mask hides a whole row, the op returns zeros.
    return torch.matmul(ATEN._safe_softmax(scores, -1), value)


def masked_product(mask: Tensor, query: Tensor, key: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """What ``baddbmm`` computes, as a ``matmul`` and a mask."""
    scores = torch.matmul(query, key)
    scores = scores if alpha == 1 else scores * alpha
    return scores - -(mask if beta == 1 else mask * beta)


def traced(node: Node, form: Callable[..., Any]) -> GraphModule:
    """The ops of a form of an op, traced on the values of the op's inputs; a placeholder for each of these."""

    def run(*values: Tensor) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), dict(zip(node.all_input_nodes, values, strict=True)).get)
        return form(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # from tracing, irrelevant here
        # With MKL-DNN on, torch would decompose an LSTM into another opaque op.
        with torch.backends.mkldnn.flags(enabled=False):
            return make_fx(run, pre_dispatch=True)(*(source.meta[VALUE] for source in node.all_input_nodes))


def put_instead(graph_module: GraphModule, node: Node, body: GraphModule) -> dict[Node, Node]:
    """Replaces an op with the ops of a body that :func:`traced` returned; returns their copies in the graph."""
    graph, made = graph_module.graph, dict[Node, Node]()
    values = dict(zip(body.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "call_function":
                values[inner] = made[inner] = graph.node_copy(inner, values.__getitem__)
                made[inner].meta = origin_of(node) | {VALUE: inner.meta[VALUE]}
    replace_outputs(node, map_arg(body.graph.output_node().args[0], values.__getitem__))
    for inner, copy in reversed(list(made.items())):
        if not copy.users:
            graph.erase_node(made.pop(inner))
    graph_module.recompile()
    return made


# -- single ops --------------------------------------------------------------------------------------------------------


def remove_added_zeros(
    graph_module: GraphModule, written: Callable[[GraphModule, Node], bool] = lambda graph_module, node: False
) -> list[Node]:
    """Makes what reads add(x, 0), such as the first of sum([a, b]), read x.

    ``written`` tells whether x or the sum is written to later, so that the addition is a copy that is needed; a printed
    flow, which is executed before it counts, does not ask.
    """
    graph, removed = graph_module.graph, []
    for node in graph.nodes:
        if adds_zero(node) and not written(graph_module, node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            removed.append(node)
    graph_module.recompile()
    return removed


def adds_zero(node: Node) -> bool:
    """Whether an op adds 0 to a value of the same shape and dtype, which the model does not return as it got it."""
    if node.target not in (ATEN.add.Tensor, ATEN.add.Scalar) or len(node.args) != 2:
        return False
    operand, zero = node.args
    if not isinstance(operand, Node) or isinstance(zero, Node | complex) or zero != 0:
        return False
    before, after = operand.meta.get(VALUE), node.meta.get(VALUE)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or not alike(before, after):
        return False
    return operand.op == "call_function" or all(user.op != "output" for user in node.users)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two traced tensors have the same dtype and shape, without specialising dynamic sizes."""
    return (
        a.dtype == b.dtype
        and a.dim() == b.dim()
        and all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True))
    )


def unread_write(graph_module: GraphModule) -> Node | None:
    """An in-place op whose result nothing reads, nor anything else its argument: for printed flows.

    Capture knows more of what may share memory: see :mod:`pt2qa._capture.aliases`.
    """
    for node in graph_module.graph.nodes:
        writes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable and not node.users
        if writes and node.args[0].op == "call_function" and len(node.args[0].users) == 1:
            found: Node = node
            return found
    return None


def remove_dead_code(
    graph_module: GraphModule, unread: Callable[[GraphModule], Node | None] = unread_write
) -> list[Node]:
    """Removes ops without effect; ``unread`` finds an in-place op that has none."""
    graph = graph_module.graph
    before = list(graph.nodes)
    graph.eliminate_dead_code()
    while (dead := unread(graph_module)) is not None:
        graph.erase_node(dead)
        graph.eliminate_dead_code()
    graph_module.recompile()
    left = set(graph.nodes)
    return [node for node in before if node not in left and node.op == "call_function"]


def keep_scalars(graph_module: GraphModule) -> list[Node]:
    """Gives ``add`` and ``mul`` of a Python scalar their ``Scalar`` overload if the result is not float32."""
    overloads = {ATEN.add.Tensor: ATEN.add.Scalar, ATEN.mul.Tensor: ATEN.mul.Scalar}
    changed = []
    for node in graph_module.graph.nodes:
        if node.target in overloads and isinstance(node.args[0], Node) and not isinstance(node.args[1], Node):
            value = node.meta.get(VALUE)
            if isinstance(value, Tensor) and value.dtype != torch.float32:
                node.target = overloads[node.target]
                changed.append(node)
    graph_module.recompile()
    return changed


def write_out_padding(graph_module: GraphModule) -> list[Node]:
    """Gives convolutions with ``"same"`` or ``"valid"`` padding their numeric overload, where numbers can say it."""
    changed = []
    for node in graph_module.graph.nodes:
        if node.target in (ATEN.conv1d.padding, ATEN.conv2d.padding, ATEN.conv3d.padding):
            kernel = node.args[1].meta[VALUE].shape[2:]
            settings: list[Any] = [None, [1] * len(kernel), "valid", [1] * len(kernel), 1]
            settings[: len(node.args) - 2] = node.args[2:]
            bias, stride, kind, dilation, groups = settings
            steps = dilation * len(kernel) if len(dilation) == 1 else dilation
            both_sides = [0 if kind == "valid" else step * (size - 1) for step, size in zip(steps, kernel, strict=True)]
            if all(total % 2 == 0 for total in both_sides):
                padding = [total // 2 for total in both_sides]
                node.args = (*node.args[:2], bias, stride, padding, dilation, groups)
                node.target = node.target.overloadpacket.default
                changed.append(node)
    graph_module.recompile()
    return changed


# -- sources -----------------------------------------------------------------------------------------------------------

CLASSES: Final[Mapping[OpOverload, tuple[type[nn.Module], ...]]] = {
    ATEN.conv1d.default: (nn.Conv1d,),
    ATEN.conv2d.default: (nn.Conv2d,),
    ATEN.conv3d.default: (nn.Conv3d,),
    ATEN.linear.default: (nn.Linear,),
    ATEN.batch_norm.default: (nn.BatchNorm2d, nn.BatchNorm1d, nn.BatchNorm3d),
    ATEN.relu.default: (nn.ReLU,),
    ATEN.relu_.default: (nn.ReLU,),
    ATEN.relu6.default: (nn.ReLU6,),
    ATEN.hardtanh.default: (nn.Hardtanh, nn.ReLU6),
    ATEN.hardtanh_.default: (nn.Hardtanh, nn.ReLU6),
    ATEN.hardswish.default: (nn.Hardswish,),
    ATEN.hardswish_.default: (nn.Hardswish,),
    ATEN.silu.default: (nn.SiLU,),
    ATEN.silu_.default: (nn.SiLU,),
    ATEN.gelu.default: (nn.GELU,),
    ATEN.leaky_relu.default: (nn.LeakyReLU,),
    ATEN.leaky_relu_.default: (nn.LeakyReLU,),
    ATEN.tanh.default: (nn.Tanh,),
    ATEN.tanh_.default: (nn.Tanh,),
    ATEN.max_pool2d.default: (nn.MaxPool2d,),
    ATEN.avg_pool2d.default: (nn.AvgPool2d,),
    ATEN.adaptive_avg_pool2d.default: (nn.AdaptiveAvgPool2d,),
}
"""The classes by which quantizers know an op.  The first one is used if none of the others called the op."""

OPERATORS: Final[Mapping[OpOverload, Callable[..., Any]]] = {
    ATEN.add.Tensor: operator.add,
    ATEN.add_.Tensor: operator.add,
    ATEN.mul.Tensor: operator.mul,
    ATEN.mul_.Tensor: operator.mul,
}
"""The same for operators on two tensors.  With a scalar they are different ops, on which the x86 quantizer fails."""

NAMED: Final = {op_of(target) for target in (*CLASSES, *OPERATORS)}
SINGLE: Final = tuple({kind for kinds in CLASSES.values() for kind in kinds})
OPEN: Final = (nn.RNNBase, nn.RNNCellBase)
"""Composite modules whose inner ops are separate sources once capture has decomposed them."""


def write_sources(
    graph_module: GraphModule, opened: Collection[type[nn.Module]] = ()
) -> tuple[list[tuple[Node, type[nn.Module]]], Counter[tuple[str, str]]]:
    """Gives each op the class or function by which quantizers match it, separately for each call of a module.

    Returns the ops that got a class that did not call them, with it, and how often each module calls which op.
    """
    renamed: list[tuple[Node, type[nn.Module]]] = []
    calls: Counter[tuple[str, str]] = Counter()
    first_in_call: dict[tuple[Any, ...], str] = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            node.meta.pop(SOURCES, None)
            continue
        if node.target is operator.getitem and isinstance(node.args[0], Node) and SOURCES in node.args[0].meta:
            node.meta[SOURCES] = list(node.args[0].meta[SOURCES])
            continue
        caller = calling_class(node)
        caller = None if caller in opened else caller
        source = source_of(node, caller)
        label = node.name
        if source is caller and caller not in SINGLE:
            label = first_in_call.setdefault(tuple(module_stack(node)), node.name)
        elif source is caller:
            calls[module_of(node)[0], op_of(node.target)] += 1
        elif source in SINGLE:
            renamed.append((node, source))
        node.meta[SOURCES] = [(label, source)]
    return renamed, calls


def source_of(node: Node, caller: type[nn.Module] | None) -> Any:
    """The class or function that represents an op."""
    kinds = CLASSES.get(node.target) if isinstance(node.target, OpOverload) else None
    if caller is not None and caller not in SINGLE and not issubclass(caller, (*SINGLE, *OPEN)):
        return caller
    if kinds is not None:
        return caller if caller in kinds else by_rank(node, kinds)
    if isinstance(node.target, OpOverload) and node.target in OPERATORS:
        return OPERATORS[node.target] if takes_two_tensors(node) else node.target
    if caller is not None and issubclass(caller, OPEN):
        return caller
    name = op_of(node.target)
    if not isinstance(node.target, OpOverload):
        # Not "add", which means an addition of tensors: this one adds sizes, or is a higher-order op.
        return f"{type(node.target).__name__}.{name}"
    # Quantizers would mistake another overload for the op that they know by its class, and fail.
    function = None if name in NAMED else getattr(torch, name, getattr(F, name, None))
    return function if callable(function) and getattr(function, "__module__", None) else node.target


def by_rank(node: Node, kinds: tuple[type[nn.Module], ...]) -> type[nn.Module]:
    """The class of an op that no class called."""
    if kinds[0] is nn.BatchNorm2d:
        return {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(node.meta[VALUE].dim(), nn.BatchNorm1d)
    return kinds[0]


def calling_class(node: Node) -> type[nn.Module] | None:
    """The ``torch.nn`` class that called an op; None for other classes and for containers."""
    kind: Any = [None, *(kind for _, kind in module_stack(node).values())][-1]
    if isinstance(kind, str):
        module, _, name = kind.rpartition(".")
        is_torch = module.startswith(("torch.nn.modules", "torch.ao."))
        kind = getattr(sys.modules.get(module), name, None) if is_torch else None
    if not isinstance(kind, type) or not issubclass(kind, nn.Module) or kind.__module__.endswith("container"):
        return None
    return kind if kind.__module__.startswith(("torch.nn.modules", "torch.ao.")) else None


def takes_two_tensors(node: Node) -> bool:
    """Whether an op reads no scalar."""
    return all(isinstance(arg, Node) and isinstance(arg.meta.get(VALUE), Tensor) for arg in node.args[:2])
