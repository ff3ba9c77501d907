"""The smallest part that shows a fault: it is found, and its script shows it with the backend alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import pt2qa
from pt2qa import Reduction
from pt2qa.cli import main
from tests.flows import NARROW

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Linears in a row, each with an activation; ``odd`` comes in the middle."""

    def __init__(self, odd: Any = torch.tanh, layers: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.odd = nn.ModuleList([nn.Linear(16, 16) for _ in range(layers)]), odd

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).relu()
            x = self.odd(x) if number == len(self.layers) // 2 else x
        return x


def pair_of(quantizer: Any, odd: Any = torch.tanh, layers: int = 8) -> pt2qa.QuantizedPair:
    return pt2qa.quantize(pt2qa.capture(Net(odd, layers).eval(), X), quantizer, [X], progress=False)


def printed(found: Reduction, folder: Path) -> str:
    """What the script prints, in a process without pt2qa."""
    script = found.save(folder / "part") / "run.py"
    assert "pt2qa" not in script.read_text().partition("# The part:")[0]
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, cwd=folder)
    return done.stdout + done.stderr


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="Inductor's int8 kernels are oneDNN's")
def test_a_kernel_that_differs_is_cut_out_alone(tmp_path: Path) -> None:
    # Kernels of x86 ignore a range of seven bits, where the data exceed it.
    pair = pair_of(pt2qa.quantizer("x86", reduce_range=True))
    found = pt2qa.reduce(pair, (4 * X,), progress=False)
    assert len(found.ops) == 2
    assert (found.fault, found.of) == ("kernel", 17)
    assert found.shows.startswith("The kernel is up to ")
    steps = re.search(r"up to ([\d.]+) integer steps", found.shows)
    assert steps is not None
    assert f"by {float(steps[1]):.4g} at most" in printed(found, tmp_path)
    with pytest.raises(pt2qa.DeploymentError, match="Give a folder that does not exist yet"):
        found.save(tmp_path / "part")
    # Single steps of right kernels, which grow to 58 dB at the output of the second, are no fault.
    for healthy, batch in ((pair_of(pt2qa.quantizer("x86", reduce_range=NARROW)), X), (pair_of("xnnpack"), 4 * X)):
        with pytest.raises(pt2qa.SelectionError, match="the kernels compute what the converted graph computes"):
            pt2qa.reduce(healthy, batch, progress=False)


class Log(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.log() + 1)


def test_nan_is_cut_out_with_the_op_that_makes_it(tmp_path: Path) -> None:
    pair = pt2qa.quantize(pt2qa.capture(Log().eval(), X.abs()), "x86", [X.abs()], progress=False)
    found = pt2qa.reduce(pair, X, "nonfinite", progress=False)
    assert found.ops == ("log",)
    assert found.shows == "Of finite inputs, 1 output has NaN or infinite values."
    assert not found.expected[0].isfinite().all()
    assert found.inputs[0].isfinite().all()
    assert "output 0" in printed(found, tmp_path)
    with pytest.raises(pt2qa.SelectionError, match="all values are finite"):
        pt2qa.reduce(pair, X.abs(), "nonfinite", progress=False)


def test_the_region_that_loses_most_gives_the_isolated_error_of_the_table(tmp_path: Path) -> None:
    pair = pair_of("xnnpack")
    found = pt2qa.reduce(pair, X, "rounding", progress=False)
    rows = pt2qa.compare_layers(pair, [X], progress=False).rows
    worst = min((row for row in rows if row.op != "input"), key=lambda row: row.isolated_sqnr)
    assert worst.name in found.ops
    text = printed(found, tmp_path)
    assert float(re.search(r"([\d.]+) dB apart", text)[1]) == pytest.approx(worst.isolated_sqnr, abs=0.06)  # type: ignore[index]


def test_a_pair_as_deployed_is_cut_out_of_the_graph_that_is_lowered(tmp_path: Path) -> None:
    pair = pair_of("xnnpack:mode=dynamic", layers=2)
    found = pt2qa.reduce(pair.as_deployed(), X, "rounding", progress=False)
    same = pt2qa.reduce(pair, X, "rounding", progress=False)
    assert (found.ops, found.shows) == (same.ops, same.shows)
    assert "dB apart" in printed(found, tmp_path)
    # The device's scales by row are no fault of a kernel.
    assert pt2qa.reduce(pair, X, progress=False).fault == "kernel"
    with pytest.raises(pt2qa.SelectionError, match="the kernels compute what the converted graph computes"):
        pt2qa.reduce(pair.as_deployed(), X, progress=False)


def test_a_model_that_is_refused_is_cut_to_what_is_refused(tmp_path: Path) -> None:
    pair = pair_of("xnnpack", lambda x: torch.linalg.inv(x[:, :8] + 3 * torch.eye(8)).repeat(1, 2), 3)
    with pytest.raises(pt2qa.DeploymentError):
        pt2qa.compare_deployed(pair, [X], progress=False)
    found = pt2qa.reduce(pair, X, "lowering", progress=False)
    assert len(found.ops) <= 2
    assert "linalg_inv" in " ".join(found.ops)
    assert "linalg_inv" in printed(found, tmp_path)
    with pytest.raises(pt2qa.SelectionError, match="the backend lowers it"):
        pt2qa.reduce(pair_of("xnnpack", layers=1), X, "lowering", progress=False)


def test_arguments_that_would_be_ignored_are_refused() -> None:
    pair = pair_of("x86")
    with pytest.raises(pt2qa.SelectionError, match="unknown fault 'nan'; expected one of kernel, lowering"):
        pt2qa.reduce(pair, X, "nan")  # type: ignore[arg-type]
    with pytest.raises(pt2qa.SelectionError, match="is looked for without a backend"):
        pt2qa.reduce(pair, X, "rounding", backend="x86")
    with pytest.raises(pt2qa.BatchError, match=r"captured with 1.* reduce looks at one batch; of a list of them, pass"):
        pt2qa.reduce(pair, [X, X], "rounding")


FLOW = """
import torch
from tests.deployed.test_reduction import Net, X
NAMES = ("model", "example_inputs", "batches", "evaluation")
def flow():
    return dict(model=Net().eval(), example_inputs=X, batches=[X], evaluation=[4 * X])
"""


def test_the_command_writes_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "flow.py").write_text(FLOW)
    args = ["reduce", f"{tmp_path / 'flow.py'}:flow", "-q", "x86:reduce_range=true", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(main, args, prog_name="pt2qa", env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    assert "2 ops of 17" in done.output
    assert done.output.splitlines()[-1] == f"python {tmp_path / 'out'}/part/run.py"
    again = CliRunner().invoke(main, args, prog_name="pt2qa", env={"COLUMNS": "100"})
    assert again.exit_code == 2
    assert "is there already, from an earlier run" in " ".join(again.output.split())
    assert (tmp_path / "out" / "part" / "run.py").is_file()
