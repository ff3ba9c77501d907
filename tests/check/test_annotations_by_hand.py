"""Rules on annotations: of graphs and specs that a test makes up, so that each limit is met exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from pt2qa._check.products import differing, spec_read
from pt2qa._check.rules import coverage, specs
from pt2qa.overrides.annotations import AnnotatedOp, Annotations
from pt2qa.overrides.edits import AnnotatedGraph
from pt2qa.overrides.points import Derives, GraphNode, Shares
from pt2qa.plugins import DoesNotApplyError, Found, Rule
from tests.check.quantizers import DYNAMIC, INT8, UINT8, UNIT, WEIGHT

WIDE = QuantizationSpec(torch.int16, UINT8.observer_or_fake_quant_ctr, -32768, 32767, torch.per_tensor_affine)
FLOAT = QuantizationSpec(torch.float32, UINT8.observer_or_fake_quant_ctr)


def made(
    ops: dict[str, tuple[str, ...]], points: dict[Any, Any], loose: tuple[str, ...] = (), **given: Any
) -> Annotations:
    """A graph of ops, ``name:kind`` with what each reads; those whose kind is ``weight`` are constants.

    A point is ``"a"`` for an output and ``"a>b"`` for an edge.  All ops are annotated but ``loose`` ones.
    """
    kinds = {key.partition(":")[0]: key.partition(":")[2] or "linear" for key in ops}
    inputs = {key.partition(":")[0]: read for key, read in ops.items()}
    constants = given.get("constants", {name for name, kind in kinds.items() if kind == "weight"})
    nodes = {
        name: GraphNode(
            key=name,
            name=name.upper(),
            owner="",
            op=kinds[name],
            constant=name in constants,
            moves=False,
            is_parameter=False,
            is_tensor=name not in given.get("lists", ()),
            dtype=given.get("dtypes", {}).get(name, "float32"),
            inputs={source: at for at, source in enumerate(read)},
            reads=tuple(enumerate(read)),
            readers=tuple(dict.fromkeys(other for other, sources in inputs.items() if name in sources)),
        )
        for name, read in inputs.items()
    }
    named = {name.upper(): AnnotatedOp(name.upper(), kinds[name], ("float",)) for name in kinds if name not in loose}
    own = {(*point.split(">"), "")[:2]: spec for point, spec in points.items()}
    graph = AnnotatedGraph(nodes, given.get("refusals", {}), given.get("fusable"), "made up", False)
    return Annotations(own, graph, named, frozenset(named))  # type: ignore[arg-type]


def of(rule: Rule, annotations: Annotations, **given: Any) -> list[Found]:
    own = {"annotations": annotations, "unshared": frozenset(), "nodes": {}, "plugin": None}
    return list(rule.find(SimpleNamespace(**{**own, **given})))


def whys(rule: Rule, annotations: Annotations, **given: Any) -> dict[str, str]:
    return {found.name: found.why for found in of(rule, annotations, **given)}


CHAIN = {"x:input": (), "w:weight": (), "a": ("x", "w"), "b:relu": ("a",), "c:view": ("b",)}


def test_shared_scales_lead_somewhere() -> None:
    fine = made(CHAIN, {"x>a": INT8, "a": Shares(("x", "a")), "b": Shares(("a", ""))})
    assert of(specs.broken_share, fine) == []
    with pytest.raises(DoesNotApplyError, match="to annotations without shared scales"):
        of(specs.broken_share, made(CHAIN, {"x>a": INT8}))
    missing = made(CHAIN, {"x>a": INT8, "a": Shares(("w", "")), "b": Shares(("a", ""))})
    (found,) = of(specs.broken_share, missing)  # each once
    assert (found.name, found.why) == (
        *("A", "shares the scale of a value that is not annotated: the output of A -> the output of W"),
    )
    assert found.fix == "in the quantizer, annotate the edge or output that SharedQuantizationSpec names"
    cycle = made(CHAIN, {"x>a": Shares(("b", "")), "a": Shares(("x", "a")), "b": Shares(("a", ""))})
    (found,) = of(specs.broken_share, cycle)
    assert (found.name, found.why) == (
        "A",
        "shares its scale in a cycle: X, as A reads it -> the output of B -> the output of A -> X, as A reads it",
    )
    assert found.fix == "in the quantizer, give one value of the cycle a QuantizationSpec of its own"
    later = made(CHAIN, {"x>a": Shares(("a", "")), "a": INT8})
    (found,) = of(specs.broken_share, later)
    assert (found.name, found.fix) == ("A", "")
    assert found.why == (
        "shares the scale of a value that comes later in the graph: X, as A reads it -> the output of A"
    )
    own = made(CHAIN, {"x>a": Shares(("x", "a"))})
    (found,) = of(specs.broken_share, own)
    assert found.why.startswith("shares its scale in a cycle: X, as A reads it -> X, as A reads it")


def test_derived_scales_come_from_values_before() -> None:
    def derived(*sources: tuple[str, str]) -> dict[str, str]:
        points = {"x>a": INT8, "w>a": Derives(INT8, sources), "a": INT8}
        return whys(specs.broken_share, made(CHAIN, points))

    assert derived(("x", "a")) == {}
    assert derived(("x", "a"), ("a", "")) == {
        "A": "derives its scale from a value that comes later in the graph: W, as A reads it -> the output of A"
    }
    assert derived(("b", "")) == {
        "A": "derives its scale from a value that is not annotated: W, as A reads it -> the output of B"
    }
    assert list(derived(("w", "a"))) == []  # torchao fails on that itself


MOVED = {"x:input": (), "y:input": (), "v:view": ("x",), "c:cat": ("x", "y", "v"), "l:linear": ("c",)}


def test_a_value_that_is_moved_keeps_its_scale() -> None:
    def found(points: dict[str, Any], ops: Any = MOVED, **given: Any) -> dict[str, str]:
        return whys(specs.mixed_parameters, made(ops, points), **given)

    moves = " does not change values, but its input has "
    assert found({"x>v": INT8, "v": Shares(("x", "v"))}) == {}
    assert found({"x>v": INT8, "v": UINT8}) == {
        "V": f"view{moves}another dtype and quant_max and quant_min than its output"
    }
    assert found({"x>v": INT8, "v": INT8}) == {"V": f"view{moves}another scale than its output"}
    assert found({"x>v": INT8, "v": INT8}, unshared={"V"}) == {}  # the rule backend-spec's
    assert found({"v": INT8}) == found({"x>v": INT8}) == {}
    two = {"x>c": INT8, "y>c": INT8, "v>c": INT8, "c": Shares(("x", "c"))}
    assert found(two) == {"C": "cat does not change values, but 2 of its 3 inputs have another scale than its output"}
    one = {**two, "y>c": Shares(("x", "c"))}
    assert found(one) == {"C": "cat does not change values, but 1 of its 2 inputs has another scale than its output"}
    assert found({"c>l": INT8, "l": UINT8}) == {}  # a linear changes them
    assert found({"x>v": FLOAT, "v": INT8, "c>l": INT8}) == {}
    weight = {"x:weight": (), "v:view": ("x",), "l:linear": ("v",)}
    assert whys(specs.mixed_parameters, made(weight, {"x>v": INT8, "v": UINT8}, constants={"x", "v"})) == {}
    with pytest.raises(DoesNotApplyError, match=specs.NOTHING_ANNOTATED):
        found({})


def test_an_output_that_is_rounded_again_for_a_reader() -> None:
    def found(points: dict[str, Any]) -> dict[str, str]:
        return whys(specs.mixed_parameters, made(CHAIN, points))

    again = "is rounded as an output and again for the relu that reads it: dtype and quant_min and quant_max differ"
    assert found({"a": INT8, "a>b": UINT8}) == {"A": again}
    assert found({"a": INT8, "a>b": INT8}) == {}
    assert found({"a": INT8, "a>b": FLOAT}) == {}
    assert found({"w": INT8, "w>a": UINT8}) == {}  # of a constant, only the edge counts


def test_specs_differ_by_name() -> None:
    assert differing(INT8, INT8) == ()
    assert differing(INT8, WEIGHT) == ("quant_min", "qscheme")
    assert differing(INT8, UNIT)[-2:] == ("scale", "zero_point")
    assert "is_dynamic" in differing(INT8, DYNAMIC)


def test_a_constant_may_be_rounded_before_it_is_reshaped() -> None:
    ops = {"x:input": (), "w:weight": (), "t:view": ("w",), "a": ("x", "t"), "u:view": ("x",), "b": ("u",)}
    annotations = made(ops, {"w>t": WEIGHT, "x>u": INT8, "x": UINT8}, constants={"w", "t"})
    assert spec_read(annotations, "t", "a") is WEIGHT
    assert spec_read(annotations, "u", "b") is None  # a value that is reshaped is another one
    assert spec_read(annotations, "x", "u") is INT8  # the edge before the output
    assert spec_read(annotations, "x", "a") is UINT8


SUM = {"x:input": (), "w:weight": (), "a": ("x", "w"), "b": ("x", "w"), "s:add": ("a", "b"), "r:relu": ("s",)}


def test_operands_of_a_sum_are_rounded_alike() -> None:
    def found(points: dict[str, Any], ops: Any = SUM, loose: tuple[str, ...] = ("a", "b"), **given: Any) -> Any:
        return whys(specs.residual_add, made(ops, points, loose, **given))

    assert found({"a>s": INT8, "b>s": INT8}) == found({}) == {}
    assert found({"a>s": INT8}) == {"S": "B is not rounded, but the other operand is"}
    assert found({"b>s": INT8}) == {"S": "A is not rounded, but the other operand is"}
    assert found({"b>s": INT8}, loose=("b",)) == {}  # one kernel of linear and add
    two = {**SUM, "q:relu": ("a",)}
    assert found({"b>s": INT8}, two, ("b",)) == {"S": "A is not rounded, but the other operand is"}  # that q reads
    assert found({"a>s": INT8, "b>s": UINT8}) == {"S": "its operands differ in dtype and quant_min and quant_max"}
    assert found({"a>s": INT8, "b>s": WEIGHT}) == {"S": "its operands differ in quant_min and qscheme"}
    assert found({"a>s": UINT8, "b>s": UNIT}) == {}  # the scale may differ
    with pytest.raises(DoesNotApplyError, match="to models without annotated sums or concatenations"):
        found({"a>s": INT8}, loose=("s",))
    constant = {**SUM, "s:mul": ("a", "w")}
    assert found({"a>s": INT8}, constant) == {}
    assert found({"a>s": INT8}, lists=("b",)) == {}
    three = {**SUM, "s:cat": ("a", "b", "x")}
    assert found({"a>s": INT8}, three) == {"S": "B, X is not rounded, but the other operand is"}


def test_a_batch_norm_between_op_and_sum_is_part_of_the_kernel() -> None:
    ops = {"x:input": (), "w:weight": (), "a:conv2d": ("x", "w"), "n:batch_norm": ("a",), "s:add": ("n", "x")}
    points = {"x>s": INT8}
    assert whys(specs.residual_add, made(ops, points, ("n",))) == {}
    assert list(whys(specs.residual_add, made(ops, points, ("n", "a")))) == ["S"]
    assert whys(specs.residual_add, made(ops, points)) == {}
    other = {**ops, "r:relu": ("a",)}
    assert list(whys(specs.residual_add, made(other, points, ("n",)))) == ["S"]


def test_convolutions_with_dynamic_scales() -> None:
    ops = {"x:input": (), "w:weight": (), "c:conv2d": ("x", "w"), "l:linear": ("c",)}
    dynamic = made(ops, {"x>c": DYNAMIC, "w>c": WEIGHT})
    text = {"C": "each batch sets the scale of the conv2d's input"}
    assert whys(specs.dynamic_conv, dynamic) == text
    knows = SimpleNamespace(unsupported_reason=None)
    assert whys(specs.dynamic_conv, dynamic, plugin=knows) == {}
    refused = made(ops, {"x>c": DYNAMIC}, refusals={("dynamic", "c"): "no such kernel"})
    assert whys(specs.dynamic_conv, refused, plugin=knows) == {"C": "no such kernel"}
    assert whys(specs.dynamic_conv, made(ops, {"x>c": INT8, "w>c": DYNAMIC, "c>l": DYNAMIC})) == {}
    with pytest.raises(DoesNotApplyError, match="to models without convolutions"):
        whys(specs.dynamic_conv, made(CHAIN, {}))


@pytest.mark.parametrize(
    ("spec", "found"), [(INT8, True), (UNIT, False), (DYNAMIC, False), (WIDE, False), (FLOAT, False)]
)
def test_ranges_that_the_op_gives(spec: Any, found: bool) -> None:
    ops = {"x:input": (), "t:tanh": ("x",), "s:softmax": ("x",), "l:linear": ("t",)}
    text = "the output of tanh has a calibrated scale; 1/128 covers its range"
    for point in ("t", "t>l"):
        assert whys(specs.fixed_range, made(ops, {point: spec})) == ({"T": text} if found else {})
    assert whys(specs.fixed_range, made(ops, {"x>t": spec})) == {}
    with pytest.raises(DoesNotApplyError, match="to models without softmax, sigmoid or tanh"):
        whys(specs.fixed_range, made(CHAIN, {}))


ISLAND = {
    "x:input": (),
    "w:weight": (),
    "a": ("x", "w"),
    "n:layer_norm": ("a", "w"),
    "g:gelu": ("n",),
    "b": ("g",),
    "m:layer_norm": ("b",),
    "h:gelu": ("m",),
    "c": ("h",),
    "o:output": ("c",),
}


def test_float_ops_between_quantized_ones_are_one_finding_for_each_kind() -> None:
    points = {"a": INT8, "g>b": INT8, "b": INT8, "h>c": INT8}
    loose = ("n", "g", "m", "h")
    (found,) = of(coverage.float_island, made(ISLAND, points, loose))
    assert found.name == "N"
    assert found.why == (
        "layer_norm, gelu between quantized ops, with 1 dequantize and 1 quantize, at 2 places, of which this is the "
        "first"
    )
    assert found.value == 4
    (one,) = of(coverage.float_island, made(ISLAND, {"a": INT8, "g>b": INT8}, loose))
    assert one.why == "layer_norm, gelu between quantized ops, with 1 dequantize and 1 quantize"
    assert one.value == 2
    for points in ({"a": INT8}, {"g>b": INT8, "b>m": FLOAT}):  # it needs both sides
        assert of(coverage.float_island, made(ISLAND, points, loose)) == []
    with pytest.raises(DoesNotApplyError, match=specs.NOTHING_ANNOTATED):
        of(coverage.float_island, made(ISLAND, {"a": FLOAT}))
    free = {"x:input": (), "a": ("x",), "d:dropout": ("a",), "b": ("d",)}
    assert of(coverage.float_island, made(free, {"a": INT8, "d>b": INT8})) == []


def test_an_island_is_what_is_connected() -> None:
    ops = {"x:input": (), "a": ("x",), "m:mul": ("a", "a"), "n:neg": ("a",), "s:sub": ("m", "n"), "t:abs": ("x",)}
    islands = [[node.key for node in island] for island in coverage._islands(made(ops, {"a": INT8}))]
    assert islands == [["m", "n", "s"], ["t"]]
    read = made({**ops, "l:linear": ("s",), "k:linear": ("s",)}, {"a": INT8, "s>l": INT8, "s>k": INT8, "x>a": INT8})
    (island, _) = coverage._islands(read)
    assert coverage._border(read, island) == (1, 1)  # each value once


PAIRS = {
    "x:input": (),
    "w:weight": (),
    "a": ("x", "w"),
    "r:relu": ("a",),
    "b": ("r", "w"),
    "s:relu": ("b",),
    "c": ("s", "w"),
    "t:relu": ("c",),
    "o:output": ("t",),
}


def test_pairs_that_are_fused_elsewhere() -> None:
    """The first is rounded in between, the others are not."""
    points = {"a": INT8, "r": INT8, "s": INT8, "t": INT8}
    found = of(coverage.unfused_pair, made(PAIRS, points, fusable=()))
    assert [(each.name, each.why) for each in found] == [
        (
            "A",
            "is rounded before the relu that reads it; the quantizer fuses linear and relu at 2 other places",
        )
    ]
    pairs = [(one.key, two.key, rounded) for one, two, rounded in coverage._pairs(made(PAIRS, points))]
    assert pairs == [("a", "r", True), ("b", "s", False), ("c", "t", False)]
    assert of(coverage.unfused_pair, made(PAIRS, {"a": INT8, "b": INT8, "c": INT8}, fusable=())) == []
    assert [one.key for one, _, _ in coverage._pairs(made(PAIRS, {"a": INT8}))] == ["a"]  # float ops round nothing
    assert list(coverage._pairs(made(PAIRS, points, ("a", "b", "c")))) == []
    other = {**PAIRS, "q:neg": ("a",)}
    assert [one.key for one, _, _ in coverage._pairs(made(other, points))] == ["b", "c"]  # q reads it, too
    slow = {"x:input": (), "a:softmax": ("x",), "r:relu": ("a",), "b": ("x",), "e:elu": ("b",)}
    assert list(coverage._pairs(made(slow, {"a": INT8, "b": INT8}))) == []


def test_pairs_that_the_backend_declares() -> None:
    points = {"a": INT8, "r": INT8, "s": INT8, "t": INT8}
    declared = made(PAIRS, points, fusable=(("linear", "relu"),))
    found = of(coverage.unfused_pair, declared)
    assert [(each.name, each.why) for each in found] == [
        ("A", "is rounded before the relu that reads it; the backend has one kernel for both")
    ]
