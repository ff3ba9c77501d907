"""What ships after a repair runs the kernels that it ran before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import pt2qa
from tests.repair.nets import batches, clipped_pair, encoder_pair, post_norm_pair, sequences

Made = Callable[[str], pt2qa.QuantizedPair]


def shifted(quantizer: str) -> pt2qa.QuantizedPair:
    return post_norm_pair(quantizer, 30.0)


def scaled(quantizer: str) -> pt2qa.QuantizedPair:
    return encoder_pair(quantizer, 50.0)


# Lowering a transformer to XNNPACK with all of its values observed takes minutes. x86 has seven bits here: a CPU
# without VNNI adds pairs of products of eight bits in sixteen.
@pytest.mark.parametrize(
    ("quantizer", "make", "methods", "kind"),
    [
        ("xnnpack", clipped_pair, ["ranges", "biases"], "range"),
        ("x86:reduce_range=true", clipped_pair, ["ranges", "biases"], "range"),
        ("x86:reduce_range=true", shifted, ["shifting"], "shift"),
        ("x86:reduce_range=true", scaled, ["equalization"], "scale"),
    ],
)
def test_the_kernels_stay_as_they_are(quantizer: str, make: Made, methods: list[str], kind: str) -> None:
    pair, data = make(quantizer), batches if make is clipped_pair else sequences
    repaired = pt2qa.repair(pair, data(seed=9), methods=methods, verify_code=False, progress=False)
    assert kind in {edit.kind for edit in repaired.plan.edits}
    before, after = (pt2qa.compare_deployed(each, data(count=1), progress=False) for each in (pair, repaired.pair))
    assert before.facts
    assert after.facts == before.facts
    assert [(row.name, row.dtype, row.delegated) for row in after.rows] == [
        (row.name, row.dtype, row.delegated) for row in before.rows
    ]
    assert not after.suspects
