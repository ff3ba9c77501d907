"""A plan as Python source does in an export flow of its own what the plan does here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.observer import HistogramObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import pt2qa
from pt2qa import Edit, OverridePlan, SelectionError
from pt2qa.overrides import annotations_of
from pt2qa.plugins import Base, GenericPlugin, edited_quantizer_code, quantizer_code, resolve
from tests.overrides.flows import annotated, captured, edited
from tests.overrides.nets import NETS
from tests.quantizers.graphs import Net

FIRST = ("conv1/conv2d", "bn1/batch_norm", "relu/relu")
OWN_CALLS = [
    ("linear_twice", "x86", ("fc/linear_1",), False),
    ("residual", "xnnpack", ("fc/linear",), True),
    ("residual", "xnnpack", ("conv2/conv2d", "bn2/batch_norm"), True),
    ("residual", "xnnpack", FIRST, True),  # the ReLU goes with its convolution
    ("residual", "x86", ("fc/linear",), True),
    ("residual", "x86", FIRST, False),  # the add behind it would be annotated otherwise
    ("pooled", "xnnpack", ("left/conv2d",), False),  # a pool behind it
    ("conv_twice", "x86", ("conv/conv2d",), False),  # one call of a shared module
]
EDITS = [
    ("mobile", "xnnpack", (Edit("fuse", ("stem.0/conv2d", "stem.2/hardtanh")), Edit("float", ("mean",)))),
    ("mobile", "xnnpack", (Edit("dynamic", ("fc/linear",)), Edit("observer", ("blocks.0/add",), "minmax"))),
    ("pooled", "xnnpack", (Edit("float", ("max_pool2d", "right/conv2d", "relu")), Edit("float", ("cat",)))),
    ("pooled", "x86", (Edit("float", ("max_pool2d_1",)), Edit("observer", ("cat",), "moving_average"))),
    ("mobile", "x86", (Edit("dynamic", ("fc/linear",)),)),
    ("pooled", "xnnpack", (Edit("range", ("x",), scale=0.07, zero_point=3), Edit("range", ("cat",), scale=0.02))),
    ("residual", "x86", (Edit("range", ("relu/relu",), scale=0.03), Edit("range", ("x",), scale=0.5))),
    ("chunks", "xnnpack", (Edit("range", ("chunk[0]",), scale=0.03), Edit("range", ("chunk[1]",), scale=0.04))),
]


def run(code: str, **names: Any) -> Any:
    """The quantizer that the code makes."""
    scope: dict[str, Any] = dict(names)
    exec(compile(code, "code", "exec", dont_inherit=True), scope)
    return scope["quantizer"]


def code_for(net: str, quantizer: str, *edits: Edit) -> str:
    return quantizer_code(resolve(quantizer), OverridePlan(edits), captured(net)[0].module())


@pytest.mark.parametrize(("net", "quantizer", "ops", "in_own_calls"), OWN_CALLS)
def test_the_quantizers_own_calls_are_used_where_they_say_the_same(
    net: str, quantizer: str, ops: tuple[str, ...], in_own_calls: bool
) -> None:
    edit = Edit("float", ops)
    code = code_for(net, quantizer, edit)
    assert ("class Edited" not in code) == in_own_calls
    assert "pt2qa" not in code
    own = annotations_of(captured(net)[0], run(code))
    assert own.edges == annotated(net, quantizer).with_edits([edit]).edges


@pytest.mark.parametrize(("net", "quantizer", "edits"), EDITS)
def test_the_code_edits_the_annotation_alike(net: str, quantizer: str, edits: tuple[Edit, ...]) -> None:
    code = code_for(net, quantizer, *edits)
    assert "pt2qa" not in code
    own = annotations_of(captured(net)[0], run(code))
    assert own.edges == annotated(net, quantizer).with_edits(edits).edges


def test_it_runs_without_pt2qa() -> None:
    """From torch.export to convert, and the outputs are those of the pair."""
    edits = (Edit("fuse", ("stem.0/conv2d", "stem.2/hardtanh")), Edit("float", ("blocks.0.project.0/conv2d",)))
    model, batch = NETS["mobile"]()
    graph = torch.export.export(model, batch).module()
    assert isinstance(graph, GraphModule)
    prepared = prepare_pt2e(graph, run(code_for("mobile", "xnnpack", *edits)))
    prepared(*batch)
    assert torch.equal(convert_pt2e(prepared)(*batch), edited("mobile", "xnnpack", *edits).quantized(*batch))


class Fixed(Quantizer):  # type: ignore[misc]
    """Linears with observers and a fixed scale behind each sigmoid, one spec object for all of them."""

    observed = QuantizationSpec(torch.int8, HistogramObserver.with_args(eps=2**-12), -128, 127, torch.per_tensor_affine)
    fixed = FixedQParamsQuantizationSpec(torch.int8, 1 / 256, -128, -128, 127, torch.per_tensor_affine)

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            annotation = QuantizationAnnotation(
                {node.args[0]: self.observed, node.args[1]: self.observed}, self.observed
            )
            node.meta["quantization_annotation"] = annotation
        for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default):
            annotation = QuantizationAnnotation({node.args[0]: self.observed}, self.fixed)
            node.meta["quantization_annotation"] = annotation
        return model

    def validate(self, model: GraphModule) -> None:
        return None


@pytest.mark.parametrize(
    "edits",
    [
        (Edit("float", ("1/sigmoid",)),),
        (Edit("observer", ("1/sigmoid",), "minmax"), Edit("float", ("2/linear",))),
        (Edit("int16", ("0/linear",)), Edit("observer", ("0/linear",), "minmax")),
        (Edit("dynamic", ("0/linear",)), Edit("range", ("1/sigmoid",), scale=0.5)),
    ],
    ids=lambda edits: "-".join(edit.kind for edit in edits),
)
def test_specs_with_a_fixed_scale_are_edited(edits: tuple[Edit, ...]) -> None:
    torch.manual_seed(0)
    batch = torch.randn(3, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)).eval()
    capture = pt2qa.capture(model, batch)
    pair = pt2qa.quantize(capture, Fixed(), [batch], overrides=OverridePlan(edits), progress=False)
    code = quantizer_code(resolve(Fixed()), OverridePlan(edits), capture.module())
    graph = torch.export.export(model, (batch,)).module()
    prepared = prepare_pt2e(graph, run(code, quantizer=Fixed()))
    prepared(batch)
    assert torch.equal(convert_pt2e(prepared)(batch), pair.quantized(batch))


def test_a_batch_norm_is_left_in_float_in_training() -> None:
    plan = OverridePlan((Edit("float", ("bn2/batch_norm",)),))
    quantizer = resolve("xnnpack")
    code = quantizer_code(quantizer, plan, captured("residual")[0].module(), qat=True)
    own = annotations_of(captured("residual")[0], run(code), qat=True)
    assert own.edges == annotated("residual", "xnnpack", qat=True).with_edits(plan.edits).edges


def test_a_plugin_may_give_its_base_alone() -> None:
    module = "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer"
    imports = (f"from {module} import X86InductorQuantizer, get_default_x86_inductor_quantization_config",)
    base = Base(imports, "X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())")
    capture, _ = captured("pooled")
    plan = OverridePlan((Edit("float", ("cat",)),))
    code = edited_quantizer_code(plan, capture.module(), base)
    assert annotations_of(capture, run(code)).edges == annotated("pooled", "x86").with_edits(plan.edits).edges


def test_only_what_is_needed_is_there() -> None:
    code = code_for("pooled", "xnnpack", Edit("float", ("cat",)))
    assert "class Edited" in code
    assert "def add_to_biases" not in code
    assert "PlaceholderObserver" not in code
    assert "type: ignore" not in code


def test_options_of_the_plugin_are_in_the_code() -> None:
    graph = captured("residual")[0].module()
    plan = OverridePlan((Edit("float", ("fc/linear",)),))
    per_tensor = quantizer_code(pt2qa.quantizer("xnnpack", per_channel=False), plan, graph)
    assert "get_symmetric_quantization_config(is_per_channel=False)" in per_tensor
    narrow = quantizer_code(pt2qa.quantizer("x86", reduce_range=True), plan, graph)
    assert "get_default_x86_inductor_quantization_config(reduce_range=True)" in narrow


def test_what_the_quantizer_has_no_calls_for_is_said() -> None:
    capture = pt2qa.capture(Net().eval(), torch.randn(2, 3, 8, 8))
    plugin = pt2qa.quantizer("xnnpack", modules={"blocks.0": None})
    plan = OverridePlan((Edit("float", ("head.3/linear",)),))
    code = quantizer_code(plugin, plan, capture.module())
    assert code.startswith("# quantizer is what pt2qa.quantizer('xnnpack', ...).build(graph, qat=False) gives")
    own = run(code, quantizer=plugin.build(capture.module(), qat=False))
    assert annotations_of(capture, own).edges == annotations_of(capture, plugin, plan.edits).edges


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_code_for_training_configures_the_quantizer_for_it(quantizer: str) -> None:
    """In QAT, torchao's x86 quantizer fails on a convolution that its own calls leave in float."""
    plan = OverridePlan((Edit("float", ("fc/linear",)),))
    code = quantizer_code(resolve(quantizer), plan, captured("residual")[0].module(), qat=True)
    assert "is_qat=True" in code
    assert "set_module_name_qconfig" not in code
    assert "is_qat" not in code_for("residual", quantizer, *plan.edits)


def test_any_quantizer_gets_code() -> None:
    plain = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    capture, _ = captured("pooled")
    plan = OverridePlan((Edit("float", ("cat",)),))
    code = quantizer_code(GenericPlugin(plain), plan, capture.module())
    assert annotations_of(capture, run(code, quantizer=plain)).edges == annotations_of(capture, plain, plan.edits).edges


def test_an_op_that_is_not_there_is_named() -> None:
    with pytest.raises(SelectionError, match="no op 'fc/linar'; did you mean 'fc/linear'"):
        code_for("residual", "xnnpack", Edit("fuse", ("mean", "fc/linar")))
