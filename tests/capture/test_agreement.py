"""The runs before and after export: whose buffers are put back."""

from __future__ import annotations

import torch
from torch import nn

from pt2qa._capture.exporting import State


def test_state_is_restored_in_place_also_where_forward_put_another_tensor() -> None:
    model = nn.BatchNorm1d(2)
    mean = model.running_mean
    assert mean is not None
    state = State(model)
    assert state.changed() == ()
    mean += 1
    model.running_var = torch.full((2,), 7.0)
    assert state.changed() == ("running_mean", "running_var")
    state.restore()
    assert model.running_mean is mean
    assert mean.tolist() == [0, 0]
    assert model.running_var.tolist() == [1, 1]
