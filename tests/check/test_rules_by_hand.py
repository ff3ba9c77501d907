"""How rules are run and what a report keeps of them; contexts and graphs that a test makes up."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._check import analysis
from pt2qa._check.context import CheckContext, kind_of, require
from pt2qa._check.rules import capturing, modules, programs, quantizers, sites
from pt2qa._quantize.pairing import fingerprint
from pt2qa._report.rows import Environment
from pt2qa._simulator.program import QuantParams
from pt2qa.plugins import DoesNotApplyError, Found, Rule
from tests.check.quantizers import UINT8, Annotates
from tests.flows import residual_pair
from tests.models import images, residual


def rule(id: str, *found: Found, **changes: Any) -> Rule:
    return replace(Rule(id, "warning", f"title of {id}", "Why.", "the rule's fix", lambda context: found), **changes)


def checked(patch: pytest.MonkeyPatch, *rules: Rule, subject: Any = None, **options: Any) -> pt2qa.report.Findings:
    patch.setattr(analysis, "RULES", {one.id: one for one in rules})
    return pt2qa.check(nn.Linear(2, 2).eval() if subject is None else subject, progress=False, **options)


def test_findings_of_a_rule_are_sorted_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without one stay in their order, among zeros."""
    values = (math.nan, 3.0, -1.0, 0.0, math.nan, 5.0)
    rows = checked(monkeypatch, rule("a", *(Found(str(at), "why", value=value) for at, value in enumerate(values))))
    assert [row.name for row in rows] == ["5", "1", "0", "3", "4", "2"]


def test_a_finding_may_differ_from_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Found("x", "why", "note", "own fix", 2.0, "net.py:7")
    one, two = checked(monkeypatch, rule("a", Found("y", "other")), rule("b", own))
    assert (one.rule, one.severity, one.name, one.source, one.why, one.fix) == (
        *("a", "warning", "y", "", "other", "the rule's fix"),
    )
    assert math.isnan(one.value)
    assert (two.rule, two.severity, two.name, two.source, two.why, two.fix, two.value) == (
        *("b", "note", "x", "net.py:7", "why", "own fix", 2.0),
    )


def test_silences_are_of_a_rule_or_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (rule("a", Found("x.1", ""), Found("x.2", ""), Found("y", "")), rule("b", Found("x.1", "")), rule("c"))
    made = checked(monkeypatch, *rules, silence=["a:x.*", "b:z*", "c:z", "a"[:1] + ":nothing"])
    assert [(row.rule, row.name) for row in made] == [("a", "y"), ("b", "x.1")]
    assert [(one.rule, one.outcome, one.count, one.silenced) for one in made.rules] == [
        *(("a", "found", 1, 2), ("b", "found", 1, 0), ("c", "clear", 0, 0)),
    ]
    assert made.notes == ("silence: b:z* matches no finding",)
    whole = checked(monkeypatch, *rules, silence="a")
    assert [(one.count, one.silenced) for one in whole.rules] == [(0, 3), (1, 0), (0, 0)]
    assert whole.notes == ()


def test_rules_run_in_their_order_and_what_they_need_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(context: CheckContext) -> Any:
        raise ValueError("of\n  no use")

    rules = (
        rule("a", needs=("model",)),
        rule("b", needs=("pair",)),
        rule("c", find=fails),
        rule("d", needs=("graph",)),
    )
    made = checked(monkeypatch, *rules, rules=["d", "c", "b", "a"])
    assert [(one.rule, one.outcome, one.reason) for one in made.rules] == [
        ("a", "clear", ""),
        ("b", "not applied", "without a quantized pair: pass what pt2qa.quantize returns"),
        ("c", "failed", "ValueError: of no use"),
        ("d", "not applied", "without example inputs: pt2qa.check(model, args)"),
    ]
    assert {one.title for one in made.rules} == {f"title of {name}" for name in "abcd"}
    assert made.checked == ("model",)
    assert (made.model, made.quantizer, made.batches, made.samples) == ("Linear", "", 0, 0)
    one = checked(monkeypatch, *rules, rules="a")
    assert [each.rule for each in one.rules] == ["a"]

    def refuses(context: CheckContext) -> Any:
        raise pt2qa.SelectionError("stop")

    with pytest.raises(pt2qa.SelectionError, match="stop"):
        checked(monkeypatch, rule("e", find=refuses))


def test_data_that_no_rule_reads_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = residual_pair()
    quiet = checked(monkeypatch, rule("a"), subject=pair, batches=[images()])
    assert quiet.notes == (*pair.notes, "batches: no rule that ran reads data")
    assert (quiet.batches, quiet.samples, quiet.input_ranges) == (0, 0, ())
    made = checked(monkeypatch, rule("a", needs=("layers",)), subject=pair, batches=[images(), images(4, 1)[:2]])
    assert made.notes == pair.notes
    assert (made.batches, made.samples) == (2, 4)
    assert made.checked[:2] == ("pair", "layers")
    assert len(made.input_ranges) == 1
    assert checked(monkeypatch, rule("a"), subject=pair).notes == pair.notes


def test_a_report_names_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, capture = residual_pair("x86"), pt2qa.capture(residual(), images())
    program = torch.export.export(residual(), (images(),))
    own = fingerprint(capture.module())

    def about(subject: Any, **options: Any) -> tuple[str, str, str]:
        found = checked(monkeypatch, rule("a"), subject=subject, **options)
        return found.model, found.quantizer, found.environment.fingerprint

    assert about(pair) == ("Residual", pair.quantizer, pair.environment.fingerprint)
    assert about(pair, quantizer="xnnpack")[1] == "xnnpack"
    assert about(capture) == ("Residual", "", own)
    assert about(capture, quantizer="x86:reduce_range=true")[1] == "x86:reduce_range=true"
    assert about(program)[0] == "the program"
    assert about(program.module())[0] == "the graph"
    assert about(nn.Linear(2, 2).eval())[::2] == ("Linear", Environment.here("").fingerprint)


def test_the_parameters_of_a_model_are_those_of_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = pt2qa.capture(nn.Sequential(nn.Linear(2, 2)).eval(), torch.ones(1, 2))
    assert len(checked(monkeypatch, rule("a"), subject=capture, model=nn.Sequential(nn.Linear(2, 2))).rules) == 1
    with pytest.raises(pt2qa.SelectionError, match=r"model: it lacks the capture's parameter '0\.weight'"):
        checked(monkeypatch, rule("a"), subject=capture, model=nn.Linear(2, 2))


def test_kinds_of_subjects() -> None:
    pair, capture = residual_pair(), pt2qa.capture(nn.Linear(2, 2).eval(), torch.ones(1, 2))
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    subjects = (pair, capture, program, program.module(), capture.module(), traced, nn.Linear(2, 2), torch.ones(1))
    assert [kind_of(each) for each in subjects] == [
        *("pair", "capture", "program", "graph", "graph", "model", "model", None),
    ]


def test_a_context_knows_what_follows_from_its_subject() -> None:
    pair = residual_pair("x86")
    of_pair = CheckContext("pair", pair)
    assert of_pair.capture is pair.capture
    assert of_pair.graph is pair.float_graph
    assert of_pair.annotations is pair.recipe.annotations
    assert CheckContext("pair", pair, quantizer="xnnpack").annotations is not pair.recipe.annotations
    assert of_pair.names == pair.names
    assert of_pair.known("model") is None
    assert CheckContext("pair", pair, eager=(own := residual())).model is own
    assert list(of_pair.nodes)[:2] == ["x", "conv1/conv2d"]
    assert of_pair.known("prepared") is None
    assert not of_pair.is_exported
    assert of_pair.changes == pair.capture.changes
    node = of_pair.nodes["conv1/conv2d"]
    assert of_pair.name_of(node) == "conv1/conv2d"
    assert of_pair.source_of("conv1/conv2d").startswith("models.py:")
    assert of_pair.source_of("unknown") == ""
    weight = node.all_input_nodes[1]
    assert of_pair.name_of(weight) == "conv1.weight"
    program = torch.export.export(residual(), (images(),))
    for kind, value in (("program", program), ("graph", program.module())):
        made = CheckContext(kind, value)  # type: ignore[arg-type]
        assert made.is_exported
        assert "conv1/conv2d" in made.nodes
        assert made.known("plugin") is None
        with pytest.raises(DoesNotApplyError, match="without a quantizer"):
            made.plugin  # noqa: B018
    foreign = CheckContext("pair", pt2qa.pair(pair.reference, pair.quantized))
    assert foreign.known("plugin") is None
    assert foreign.unshared == frozenset()
    assert {product.state for product in foreign.products} == {"quantized"}
    for change in ({"recipe": None}, {"capture": None}):
        half = CheckContext("pair", replace(pair, **change))
        assert {(product.state, product.annotated) for product in half.products} == {("quantized", None)}
    assert {(product.state, product.annotated) for product in of_pair.products} == {("quantized", True)}
    with pytest.raises(DoesNotApplyError, match="without data: pass batches="):
        of_pair.layers  # noqa: B018
    assert of_pair.weights
    assert [product.name for product in of_pair.integer_products] == ["conv1/conv2d", "conv2/conv2d", "fc/linear"]


def test_what_cannot_be_made_is_tried_once() -> None:
    model = nn.Linear(3, 2).eval()
    context = CheckContext("model", model, args=(torch.ones(1, 2),))
    for _ in range(2):
        with pytest.raises(DoesNotApplyError, match="the model could not be captured"):
            context.capture  # noqa: B018
    assert list(context.errors) == ["capture"]
    assert context.known("graph") is None
    with pytest.raises(DoesNotApplyError, match="without example inputs"):
        CheckContext("model", model).capture  # noqa: B018
    with pytest.raises(DoesNotApplyError, match="to nothing"):
        require([], "to nothing")
    assert require([1], "to nothing") == [1]


def test_keyword_inputs_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = nn.Linear(3, 2).eval(), {"input": torch.ones(1, 3)}
    made = checked(monkeypatch, rule("a", needs=("capture",)), subject=model, kwargs=inputs)
    assert [each.outcome for each in made.rules] == ["clear"]
    weight = checked(monkeypatch, capturing.aliased_inputs, subject=model, kwargs={"input": model.weight})
    assert [row.why for row in weight] == ["shares memory with the model's weight"]


class Ops(nn.Module):
    """Ops with an argument for training: by position, by keyword, by default, and without one."""

    def forward(self, x: Tensor) -> Any:
        dropped = torch.ops.aten.dropout.default(x, 0.5, True)
        attended = torch.ops.aten.scaled_dot_product_attention.default(x, x, x, dropout_p=0.25)
        plain = torch.ops.aten.scaled_dot_product_attention.default(x, x, x)
        return dropped, attended, plain, x.relu(), torch.ops.aten.bernoulli.p(x, 0.5)


def test_arguments_are_found_by_name() -> None:
    graph = torch.export.export(Ops(), (torch.rand(1, 2, 4, 8),)).module()
    nodes = {node.name: node for node in graph.graph.nodes if node.op == "call_function" and "guard" not in node.name}
    found = [capturing.argument_of(node, "train", "training", "dropout_p") for node in nodes.values()]
    assert [each for each in found if each is not None] == [True, 0.25, 0.0]
    assert found.count(None) == len(found) - 3
    trains = [capturing.trains(node) for node in nodes.values()]
    assert trains[:3] == [True, True, False]
    assert not any(trains[3:])


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        ("while_loop", (), "prepare quantizes WHAT, but edits do not reach them, and only rounded values have rows"),
        ("scan", (), "prepare quantizes WHAT, but edits do not reach them, and only rounded values have rows"),
        ("cond", (), "prepare leaves WHAT in float, and they have no rows"),
        (
            "wrap_with_set_grad_enabled",
            (),
            "WHAT stay in float: a forward under torch.no_grad() is a graph of its own, which no quantizer enters",
        ),
        (
            "wrap_with_autocast",
            ("cpu", torch.bfloat16, True),
            "WHAT compute in another dtype under autocast, and are neither quantized nor analysed",
        ),
        (
            "wrap_with_autocast",
            ("cpu", None, False),
            "WHAT stay in float: a region without autocast is a graph of its own, which no quantizer enters",
        ),
    ],
)
def test_nested_graphs_are_explained(op: str, args: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "op_of", lambda target: target)
    node: Any = SimpleNamespace(target=op, args=args)
    why, severity, fix = capturing._explained(node, "WHAT")
    assert why == expected
    assert severity == ("error" if "of its own" in why else "warning")
    if op.startswith("wrap_with_autocast"):
        assert fix.endswith("remove autocast from forward")
        assert fix.startswith("quantize the graph") == (args[2] is False)
    elif op.startswith("wrap"):
        assert fix.endswith("which inlines it, or remove torch.no_grad() from forward")
    else:
        assert fix == ""


class Settings:
    """A quantizer's settings as torchao's quantizers keep them."""


def test_filters_of_a_quantizer_are_found_by_their_names() -> None:
    from torchao.quantization.pt2e.quantizer import ComposableQuantizer

    inner, outer = (Annotates(lambda nodes: {}) for _ in range(2))
    inner.module_name_qconfig_config = {"a.b": 1, 3: 2}
    inner.operator_type_config = {torch.ops.aten.linear: 1, "no op": 2}
    inner.module_type_config = {nn.Linear: 1, "Linear": 2}
    inner.something_config = {"a": 1}
    inner.module_name_list = ["a"]
    outer.child, outer.own = inner, outer
    found = [(each.attribute, each.kind, each.key) for each in quantizers.filters_of(outer, set())]
    expected = [
        ("module_name_qconfig_config", "module_name", "a.b"),
        ("operator_type_config", "operator_type", torch.ops.aten.linear),
        ("module_type_config", "module_type", nn.Linear),
    ]
    assert found == expected
    several = ComposableQuantizer([inner, outer])
    assert [each.kind for each in quantizers.filters_of(several, set())] == [
        "module_name",
        "operator_type",
        "module_type",
    ]


def test_foreign_quantizers_are_told_by_their_bases() -> None:
    class Quantizer:
        pass

    class Derived(Quantizer):
        pass

    class Annotating:
        def annotate(self, graph: Any) -> Any:
            return graph

    class Plugin(Annotating):
        def build(self) -> None:
            return None

    assert [quantizers.is_foreign(each) for each in (Derived(), Annotating(), Plugin(), object(), Quantizer)] == [
        *(True, True, False, False, False),
    ]


def params(scale: Any = 0.5, zero_point: Any = 3) -> QuantParams:
    return QuantParams("int8", scale, zero_point, -128, 127)


def mismatched(*sites_of: Any, steps: Any, **given: Any) -> dict[str, tuple[str, float]]:
    """What is found of sites; ``steps`` are op, what it reads, its result and its site."""
    made = [SimpleNamespace(op=op, reads=reads, out=out, site=site, function=None) for op, reads, out, site in steps]
    readers = {each.out: [other for other in made if each.out in other.reads] for each in made}
    program = SimpleNamespace(
        steps=made, producers={each.out: at for at, each in enumerate(made)}, readers=lambda: readers
    )
    graph = SimpleNamespace(graph=SimpleNamespace(nodes=[]))
    pair = SimpleNamespace(sites=sites_of, program=program, quantized=graph)
    context: Any = SimpleNamespace(pair=pair, known=lambda what: None, unshared=given.get("unshared", frozenset()))
    all_found = list(sites.requantize_mismatch.find(context))
    given.get("found", []).extend(all_found)
    return {found.name: (found.why, found.value) for found in all_found}


def site(index: int, name: str, source: int, own: QuantParams) -> Any:
    return SimpleNamespace(index=index, name=name, kind="activation", source=source, result=source + 1, params=own)


def test_two_roundings_of_one_value_are_compared_through_ops_that_move_it() -> None:
    first, second = site(0, "a", 0, params()), site(1, "b", 3, params(2.0, 4))
    moved = [("quantize", (0,), 1, 0), ("view", (1,), 2, None), ("permute", (2,), 3, None), ("quantize", (3,), 4, 1)]
    found = mismatched(first, second, steps=moved)
    assert found == {
        "b": (
            "is rounded before view and again after permute, and no op between changes it: scale 0.5 then 2, "
            "zero_point 3 then 4",
            2.0,
        )
    }
    one = [("quantize", (0,), 1, 0), ("view", (1,), 3, None), ("quantize", (3,), 4, 1)]
    assert mismatched(first, second, steps=one)["b"][0].startswith("is rounded before view and again after it: scale")
    direct = [("quantize", (0,), 3, 0), ("quantize", (3,), 4, 1)]
    assert mismatched(first, second, steps=direct)["b"][0].startswith("is rounded twice: scale 0.5 then 2")
    item = [("quantize", (0,), 1, 0), ("getitem", (1,), 3, None), ("quantize", (3,), 4, 1)]
    assert mismatched(first, second, steps=item)["b"][0].startswith("is rounded twice: ")
    assert mismatched(first, second, steps=one, unshared={"b"}) == {}
    moved = [*direct, ("view", (4,), 5, None), ("quantize", (5,), 6, 2)]
    for third, severity in ((site(2, "c", 5, second.params), "note"), (site(2, "c", 5, params()), None)):
        found_of: list[Found] = []
        mismatched(first, second, third, steps=moved, found=found_of)
        assert [each.severity for each in found_of if each.name == "b"] == [severity]
    changed = [("quantize", (0,), 1, 0), ("relu", (1,), 3, None), ("quantize", (3,), 4, 1)]
    assert mismatched(first, second, steps=changed) == {}
    smaller = site(1, "b", 3, params(0.125, 3))
    assert mismatched(first, smaller, steps=direct)["b"] == ("is rounded twice: scale 0.5 then 0.125", 2.0)
    assert mismatched(first, site(1, "b", 3, params()), steps=direct) == {}
    with pytest.raises(DoesNotApplyError, match="to models without scales from calibration"):
        mismatched(site(0, "a", 0, params(None)), steps=[])


def test_batch_norms_that_share_a_weight_need_one_bias() -> None:
    def reader(*args: Any) -> Any:
        return SimpleNamespace(args=args)

    bias = object()
    both = "without a bias: prepare writes the batch norm into a new bias, and zeros into that at the next use"
    apart = "with different biases: prepare folds the batch norm only into the first"
    assert modules._bias_at_fault([reader("x", "w"), reader("y", "w")]) == both
    assert modules._bias_at_fault([reader("x", "w", None), reader("y", "w")]) == both
    assert modules._bias_at_fault([reader("x", "w")]) == ""
    assert modules._bias_at_fault([reader("x", "w", bias), reader("y", "w", bias)]) == ""
    assert modules._bias_at_fault([reader("x", "w", bias), reader("y", "w")]) == apart
    assert modules._bias_at_fault([reader("x", "w", bias), reader("y", "w", object())]) == apart


def test_labels_are_names_of_classes_and_functions() -> None:
    assert programs._label(nn.Linear) == "Linear"
    assert programs._label("torch.nn.Linear") == "torch.nn.Linear"


def test_what_decomposed_programs_mean_for_a_quantizer() -> None:
    ops = {"a": 1, "b": 2}
    known: Any = SimpleNamespace(known=lambda what: SimpleNamespace(ops=ops), errors={})
    assert programs._outcome(known) == "which annotates 2 ops"
    ops.pop("b")
    assert programs._outcome(known) == "which annotates 1 op"
    none: Any = SimpleNamespace(known=lambda what: None, errors={})
    assert programs._outcome(none) == "which looks for conv2d, batch_norm and linear"
    none.errors["annotations"] = ValueError("no op")
    assert programs._outcome(none) == "which fails: no op"


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"val": torch.empty(shape, dtype=dtype, device="meta")}


def recurrent(op: str, *held: int, others: int) -> list[Found]:
    """Of a model with an op that reads matrices of these sizes, and other parameters."""
    reads = [SimpleNamespace(op="get_attr", meta=meta(size, 1)) for size in held]
    reads += [SimpleNamespace(op="get_attr", meta=meta(7)), SimpleNamespace(op="placeholder", meta=meta(9, 9))]
    node = SimpleNamespace(op="call_function", target=op, all_input_nodes=reads)
    loose = SimpleNamespace(op="get_attr", target=op, all_input_nodes=[])
    graph = SimpleNamespace(parameters=lambda: [torch.empty(size) for size in (*held, others)])
    context: Any = SimpleNamespace(graph=graph, nodes={"rnn": node, "loose": loose})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "op_of", lambda target: target)
        return list(capturing.opaque_recurrent.find(context))


def test_half_of_the_parameters_in_a_recurrent_op_is_an_error() -> None:
    (half,) = recurrent("lstm", 600, 400, others=1000)
    assert half.why == "2 matrices with 1,000 of the model's 2,000 parameters (50%) stay in float"
    assert (half.severity, half.value) == ("error", 0.5)
    assert half.fix == (
        'pt2qa.capture(model, args, decompose=("lstm",)) unrolls it into linears, for sequences of one length'
    )
    (less,) = recurrent("gru_cell", 600, 400, others=1001)
    assert less.severity == "warning"
    assert less.fix == "write the cell with nn.Linear: a product of the input, one of the state, and the gates"
    assert '("rnn",)' in recurrent("rnn_tanh", 1, others=1)[0].fix
    (none,) = recurrent("lstm", others=0)
    assert (none.severity, none.value) == ("warning", 0.0)
    assert recurrent("linear", 1, others=1) == []


def fixed(kind: str, guards: bool, *inputs: tuple[str, Any]) -> list[Found]:
    nodes = [SimpleNamespace(op="placeholder", target=name, meta={"val": value}) for name, value in inputs]
    graph = SimpleNamespace(graph=SimpleNamespace(nodes=["guards"] if guards else []))
    context: Any = SimpleNamespace(graph=graph, given=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "user_inputs", lambda graph: nodes)
        patch.setattr(capturing, "calls_guards", lambda node: node == "guards")
        return list(capturing.fixed_batch.find(context))


def test_inputs_of_one_batch_size_are_told_with_the_shapes_to_give() -> None:
    both = (("x", torch.empty(4, 2)), ("size", 3), ("scalar", torch.empty(())), ("y", torch.empty(8)))
    shapes = "{'x': {0: torch.export.Dim.AUTO}, 'y': {0: torch.export.Dim.AUTO}}"
    found = fixed("capture", False, *both)
    assert [(each.name, each.why, each.severity) for each in found] == [
        ("x", "accepts only batches of 4", None),
        ("y", "accepts only batches of 8", None),
    ]
    advice = f"capture with dynamic_shapes={shapes} if batches of other sizes occur, such as a smaller last one"
    assert {each.fix for each in found} == {advice}
    guarded = fixed("graph", True, *both)
    assert [(each.name, each.severity) for each in guarded] == [("x", "warning"), ("y", "warning")]
    why = "accepts size 8 in dimension 0; _guards_fn fails on any other, before and after convert"
    assert guarded[1].why == why
    assert guarded[1].fix == (
        f"export with dynamic_shapes={shapes}, or use the graph without guards: program.module(check_guards=False)"
    )
    assert fixed("graph", False, *both) == []
    with pytest.raises(DoesNotApplyError, match="to models without tensors as inputs"):
        fixed("capture", False, ("size", 3), ("scalar", torch.empty(())))


@pytest.mark.parametrize(
    ("dtypes", "why"),
    [
        ((torch.int64, torch.bool, torch.int64), "forward returns only int64, bool"),
        ((torch.int64, torch.float16), ""),
        ((torch.complex64,), ""),
    ],
)
def test_outputs_that_are_integers_alone(dtypes: tuple[torch.dtype, ...], why: str) -> None:
    graph = torch.fx.Graph()
    leaves = [graph.placeholder(f"x{at}") for at in range(len(dtypes))]
    for leaf, dtype in zip(leaves, dtypes, strict=True):
        leaf.meta.update(meta(2, dtype=dtype))
    graph.output((*leaves, 3))
    context: Any = SimpleNamespace(graph=torch.fx.GraphModule(nn.Module(), graph))
    assert [found.why for found in capturing.no_float_output.find(context)] == [why] * bool(why)
    for leaf in leaves:
        leaf.meta["val"] = 3
    with pytest.raises(DoesNotApplyError, match="to models that return no tensor"):
        list(capturing.no_float_output.find(context))


def test_ops_in_nested_graphs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {
        "one": ["call_function", "placeholder"],
        "three": ["call_function"] * 3,
        "none": ["output"],
        "plain": None,
    }
    bodies = {name: None if ops is None else [("body", ops)] for name, ops in counts.items()}
    monkeypatch.setattr(capturing, "nested_graphs", lambda node, graph: bodies[node.name])
    monkeypatch.setattr(capturing, "walk", lambda ops: [SimpleNamespace(node=SimpleNamespace(op=op)) for op in ops])
    monkeypatch.setattr(capturing, "op_of", lambda target: "cond")
    nodes = [SimpleNamespace(name=name, target=None) for name in counts]
    context: Any = SimpleNamespace(
        graph=SimpleNamespace(graph=SimpleNamespace(nodes=nodes)), name_of=lambda node: node.name
    )
    found = {
        each.name: (each.why.partition(" in float")[0], each.value) for each in capturing.nested_graph.find(context)
    }
    assert found == {
        "one": ("prepare leaves the one op in its nested graph", 1),
        "three": ("prepare leaves the 3 ops in its nested graphs", 3),
        "none": ("prepare leaves the 0 ops in its nested graphs", 0),
    }


def test_modules_that_are_never_called_are_counted_by_their_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.small = nn.Linear(4, 4), nn.Linear(4, 1)
            self.large = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    found = pt2qa.check(Net().eval(), torch.ones(1, 4), rules=["module-never-called"])
    assert [(row.name, row.why, row.value) for row in found] == [
        ("large", "Sequential with 1,804 parameters that forward never reads", 1804),
        ("small", "Linear with 5 parameters that forward never reads", 5),
    ]


class Twice(nn.Module):
    """A block that is called twice, a part of it once more, and another one three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.act = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.block(self.act(self.block(x))))
        return self.act(self.block[0](x))


def test_calls_of_a_part_are_told_where_they_are_more_than_those_of_the_whole() -> None:
    found = pt2qa.check(Twice().eval(), torch.ones(1, 4), rules=["shared-module"])
    assert {row.name: row.why.partition(";")[0] for row in found} == {
        "block": "called 2 times",
        "block.0": "called 3 times",
        "act": "called 3 times",
    }


@pytest.mark.parametrize("in_place", [True, False])
def test_an_op_in_place_is_compared_with_its_spelling_out_of_place(in_place: bool) -> None:
    """A quantizer that knows one of the two only."""
    known = torch.ops.aten.relu_.default if in_place else torch.ops.aten.relu.default

    def annotate(nodes: dict[str, Any]) -> Any:
        return {
            node: ({node.args[0]: UINT8}, UINT8) if node.target is known else ({}, UINT8)
            for node in nodes.values()
            if node.target in (known, torch.ops.aten.tanh.default)
        }

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).relu_().tanh()

    found = pt2qa.check(Net().eval(), torch.ones(2, 3), quantizer=Annotates(annotate), rules=["in-place-spelling"])
    what = f"{'rounds' if in_place else 'does not round'} add as relu reads it, the output of relu"
    assert [row.why for row in found] == [f"written aten.relu_.default, the quantizer {what}, unlike out of place"]


class TwoNorms(nn.Module):
    """One linear, and a batch norm of its own after each of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.one, self.other = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.linear(x)) + self.other(self.linear(x))


def test_a_batch_norm_is_folded_into_a_linear_of_two_dimensions_only() -> None:
    found = {
        len(shape): [row.rule for row in pt2qa.check(TwoNorms().eval(), (torch.randn(shape),), rules=["invalid-fold"])]
        for shape in ((2, 6), (2, 4, 6))
    }
    assert found == {2: ["invalid-fold"], 3: []}


class Ranges(nn.Module):
    """Linears of which some have outputs that are a sixtieth of the largest."""

    def __init__(self, *small: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in small))
        with torch.no_grad():
            for layer, count in zip(self.layers, small, strict=True):
                layer.weight.copy_(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
                layer.weight[:count] /= 60

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def test_a_layer_without_small_channels_does_not_end_the_search_for_them() -> None:
    x = torch.randn(4, 8)
    pair = pt2qa.quantize(pt2qa.capture(Ranges(0, 3).eval(), x), "xnnpack:per_channel=false", [x], progress=False)
    assert [row.name for row in pt2qa.check(pair, rules=["channel-range"])] == ["layers.1/linear"]


def test_a_map_of_batches_needs_batches() -> None:
    pair = residual_pair()
    with pytest.raises(pt2qa.SelectionError, match="there are no batches to map"):
        pt2qa.check(pair, inputs_of=lambda item: item[0])
    pt2qa.check(pair, batches=[(images(2), 1)], inputs_of=lambda item: item[0], rules=["train-mode"], progress=False)
