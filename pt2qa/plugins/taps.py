"""What backends share: whose op a node computes, and, without a tracer, a second program that returns more values."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pt2qa._report.atomic import write_atomic as write_atomic

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

T = TypeVar("T")


def attribute_of(graph: GraphModule, node: object) -> Any:
    """What a node reads from the graph, such as a weight, detached; None of anything else.

    Args:
        graph: the graph module that owns the node.
        node: a ``get_attr`` node; of any other object, the answer is None.
    """
    import torch

    from pt2qa._graph import handles

    value = handles.attribute_of(graph, node)
    return value.detach() if isinstance(value, torch.Tensor) else value


def onednn_has_vnni() -> bool:
    """Whether oneDNN, which Inductor and OpenVINO contain, multiplies int8 with VNNI on this CPU.

    Without it, x86 adds two products in 16 bits, which saturate.  ``ONEDNN_MAX_CPU_ISA`` may forbid it.
    """
    import torch

    limit, can = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(), torch.cpu.get_capabilities()
    known = ("avx_vnni",) if limit.startswith("AVX2") else ("avx512_vnni", "avx_vnni", "amx_int8")
    return limit not in ("SSE41", "AVX", "AVX2", "AVX512_CORE") and any(can.get(name) for name in known)


def handle_of(node: Node) -> int | None:
    """The handle of an op, for :attr:`DeployedProgram.delegated`; None without one.

    Args:
        node: of any program that was made from a capture.
    """
    from pt2qa._graph import handles

    return handles.handle_of(node)


def with_outputs(graph: GraphModule, names: Sequence[str]) -> GraphModule:
    """The same with nodes of its own, that also returns the values of some as they are made; they share their weights.

    Args:
        graph: with a flat tuple of outputs, as :meth:`Backend.lower` gets it.
        names: of the nodes whose values come after its own outputs.
    """
    import torch
    from torch.fx import GraphModule

    copied = GraphModule(graph, copy.deepcopy(graph.graph))
    copied.meta.update(graph.meta)
    by_name = dict(zip((node.name for node in graph.graph.nodes), copied.graph.nodes, strict=True))
    output = copied.graph.output_node()

    def as_made(node: Node) -> Node:
        if not any(getattr(getattr(user.target, "_schema", None), "is_mutable", False) for user in node.users):
            return node
        with copied.graph.inserting_after(node):  # an op in place, as x += y, would be seen in it
            return copied.graph.call_function(torch.ops.aten.clone.default, (node,))

    output.args = ((*output.args[0], *(as_made(by_name[name]) for name in names)),)  # type: ignore[misc]
    copied.recompile()
    return copied


def observing(taps: Sequence[str], attempt: Callable[[list[str]], tuple[T, str]], lost: dict[str, str]) -> T | None:
    """The program that observes as many taps as can be trusted together; None if none can.

    All at once if that works; else the outputs do not tell which tap it is that disturbs, and halves are tried.

    Args:
        taps: names of the nodes to observe.
        attempt: makes a program that observes some, and says why its values cannot be trusted; empty if they can.
        lost: by tap, why it cannot be observed; is added to.
    """
    groups, kept, found = [list(taps)], list[str](), None
    while groups:
        group = [name for name in groups.pop() if name not in lost]
        if not group:
            continue
        tried, reason = attempt([*kept, *group])
        if not reason:
            found, kept = tried, [*kept, *group]
        elif len(group) == 1:
            lost[group[0]] = reason
        else:
            groups += [group[len(group) // 2 :], group[: len(group) // 2]]
    return found


def same_outputs(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether outputs are equal bit for bit, NaN included.

    Args:
        left: of one program, flat.
        right: of the other.
    """
    import torch

    def bits(value: Any) -> Any:
        return value.flatten().view(torch.uint8)

    return len(left) == len(right) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else a == b
        for a, b in zip(left, right, strict=True)
    )
