"""Records for every op which module class or function it came from, separately for each call.

Quantizers that match *source partitions* (x86 above all) read ``source_fn_stack``, which only ``strict=True`` writes.
Otherwise they guess from ``nn_module_stack``: two calls of one module form a single partition, a subclass of ``Conv2d``
is not a ``Conv2d``, and ``F.conv2d`` has no class at all.  In strict mode, a ``Conv2d`` with circular padding forms two
partitions, one without a convolution.  This pass gives both modes one entry per op: the class that represents what the
op computes.
"""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.export import ExportedProgram

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import graph_modules, names_by_node
from pt2qa._graph.handles import module_of
from pt2qa._graph.internals import flow_passes


def write_sources(program: ExportedProgram, opened: tuple[type[nn.Module], ...] = ()) -> tuple[Change, ...]:
    """Rewrites ``source_fn_stack`` in place: one entry for each op, none for parameters.

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
    shared = tuple(
        Change("shared module", module, f"its {count} calls of {op} are matched one by one")
        for (module, op), count in calls.items()
        if count > 1
    )
    return shared + tuple(
        Change(
            "op source", names[node], f"matched as {kind.__name__}; its caller is {module_of(node)[1] or 'not known'}"
        )
        for node, kind in renamed
    )
