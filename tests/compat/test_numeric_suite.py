"""The scripts of the Numeric Suite tutorial run with other imports, and their numbers are those of the reports."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import DeQuantStub, QuantStub, fuse_modules

import pt2qa
import pt2qa.compat.numeric_suite as ns
from pt2qa.compat.numeric_suite import default_eval_fn, quantize, quantize_dynamic


class QuantizableBasicBlock(nn.Module):
    """As torchvision writes it for eager mode."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(channels, channels, 3, 1, 1), nn.BatchNorm2d(channels), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1), nn.BatchNorm2d(channels)
        self.add_relu = FloatFunctional()

    def forward(self, x: Tensor) -> Any:
        out = self.relu1(self.bn1(self.conv1(x)))
        return self.add_relu.add_relu(self.bn2(self.conv2(out)), x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.layer1 = nn.Sequential(QuantizableBasicBlock(8), QuantizableBasicBlock(8))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.layer1(self.relu(self.bn1(self.conv1(self.quant(x)))))
        return self.dequant(self.fc(x.mean((2, 3))))

    def fuse_model(self) -> None:
        fuse_modules(self, [["conv1", "bn1", "relu"]], inplace=True)
        for block in self.layer1:
            fuse_modules(block, [["conv1", "bn1", "relu1"], ["conv2", "bn2"]], inplace=True)


def compute_error(x: Tensor, y: Tensor) -> Tensor:
    Ps = torch.norm(x)
    Pn = torch.norm(x - y)
    return 20 * torch.log10(Ps / Pn)


Static = tuple[nn.Module, Any, list[tuple[Tensor, Tensor]]]


@pytest.fixture(scope="module")
def static() -> Static:
    torch.manual_seed(0)
    float_model = ResNet()
    float_model.to("cpu")
    float_model.eval()
    float_model.fuse_model()
    img_data = [
        (torch.rand(2, 3, 10, 10, dtype=torch.float), torch.randint(0, 1, (2,), dtype=torch.long)) for _ in range(2)
    ]
    return float_model, quantize(float_model, default_eval_fn, [img_data], inplace=False), img_data


def test_weights(static: Static) -> None:
    float_model, qmodel, _ = static
    wt_compare_dict = ns.compare_weights(float_model.state_dict(), qmodel.state_dict())
    assert wt_compare_dict["conv1.weight"].keys() == {"float", "quantized"}
    assert wt_compare_dict["conv1.weight"]["float"].shape == wt_compare_dict["conv1.weight"]["quantized"].shape
    rows = {f"{row.module}.weight": row for row in pt2qa.compare_weights(qmodel.pair).rows if row.attr == "weight"}
    errors = {
        key: float(compute_error(entry["float"].double(), entry["quantized"].dequantize().double()))
        for key, entry in wt_compare_dict.items()
    }
    expected = {key.replace(".0.weight", ".weight"): row.sqnr for key, row in rows.items()}
    assert errors == pytest.approx(expected, abs=1e-4)
    assert len(errors) == 6


def test_plain_state_dicts_are_compared_name_by_name(static: Static) -> None:
    _, qmodel, _ = static
    file = io.BytesIO()
    torch.save(dict(qmodel.state_dict()), file)
    file.seek(0)
    loaded = torch.load(file)
    floats = {"fc.weight": torch.ones(10, 8), "fc.bias": torch.zeros(10), "other.weight": torch.ones(1)}
    found = ns.compare_weights(floats, loaded)
    assert list(found) == ["fc.weight"]
    assert found["fc.weight"]["float"] is floats["fc.weight"]
    assert torch.equal(found["fc.weight"]["quantized"], qmodel.state_dict()["fc.weight"])


def test_outputs_at_matching_modules(static: Static) -> None:
    float_model, qmodel, img_data = static
    data = img_data[0][0]
    act_compare_dict = ns.compare_model_outputs(float_model, qmodel, data)
    assert act_compare_dict["conv1.stats"].keys() == {"float", "quantized"}
    assert act_compare_dict["conv1.stats"]["float"][0].shape == (2, 8, 8, 8)
    assert act_compare_dict["conv1.stats"]["quantized"][0].shape == (2, 8, 8, 8)
    assert torch.equal(act_compare_dict["fc.stats"]["float"][0], qmodel.pair.reference(data))
    assert torch.equal(act_compare_dict["fc.stats"]["quantized"][0], qmodel.pair.quantized(data))
    # Of the float model itself, in which the convolution has the batch norm folded into it, and the relu behind it.
    expected = float_model.get_submodule("conv1")(data)
    torch.testing.assert_close(act_compare_dict["conv1.stats"]["float"][0], expected)
    rows = {row.name: row for row in pt2qa.compare_modules(qmodel.pair, [data], modules=["layer1.0.conv2", "fc"]).rows}
    for name, row in rows.items():
        both = act_compare_dict[f"{name}.stats"]
        error = compute_error(both["float"][0].double(), both["quantized"][0].dequantize().double())
        assert float(error) == pytest.approx(row.sqnr, abs=1e-4)


def test_several_batches(static: Static) -> None:
    float_model, qmodel, img_data = static
    ns.prepare_model_outputs(float_model, qmodel)
    for data in img_data:
        float_model(data[0])
        qmodel(data[0])
    act_compare_dict = ns.get_matching_activations(float_model, qmodel)
    alone = [ns.compare_model_outputs(float_model, qmodel, data[0]) for data in img_data]
    for key, both in act_compare_dict.items():
        for side, values in both.items():
            assert all(torch.equal(value, own[key][side][0]) for value, own in zip(values, alone, strict=True))


def test_a_logger_of_ones_own(static: Static) -> None:
    float_model, qmodel, img_data = static

    class MyOutputLogger(ns.Logger):
        def __init__(self) -> None:
            super().__init__()
            self.stats["largest"] = []

        def forward(self, x: Any) -> Any:
            self.stats["largest"].append(float(x.max()))
            return x

    data = img_data[0][0]
    assert ns.compare_model_outputs(float_model, qmodel, data, logger_cls=MyOutputLogger) == {}  # it keeps no tensor
    expected = float(qmodel.pair.quantized(data).detach().max())
    assert ns.get_logger_dict(qmodel)["fc.stats"]["largest"] == [expected]
    assert ns.get_logger_dict(qmodel, "model")["model.fc.stats"]["largest"] == [expected]


def test_blocks_beside_their_float_blocks_on_the_same_input(static: Static) -> None:
    float_model, qmodel, img_data = static
    data = img_data[0][0]
    module_swap_list = [QuantizableBasicBlock]
    ob_dict = ns.compare_model_stub(float_model, qmodel, module_swap_list, data)
    assert list(ob_dict) == ["layer1.0.stats", "layer1.1.stats"]
    assert ob_dict["layer1.0.stats"]["float"][0].shape == (2, 8, 8, 8)
    for row in pt2qa.compare_modules(qmodel.pair, [data], modules=[QuantizableBasicBlock]).rows:
        both = ob_dict[f"{row.name}.stats"]
        error = compute_error(both["float"][0].double(), both["quantized"][0].dequantize().double())
        assert float(error) == pytest.approx(row.isolated_sqnr, abs=1e-4)
    block, conv = float_model.get_submodule("layer1.1"), float_model.get_submodule("conv1")
    expected = block(float_model.get_submodule("layer1.0")(conv(data)))
    torch.testing.assert_close(ob_dict["layer1.1.stats"]["float"][0], expected)


def test_stubs_on_several_batches(static: Static) -> None:
    float_model, qmodel, img_data = static

    class MyShadowLogger(ns.Logger):
        def forward(self, x: Tensor, y: Tensor) -> None:
            self.stats.setdefault("errors", []).append(float((x - y).abs().max()))

    ns.prepare_model_with_stubs(float_model, qmodel, [QuantizableBasicBlock], ns.ShadowLogger)
    for data in img_data:
        qmodel(data[0])
    kept = ns.get_logger_dict(qmodel)["layer1.0.stats"]
    ns.prepare_model_with_stubs(float_model, qmodel, [QuantizableBasicBlock], MyShadowLogger)
    for data in img_data:
        qmodel(data[0])
    expected = [float((x - y).abs().max()) for x, y in zip(kept["quantized"], kept["float"], strict=True)]
    assert ns.get_logger_dict(qmodel)["layer1.0.stats"]["errors"] == expected
    assert min(expected) > 0


class LSTMModel(nn.Module):
    """Container module with an encoder, a recurrent module, and a decoder."""

    def __init__(self, ntoken: int, ninp: int, nhid: int, nlayers: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nhid = nhid
        self.nlayers = nlayers

    def forward(self, input: Tensor, hidden: tuple[Tensor, Tensor]) -> Any:
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output), hidden

    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def test_dynamic_quantization_of_an_lstm() -> None:
    torch.manual_seed(0)
    float_model = LSTMModel(10, 32, 16, 2)
    input_, hidden = torch.randint(10, (1, 1), dtype=torch.long), float_model.init_hidden(1)
    qmodel = quantize_dynamic(float_model, {nn.LSTM, nn.Linear}, dtype=torch.qint8, example=(input_, hidden))

    wt_compare_dict = ns.compare_weights(float_model.state_dict(), qmodel.state_dict())
    errors = {}
    for key in wt_compare_dict:
        if wt_compare_dict[key]["quantized"].is_quantized:
            errors[key] = compute_error(wt_compare_dict[key]["float"], wt_compare_dict[key]["quantized"].dequantize())
        else:
            errors[key] = compute_error(wt_compare_dict[key]["float"], wt_compare_dict[key]["quantized"])
    assert errors.pop("encoder.weight") == float("inf")  # it stays in float
    assert sorted(errors) == [
        *("decoder.weight", "rnn.weight_hh_l0", "rnn.weight_hh_l1", "rnn.weight_ih_l0", "rnn.weight_ih_l1"),
    ]
    assert all(44 < float(error) < 52 for error in errors.values())

    act_compare_dict = ns.compare_model_outputs(float_model, qmodel, input_, hidden)
    assert list(act_compare_dict) == ["encoder.stats", "rnn.stats", "decoder.stats"]
    output, state = float_model.eval().rnn(float_model.encoder(input_), hidden)
    logged = act_compare_dict["rnn.stats"]["float"][0]
    torch.testing.assert_close(logged[0], output)
    for value, expected in zip(logged[1:], state, strict=True):
        torch.testing.assert_close(value, expected)
    for both in act_compare_dict.values():
        assert compute_error(both["float"][0][0], both["quantized"][0][0]) > 20

    ob_dict = ns.compare_model_stub(float_model, qmodel, [nn.LSTM, nn.Linear], input_, hidden)
    assert list(ob_dict) == ["rnn.stats", "decoder.stats"]
    torch.testing.assert_close(ob_dict["rnn.stats"]["float"][0], output)
    assert compute_error(ob_dict["decoder.stats"]["float"][0], ob_dict["decoder.stats"]["quantized"][0]) > 20


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda model, x: ns.compare_model_outputs(model, model, x), "Linear; expected what quantize"),
        (lambda model, x: ns.QuantizedModel(model), "Linear"),
        (
            lambda model, x: ns.compare_model_outputs(model, quantize(model, lambda net: net(x), []), x),
            "no module to log",
        ),
        (lambda model, x: quantize(model, default_eval_fn, [[(x, 0)]], inplace=True), "inplace=True"),  # type: ignore[arg-type]
        (lambda model, x: quantize(model, default_eval_fn, [[]]), "run_fn did not call the model"),
        (lambda model, x: quantize_dynamic(model, {nn.Conv2d}, example=(x,)), "expected torch.qint8, and nn.Linear"),
        (lambda model, x: quantize_dynamic(model, dtype=torch.float16, example=(x,)), "dtype is torch.float16"),
    ],
)
def test_what_cannot_be_done_is_said(call: Any, named: str) -> None:
    with pytest.raises(pt2qa.Pt2qaError, match=named):
        call(nn.Linear(4, 2).eval(), torch.ones(1, 4))


def test_a_batch_that_counts_nowhere_is_an_error() -> None:
    model, x = nn.Sequential(nn.Linear(4, 2)), torch.linspace(-1, 1, 8).reshape(2, 4)
    qmodel = quantize(model, lambda net: net(x), [])
    with pytest.raises(pt2qa.BatchError, match="NaN"):
        ns.compare_model_outputs(model, qmodel, x * float("nan"))
