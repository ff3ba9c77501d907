"""Prepare, calibrate, convert: what can go wrong is an error that says what and what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec, Quantizer

import pt2qa
from tests.check.quantizers import INT8, Annotates, every
from tests.flows import direct_sqnr, quantized_pair, residual_pair
from tests.models import Linears, SharedConv, images, residual

EXAMPLE = (torch.ones(4, 16),)


def test_the_reference_is_the_float_model_and_the_quantized_graph_is_folded() -> None:
    pair = residual_pair()
    assert torch.allclose(pair.reference(images()), residual()(images()), atol=1e-5)
    assert "quantize" in pair.quantized.code
    assert "quantize" not in pair.reference.code
    dtypes = {str(value.dtype) for value in pair.quantized.state_dict().values()}
    assert "torch.int8" in dtypes
    assert pair.quantizer == "xnnpack"
    assert pair.model == "Residual"


def test_quantize_changes_neither_the_model_nor_the_capture() -> None:
    model = residual()
    state = copy.deepcopy(model.state_dict())
    capture = pt2qa.capture(model, images())
    before = capture.module()(images())

    def train(graph: GraphModule) -> None:
        optimizer = torch.optim.SGD(graph.parameters(), 0.1)
        graph(images()).square().mean().backward()
        optimizer.step()

    pt2qa.quantize(capture, "xnnpack", [images()], qat=True, train=train, progress=False)
    pt2qa.quantize(capture, "xnnpack", [images()], progress=False)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(capture.module()(images()), before)


def test_the_reference_shares_its_weights_with_the_model_unless_they_are_folded_or_trained() -> None:
    model = residual()
    own = {value.untyped_storage().data_ptr() for value in model.parameters()}
    capture = pt2qa.capture(model, images())

    def shared(**options: Any) -> set[str]:
        reference = pt2qa.quantize(capture, "xnnpack", [images()], progress=False, **options).reference
        return {n for n, value in reference.state_dict().items() if value.untyped_storage().data_ptr() in own}

    assert shared() == {"fc.weight", "fc.bias"}  # the convolutions have batch norms
    assert not shared(qat=True)


def test_any_torchao_quantizer_object_works() -> None:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    pair = quantized_pair(residual(), images(), quantizer)
    assert pair.quantizer == "XNNPACKQuantizer"
    assert pt2qa.compare_layers(pair, [images()], progress=False).sqnr > 20


def test_targets_in_the_loader_are_left_out_with_inputs_of() -> None:
    capture = pt2qa.capture(residual(), images())
    loader = [(images(), torch.tensor([0, 1]))]
    pair = pt2qa.quantize(capture, "xnnpack", loader, inputs_of=lambda item: item[0], progress=False)
    report = pt2qa.compare_layers(pair, loader, inputs_of=lambda item: item[0], progress=False)
    assert report.samples == 2
    with pytest.raises(pt2qa.BatchError, match=r"the batch has 2 positional inputs; captured with 1.*inputs_of"):
        pt2qa.quantize(capture, "xnnpack", loader, progress=False)


def test_qat_trains_what_becomes_the_reference() -> None:
    seen: list[bool] = []

    def train(graph: GraphModule) -> None:
        optimizer = torch.optim.SGD(graph.parameters(), 1e-4)
        for _ in range(2):
            optimizer.zero_grad()
            (graph(images()) - 1).square().mean().backward()
            optimizer.step()
        seen.append(True)

    with torch.no_grad():  # as diagnose runs
        pair = quantized_pair(residual(), images(), "xnnpack", qat=True, train=train)
    assert seen == [True]
    trained = pair.reference.state_dict()["fc.weight"]
    assert not torch.equal(trained, residual().state_dict()["fc.weight"])
    report = pt2qa.compare_layers(pair, [images()], progress=False)
    assert report.sqnr == pytest.approx(direct_sqnr(pair.reference(images()), pair.quantized(images())), abs=1e-6)
    assert report.sqnr > 10
    with pytest.raises(pt2qa.QuantizeError, match="train was given without qat=True"):
        quantized_pair(residual(), images(), "xnnpack", train=train)


# -- trap 3 -----------------------------------------------------------------------------------------------------------


def test_one_conv_used_twice_with_one_batch_norm_is_right() -> None:
    torch.manual_seed(0)
    model = SharedConv(same_norm=True)
    nn.init.uniform_(model.bn1.weight, 2, 3)
    example = (images(), images(seed=1))
    pair = quantized_pair(model, example)
    assert torch.allclose(pair.reference(*example), model(*example), atol=1e-4)
    names = [row.name for row in pt2qa.compare_layers(pair, [example], progress=False).rows]
    assert {"conv/conv2d", "conv/conv2d_1"} <= set(names)


def test_one_conv_with_two_batch_norms_blames_prepare_and_not_int8() -> None:
    torch.manual_seed(0)
    model = SharedConv(same_norm=False)
    nn.init.constant_(model.bn1.weight, 3.0)
    nn.init.constant_(model.bn2.weight, 0.2)
    example = (images(), images(seed=1))
    try:
        pair = quantized_pair(model, example)
    except pt2qa.QuantizeError as error:
        assert "prepare changed the model before any quantization" in str(error)  # noqa: PT017
        assert "first at conv/conv2d" in str(error)  # noqa: PT017
    else:  # a torchao that folds them rightly
        assert torch.allclose(pair.reference(*example), model(*example), atol=1e-4)


# -- traps 15 and 16 --------------------------------------------------------------------------------------------------


def test_a_quantizer_that_annotates_nothing_is_an_error() -> None:
    class NoLinears(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    with pytest.raises(pt2qa.QuantizeError, match="xnnpack annotated 0 of 1 ops: the model would stay in float"):
        quantized_pair(NoLinears(), EXAMPLE)


class Silent(Quantizer):  # type: ignore[misc]
    """Annotates nothing, and does not say what it takes."""

    def annotate(self, model: GraphModule) -> GraphModule:
        return model

    def validate(self, model: GraphModule) -> None:
        return None


@pytest.mark.parametrize(
    ("quantizer", "says"),
    [
        ("xnnpack:mode=dynamic", "With these options it quantizes linear, conv2d, conv_transpose2d; the model has"),
        ("x86:mode=dynamic", "With these options it quantizes linear; the model has"),
        ("x86", "With these options it quantizes conv1d, conv2d, linear, mul, .*; the model has"),
        (Silent(), "would stay in float. The model has"),
    ],
)
def test_it_says_which_kinds_the_quantizer_takes_and_which_the_model_has(quantizer: Any, says: str) -> None:
    class Trigonometry(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin().cos().sin()

    with pytest.raises(pt2qa.QuantizeError, match=rf"{says} sin \(2\), cos \(1\)\. Check the quantizer's settings"):
        quantized_pair(Trigonometry(), EXAMPLE, quantizer)


def test_forward_under_no_grad_is_quantized_all_the_same() -> None:
    class NoGrad(Linears):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    coverage = {entry.op: entry for entry in quantized_pair(NoGrad(), EXAMPLE).coverage}
    assert coverage["linear"].quantized == 2


def test_no_calibration_batch_is_an_error() -> None:
    capture = pt2qa.capture(Linears().eval(), EXAMPLE)
    with pytest.raises(pt2qa.QuantizeError, match="calibration gave no batch, so no scale is known"):
        pt2qa.quantize(capture, "xnnpack", [], progress=False)
    exhausted: Iterator[tuple[Tensor]] = iter([])
    with pytest.raises(pt2qa.QuantizeError, match="an iterator that was read before is empty"):
        pt2qa.quantize(capture, "xnnpack", exhausted, progress=False)
    with pytest.raises(pt2qa.BatchError, match=r"batches is a single Tensor; expected an iterable.*Pass \[batch\]"):
        pt2qa.quantize(capture, "xnnpack", torch.randn(4, 16), progress=False)


def test_observers_that_never_saw_a_value_are_named() -> None:
    dim = torch.export.Dim("batch", min=0)
    capture = pt2qa.capture(Linears().eval(), EXAMPLE, dynamic_shapes=({0: dim},))
    with pytest.raises(
        pt2qa.QuantizeError, match=r"observers never saw a value in 1 calibration batches: .*second/linear"
    ):
        pt2qa.quantize(capture, "xnnpack", [torch.empty(0, 16)], progress=False)


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_a_calibration_batch_that_no_scale_fits_is_named(value: float, what: str) -> None:
    bad = torch.ones(4, 16)
    bad[0, 0] = value
    capture = pt2qa.capture(Linears().eval(), EXAMPLE)
    with pytest.raises(
        pt2qa.QuantizeError,
        match=rf"^calibration batch 1 \(counted from 0\) holds {what} in the input x, for which no scale fits\. Leave",
    ):
        pt2qa.quantize(capture, "xnnpack", [EXAMPLE, (bad,)], progress=False)


def test_a_quantizer_that_raises_is_named_with_its_reason() -> None:
    from torchao.quantization.pt2e.quantizer import Quantizer

    class Broken(Quantizer):
        def annotate(self, model: GraphModule) -> GraphModule:
            raise IndexError("list index out of range")

        def validate(self, model: GraphModule) -> None:
            return None

    with pytest.raises(
        pt2qa.QuantizeError, match="Broken could not annotate the model: IndexError: list index out of"
    ) as e:
        quantized_pair(Linears(), EXAMPLE, Broken())
    assert isinstance(e.value.__cause__, IndexError)


def test_ragged_batches_need_a_dynamic_dimension_and_the_error_says_so() -> None:
    """Traps 11 and 32."""
    capture = pt2qa.capture(Linears().eval(), EXAMPLE)
    with pytest.raises(pt2qa.BatchError, match=r"shape \[3, 16\]; captured with \[4, 16\].*dynamic_shapes"):
        pt2qa.quantize(capture, "xnnpack", [EXAMPLE, (torch.randn(3, 16),)], progress=False)


def test_an_observer_that_fails_on_integers_is_named_with_the_edit_that_removes_it() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc(x), ids * ids.flip(0)

    batch = torch.ones(2, 4), torch.arange(300, dtype=torch.int32)
    capture = pt2qa.capture(Counts().eval(), batch)
    text = r"the observer of ids failed on values of torch.int32, .* overrides=(.*), or fix .*histogram_cpu"
    with pytest.raises(pt2qa.QuantizeError, match=text) as raised:
        pt2qa.quantize(capture, "x86", [batch], progress=False)
    found = re.search(text, str(raised.value))
    assert found is not None
    plan = eval(found[1], {"pt2qa": pt2qa})
    assert pt2qa.quantize(capture, "x86", [batch], overrides=plan, progress=False).sites[0].name == "x"


def test_an_observer_that_fails_behind_another_names_the_ops_that_ask_for_it() -> None:
    def annotate(nodes: dict[str, Node]) -> dict[Node, tuple[dict[Node, Any], Any]]:
        channels = QuantizationSpec(
            torch.int8, PerChannelMinMaxObserver, -128, 127, torch.per_channel_affine, ch_axis=1
        )
        return {nodes["sum_1"]: ({}, INT8), nodes["mul"]: ({nodes["sum_1"]: channels}, None)}

    class Summed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(1) * 2

    capture = pt2qa.capture(Summed().eval(), EXAMPLE)
    text = (
        r'the observer of sum failed on values of shape \(4,\): .*\(pt2qa.Edit\("float", \(\'mul\', \'sum\',\)\),\)\)'
    )
    with pytest.raises(pt2qa.QuantizeError, match=text):
        pt2qa.quantize(capture, Annotates(annotate), [EXAMPLE], progress=False)
    plan = pt2qa.OverridePlan((pt2qa.Edit("float", ("mul", "sum")),))
    with pytest.raises(pt2qa.QuantizeError, match="annotated 0 of"):
        pt2qa.quantize(capture, Annotates(annotate), [EXAMPLE], overrides=plan, progress=False)


class Masked(nn.Module):
    """A softmax over nothing but masked scores, which is NaN, before a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(x.masked_fill(hidden, float("-inf")).softmax(-1)).nan_to_num()


@pytest.mark.parametrize("observer", [MinMaxObserver, HistogramObserver])
def test_an_op_whose_values_become_nan_in_calibration_is_named(observer: Any) -> None:
    int8 = QuantizationSpec(
        torch.int8, observer, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_affine, is_dynamic=False
    )
    batch = torch.ones(2, 4), torch.tensor([[True] * 4, [False] * 4])
    capture = pt2qa.capture(Masked().eval(), batch)
    with pytest.raises(pt2qa.QuantizeError, match=r"(NaN or infin.*softmax|softmax.*NaN or infin)"):
        pt2qa.quantize(capture, every("linear", int8), [batch], progress=False)
