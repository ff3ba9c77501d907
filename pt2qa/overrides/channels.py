"""Which channels of a graph can be scaled without changing what the model computes.

Where only ops that are positively homogeneous in each channel alone, ``f(x / s) = f(x) / s**degree``, lie between the
convolutions, linears and norms that write a value and those that read it, the parameters of the writers can be divided
by positive factors, and the input channels of the readers' weights multiplied::

    writer:   weight / s,   bias / s          reader:   weight * s**degree

So each channel of each value gets a label, and labels that one factor must serve are joined: by a residual addition,
say, or the root of a sum of squares.  Ops that only move values move labels, too: the op itself does, on a tensor of
labels.  Label 0 stands for the factor 1: of inputs, outputs, and all that any other op reads or writes.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2qa._graph.handles import OpName, attribute_of, name_of, op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import OpOverload, is_mutable, pytree, size_hint, sizes_of

_ELEMENTWISE: Final = frozenset(
    ("relu", "leaky_relu", "prelu", "abs", "neg", "dropout", "feature_dropout", "clone", "contiguous", "detach", "to")
)
MOVES: Final = frozenset(
    (
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t", "movedim"),
        *("slice", "select", "narrow", "chunk", "split", "split_with_sizes", "unbind", "cat", "stack", "getitem"),
        *("expand", "repeat", "flip", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    )
)
_POWERS: Final = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_REDUCTIONS: Final = {"mean": 1, "sum": 1, "amax": 1, "amin": 1, "linalg_vector_norm": 2}
"""The argument that has the axes; behind it is whether they stay."""
_POSITIONS: Final = {f"{kind}_pool{rank}d": rank for kind in ("avg", "max", "adaptive_avg") for rank in (1, 2, 3)} | {
    **dict.fromkeys(("upsample_nearest1d", "upsample_linear1d"), 1),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"), 2),
}
"""Ops that compute each channel by itself: how many axes of positions are last."""
_TRANSPOSED: Final = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_WEIGHTED: Final = ("linear", "conv1d", "conv2d", "conv3d", *_TRANSPOSED)
_NORMS: Final = {"layer_norm": (2, 3), "rms_norm": (2,), "group_norm": (2, 3), "instance_norm": (1, 2)}
"""The parameters that scale and move what is normalised."""
_LARGEST: Final = 1 << 14
"""Elements of a parameter that is added or multiplied, each of which gets a label."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """The labels of a value, which is divided by their factors to the power of ``degree``."""

    labels: Tensor
    degree: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """A parameter of an op that is multiplied by factors to the power of ``power``.

    Along its ``axis`` 0 or 1: that of its input or output channels, 1 being that of the channels within a group.  A
    parameter with as many elements as there are labels has one for each.
    """

    op: str
    argument: int
    axis: int
    power: float
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Chain:
    """Channels that values have in common, by label, and the parameters of all ops that write and read them."""

    labels: Tensor
    sides: tuple[Side, ...]

    @property
    def ops(self) -> tuple[str, ...]:
        """Their names in graph order, a writer first."""
        return tuple(dict.fromkeys(side.op for side in self.sides))


@dataclass(frozen=True, slots=True)
class Channels:
    """The chains of a graph, and the labels of ops' outputs by name, broadcastable to them and less than ``count``."""

    chains: tuple[Chain, ...]
    values: Mapping[str, Labelled]
    count: int


def channels_in(graph_module: GraphModule, names: Mapping[int, OpName]) -> Channels:
    """The chains of a graph whose batch norms are folded."""
    return labelled(Walk(graph_module, names))


def labelled(walk: Walk) -> Channels:
    """Labels the values of a graph, in order."""
    graph_module, names = walk.graph_module, walk.names
    for node in graph_module.graph.nodes:
        if node.op in ("call_function", "output"):
            walk.values[node] = walk.called(node)
    table = torch.tensor(list(map(walk.root, range(len(walk.parents)))))
    values = {node: _resolved(value, table) for node, value in walk.values.items()}
    # Labels of one value are in one chain, as they may share a range.
    chain_of = _Labels(len(table))
    for value in values.values():
        for each in _leaves(value):
            own = each.labels.unique()
            chain_of.join(own[own > 0][:1], own[own > 0])
    chains = torch.tensor(list(map(chain_of.root, range(len(table)))))
    members: dict[int, list[int]] = defaultdict(list)
    sides: dict[int, list[Side]] = defaultdict(list)
    for label in table.unique().tolist()[1:]:
        members[int(chains[label])].append(label)
    for side in walk.sides:
        labels = table[side.labels]
        for chain in chains[labels].unique().tolist():
            if chain:
                sides[chain].append(replace(side, labels=labels))
    found = [Chain(torch.tensor(members[chain]), tuple(own)) for chain, own in sides.items() if len(members[chain]) > 1]
    named = {name_of(node, names): value for node, value in values.items() if isinstance(value, Labelled)}
    known = {str(name): value for name, value in named.items() if name is not None and value.labels.any()}
    return Channels(tuple(found), known, len(table))


def _resolved(value: Any, table: Tensor) -> Any:
    return pytree.tree_map_only(Labelled, lambda each: replace(each, labels=table[_small(each.labels)]), value)


def _leaves(value: Any) -> list[Labelled]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Labelled)]


def _small(labels: Tensor) -> Tensor:
    """Labels with one position for each axis along which they do not change."""
    for axis in range(labels.dim()):
        first = labels.narrow(axis, 0, min(1, labels.shape[axis]))
        if labels.stride(axis) == 0 or bool((labels == first).all()):
            labels = first
    return labels


class _Labels:
    """Numbers that are joined; the smallest stands for all of them."""

    def __init__(self, count: int = 1) -> None:
        self.parents = list(range(count))

    def fresh(self, *shape: int) -> Tensor:
        start, count = len(self.parents), torch.Size(shape).numel()
        self.parents += range(start, start + count)
        return torch.arange(start, start + count).reshape(shape)

    def root(self, label: int) -> int:
        while (parent := self.parents[label]) != label:
            self.parents[label] = label = self.parents[parent]
        return label

    def join(self, one: Tensor, other: Tensor) -> None:
        one, other = torch.broadcast_tensors(one, other)
        for axis in range(one.dim()):
            if one.stride(axis) == other.stride(axis) == 0:
                one, other = (each.narrow(axis, 0, min(1, each.shape[axis])) for each in (one, other))
        count = len(self.parents)
        for both in (one * count + other)[one != other].unique().tolist():
            low, high = sorted(map(self.root, divmod(both, count)))
            self.parents[high] = low


class Walk(_Labels):
    """Labels the value of each node of a graph; None stands for what is no floating-point tensor."""

    def __init__(self, graph_module: GraphModule, names: Mapping[int, OpName]) -> None:
        super().__init__()
        self.graph_module, self.names = graph_module, names
        self.sides: list[Side] = []
        self.values: dict[Node, Any] = {}
        nodes = graph_module.graph.find_nodes(op="get_attr")
        self.readers = Counter(str(node.target) for node in nodes for _ in node.users)

    def called(self, node: Node) -> Any:
        """The labels of what a node returns, nested as that is."""
        value, target = node.meta.get(VALUE), node.target
        if isinstance(value, int | torch.SymInt):
            return size_hint(value)
        known = isinstance(target, OpOverload) and target.namespace == "aten"
        writes = isinstance(target, OpOverload) and is_mutable(target)
        found, op = None, "" if node.op == "output" else op_of(target)
        if name_of(node, self.names) and (known or target is operator.getitem) and not (writes and op in MOVES):
            found = self._of_op(node, op)
        if found is None:
            self._pin([self._read(source) for source in node.all_input_nodes])
            return pytree.tree_map_only(Tensor, unlabelled, value)
        if writes:  # what shares memory with the input now has the labels of the output
            self._join(found, self._read(node.args[0]))
        return found

    def _of_op(self, node: Node, op: str) -> Any:
        """The labels of an op's output; None if it is not known to be homogeneous."""
        first = self._read(node.args[0]) if node.args else None
        if op in MOVES:
            return self._moved(node)
        if op in ("add", "sub", "maximum", "minimum", "mul", "div"):
            return self._of_two(node, op in ("mul", "div"), -1.0 if op == "div" else 1.0)
        if not isinstance(first, Labelled) or not is_floating(node):
            return None
        if op in _WEIGHTED:
            return self._weighted(node, op, first)
        if op in _NORMS:
            return self._norm(node, _NORMS[op], first)
        if op == "batch_norm":
            return self._batch_norm(node, first)
        if op in ("matmul", "scaled_dot_product_attention"):
            return self._product(node)
        if op in _ELEMENTWISE or (op in ("clamp_min", "clamp") and _from_zero(node)):
            return first
        if op in _POSITIONS or (op == "pad" and (*node.args, None, None)[3] in (None, 0)):
            rank = _POSITIONS[op] if op in _POSITIONS else len(node.args[1]) // 2  # type: ignore[arg-type]
            return self._over_positions(node, first, range(-rank, 0))
        if op in _REDUCTIONS and len(node.args) > _REDUCTIONS[op]:
            return self._reduced(node, first, _REDUCTIONS[op])
        power = node.args[1] if op == "pow" else _POWERS.get(op)
        return replace(first, degree=first.degree * power) if isinstance(power, int | float) else None

    # -- values --------------------------------------------------------------------------------------------------------

    def _read(self, node: Any) -> Any:
        if isinstance(node, Node) and node not in self.values:
            self.values[node] = pytree.tree_map_only(Tensor, unlabelled, node.meta.get(VALUE))
            if node.op == "get_attr":
                value = attribute_of(self.graph_module, node)
                self.values[node] = unlabelled(value) if isinstance(value, Tensor) else None
        return self.values[node] if isinstance(node, Node) else node

    def _own(self, node: Any) -> Tensor | None:
        """A parameter or buffer that nothing else reads."""
        if not isinstance(node, Node) or node.op != "get_attr" or self.readers[str(node.target)] != 1:
            return None
        value = attribute_of(self.graph_module, node)
        return value if isinstance(value, Tensor) and value.is_floating_point() else None

    def _side(self, node: Node, argument: int, axis: int, power: float, labels: Tensor) -> None:
        self.sides.append(Side(str(name_of(node, self.names)), argument, axis, power, labels))

    def _pin(self, value: Any) -> None:
        for each in _leaves(value):
            self.join(each.labels, torch.tensor(0))

    def _is_pinned(self, labels: Tensor) -> bool:
        return not any(map(self.root, _small(labels).unique().tolist()))

    def _join(self, one: Labelled, other: Labelled) -> None:
        self.join(one.labels, other.labels)
        if one.degree != other.degree:
            self._pin([one, other])

    def _channels(self, labels: Tensor, axis: int) -> Tensor:
        """One label for each index of an axis."""
        rows = _small(labels.movedim(axis, -1))
        rows = rows.expand(*rows.shape[:-1], labels.shape[axis]).flatten(0, -2) if rows.dim() > 1 else rows[None]
        self.join(rows[:1], rows)
        return rows[0].expand(labels.shape[axis])

    # -- ops -----------------------------------------------------------------------------------------------------------

    def _moved(self, node: Node) -> Any:
        degrees = {each.degree for source in node.all_input_nodes for each in _leaves(self._read(source))}
        if len(degrees) != 1:
            return None
        [degree] = degrees

        def labels(source: Node) -> Any:
            contiguous = op_of(node.target) == "view"  # expanded labels have no views of other sizes
            return pytree.tree_map_only(
                Labelled, lambda each: each.labels.contiguous() if contiguous else each.labels, self._read(source)
            )

        args, kwargs = map_arg((node.args, node.kwargs), labels)
        moved = node.target(*args, **kwargs)  # type: ignore[operator]  # ops are functions
        return pytree.tree_map_only(Tensor, lambda each: Labelled(_small(each).expand(each.shape), degree), moved)

    def _of_two(self, node: Node, product: bool, sign: float) -> Labelled | None:
        one, other = (self._read(each) for each in node.args[:2])
        if not is_floating(node) or (product and node.kwargs):
            return None
        shape = sizes_of(node.meta[VALUE])
        if not isinstance(one, Labelled) or not isinstance(other, Labelled):
            # The other is a number, or holds integers.
            left = one if isinstance(one, Labelled) else other if product and sign > 0 else None
            right = product or (isinstance(other, int | float) and other == 0)
            return replace(left, labels=left.labels.expand(shape)) if isinstance(left, Labelled) and right else None
        both = [one, other]
        for place in (0, 1):
            own, beside = self._own(node.args[place]), both[1 - place].labels
            if own is not None and own.numel() <= _LARGEST and (not product or self._is_pinned(beside)):
                both[place] = Labelled(self.fresh(*own.shape))
                self._side(node, place, 0, -1.0, both[place].labels.flatten())
        one, other = (replace(each, labels=each.labels.expand(shape)) for each in both)
        if not product:
            self._join(one, other)
            return one
        if self._is_pinned(one.labels):
            return replace(other, degree=sign * other.degree)
        same = torch.equal(*(self._rooted(each.labels) for each in (one, other)))
        if not same:
            self._pin(other)
        return replace(one, degree=one.degree + sign * other.degree) if same else one

    def _rooted(self, labels: Tensor) -> Tensor:
        found = _small(labels)
        return torch.tensor(list(map(self.root, found.flatten().tolist()))).reshape(found.shape)

    def _weighted(self, node: Node, op: str, value: Labelled) -> Labelled | None:
        weight, bias = self._own(node.args[1]), (*node.args, None)[2]
        if weight is None or (bias is not None and self._own(bias) is None):
            return None
        axis = -1 if op == "linear" else int(value.labels.dim() == weight.dim())
        shape = sizes_of(node.meta[VALUE])
        inputs, outputs = self._channels(value.labels, axis), self.fresh(shape[axis])
        first = int(op in _TRANSPOSED)
        self._side(node, 1, first, -1.0, outputs)
        self._side(node, 1, 1 - first, value.degree, inputs)
        if bias is not None:
            self._side(node, 2, 0, -1.0, outputs)
        return Labelled(along(outputs, axis, shape))

    def _norm(self, node: Node, arguments: Sequence[int], value: Labelled) -> Labelled | None:
        own = {
            place: self._own(node.args[place]) for place in arguments if (*node.args, *[None] * 4)[place] is not None
        }
        weight = own.get(arguments[0])
        if weight is None or None in own.values():
            return None
        self._pin(value)
        labels, shape = self.fresh(*weight.shape), sizes_of(node.meta[VALUE])
        for place in own:
            self._side(node, place, 0, -1.0, labels.flatten())
        last = op_of(node.target) in ("layer_norm", "rms_norm")
        return Labelled(labels.expand(shape) if last else along(labels, 1, shape))

    def _batch_norm(self, node: Node, value: Labelled) -> Labelled | None:
        if any(self._own(each) is None for each in node.args[1:4]) or node.args[5] is not False:
            return None
        shape = sizes_of(node.meta[VALUE])
        inputs, outputs = self._channels(value.labels, 1), self.fresh(shape[1])
        for place, power, labels in ((1, -1.0, outputs), (2, -1.0, outputs), (1, 1.0, inputs), (3, -1.0, inputs)):
            self._side(node, place, 0, power * (1.0 if labels is outputs else value.degree), labels)
        return Labelled(along(outputs, 1, shape))

    def _product(self, node: Node) -> Labelled | None:
        """Of weights and values: the channels of the values."""
        *others, value = (self._read(each) for each in node.all_input_nodes[: 2 + (op_of(node.target) != "matmul")])
        if (
            not isinstance(value, Labelled)
            or value.labels.dim() < 2
            or value.labels.dim() != len(node.meta[VALUE].shape)
        ):
            return None
        self._pin([others, [self._read(each) for each in node.all_input_nodes[1 + len(others) :]]])
        return self._over_positions(node, value, [-2])

    def _first(self, value: Labelled, axes: Iterable[int]) -> Tensor:
        """The labels, with one position for each axis along which they are joined."""
        first = value.labels
        for axis in axes:
            first = first.narrow(axis, 0, 1)
        self.join(value.labels, first)
        return first

    def _over_positions(self, node: Node, value: Labelled, axes: Iterable[int]) -> Labelled:
        return replace(value, labels=self._first(value, axes).expand(sizes_of(node.meta[VALUE])))

    def _reduced(self, node: Node, value: Labelled, place: int) -> Labelled | None:
        axes, keep = node.args[place], (*node.args, False)[place + 1]
        axes = [axes] if isinstance(axes, int) else axes
        if not isinstance(axes, list) or not axes:
            return None
        first = self._first(value, axes)
        return replace(value, labels=first if keep else first.squeeze(tuple(axes)))


def unlabelled(value: Tensor) -> Labelled | None:
    """Label 0 for each element; None of integers."""
    return Labelled(torch.tensor(0).expand(sizes_of(value))) if value.is_floating_point() else None


def along(labels: Tensor, axis: int, shape: Sequence[int]) -> Tensor:
    """The labels of an axis, for a value of this shape."""
    sizes = [1] * len(shape)
    sizes[axis] = -1
    return labels.reshape(sizes).expand(shape)


def is_floating(node: Node) -> bool:
    """Whether a node returns a floating-point tensor."""
    value = node.meta.get(VALUE)
    return isinstance(value, Tensor) and value.is_floating_point()


def _from_zero(node: Node) -> bool:
    """Whether a clamp is a ReLU."""
    low, high = (*node.args[1:], None, None)[:2]
    return isinstance(low, int | float) and low == 0 and high is None and not node.kwargs
