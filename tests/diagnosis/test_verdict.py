"""The sentences of a diagnosis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pt2qa import Target
from pt2qa._diagnosis.rows import CauseRow
from pt2qa._diagnosis.verdict import verdict_of
from pt2qa._trials.outcome import Outcome


def score(model: Any) -> float:
    raise NotImplementedError


@pytest.mark.parametrize("needed", [-0.4, 0.0, 3.0])
def test_a_target_of_any_sign_is_still_missed(needed: float) -> None:
    found = Outcome(-0.5, (("output", 9.0),))
    row = CauseRow(1, "precision", "a", "", "", "", 0.1, 0.1, 0.0, "few bits", "", "", -0.5, "simulated")
    case = cast(Any, SimpleNamespace(now=found))
    verdict = verdict_of(case, [row], {}, found, needed, Target(needed, metric=score), interrupted=False)
    assert verdict.endswith(f"few bits (+0.1 score). The target, {needed:g}, is still missed.")


def test_a_metric_that_is_nan_is_told_as_such() -> None:
    found = Outcome(float("nan"), (("output", 9.0),))
    case = cast(Any, SimpleNamespace(now=found, fault=None))
    verdict = verdict_of(case, [], {}, found, 0.5, Target(0.5, metric=score), interrupted=False)
    assert verdict == "No diagnosis: score of the quantized model is nan."
