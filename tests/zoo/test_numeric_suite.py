"""The tutorial's ResNet-18, written and fused for eager mode, through the functions of Numeric Suite."""

from __future__ import annotations

import pytest
import torch

import pt2qa
import pt2qa.compat.numeric_suite as ns
from tests.zoo.models import torchvision_models

pytestmark = pytest.mark.zoo


def test_the_tutorial_on_resnet18() -> None:
    quantizable = torchvision_models().quantization
    torch.manual_seed(0)
    float_model = quantizable.resnet18(weights=None, quantize=False).eval()
    float_model.fuse_model()
    img_data = [(torch.rand(2, 3, 10, 10), torch.randint(0, 1, (2,))) for _ in range(2)]
    qmodel = ns.quantize(float_model, ns.default_eval_fn, [img_data], inplace=False)

    weights = ns.compare_weights(float_model.state_dict(), qmodel.state_dict())
    assert {"conv1.weight", "layer2.0.downsample.0.weight", "fc.weight"} <= weights.keys()
    assert len(weights) == 21
    assert all(35 < pt2qa.sqnr(each["float"], each["quantized"].dequantize()) < 55 for each in weights.values())

    data = img_data[0][0]
    outputs = ns.compare_model_outputs(float_model, qmodel, data)
    assert outputs["conv1.stats"]["float"][0].shape == (2, 64, 5, 5)
    with torch.no_grad():
        torch.testing.assert_close(outputs["conv1.stats"]["float"][0], float_model.conv1(data))
        torch.testing.assert_close(outputs["fc.stats"]["float"][0], float_model(data))
        assert torch.equal(outputs["fc.stats"]["quantized"][0], qmodel(data))

    blocks = ns.compare_model_stub(float_model, qmodel, [quantizable.resnet.QuantizableBasicBlock], data)
    assert list(blocks) == [f"layer{layer}.{block}.stats" for layer in (1, 2, 3, 4) for block in (0, 1)]
    assert all(pt2qa.sqnr(each["float"][0], each["quantized"][0]) > 25 for each in blocks.values())
