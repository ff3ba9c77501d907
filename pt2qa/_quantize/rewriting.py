"""Capture's rewriting of a program as Python source, for a graph of a plain ``torch.export``.

Each function does what a pass of :mod:`pt2qa._capture.normalise` does, in the words of torch.fx alone and only for what
usual models have.  So what it makes of a model counts only where it was executed and compared: see
:mod:`pt2qa._quantize.plain_flow`.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from pt2qa._capture.normalise import attention, recurrent
from pt2qa._capture.program import Capture
from pt2qa._graph.handles import handle_of
from pt2qa._graph.internals.nodes import SOURCES
from pt2qa._graph.internals.torch import SAFE_SOFTMAX, OpOverload

PARTIAL_WRITE: Final = "partial write"
"""The rule that is a call of torch: ``run_decompositions({})`` makes a program functional."""

FUNCTIONS: Final = {
    "nested region": "inline_regions",
    recurrent.RULE: "decompose_recurrent",
    "attention": "decompose_attention",
    "add of zero": "remove_added_zeros",
    "dead code": "remove_dead_code",
    "scalar": "keep_scalars",
    "padding": "write_out_padding",
    "op source": "write_sources",
    "shared module": "write_sources",
}
"""The function of :data:`SOURCE` for each rule of a change that can be written so, in the order of the passes."""

SOURCE_RULES: Final = ("op source", "shared module")
"""The rules of the one pass that always changes something, recorded or not."""

IMPORTS: Final = (
    "import math",
    "import operator",
    "import warnings",
    "import torch",
    "from torch import Tensor",
    "from torch.export import default_decompositions",
    "from torch.fx.experimental.proxy_tensor import make_fx",
)

SOURCE: Final = '''
def inline_regions(graph_module):
    """Puts the ops of no_grad and switched-off autocast regions into the graph, where quantizers look for ops."""
    graph, higher_order = graph_module.graph, torch.ops.higher_order

    def bodies_in(node):
        """The position of a region's body among the arguments; what it reads comes after it."""
        off = node.target is higher_order.wrap_with_autocast and node.args[2] is False
        return [4] if off else [1] if node.target is higher_order.wrap_with_set_grad_enabled else []

    while found := [(node, place) for node in graph.nodes for place in bodies_in(node)]:
        region, place = found[0]
        reader_of_body, *operands = region.args[place:]
        body = getattr(graph_module, reader_of_body.target)
        values = dict(zip(body.graph.find_nodes(op="placeholder"), operands))
        with graph.inserting_before(region):
            for node in body.graph.nodes:
                if node.op in ("placeholder", "output"):
                    continue
                values[node] = graph.node_copy(node, values.__getitem__)
                if node.op == "get_attr":
                    values[node].target = f"{region.name}_{node.name}"
                    setattr(graph_module, values[node].target, operator.attrgetter(node.target)(body))
        results = body.graph.output_node().args[0]
        for reader in list(region.users):
            reader.replace_all_uses_with(values[results[reader.args[1]]])
            graph.erase_node(reader)
        graph.erase_node(region)
        graph.erase_node(reader_of_body)


def decompose_attention(graph_module):
    """Replaces attention by matrix products and the ops between them, which quantizers know."""
    aten, graph = torch.ops.aten, graph_module.graph
    forms = {
        aten.scaled_dot_product_attention.default: attention_in_ops,
        aten.bmm.default: torch.matmul,
        aten.baddbmm.default: masked_product,
    }
    for node in list(graph.nodes):
        caller = list(node.meta.get("nn_module_stack", {}).values())[-1:]
        whole = node.target is aten.scaled_dot_product_attention.default
        if node.target not in forms or not (whole or "MultiheadAttention" in str(caller)):
            continue
        put_instead(graph, node, forms[node.target])


def decompose_recurrent(graph_module):
    """Replaces recurrent ops by the linears of each step and the ops between them, which quantizers know."""
    forms = default_decompositions()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")
        # With MKL-DNN on, torch would decompose an LSTM into another opaque op.
        with torch.backends.mkldnn.flags(enabled=False):
            for node in list(graph_module.graph.nodes):
                if node.target in RECURRENT:
                    put_instead(graph_module.graph, node, forms[node.target])


def put_instead(graph, node, formula):
    """Puts the ops of a formula in the place of one op."""
    operands = node.all_input_nodes

    def form(*values):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), dict(zip(operands, values)).__getitem__)
        return formula(*args, **kwargs)

    body = make_fx(form, pre_dispatch=True)(*(operand.meta["val"] for operand in operands))
    values = dict(zip(body.graph.find_nodes(op="placeholder"), operands))
    made = []
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "call_function":
                values[inner] = graph.node_copy(inner, values.__getitem__)
                values[inner].meta = {**node.meta, "val": inner.meta["val"]}
                made.append(values[inner])
    results = body.graph.output_node().args[0]
    if isinstance(results, torch.fx.Node):
        node.replace_all_uses_with(values[results])
    else:
        for reader in list(node.users):
            reader.replace_all_uses_with(values[results[reader.args[1]]])
            graph.erase_node(reader)
    graph.erase_node(node)
    for unread in reversed(made):
        if not unread.users:
            graph.erase_node(unread)


def remove_added_zeros(graph_module):
    """Removes additions of zero, such as the first of sum([a, b])."""
    for node in graph_module.graph.nodes:
        if node.target in (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar) and len(node.args) == 2:
            value, zero = node.args
            same = isinstance(value, torch.fx.Node) and value.meta["val"].dtype == node.meta["val"].dtype
            if same and isinstance(zero, (int, float)) and zero == 0:
                node.replace_all_uses_with(value)
                graph_module.graph.erase_node(node)


def remove_dead_code(graph_module):
    """Removes ops whose results nothing reads, in-place ones too where they write to a result of the graph."""

    def is_dead(node):
        schema = getattr(node.target, "_schema", None)
        if node.users or schema is None or not schema.is_mutable:
            return False
        return node.args[0].op == "call_function" and len(node.args[0].users) == 1

    graph_module.graph.eliminate_dead_code()
    while dead := [node for node in graph_module.graph.nodes if is_dead(node)]:
        graph_module.graph.erase_node(dead[0])
        graph_module.graph.eliminate_dead_code()


def keep_scalars(graph_module):
    """Gives add and mul of a scalar their Scalar overload if the result is not float32, so that it stays exact."""
    add, mul = torch.ops.aten.add, torch.ops.aten.mul
    for node in graph_module.graph.nodes:
        if node.target in (add.Tensor, mul.Tensor) and not isinstance(node.args[1], torch.fx.Node):
            if isinstance(node.args[0], torch.fx.Node) and node.meta["val"].dtype != torch.float32:
                node.target = {add.Tensor: add.Scalar, mul.Tensor: mul.Scalar}[node.target]


def write_out_padding(graph_module):
    """Replaces padding="same" and "valid" of convolutions by numbers."""
    for node in graph_module.graph.nodes:
        if str(node.target) in ("aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding"):
            kernel, given = node.args[1].meta["val"].shape[2:], node.args[3:]
            stride, padding, dilation, groups = (*given, *([1], "valid", [1], 1)[len(given) :])
            steps = dilation * len(kernel) if len(dilation) == 1 else dilation
            both = [0 if padding == "valid" else step * (size - 1) for step, size in zip(steps, kernel)]
            if all(total % 2 == 0 for total in both):
                bias = node.args[2] if len(node.args) > 2 else None
                padding = [total // 2 for total in both]
                node.args = (*node.args[:2], bias, stride, padding, dilation, groups)
                node.target = node.target.overloadpacket.default


def write_sources(graph_module):
    """Gives each op the class or function by which quantizers match it, separately for each call of a module."""
    apart = {node: BY_NAME[name] for name, node in ops_by_name(graph_module.graph).items() if name in BY_NAME}
    for node in graph_module.graph.nodes:
        node.meta.pop("source_fn_stack", None)
        if node in apart:
            node.meta["source_fn_stack"] = [apart[node]]
        elif node.target in BY_OP:
            node.meta["source_fn_stack"] = [(node.name, BY_OP[node.target])]
        elif node.target is operator.getitem and "source_fn_stack" in node.args[0].meta:
            node.meta["source_fn_stack"] = node.args[0].meta["source_fn_stack"]
'''
"""Everything that a rewriting may need; unused parts are removed."""


def _forms() -> str:
    """The formulas of attention that capture decomposes it into, as they are."""
    source = "\n".join(inspect.getsource(form) for form in (attention.attention_in_ops, attention.masked_product))
    return source.replace("SAFE_SOFTMAX", f"torch.ops.{SAFE_SOFTMAX}")


def recorded(capture: Capture) -> tuple[str, ...]:
    """The rules of a capture's changes that can be written as code, one for each function."""
    changed = {change.rule for change in capture.changes}
    written = {function: rule for rule, function in FUNCTIONS.items() if rule in changed}
    return (*([PARTIAL_WRITE] if PARTIAL_WRITE in changed else []), *written.values())


def rewriting_code(capture: Capture, rules: Collection[str]) -> str:
    """The definition of ``rewrite(graph_module)``, and what it may call; empty if it would call nothing.

    Args:
        capture: whose changes are to be made.
        rules: some of :func:`recorded`.
    """
    functions = list(dict.fromkeys(function for rule, function in FUNCTIONS.items() if rule in rules))
    if not functions:
        return ""
    calls = "".join(f"    {function}(graph_module)\n" for function in functions)
    tables = _tables(capture) if "write_sources" in functions else ""
    targets = [target for kind in capture.decompose for target in recurrent.RECURRENT.get(kind, ())]
    tables += f"RECURRENT = ({''.join(f'torch.ops.{target}, ' for target in targets)})\n"
    return (
        f"{tables}\n{_forms()}\n{SOURCE}\n"
        "def rewrite(graph_module):\n"
        '    """Changes how the graph is written, not what it computes, for quantizers that fail or skip ops."""\n'
        f"{calls}    graph_module.recompile()\n"
    )


def _tables(capture: Capture) -> str:
    """Where each op comes from, by its target if most calls of it say the same, else by its name."""
    found: dict[OpOverload, list[tuple[str, str, str]]] = defaultdict(list)
    for node in capture.program.graph.nodes:
        handle = handle_of(node)
        if handle is None or not isinstance(node.target, OpOverload):
            continue
        ((label, source),) = node.meta[SOURCES]
        if written := _expression(source):
            found[node.target].append((capture.names[handle].name, "" if label == node.name else label, written))
    by_op, by_name = dict[OpOverload, str](), list[str]()
    for target, ops in found.items():
        alone = Counter(written for _, label, written in ops if not label)
        if alone:
            by_op[target] = max(alone, key=alone.__getitem__)
        for name, label, written in ops:
            if label or written != by_op[target]:
                by_name.append(f"    {name!r}: ({(label or name)!r}, {written}),\n")
    operators = "".join(f"    torch.ops.{target}: {written},\n" for target, written in by_op.items())
    return f"BY_OP = {{\n{operators}}}\nBY_NAME = {{\n{''.join(by_name)}}}\n"


def _expression(source: Any) -> str:
    """A class or function of torch as Python source; empty if it is none."""
    name = getattr(source, "__name__", "")
    if isinstance(source, str):
        return repr(source)
    if isinstance(source, OpOverload):
        return f"torch.ops.{source}"
    homes = (("torch.nn", nn), ("operator", operator), ("torch", torch), ("torch.nn.functional", F))
    return next((f"{home}.{name}" for home, module in homes if getattr(module, name, None) is source), "")
