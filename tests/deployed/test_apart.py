"""A process of its own for native code: where it dies, the op is named, and nobody else dies."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa.cli.group import apart_if_possible
from pt2qa.errors import DeploymentError
from tests.deployed.crashing import Crashing
from tests.interpreted import Interpreted

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).relu()
            x = torch.tanh(x) if number == 0 else x
        return x


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    return pt2qa.quantize(pt2qa.capture(Net().eval(), X), "xnnpack", [X], progress=False)


@pytest.mark.parametrize(("lowers", "how"), [(False, r"SIGABRT\) in lower"), (True, r"SIGSEGV\) in run")])
def test_a_crash_is_an_error_with_the_op(pair: pt2qa.QuantizedPair, lowers: bool, how: str) -> None:
    told = rf"the graph itself: its process died \({how}\(\)\nIt dies of tanh alone. Nothing was compared."
    with pytest.raises(DeploymentError, match=told):
        pt2qa.compare_deployed(pair, [X], backend=Crashing(lowers=lowers), apart=True, progress=False)


@pytest.mark.parametrize("lowers", [False, True])
def test_a_runtime_that_crashes_is_listed_with_the_op_and_the_others_run(
    pair: pt2qa.QuantizedPair, lowers: bool
) -> None:
    runtimes = {"xnnpack": "xnnpack", "crashing": Crashing(lowers=lowers)}
    report = pt2qa.compare_runtimes(pair, [X, 2 * X], runtimes, apart=True, progress=False)
    healthy, crashed = report.runtimes
    assert (healthy.batches, healthy.note, crashed.batches) == (2, "", 0)
    assert 0 < healthy.seconds < 1
    assert re.search(r"its process died \(SIG\w+\) in \w+\(\)\nIt dies of tanh alone\.", crashed.note)
    alone = pt2qa.compare_runtimes(pair, [X, 2 * X], ["xnnpack"], progress=False)
    assert [row.custom for row in report.rows] == [row.custom for row in alone.rows]


def test_reduce_cuts_out_the_op_of_a_crash(pair: pt2qa.QuantizedPair) -> None:
    found = pt2qa.reduce(pair, (X,), "lowering", backend=Crashing(lowers=True), apart=True, progress=False)
    assert found.ops == ("tanh",)
    assert found.shows == "the graph itself: its process died (SIGSEGV) in run()"


def test_a_healthy_backend_gives_the_same_report(pair: pt2qa.QuantizedPair, tmp_path: Path) -> None:
    here, apart = (
        pt2qa.compare_deployed(pair, [X, 2 * X], backend=Interpreted(), apart=each, progress=False)
        for each in (False, True)
    )
    assert str(here) == str(apart)


def test_a_profile_of_kernels_is_the_same_from_a_process_of_its_own_and_a_crash_is_an_error(
    pair: pt2qa.QuantizedPair,
) -> None:
    profile = functools.partial(pt2qa.profile, pair, [X], side="deployed", progress=False)
    here, apart = (profile(backend=Interpreted(), apart=each) for each in (False, True))
    assert here.rows == apart.rows
    with pytest.raises(DeploymentError, match=r"SIGSEGV\) in run\(\)\nIt dies of tanh alone"):
        profile(backend=Crashing(lowers=True), apart=True)
    with pytest.raises(pt2qa.SelectionError, match="apart= apply to side='deployed' only"):
        pt2qa.profile(pair, [X], apart=True)


def test_what_cannot_be_passed_is_refused_and_commands_go_on_without(
    pair: pt2qa.QuantizedPair, capsys: pytest.CaptureFixture[str]
) -> None:
    class Local(Interpreted):
        """No other process can import it."""

    told = "cannot be passed to a process of its own: "
    with pytest.raises(DeploymentError, match=told):
        pt2qa.compare_deployed(pair, [X], backend=Local(), apart=True, progress=False)
    with pytest.raises(DeploymentError, match=told):  # no failure of one runtime of several, which would be listed
        pt2qa.compare_runtimes(pair, [X], {"here": Interpreted(), "local": Local()}, apart=True, progress=False)
    compare = functools.partial(pt2qa.compare_deployed, pair, [X], backend=Local(), progress=False)
    assert apart_if_possible(compare, True).rows == compare().rows
    assert told in capsys.readouterr().err
