"""Rules on what a quantizer annotates: what each finds, what looks alike and is fine, and the traps by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer, DerivedQuantizationSpec, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

import pt2qa
from pt2qa._check.context import CheckContext
from pt2qa._check.products import multiply_adds
from pt2qa.report import Finding
from tests.check.quantizers import DYNAMIC, INT8, UINT8, UNIT, WEIGHT, Annotates, every
from tests.flows import residual_pair
from tests.models import SameInputTwice, images, residual
from tests.overrides.strangers import samsung

RULES = (
    *("unfused-pair", "quantizer-fails", "foreign-quantizer", "no-coverage", "broken-share", "unmatched-filter"),
    "backend-spec",
    *("integer-observed", "float-op", "half-quantized", "lost-write", "in-place-spelling", "residual-add"),
    *("mixed-parameters", "dynamic-conv", "strict-differs", "coverage", "float-island", "fixed-range"),
)


class Runs(nn.Module):
    """A module that runs a function of its parts and inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def found(rule: str, subject: Any, args: Any = None, **options: Any) -> tuple[Finding, ...]:
    """The findings of one rule."""
    subject = (
        subject.eval() if isinstance(subject, nn.Module) and not isinstance(subject, torch.fx.GraphModule) else subject
    )
    return tuple(pt2qa.check(subject, args, rules=[rule], **options))


def names(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.name for finding in findings]


def outcome(rule: str, subject: Any, args: Any = None, **options: Any) -> tuple[str, str]:
    (one,) = pt2qa.check(subject, args, rules=[rule], **options).rules
    return one.outcome, one.reason


def linear(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def vector(batch: int = 2, width: int = 4) -> Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(0))


def image() -> Tensor:
    return images()


def default_x86(**options: Any) -> x86.X86InductorQuantizer:
    return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(**options))


# -- every rule on everything ------------------------------------------------------------------------------------------


def prepared() -> torch.fx.GraphModule:
    return prepare_pt2e(pt2qa.capture(residual(), images()).module(), default_x86())


GIVEN: dict[str, Callable[[], Any]] = {
    "model": residual,
    "program": lambda: torch.export.export(residual(), (images(),)),
    "graph": lambda: torch.export.export(residual(), (images(),)).module(),
    "capture": lambda: pt2qa.capture(residual(), images()),
    "prepared": prepared,
    "pair": lambda: residual_pair("x86"),
    "pair of graphs": lambda: pt2qa.pair(residual_pair("x86").reference, residual_pair("x86").quantized),
}


@pytest.mark.parametrize("quantizer", [None, "x86"])
@pytest.mark.parametrize("given", GIVEN)
def test_a_clean_model_is_clear_whatever_is_given(given: str, quantizer: str | None) -> None:
    args = images() if given == "model" else None
    findings = pt2qa.check(GIVEN[given](), args, quantizer=quantizer, rules=RULES)
    assert not findings
    assert len(findings.rules) == len(RULES)
    if given in ("program", "graph") and quantizer:
        # Without capture, x86 takes the one ReLU that is called twice for a single partition and fails (trap 14):
        # plain-program says so, and one rule is enough.
        fails = next(rule for rule in findings.rules if rule.rule == "quantizer-fails")
        assert fails.reason == "where another rule reports why the quantizer fails"


def test_a_model_without_inputs_has_nothing_to_annotate() -> None:
    findings = pt2qa.check(residual(), quantizer="x86", rules=RULES)
    assert not findings
    assert {one.outcome for one in findings.rules} <= {"not applied", "clear"}


# -- coverage (trap 15) ------------------------------------------------------------------------------------------------


def test_trap_15_a_forward_under_no_grad_is_quantized_nowhere() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.fc(x)  # type: ignore[no-any-return]

    model, quantizer = Runs(forward, fc=linear(4, 3)).eval(), every("linear", INT8, INT8, WEIGHT)
    (finding,) = found("no-coverage", torch.export.export(model, (vector(),)), quantizer=quantizer)
    assert finding.severity == "error"
    assert finding.why == (
        "0 % is quantized: 1 linear with 24 multiply-adds stay in float; they are inside wrap_with_set_grad_enabled, "
        "whose graph no quantizer enters"
    )
    assert found("no-coverage", model, vector(), quantizer=quantizer) == ()


def test_trap_15_a_quantizer_of_another_package_is_an_error() -> None:
    class Quantizer:
        def annotate(self, model: Any) -> Any:
            return model

    (finding,) = found("foreign-quantizer", residual(), images(), quantizer=Quantizer())
    assert finding.severity == "error"
    assert "Quantizer, expected torchao.quantization.pt2e.quantizer.quantizer.Quantizer" in finding.why
    assert outcome("quantizer-fails", residual(), images(), quantizer=Quantizer())[0] == "not applied"
    assert outcome("foreign-quantizer", residual(), images(), quantizer="x86")[0] == "clear"


def test_a_quantizer_that_does_not_exist_is_an_error_with_the_nearest() -> None:
    (finding,) = found("quantizer-fails", residual(), images(), quantizer="x68")
    assert "'x68'" in finding.why
    assert "x86" in finding.why
    assert outcome("quantizer-fails", residual(), images()) == ("not applied", "without a quantizer: pass quantizer=")


def test_coverage_counts_the_multiply_adds_of_each_kind() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)).eval()
    quantizer = pt2qa.quantizer("x86", op_types={"linear": None})
    conv, fc = found("coverage", model, image(), quantizer=quantizer)
    macs = {"conv2d": 2 * 64 * 4 * 3, "linear": 2 * 256 * 10}
    total = sum(macs.values())
    assert (conv.name, fc.name) == ("linear", "conv2d")  # the most work first
    assert conv.value == pytest.approx(macs["linear"] / total)
    assert fc.why == (
        f"1 eligible, 1 annotated, 1 with inputs and weights rounded; these do {macs['conv2d'] / total:.1%} of the "
        f"model's multiply-adds, all of them {macs['conv2d'] / total:.1%}"
    )
    assert "1 eligible, 0 annotated, 0 with inputs and weights rounded; these do 0.0%" in conv.why


def test_coverage_of_a_pair_counts_what_was_converted() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear()).eval()
    capture = pt2qa.capture(model, vector())
    quantizer = pt2qa.quantizer("x86", modules={"2": None})
    made = pt2qa.quantize(capture, quantizer, [vector()], progress=False)
    (finding,) = found("coverage", made)
    assert finding.why.startswith("2 eligible, 1 annotated, 1 converted; these do 50.0%")
    (finding,) = found("coverage", pt2qa.pair(made.reference, made.quantized))
    assert finding.why.startswith("2 eligible, 1 converted; these do 50.0%")


def test_what_was_left_in_float_on_purpose_is_no_finding() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear()).eval()
    assert names(found("float-op", model, vector(), quantizer=pt2qa.quantizer("x86", modules={"2": None}))) == []
    capture = pt2qa.capture(model, vector())
    plan = pt2qa.OverridePlan((pt2qa.Edit("float", ("2/linear",)),))
    made = pt2qa.quantize(capture, "x86", [vector()], overrides=plan, progress=False)
    assert found("float-op", made) == ()
    assert names(found("coverage", made)) == ["linear"]
    by_name = default_x86().set_module_name_qconfig("2", None)
    assert names(found("float-op", model, vector(), quantizer=by_name)) == ["2/linear"]


MULTIPLY_ADDS: dict[str, tuple[nn.Module, tuple[Tensor, ...], int]] = {
    "conv2d with groups": (nn.Conv2d(4, 8, 3, groups=2), (torch.randn(2, 4, 6, 6),), 2 * 8 * 16 * 2 * 9),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 5, 2, 2), (torch.randn(2, 3, 4, 4),), 2 * 3 * 16 * 5 * 4),
    "linear": (nn.Linear(4, 3), (torch.randn(5, 7, 4),), 35 * 4 * 3),
    "matmul": (Runs(lambda self, a, b: a @ b), (torch.randn(2, 3, 4), torch.randn(2, 4, 5)), 2 * 3 * 4 * 5),
    "einsum": (
        Runs(lambda self, a, b: torch.einsum("bij,bjk->bik", a, b)),
        (torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
        2 * 3 * 4 * 5,
    ),
    "lstm, bidirectional": (nn.LSTM(3, 5, bidirectional=True), (torch.randn(7, 2, 3),), 2 * 7 * 2 * 4 * 5 * (3 + 5)),
    "attention": (
        Runs(lambda self, q, k: F.scaled_dot_product_attention(q, k, k)),
        (torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8)),
        2 * 3 * 2 * 4 * 6 * 8,
    ),
}


@pytest.mark.parametrize("case", MULTIPLY_ADDS)
def test_multiply_adds_are_those_of_the_formula(case: str) -> None:
    model, args, wanted = MULTIPLY_ADDS[case]
    capture = pt2qa.capture(model.eval(), args)
    assert sum(multiply_adds(node) for node in capture.module().graph.nodes if _is_product(node)) == wanted


def _is_product(node: Node) -> bool:
    from pt2qa._check.products import PRODUCTS
    from pt2qa._graph.handles import op_of

    return node.op == "call_function" and op_of(node.target) in PRODUCTS


def test_multiply_adds_of_a_dynamic_batch_put_no_guard_on_the_program() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    capture = pt2qa.capture(linear().eval(), vector(), dynamic_shapes=({0: batch},))
    before = str(capture.program.range_constraints)
    (product,) = CheckContext("capture", capture, quantizer="x86").products
    assert product.macs == 2 * 4 * 4
    assert str(capture.program.range_constraints) == before
    capture.module()(vector(5))


# -- float and half-quantized ops, islands (trap 35) -------------------------------------------------------------------


def test_trap_35_the_linears_of_multihead_attention_stay_in_float_with_x86() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.fc(self.attention(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]

    model = Runs(forward, attention=nn.MultiheadAttention(16, 2, batch_first=True), fc=linear(16, 16))
    findings = found("float-op", model, torch.randn(2, 4, 16), quantizer="x86")
    assert names(findings) == ["attention/linear", "attention/linear_1"]
    assert findings[0].why.startswith("1 of 3 linear are quantized, but not one called by MultiheadAttention: 2 linear")
    assert {finding.severity for finding in findings} == {"warning"}


OTHERS = {
    "conv1d": (nn.Conv1d(4, 4, 1), torch.randn(2, 4, 8)),
    "conv3d": (nn.Conv3d(4, 4, 1), torch.randn(2, 4, 2, 2, 2)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 4, 1), torch.randn(2, 4, 2, 2)),
    "matmul": (Runs(lambda self, x: x @ x.transpose(-1, -2)), torch.randn(2, 4, 4)),
}


@pytest.mark.parametrize("op", OTHERS)
def test_trap_35_ops_that_x86_leaves_in_float_are_listed(op: str) -> None:
    part, x = OTHERS[op]
    model = Runs(lambda self, x: self.part(x).flatten(1).mean() + self.fc(torch.ones(1, 4)), part=part, fc=linear())
    (finding,) = found("float-op", model, x, quantizer="x86")
    assert finding.why.startswith(f"no {op} is quantized: 1 {op} with")


def test_a_small_share_in_float_is_a_note() -> None:
    model = Runs(lambda self, x: self.fc(x) @ x.new_ones(4, 1), fc=linear(512, 4))
    (finding,) = found("float-op", model, vector(2, 512), quantizer="x86")
    assert finding.severity == "note"


def test_an_op_with_shared_weights_of_which_one_call_is_quantized() -> None:
    def annotate(nodes: dict[str, Node]) -> Any:
        node = nodes["conv2d"]
        return {node: ({node.args[0]: INT8, node.args[1]: WEIGHT}, INT8)}

    model = Runs(lambda self, x: self.conv(self.conv(x).tanh()), conv=nn.Conv2d(3, 3, 1))
    (finding,) = found("float-op", model, image(), quantizer=Annotates(annotate))
    assert finding.name == "conv/conv2d_1"
    assert finding.why.startswith("1 of 2 conv2d are quantized, but not all that share a weight")
    assert "weights of its own" in finding.fix


def test_trap_35_an_lstm_with_a_rounded_input_is_not_quantized() -> None:
    model = Runs(lambda self, x: self.rnn(self.fc(x))[0], fc=linear(), rnn=nn.LSTM(4, 4))
    (finding,) = found("half-quantized", model, torch.randn(3, 2, 4), quantizer=every("linear", INT8, INT8, WEIGHT))
    assert finding.name == "rnn/lstm"
    assert finding.why == "the lstm's input is rounded and its weights are not: it computes in float, as one op"
    assert 'decompose=("lstm"' in finding.fix


def test_trap_35_addmm_of_a_gpt2_conv1d_reads_a_rounded_value_and_computes_in_float() -> None:
    parts = {"fc": linear(), "weight": nn.Parameter(torch.randn(4, 3)), "bias": nn.Parameter(torch.zeros(3))}
    model = Runs(lambda self, x: torch.addmm(self.bias, self.fc(x), self.weight), **parts)
    (finding,) = found("half-quantized", model, vector(), quantizer=every("linear", INT8, INT8, WEIGHT))
    assert (finding.name, finding.severity) == ("addmm", "warning")
    assert finding.why == "the addmm's input is rounded and its weight is not: it computes in float"


def test_weights_alone_are_meant_where_all_are_so() -> None:
    model = nn.Sequential(linear(), linear())
    assert found("half-quantized", model, vector(), quantizer=every("linear", None, None, WEIGHT)) == ()

    def annotate(nodes: dict[str, Node]) -> Any:
        first, second = nodes["linear"], nodes["linear_1"]
        return {first: ({first.args[0]: INT8, first.args[1]: WEIGHT}, None), second: ({second.args[1]: WEIGHT}, None)}

    (finding,) = found("half-quantized", model, vector(), quantizer=Annotates(annotate))
    assert (finding.name, finding.why) == (
        "1/linear",
        "the linear's weight is rounded and its input is not: it computes in float",
    )


def test_trap_35_a_float_island_names_its_ops_and_what_they_cost() -> None:
    model = nn.Sequential(linear(), nn.LayerNorm(4), nn.Dropout(), linear(), nn.Dropout(), linear())
    (finding,) = found("float-island", model, vector(), quantizer=every("linear", INT8, INT8, WEIGHT))
    # The second dropout stands between quantized ops, too, but is nothing that a backend runs.
    assert (finding.name, finding.severity) == ("1/layer_norm", "note")
    assert finding.why == "layer_norm between quantized ops, with 1 dequantize and 1 quantize"


def test_float_ops_at_the_end_of_a_model_are_no_island() -> None:
    model = nn.Sequential(nn.GELU(), linear(), nn.GELU())
    assert found("float-island", model, vector(), quantizer=every("linear", INT8, INT8, WEIGHT)) == ()


# -- fusion (trap 34) --------------------------------------------------------------------------------------------------


def test_trap_34_conv_and_relu6_that_xnnpack_leaves_apart() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU6(), nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1))
    findings = pt2qa.check(model.eval(), image(), quantizer="xnnpack", rules=["unfused-pair"])
    (finding,) = findings
    assert (finding.name, finding.severity) == ("0/conv2d", "warning")
    assert finding.why == "is rounded before the ReLU6 that reads it; the backend has one kernel for both"
    assert 'pt2qa.Edit("fuse", (first, second))' in finding.fix
    assert "WARNING unfused-pair (1): values rounded between two ops that could run as one" in findings.text(width=120)


def test_a_pair_that_the_quantizer_takes_as_one_elsewhere() -> None:
    def annotate(nodes: dict[str, Node]) -> Any:
        first, second = nodes["linear"], nodes["linear_1"]
        fused = {first: ({first.args[0]: INT8, first.args[1]: WEIGHT}, None), nodes["relu"]: ({}, INT8)}
        return {**fused, second: ({second.args[0]: INT8, second.args[1]: WEIGHT}, INT8), nodes["relu_1"]: ({}, INT8)}

    model = nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU())
    (finding,) = found("unfused-pair", model, vector(), quantizer=Annotates(annotate))
    assert finding.name == "2/linear"
    assert finding.why == (
        "is rounded before the relu that reads it; the quantizer fuses linear and relu at 1 other place"
    )


def test_an_output_with_two_readers_must_be_rounded() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.conv(x)
        return F.hardtanh(y, 0, 6) + y + F.hardtanh(self.other(x), 0, 6)

    model = Runs(forward, conv=nn.Conv2d(3, 3, 1), other=nn.Conv2d(3, 3, 1))
    assert names(found("unfused-pair", model, image(), quantizer="xnnpack")) == ["other/conv2d"]


# -- shared scales (traps 17, 18) --------------------------------------------------------------------------------------


class Pools(nn.Module):
    """Three pools, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.max_pool2d(F.max_pool2d(x, 2), 2), 2)


def _pools(nodes: dict[str, Node]) -> tuple[Node, Node, Node, Node]:
    return nodes["x"], nodes["max_pool2d"], nodes["max_pool2d_1"], nodes["max_pool2d_2"]


def first_is_shared(nodes: dict[str, Node]) -> Any:
    x, one, two, _ = _pools(nodes)
    return {one: ({x: SharedQuantizationSpec((one, two))}, None), two: ({one: INT8}, None)}


def unannotated(nodes: dict[str, Node]) -> Any:
    x, one, two, three = _pools(nodes)
    return {one: ({x: INT8}, SharedQuantizationSpec((two, three)))}


def circle(nodes: dict[str, Node]) -> Any:
    x, one, two, three = _pools(nodes)
    shares = SharedQuantizationSpec
    return {
        one: ({x: shares((one, two))}, None),
        two: ({one: shares((two, three))}, None),
        three: ({two: shares((x, one))}, None),
    }


def underived(nodes: dict[str, Node]) -> Any:
    x, one, two, three = _pools(nodes)
    derived = DerivedQuantizationSpec([(two, three)], lambda *_: (torch.ones(1), torch.zeros(1)), torch.int8)
    return {one: ({x: derived}, None), three: ({two: INT8}, None)}


FAULTS = {
    "first is shared": (
        first_is_shared,
        AssertionError,
        "shares the scale of a value that comes later in the graph: x, as max_pool2d reads it -> max_pool2d, as "
        "max_pool2d_1 reads it",
    ),
    "unannotated": (
        unannotated,
        KeyError,
        "shares the scale of a value that is not annotated: the output of max_pool2d -> max_pool2d_1, as max_pool2d_2 "
        "reads it",
    ),
    "circle": (
        circle,
        RecursionError,
        "shares its scale in a cycle: x, as max_pool2d reads it -> max_pool2d, as max_pool2d_1 reads it -> "
        "max_pool2d_1, as max_pool2d_2 reads it -> x, as max_pool2d reads it",
    ),
    "underived": (
        underived,
        KeyError,
        "derives its scale from a value that comes later in the graph: x, as max_pool2d reads it -> max_pool2d_1, as "
        "max_pool2d_2 reads it",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_trap_17_a_fault_of_shared_scales_is_found_with_its_chain_before_prepare_fails(fault: str) -> None:
    annotate, error, why = FAULTS[fault]
    capture = pt2qa.capture(Pools().eval(), torch.randn(1, 3, 16, 16))
    (finding,) = found("broken-share", capture, quantizer=Annotates(annotate))
    assert finding.severity == "error"
    assert finding.why == why
    with pytest.raises(error):
        prepare_pt2e(capture.module(), Annotates(annotate))


def test_trap_17_a_chain_over_a_later_point_that_ends_is_fine() -> None:
    def annotate(nodes: dict[str, Node]) -> Any:
        x, one, two, three = _pools(nodes)
        shares = SharedQuantizationSpec
        return {
            one: ({x: INT8}, shares((one, two))),
            two: ({one: shares((two, three))}, None),
            three: ({two: shares((x, one))}, shares((two, three))),
        }

    capture = pt2qa.capture(Pools().eval(), torch.randn(1, 3, 16, 16))
    assert found("broken-share", capture, quantizer=Annotates(annotate)) == ()
    prepare_pt2e(capture.module(), Annotates(annotate))


def test_trap_17_a_sum_of_a_value_with_itself_makes_samsung_s_quantizer_share_in_a_circle() -> None:
    capture = pt2qa.capture(SameInputTwice().eval(), images())
    (finding,) = found("broken-share", capture, quantizer=samsung())
    assert finding.why == "shares its scale in a cycle: cat, as add reads it -> cat, as add reads it"
    with pytest.raises(RecursionError):
        prepare_pt2e(capture.module(), samsung())


def test_trap_17_faults_leave_the_other_rules_standing() -> None:
    for annotate, _, _ in FAULTS.values():
        findings = pt2qa.check(
            Pools().eval(),
            torch.randn(1, 3, 16, 16),
            quantizer=Annotates(annotate),
            rules=sorted(set(RULES) - {"strict-differs"}),
        )
        assert findings.of("broken-share")


def test_trap_18_a_pool_with_a_scale_of_its_own_behind_it() -> None:
    (finding,) = found("mixed-parameters", nn.MaxPool2d(2), image(), quantizer=every("max_pool2d", INT8, INT8))
    assert finding.why == "max_pool2d does not change values, but its input has another scale than its output"
    shared = every("max_pool2d", INT8, None)
    assert found("mixed-parameters", nn.MaxPool2d(2), image(), quantizer=shared) == ()


def test_trap_18_one_branch_of_a_cat_has_another_scheme() -> None:
    def annotate(nodes: dict[str, Node]) -> Any:
        x, y, cat = nodes["inputs_0"], nodes["inputs_1"], nodes["cat"]
        return {cat: ({x: INT8, y: UINT8}, SharedQuantizationSpec((x, cat)))}

    model = Runs(lambda self, x, y: torch.cat([x, y], 1))
    (finding,) = found("mixed-parameters", model, (vector(), vector()), quantizer=Annotates(annotate))
    assert finding.why == (
        "cat does not change values, but 1 of its 2 inputs has another dtype and quant_max and quant_min than its "
        "output"
    )


def test_trap_18_a_value_that_is_rounded_in_two_ways_names_what_differs() -> None:
    def annotate(nodes: dict[str, Node]) -> Any:
        first, second = nodes["linear"], nodes["linear_1"]
        return {first: ({}, UINT8), second: ({first: INT8, second.args[1]: WEIGHT}, None)}

    (finding,) = found("mixed-parameters", nn.Sequential(linear(), linear()), vector(), quantizer=Annotates(annotate))
    assert (finding.name, finding.why) == (
        "0/linear",
        "is rounded as an output and again for the linear that reads it: dtype and quant_min and quant_max differ",
    )


def test_a_value_with_the_same_spec_at_both_ends_is_rounded_once() -> None:
    quantizer = every("linear", INT8, INT8, WEIGHT)
    assert found("mixed-parameters", nn.Sequential(linear(), linear()), vector(), quantizer=quantizer) == ()


# -- what is no measurement (trap 19) ----------------------------------------------------------------------------------


def test_trap_19_integers_are_rounded_by_x86() -> None:
    model = Runs(lambda self, x, i: (self.fc(x), i * i.flip(0)), fc=linear())
    findings = found("integer-observed", model, (vector(), torch.arange(300)), quantizer="x86")
    assert names(findings) == ["inputs_1", "flip"]
    assert findings[0].why == "its int64 values are rounded to uint8, which changes them"
    assert {finding.severity for finding in findings} == {"error"}


def test_trap_19_masks_and_counts_are_structure() -> None:
    def forward(self: Any, x: Tensor, ids: Tensor) -> Tensor:
        mask = (1 - (ids > 0).float()) * -1e4
        return (self.fc(x) + mask) * torch.ones(4).cumsum(0)

    model = Runs(forward, fc=linear())
    quantizer = ComposableQuantizer([every("linear", INT8, INT8, WEIGHT), every("add", INT8), every("mul_1", INT8)])
    findings = found("integer-observed", model, (vector(), torch.ones(2, 4).long()), quantizer=quantizer)
    assert names(findings) == ["mul", "cumsum"]
    assert findings[0].why == "is computed from sizes, indices or masks only, and rounded to int8"
    assert {finding.severity for finding in findings} == {"warning"}


def test_embeddings_tables_and_pictures_are_measurements() -> None:
    class Tables(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.rand(4))
            self.embedding = nn.Embedding(10, 4)

        def forward(self, x: Tensor, ids: Tensor, picture: Tensor) -> Tensor:
            return (self.embedding(ids) + x) + (self.table + picture.float())

    quantizer = every("add", INT8, INT8, INT8)
    args = (vector(4, 4), torch.arange(4), torch.ones(4, 4, dtype=torch.uint8))
    assert found("integer-observed", Tables(), args, quantizer=quantizer) == ()


# -- filters (trap 20) -------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """A list, which is no module that forward calls, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([linear(), linear()])
        self.head = linear()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


PATHS = {
    "L['self'].head": "; without the prefix, 'head' does",
    "haed": "; did you mean 'head'?",
    "blocks": ": it is a container that forward does not call; name what is in it, such as 'blocks.0'",
    "nothing.like.it": "",
}


@pytest.mark.parametrize("path", PATHS)
def test_trap_20_a_name_filter_that_matches_nothing_is_an_error_with_near_names(path: str) -> None:
    quantizer = default_x86().set_module_name_qconfig(path, None)
    (finding,) = found("unmatched-filter", Blocks(), vector(), quantizer=ComposableQuantizer([quantizer]))
    assert finding.severity == "error"
    assert finding.why == f"module_name_qconfig has {path!r}, which matches no op of the graph{PATHS[path]}"


def test_trap_20_xnnpack_s_filters_of_each_kind() -> None:
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack

    config = xnnpack.get_symmetric_quantization_config()
    quantizer = xnnpack.XNNPACKQuantizer().set_global(config).set_module_name("head", config)
    quantizer.set_module_type(nn.Linear, config).set_operator_type(torch.ops.aten.linear.default, config)
    assert outcome("unmatched-filter", Blocks().eval(), vector(), quantizer=quantizer)[0] == "clear"
    quantizer.set_module_name("tail", config).set_module_type(nn.Conv2d, config)
    quantizer.set_operator_type(torch.ops.aten.conv2d.default, config)
    findings = found("unmatched-filter", Blocks(), vector(), quantizer=quantizer)
    assert sorted((finding.severity, finding.why.split(",")[0]) for finding in findings) == [
        ("error", "module_name_config has 'tail'"),
        ("warning", "module_type_config has Conv2d"),
        ("warning", "operator_type_config has aten.conv2d.default"),
    ]


def test_what_a_plug_in_sets_by_itself_is_no_filter_of_the_user() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()).eval()
    assert found("unmatched-filter", model, image(), quantizer="x86:mode=dynamic") == ()


def test_trap_20_a_plug_in_names_the_path_itself() -> None:
    (finding,) = found("quantizer-fails", Blocks(), vector(), quantizer=pt2qa.quantizer("x86", modules={"haed": None}))
    assert "modules['haed']" in finding.why
    assert "did you mean 'head'?" in finding.why


# -- spelling (trap 21) ------------------------------------------------------------------------------------------------


def test_trap_21_an_in_place_product_that_x86_does_not_know() -> None:
    model = Runs(lambda self, x: self.fc(x).mul_(self.gate(x)), fc=linear(), gate=linear())
    for given, args in ((model.eval(), vector()), (torch.export.export(model.eval(), (vector(),), strict=True), None)):
        (finding,) = found("in-place-spelling", given, args, quantizer="x86")
        assert finding.name == "mul"
        assert finding.why == (
            "written aten.mul_.Tensor, the quantizer does not round fc/linear as mul reads it, gate/linear as mul "
            "reads it, unlike out of place"
        )


def test_in_place_ops_that_the_quantizer_knows_are_fine() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1)).eval()
    assert outcome("in-place-spelling", model, image(), quantizer="x86")[0] == "clear"
    assert outcome("in-place-spelling", linear().eval(), vector(), quantizer="x86")[0] == "not applied"


@pytest.mark.parametrize(
    "part",
    [
        lambda state: state,
        lambda state: state[1:].flatten(),
        lambda state: state.chunk(2)[0],
        lambda state: state.mul_(2),
    ],
    ids=["the input", "a view of a view", "a chunk", "what wrote before"],
)
def test_a_write_to_an_input_that_is_rounded_before_is_lost(part: Callable[[Tensor], Tensor]) -> None:
    def forward(self: Any, x: Tensor, state: Tensor) -> Tensor:
        y = self.fc(x + state)
        part(state).add_(1)
        return y

    args = vector(), torch.zeros_like(vector())
    captured = pt2qa.capture(Runs(forward, fc=linear()).eval(), args)
    for quantizer in ("xnnpack", "x86"):
        pair = pt2qa.quantize(captured, quantizer, [args])
        state = torch.zeros_like(vector())
        pair.quantized(vector(), state)
        lost = {row.why for row in pt2qa.check(pair, rules=["lost-write"])}
        assert lost == ({"writes to a rounded copy of inputs_1, which keeps its values"} if not state.any() else set())
        assert bool(lost) is (quantizer == "xnnpack")


def test_an_encoder_layer_with_frozen_weights_is_one_op_in_strict_mode() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval().requires_grad_(False)
    findings = found("strict-differs", layer, torch.randn(2, 4, 16), quantizer="x86")
    assert names(findings) == ["linear1/linear", "linear2/linear"]
    assert findings[0].why == "is annotated only if exported with strict=False (2 linear in all)"
    assert findings[0].severity == "note"  # pt2qa.capture's own mode annotates more
    assert outcome("strict-differs", pt2qa.capture(linear().eval(), vector()), quantizer="x86")[0] == "not applied"


# -- dynamic scales (trap 26), branches, known ranges ------------------------------------------------------------------


def test_trap_26_a_dynamic_convolution_is_a_warning_and_a_dynamic_linear_is_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))
    (finding,) = found("dynamic-conv", model, image(), quantizer=default_x86(is_dynamic=True))
    assert (finding.name, finding.severity) == ("0/conv2d", "warning")
    assert finding.why == "each batch sets the scale of the conv2d's input"
    assert found("dynamic-conv", model, image(), quantizer="x86:mode=dynamic") == ()
    assert found("dynamic-conv", model, image(), quantizer=every("linear", DYNAMIC, None, WEIGHT)) == ()


def test_a_dynamic_convolution_is_fine_where_the_plug_in_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)).eval()
    context = CheckContext("capture", pt2qa.capture(model, image()), quantizer="xnnpack:mode=dynamic")
    assert any("dynamic" in edge.spec for edge in context.annotations.edges)
    assert found("dynamic-conv", context.capture, quantizer="xnnpack:mode=dynamic") == ()


def _one_branch(nodes: dict[str, Node]) -> Any:
    add = nodes["add"]
    return {add: ({add.args[0]: INT8}, INT8)}


def _two_dtypes(nodes: dict[str, Node]) -> Any:
    add = nodes["add"]
    return {add: ({add.args[0]: INT8, add.args[1]: UINT8}, INT8)}


def test_branches_of_a_residual_add_that_are_not_rounded_alike() -> None:
    model = Runs(lambda self, x: x.tanh() + x.sigmoid())
    (finding,) = found("residual-add", model, vector(), quantizer=Annotates(_one_branch))
    assert (finding.name, finding.why) == ("add", "sigmoid is not rounded, but the other operand is")
    (finding,) = found("residual-add", model, vector(), quantizer=Annotates(_two_dtypes))
    assert finding.why == "its operands differ in dtype and quant_min and quant_max"
    assert found("residual-add", model, vector(), quantizer=every("add", INT8, INT8)) == ()


def test_a_residual_add_that_x86_takes_together_with_its_convolution_is_fine() -> None:
    capture = pt2qa.capture(residual(), images())
    edges = CheckContext("capture", capture, quantizer="x86").annotations.edges
    assert {edge.source for edge in edges if edge.reader == "add"} == {"relu/relu"}  # the other branch is fused
    for qat in (False, True):
        assert outcome("residual-add", capture, quantizer="x86", qat=qat)[0] == "clear"


def test_a_range_that_the_op_gives_needs_no_calibration() -> None:
    model = Runs(lambda self, x: self.fc(x.softmax(-1)) + torch.tanh(x), fc=linear())
    findings = found("fixed-range", model, vector(), quantizer=every("linear", INT8, INT8, WEIGHT))
    assert names(findings) == ["softmax"]  # tanh is not rounded
    assert findings[0].why == "the output of softmax has a calibrated scale; 1/256 covers its range"
    fixed = found("fixed-range", model, vector(), quantizer=every("linear", UNIT, INT8, WEIGHT))
    assert fixed == ()
