"""Each option of the XNNPACK plug-in changes what is quantized as it says, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa.errors import PluginError
from pt2qa.plugins import op_type, quantizer
from pt2qa_xnnpack import PLUGIN, XNNPACK
from tests.flows import quantized_pair
from tests.quantizers.graphs import IMAGE, Block, Net, Outcome, export, quantized

FLOAT, TENSOR, CHANNEL, DYNAMIC = "float", "tensor", "channel", "dynamic"


def told(action: Callable[[], object]) -> str:
    with pytest.raises(PluginError) as caught:
        action()
    return str(caught.value)


def test_the_entry_point_holds_the_defaults() -> None:
    assert quantizer("xnnpack") == PLUGIN == XNNPACK(mode="static", per_channel=True)


def test_plain_settings_are_those_of_the_quantizer_itself() -> None:
    graph = export()
    own = PLUGIN.build(graph, qat=False)
    assert isinstance(own, XNNPACKQuantizer)
    assert own.global_config.weight.qscheme == torch.per_channel_symmetric
    assert (own.filter_fn, own.module_name_config, own.global_config.is_qat) == (None, {}, False)
    assert PLUGIN.build(graph, qat=True).global_config.is_qat


class Unfolded(nn.Module):
    """A convolution that is also read past its batch norm, so that ``prepare_pt2e`` cannot fold it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.relu(self.bn(y)) * y


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        pytest.param(lambda: nn.Conv2d(3, 4, 1), "static", id="no-batch-norm"),
        pytest.param(lambda: nn.Linear(8, 4), "dynamic", id="dynamic"),
        pytest.param(Unfolded, "static", id="unfolded"),
    ],
)
def test_the_annotation_is_that_of_the_quantizer_itself(make: Callable[[], nn.Module], mode: Any) -> None:
    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=mode == "dynamic")
    graphs = []
    for each in (XNNPACKQuantizer().set_global(config), XNNPACK(mode=mode).build(export(make()), qat=False)):
        graph = export(make())
        first, *_, output = graph.graph.nodes
        with graph.graph.inserting_before(output):
            graph.graph.call_function(torch.ops.aten.add.Tensor, (first, first))  # dead
        graphs.append(each.annotate(each.transform_for_annotation(graph)))
    theirs, ours = ([(n.name, str(n.meta.get("quantization_annotation"))) for n in g.graph.nodes] for g in graphs)
    assert ours == theirs
    assert any("QuantizationSpec" in annotation for _, annotation in ours)


def test_without_a_batch_norm_no_pattern_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """ExecuTorch's quantizer exports twelve of them at each ``annotate``, which takes seconds."""
    graph, exports = export(Net().blocks[0].conv), []
    own = PLUGIN.build(graph, qat=False)
    monkeypatch.setattr(torch.export, "export", lambda *args, **options: exports.append(args))
    own.annotate(graph)
    assert exports == []
    assert own.SUPPORTED_PATTERNS == XNNPACKQuantizer.SUPPORTED_PATTERNS


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize(("per_channel", "weights"), [(True, CHANNEL), (False, TENSOR)])
def test_weights_are_quantized_per_channel_or_per_tensor(strict: bool, per_channel: bool, weights: str) -> None:
    outcome = quantized(XNNPACK(per_channel=per_channel), strict=strict)
    assert outcome.weights_of("conv2d") == [weights] * 2
    assert outcome.weights_of("linear") == [weights] * 2
    assert outcome.inputs_of("add") == outcome.inputs_of("mul") == outcome.inputs_of("cat") == [TENSOR] * 2
    assert set(outcome.range_of("conv2d") + outcome.range_of("linear")) == {(-128, 127)}


def test_dynamic_mode_quantizes_linears_by_their_input_and_nothing_else() -> None:
    outcome = quantized(XNNPACK(mode="dynamic"))
    assert outcome.inputs_of("linear") == [DYNAMIC, CHANNEL, FLOAT] * 2
    assert set(outcome.inputs_of("conv2d") + outcome.inputs_of("merge") + outcome.inputs_of("pool")) == {FLOAT}


def test_dynamic_convolutions_are_quantized_unless_depthwise_or_before_a_relu() -> None:
    class Convs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Conv2d(3, 8, 3)
            self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
            self.before_relu = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.before_relu(self.depthwise(self.plain(x))))

    outcome = quantized(XNNPACK(mode="dynamic"), Convs())
    assert outcome.inputs_of("plain")[:2] == [DYNAMIC, CHANNEL]
    assert outcome.inputs_of("depthwise")[:2] == [FLOAT, FLOAT]
    assert outcome.inputs_of("before_relu")[:2] == [FLOAT, FLOAT]


@pytest.mark.parametrize("path", ["blocks.0", "blocks.0.conv"])
def test_a_module_has_options_of_its_own(path: str) -> None:
    outcome = quantized(XNNPACK(modules={path: {"per_channel": False}}))
    assert outcome.weights_of("blocks.0") == [TENSOR]
    assert outcome.weights_of("blocks.1") == [CHANNEL]
    assert outcome.weights_of("linear") == [CHANNEL] * 2


def test_xnnpacks_own_module_setting_leaves_convolutions_in_float() -> None:
    """Why the plug-in does not use it; when ExecuTorch mends this, the plug-in can become simpler."""
    config = get_symmetric_quantization_config(is_per_channel=True)
    own = XNNPACKQuantizer().set_global(config).set_module_name("blocks.0", config)
    prepared = prepare_pt2e(export(), own)
    prepared(torch.randn(IMAGE))
    outcome = Outcome(convert_pt2e(prepared))
    assert outcome.weights_of("blocks.0") == [FLOAT]
    assert outcome.weights_of("blocks.1") == [CHANNEL]


def test_a_module_in_a_dynamic_mode_stays_out_of_the_static_one() -> None:
    outcome = quantized(XNNPACK(modules={"head": {"mode": "dynamic"}}))
    assert outcome.inputs_of("linear") == [DYNAMIC, CHANNEL, FLOAT] * 2
    assert outcome.weights_of("conv2d") == [CHANNEL] * 2


def test_a_static_module_in_a_dynamic_model_takes_no_cat_elsewhere() -> None:
    outcome = quantized(XNNPACK(mode="dynamic", modules={"head": {"mode": "static"}}))
    assert outcome.inputs_of("linear") == [TENSOR, CHANNEL, FLOAT] * 2
    assert outcome.inputs_of("cat") == outcome.inputs_of("pool") * 2 == [FLOAT] * 2


def test_the_deepest_module_decides_then_the_op_type() -> None:
    plugin = XNNPACK(
        modules={"blocks": {"per_channel": False}, "blocks.1": {"per_channel": True}},
        op_types={"conv2d": None, "linear": {"per_channel": False}},
    )
    outcome = quantized(plugin)
    assert outcome.weights_of("blocks.0") == [TENSOR]
    assert outcome.weights_of("blocks.1") == [CHANNEL]
    assert outcome.weights_of("linear") == [TENSOR] * 2


def test_a_module_is_left_in_float() -> None:
    outcome = quantized(XNNPACK(modules={"blocks.0": None}))
    assert set(outcome.inputs_of("blocks.0")) == {FLOAT}
    assert outcome.weights_of("blocks.1") == [CHANNEL]
    assert outcome.inputs_of("add") == [TENSOR] * 2


def test_a_container_stands_for_the_modules_in_it() -> None:
    outcome = quantized(XNNPACK(modules={"blocks": None}))
    assert outcome.weights_of("conv2d") == [FLOAT] * 2
    assert outcome.weights_of("linear") == [CHANNEL] * 2


def test_a_cat_and_a_pool_are_left_in_float_though_xnnpack_asks_no_filter_about_them() -> None:
    outcome = quantized(XNNPACK(modules={"merge": None, "pool": None}))
    assert outcome.inputs_of("cat") == [FLOAT] * 2
    assert outcome.inputs_of("pool") == [FLOAT]
    assert outcome.weights_of("linear") == [CHANNEL] * 2


def test_op_types_are_left_in_float() -> None:
    class Apart(nn.Module):
        """Each op behind a sigmoid, so that no neighbour's output makes its input quantized."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear, self.pool = nn.Conv2d(3, 3, 1), nn.Linear(8, 8), nn.AdaptiveAvgPool2d(1)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            x, y = torch.sigmoid(x), torch.tanh(x)
            return self.conv(x), self.linear(x), self.pool(x), x + y, x * y, torch.cat([x, y])

    ops = {"conv2d", "add", "cat", "linear", "mul", "adaptive_avg_pool2d"}
    for left in ({"conv2d", "add", "cat"}, {"linear", "mul", "adaptive_avg_pool2d"}):
        outcome = quantized(XNNPACK(op_types=dict.fromkeys(left)), Apart())
        assert {op for op in ops if set(outcome.inputs_of(op)) == {FLOAT}} == left


def test_ops_that_can_be_set_are_those_that_the_quantizer_annotates_and_executorch_lowers() -> None:
    class Everything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([nn.Conv1d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv3d(4, 4, 1)])
            self.ups = nn.ModuleList([nn.ConvTranspose1d(4, 4, 1), nn.ConvTranspose2d(4, 4, 1)])
            self.ups.append(nn.ConvTranspose3d(4, 4, 1))
            self.linear, self.pool = nn.Linear(2, 2), nn.AdaptiveAvgPool2d(2)
            self.norm = nn.LayerNorm(2)

        def forward(self, x: Tensor) -> Tensor:
            flat, image, volume = x.reshape(1, 4, 16), x.reshape(1, 4, 4, 4), x.reshape(1, 4, 2, 2, 4)
            for conv, up, value in zip(self.convs, self.ups, (flat, image, volume), strict=True):
                x = x + torch.sigmoid(up(torch.sigmoid(conv(value)))).reshape(-1).sum()
            x = self.pool(x * x - 1)
            return torch.matmul(
                self.norm(torch.cat([self.linear(x), x], 1)), torch.softmax(x, -1).repeat(1, 2, 1).transpose(-1, -2)
            )

    graph = export(Everything(), (4, 4, 4))
    XNNPACKQuantizer().set_global(get_symmetric_quantization_config()).annotate(graph)
    annotated = {op_type(n) for n in graph.graph.nodes if n.op == "call_function" and _asks_for_its_own(n)}
    from pt2qa_xnnpack.plugin import QUANTIZED_OPS, WITHOUT_KERNEL

    assert annotated == {*QUANTIZED_OPS, *WITHOUT_KERNEL}


class Volumes(nn.Module):
    """Two linears around convolutions in three dimensions, which XNNPACK has not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(4, 4), nn.Linear(2, 2)
        self.conv, self.up = nn.Sequential(nn.Conv3d(1, 2, 1), nn.ReLU()), nn.ConvTranspose3d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        volume = self.up(self.conv(self.before(x).reshape(1, 1, 2, 2, 2)))
        return self.after(volume.reshape(4, 2))


@pytest.mark.parametrize(
    "options",
    [{}, {"per_channel": False}, {"op_types": {"linear": {"per_channel": False}}}, {"modules": {"after": None}}],
)
def test_convolutions_in_three_dimensions_stay_in_float_so_that_the_model_is_lowered(options: dict[str, Any]) -> None:
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    pair = quantized_pair(Volumes(), x, XNNPACK(**options))
    quantized_ops = {entry.op for entry in pair.coverage if entry.quantized and entry.carries_arithmetic}
    assert quantized_ops == {"linear"}
    assert pt2qa.check(pair, rules=["backend-spec", "xnnpack-outside-product"], progress=False).rows == ()
    # In int8 there is no program; ExecuTorch's own kernels still run none in three dimensions.
    with pytest.raises(pt2qa.DeploymentError, match=r"loaded the program but could not run it: .* 3-D or 4-D"):
        pt2qa.compare_deployed(pair, [x], progress=False)


@pytest.mark.parametrize("edits", [(), (pt2qa.Edit("float", ("after/linear",)),)], ids=["plain", "in float"])
def test_the_code_of_a_quantizer_leaves_them_in_float_too(edits: tuple[pt2qa.Edit, ...]) -> None:
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    pair = quantized_pair(Volumes(), x, XNNPACK(), overrides=pt2qa.OverridePlan(edits) if edits else None)
    assert pair.capture is not None
    code = XNNPACK().quantizer_code(pt2qa.OverridePlan(edits), pair.capture.module())
    made: dict[str, Any] = {}
    exec(code, made)
    other = quantized_pair(Volumes(), x, made["quantizer"])
    assert torch.equal(other.quantized(x), pair.quantized(x))


def test_a_model_of_nothing_else_is_refused() -> None:
    with pytest.raises(pt2qa.QuantizeError, match="xnnpack annotated 0 of 1 ops"):
        quantized_pair(nn.Conv3d(1, 2, 1), torch.zeros(1, 1, 2, 2, 2), XNNPACK())


def _asks_for_its_own(node: Any) -> bool:
    """Whether an op is annotated with more than its producer's scale."""
    annotation = node.meta.get("quantization_annotation")
    return annotation is not None and (
        op_type(node) in ("cat", "adaptive_avg_pool2d")
        or any("Shared" not in type(spec).__name__ for spec in annotation.input_qspec_map.values() if spec is not None)
    )


def test_settings_of_one_module_do_not_need_its_relu_in_it() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv2d(3, 4, 1), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.act(self.conv(x))
            return result

    outcome = quantized(XNNPACK(modules={"conv": {"per_channel": False}}), Apart())
    assert outcome.weights_of("conv") == [TENSOR]
    assert outcome.inputs_of("relu") == [FLOAT]  # fused: nothing between the convolution and its ReLU


def test_a_convolution_called_twice_is_quantized_at_its_first_call_only() -> None:
    """XNNPACK's quantizer takes a weight that is annotated for a region that is; the docstring warns of it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.conv(torch.sigmoid(self.conv(x)))
            return result

    assert quantized(XNNPACK(), Twice()).weights_of("conv2d") == [CHANNEL, FLOAT]


def test_an_input_named_like_an_op_is_no_op() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, cat: Tensor) -> Tensor:
            result: Tensor = self.conv(cat)
            return result

    outcome = quantized(XNNPACK(mode="dynamic", modules={"conv": {"mode": "static"}}), Named())
    assert outcome.inputs_of("conv2d") == [TENSOR, CHANNEL, FLOAT]


def test_qat_takes_all_options() -> None:
    plugin = XNNPACK(modules={"blocks.0": None, "head.1": {"per_channel": False}, "head.3": {"mode": "dynamic"}})
    outcome = quantized(plugin, qat=True)
    assert set(outcome.inputs_of("blocks.0")) == {FLOAT}
    assert outcome.weights_of("blocks.1") == [CHANNEL]
    assert outcome.inputs_of("merge") == [TENSOR] * 6
    assert outcome.inputs_of("head.1") == [TENSOR, TENSOR, FLOAT]
    assert outcome.inputs_of("head.3") == [DYNAMIC, CHANNEL, FLOAT]


def test_building_does_not_change_the_graph() -> None:
    graph = export()
    before = (str(graph.graph), [sorted(node.meta) for node in graph.graph.nodes])
    XNNPACK(modules={"blocks.0": None, "head": {"mode": "dynamic"}}, op_types={"cat": None}).build(graph, qat=False)
    assert (str(graph.graph), [sorted(node.meta) for node in graph.graph.nodes]) == before


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (
            XNNPACK(modules={"block.0": None}),
            "quantizer 'xnnpack': modules['block.0']: no op of the graph comes from a module of this path; did you "
            "mean 'blocks.0' or 'blocks.1' or 'blocks.0.bn'? Modules with something to quantize: blocks, blocks.0, "
            "blocks.0.conv, blocks.1, blocks.1.conv, merge, pool, head, head.1, head.3",
        ),
        (
            XNNPACK(modules={"L['self'].blocks.0.conv": None}),
            "quantizer 'xnnpack': modules[\"L['self'].blocks.0.conv\"]: no op of the graph comes from a module of this "
            "path; did you mean 'blocks.0.conv' or 'blocks.1.conv'",
        ),
        (
            XNNPACK(modules={"blocks.0.relu": {"per_channel": False}}),
            "quantizer 'xnnpack': modules['blocks.0.relu']: nothing in it is quantized on its own: it holds relu. "
            "Settings apply to conv1d, conv2d",
        ),
        (
            XNNPACK(op_types={"conv": None}),
            "quantizer 'xnnpack': op_types['conv']: cannot be set; did you mean 'conv2d' or 'conv1d'? "
            "It takes conv1d, conv2d, conv_transpose1d, conv_transpose2d, linear, add, mul, "
            "cat, adaptive_avg_pool2d",
        ),
        (
            XNNPACK(op_types={"conv1d": None}),
            "quantizer 'xnnpack': op_types['conv1d']: the graph has no conv1d; it has conv2d (2), add (1), mul (1), "
            "cat (1), adaptive_avg_pool2d (1), linear (2)",
        ),
        (
            XNNPACK(op_types={"add": {"mode": "dynamic"}}),
            "quantizer 'xnnpack': op_types['add']: mode 'dynamic' is for linear, conv2d, conv_transpose2d, and there "
            "is only add. Use 'static', or None to leave it in float",
        ),
        (
            XNNPACK(modules={"merge": {"mode": "dynamic"}}),
            "quantizer 'xnnpack': modules['merge']: mode 'dynamic' is for linear, conv2d, conv_transpose2d, and there "
            "is only add, mul, cat. Use 'static', or None to leave it in float",
        ),
    ],
    ids=["path", "prefix", "no quantized op", "op name", "op not there", "dynamic op", "dynamic module"],
)
def test_what_the_graph_or_the_backend_does_not_have_is_refused(plugin: XNNPACK, text: str) -> None:
    assert told(lambda: plugin.build(export(), qat=False)).startswith(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "weight_only"}, "quantizer 'xnnpack': option mode: got 'weight_only', expected static|dynamic."),
        (
            {"modules": {"fc": {"per_chanel": True}}},
            "modules['fc']: quantizer 'xnnpack' has no option 'per_chanel'; did you mean 'per_channel'? Its options: ",
        ),
        (
            {"op_types": {"add": False}},
            "quantizer 'xnnpack': op_types['add']: got False, expected a mapping of options, or None to leave it in "
            "float",
        ),
        (
            {"modules": {"fc": {"modules": {}}}},
            "quantizer 'xnnpack': modules['fc']: modules cannot be set within modules",
        ),
        ({"modules": {0: None}}, "quantizer 'xnnpack': modules: got the key 0, expected a name"),
    ],
)
def test_wrong_options_are_refused_when_the_plugin_is_made(options: dict[str, Any], text: str) -> None:
    assert told(lambda: XNNPACK(**options)).startswith(text)
    assert told(lambda: quantizer("xnnpack", **options)).startswith(text)


def test_small_graphs_are_what_they_claim() -> None:
    assert [op_type(n) for n in export(Block(3, 4)).graph.nodes if n.op == "call_function"] == [
        "conv2d",
        "batch_norm",
        "relu",
    ]
    assert isinstance(Net()(torch.randn(IMAGE)), Tensor)
