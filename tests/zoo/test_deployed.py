"""Pretrained models on the kernels that ship: every kernel is right, and what differs at the output has grown."""

from __future__ import annotations

import functools

import pytest
import torch

import pt2qa
from pt2qa.report import DeployedReport
from tests.zoo.pairs import captured, pair_of

pytestmark = pytest.mark.zoo


@functools.cache
def deployed(name: str, quantizer: str) -> DeployedReport:
    """The first batch."""
    return pt2qa.compare_deployed(pair_of(name, quantizer), captured(name).batches[:1], progress=False)


# Without VNNI, the kernels do differ: oneDNN adds pairs of products in 16 bits.
vnni = pytest.mark.skipif(not torch.cpu.get_capabilities()["avx512_vnni"], reason="this CPU has no VNNI")


@pytest.mark.parametrize("quantizer", ["xnnpack", pytest.param("x86", marks=vnni)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mobilenet_v2", marks=pytest.mark.xdist_group("deployed_mobilenet")),
        "resnet18",
        "efficientnet_lite0",
    ],
)
def test_every_kernel_is_within_one_step(name: str, quantizer: str) -> None:
    report = deployed(name, quantizer)
    measured = [row for row in report.rows if row.is_measured]
    assert report.suspects == ()
    assert len(measured) > 20
    assert all(row.isolated_max_lsb <= 1 for row in measured if row.observed_at == "dq")
    assert max(row.isolated_differing for row in measured if row.observed_at == "dq") < 0.05
    # XNNPACK runs each op between two roundings; oneDNN computes additions in the kernel of the convolution before.
    assert all(row.note.startswith("the kernel of ") for row in report.rows if not row.is_measured)
    assert quantizer == "x86" or len(measured) == len(report.rows)
    assert report.stage == "converted"
    assert "are right: on the same inputs" in " ".join(report.summary().split())


@pytest.mark.xdist_group("deployed_mobilenet")
def test_single_steps_grow_along_mobilenet() -> None:
    """Deployed and converted are as far apart as each is from the float model."""
    report = deployed("mobilenet_v2", "xnnpack")
    by_name = {row.name: row for row in report.stages}
    assert by_name["deployed"].step_sqnr == pytest.approx(14, abs=1)
    assert by_name["deployed"].sqnr == pytest.approx(by_name["converted"].sqnr, abs=1)
    assert "only single-LSB differences growing along the graph" in " ".join(report.summary().split())
