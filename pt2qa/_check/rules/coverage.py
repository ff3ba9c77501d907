"""How much of a model is quantized, and what stays in float or unfused."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from pt2qa._check.context import CheckContext, UnavailableError
from pt2qa._check.products import Product
from pt2qa._check.rounding import own_spec, spec_read
from pt2qa._simulator.products import CONVOLUTIONS, OPAQUE, RECURRENT, WEIGHTED
from pt2qa.overrides import Annotations, fusions_in
from pt2qa.overrides.edits import BATCH_NORMS
from pt2qa.overrides.points import OUTPUT, GraphNode
from pt2qa.plugins import DoesNotApplyError, Found, modules_of
from pt2qa.plugins.rules import rule


@rule(
    severity="error",
    title="nothing that costs time is quantized",
    why="What costs time runs in float, so that comparing it shows little error or none. Common reasons are a "
    "program that torch.export wrote so that the quantizer finds no op, a forward under torch.no_grad(), whose ops are "
    "in a nested graph, and a quantizer without settings.",
    fix="quantize the graph of pt2qa.capture(model, args), which takes such regions apart and says of every op what it "
    "stands for; then see that the quantizer has settings (set_global) and that its filters match",
)
def no_coverage(context: CheckContext) -> Iterator[Found]:
    """A model without a quantized matrix product."""
    products = context.products
    if any(product.state != "float" for product in products):
        return
    kinds = ", ".join(f"{count} {op}" for op, count in Counter(product.op for product in products).items())
    macs = sum(product.macs for product in products)
    owners = list(dict.fromkeys(product.owner for product in products))
    nested = f"; they stand inside {', '.join(owners)}, whose graph no quantizer enters" if all(owners) else ""
    why = f"0 % is quantized: {kinds} with {macs:,} multiply-adds stay in float{nested}"
    rounds = context.given == "pair" and bool(context.pair.sites)
    yield Found("", f"{why}; only other ops are rounded" if rounds else why)


@rule(
    severity="note",
    title="how much of each kind of op is quantized",
    why="Eligible is what multiplies matrices: convolutions, linears, matmul, attention, recurrent ops. Their "
    "multiply-adds are counted for the example inputs.",
    fix="float-op, half-quantized and the rules on opaque ops name what is left, and the reasons",
)
def coverage(context: CheckContext) -> Iterator[Found]:
    """The counts by kind of op, and their share of the multiply-adds, unless all are quantized."""
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
    words += [f"{len(quantized)} {'converted' if is_converted else 'with inputs and weights rounded'}"]
    return f"{', '.join(words)}; these do {covered:.1%} of the model's multiply-adds, all of them {share:.1%}"


@rule(
    severity="warning",
    title="only a part of what is multiplied is rounded",
    why="The rounding costs accuracy, and the op still runs in float: that a value is dequantized for an op does not "
    "mean that the op is quantized.",
    fix="have its other operand quantized too (an nn.Linear instead of addmm, which is what GPT-2's Conv1D makes), or "
    'keep both in float: pt2qa.Edit("float", (name,)) for the op that asks for the rounding',
)
def half_quantized(context: CheckContext) -> Iterator[Found]:
    """Products with a rounded input and a float weight, or the other way round where others of their kind have both."""
    products = context.products
    whole = {product.op for product in products if product.state == "quantized"}
    for product in products:
        if product.state == "input only" or (product.state == "weight only" and product.op in whole):
            yield Found(product.name, _why(product), fix=_FIX_RECURRENT if product.op in RECURRENT else "")


def _why(product: Product) -> str:
    if product.state == "weight only":
        return f"the {product.op}'s weight is rounded and its input is not, so that it computes in float"
    if product.op in RECURRENT:
        return (
            f"the {product.op}'s input is rounded and its weights are not: it is one opaque op that computes in float"
        )
    return f"the {product.op}'s input is rounded and its weight is not: it computes in float"


_FIX_RECURRENT = (
    'pt2qa.capture(model, args, decompose=("lstm", "gru", "rnn")) shows its linears to the quantizer; else keep its '
    "input in float"
)

NOTABLE = 0.01
"""Share of a model's multiply-adds below which ops in float are a note: int8 at best saves three quarters of it."""


@rule(
    severity="warning",
    title="convolutions, linears and matrix products that stay in float",
    why="They cost float time and float weights, and nothing says so when the model is converted.",
    fix="see whether the quantizer has a setting for it (pt2qa quantizers lists those of the plug-ins); where its "
    "backend has no such kernel, count on its time in float",
)
def float_op(context: CheckContext) -> Iterator[Found]:
    """Products without a rounded operand, grouped by reason, the most work first."""
    products = context.products
    passed = _left_on_purpose(context, products) | _missed(context)
    callers = {name.name: name.module_type for name in context.names.values()}
    groups: dict[tuple[str, str], list[Product]] = defaultdict(list)
    for product in products:
        # The rules opaque-recurrent, opaque-attention and nested-graph say why these stay in float.
        has_a_rule = product.owner or product.op in OPAQUE
        if product.state == "float" and not has_a_rule and product.name not in passed:
            groups[_reason(product, products, callers[product.name])].append(product)
    for (why, fix), alike in groups.items():
        share = sum(product.share for product in alike)
        count = f"{len(alike)} {alike[0].op} with {share:.1%} of the model's multiply-adds"
        for product in alike:
            yield Found(product.name, f"{why}: {count}", "warning" if share >= NOTABLE else "note", fix, value=share)


def _reason(product: Product, products: Collection[Product], caller: str) -> tuple[str, str]:
    """Why a product stays in float, and what to do if that differs from the rule's advice."""
    op = product.op
    # A matrix product has no module of its own, so its caller says nothing.
    own = op in WEIGHTED and caller.lower() != op.replace("_", "")
    by = f"called by {caller}" if own and caller else ""
    alike = [other for other in products if other.op == op]
    taken = sum(other.state == "quantized" for other in alike)
    if not taken:
        return f"the quantizer takes no {op} {by}".rstrip(), ""
    if any(len(source.users) > 1 for source in product.node.all_input_nodes if source.op == "get_attr"):
        return f"the quantizer takes {taken} of {len(alike)} {op}, not every one that shares a weight", _FIX_SHARED
    return f"the quantizer takes {taken} of {len(alike)} {op}, not {f'one {by}' if by else 'this one'}", ""


def _missed(context: CheckContext) -> frozenset[str]:
    """Names of the ops that the quantizer finds only after ``pt2qa.capture``: plain-program reports them."""
    if context.given not in ("program", "graph"):
        return frozenset()
    try:
        return frozenset(context.normalised.ops.keys() - context.annotations.ops.keys())
    except UnavailableError:
        return frozenset()


def _left_on_purpose(context: CheckContext, products: Collection[Product]) -> frozenset[str]:
    """Names of the products that the user left in float, by an override or a plug-in option."""
    edits = context.value.recipe.edits if context.given == "pair" and context.value.recipe is not None else ()
    asked = {op for edit in edits if edit.kind == "float" for op in edit.ops}
    try:
        plugin = context.plugin
    except UnavailableError:
        return frozenset(asked)
    modules = {path for path, settings in getattr(plugin, "modules", {}).items() if settings is None}
    kinds = {op for op, settings in getattr(plugin, "op_types", {}).items() if settings is None}
    return frozenset(asked) | {
        product.name for product in products if product.op in kinds or modules.intersection(modules_of(product.node))
    }


_FIX_SHARED = "give each call weights of its own (copy.deepcopy of the module), or count on its time in float"

_LISTED = 4

_FREE = {"dropout", "feature_dropout", "alias", "detach", "getitem"}
"""Ops that a backend takes out, or that only name an output."""


@rule(
    severity="note",
    title="ops in float between quantized ones",
    why="Each value that comes or goes is converted, which costs time on its own, and cuts the graph of a delegate "
    "into pieces. Layer norms and activations without an int8 kernel are the usual ones.",
    fix="where the backend has a kernel, annotate the ops in the quantizer; where not, keeping their neighbours in "
    'float, too, may cost less: pt2qa.Edit("float", (name, ...)), or pt2qa.reconfigure',
    needs=("annotations",),
)
def float_island(context: CheckContext) -> Iterator[Found]:
    """Kinds of connected ops that the quantizer leaves out between rounded values, the costliest kind first."""
    annotations = context.annotations
    if not annotations.edges:
        raise DoesNotApplyError("to models of which nothing is annotated")
    places: dict[str, list[str]] = defaultdict(list)
    costs: Counter[str] = Counter()
    for island in _islands(annotations):
        read, written = _border(annotations, island)
        kinds = list(dict.fromkeys(node.op for node in island if node.op not in _FREE))
        if read and written and kinds:
            more = f" and {len(kinds) - _LISTED} more" if len(kinds) > _LISTED else ""
            what = f"{', '.join(kinds[:_LISTED])}{more} between quantized ops, with {read} dequantize"
            what += f" and {written} quantize"
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
    inside = {node.key for node in island}
    read = {
        source
        for node in island
        for source in node.inputs
        if not annotations.graph.nodes[source].constant and spec_read(annotations, source, node.key) is not None
    }
    written = {
        node.key
        for node in island
        if any(own_spec(annotations, (node.key, key)) is not None for key in node.readers if key not in inside)
    }
    return len(read - inside), len(written)


_PRODUCERS = CONVOLUTIONS | {"linear", "add", "mul", "matmul", *BATCH_NORMS}

_ACTIVATIONS = ("relu", "relu6", "hardtanh", "clamp", "leaky_relu", "hardswish", "silu", "gelu", "sigmoid", "tanh")


@rule(
    severity="warning",
    title="pairs of ops with a rounding in between that could run as one",
    why="What the second op throws away is rounded, too: before a ReLU6 the scale has to span values that are cut off "
    "right after. On EfficientNet-Lite0 fusing the 33 such pairs was worth 11 dB.",
    fix="pt2qa.reconfigure(pair, batches, target=...) tries it; by hand for all: overrides=pt2qa.OverridePlan("
    "pt2qa.overrides.fusions(capture, quantizer)), for one: "
    'pt2qa.OverridePlan((pt2qa.Edit("fuse", (first, second)),)), given to pt2qa.quantize',
    needs=("annotations",),
)
def unfused_pair(context: CheckContext) -> Iterator[Found]:
    """What the backend could fuse, and what the quantizer itself fuses elsewhere."""
    annotations = context.annotations
    nodes = {node.name: node for node in annotations.graph.nodes.values()}
    declared = set[str]()
    for edit in fusions_in(annotations):
        first, second = (nodes[name] for name in edit.ops)
        declared.add(first.name)
        yield Found(
            first.name,
            f"is rounded before the {_label(second, context)} that reads it; the backend runs the two as one kernel",
        )
    pairs = list(_pairs(annotations))
    fused = Counter((first.op, second.op) for first, second, rounded in pairs if not rounded)
    for first, second, rounded in pairs:
        elsewhere = fused[first.op, second.op]
        if rounded and elsewhere and first.name not in declared:
            times = f"at {elsewhere} other place{'' if elsewhere == 1 else 's'}"
            yield Found(
                first.name,
                f"is rounded before the {second.op} that reads it, while {times} the quantizer takes {first.op} and "
                f"{second.op} as one",
            )


def _label(node: GraphNode, context: CheckContext) -> str:
    """The op as people call it: a ReLU6 is a hardtanh from 0 to 6."""
    found = context.nodes.get(node.name)
    is_relu6 = found is not None and node.op == "hardtanh" and list(found.args[1:]) == [0.0, 6.0]
    return "ReLU6" if is_relu6 else node.op


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
