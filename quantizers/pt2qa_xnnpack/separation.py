"""Changes of a graph that ExecuTorch's XNNPACK delegate needs, and that cost little or nothing when it runs.

Needs torch alone: a printed ``quantizer.py`` has the source of this file.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

CLAMPED = ("add", "sub", "mul", "linear", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d")
"""Ops whose kernels apply the activation behind them, as the limits of their output."""

WITH_BIAS = CLAMPED[3:]
"""Ops whose third argument is a bias."""

COPIES = ("clone", "alias", "dropout", "detach")
"""Ops that are removed before activations are fused."""

POINTWISE = frozenset(
    {"relu", "relu6", "hardtanh", "clamp", "sigmoid", "tanh", "gelu", "silu", "hardswish", "hardsigmoid", "leaky_relu"}
    | {"abs", "neg", "exp", "log", "sin", "cos", "sqrt", "rsqrt", "square", "pow", "ceil", "floor", *COPIES}
    | {"add", "sub", "mul", "div", "maximum", "minimum"}
)
"""Ops that a delegate computes in the layout in which it has their inputs."""

VIEWS = frozenset({"view", "reshape", "flatten", "unflatten", "ravel", "unsqueeze", "squeeze"})
"""Ops that read an image with the channels first."""

JOINS = frozenset({"cat", "concat", "concatenate"})
PERMUTES = frozenset({"permute", "transpose", "t", "numpy_T", "mT", "movedim", "moveaxis", "swapaxes", "swapdims"})
MOVES = PERMUTES | JOINS | {"pad", "constant_pad_nd", "slice", "narrow"}
"""Ops that take an image in either layout, but not one that was turned without their knowledge."""

MATRICES = ("linear", "matmul", "bmm", "instance_norm")
CONVOLUTIONS = ("conv2d", "conv_transpose2d")
IMAGES = (*CONVOLUTIONS, "max_pool2d", "prelu")
"""Ops whose kernels read and write images with the channels last."""

MAYBE = (*IMAGES, "avg_pool2d", "adaptive_avg_pool2d", "upsample_bilinear2d")
"""Ops that have such kernels for some arguments."""

INSIDE = POINTWISE | MOVES | {*IMAGES, "upsample_bilinear2d", "mean"}
"""Ops that a delegate computes, and takes in either layout."""

SEVERAL = ("mish", "softplus", "log_sigmoid", "hardshrink")
"""Ops that are lowered to several, of which a delegate computes some."""

RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "ravel", "slice", "narrow", "unsqueeze"})
"""They have a kernel for fixed sizes only."""

KEEPING = JOINS | RESHAPES | PERMUTES | {"max_pool2d"}
"""Ops whose kernels hand integers on, with one scale. Others that move data, as ``select``, run in float between."""

GRID = "rounds its input as its output"
FIRST = "has its image with the channels first"
LAST = "has its image for itself"
ROUNDED = "rounds its input itself"
APART = "is read in float behind a pool of 1 x 1"


def for_xnnpack(graph_module: GraphModule) -> list[tuple[Node, str]]:
    """Edits a prepared or converted graph so that XNNPACK computes what it says; returns what was done to which op.

    The graph's own numbers stay.  ExecuTorch 1.4.1 holds a bias once, with the scale of the first product that reads
    it, so each product gets its own.  It fuses activations one by one, and the limits of the last overwrite those of
    the others, so the last gets the limits of all.  It mistakes the layout of some images, so what
    :func:`misread` names has one of its own, by an op that makes ExecuTorch turn it.  And kernels that move integers
    have one scale, so where those before and behind differ in a converted graph, the input is rounded as the output.

    >>> linear = torch.nn.Linear(4, 4)
    >>> model = torch.nn.Sequential(linear, torch.nn.Hardtanh(), torch.nn.ReLU(), linear)
    >>> graph = torch.export.export(model, (torch.zeros(1, 4),)).module()
    >>> [(str(node), done) for node, done in for_xnnpack(graph)]
    [('relu', 'has the limits 0..1'), ('linear_1', 'has a bias of its own')]
    """
    changed = []
    for node in graph_module.graph.nodes:
        limits = overwriting(node)
        if limits is not None and limits[0] < limits[1] < math.inf and limits[0] > -math.inf:
            node.target, node.args, node.kwargs = torch.ops.aten.hardtanh.default, (node.args[0], *limits), {}
            changed.append((node, "has the limits {:g}..{:g}".format(*limits)))
        bias = bias_read_by(node)
        if bias is not None and next(iter(bias.users)) is not node:
            _copy_bias(graph_module, node, bias)
            changed.append((node, "has a bias of its own"))
    for node, source, output in list(regridded(graph_module)):
        with node.graph.inserting_before(node):
            node.replace_input_with(source, _rounded_as(output, source))
        changed.append((node, GRID))
    made = dict[Any, Node]()
    for node, done in list(misread(graph_module)):
        if done == APART:
            for source, readers in _read_in_float(node):
                _pool_between(source, readers)
        else:
            _give_own_input(graph_module, node, done, made)
        changed.append((node, done))
    if made:
        graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return changed


def bias_read_by(node: Node) -> Node | None:
    """The parameter that a product adds, if it is one."""
    bias = node.args[2] if _op(node) in WITH_BIAS and len(node.args) > 2 else None
    return bias if isinstance(bias, Node) and bias.op == "get_attr" else None


def overwriting(node: Node) -> tuple[float, float] | None:
    """The limits of an activation together with one before it, if XNNPACK fuses both and forgets the first's."""
    own, first = clamp_of(node), _fused_before(node)
    if own is None or first is None:
        return None
    before = overwriting(first) or clamp_of(first)
    assert before is not None
    both = (min(max(before[0], own[0]), own[1]), max(min(before[1], own[1]), own[0]))
    return None if both == own else both


def clamp_of(node: Node) -> tuple[float, float] | None:
    """What an activation that XNNPACK fuses clamps to; None for any other op."""
    if _op(node) == "relu":
        return 0.0, math.inf
    if _op(node) == "relu6":
        return 0.0, 6.0
    if _op(node) != "hardtanh":
        return None
    given: Any = dict(zip(("min_val", "max_val"), node.args[1:], strict=False)) | dict(node.kwargs)
    return float(given.get("min_val", -1)), float(given.get("max_val", 1))


def regridded(graph_module: GraphModule) -> Iterator[tuple[Node, Node, Node]]:
    """The moves of a converted graph with other parameters before than behind: op, input, what rounds the output.

    Not of a prepared one, where an op that the user keeps in float must get no rounding.
    """
    for node in graph_module.graph.nodes:
        output = next(iter(node.users)) if _op(node) in KEEPING and len(node.users) == 1 else None
        if output is not None and _op(output) == "quantize_per_tensor":
            for source in node.all_input_nodes:
                if _op(source) == "dequantize_per_tensor" and source.args[1:] != output.args[1:]:
                    yield node, source, output


def _rounded_as(output: Node, source: Node) -> Node:
    """A value that is rounded as another."""
    back = next(iter(output.users))
    rounded = output.graph.call_function(output.target, (source, *output.args[1:]))  # type: ignore[arg-type]
    found = output.graph.call_function(back.target, (rounded, *back.args[1:]), back.kwargs)  # type: ignore[arg-type]
    rounded.meta, found.meta = _meta_of(source), _meta_of(source)
    return found


def misread(graph_module: GraphModule) -> Iterator[tuple[Node, str]]:
    """The ops that get an image in another layout than they take it for, and what each needs.

    ExecuTorch goes through a delegate in order.  It notes which values have the channels last, and turns an image for
    an op that needs the other layout.  A softmax over the last axis needs one, but is not among these ops.  Before a
    linear with dynamic scales it puts the turn between rounding and kernel, which then do not fit.  Before a
    convolution with dynamic scales it turns the value from which all was computed, for all who read it, and does not
    revise what it has noted.  A value that is rounded by pixel for a pointwise convolution is also read by the others.
    An image with a static scale that is read in float outside of the delegate, and in it as well, is turned for both.
    """
    last, maybe, images, seen = set[Node](), set[Node](), set[Node](), set[Node]()
    by_pixel = dict[Node, bool]()
    for node in graph_module.graph.nodes:
        op, read = _op(node), [_value(each) for each in node.all_input_nodes]
        if not op or not read or _is_rounding(node):
            continue
        source = read[0]
        if source in maybe and (_is_last_softmax(node) or (op == "linear" and _is_dynamic(graph_module, node))):
            yield node, FIRST
        elif _takes_turned(graph_module, node):
            pixel = _is_pointwise(graph_module, node)
            turned = [] if source in last else _turned(graph_module, node, seen)
            if not turned and source not in last:
                yield node, LAST
            elif by_pixel.setdefault(_rounded(node), pixel) != pixel:
                yield node, ROUNDED
            last.update(turned)
            maybe.update(turned)
        seen.add(node)
        if op in MAYBE:
            images |= {node, source}
            maybe.add(node)
        elif _averages(node) or (op == "batch_norm" and source in images):
            maybe.add(node)
        elif op in POINTWISE | MOVES:
            images |= set() if images.isdisjoint(read) else {node}
            maybe |= set() if maybe.isdisjoint(read) else {node}
            whole = last.issuperset(read) or (images.issuperset(read) and not last.isdisjoint(read))
            last |= {node} if whole else set()
        if op in IMAGES:
            last.add(node)
        if node in last and any(_are_mixed(readers) for _, readers in _read_in_float(node)):
            yield node, APART


def _turned(graph_module: GraphModule, convolution: Node, seen: set[Node]) -> list[Node]:
    """The values that ExecuTorch turns before a convolution with dynamic scales; none if that would do harm."""
    found, ahead = list[Node](), convolution
    while True:
        value = _value(ahead.args[0])
        readers = {
            reader for reader in _readers(value) if reader is not ahead and not _takes_turned(graph_module, reader)
        }
        found.append(value)
        if _op(value) in VIEWS | MOVES - JOINS or _op(value) in MATRICES or _is_last_softmax(value):
            return []
        if _op(value) not in POINTWISE or not isinstance(value.args[0], Node):
            return [] if seen & readers else found
        if readers or len(value.all_input_nodes) > 1:
            return []
        ahead = value


def _read_in_float(value: Node) -> Iterator[tuple[Node, list[Node]]]:
    """What an image is after rounding to a static scale, and the readers that do not round it again."""
    for rounding in filter(_is_rounding, value.users):
        if rounding.op != "call_module" and not str(rounding.target).endswith("quantize_per_tensor.default"):
            continue
        readers = [each for each in rounding.users if not _is_rounding(each) and not _is_annotated(each, value)]
        if readers:
            yield rounding, readers
        yield from _read_in_float(rounding)


def _is_annotated(reader: Node, value: Node) -> bool:
    """Whether the quantizer rounds a value for an op of a prepared graph."""
    return any(value in getattr(each, "input_qspec_map", ()) for each in reader.meta.values())


def _are_mixed(readers: list[Node]) -> bool:
    """Whether a delegate computes some of what reads an image in float, but not all."""
    inside = [_op(each) in INSIDE for each in readers]
    return any(_op(each) in SEVERAL for each in readers) or (any(inside) and not all(inside))


def _pool_between(source: Node, readers: list[Node]) -> None:
    with source.graph.inserting_after(source):
        own = _turning(source, LAST)
    for each in readers:
        each.replace_input_with(source, own)


def _give_own_input(graph_module: GraphModule, node: Node, done: str, made: dict[Any, Node]) -> None:
    """Gives an op, and those that need the same, its input once more."""
    source = node.args[0]
    assert isinstance(source, Node)
    value = source if _op(node) == "softmax" else _value(source)
    kind = done, _op(node) in CONVOLUTIONS and _is_pointwise(graph_module, node)
    key = source if value is source else _rounded(node), kind
    with node.graph.inserting_before(node):
        if key not in made:
            own = value if done == ROUNDED else _turning(value, done)
            made[key] = _again(source, {value: own})
        node.replace_input_with(source, made[key])


def _turning(value: Node, done: str) -> Node:
    """An op that makes ExecuTorch turn an image and changes no number; it has no handle."""
    pool, view = torch.ops.aten.max_pool2d.default, torch.ops.aten.view_as.default
    graph = value.graph
    own = (
        graph.call_function(pool, (value, [1, 1], [1, 1])) if done == LAST else graph.call_function(view, (value,) * 2)
    )
    own.meta = _meta_of(_value(value))
    return own


def _meta_of(value: Node) -> dict[str, Any]:
    """What is known of a value, for an op that passes it on: without the handle of the op that made it."""
    return {key: each for key, each in value.meta.items() if key != "custom"}


def _again(node: Node, made: dict[Node, Node]) -> Node:
    """A copy of a node that rounds, and of what it reads."""
    if node not in made:
        for each in node.all_input_nodes:
            _again(each, made)
        made[node] = node.graph.node_copy(node, made.__getitem__)
    return made[node]


def _value(node: Any) -> Node:
    """What a node is before observers and rounding."""
    while _is_rounding(node):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _rounded(node: Node) -> Node:
    """What rounds the first input of an op: the observer, or the quantize op."""
    source: Any = node.args[0]
    return source if source.op == "call_module" else source.args[0]  # type: ignore[no-any-return]


def _readers(value: Node) -> Iterator[Node]:
    """The ops that read a value, rounded or not."""
    for reader in value.users:
        if _is_rounding(reader):
            yield from _readers(reader)
        elif not any(word in str(reader.target) for word in ("choose_qparams", "sym_size", "_assert")):
            yield reader


def _is_rounding(node: Node) -> bool:
    return node.op == "call_module" or "quantize_per" in str(node.target)


def _is_dynamic(graph_module: GraphModule, node: Node) -> bool:
    """Whether the scale of an op's first input is computed from it."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return False
    observer = graph_module.get_submodule(str(source.target)) if source.op == "call_module" else None
    return bool(getattr(observer, "is_dynamic", False)) or str(source.target).endswith("dequantize_per_tensor.tensor")


def _takes_turned(graph_module: GraphModule, node: Node) -> bool:
    return _op(node) in CONVOLUTIONS and _is_dynamic(graph_module, node)


def _averages(node: Node) -> bool:
    """Whether an op has one value for each channel of an image, as one of 1 x 1."""
    axes: Any = node.args[1] if _op(node) in ("mean", "amax") and len(node.args) > 2 else ()
    return sorted(axes) in ([2, 3], [-2, -1]) and node.args[2] is True


def _is_last_softmax(node: Node) -> bool:
    return _op(node) == "softmax" and node.args[1] in (-1, 3)


def _is_pointwise(graph_module: GraphModule, node: Node) -> bool:
    """Whether a convolution multiplies the channels of each pixel: its kernel has a scale for each."""
    weight = operator.attrgetter(str(_value(node.args[1]).target))(graph_module)
    arguments: Any = (*node.args[3:], *([1], [0], [1], 1)[max(len(node.args) - 3, 0) :])
    stride, padding, _, groups = arguments
    plain = set(stride) == {1} and set(padding) == {0} and groups == 1
    return bool(_op(node) == "conv2d" and plain) and set(weight.shape[2:]) == {1}


def _fused_before(node: Node) -> Node | None:
    """The activation that alone this one reads, if XNNPACK fuses it with an op of its own kernel."""
    first = _alone_read(node)
    if first is None or clamp_of(first) is None:
        return None
    kernel = _alone_read(first)
    fused = kernel is not None and (_op(kernel) in CLAMPED or _fused_before(first) is not None)
    return first if fused else None


def _alone_read(node: Node) -> Node | None:
    """What a node reads, behind copies, if nothing else does."""
    while node.args and isinstance(source := node.args[0], Node) and len(source.users) == 1:
        if _op(source) not in COPIES:
            return source
        node = source
    return None


def _copy_bias(graph_module: GraphModule, node: Node, bias: Node) -> None:
    """Gives a product a copy of the bias, as a parameter of its own."""
    name = next(free for number in range(1, 10**6) if not hasattr(graph_module, free := f"{bias.name}_{number}"))
    value = operator.attrgetter(str(bias.target))(graph_module)
    setattr(graph_module, name, torch.nn.Parameter(value.detach().clone(), requires_grad=False))
    with node.graph.inserting_before(node):
        own = node.graph.get_attr(name)
    own.meta = copy.copy(bias.meta)
    node.args = (*node.args[:2], own, *node.args[3:])


def _op(node: Node) -> str:
    target: Any = getattr(node.target, "overloadpacket", None)
    return "" if node.op != "call_function" or target is None else target.__name__.removesuffix("_")
