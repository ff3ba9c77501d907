"""The models are small and the same on every machine, and their spellings compute the same, op for op."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pt2qa._conformance.trial import captured, exported
from pt2qa.testing import MODELS, ConformanceModel

SPELLINGS = [(name, spelling) for name, model in MODELS.items() for spelling in model.spellings]
PATTERNS = {
    *("conv_bn_relu", "conv_relu6", "linear_relu", "residual_add", "cat", "add_self", "cat_self", "shared_relu"),
    *("shared_conv", "two_users", "transpose", "permute", "reshape", "max_pool", "attention", "multihead_attention"),
    *("lstm", "lstm_decomposed", "dynamic_batch", "embedding", "integers", "buffer", "literal", "tied_weights"),
    *("depthwise", "grouped", "dilated", "conv_transpose", "dead_code"),
}


def test_every_pattern_has_its_model() -> None:
    assert set(MODELS) >= PATTERNS
    assert all(name == model.name and model.pattern for name, model in MODELS.items())


@pytest.mark.parametrize("name", MODELS)
def test_models_are_small_and_the_same_every_time(name: str) -> None:
    model = MODELS[name]
    torch.manual_seed(123)  # what the caller draws changes nothing
    first, (batch, other) = model.build(), model.batches()
    torch.manual_seed(321)
    again, (same, _) = model.build(), model.batches()
    assert not any(part.training for part in first.modules())
    assert sum(parameter.numel() for parameter in first.parameters()) < 2000
    torch.testing.assert_close(dict(first.state_dict()), dict(again.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(batch, same, rtol=0, atol=0)
    assert any(not torch.equal(one, two) for one, two in zip(batch, other, strict=True))


def test_building_leaves_the_random_numbers_of_the_caller_alone() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    MODELS["conv_bn_relu"].build()
    MODELS["conv_bn_relu"].batches()
    assert torch.equal(torch.randn(3), expected)


def test_batch_norms_have_seen_data() -> None:
    norm = MODELS["conv_bn"].build().bn
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_mean.abs().min() > 0


@pytest.mark.parametrize(("name", "spelling"), SPELLINGS)
def test_a_spelling_computes_the_same_with_as_many_ops(name: str, spelling: str) -> None:
    model = MODELS[name]
    with torch.no_grad():
        expected, found = model.build()(*model.batches()[0]), model.build(spelling)(*model.batches()[0])
    torch.testing.assert_close(found, expected)
    spelled, first = exported(model, False, spelling), exported(model, False)
    assert len(spelled.capture.names) == len(first.names)
    assert list(spelled.names.values()) == list(first.names.values())


def test_dynamic_batch_takes_any_number_of_samples() -> None:
    capture = captured(MODELS["dynamic_batch"])
    capture.check_batch((torch.randn(7, 3, 8, 8),))


def test_graphs_with_more_ops_are_named_by_kind_and_ordinal() -> None:
    model = ConformanceModel(
        "relus",
        "two ReLUs",
        lambda: nn.Sequential(nn.ReLU(), nn.ReLU()),
        lambda: (torch.randn(2, 2),),
        {"longer": lambda: nn.Sequential(nn.ReLU(), nn.Tanh(), nn.ReLU())},
    )
    names = exported(model, False, "longer").names.values()
    assert [name.name for name in names] == ["input", "0/relu", "1/tanh", "1/relu"]
