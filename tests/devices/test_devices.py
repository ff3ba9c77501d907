"""A model on another device: everything runs there, and the numbers are those of the CPU."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa import _ranks
from pt2qa._metrics import WITHOUT_FLOAT64
from pt2qa._quantize.plain_flow import plain_flow
from pt2qa.overrides.plan import in_base64
from tests.analyses import ANALYSES, batches, model
from tests.devices import simulated

cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


Found = tuple[list[float], tuple[str, ...]]
"""The numbers of a report, and its notes."""


def found_by(report: Any) -> Found:
    frame = report.to_pandas(extended=True)
    numbers = [float(value) for column in frame.select_dtypes("number") for value in frame[column].dropna()]
    return numbers, tuple(getattr(report, "notes", ()))


def analysed(device: str) -> dict[str, Found]:
    """What all analyses find about a model on a device.  The data is on the CPU."""
    on_device, data = model().to(device), batches()
    pair = pt2qa.quantize(pt2qa.capture(on_device, data[0]), "xnnpack", data, progress=False)
    found = {name: found_by(analysis(pair, data)) for name, analysis in ANALYSES.items()}
    rules = pt2qa.check(pair, batches=data).rules
    failed = tuple(f"{each.rule}: {each.reason}" for each in rules if each.outcome == "failed")
    return found | {"verified": ([], pair.verify(data[0])), "failed rules": ([], failed)}


def on_cuda() -> dict[str, Found]:
    torch.backends.cudnn.allow_tf32 = False
    return analysed("cuda")


def on_sim() -> dict[str, Any]:
    """All that is tested on the simulated device, in one process."""
    return {
        "sim": analysed("sim"),
        "sent": tensors_that_travelled(),
        "deployed": kernels_refused(),
        "strict": misuse_refused(),
        "without float64": without_float64(),
        "default": where_the_caller_makes_tensors(),
        "code": code_that_changes_parameters(),
    }


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What :func:`on_sim` returns in a process of its own, since a device stays once torch knows it."""
    file = tmp_path_factory.mktemp("sim") / "found"
    command = [sys.executable, "-W", "ignore", "-m", "tests.devices.test_devices", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = pickle.loads(file.read_bytes())
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Found]:
    return analysed("cpu")


@pytest.fixture(scope="module", params=["sim", pytest.param("cuda", marks=cuda)])
def found(request: pytest.FixtureRequest) -> tuple[str, dict[str, Found]]:
    return request.param, on_cuda() if request.param == "cuda" else request.getfixturevalue("sim")["sim"]


TOLERANCE = {"sim": 1e-6, "cuda": 0.02}
"""By device, relative.  Simulated values are the CPU's bit for bit, and float32 sums of them are float64 ones."""


@pytest.mark.parametrize("name", ANALYSES)
def test_numbers_are_those_of_the_cpu(name: str, found: Any, expected: dict[str, Found]) -> None:
    device, reports = found
    (ours, _), (theirs, _) = reports[name], expected[name]
    assert len(ours) == len(theirs)
    assert ours == pytest.approx(theirs, rel=TOLERANCE[device], abs=1e-3, nan_ok=True)


def test_the_simulator_gives_the_bits_of_the_converted_graph(found: Any) -> None:
    _, reports = found
    for name in ("verified", "layers", "x86", "as deployed"):
        _, notes = reports[name]
        assert not [note for note in notes if "fused quantize op" in note]


def test_no_rule_of_the_check_fails(found: Any) -> None:
    _, reports = found
    assert reports["failed rules"] == ([], ())


def test_a_report_says_where_the_models_ran(found: Any, expected: dict[str, Found]) -> None:
    device, reports = found
    assert f"both models ran on the device {device}" in reports["layers"][1]
    assert not [note for note in expected["layers"][1] if "device" in note]


def refusal(attempt: Callable[[], object]) -> str:
    try:
        return f"nothing refused: {attempt()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def without_float64() -> list[Found]:
    simulated.FORBIDDEN.add(torch.float64)
    WITHOUT_FLOAT64.add("sim")
    pair = pt2qa.quantize(pt2qa.capture(model().to("sim"), batches()[0]), "xnnpack", batches(), progress=False)
    return [found_by(ANALYSES[name](pair, batches())) for name in WITHOUT]


WITHOUT = ("layers", "exact", "projection", "cases", "profile", "weights", "check", "diagnosis")


def test_a_device_without_float64(sim: dict[str, Any], expected: dict[str, Found]) -> None:
    for name, (ours, _) in zip(WITHOUT, sim["without float64"], strict=True):
        assert ours == pytest.approx(expected[name][0], rel=TOLERANCE["sim"], abs=1e-3)


def code_that_changes_parameters() -> str:
    """What came of executing the printed code of a plan that changes parameters after calibration."""
    torch.manual_seed(0)
    on_device, data = nn.Linear(4, 2).eval().to("sim"), torch.linspace(-1, 1, 32).reshape(8, 4)
    edits = (
        pt2qa.Edit("bias", ("linear",), values=in_base64([0.1, -0.2])),
        pt2qa.Edit("round", ("linear",), values=in_base64([1, -2, 3, -4, 5, -6, 7, 127], "b")),
    )
    plan = pt2qa.OverridePlan(edits)
    pair = pt2qa.quantize(pt2qa.capture(on_device, data), "xnnpack", [data], overrides=plan, progress=False)
    return plain_flow(pair, progress=False).verified


def test_code_that_changes_parameters_runs_on_the_device_of_the_model(sim: dict[str, Any]) -> None:
    assert sim["code"] == "equal"


class Made(nn.Module):
    """Makes a tensor on whatever device is the default."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * torch.full((2,), 2.0)


def where_the_caller_makes_tensors() -> list[Any]:
    """The SQNR of a model that lies on the caller's default device, and of one that does not."""
    found, data = [], torch.linspace(-1, 1, 32).reshape(8, 4)
    for device in ("sim", "cpu"):
        torch.manual_seed(0)
        made = Made().to(device).eval()
        with torch.device("sim"):
            pair = pt2qa.quantize(pt2qa.capture(made, data), "xnnpack", [data], progress=False)
            found.append(pt2qa.compare_layers(pair, [data], progress=False).sqnr)
    return found


def test_forward_may_rely_on_the_callers_default_device(sim: dict[str, Any]) -> None:
    on_device, on_cpu = sim["default"]
    assert on_device == pytest.approx(on_cpu, abs=1e-3)


def kernels_refused() -> str:
    pair = pt2qa.quantize(pt2qa.capture(model().to("sim"), batches()[0]), "xnnpack", batches(), progress=False)
    return refusal(lambda: pt2qa.compare_deployed(pair, batches()))


def test_kernels_of_a_backend_are_compared_on_the_cpu(sim: dict[str, Any]) -> None:
    said = sim["deployed"]
    assert said.startswith("DeploymentError: the pair is on sim:0")
    assert said.endswith("Capture and quantize the model on the CPU.")


def tensors_that_travelled() -> list[tuple[str, list[float]]]:
    sent = _ranks._packed({"batch": (torch.ones(2).to("sim"), torch.zeros(2))})
    return [(each.device.type, each.tolist()) for each in pickle.loads(sent)["batch"]]


def test_tensors_reach_the_same_kind_of_device_on_another_rank(sim: dict[str, Any]) -> None:
    assert sim["sent"] == [("sim", [1.0, 1.0]), ("cpu", [0.0, 0.0])]


def misuse_refused() -> list[str]:
    there, here = torch.ones(3).to("sim"), torch.ones(3)
    assert torch.equal((there * 2 + torch.tensor(1.0)).cpu(), torch.full((3,), 3.0))
    return [refusal(lambda: there + here), refusal(there.numpy)]


def test_the_stand_in_is_strict(sim: dict[str, Any]) -> None:
    mixed, converted = sim["strict"]
    assert "expected all tensors to be on the same device" in mixed
    assert "to numpy" in converted


if __name__ == "__main__":
    simulated.simulate()
    Path(sys.argv[1]).write_bytes(pickle.dumps(on_sim()))
