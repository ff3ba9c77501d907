"""Pretrained models on the kernels that ship: every kernel is right, and what differs at the output has grown."""

from __future__ import annotations

import functools

import pytest

import pt2qa
from pt2qa.report import DeployedReport
from tests.zoo.pairs import captured, pair_of

pytestmark = pytest.mark.zoo

NETS = ("mobilenet_v2", "resnet18", "efficientnet_lite0")


@functools.cache
def deployed(name: str) -> DeployedReport:
    """The first batch on XNNPACK."""
    return pt2qa.compare_deployed(pair_of(name, "xnnpack"), captured(name).batches[:1], progress=False)


@pytest.mark.parametrize("name", NETS)
def test_every_kernel_is_within_one_step(name: str) -> None:
    report = deployed(name)
    assert report.suspects == ()
    assert all(row.isolated_max_lsb <= 1 for row in report.rows), report.worst
    assert max(row.isolated_differing for row in report.rows) < 0.05
    assert not [row.name for row in report.rows if row.note]
    assert report.stage == "converted"
    assert "The kernels are right" in report.summary()


def test_single_steps_grow_along_mobilenet() -> None:
    """Deployed and converted are as far apart as each is from the float model."""
    report = deployed("mobilenet_v2")
    by_name = {row.name: row for row in report.stages}
    assert by_name["deployed"].step_sqnr == pytest.approx(14, abs=1)
    assert by_name["deployed"].sqnr == pytest.approx(by_name["converted"].sqnr, abs=1)
    assert "only the growth of single-LSB differences" in " ".join(report.summary().split())
