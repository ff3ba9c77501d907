"""Rules on products at their limits, the arithmetic that they count, and what a report makes of findings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._check.analysis import _listed
from pt2qa._check.products import Product, integer_products, multiply_adds, products_of
from pt2qa._check.report import Finding, Findings, RuleOutcome, errors_first
from pt2qa._check.rules import coverage
from pt2qa._report.rows import Environment
from pt2qa._weights.sums import SumsOfWeights
from pt2qa.plugins import Found, Rule
from tests.check.plain_quantizer import AFFINE, EXACT, PlainQuantizer
from tests.flows import quantized_pair


def node(*sources: Any, name: str = "n", **meta: Any) -> Any:
    return SimpleNamespace(name=name, all_input_nodes=sources, op="call_function", users={1: None}, meta=meta)


def product(name: str, state: str = "float", op: str = "linear", share: float = 0.25, **given: Any) -> Any:
    own = {"node": node(), "macs": int(4000 * share), "owner": "", "annotated": state != "float", **given}
    return Product(name=name, op=op, share=share, state=state, **own)  # type: ignore[arg-type]


class Context(SimpleNamespace):
    def known(self, what: str) -> Any:
        return getattr(self, what, None)


def of(rule: Rule, *products: Any, **given: Any) -> list[Found]:
    names = {number: SimpleNamespace(name=each.name, module_type="Linear") for number, each in enumerate(products)}
    own = {"products": products, "given": "capture", "names": names, "is_exported": False, "value": None}
    return list(rule.find(Context(**{**own, **given})))


def test_no_coverage_counts_what_stays_in_float() -> None:
    products = (product("a"), product("b"), product("c", op="matmul", share=0.5))
    (found,) = of(coverage.no_coverage, *products)
    assert (found.name, found.why) == (
        "",
        "0 % is quantized: 2 linear, 1 matmul with 4,000 multiply-adds stay in float",
    )
    for state in ("quantized", "input only", "weight only"):
        assert of(coverage.no_coverage, *products, product("d", state)) == []
    inside = [replace(each, owner=owner) for each, owner in zip(products, ("cond", "loop", "cond"), strict=True)]
    (found,) = of(coverage.no_coverage, *inside)
    assert found.why.endswith("stay in float; they are inside cond, loop, whose graph no quantizer enters")
    (found,) = of(coverage.no_coverage, *inside, product("d"))
    assert "inside" not in found.why
    pair = {"given": "pair", "pair": SimpleNamespace(sites=["a site"], capture=None)}
    assert of(coverage.no_coverage, *products, **pair)[0].why.endswith("stay in float; only other ops are rounded")
    assert of(coverage.no_coverage, *products, **pair)[0].fix == ""
    empty = {"given": "pair", "pair": SimpleNamespace(sites=[], capture=object())}
    (found,) = of(coverage.no_coverage, *products, **empty)
    assert found.why.endswith("stay in float")
    assert found.fix.startswith("check whether the quantizer has a setting for it")  # it is captured already
    assert of(coverage.no_coverage, *products, is_exported=True)[0].fix == ""


def test_coverage_counts_each_kind_of_op() -> None:
    products = (
        *(product("a", "quantized"), product("b", "weight only", share=0.125), product("c", share=0.0625)),
        *(product("d", "quantized", "conv2d", 0.5), product("e", op="conv2d", share=0.0625)),
    )
    linear, conv = of(coverage.coverage, *products)
    assert (linear.name, conv.name) == ("linear", "conv2d")
    assert linear.why == (
        "3 eligible, 2 annotated, 1 with inputs and weights rounded, 1 with the weight alone rounded; these do 25.0% "
        "of the model's multiply-adds, all of them 43.8%"
    )
    assert linear.value == 0.4375
    assert conv.value == 0.5625
    (linear, conv) = of(coverage.coverage, *products, given="pair")
    assert "1 with inputs and weights rounded, 1 with the weight alone rounded; these do" in linear.why
    assert "1 converted; these do" in conv.why
    unknown = [replace(each, annotated=None) for each in products]
    assert of(coverage.coverage, *unknown)[0].why.startswith("3 eligible, 1 with inputs and weights rounded")
    assert of(coverage.coverage, products[0], products[3]) == []


def test_half_of_a_product_is_told_by_its_half() -> None:
    quantized = product("q", "quantized")
    computes = "it computes in float"
    assert of(coverage.half_quantized, quantized, product("f")) == []
    (found,) = of(coverage.half_quantized, quantized, product("w", "weight only"))
    assert (found.name, found.why) == ("w", f"the linear's weight is rounded and its input is not: {computes}")
    assert found.fix == ""
    assert of(coverage.half_quantized, product("w", "weight only")) == []  # as weight-only quantizers do
    other = product("q", "quantized", "conv2d")
    assert of(coverage.half_quantized, other, product("w", "weight only")) == []
    (found,) = of(coverage.half_quantized, product("i", "input only"))
    assert found.why == f"the linear's input is rounded and its weight is not: {computes}"
    (found,) = of(coverage.half_quantized, product("i", "input only", "lstm"))
    assert found.why == f"the lstm's input is rounded and its weights are not: {computes}, as one op"
    assert found.fix == (
        'pt2qa.capture(model, args, decompose=("lstm", "gru", "rnn")) shows its linears to the quantizer; otherwise '
        "keep its input in float"
    )


def test_products_in_float_are_told_by_reason_and_share() -> None:
    small, large = product("s", share=0.0099), product("l", share=0.01, op="matmul")
    first, second = of(coverage.float_op, small, large)
    assert (first.why, first.severity) == (
        "no linear is quantized: 1 linear with 1.0% of the model's multiply-adds",
        "note",
    )
    assert (second.severity, second.value) == ("warning", 0.01)
    quantized = product("q", "quantized")
    (found,) = of(coverage.float_op, quantized, product("f", share=0.5))
    assert found.why == (
        "1 of 2 linear are quantized, but not this one: 1 linear with 50.0% of the model's multiply-adds"
    )
    assert (found.name, found.fix, found.value) == ("f", "", 0.5)
    shared = node(SimpleNamespace(op="get_attr", users={1: None, 2: None}))
    (found,) = of(coverage.float_op, quantized, product("f", node=shared))
    assert found.why.startswith("1 of 2 linear are quantized, but not all that share a weight: 1 linear")
    assert found.fix.startswith("give each call weights of its own")
    for quiet in (product("f", owner="cond"), product("f", op="lstm"), product("f", "weight only")):
        assert of(coverage.float_op, quantized, quiet) == []
    two = of(coverage.float_op, product("a", share=0.25), product("b", share=0.5))
    assert {each.why for each in two} == {"no linear is quantized: 2 linear with 75.0% of the model's multiply-adds"}
    assert {each.value for each in two} == {0.75}


def test_the_caller_of_an_op_is_named_where_it_says_more() -> None:
    def reason(caller: str, op: str = "conv2d", others: tuple[Any, ...] = ()) -> str:
        one = product("a", op=op)
        return coverage._reason(one, (one, *others), caller)[0]

    assert reason("Conv2d") == "no conv2d is quantized"
    assert reason("MyConv") == "no conv2d called by MyConv is quantized"
    assert reason("") == "no conv2d is quantized"
    assert reason("Attention", "matmul") == "no matmul is quantized"
    assert reason("ConvTranspose2d", "conv_transpose2d") == "no conv_transpose2d is quantized"
    quantized = (product("q", "quantized", "conv2d"),)
    assert reason("MyConv", others=quantized) == "1 of 2 conv2d are quantized, but not one called by MyConv"
    assert reason("Conv2d", others=quantized) == "1 of 2 conv2d are quantized, but not this one"


def test_what_the_user_left_in_float_is_quiet() -> None:
    one, two = product("a"), product("b", op="conv2d")
    edits = [SimpleNamespace(kind="float", ops=("a",)), SimpleNamespace(kind="int16", ops=("b",))]
    value = SimpleNamespace(recipe=SimpleNamespace(edits=edits))
    assert [each.name for each in of(coverage.float_op, one, two, given="pair", value=value)] == ["b"]
    assert len(of(coverage.float_op, one, two, given="pair", value=SimpleNamespace(recipe=None))) == 2
    plugin = SimpleNamespace(op_types={"linear": None, "conv2d": "int8"})
    assert [each.name for each in of(coverage.float_op, one, two, plugin=plugin)] == ["b"]


def test_what_capture_would_show_the_quantizer_is_another_rules() -> None:
    here, there = SimpleNamespace(ops={"q": 1}), SimpleNamespace(ops={"q": 1, "a": 1})
    given = {"is_exported": True, "normalised": there, "annotations": here}
    assert [each.name for each in of(coverage.float_op, product("a"), product("b"), **given)] == ["b"]
    assert len(of(coverage.float_op, product("a"), product("b"), **{**given, "is_exported": False})) == 2
    assert len(of(coverage.float_op, product("a"), product("b"), **{**given, "normalised": None})) == 2


class Products(nn.Module):
    """One of each kind, and a nested graph."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 2, 2, bias=False)
        self.fc, self.head = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.conv(x))  # 4 channels of 4 x 4, then 2 of 5 x 5
        x = self.fc(x)
        y = torch.cond(x.sum() > 0, lambda x: self.head(x), lambda x: x + 1, (x.flatten(0, 2),))
        return x @ x.transpose(-1, -2) + y.sum()


def test_arithmetic_is_counted_by_hand() -> None:
    capture = pt2qa.capture(Products().eval(), torch.randn(2, 2, 6, 6))
    found = {each.name: each for each in products_of(capture.module(), capture.names, None, None)}
    macs = {each.op: each.macs for each in found.values() if not each.owner}
    assert macs == {
        "conv2d": 2 * 4 * 4 * 4 * 2 * 9,
        "conv_transpose2d": 2 * 4 * 4 * 4 * 2 * 4,
        "linear": 2 * 2 * 5 * 5 * 3,
        "matmul": 2 * 2 * 5 * 5 * 3,
    }
    (inner,) = (each for each in found.values() if each.owner)
    assert (inner.op, inner.macs) == ("linear", 2 * 2 * 5 * 3 * 3)
    assert inner.owner.startswith("cond")
    total = sum(macs.values()) + inner.macs
    assert {each.share for each in found.values()} == {each.macs / total for each in found.values()}
    assert {each.annotated for each in found.values()} == {None}
    assert {each.state for each in found.values()} == {"float"}
    graph = torch.fx.Graph()
    assert multiply_adds(graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))) == 0


class Reads(nn.Module):
    """What follows each linear: nothing, a rounded relu, two rounded ops; a product, whose output is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a(x)
        return self.b(y.relu()), y.tanh()


def test_integer_products_have_the_scales_around_them() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    quantizer = PlainQuantizer(("linear", "tanh"), inputs=AFFINE, outputs=None, int32_bias=True)
    pair = quantized_pair(Reads(), x, quantizer)
    sites = {(site.kind, site.name): site.params for site in pair.sites}
    a, b = integer_products(pair, SumsOfWeights())
    assert (a.name, b.name) == ("a/linear", "b/linear")
    for each, given in ((a, "x"), (b, "relu")):
        assert each.input_params == sites["activation", given]
        assert each.weight_params == sites["weight", each.name]
        assert each.bias_params == sites["bias", each.name]
        assert each.bias is not None
        assert each.channel_axis == 0
    names = {site.name: site.params.largest_scale for site in pair.sites if site.kind == "activation"}
    readers = [scale for name, scale in names.items() if name != "x"]
    assert a.output_scale == max(readers)
    assert b.output_scale != b.output_scale  # it stays in float
    rounded = quantized_pair(Reads(), x, PlainQuantizer(("linear",), inputs=EXACT, outputs=EXACT))
    own = {site.name: site.params.largest_scale for site in rounded.sites if site.kind == "activation"}
    a, b = integer_products(rounded, SumsOfWeights())
    assert (a.output_scale, b.output_scale) == (own["a/linear"], own["b/linear"])
    assert a.bias_params is None


def finding(rule: str, severity: str = "warning", name: str = "a", **given: Any) -> Finding:
    own = {"source": "", "why": "why", "fix": "fix", "value": 0.0, **given}
    return Finding(rule, severity, name, **own)  # type: ignore[arg-type]


def outcome(rule: str, what: str = "found", count: int = 1, silenced: int = 0, reason: str = "") -> RuleOutcome:
    return RuleOutcome(rule, f"title of {rule}", what, count, silenced, reason)  # type: ignore[arg-type]


def findings(*rows: Finding, rules: tuple[RuleOutcome, ...] = (), **given: Any) -> Findings:
    own = {
        "checked": ("model",),
        "quantizer": "xnnpack",
        "model": "Net",
        "environment": Environment.here(""),
        "notes": (),
    }
    return Findings(rows=rows, rules=rules, **{**own, **given})


def test_rules_with_an_error_come_first_then_their_order() -> None:
    rows = [
        finding("a"),
        finding("b", "note"),
        finding("c"),
        finding("c", "error"),
        finding("?"),
        finding("b", "note", "z"),
    ]
    ordered = errors_first(rows, ["b", "a", "c"])
    assert [(row.rule, row.severity, row.name) for row in ordered] == [
        *(("c", "warning", "a"), ("c", "error", "a"), ("a", "warning", "a"), ("?", "warning", "a")),
        *(("b", "note", "a"), ("b", "note", "z")),
    ]


def test_findings_are_counted_and_found() -> None:
    made = findings(finding("a", "error"), finding("b", "note"), finding("b", "note", "b"), finding("c"))
    assert (made.error_count, made.warning_count, made.note_count, len(made)) == (1, 1, 2, 4)
    assert [row.name for row in made.of("b")] == ["a", "b"]
    assert repr(made) == "<Findings of Net: 1 error, 1 warning, 2 notes>"
    grades = [findings(*rows).grade() for rows in ((), made.rows[1:2], made.rows[3:], made.rows)]
    assert grades == ["good", "good", "warning", "bad"]
    assert list(made) == list(made.rows)


def test_the_summary_says_what_was_looked_at() -> None:
    rules = (
        *(outcome("a", silenced=2), outcome("b", "clear", 0), outcome("c", "clear", 0, 1)),
        *(outcome("d", "not applied", 0, 0, "without a pair"), outcome("e", "not applied", 0, 0, "without a pair")),
        outcome("f", "failed", 0, 0, "ValueError: no"),
    )
    made = findings(finding("a"), rules=rules, checked=("model", "graph"))
    expected = [
        "Looked at model, graph. 2 rules found nothing, 2 not applied, 3 findings silenced.",
        "Not applied, without a pair: 2, such as d.",
        "Failed, please report it: f: ValueError: no",
    ]
    assert list(made._summary()) == expected
    assert list(made.lines())[:4] == ["0 errors, 1 warning, 0 notes.", *expected]
    assert findings(checked=()).lines()[1].startswith("Looked at nothing. 0 rules found nothing, 0 not applied, 0 ")
    assert str(made).startswith("Check of Net with xnnpack: 0 errors, 1 warning, 0 notes")
    assert str(findings(quantizer="")).startswith("Check of Net: 0 errors")


def test_findings_are_printed_by_rule_with_one_fix() -> None:
    rows = [finding("a", name=name, source=source) for name, source in (("x", "net.py:1"), ("y", ""), ("", "net.py:2"))]
    rows += [finding("b", "note", "", why="of the whole"), finding("b", "note", "z", fix="another", value=2.0)]
    made = findings(*rows, rules=(outcome("a"), outcome("b")))
    text = made.text(width=100)
    assert "WARNING a (3): title of a\n  x (net.py:1), y, net.py:2: why\n  -> fix" in text
    assert "NOTE b (2): title of b\n  of the whole\n    -> fix\n  z: why\n    -> another" in text
    short = made.text(width=100, limit=2)
    assert "WARNING a (3): title of a\n  x (net.py:1), y: why\n  and 1 more\n  -> fix" in short
    one, two = made.groups()
    assert (one.name, one.severity, one.title, one.fix) == ("a", "warning", "title of a", "fix")
    assert (two.fix, len(two.rows)) == ("", 2)
    assert [row.name for row in made.groups("value")[1].rows] in (["z", ""], ["", "z"])
    assert [row.name for row in made.groups("name")[0].rows] == ["", "x", "y"]
    assert [row.name for row in made.groups("graph")[0].rows] == ["x", "y", ""]
    assert findings(finding("?")).groups()[0].title == "unknown to this report"


def test_earlier_findings_are_kept_of_rules_that_now_did_not_apply() -> None:
    before = findings(
        *(finding("a", name="old"), finding("b", name="old"), finding("c", "error", name="old")),
        rules=(outcome("a"), outcome("b"), outcome("c"), outcome("d", "not applied", 0, 0, "once")),
        checked=("model", "graph"),
    )
    idle = [outcome(rule, "not applied", 0, 0, "now") for rule in ("b", "c", "d")]
    after = findings(finding("a", name="new"), rules=(outcome("a"), *idle), checked=("pair", "graph"))
    joined = after.joined(before)
    assert [(row.rule, row.name) for row in joined] == [("c", "old"), ("a", "new"), ("b", "old")]
    assert [(each.rule, each.outcome, each.reason) for each in joined.rules] == [
        *(("a", "found", ""), ("b", "found", ""), ("c", "found", ""), ("d", "not applied", "now")),
    ]
    assert joined.checked == ("pair", "graph", "model")


def test_one_name_is_a_list_of_one() -> None:
    assert _listed("a") == ["a"]
    assert _listed(("a", "b")) == ["a", "b"]
