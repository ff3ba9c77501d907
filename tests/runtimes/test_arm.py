"""Arm's reference model of TOSA on graphs of ExecuTorch's own quantizer: ``make runtimes`` installs it."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._deployed.deployment import lowerable
from pt2qa.report import DeployedReport
from tests.models import images, residual
from tests.runtimes.nets import EXACT, NETS, fitting, quantized

reference_model = pytest.importorskip("tosa_reference_model")
arm = pytest.importorskip("pt2qa_arm")  # is not imported without its packages
lowering = pytest.importorskip("pt2qa_arm.lowering")
TOSA = arm.TOSA

U55 = "TOSA-1.0+INT+int16+int4+u55"
WIDE = "TOSA-1.0+INT+int16"
DATA = [images(4, seed=1), images(4, seed=2)]


@functools.cache
def on_net(net: str) -> tuple[pt2qa.QuantizedPair, list[Tensor]]:
    return quantized(net, "tosa")


@functools.cache
def compared(net: str) -> DeployedReport:
    pair, batches = on_net(net)
    return pt2qa.compare_deployed(pair, batches)


def plain_delegate(pair: pt2qa.QuantizedPair, batch: Tensor) -> tuple[Tensor, int]:
    """What a script without pt2qa gets: ExecuTorch's lowering, and the reference model on its one delegate."""
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.exir.lowered_backend_module import get_lowered_backend_modules

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(pair.quantized, (batch,))
        edge = to_edge_transform_and_lower(exported, partitioner=[TOSAPartitioner(TosaCompileSpec("TOSA-1.0+INT"))])
    (delegate,) = get_lowered_backend_modules(edge.exported_program().graph_module)
    first, *_, last = [node for node in pair.quantized.graph.nodes if "quantize_per_tensor" in str(node.target)]
    integers = first.target(batch, *first.args[1:])  # type: ignore[operator]
    (found,), status = reference_model.run(delegate.processed_bytes, [integers.numpy()])
    assert status == reference_model.GraphStatus.TOSA_VALID
    return last.target(torch.from_numpy(found), *last.args[1:]), len(delegate.processed_bytes)  # type: ignore[operator]


@pytest.mark.parametrize("net", NETS)
def test_every_value_is_observed_and_all_integers_are_those_of_the_converted_graph(net: str) -> None:
    report = compared(net)
    assert report.backend == "TOSA reference model"
    assert not [row.name for row in report.rows if row.note]
    assert {row.isolated_max_lsb for row in report.rows} == {0.0}
    assert all(row.cumulative_sqnr == float("inf") for row in report.outputs)
    assert "The kernels are right" in str(report)


@pytest.mark.parametrize("net", ["cnn", "block"])
def test_outputs_and_size_are_those_of_a_script_with_executorch_alone(net: str) -> None:
    pair, batches = on_net(net)
    program: Any = arm.TOSABackend().lower(
        lowerable(pair).graph, batches[:1], (), dynamic_shapes=None, progress=lambda _: None
    )
    expected, size = plain_delegate(pair, batches[0])
    (output,) = program.run(batches[:1]).outputs
    assert torch.equal(output, expected)
    assert program.size == size


def test_ops_outside_of_delegates_are_known_with_the_partitioner_s_reason() -> None:
    report = compared("detector")
    assert [row.name for row in report.rows if not row.delegated] == ["down.3/relu"]
    assert "2 TOSA delegates; outside, in ATen's kernels: convolution (1), relu (1)" in report.facts
    assert "relu is not delegated: One or more inputs were not quantized." in report.facts


def test_ops_that_the_quantizer_takes_apart_count_as_delegated() -> None:
    """Arm's passes give some of their parts no handle."""
    report = compared("block")
    assert any("no handle" in row.name for row in report.rows)
    assert all(row.delegated for row in report.rows)


def test_one_graph_runs_on_three_runtimes_which_agree() -> None:
    """ExecuTorch's XNNPACK delegate does not take int32 biases, which is listed."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    pair, batches = quantized("cnn", fitting("tosa"))
    names = ["tosa", "xnnpack", "onnxruntime:int8_activations=true", "openvino"]
    report = pt2qa.compare_runtimes(pair, batches, names)
    assert [runtime.name for runtime in report.runtimes if runtime.note] == ["xnnpack"]
    assert not report.disagreements
    assert {row.right for row in report.rows} == {3}
    tosa = report.runtimes[0]
    assert tosa.seconds > 0
    assert tosa.bytes > 0
    assert "xnnpack did not run" in report.summary()


def test_a_fault_in_one_engine_s_program_is_attributed_to_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of one convolution is halved in the flatbuffer that the reference model reads."""
    pytest.importorskip("openvino")
    pytest.importorskip("onnxruntime")
    pair, batches = on_net("cnn")
    state = pair.quantized.state_dict()
    bias = state[bias_of(pair, "conv2d_1")]
    right, wrong = (each.numpy().tobytes() for each in (bias, bias // 2))
    run = reference_model.run

    def planted(flatbuffer: bytes, arrays: Any) -> Any:
        assert flatbuffer.count(right) == 1
        return run(flatbuffer.replace(right, wrong), arrays)

    monkeypatch.setattr(reference_model, "run", planted)
    names = ["tosa", "onnxruntime:int8_activations=true", EXACT]
    report = pt2qa.compare_runtimes(pair, batches, names)
    assert [(row.name, row.differ, row.right) for row in report.rows if row.differ] == [("conv2/conv2d", ("tosa",), 2)]
    said = " ".join(report.summary().split())
    assert "conv2/conv2d: 2 of 3 compute what the converted graph says, and tosa (" in said
    assert "something else: its kernel is at fault. Cause: its bias is held at 0.5 times its value (tosa)." in said
    assert next(each.apart for each in report.runtimes if each.name == "tosa") < 50


def bias_of(pair: pt2qa.QuantizedPair, conv: str) -> str:
    """The name of the integers of a convolution's bias."""
    (node,) = [node for node in pair.quantized.graph.nodes if node.name == conv]
    return str(node.args[2].args[0].target)  # type: ignore[union-attr]


def test_single_lsbs_are_halves_which_the_converted_graph_rounds_to_even_and_tosa_does_not() -> None:
    """Of the means of four integers, a quarter are halves; TOSA rounds them down, and every other one is even then."""
    x = images(8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AvgPool2d(2)).eval()
    pair = pt2qa.quantize(pt2qa.capture(model, x), "tosa", [x])
    place = lowerable(pair)
    program = lowering.lower("TOSA-1.0+INT", "", place.graph, (x,), tuple(place.wanted), lambda _: None)
    values = program.run((x,)).values
    conv, pooled = (values[each.node] for each in place.values if each.owner is not None)
    params = [each.params for each in place.values if each.owner is not None]
    assert params[0] == params[1]  # one scale, so the means are computed on the integers alone
    zero_point = params[0].zero_point
    sums = torch.nn.functional.avg_pool2d(conv.double() - zero_point, 2, divisor_override=1)
    halves_down = torch.ceil(sums / 4 - 0.5) + zero_point
    assert torch.equal(pooled.double(), halves_down)
    to_even = torch.round(sums / 4) + zero_point
    report = pt2qa.compare_deployed(pair, [x])
    (row,) = [row for row in report.rows if row.op == "avg_pool2d"]
    assert row.isolated_max_lsb == 1
    assert row.isolated_differing == pytest.approx(float((halves_down != to_even).double().mean()))
    assert not report.suspects


def test_batches_of_another_size_are_lowered_anew() -> None:
    shapes = {"input": {0: torch.export.Dim("batch", max=8)}}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    pair = pt2qa.quantize(pt2qa.capture(model, images(4), dynamic_shapes=shapes), "tosa", [images(4)])
    report = pt2qa.compare_deployed(pair, [images(4, seed=1), images(3, seed=2)])
    assert (report.batches, report.samples) == (2, 7)
    assert "lowered for each shape of the inputs: 2" in report.facts
    assert not report.suspects


def test_ethos_u_is_lowered_for_with_vela_s_estimate() -> None:
    pytest.importorskip("ethosu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    pair = pt2qa.quantize(pt2qa.capture(model, images(1)), TOSA(specification=U55), [images(4)[:1]])
    report = pt2qa.compare_deployed(pair, [images(1, seed=1)], backend=f"tosa:specification={U55},vela=ethos-u55-128")
    assert any(fact.startswith("Vela ") and " cycles by its estimate, " in fact for fact in report.facts)
    assert not report.suspects
    with pytest.raises(pt2qa.DeploymentError, match=r"vela=ethos-u85-256 needs .*cf, got TOSA-1.0\+INT"):
        pt2qa.compare_deployed(pair, [images(1)], backend=f"tosa:specification={U55},vela=ethos-u85-256")
    with pytest.raises(pt2qa.DeploymentError, match=r"vela=mine: Unknown ethos target: mine\. Expected one"):
        pt2qa.compare_deployed(pair, [images(1)], backend=f"tosa:specification={U55},vela=mine")


def test_what_tosa_does_not_define_is_an_error_with_the_reference_model_s_words() -> None:
    """ExecuTorch's lowering rescales a sum of int16 products so that the specification calls it unpredictable."""
    plugin = TOSA(activations="int16", specification=WIDE)
    pair = pt2qa.quantize(pt2qa.capture(residual(), images(4)), plugin, [images(4)])
    with pytest.raises(pt2qa.DeploymentError, match=r"says TOSA_UNPREDICTABLE, expected TOSA_VALID.*OpRescale failure"):
        pt2qa.compare_deployed(pair, DATA)


def test_graphs_of_other_quantizers_are_refused_with_what_to_do() -> None:
    pair, batches = quantized("cnn", "xnnpack")
    with pytest.raises(
        pt2qa.DeploymentError,
        match=r"no op is delegated to TOSA-1.0\+INT: .*not marked.*quantize the model with 'tosa'",
    ):
        pt2qa.compare_deployed(pair, batches, backend="tosa")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "activations=int16",
            "needs a specification with int16, got 'TOSA-1.0+INT': use specification=TOSA-1.0+INT+int16",
        ),
        ("specification=TOSA-9", "option specification: got 'TOSA-9': Failed to parse TOSA specification"),
        ("specification=TOSA-1.0+FP", "got 'TOSA-1.0+FP', which has no integers"),
    ],
)
def test_options_are_checked(options: str, said: str) -> None:
    with pytest.raises(pt2qa.PluginError) as caught:
        pt2qa.plugins.resolve(f"tosa:{options}")
    assert said in str(caught.value)


def test_the_quantizer_is_executorch_s_as_it_was_configured() -> None:
    """The graph is that of plain torchao with the quantizer object."""
    from executorch.backends.arm.quantizer import TOSAQuantizer, get_symmetric_quantization_config
    from executorch.backends.arm.tosa import TosaSpecification

    made = TOSAQuantizer(TosaSpecification.create_from_string("TOSA-1.0+INT"))
    made.set_global(get_symmetric_quantization_config(is_per_channel=False))
    graphs = [
        pt2qa.quantize(pt2qa.capture(residual(), images(4)), each, [images(4)]).quantized
        for each in (TOSA(per_channel=False), made)
    ]
    assert str(graphs[0].graph) == str(graphs[1].graph)


def test_it_trains_with_quantization_and_no_program_is_saved(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    pair = pt2qa.quantize(pt2qa.capture(model, images(4)), "tosa", [images(4)], qat=True)
    assert not pt2qa.compare_deployed(pair, [images(4, seed=1)]).suspects
    with pytest.raises(pt2qa.DeploymentError, match="programs of TOSA reference model cannot be written to a folder"):
        pt2qa.compare_deployed(pair, [images(4)], program=tmp_path / "program")


def test_channels_last_values_go_to_the_reference_model_in_its_order() -> None:
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval().to(memory_format=torch.channels_last)
    )
    x = images(4).to(memory_format=torch.channels_last)
    pair = pt2qa.quantize(pt2qa.capture(model, x), "tosa", [x])
    report = pt2qa.compare_deployed(pair, [x])
    assert {row.isolated_max_lsb for row in report.rows} == {0.0}


def test_the_command_prints_json_that_native_prints_do_not_break(tmp_path: Any) -> None:
    import json

    (tmp_path / "flow.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def flow():\n"
        "    torch.manual_seed(0)\n"
        "    x = torch.randn(4, 8)\n"
        "    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (x,), [x]\n"
    )
    command = [sys.executable, "-W", "ignore", "-m", "pt2qa", "deploy", f"{tmp_path}/flow.py:flow", "-q", "tosa"]
    done = subprocess.run([*command, "-o", f"{tmp_path}/out", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert "Different TOSA spec" not in done.stdout + done.stderr


def test_one_batch_s_outputs_without_observing_are_the_same() -> None:
    pair, batches = on_net("cnn")
    program = lowering.lower("TOSA-1.0+INT", "", lowerable(pair).graph, batches[:1], (), lambda _: None)
    assert torch.equal(program.run_alone(batches[:1]).outputs[0], program.run(batches[:1]).outputs[0])
