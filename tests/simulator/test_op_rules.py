"""What is known of each kind of op, against its schema and against what it does to real tensors."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor

from pt2qa._simulator import op_rules

ATEN = torch.ops.aten
X = torch.linspace(-2, 2, 12).reshape(3, 4)
OPS: dict[Any, tuple[str, tuple[Any, ...]]] = {
    ATEN.relu.default: ("pointwise monotone allocates epilogue", (X,)),
    ATEN.relu_.default: ("writes pointwise monotone allocates epilogue shares", (X,)),
    ATEN.clamp.default: ("pointwise monotone allocates epilogue", (X, -1, 1)),
    ATEN.clamp.Tensor: ("allocates epilogue", (X, X)),
    ATEN.sigmoid.default: ("pointwise allocates epilogue", (X,)),
    ATEN.gelu.default: ("allocates epilogue", (X,)),
    ATEN.add.Tensor: ("allocates", (X, X)),
    ATEN.add_.Tensor: ("writes allocates shares", (X, X)),
    ATEN.copy_.default: ("writes shares", (X, X + 1)),
    ATEN.detach_.default: ("shares", (X,)),
    ATEN.softmax.int: ("allocates", (X, 1)),
    ATEN.matmul.default: ("allocates", (X, X.T)),
    ATEN.view.default: ("moves shares", (X, [4, 3])),
    ATEN.permute.default: ("moves shares", (X, [1, 0])),
    ATEN.split.Tensor: ("moves shares", (X, 2)),
    ATEN.contiguous.default: ("moves shares", (X,)),
    ATEN.clone.default: ("moves", (X,)),
    ATEN._to_copy.default: ("moves", (X,)),
    ATEN.dropout.default: ("random epilogue shares", (X, 0.5, False)),
    ATEN.rand_like.default: ("random", (X,)),
    ATEN.empty_like.default: ("uninitialised", (X,)),
    ATEN.new_empty.default: ("uninitialised", (X, [2])),
    ATEN.exp.default: ("", (X,)),
    ATEN.sum.default: ("", (X,)),
    torch.ops.prims.mul.default: ("", (X, X)),
    operator.getitem: ("moves shares", (X, 1)),
}
"""Of each op, what is said of it, and arguments for it."""


def said(target: Any) -> set[str]:
    return {
        word
        for word, rule in {
            "writes": op_rules.mutates_first_argument,
            "pointwise": op_rules.is_pointwise,
            "monotone": op_rules.keeps_order,
            "allocates": op_rules.allocates,
            "moves": op_rules.only_moves,
            "random": op_rules.is_random,
            "uninitialised": op_rules.is_uninitialised,
            "shares": op_rules.may_share_memory,
            "epilogue": lambda each: op_rules.op_of(each) in op_rules.EPILOGUES,
        }.items()
        if rule(target)
    }


@pytest.mark.parametrize("target", OPS, ids=str)
def test_each_op_is_what_it_is_said_to_be(target: Any) -> None:
    words, arguments = OPS[target]
    assert said(target) == set(words.split())
    # ... and does that: memory is compared, and each element alone.
    own = tuple(each.clone() if isinstance(each, Tensor) else each for each in arguments)
    first = own[0]
    with torch.no_grad():
        made = target(*own)
    results = made if isinstance(made, list | tuple) else [made]
    assert ("writes" in words) == (not torch.equal(first, X))
    if any(each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for each in results):
        assert "shares" in words
    if "moves" in words:
        assert all(set(each.flatten().tolist()) <= set(X.flatten().tolist()) for each in results)
    if "pointwise" in words and "writes" not in words:
        assert torch.equal(target(X.flip(0), *arguments[1:]), made.flip(0))
        spelling = op_rules.in_place_spelling(target)
        assert spelling is not None
        assert spelling(first, *arguments[1:]) is first
        assert torch.equal(first, made)
    if "monotone" in words:
        steps = target(X.flatten().clone(), *arguments[1:])
        assert torch.equal(steps, steps.sort().values)


def test_spellings_that_write_and_that_do_not() -> None:
    assert op_rules.functional_spelling(ATEN.relu_.default) is ATEN.relu.default
    assert op_rules.functional_spelling(ATEN.add_.Tensor) is ATEN.add.Tensor
    assert op_rules.functional_spelling(ATEN.relu.default) is ATEN.relu.default
    assert op_rules.functional_spelling(ATEN.zero_.default) in (None, ATEN.zero.default)
    assert op_rules.in_place_spelling(ATEN.relu.default) is ATEN.relu_.default
    assert op_rules.in_place_spelling(ATEN.clamp.default) is ATEN.clamp_.default
    for target in (ATEN.clamp.Tensor, ATEN.gelu.default, ATEN.add.Tensor, ATEN.relu_.default, operator.getitem):
        assert op_rules.in_place_spelling(target) is None
    assert not op_rules.mutates_first_argument(operator.add)
    assert not op_rules.mutates_first_argument(ATEN.ones.default)
    assert not op_rules.mutates_first_argument(ATEN.add.out), "which writes to another argument"
