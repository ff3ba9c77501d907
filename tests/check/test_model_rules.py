"""Rules on the model, its capture, and on programs that pt2qa.capture did not make; traps by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

import pt2qa
from pt2qa.report import Finding
from tests.check.quantizers import INT8, WEIGHT, Annotates
from tests.models import Conditional, Recurrent, SharedConv, images, randomize_batch_norms, residual

RULES = (
    *("capture-fails", "aliased-inputs", "train-mode", "plain-program", "decomposed-first", "nested-graph"),
    *("invalid-fold", "partial-write", "integer-scalar", "dead-code", "added-zero", "opaque-recurrent"),
    *("unfoldable-batch-norm", "random-op", "module-never-called", "fixed-batch", "no-float-output", "shared-module"),
    *("shared-weight", "opaque-attention", "written-buffer"),
)


def found(rule: str, subject: Any, args: Any = None, **options: Any) -> tuple[Finding, ...]:
    """What one rule finds."""
    return pt2qa.check(subject, args, rules=[rule], progress=False, **options).of(rule)


def places(rule: str, subject: Any, args: Any = None, **options: Any) -> list[str]:
    """The names of what one rule finds."""
    return [row.name for row in found(rule, subject, args, **options)]


def reason(rule: str, subject: Any, args: Any = None, **options: Any) -> str:
    """Why a rule was not applied."""
    (outcome,) = pt2qa.check(subject, args, rules=[rule], progress=False, **options).rules
    assert outcome.outcome == "not applied"
    return outcome.reason


def exported(model: nn.Module, *args: Any, **options: Any) -> ExportedProgram:
    """What torch.export makes of a model in eval mode."""
    return torch.export.export(model.eval(), args, **options)


def module(forward: Callable[..., Any], **parts: nn.Module) -> nn.Module:
    """A model in eval mode with these parts, and this forward."""
    made = type("Net", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        made.add_module(name, part)
    return made.eval()


def conv(channels: int = 3) -> nn.Conv2d:
    return nn.Conv2d(channels, 4, 1)


# -- train-mode --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        pytest.param(nn.Dropout(), True, id="dropout"),
        pytest.param(nn.BatchNorm1d(4), True, id="batch norm"),
        pytest.param(nn.LSTM(4, 4, 2, dropout=0.5), True, id="lstm with dropout"),
        pytest.param(nn.LSTM(4, 4, 2), False, id="lstm without"),
        pytest.param(nn.MultiheadAttention(4, 1, dropout=0.5), True, id="attention with dropout"),
        pytest.param(nn.MultiheadAttention(4, 1), False, id="attention without"),
        pytest.param(nn.InstanceNorm1d(4, track_running_stats=True), True, id="instance norm with statistics"),
        pytest.param(nn.InstanceNorm1d(4), False, id="instance norm without"),
        pytest.param(nn.Linear(4, 4), False, id="linear"),
    ],
)
def test_modules_count_as_training_where_that_changes_what_they_compute(part: nn.Module, expected: bool) -> None:
    assert places("train-mode", nn.Sequential(part).train()) == (["0"] if expected else [])
    assert places("train-mode", nn.Sequential(part).eval()) == []


def test_a_program_that_was_exported_in_training_mode_names_its_ops_and_what_eval_does_there() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Dropout()).train()
    program = torch.export.export(model, (images(),))
    rows = found("train-mode", program)
    assert [(row.name, row.why) for row in rows] == [
        ("1/batch_norm", "batch_norm was exported in training mode"),
        ("2/dropout", "dropout was exported in training mode"),
    ]
    assert "eval() of what it returns raises NotImplementedError" in rows[0].fix
    with pytest.raises(NotImplementedError):
        program.module().eval()
    assert reason("train-mode", program, qat=True) == "to programs that are to be trained"


def test_attention_with_dropout_counts_as_training_in_a_program() -> None:
    def attend(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    assert places("train-mode", exported(module(attend), *torch.randn(3, 1, 2, 4, 8).clone())) == [
        "scaled_dot_product_attention"
    ]


def test_graphs_with_observers_are_no_matter_of_train_mode() -> None:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    graph = pt2qa.capture(residual(), images()).module()
    prepared = prepare_pt2e(graph, pt2qa.quantizer("x86").build(graph, qat=False))
    assert reason("train-mode", prepared) == "to graphs that are being calibrated or trained"


# -- capture-fails, aliased-inputs -------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_exported_is_told_in_one_line_and_what_to_try() -> None:
    branch = module(lambda self, x: x + 1 if x.sum() > 0 else x)
    (row,) = found("capture-fails", branch, images())
    assert row.severity == "error"
    assert row.why.startswith("torch.export.export failed with GuardOnDataDependentSymNode")
    assert "\n" not in row.why
    assert row.fix == (
        "Try strict=True, which analyses the Python of the forward instead of running it: "
        "pt2qa.check(pt2qa.capture(model, args, strict=...))"
    )


def test_a_model_that_fails_by_itself_keeps_the_advice_of_capture() -> None:
    (row,) = found("capture-fails", nn.Linear(5, 2).eval(), torch.randn(2, 4))
    assert row.why.startswith("the model fails on its example inputs, before any export: RuntimeError")
    assert row.fix == "Call model(*args, **kwargs) to see where"


def test_inputs_that_capture_refuses_keep_its_advice() -> None:
    (row,) = found("capture-fails", nn.Linear(4, 2).eval(), (np.zeros((2, 4), np.float32),))
    assert row.why == "example input args[0] is a NumPy array of shape [2, 4] and dtype float32; expected a tensor"
    assert row.fix == "Pass torch.from_numpy(...) of it"


def test_what_other_rules_report_is_not_told_twice() -> None:
    zeros = torch.zeros(2, 4)
    add = module(lambda self, a, b: a + b)
    assert reason("capture-fails", add, (zeros, zeros)) == "to example inputs that share memory"
    assert reason("capture-fails", nn.Dropout(), zeros) == "to models in training mode"
    # A linear does the same in both modes, and capture refuses it all the same.
    (row,) = found("capture-fails", nn.Linear(4, 2), zeros)
    assert row.why == "1 module is in training mode: the model itself"


def test_trap_31_aliased_inputs() -> None:
    h = torch.zeros(2, 4)
    add = module(lambda self, h, c: h + 2 * c)
    (row,) = found("aliased-inputs", add, (h, h))
    assert (row.severity, row.name, row.why) == ("error", "args[1]", "is one tensor with args[0]")
    assert places("aliased-inputs", exported(add, h, h)) == ["args[1]"]
    assert places("aliased-inputs", add, (h, h.clone())) == []


@pytest.mark.parametrize(
    ("columns", "expected"), [pytest.param(3, ["args[1]"], id="overlap"), pytest.param(2, [], id="disjoint")]
)
def test_views_share_memory_where_they_have_an_element_in_common(columns: int, expected: list[str]) -> None:
    both = torch.zeros(2, 4)
    add = module(lambda self, a, b: a.sum() + b.sum())
    assert places("aliased-inputs", add, (both[:, :columns], both[:, 2:])) == expected


def test_an_input_that_is_a_parameter_is_named_with_it() -> None:
    linear = nn.Linear(4, 2).eval()
    (row,) = found("aliased-inputs", linear, (linear.weight,))
    assert row.why == "shares memory with the model's weight"


# -- plain-program -----------------------------------------------------------------------------------------------------


class _Own(nn.Conv2d):
    """A convolution of the user's own."""


class _FunctionalRelu(nn.Module):
    """What GoogLeNet is made of: the relu is a function, so that quantizers do not take it with its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


def _shared_relu() -> nn.Module:
    return module(lambda self, x: self.relu(self.b(self.relu(self.a(x)))), a=conv(), b=conv(4), relu=nn.ReLU())


@pytest.mark.parametrize("kind", ["program", "graph"])
def test_trap_14_a_relu_that_is_called_twice_makes_x86_fail_and_is_named(kind: str) -> None:
    program = exported(_shared_relu(), images())
    (row,) = found("plain-program", program if kind == "program" else program.module(), quantizer="x86")
    assert (row.severity, row.name) == ("error", "relu")
    assert row.why == (
        "after pt2qa.capture, its 2 calls of relu are matched one by one; here they are one partition with several "
        "outputs, and the quantizer fails: x86 could not annotate the model: ValueError: Input partition has more than "
        "one output node."
    )


def test_trap_14_after_capture_there_is_nothing_to_find() -> None:
    captured = pt2qa.capture(_shared_relu(), images())
    assert reason("plain-program", captured, quantizer="x86") == "to programs that pt2qa.capture made"
    assert found("plain-program", captured.module(), quantizer="x86") == ()


def test_trap_14_ops_behind_a_functional_relu_are_named_with_the_reason() -> None:
    model = module(lambda self, x: self.last(torch.cat([self.a(x), self.b(x)], 1)), a=_FunctionalRelu())
    model.add_module("b", _FunctionalRelu())
    model.add_module("last", conv(8))
    rows = found("plain-program", exported(model, images()), quantizer="x86")
    assert [(row.name, row.why) for row in rows] == [
        ("", "x86 annotates 3 ops of this program, 4 after pt2qa.capture"),
        (
            "cat",
            "it is quantized only next to a quantized op; for the relu there, nn_module_stack says _FunctionalRelu, "
            "the quantizer looks for exactly ReLU (strict=False writes no source_fn_stack)",
        ),
    ]


def test_a_source_that_torch_export_wrote_is_named_with_what_the_quantizer_looks_for() -> None:
    model = module(lambda self, x: self.last(torch.cat([torch.relu(self.a(x)), self.b(x).relu()], 1)), a=conv())
    model.add_module("b", conv())
    model.add_module("last", conv(8))
    _, row = found("plain-program", exported(model, images(), strict=True), quantizer="x86")
    assert (row.name, row.why) == (
        "cat",
        "it is quantized only next to a quantized op; for the relu there, source_fn_stack says relu, the quantizer "
        "looks for ReLU",
    )


def test_trap_28_exact_class_names() -> None:
    functional = module(lambda self, x: F.conv2d(self.own(x), self.other.weight), own=_Own(3, 4, 1), other=conv(4))
    rows = found("plain-program", exported(functional, images()), quantizer="x86")
    assert [(row.name, row.why.partition(" (strict")[0]) for row in rows] == [
        ("", "x86 annotates 0 ops of this program, 2 after pt2qa.capture"),
        ("own/conv2d", "nn_module_stack says _Own, the quantizer looks for exactly Conv2d"),
        ("conv2d", "nn_module_stack says Net, the quantizer looks for exactly Conv2d"),
    ]
    assert "pt2qa.capture(model, args)" in rows[0].fix


def test_a_spelling_that_stops_the_quantizer_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU())
    rows = found("plain-program", exported(model, images()), quantizer="x86")
    assert [row.name for row in rows] == ["0/conv2d"]
    assert rows[0].why.startswith("padding: the quantizer fails unless it is written out as [1, 1]: x86")


def test_ops_that_the_quantizer_passes_over_are_named_with_what_capture_changes() -> None:
    def convolutions_and_their_sums(nodes: dict[str, Node]) -> dict[Node, tuple[dict[Node, Any], Any]]:
        found = [node for node in nodes.values() if node.target is torch.ops.aten.conv2d.default]
        found += [node for node in nodes.values() if node.name.startswith("add") and {*node.args} <= {*found}]
        return {node: ({node.all_input_nodes[0]: INT8}, INT8) for node in found}

    quantizer = Annotates(convolutions_and_their_sums)
    padded = exported(nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU()), images())
    _, row = found("plain-program", padded, quantizer=quantizer)
    assert (row.name, row.why) == (
        "0/conv2d",
        "it is written as aten.conv2d.padding, the quantizer looks for aten.conv2d.default",
    )
    summed = exported(module(lambda self, x: sum([self.a(x), self.b(x)]), a=conv(), b=conv()), images())
    _, row = found("plain-program", summed, quantizer=quantizer)
    assert (row.name, row.why) == ("add_1", "it is found only after pt2qa.capture (add of zero)")


def test_programs_that_the_quantizer_reads_well_are_left_alone() -> None:
    assert found("plain-program", exported(nn.Sequential(conv(), nn.ReLU()), images()), quantizer="x86") == ()
    strict = exported(_shared_relu(), images(), strict=True)
    assert found("plain-program", strict, quantizer="x86") == ()


def test_without_a_quantizer_plain_programs_say_what_to_give() -> None:
    assert reason("plain-program", exported(_shared_relu(), images())) == "without a quantizer: pass quantizer="


def test_plain_program_leaves_what_capture_does_not_fix_to_others() -> None:
    program = exported(nn.Linear(4, 2), torch.randn(2, 4))
    unknown = pt2qa.quantizer("x86", modules={"nothing": None})
    assert reason("plain-program", program, quantizer=unknown) == ("where the quantizer fails after pt2qa.capture, too")


# -- decomposed-first --------------------------------------------------------------------------------------------------


def test_trap_36_decomposing_first() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3))
    program = exported(model, images())
    (row,) = found("decomposed-first", program.run_decompositions(), quantizer="x86")
    assert row.severity == "error"
    assert row.why == (
        "1 convolution, 1 _native_batch_norm_legit_no_training, 1 addmm: run_decompositions() came before the "
        "quantizer, which fails: x86 could not annotate the model: ValueError: convolution is not an aten conv2d "
        "operator."
    )
    assert found("decomposed-first", program, quantizer="x86") == ()
    assert reason("plain-program", program.run_decompositions(), quantizer="x86") == (
        "to programs that were decomposed first"
    )


def test_a_product_that_the_user_wrote_is_not_taken_for_a_decomposed_one() -> None:
    program = exported(module(lambda self, x, y: torch.mm(x, y)), torch.randn(2, 4), torch.randn(4, 2))
    assert found("decomposed-first", program) == ()


# -- nested-graph ------------------------------------------------------------------------------------------------------


def test_trap_15_a_forward_under_no_grad_is_an_error_in_a_plain_program_and_none_after_capture() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.a(x).relu()
        return self.b(x)

    model = module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    x = torch.randn(2, 4)
    (row,) = found("nested-graph", exported(model, x))
    assert row.severity == "error"
    assert row.why == (
        "the 2 ops in its nested graphs stay in float: a forward under torch.no_grad() is a graph of its own, which no "
        "quantizer enters"
    )
    assert found("nested-graph", model, x) == ()


def _while_loop(self: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda x: x.sum() < 8, lambda x: (x * 2 + 1,), (x,))[0]


def _map(self: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.map import map as map_rows

    return map_rows(lambda row: row.relu() + 1, x)


IN_FLOAT = "in its nested graphs in float, and they have no rows"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        pytest.param(Conditional().eval(), f"prepare leaves the 4 ops {IN_FLOAT}", id="cond"),
        pytest.param(
            module(_while_loop),
            "prepare quantizes the 4 ops in its nested graphs, but edits do not reach them, and only rounded "
            "values have rows",
            id="while_loop",
        ),
        pytest.param(module(_map), f"prepare leaves the 2 ops {IN_FLOAT}", id="map"),
    ],
)
def test_trap_24_higher_order_ops(model: nn.Module, why: str) -> None:
    (row,) = found("nested-graph", model, torch.rand(2, 16))
    assert (row.severity, row.why) == ("warning", why)


# -- invalid-fold ------------------------------------------------------------------------------------------------------


def _uses(forward: Callable[..., Any]) -> nn.Module:
    model = module(forward, conv=conv(), norm=nn.BatchNorm2d(4), other=nn.BatchNorm2d(4))
    return randomize_batch_norms(model)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        pytest.param(
            lambda self, x, y: self.norm(self.conv(x)) + self.other(self.conv(y)),
            "different batch norms follow the one weight conv.weight: norm/batch_norm, other/batch_norm",
            id="two norms",
        ),
        pytest.param(
            lambda self, x, y: self.conv(x) + self.norm(self.conv(y)),
            "its batch norm is folded into conv.weight, which conv/conv2d reads too",
            id="one use without norm",
        ),
        pytest.param(
            lambda self, x, y: (lambda z: self.norm(z) + z)(self.conv(x + y)),
            "its batch norm is folded into it, but add_1 reads it without",
            id="read before the norm",
        ),
        pytest.param(lambda self, x, y: self.norm(self.conv(x)) + self.norm(self.conv(y)), "", id="same norm"),
        pytest.param(lambda self, x, y: self.norm(self.conv(x)) + y[:, :1], "", id="one use"),
    ],
)
def test_trap_3_what_is_named_is_what_prepare_gets_wrong(forward: Callable[..., Any], why: str) -> None:
    captured = pt2qa.capture(_uses(forward), (images(), images(seed=1)))
    assert [row.why for row in found("invalid-fold", captured)] == ([why] if why else [])
    batches = [(images(seed=2), images(seed=3))]
    if why:
        with pytest.raises(pt2qa.QuantizeError, match="prepare changed the model"):
            pt2qa.quantize(captured, "x86", batches, progress=False)
    else:
        assert pt2qa.quantize(captured, "x86", batches, progress=False).sites


@pytest.mark.parametrize(
    ("bias", "tied", "why"),
    [
        pytest.param(True, False, "", id="called twice"),
        pytest.param(
            False,
            False,
            "is used 2 times, without a bias: prepare writes the batch norm into a new bias, and zeros into that at "
            "the next use",
            id="called twice, no bias",
        ),
        pytest.param(
            True,
            True,
            "is used 2 times, with different biases: prepare folds the batch norm only into the first",
            id="tied weight, two biases",
        ),
    ],
)
def test_trap_3_one_norm_on_two_uses_needs_one_bias(bias: bool, tied: bool, why: str) -> None:
    model = _uses(lambda self, x, y: self.norm(self.one(x)) + self.norm(self.two(y)))
    model.one = nn.Conv2d(3, 4, 1, bias=bias).eval()
    model.two = conv().eval() if tied else model.one
    model.two.weight = model.one.weight
    captured = pt2qa.capture(model, (images(), images(seed=1)))
    assert [row.why.partition(" ")[2] for row in found("invalid-fold", captured)] == ([why] if why else [])
    batches = [(images(seed=2), images(seed=3))]
    if why:
        with pytest.raises(pt2qa.QuantizeError, match="prepare changed the model"):
            pt2qa.quantize(captured, "x86", batches, progress=False)
    else:
        assert pt2qa.quantize(captured, "x86", batches, progress=False).sites


def test_trap_3_quantization_aware_training_folds_nothing_at_first() -> None:
    model = SharedConv(same_norm=False).eval()
    inputs = (images(), images(seed=1))
    assert len(found("invalid-fold", model, inputs)) == 1
    assert reason("invalid-fold", model, inputs, qat=True).startswith("to quantization-aware training")


# -- partial-write, integer-scalar, dead-code, added-zero --------------------------------------------------------------


def _damped() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, :2].mul_(0.1)
        return self.b(y)

    return module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))


def test_trap_2_a_partial_write_is_an_error_where_the_quantizer_rounds_the_tensor() -> None:
    program = exported(_damped(), torch.randn(2, 4))
    (row,) = found("partial-write", program, quantizer="x86")
    assert (row.severity, row.name) == ("error", "mul")
    assert row.why == "the tensor that it writes to is read later, and x86 rounds it at a/linear"
    (row,) = found("partial-write", program)
    assert (row.severity, row.why) == ("warning", "the tensor that it writes to is read later")
    assert found("partial-write", program, quantizer=pt2qa.quantizer("x86", modules={"b": None})) == ()


def test_trap_2_capture_makes_partial_writes_functional() -> None:
    assert found("partial-write", _damped(), torch.randn(2, 4), quantizer="x86") == ()


def test_trap_30_integer_arithmetic() -> None:
    model = module(lambda self, x: self.e(x + 1), e=nn.Embedding(10, 4))
    program = exported(model, torch.zeros(2, 3, dtype=torch.long))
    (row,) = found("integer-scalar", program, quantizer="xnnpack")
    assert (row.severity, row.name) == ("error", "add")
    assert row.why == "xnnpack makes its scalar 1 a float32 tensor, in arithmetic of int64"
    # The x86 quantizer leaves scalars alone.
    assert found("integer-scalar", program, quantizer="x86") == ()


def test_trap_29_dead_code() -> None:
    model = module(lambda self, x: (lambda y: (self.pooler(y), y)[1])(self.body(x)), body=conv(), pooler=conv(4))
    (row,) = found("dead-code", exported(model, images()), quantizer="x86")
    assert (row.severity, row.name) == ("error", "pooler/conv2d")
    assert row.why == (
        "nothing reads it, and the quantizer fails: x86 could not annotate the model: IndexError: list index out of "
        "range."
    )
    (row,) = found("dead-code", exported(model, images()))
    assert (row.severity, row.why) == ("warning", "nothing reads it")
    (row,) = found("dead-code", model, images(), quantizer="x86")
    assert (row.severity, row.name, row.why) == ("note", "pooler/conv2d", "capture removed it")


def test_trap_29_a_sum_that_begins_with_zero() -> None:
    model = module(lambda self, x: sum([self.a(x), self.b(x)]), a=conv(), b=conv())
    (row,) = found("added-zero", exported(model, images()), quantizer="x86")
    assert (row.severity, row.name) == ("error", "add")
    assert row.why == "adds 0, and the quantizer fails: x86 could not annotate the model: AssertionError: no message."
    assert found("plain-program", exported(model, images()), quantizer="x86") == ()
    (row,) = found("added-zero", exported(model, images()))
    assert row.severity == "warning"


# -- opaque ops --------------------------------------------------------------------------------------------------------


def test_trap_25_recurrent_ops() -> None:
    inputs = (torch.zeros(3, 2, dtype=torch.long), torch.zeros(2, 2, 8), torch.zeros(2, 2, 8))
    model = Recurrent().eval()
    total = sum(parameter.numel() for parameter in model.parameters())
    held = 32 * 16 + 3 * 32 * 8
    (row,) = found("opaque-recurrent", model, inputs)
    assert (row.severity, row.name) == ("error", "rnn/lstm")
    parameters = f"{held:,} of the model's {total:,} parameters ({held / total:.0%})"
    assert row.why == f"4 matrices with {parameters} stay in float"
    assert 'decompose=("lstm",)' in row.fix
    taken_apart = pt2qa.capture(model, inputs, decompose=("lstm",))
    assert found("opaque-recurrent", taken_apart) == ()


def test_trap_25_a_small_recurrent_op_is_a_warning_and_a_cell_has_other_advice() -> None:
    model = module(lambda self, x: self.fc(self.cell(x)), cell=nn.GRUCell(4, 4), fc=nn.Linear(4, 400))
    (row,) = found("opaque-recurrent", model, torch.randn(2, 4))
    assert (row.severity, row.name) == ("warning", "cell/gru_cell")
    assert row.fix == "write the cell with nn.Linear: a product of the input, one of the state, and the gates"


def test_attention_in_one_op_is_a_note_with_the_offer_to_take_it_apart() -> None:
    model = module(lambda self, x: self.mha(x, x, x, need_weights=False)[0], mha=nn.MultiheadAttention(8, 2))
    (row,) = found("opaque-attention", model, torch.randn(3, 2, 8))
    assert (row.severity, row.name) == ("note", "mha/scaled_dot_product_attention")
    assert 'decompose=("attention",)' in row.fix


# -- unfoldable-batch-norm ---------------------------------------------------------------------------------------------


def test_trap_33_unfoldable_batch_norm() -> None:
    preact = nn.Sequential(nn.BatchNorm2d(3), conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)).eval()
    rows = found("unfoldable-batch-norm", preact, images())
    assert [(row.severity, row.name, row.why) for row in rows] == [
        ("warning", "0/batch_norm", "it reads an input, and stays a float op"),
        ("warning", "4/batch_norm", "it reads relu, and stays a float op"),
    ]


def test_a_linear_folds_its_batch_norm_in_two_dimensions_only() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval()
    assert found("unfoldable-batch-norm", model, torch.randn(2, 4)) == ()
    (row,) = found("unfoldable-batch-norm", model, torch.randn(2, 6, 4))
    assert row.why == "it reads linear with 3 dimensions, and stays a float op"
    assert reason("unfoldable-batch-norm", nn.Linear(4, 2).eval(), torch.randn(2, 4)) == "to models without batch norm"


# -- fixed-batch -------------------------------------------------------------------------------------------------------


def test_trap_32_guards_fix_the_batch() -> None:
    program = exported(nn.Linear(4, 2), torch.randn(8, 4))
    for subject in (program, program.module()):
        (row,) = found("fixed-batch", subject)
        assert (row.severity, row.name) == ("warning", "input")
        assert row.why == "accepts size 8 in dimension 0; _guards_fn fails on any other, before and after convert"
        assert "dynamic_shapes={'input': {0: torch.export.Dim.AUTO}}" in row.fix
    with pytest.raises(AssertionError, match="Guard failed"):
        program.module()(torch.randn(4, 4))
    assert found("fixed-batch", program.module(check_guards=False)) == ()


def test_trap_32_a_dynamic_batch_is_fine_and_a_fixed_one_of_a_capture_a_note() -> None:
    linear = nn.Linear(4, 2).eval()
    dynamic = {"input": {0: Dim("batch")}}
    assert found("fixed-batch", exported(linear, torch.randn(8, 4), dynamic_shapes=dynamic)) == ()
    assert found("fixed-batch", linear, torch.randn(8, 4), dynamic_shapes=dynamic) == ()
    (row,) = found("fixed-batch", linear, torch.randn(8, 4))
    assert (row.severity, row.why) == ("note", "accepts only batches of 8")


# -- random-op, no-float-output, written-buffer ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        pytest.param(lambda self, x: x + torch.rand_like(x), ["rand_like"], id="rand_like"),
        pytest.param(lambda self, x: torch.bernoulli(x.sigmoid()), ["bernoulli"], id="bernoulli"),
        pytest.param(lambda self, x: F.dropout(x, training=False), [], id="dropout in eval mode"),
        pytest.param(lambda self, x: F.rrelu(x, training=False), [], id="rrelu in eval mode"),
        pytest.param(lambda self, x: F.scaled_dot_product_attention(x, x, x), [], id="attention"),
    ],
)
def test_random_ops_are_those_that_draw_in_eval_mode(forward: Callable[..., Any], expected: list[str]) -> None:
    assert places("random-op", exported(module(forward), torch.randn(2, 4, 4))) == expected


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        pytest.param(lambda self, x: x.argmax(-1), ["forward returns only int64"], id="argmax"),
        pytest.param(lambda self, x: (x > 0, x.argmax()), ["forward returns only bool, int64"], id="several"),
        pytest.param(lambda self, x: {"logits": x * 2, "top": x.argmax()}, [], id="logits too"),
    ],
)
def test_outputs_need_one_of_floating_point(forward: Callable[..., Any], expected: list[str]) -> None:
    assert [row.why for row in found("no-float-output", module(forward), torch.randn(2, 4))] == expected


def test_buffers_are_named_where_forward_writes_to_them() -> None:
    from tests.models import Counter

    assert places("written-buffer", Counter().eval(), images()) == ["calls"]
    assert places("written-buffer", residual(), images()) == []


# -- modules and weights -----------------------------------------------------------------------------------------------


def test_modules_that_are_never_called_are_named_at_the_outermost() -> None:
    head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = module(lambda self, x: self.body(x), body=nn.Linear(4, 4), aux=head, relu=nn.ReLU())
    (row,) = found("module-never-called", model, torch.randn(2, 4))
    assert (row.severity, row.name, row.why) == (
        "warning",
        "aux",
        "Sequential with 40 parameters that forward never reads",
    )


def test_modules_whose_weights_are_read_by_another_way_count_as_called() -> None:
    attention = module(lambda self, x: self.mha(x, x, x)[0], mha=nn.MultiheadAttention(8, 2))
    assert places("module-never-called", attention, torch.randn(3, 2, 8)) == []
    tied = module(lambda self, x: self.a(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    tied.b.weight, tied.b.bias = tied.a.weight, tied.a.bias
    assert places("module-never-called", tied, torch.randn(2, 4)) == []


def test_a_module_whose_result_is_thrown_away_is_dead_code_and_not_uncalled() -> None:
    model = module(lambda self, x: (self.b(x), self.a(x))[1], a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    assert places("module-never-called", model, torch.randn(2, 4)) == []
    assert places("dead-code", model, torch.randn(2, 4)) == ["b/linear"]


def test_shared_modules_are_named_at_the_outermost_with_their_calls() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = module(lambda self, x: self.block(self.relu(self.block(x))), block=block, relu=nn.ReLU())
    (row,) = found("shared-module", model, torch.randn(2, 4))
    assert (row.severity, row.name) == ("note", "block")
    assert row.why == "called 2 times; each call has its own scales, settings by module name apply to all of them"


@pytest.mark.parametrize("strict", [False, True])
def test_calls_are_counted_in_both_modes_of_export(strict: bool) -> None:
    captured = pt2qa.capture(_shared_relu(), images(), strict=strict)
    assert places("shared-module", captured) == ["relu"]


def test_trap_39_a_quantizer_that_takes_some_calls_only_is_a_warning() -> None:
    model = module(lambda self, x: self.a(self.a(x).tanh()), a=conv(4))
    x = torch.randn(2, 4, 3, 3)
    (row,) = found("shared-module", model, x, quantizer="xnnpack")
    assert (row.severity, row.name) == ("warning", "a")
    assert row.why == "called 2 times, and xnnpack quantizes the weights in 1 of these calls only"
    assert found("shared-module", model, x, quantizer="x86")[0].severity == "note"


def test_a_call_of_which_only_the_activations_are_rounded_does_not_count_as_taken() -> None:
    def annotate(nodes: dict[str, Node]) -> dict[Node, tuple[dict[Node, Any], Any]]:
        (x, weight), y = nodes["linear"].all_input_nodes[:2], nodes["tanh"]
        return {nodes["linear"]: ({x: INT8, weight: WEIGHT}, None), nodes["linear_1"]: ({y: INT8}, None)}

    model = module(lambda self, x: self.a(self.a(x).tanh()), a=nn.Linear(4, 4, bias=False))
    (row,) = found("shared-module", model, torch.randn(2, 4), quantizer=Annotates(annotate))
    assert (row.severity, row.why.partition(" in ")[2]) == ("warning", "1 of these calls only")


def test_trap_27_tied_and_shared_weights() -> None:
    model = module(lambda self, x: self.head(self.e(x)), e=nn.Embedding(10, 4), head=nn.Linear(4, 10, bias=False))
    model.head.weight = model.e.weight
    (row,) = found("shared-weight", model, torch.zeros(2, 3, dtype=torch.long))
    assert (row.severity, row.name) == ("note", "e.weight")
    assert row.why == "one tensor (also called head.weight), read by e/embedding, head/linear"


def test_trap_27_views_of_one_weight_count_and_one_reader_does_not() -> None:
    both = module(
        lambda self, x: F.linear(x, self.a.weight[:2]) * F.linear(x, self.a.weight.t()[:2]), a=nn.Linear(4, 4)
    )
    (row,) = found("shared-weight", both, torch.randn(2, 4))
    assert row.why == "one tensor, read by linear, linear_1"
    assert places("shared-weight", residual(), images()) == []


# -- all of them -------------------------------------------------------------------------------------------------------


def test_a_healthy_model_has_notes_at_most() -> None:
    for quantizer in (None, "x86"):
        findings = pt2qa.check(residual(), images(), quantizer=quantizer, rules=RULES)
        assert {row.rule: row.severity for row in findings} == {"shared-module": "note", "fixed-batch": "note"}


@pytest.mark.parametrize(
    "kind", ["model", "model with inputs", "capture", "program", "graph", "prepared", "pair", "pair of graphs"]
)
def test_every_rule_runs_on_whatever_is_known(kind: str) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    captured = pt2qa.capture(residual(), images())
    graph = captured.module()
    pair = pt2qa.quantize(captured, "x86", [images()], progress=False)
    subjects: dict[str, Callable[[], Any]] = {
        "model": residual,
        "model with inputs": residual,
        "capture": lambda: captured,
        "program": lambda: exported(residual(), images()),
        "graph": lambda: exported(residual(), images()).module(),
        "prepared": lambda: prepare_pt2e(graph, pt2qa.quantizer("x86").build(graph, qat=False)),
        "pair": lambda: pair,
        "pair of graphs": lambda: pt2qa.pair(captured.module(), pair.quantized),
    }
    args = images() if kind == "model with inputs" else None
    quantizer = None if kind.startswith("pair") else "x86"
    findings = pt2qa.check(subjects[kind](), args, quantizer=quantizer, rules=RULES)
    assert [outcome.rule for outcome in findings.rules] == list(RULES)
    reasons = {outcome.reason for outcome in findings.rules if outcome.outcome == "not applied"}
    assert all(text and not text.endswith(".") for text in reasons)
    errors = {row.rule for row in findings if row.severity == "error"}
    assert errors == ({"plain-program"} if kind in ("program", "graph") else set())
