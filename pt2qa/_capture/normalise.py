"""Passes that change how a program is written, never what it computes, so that quantizers neither fail nor skip ops.

Each edits a program in place, and returns what it changed.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, default_decompositions
from torch.fx import GraphModule, Node

from pt2qa._capture.aliases import Aliases, in_place_argument
from pt2qa._capture.changes import Change, changes_of, complete_users, graph_modules, names_by_node, renew_outputs
from pt2qa._capture.writes import make_writes_functional
from pt2qa._graph.handles import PART, module_of, op_of
from pt2qa._graph.internals import flow_passes
from pt2qa._graph.internals.nodes import CUSTOM, VALUE

_ATEN = torch.ops.aten

RECURRENT = {
    "lstm": (_ATEN.lstm.input, _ATEN.lstm.data),
    "gru": (_ATEN.gru.input, _ATEN.gru.data),
    "rnn": (_ATEN.rnn_tanh.input, _ATEN.rnn_tanh.data, _ATEN.rnn_relu.input, _ATEN.rnn_relu.data),
}
"""The kinds of recurrent ops that ``capture(decompose=...)`` takes, with their ops."""

ATTENTION = "attention"
"""Its kind for attention."""


# -- always ------------------------------------------------------------------------------------------------------------


def inline_regions(program: ExportedProgram) -> tuple[Change, ...]:
    """Inlines ``torch.no_grad()`` regions and autocast regions that are off.

    ``torch.export`` puts such a region into a nested graph, where no quantizer looks: a forward under ``no_grad``
    silently stays in float.  In QAT, gradients then flow through ops that were under ``no_grad``.  Autocast regions
    that are on compute in another dtype, and stay nested.
    """
    changes = []
    while found := [(g, region) for g in graph_modules(program) if (region := flow_passes.region_in(g)) is not None]:
        graph_module, region = found[0]
        name, grad = names_by_node(program)[region], op_of(region.target) == "wrap_with_set_grad_enabled"
        count = flow_passes.inline_region(graph_module, region)
        kind = "no_grad or enable_grad" if grad else "switched-off autocast"
        changes.append(Change("nested region", name, f"its {count} ops are now in the graph around the {kind} region"))
    renew_outputs(program)
    return tuple(changes)


def remove_added_zeros(program: ExportedProgram) -> tuple[Change, ...]:
    """Makes the users of ``add(x, 0)`` read ``x``, if shape and dtype are the same.

    Python's ``sum([a, b])`` starts from 0, so the graph contains ``add(a, 0)``.  The x86 quantizer fails on it with a
    bare ``AssertionError``, and XNNPACK's would round its result again.

    All numbers stay equal, except that a ``-0.0``, which the addition would turn into ``0.0``, keeps its sign.  If the
    result or the operand is written to in place later, the addition makes a copy that is needed, so it stays.
    """

    def written(graph_module: GraphModule, node: Node) -> bool:
        aliases = Aliases(graph_module)
        return any(aliases.written_after(node, value) for value in (node, *node.all_input_nodes))

    def edit(graph_module: GraphModule) -> list[tuple[Node, str]]:
        removed = flow_passes.remove_added_zeros(graph_module, written)
        return [(node, "removed: its users read its operand") for node in removed]

    return changes_of(program, "add of zero", edit)


def remove_dead_code(program: ExportedProgram) -> tuple[Change, ...]:
    """Removes ops without effect.

    The x86 quantizer reads the first output of a matched convolution or linear.  An unused pooler has none, so it
    raises ``IndexError``.

    An op that writes to its argument has an effect, unless that memory was allocated in the graph and is not read later
    (the ``ReLU(inplace=True)`` after an unused linear).  Inputs, parameters and buffers stay, used or not.
    """

    def edit(graph_module: GraphModule) -> list[tuple[Node, str]]:
        removed = flow_passes.remove_dead_code(graph_module, _unread_write)
        return [(node, "removed: nothing reads it") for node in removed if node.target is not operator.getitem]

    return changes_of(program, "dead code", edit)


def _unread_write(graph_module: GraphModule) -> Node | None:
    """An in-place op whose result nothing reads, under any name."""
    nodes: list[Node] = [node for node in graph_module.graph.nodes if not node.users and in_place_argument(node)]
    if not nodes:
        return None
    aliases = Aliases(graph_module)
    for node in nodes:
        made_here = all(member.op == "call_function" for member in aliases.group(node))
        if made_here and not aliases.read_after(node, node):
            return node
    return None


def keep_scalars(program: ExportedProgram) -> tuple[Change, ...]:
    """Gives ``add`` and ``mul`` of a Python scalar their ``Scalar`` overload if the result is not float32.

    XNNPACK's quantizer turns the scalar of ``add.Tensor(x, 1)`` and ``mul.Tensor(x, 2)`` into a float32 tensor,
    whatever the dtype of ``x``: an index becomes a float (``IndexError``), 16777217 + 1 becomes 16777216, a double
    loses digits.  Both overloads wrap the scalar the same way and promote dtypes alike, so the numbers are the same.
    """

    def what(node: Node) -> str:
        dtype = str(node.meta[VALUE].dtype).removeprefix("torch.")
        return f"{node.target}: its scalar {node.args[1]} stays a scalar, exact in {dtype}"

    return changes_of(program, "scalar", lambda graph: [(node, what(node)) for node in flow_passes.keep_scalars(graph)])


def write_out_padding(program: ExportedProgram) -> tuple[Change, ...]:
    """Gives convolutions with ``"same"`` or ``"valid"`` padding their numeric overload.

    ``aten.conv2d.padding`` is not the overload ``aten.conv2d.default`` that quantizers look for: the x86 quantizer
    raises ``ValueError``, and QAT finds no convolution with batch norm.  For an even kernel, ``"same"`` pads one side
    more than the other, which no number can express; it does not change.
    """

    def edit(graph_module: GraphModule) -> list[tuple[Node, str]]:
        return [(node, f"written out as {node.args[4]}") for node in flow_passes.write_out_padding(graph_module)]

    return changes_of(program, "padding", edit)


def write_sources(program: ExportedProgram, opened: tuple[type[nn.Module], ...] = ()) -> tuple[Change, ...]:
    """Rewrites ``source_fn_stack``: one entry for each op, the class that represents what it computes.

    Quantizers that match *source partitions* (x86 above all) read ``source_fn_stack``, which only ``strict=True``
    writes.  Otherwise they guess from ``nn_module_stack``: two calls of one module form a single partition, a subclass
    of ``Conv2d`` is not a ``Conv2d``, and ``F.conv2d`` has no class at all.  In strict mode, a ``Conv2d`` with circular
    padding forms two partitions, one without a convolution.  This pass gives both modes the same entries.

    Ops inside a composite ``torch.nn`` module, such as ``MultiheadAttention``, keep that module as their source, as in
    strict export; one call of it is one partition.  Ops of the modules that are ``opened`` get the sources that they
    would have outside of any module.  Returned is which modules are called more than once, and which ops got a class
    that did not call them.
    """
    written = [flow_passes.write_sources(graph_module, opened) for graph_module in graph_modules(program)]
    calls = sum((calls for _, calls in written), Counter[tuple[str, str]]())
    renamed = [change for changes, _ in written for change in changes]
    if not renamed and all(count == 1 for count in calls.values()):
        return ()
    names = names_by_node(program)
    shared = [
        Change("shared module", module, f"its {count} calls of {op} are matched one by one")
        for (module, op), count in calls.items()
        if count > 1
    ]
    sources = [
        Change("op source", names[node], f"matched as {kind.__name__}; its caller is {module_of(node)[1] or 'unknown'}")
        for node, kind in renamed
    ]
    return (*shared, *sources)


# -- on request --------------------------------------------------------------------------------------------------------


def decompose_attention(program: ExportedProgram) -> tuple[Change, ...]:
    """Replaces attention with matrix products and the ops between them, which quantizers know.

    ``scaled_dot_product_attention`` is one op with two matrix products inside, which no quantizer sees.  The linears
    and batched products of ``nn.MultiheadAttention`` count as part of that module, which quantizers that match modules
    (x86) leave in float; :func:`write_sources` opens it.

    The formula is that of the op's documentation, ``softmax(q kᵀ · scale + mask) v``, written so that quantizers accept
    it:

    - products are ``matmul``, which x86 knows, and not ``bmm``;
    - the scale is a division by its inverse, as in the attention pattern that Inductor fuses; quantizers that annotate
      every ``mul`` (XNNPACK) would round a multiplication;
    - the negated mask is subtracted, not added: a quantizer that annotates every ``add`` would let the mask's -inf or
      -3e38 determine a scale.
    """
    what: dict[Any, str] = {
        _ATEN.scaled_dot_product_attention.default: "decomposed into two matmuls and the ops between them",
        _ATEN.bmm.default: "written as a matmul",
        _ATEN.baddbmm.default: "written as a matmul and a mask",
    }
    names = names_by_node(program)
    changed = flow_passes.decompose_attention(program.graph_module)
    renew_outputs(program)
    return tuple(Change("attention", names[node], what[node.target]) for node in changed)


def decompose_recurrent(program: ExportedProgram, kinds: Sequence[str]) -> tuple[Change, ...]:
    """Replaces recurrent ops with linears and elementwise ops, one step of the sequence after the other.

    ``aten.lstm.input`` is one op with all its matrix products inside, and every quantizer silently leaves it in float.
    Each part records under :data:`pt2qa._graph.handles.PART` its op and its step of the sequence.  Kinds that are no
    key of :data:`RECURRENT` are ignored.
    """
    targets = {target for kind in kinds for target in RECURRENT.get(kind, ())}
    wanted = [node for node in program.graph.nodes if node.op == "call_function" and node.target in targets]
    names = names_by_node(program) if wanted else {}
    decompositions = default_decompositions() if wanted else {}
    changes = []
    for node in wanted:
        body = flow_passes.traced(node, decompositions[node.target])
        steps = _steps(node, body)
        for part, copy in flow_passes.put_instead(program.graph_module, node, body).items():
            copy.meta[CUSTOM] = {PART: {"of": names[node], "step": steps[part]}}
        linears = sum(part.target is _ATEN.linear.default for part in steps)
        what = f"decomposed into {linears} linears and the ops between them"
        changes.append(Change("recurrent op", names[node], what))
    renew_outputs(program)
    return tuple(changes)


def _steps(node: Node, body: GraphModule) -> dict[Node, int]:
    """For each op of the body, the step of the sequence that it computes, from 0; -1 if it belongs to none or to all.

    A step begins with the product of the hidden state; the last one ends where the outputs of the steps are joined.
    """
    operands = dict(zip(body.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    counts = dict.fromkeys(_hidden_weights(node), 0)
    steps, current = {}, -1
    for part in body.graph.nodes:
        if part.op != "call_function":
            continue
        weight = operands.get(part.args[1]) if part.target is _ATEN.linear.default else None
        if weight in counts:
            current = counts[weight]
            counts[weight] += 1
        elif part.target in (_ATEN.cat.default, _ATEN.stack.default):
            current = -1
        steps[part] = current
    return steps


def _hidden_weights(node: Node) -> list[Any]:
    """The hidden-to-hidden weight of each layer and direction: the second of its parameters."""
    arguments: list[Any] = list(node.args)
    place = max(index for index, argument in enumerate(arguments) if isinstance(argument, list | tuple))
    parameters, layers, both_ways = arguments[place], arguments[place + 2], arguments[place + 5]
    return list(parameters[1 :: len(parameters) // (layers * (2 if both_ways else 1))])


# -- all of them -------------------------------------------------------------------------------------------------------

PASSES = (make_writes_functional, remove_added_zeros, remove_dead_code, keep_scalars, write_out_padding)
"""In this order, after everything is inlined; dead code goes first, because it is not worth rewriting."""

DECOMPOSABLE = (*RECURRENT, ATTENTION)
"""The kinds of ops that can be decomposed."""


def normalise(program: ExportedProgram, decompose: Sequence[str] = ()) -> tuple[Change, ...]:
    """Runs every pass on a program, in place; ``decompose`` has kinds of ops of :data:`DECOMPOSABLE`."""
    complete_users(program)
    changes = [*inline_regions(program), *decompose_recurrent(program, decompose)]
    if ATTENTION in decompose:
        changes += decompose_attention(program)
    for run in PASSES:
        changes += run(program)
    # Last, because the sources describe the ops that remain.
    changes += write_sources(program, (nn.MultiheadAttention,) if ATTENTION in decompose else ())
    return tuple(changes)
