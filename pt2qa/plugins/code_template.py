"""The Python source of an edited quantizer, for plans that a quantizer's own API cannot express.

It needs only torchao, and finds ops by their names in pt2qa: module path, op and ordinal.
"""

from __future__ import annotations

from typing import Final

IMPORTS: Final = (
    "from dataclasses import replace",
    "import torch",
    "from torchao.quantization.pt2e.observer import (",
    "    HistogramObserver,",
    "    MinMaxObserver,",
    "    MovingAverageMinMaxObserver,",
    "    PlaceholderObserver,",
    ")",
    "from torchao.quantization.pt2e.quantizer import (",
    "    FixedQParamsQuantizationSpec,",
    "    QuantizationAnnotation,",
    "    Quantizer,",
    "    SharedQuantizationSpec,",
    ")",
)

OPS_BY_NAME: Final = '''
def ops_by_name(graph):
    """The ops of a graph by module path, op and ordinal, such as layer1.0.conv1/conv2d; inputs and output by name."""
    used, output = {}, graph.output_node()
    found = {**{str(node.target): node for node in graph.find_nodes(op="placeholder")}, output.name: output}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path = stack[-1][0] if stack else ""
        before, at, call = path.rpartition("@")
        path = before if at and call.isdecimal() else path
        path = path.removeprefix("L['self']").removeprefix("L__self__").removeprefix("_export_root").removeprefix(".")
        schema = getattr(node.target, "_schema", None)
        op = (schema.name.split("::")[1] if schema else node.target.__name__).removesuffix("_")
        stem = f"{path}/{op}" if path else op
        used[stem] = ordinal = used.get(stem, -1) + 1
        found[f"{stem}_{ordinal}" if ordinal else stem] = node
    return found
'''

SOURCE: Final = (
    OPS_BY_NAME
    + '''

def specs_of(graph):
    """Every annotated output (a node) and input (producer and reader) with its spec."""
    specs = {}
    for node in graph.nodes:
        annotation = node.meta.get("quantization_annotation")
        if annotation is not None:
            inputs = annotation.input_qspec_map.items()
            specs.update({(source, node): spec for source, spec in inputs if spec is not None})
            if annotation.output_qspec is not None:
                specs[node] = annotation.output_qspec
    return specs


def root_of(specs, point):
    """The point at the end of a chain of shared specs."""
    while isinstance(specs.get(point), SharedQuantizationSpec):
        point = specs[point].edge_or_node
    return point


def put(point, spec):
    """Sets or removes a spec; a node without specs loses its annotation."""
    source, reader = point if isinstance(point, tuple) else (None, point)
    annotation = reader.meta.setdefault("quantization_annotation", QuantizationAnnotation(_annotated=True))
    if source is None:
        annotation.output_qspec = spec
    elif spec is None:
        annotation.input_qspec_map.pop(source, None)
    else:
        annotation.input_qspec_map[source] = spec
    if annotation.output_qspec is None and not any(annotation.input_qspec_map.values()):
        del reader.meta["quantization_annotation"]


def remove(graph, gone):
    """Removes specs; points that shared a scale with them still share one among themselves."""
    specs, first = specs_of(graph), {}
    for point, spec in specs.items():
        root = root_of(specs, point)
        if point in gone:
            put(point, None)
        elif root in gone and root not in first:
            first[root] = point
            put(point, specs[root])
        elif isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node in gone:
            put(point, SharedQuantizationSpec(first.get(root, root)))


def points_of(graph, node):
    """The points in a node's own annotation."""
    return [point for point in specs_of(graph) if (point[1] if isinstance(point, tuple) else point) is node]


def activations(graph, node):
    """The points of a node that are not weights or biases."""
    points = points_of(graph, node)
    return [point for point in points if not isinstance(point, tuple) or point[0].op != "get_attr"]


def leave_in_float(graph, ops):
    """Removes the annotations of the ops' inputs, weights and outputs."""
    remove(graph, {point for node in ops for point in points_of(graph, node)})


def fuse(graph, first, second):
    """Rounds only after the second op, which must be the only reader of the first."""
    specs = specs_of(graph)
    between = [point for point in (first, (first, second)) if point in specs]
    spec = specs[root_of(specs, between[0])]
    remove(graph, set(between))
    if second not in specs_of(graph):
        put(second, spec)


def change(graph, points, how):
    """Changes the specs of some points; points that shared with them do not change."""
    before, first = specs_of(graph), {}
    remove(graph, set(points))
    for point in points:
        root = root_of(before, point)
        put(point, SharedQuantizationSpec(first[root]) if root in first else how(before[root]))
        first.setdefault(root, point)


def epsilon(spec):
    """The quantizer's lower limit for scales."""
    keywords = getattr(getattr(spec.observer_or_fake_quant_ctr, "p", None), "keywords", {})
    return {name: value for name, value in keywords.items() if name == "eps"}


def make_dynamic(graph, ops):
    """Inputs get their scale from each batch; outputs stay in float."""

    def dynamic(spec):
        observer = PlaceholderObserver.with_args(**epsilon(spec))
        return replace(spec, is_dynamic=True, observer_or_fake_quant_ctr=observer)

    for node in ops:
        weighted = any(isinstance(point, tuple) and point[0].op == "get_attr" for point in points_of(graph, node))
        inputs = [point for point in activations(graph, node) if isinstance(point, tuple)]
        if weighted:
            change(graph, inputs, dynamic)
        remove(graph, {node} if weighted else {*inputs, node})


def make_int16(graph, ops):
    """Inputs and outputs are int16."""

    def wider(spec):
        lowest = -32767 if spec.qscheme is torch.per_tensor_symmetric else -32768
        return replace(spec, dtype=torch.int16, quant_min=lowest, quant_max=32767)

    change(graph, [point for node in ops for point in activations(graph, node)], wider)


def set_observer(graph, ops, observer):
    """Sets the observer of the ops' inputs and outputs."""
    sources = {point[0] if isinstance(point, tuple) else point for n in ops for point in activations(graph, n)}
    specs = specs_of(graph)
    values = [point for point in specs if (point[0] if isinstance(point, tuple) else point) in sources]
    for point in {root_of(specs, point): None for point in values}:
        put(point, replace(specs[point], observer_or_fake_quant_ctr=observer.with_args(**epsilon(specs[point]))))


def set_range(graph, ops, scale, zero_point):
    """Fixes the scale of the ops' outputs, and of what shares it: by reference, or as one value with equal specs."""
    compared = ("dtype", "is_dynamic", "quant_min", "quant_max", "qscheme", "ch_axis", "scale", "zero_point")
    specs, groups, alike = specs_of(graph), {}, {}
    for point in specs:
        root = root_of(specs, point)
        source = point[0] if isinstance(point, tuple) else point
        asks = (source, *(getattr(specs[root], name, None) for name in compared))
        together = {point}.union(*(groups.get(other, {other}) for other in (root, alike.setdefault(asks, point))))
        groups.update(dict.fromkeys(together, together))
    values = [point for point in specs if (point[0] if isinstance(point, tuple) else point) in ops]
    for point in {root_of(specs, member): None for value in values for member in groups[value]}:
        spec, limits = specs[point], torch.iinfo(specs[point].dtype)
        low = limits.min if spec.quant_min is None else spec.quant_min
        high = limits.max if spec.quant_max is None else spec.quant_max
        put(point, FixedQParamsQuantizationSpec(spec.dtype, scale, zero_point, low, high, spec.qscheme))


class Edited(Quantizer):
    """Edits the annotations of another quantizer."""

    def __init__(self, quantizer):
        super().__init__()
        self.quantizer = quantizer

    def transform_for_annotation(self, model):
        return self.quantizer.transform_for_annotation(model)

    def annotate(self, model):
        self.quantizer.annotate(model)
        graph, ops = model.graph, ops_by_name(model.graph)
{edits}
        return model

    def validate(self, model):
        self.quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model, observers):
        self.quantizer.prepare_obs_or_fq_callback(model, observers)
'''
)
"""Everything that an edited quantizer may need; unused parts are removed."""
