"""Keeps scalars in integer (and in double, half, complex) arithmetic exact.

XNNPACK's quantizer turns the scalar of ``add.Tensor(x, 1)`` and ``mul.Tensor(x, 2)`` into a float32 tensor, whatever
the dtype of ``x``: an index becomes a float (``IndexError``), 16777217 + 1 becomes 16777216, a double loses digits.
"""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import changes_of
from pt2qa._graph.internals import flow_passes
from pt2qa._graph.internals.nodes import VALUE


def keep_scalars(program: ExportedProgram) -> tuple[Change, ...]:
    """Gives ``add`` and ``mul`` of a Python scalar their ``Scalar`` overload if the result is not float32, in place.

    Both overloads wrap the scalar the same way and promote dtypes alike, so the numbers are the same.
    """

    def edit(graph_module: GraphModule) -> list[tuple[Node, str]]:
        return [(node, _what(node)) for node in flow_passes.keep_scalars(graph_module)]

    return changes_of(program, "scalar", edit)


def _what(node: Node) -> str:
    dtype = str(node.meta[VALUE].dtype).removeprefix("torch.")
    return f"{node.target}: its scalar {node.args[1]} stays a scalar, exact in {dtype}"
