"""Edits that cost nothing: tried side by side, the best kept, none where it is not needed."""

from __future__ import annotations

import pytest
import torch

import pt2qa
from tests.flows import residual_pair
from tests.models import images
from tests.reconfigure.detector import data, detector_pair


def observers_in(fixed: pt2qa.Reconfiguration) -> list[str]:
    return [edit.observer for edit in fixed.plan.edits if edit.kind == "observer"]


@pytest.mark.parametrize(
    ("quantizer", "choices"),
    [("xnnpack", ("minmax", "histogram")), ("x86", ("minmax", "histogram", "moving_average"))],
    ids=["xnnpack", "x86"],
)
def test_of_several_observers_the_one_that_measures_best_is_kept(quantizer: str, choices: tuple[str, ...]) -> None:
    pair = detector_pair(quantizer)

    def fixed(*observers: str) -> pt2qa.Reconfiguration:
        return pt2qa.reconfigure(
            pair, data(), budget={"macs": 0.0}, observers=observers, repairs=(), verify_code=False, progress=False
        )

    def quality(found: pt2qa.Reconfiguration) -> float:
        return next(stage.quality for stage in found.stages if stage.name == "converted")  # on what the search sees

    alone = [quality(fixed(observer)) for observer in choices]
    together = fixed(*choices)
    assert quality(together) == pytest.approx(max(alone), abs=1e-3)
    assert len(observers_in(together)) <= 1  # one edit for all activations, not one on top of another


def test_an_observer_that_is_not_there_is_refused() -> None:
    for observers in (["minmax", "percentile"], "minmax"):
        with pytest.raises(pt2qa.SelectionError, match=r"observers: got .*expected a list of minmax, hist"):
            pt2qa.reconfigure(
                residual_pair(), [images()], target=1.0, observers=observers, verify_code=False, progress=False
            )


def test_sensitivities_of_the_pair_before_its_free_edits_are_said_not_to_be_used() -> None:
    pair = detector_pair("x86")
    given = pt2qa.sensitivity(pair, data(), progress=False)
    edited = pt2qa.reconfigure(
        pair, data(), sensitivity=given, budget={"macs": 0.0}, observers=(), verify_code=False, progress=False
    )
    assert edited.plan.edits
    assert any("sensitivity= is not used" in note for note in edited.notes)


def test_a_trained_pair_keeps_its_ranges_and_is_diagnosed() -> None:
    """Training chose them, and made another model than the captured one."""
    torch.manual_seed(0)
    data = [torch.randn(8, 8) for _ in range(4)]

    def train(graph: torch.fx.GraphModule) -> None:
        optimizer = torch.optim.SGD(graph.parameters(), 0.5)
        for batch in data:
            optimizer.zero_grad()
            (graph(batch) - 1).square().mean().backward()
            optimizer.step()

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    capture = pt2qa.capture(model, data[0])
    pair = pt2qa.quantize(capture, "xnnpack", data, qat=True, train=train, progress=False)
    found = pt2qa.reconfigure(pair, data, target=60, verify_code=False, progress=False)
    assert {row.kind for row in found.rows} <= {"float", "fuse"}
    causes = [row.cause for row in pt2qa.diagnose(pair, data, verify_code=False, progress=False).rows]
    assert "prepare-changed" not in causes
