"""Inlines ``torch.no_grad()`` and switched-off autocast regions.

``torch.export`` puts such a region into a nested graph, where no quantizer looks: a forward under ``no_grad`` silently
stays in float.  Outside of training, the region computes the same without its wrapper.
"""

from __future__ import annotations

from torch.export import ExportedProgram

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import graph_modules, names_by_node, renew_outputs
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.flow_passes import inline_region, region_in


def inline_regions(program: ExportedProgram) -> tuple[Change, ...]:
    """Inlines the ops of grad-mode regions, and of autocast regions that are off, in place.

    In QAT, gradients then flow through ops that were under ``no_grad``.  Autocast regions that are on compute in
    another dtype, and stay nested.
    """
    changes = []
    while found := [(graph, region) for graph in graph_modules(program) if (region := region_in(graph)) is not None]:
        graph_module, region = found[0]
        name, grad = names_by_node(program)[region], op_of(region.target) == "wrap_with_set_grad_enabled"
        count = inline_region(graph_module, region)
        kind = "no_grad or enable_grad" if grad else "switched-off autocast"
        changes.append(Change("nested region", name, f"its {count} ops are now in the graph around the {kind} region"))
    renew_outputs(program)
    return tuple(changes)
