"""The sentences of a diagnosis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pt2qa import Target
from pt2qa._diagnosis.rows import CauseRow
from pt2qa._diagnosis.verdict import verdict_of
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Treatment


def score(model: Any) -> float:
    raise NotImplementedError


def searched(now: Outcome, needed: float, *rows: CauseRow) -> Any:
    judge = SimpleNamespace(target=Target(needed, metric=score))
    case = SimpleNamespace(now=now, fault=None, judge=judge, is_judged_on_calibration=False)
    return SimpleNamespace(
        case=case,
        rows=rows,
        needed=needed,
        bounds={},
        from_repair=None,
        repair_helps=False,
        state=Treatment(),
        quality=now,
    )


@pytest.mark.parametrize("needed", [-0.4, 0.0, 3.0])
def test_a_target_of_any_sign_is_not_met(needed: float) -> None:
    found = Outcome(-0.5, (("output", 9.0),))
    row = CauseRow(1, "precision", "a", "", "", "", 0.1, 0.1, 0.0, "few bits", (), "", -0.5, "simulated")
    verdict = verdict_of(searched(found, needed, row), found, interrupted=False)
    assert verdict.endswith(f"few bits (+0.1 score). The target, {needed:g}, is not met.")


def test_a_metric_that_is_nan_is_told_as_such() -> None:
    found = Outcome(float("nan"), (("output", 9.0),))
    verdict = verdict_of(searched(found, 0.5), found, interrupted=False)
    assert verdict == "No diagnosis: score of the quantized model is NaN."
