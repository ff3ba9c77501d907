"""Matrix products that stay in float, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from torch.fx import Node

from pt2qa._check.context import CheckContext, UnavailableError
from pt2qa._check.products import Product
from pt2qa._simulator.products import OPAQUE, WEIGHTED
from pt2qa.plugins import Found, Rule, modules_of

NOTABLE = 0.01
"""Share of a model's multiply-adds below which ops in float are a note: int8 at best saves three quarters of it."""


def find(context: CheckContext) -> Iterator[Found]:
    """Products of which nothing is rounded, those with the same reason together, the most work first."""
    products = context.products
    passed = _left_on_purpose(context, products) | _missed(context)
    callers = {name.name: name.module_type for name in context.names.values()}
    groups: dict[tuple[str, str], list[Product]] = defaultdict(list)
    for product in products:
        if product.state == "float" and not _has_a_rule(product) and product.name not in passed:
            groups[_reason(product, products, callers[product.name])].append(product)
    for (why, fix), alike in groups.items():
        share = sum(product.share for product in alike)
        count = f"{len(alike)} {alike[0].op} with {share:.1%} of the model's multiply-adds"
        for product in alike:
            yield Found(product.name, f"{why}: {count}", "warning" if share >= NOTABLE else "note", fix, value=share)


def _has_a_rule(product: Product) -> bool:
    """Whether opaque-recurrent, opaque-attention or nested-graph says why a product stays in float."""
    return bool(product.owner) or product.op in OPAQUE


def _reason(product: Product, products: Collection[Product], caller: str) -> tuple[str, str]:
    """Why a product stays in float, and what to do where it differs from the rule's advice."""
    op = product.op
    # A matrix product has no module of its own, so its caller says nothing.
    own = op in WEIGHTED and caller.lower() != op.replace("_", "")
    by = f"called by {caller}" if own and caller else ""
    alike = [other for other in products if other.op == op]
    taken = sum(other.state == "quantized" for other in alike)
    if not taken:
        return f"the quantizer takes no {op} {by}".rstrip(), ""
    if _readers_of_weight(product.node) > 1:
        return f"the quantizer takes {taken} of {len(alike)} {op}, not every one that shares a weight", _FIX_SHARED
    return f"the quantizer takes {taken} of {len(alike)} {op}, not {f'one {by}' if by else 'this one'}", ""


def _missed(context: CheckContext) -> frozenset[str]:
    """Names of the ops that the quantizer finds once ``pt2qa.capture`` wrote the program: plain-program names them."""
    if context.given not in ("program", "graph"):
        return frozenset()
    try:
        return frozenset(context.normalised.ops.keys() - context.annotations.ops.keys())
    except UnavailableError:
        return frozenset()


def _left_on_purpose(context: CheckContext, products: Collection[Product]) -> frozenset[str]:
    """Names of the products that the user asked to leave in float, by an edit or by an option of a plug-in."""
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


def _readers_of_weight(node: Node) -> int:
    constants = [source for source in node.all_input_nodes if source.op == "get_attr"]
    return max((len(source.users) for source in constants), default=0)


_FIX_SHARED = "give each call weights of its own (copy.deepcopy of the module), or count on its time in float"

RULE = Rule(
    id="float-op",
    severity="warning",
    title="convolutions, linears and matrix products that stay in float",
    why="They cost float time and float weights, and nothing says so when the model is converted.",
    fix="see whether the quantizer has a setting for it (pt2qa quantizers lists those of the plug-ins); where its "
    "backend has no such kernel, count on its time in float",
    find=find,
)
