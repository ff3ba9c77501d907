"""How much of a model is quantized, and what stays in float or unfused."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from pt2qa._check.context import CheckContext, require
from pt2qa._check.products import Product, own_spec, spec_read
from pt2qa._check.rules.specs import NOTHING_ANNOTATED
from pt2qa._grouping import grouped
from pt2qa._report.prose import counted, few
from pt2qa._simulator.products import CONVOLUTIONS, OPAQUE, RECURRENT, WEIGHTED
from pt2qa.overrides import Annotations, fusions_in
from pt2qa.overrides.edits import BATCH_NORMS
from pt2qa.overrides.points import OUTPUT, GraphNode
from pt2qa.plugins import Found, Severity, modules_of
from pt2qa.plugins.rules import rule

_NO_KERNEL = (
    "check whether the quantizer has a setting for it (pt2qa quantizers lists those of the plug-ins); if its backend "
    "has no such kernel, expect its time in float"
)


@rule(
    severity="error",
    title="no convolution, linear or matrix product is quantized",
    why="The ops that take the time run in float, so a comparison shows little error or none. Common reasons: "
    "torch.export wrote the program so that the quantizer finds no op; forward runs under torch.no_grad(), whose ops "
    "are in a nested graph; the quantizer has no settings.",
    fix="quantize the graph of pt2qa.capture(model, args), which inlines such regions and records what each op stands "
    "for; then check that the quantizer has settings (set_global) and that its filters match",
)
def no_coverage(context: CheckContext) -> Iterator[Found]:
    products = context.products
    if any(product.state != "float" for product in products):
        return
    kinds = ", ".join(f"{count} {op}" for op, count in Counter(product.op for product in products).items())
    macs = sum(product.macs for product in products)
    owners = list(dict.fromkeys(product.owner for product in products))
    nested = f"; they are inside {', '.join(owners)}, whose graph no quantizer enters" if all(owners) else ""
    why = f"0 % is quantized: {kinds} with {macs:,} multiply-adds stay in float{nested}"
    rounds = context.given == "pair" and bool(context.pair.sites)
    exported = context.is_exported or (context.given == "pair" and context.pair.capture is None)
    yield Found("", f"{why}; only other ops are rounded" if rounds else why, fix="" if exported else _NO_KERNEL)


@rule(
    severity="note",
    title="how much of each kind of op is quantized",
    why="Eligible ops multiply matrices: convolutions, linears, matmul, attention, recurrent ops. Their multiply-adds "
    "are counted for the example inputs.",
    fix="float-op, half-quantized and the rules on opaque ops list what is left, and why",
)
def coverage(context: CheckContext) -> Iterator[Found]:
    products = context.products
    if all(product.state == "quantized" for product in products):
        return
    for op in dict.fromkeys(product.op for product in products):
        alike = [product for product in products if product.op == op]
        yield Found(op, _counts(alike, context.given == "pair"), value=sum(product.share for product in alike))


def _counts(products: Sequence[Product], is_converted: bool) -> str:
    quantized = [product for product in products if product.state == "quantized"]
    share, covered = (sum(product.share for product in some) for some in (products, quantized))
    annotated = sum(bool(product.annotated) for product in products)
    words = [f"{len(products)} eligible"]
    words += [] if products[0].annotated is None else [f"{annotated} annotated"]
    alone = sum(product.state == "weight only" for product in products)
    words += [f"{len(quantized)} {'converted' if is_converted and not alone else 'with inputs and weights rounded'}"]
    words += [f"{alone} with the weight alone rounded"] if alone else []
    return f"{', '.join(words)}; these do {covered:.1%} of the model's multiply-adds, all of them {share:.1%}"


@rule(
    severity="warning",
    title="products of which only one operand is rounded",
    why="The rounding costs accuracy, and the op still runs in float: an op that reads a dequantized value is not "
    "therefore quantized.",
    fix="quantize the other operand too (an nn.Linear instead of addmm, which GPT-2's Conv1D makes), or keep both in "
    'float: pt2qa.Edit("float", (name,)) for the op that requests the rounding',
)
def half_quantized(context: CheckContext) -> Iterator[Found]:
    products = context.products
    whole = {product.op for product in products if product.state == "quantized"}
    for product in products:
        op = product.op
        recurrent = op in RECURRENT
        if product.state == "weight only" and op in whole:
            why = f"the {op}'s weight is rounded and its input is not: it computes in float"
        elif product.state == "input only":
            own, how = ("weights are", ", as one op") if recurrent else ("weight is", "")
            why = f"the {op}'s input is rounded and its {own} not: it computes in float{how}"
        else:
            continue
        call = 'pt2qa.capture(model, args, decompose=("lstm", "gru", "rnn"))'
        fix = f"{call} shows its linears to the quantizer; otherwise keep its input in float"
        yield Found(product.name, why, fix=fix if recurrent else "")


@rule(
    severity="warning",
    title="convolutions, linears and matrix products that stay in float",
    why="They take float time and float weights, and convert does not report them.",
    fix=_NO_KERNEL,
)
def float_op(context: CheckContext) -> Iterator[Found]:
    products = context.products
    passed = _left_on_purpose(context, products) | _missed(context)
    callers = {name.name: name.module_type for name in context.names.values()}
    # The rules opaque-recurrent, opaque-attention and nested-graph say why the others stay in float.
    own = [each for each in products if each.state == "float" and not each.owner and each.op not in OPAQUE]
    reasons = ((_reason(each, products, callers[each.name]), each) for each in own if each.name not in passed)
    for (why, fix), alike in grouped(reasons).items():
        share = sum(product.share for product in alike)
        count = f"{len(alike)} {alike[0].op} with {share:.1%} of the model's multiply-adds"
        # Where int8 saves three quarters of 1 % at best, it is a note.
        severity: Severity = "warning" if share >= 0.01 else "note"
        yield from (Found(product.name, f"{why}: {count}", severity, fix, value=share) for product in alike)


def _reason(product: Product, products: Collection[Product], caller: str) -> tuple[str, str]:
    """Why a product stays in float, and what to do if that differs from the rule's advice."""
    op = product.op
    # A matrix product has no module of its own, so its caller says nothing.
    own = op in WEIGHTED and caller.lower() != op.replace("_", "")
    by = f"called by {caller}" if own and caller else ""
    alike = [other for other in products if other.op == op]
    taken = sum(other.state == "quantized" for other in alike)
    if not taken:
        return f"no {f'{op} {by}'.rstrip()} is quantized", ""
    if any(len(source.users) > 1 for source in product.node.all_input_nodes if source.op == "get_attr"):
        return f"{taken} of {len(alike)} {op} are quantized, but not all that share a weight", (
            "give each call weights of its own (copy.deepcopy of the module), or expect its time in float"
        )
    return f"{taken} of {len(alike)} {op} are quantized, but not {f'one {by}' if by else 'this one'}", ""


def _missed(context: CheckContext) -> frozenset[str]:
    """Names of the ops that the quantizer finds only after ``pt2qa.capture``: plain-program reports them."""
    if not context.is_exported:
        return frozenset()
    after, before = context.known("normalised"), context.known("annotations")
    return frozenset(after.ops.keys() - before.ops.keys()) if after and before else frozenset()


def _left_on_purpose(context: CheckContext, products: Collection[Product]) -> frozenset[str]:
    """Names of the products that the user left in float, by an override or a plug-in option."""
    edits = context.value.recipe.edits if context.given == "pair" and context.value.recipe is not None else ()
    asked = {op for edit in edits if edit.kind == "float" for op in edit.ops}
    plugin = context.known("plugin")
    modules = {path for path, settings in getattr(plugin, "modules", {}).items() if settings is None}
    kinds = {op for op, settings in getattr(plugin, "op_types", {}).items() if settings is None}
    return frozenset(asked) | {
        product.name for product in products if product.op in kinds or modules.intersection(modules_of(product.node))
    }


@rule(
    severity="note",
    title="float ops between quantized ops",
    why="Each value that they read is dequantized and each that they write is quantized, which takes time and splits "
    "the graph of a delegate. Usually these are layer norms and activations without an int8 kernel.",
    fix="if the backend has a kernel, annotate the ops in the quantizer; if not, keeping their neighbours in float too "
    'may be faster: pt2qa.Edit("float", (name, ...)), or pt2qa.reconfigure',
    needs=("annotations",),
)
def float_island(context: CheckContext) -> Iterator[Found]:
    annotations = context.annotations
    require(annotations.edges, NOTHING_ANNOTATED)
    places: dict[str, list[str]] = defaultdict(list)
    costs: Counter[str] = Counter()
    for island in _islands(annotations):
        read, written = _border(annotations, island)
        # A backend takes these out, or they only name an output.
        free = ("dropout", "feature_dropout", "alias", "detach", "getitem")
        kinds = list(dict.fromkeys(node.op for node in island if node.op not in free))
        if read and written and kinds:
            what = f"{few(kinds, 4)} between quantized ops, with {read} dequantize and {written} quantize"
            places[what].append(island[0].name)
            costs[what] += read + written
    for what, names in places.items():
        times = "" if len(names) == 1 else f", at {len(names)} places, of which this is the first"
        yield Found(names[0], what + times, value=costs[what])


def _islands(annotations: Annotations) -> Iterator[list[GraphNode]]:
    """Sets of connected ops without an annotation, each in graph order."""
    nodes = annotations.graph.nodes
    loose = {key for key, node in nodes.items() if not node.constant and node.op not in ("input", OUTPUT)}
    loose -= {reader or source for source, reader in annotations.specs}
    while loose:
        open_keys, island = [next(key for key in nodes if key in loose)], set[str]()
        while open_keys:
            key = open_keys.pop()
            if key in loose:
                loose.remove(key)
                island.add(key)
                open_keys += [*nodes[key].inputs, *nodes[key].readers]
        yield [node for key, node in nodes.items() if key in island]


def _border(annotations: Annotations, island: list[GraphNode]) -> tuple[int, int]:
    """How many rounded values the ops of an island read, and how many of their outputs others read rounded."""
    nodes, inside = annotations.graph.nodes, {node.key for node in island}
    edges = [(key, node.key) for node in island for key in node.inputs if key not in inside and not nodes[key].constant]
    out = [(node.key, key) for node in island for key in node.readers if key not in inside]
    read = {source for source, reader in edges if spec_read(annotations, source, reader) is not None}
    return len(read), len({point[0] for point in out if own_spec(annotations, point) is not None})


_PRODUCERS = CONVOLUTIONS | {"linear", "add", "mul", "matmul", *BATCH_NORMS}

_ACTIVATIONS = ("relu", "relu6", "hardtanh", "clamp", "leaky_relu", "hardswish", "silu", "gelu", "sigmoid", "tanh")


@rule(
    severity="warning",
    title="values rounded between two ops that could run as one",
    why="Values that the second op removes are rounded too: before a ReLU6, the scale has to cover values that are "
    "clamped next. Fusing the 33 such pairs of EfficientNet-Lite0 gained 11 dB.",
    fix="pt2qa.reconfigure(pair, batches, target=...) tries it; by hand for all pairs: "
    "overrides=pt2qa.OverridePlan(pt2qa.overrides.fusions(capture, quantizer)), for one: "
    'pt2qa.OverridePlan((pt2qa.Edit("fuse", (first, second)),)), passed to pt2qa.quantize',
    needs=("annotations",),
)
def unfused_pair(context: CheckContext) -> Iterator[Found]:
    annotations = context.annotations
    nodes = {node.name: node for node in annotations.graph.nodes.values()}
    declared = set[str]()
    for edit in fusions_in(annotations):
        first, second = (nodes[name] for name in edit.ops)
        declared.add(first.name)
        found = context.nodes.get(second.name)
        # People call a hardtanh from 0 to 6 a ReLU6.
        is_relu6 = found is not None and second.op == "hardtanh" and list(found.args[1:]) == [0.0, 6.0]
        reader = "ReLU6" if is_relu6 else second.op
        yield Found(first.name, f"is rounded before the {reader} that reads it; the backend has one kernel for both")
    pairs = list(_pairs(annotations))
    fused = Counter((first.op, second.op) for first, second, rounded in pairs if not rounded)
    for first, second, rounded in pairs:
        elsewhere = fused[first.op, second.op]
        if rounded and elsewhere and first.name not in declared:
            why = f"is rounded before the {second.op} that reads it; the quantizer fuses {first.op} and {second.op}"
            yield Found(first.name, f"{why} at {counted(elsewhere, 'other place')}")


def _pairs(annotations: Annotations) -> Iterator[tuple[GraphNode, GraphNode, bool]]:
    """An annotated op and the activation that is its only reader; whether its output is rounded in between."""
    nodes = annotations.graph.nodes
    for first in nodes.values():
        if first.op not in _PRODUCERS or first.name not in annotations.ops or len(first.readers) != 1:
            continue
        second = nodes[first.readers[0]]
        if second.op in _ACTIVATIONS:
            rounded = spec_read(annotations, first.key, second.key) is not None
            # Nothing is rounded between two float ops, either.
            if rounded or own_spec(annotations, (second.key, "")) is not None:
                yield first, second, rounded
