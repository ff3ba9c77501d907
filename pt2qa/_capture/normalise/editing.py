"""Edits of a program's graphs that keep its signature valid, and names to report them by."""

from __future__ import annotations

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import assign_handles, handle_of, names_of, walk
from pt2qa._graph.internals.torch import statically_known_true


def graph_modules(program: ExportedProgram) -> list[GraphModule]:
    """The graph of a program and every graph nested in it."""
    return list({id(placed.graph_module): placed.graph_module for placed in walk(program.graph_module)}.values())


def complete_users(program: ExportedProgram) -> None:
    """Enters readers that ``torch.export`` forgot, in place: before a ``no_grad`` region, those that nothing reads."""
    for graph_module in graph_modules(program):
        for node in graph_module.graph.nodes:
            for source in node.all_input_nodes:
                source.users.setdefault(node)


def names_by_node(program: ExportedProgram) -> dict[Node, str]:
    """What to call each op of a program as it is now.  Numbers the program's handles, in place."""
    assign_handles(program)
    names = names_of(program)
    return {
        placed.node: names[handle].name
        for placed in walk(program.graph_module)
        if (handle := handle_of(placed.node)) is not None
    }


def read_instead(program: ExportedProgram, old: Node, new: Node, users: list[Node] | None = None) -> None:
    """Makes users of ``old`` read ``new`` instead, in place; if ``users`` is None, all users except ``new``.

    If ``old`` is an output of the program, ``new`` replaces it in the signature too.
    """
    for user in list(old.users) if users is None else users:
        if user is not new:
            user.replace_input_with(old, new)
            if user.op == "output" and old.graph is program.graph:
                for spec in program.graph_signature.output_specs:
                    if isinstance(spec.arg, TensorArgument) and spec.arg.name == old.name:
                        spec.arg = TensorArgument(name=new.name)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two traced tensors have the same dtype and shape, without specialising dynamic sizes."""
    return (
        a.dtype == b.dtype
        and a.dim() == b.dim()
        and all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True))
    )


def drop_attribute(graph_module: GraphModule, reader: Node) -> None:
    """Removes a ``get_attr`` node that nothing reads, and the attribute if no other node reads it, in place."""
    if reader.users:
        return
    target = str(reader.target)
    graph_module.graph.erase_node(reader)
    if not any(node.op == "get_attr" and node.target == target for node in graph_module.graph.nodes):
        delattr(graph_module, target)
