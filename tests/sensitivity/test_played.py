"""Parameters that are simulated: those that torchao's observers would choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver

from pt2qa._sensitivity.roundings import INTEGERS, clamping, fitted, fitted_by_channel, fitted_weight, rounding
from pt2qa._simulator.program import QuantParams

VALUES = torch.tensor([[0.5, 2.0, 1.0], [-2.0, -0.5, -1.0], [-1.0, 0.3, 0.7], [0.0, 0.0, 0.0]])


def observed(observer: torch.nn.Module, values: Tensor) -> tuple[list[float], list[int]]:
    observer(values)
    scale, zero_point = observer.calculate_qparams()  # type: ignore[operator]  # torchao is not typed
    return scale.tolist(), zero_point.tolist()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_activations_are_fitted_as_by_observers(dtype: torch.dtype) -> None:
    low, high = INTEGERS[str(dtype).removeprefix("torch.")]
    scales, zero_points = observed(
        PerChannelMinMaxObserver(0, dtype=dtype, qscheme=torch.per_channel_affine, quant_min=low, quant_max=high),
        VALUES,
    )
    params = fitted_by_channel(VALUES.amin(1), VALUES.amax(1), 0, low, high)
    assert isinstance(params.scale, Tensor)
    assert isinstance(params.zero_point, Tensor)
    assert (params.scale.tolist(), params.zero_point.tolist()) == (pytest.approx(scales), zero_points)
    for number, row in enumerate(VALUES):
        own = fitted(float(row.min()), float(row.max()), low, high)
        assert (own.scale, own.zero_point) == (pytest.approx(scales[number]), zero_points[number])


def test_weights_are_fitted_as_by_observers() -> None:
    limits = {"dtype": torch.int8, "quant_min": -127, "quant_max": 127}
    for axis in (0, 1, None):
        observer = (
            MinMaxObserver(qscheme=torch.per_tensor_symmetric, **limits)
            if axis is None
            else PerChannelMinMaxObserver(axis, qscheme=torch.per_channel_symmetric, **limits)
        )
        scales, zero_points = observed(observer, VALUES)
        params = fitted_weight(VALUES, axis)
        assert torch.as_tensor(params.scale).flatten().tolist() == pytest.approx(scales)
        assert torch.as_tensor(params.zero_point).flatten().tolist() == zero_points
        assert (params.quant_min, params.quant_max, params.axis) == (-127, 127, axis)


def test_integers_are_the_whole_range() -> None:
    for name, limits in INTEGERS.items():
        info = torch.iinfo(getattr(torch, name))
        assert limits == (info.min, info.max)


@pytest.mark.parametrize("params", [QuantParams("int8", 0.1, None), QuantParams("int8", None, 0)])
def test_parameters_of_each_batch_round_nothing_by_themselves(params: QuantParams) -> None:
    assert clamping(params)(VALUES) is VALUES
    with pytest.raises(ValueError, match="the parameters have no scale or zero point"):
        rounding(params)
