"""Replaces ``padding="same"`` and ``"valid"`` with numbers.

``aten.conv2d.padding`` is not the overload ``aten.conv2d.default`` that quantizers look for: the x86 quantizer raises
``ValueError``, and QAT finds no convolution with batch norm.
"""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import changes_of
from pt2qa._graph.internals import flow_passes


def write_out_padding(program: ExportedProgram) -> tuple[Change, ...]:
    """Gives convolutions with ``"same"`` or ``"valid"`` padding their numeric overload, in place.

    For an even kernel, ``"same"`` pads one side more than the other, which no number can express; it does not change.
    """

    def edit(graph_module: GraphModule) -> list[tuple[Node, str]]:
        return [(node, f"written out as {node.args[4]}") for node in flow_passes.write_out_padding(graph_module)]

    return changes_of(program, "padding", edit)
