"""Several processes on parts of the data: the numbers of one process on all of it, on every rank."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchao.quantization.pt2e import observer as observers

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._quantize.calibration import share_observed
from pt2qa.cli import main


def spawned(task: Callable[..., Any], size: int, folder: Path, *, tells: bool = False) -> list[Any]:
    """What a function of the ranks returns in each of so many processes, or the text of its error.

    With ``tells`` the function also gets one with which a process says so before it dies.
    """
    context = torch.multiprocessing.get_context("fork")
    readers, workers = [], []
    for rank in range(size):
        reader, writer = context.Pipe(duplex=False)
        workers.append(context.Process(target=_work, args=(task, rank, size, folder / "store", writer, tells)))
        workers[-1].start()
        writer.close()
        readers.append(reader)
    found = []
    for rank, reader in enumerate(readers):
        assert reader.poll(PATIENCE), f"rank {rank} has not answered in {PATIENCE} seconds"
        found.append(reader.recv())
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    return found


PATIENCE = 120


def _work(task: Callable[..., Any], rank: int, size: int, store: Path, answers: Any, tells: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        with pt2qa.distributed() as ranks:
            result = task(ranks, answers.send) if tells else task(ranks)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
        if not isinstance(error, pt2qa.Pt2qaError):
            result += traceback.format_exc()
    answers.send(result)
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).relu().mean((2, 3)))


@pytest.fixture(scope="module")
def capture() -> Any:
    return pt2qa.capture(Net().eval(), torch.zeros(4, 3, 8, 8))


@pytest.fixture(scope="module")
def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 8, 8, generator=generator) * (1 + number / 3) for number in range(5)]


SPLITS = {2: [(0, 3), (3, 5)], 4: [(0, 2), (2, 2), (2, 3), (3, 5)]}
"""Where the parts begin and end; one is empty."""


def same(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two reports differ by more than 1e-9."""
    if isinstance(one, float) and isinstance(other, float):
        close = math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))
        return [] if close else [f"{where}: {one!r}, {other!r}"]
    if is_dataclass(one) and type(one) is type(other):
        names = [each.name for each in fields(one) if each.name not in ("sums", "notes")]
        return [text for name in names for text in same(getattr(one, name), getattr(other, name), f"{where}.{name}")]
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)) and len(one) == len(other):
        return [text for n, (a, b) in enumerate(zip(one, other, strict=True)) for text in same(a, b, f"{where}[{n}]")]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [text for key in one for text in same(one[key], other[key], f"{where}[{key!r}]")]
    if isinstance(one, np.ndarray | torch.Tensor):
        close = np.allclose(np.asarray(one), np.asarray(other), rtol=1e-9, atol=1e-12, equal_nan=True)
        return [] if close else [f"{where}: {one!r}, {other!r}"]
    return [] if one == other else [f"{where}: {one!r}, {other!r}"]


MINMAX = OverridePlan((Edit("observer", ("conv/conv2d", "relu", "fc/linear"), "minmax"),))


def analysed(capture: Any, calibration: Any, batches: Any) -> list[Any]:
    """Reports of all kinds that add up."""
    pair = pt2qa.quantize(capture, "xnnpack", calibration, overrides=MINMAX, progress=False)
    return [
        pt2qa.compare_layers(pair, batches, progress=False),
        pt2qa.sensitivity(pair, batches, method="projection", projections=4, progress=False),
        pt2qa.sensitivity(pair, batches, method="exact", progress=False),
        pt2qa.find_bad_cases(pair, batches, k=2, progress=False),
        pt2qa.profile(pair, batches, progress=False),
        pt2qa.error_budget(pair, batches, progress=False),
        pt2qa.compare_quantizers(capture, {"narrow": pair, "dynamic": "xnnpack:mode=dynamic"}, calibration, batches),
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_numbers_are_those_of_one_process(capture: Any, data: Any, tmp_path: Path, size: int) -> None:
    def task(ranks: Any) -> Any:
        mine = data[slice(*SPLITS[size][ranks.rank])]
        return analysed(capture, mine, mine)

    expected = analysed(capture, data, data)
    for found in spawned(task, size, tmp_path):
        assert same(found, expected) == []


@pytest.fixture(scope="module")
def of_any_size() -> Any:
    return pt2qa.capture(Net().eval(), torch.zeros(4, 3, 8, 8), dynamic_shapes=({0: torch.export.Dim("batch")},))


@pytest.mark.parametrize("empty", [0, 1])
def test_a_rank_whose_batches_have_no_samples(of_any_size: Any, data: Any, tmp_path: Path, empty: int) -> None:
    pair = pt2qa.quantize(of_any_size, "xnnpack", data, overrides=MINMAX, progress=False)
    candidates = {"narrow": pair}

    def over(batches: Any) -> list[Any]:
        return [
            pt2qa.compare_layers(pair, batches, progress=False),
            pt2qa.compare_modules(pair, batches, modules=["fc"], progress=False),
            pt2qa.compare_graphs(pair.reference, pair.quantized, batches, progress=False),
            pt2qa.sensitivity(pair, batches, method="projection", projections=4, progress=False),
            pt2qa.sensitivity(pair, batches, method="exact", progress=False),
            pt2qa.find_bad_cases(pair, batches, k=2, batch_axis=None, progress=False),
            pt2qa.profile(pair, batches, progress=False),
            pt2qa.error_budget(pair, batches, progress=False),
            pt2qa.compare_quantizers(of_any_size, candidates, data, batches),
            pt2qa.diagnose(pair, batches, verify_code=False, progress=False).rows,
            pt2qa.reconfigure(pair, batches, target=45.0, verify_code=False, progress=False).rows,
            pt2qa.repair(pair, batches, verify_code=False, progress=False).rows,
        ]

    def task(ranks: Any) -> Any:
        return over([data[0][:0]] if ranks.rank == empty else data[:2])

    expected = over(data[:2])
    for found in spawned(task, 2, tmp_path):
        assert not isinstance(found, str), found
        assert same(found, expected) == []
        why = f"rank {empty}: every batch is empty (1 read). Pass batches with samples."
        assert why in found[0].notes


def test_histograms_are_shared(capture: Any, data: Any, tmp_path: Path) -> None:
    def task(ranks: Any) -> Any:
        pair = pt2qa.quantize(capture, "xnnpack", data[slice(*SPLITS[2][ranks.rank])], progress=False)
        assert any(note.startswith("calibrated by 2 processes") for note in pair.notes)
        return [(site.name, site.params.scale, site.params.zero_point) for site in pair.sites if site.kind != "weight"]

    pair = pt2qa.quantize(capture, "xnnpack", data, progress=False)
    first, second = spawned(task, 2, tmp_path)
    assert first == second
    for (_, scale, _), site in zip(first, (site for site in pair.sites if site.kind != "weight"), strict=True):
        assert scale == pytest.approx(site.params.scale, rel=0.05)


def test_diagnose_and_reconfigure_decide_alike(capture: Any, data: Any, tmp_path: Path) -> None:
    narrow = [batch * 0.2 for batch in data]

    def both(calibration: Any, batches: Any) -> Any:
        pair = pt2qa.quantize(capture, "xnnpack", calibration, overrides=MINMAX, progress=False)
        diagnosis = pt2qa.diagnose(pair, batches, verify_code=False, progress=False)
        found = pt2qa.reconfigure(pair, batches, target=45.0, verify_code=False, progress=False)
        return [
            *(diagnosis.rows, diagnosis.figures, diagnosis.verdict, diagnosis.reports["budget"].rows),
            *(found.rows, found.curve, found.verdict, str(found.plan)),
        ]

    def task(ranks: Any) -> Any:
        mine = slice(*SPLITS[2][ranks.rank])
        return both(narrow[mine], data[mine])

    expected = both(narrow, data)
    assert expected[0][0].cause == "narrow-calibration"
    for own in spawned(task, 2, tmp_path):
        assert same(own, expected) == []


@pytest.mark.parametrize("method", ["exact", "projection"])
def test_auto_takes_the_method_of_the_first_rank(
    capture: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    pair = pt2qa.quantize(capture, "xnnpack", data, progress=False)
    choices = {"exact": math.inf, "projection": 0.0}
    given: dict[str, Any] = {"projections": 4} if method == "projection" else {}

    def task(ranks: Any) -> Any:
        # Rank 0 has no batch, and rank 1 would choose otherwise than the last one.
        chosen = choices.pop(method) if ranks.rank == 1 else choices.popitem()[1]
        monkeypatch.setattr("pt2qa._sensitivity.analysis.CLEARLY", chosen)
        mine = data[slice(*((0, 0), (0, 2), (2, 5))[ranks.rank])]
        return pt2qa.sensitivity(pair, mine, **given, progress=False)

    expected = pt2qa.sensitivity(pair, data, method=method, **given, progress=False)  # type: ignore[arg-type]
    for found in spawned(task, 3, tmp_path):
        assert same(found, expected) == []
        assert [note for note in found.notes if "auto" in note] == [note for note in found.notes if method in note]


def interrupted_after(batches: Any, count: int) -> Any:
    yield from batches[:count]
    raise KeyboardInterrupt


@pytest.mark.parametrize("done", [(1, 2), (0, 1)], ids=["both had begun", "one had not"])
def test_an_interrupted_run_goes_on_from_its_report(capture: Any, data: Any, tmp_path: Path, done: Any) -> None:
    pair = pt2qa.quantize(capture, "xnnpack", data, progress=False)
    expected = pt2qa.sensitivity(pair, data, method="exact", progress=False)
    (tmp_path / "first").mkdir()

    def begin(ranks: Any) -> Any:
        mine = data[slice(*SPLITS[2][ranks.rank])]
        given = interrupted_after(mine, done[ranks.rank]) if done[ranks.rank] < len(mine) else mine
        return pt2qa.sensitivity(pair, given, method="exact", progress=False)

    one, other = spawned(begin, 2, tmp_path / "first")
    assert one == other
    assert one.batches == sum(done)
    assert any("interrupted" in note for note in one.notes)
    one.save(tmp_path / "part.safetensors")

    def go_on(ranks: Any) -> Any:
        mine = data[slice(*SPLITS[ranks.size][ranks.rank])]
        before = pt2qa.load(tmp_path / "part.safetensors") if ranks.rank == 0 else None
        return pt2qa.sensitivity(pair, mine, resume=before, progress=False)

    for size in (2, 4):
        (tmp_path / str(size)).mkdir()
        for found in spawned(go_on, size, tmp_path / str(size)):
            assert same(found, expected) == []
            assert not any("interrupted" in note or "resume" in note for note in found.notes)


def test_what_an_interrupted_run_measured_is_not_measured_again(capture: Any, data: Any, tmp_path: Path) -> None:
    pair = pt2qa.quantize(capture, "xnnpack", data, progress=False)
    before = pt2qa.sensitivity(pair, data[:4], method="exact", progress=False)

    def task(ranks: Any) -> Any:
        runs = []

        def counting(outputs: Any) -> Any:
            runs.append(1)
            return outputs

        mine = data[slice(*((1, 4) if ranks.rank else (4, 5)))]
        report = pt2qa.sensitivity(pair, mine, post_process=counting, resume=before, progress=False)
        return len(runs), report.batches, report.notes[-1]

    (first, *others), (second, *_) = spawned(task, 2, tmp_path)
    assert (first, second) == (len(before.rows) + 2, 2)  # the reference and the quantized model run once anyway
    assert others == [4, "of the 4 batches in the report to resume, 3 are in the data; the others do not count"]


EVERY = {
    "compare_layers": lambda pair, data: pt2qa.compare_layers(pair, data, progress=False),
    "sensitivity": lambda pair, data: pt2qa.sensitivity(pair, data, progress=False),
    "error_budget": lambda pair, data: pt2qa.error_budget(pair, data, progress=False),
    "find_bad_cases": lambda pair, data: pt2qa.find_bad_cases(pair, data, progress=False),
    "profile": lambda pair, data: pt2qa.profile(pair, data, progress=False),
    "diagnose": lambda pair, data: pt2qa.diagnose(pair, data, progress=False),
    "reconfigure": lambda pair, data: pt2qa.reconfigure(pair, data, target=45.0, progress=False),
}


@pytest.mark.parametrize(("size", "analysis"), [*((2, name) for name in EVERY), (4, "compare_layers"), (4, "diagnose")])
def test_an_error_of_one_is_an_error_of_all(capture: Any, data: Any, tmp_path: Path, size: int, analysis: str) -> None:
    pair = pt2qa.quantize(capture, "xnnpack", data, progress=False)

    def task(ranks: Any) -> Any:
        bad = [torch.zeros(4, 1, 8, 8)] if ranks.rank == 1 else data[:1]
        return EVERY[analysis](pair, bad)

    for said in spawned(task, size, tmp_path):
        assert said.startswith("RankError: rank 1: BatchError: ")


@pytest.mark.parametrize("how", ["leaves", "dies"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_gone(capture: Any, data: Any, tmp_path: Path, size: int, how: str) -> None:
    pair = pt2qa.quantize(capture, "xnnpack", data, progress=False)

    def dying(batches: Any, queue: Any) -> Any:
        yield batches[0]
        queue("died")
        os.kill(os.getpid(), signal.SIGKILL)

    def task(ranks: Any, tell: Any) -> Any:
        if ranks.rank == 1 and how == "leaves":
            return "left"
        given = dying(data, tell) if ranks.rank == 1 else data
        pt2qa.compare_layers(pair, given, progress=False).save(tmp_path / "layers.safetensors")
        return "finished"

    found = spawned(task, size, tmp_path, tells=True)
    assert found.pop(1) == {"leaves": "left", "dies": "died"}[how]
    for said in found:
        assert re.match(r"RankError: rank \d cannot reach all others; one of them ended", said)
    assert not list(tmp_path.glob("*.safetensors*"))


def test_a_process_group_of_some_processes(capture: Any, data: Any, tmp_path: Path) -> None:
    pair = pt2qa.quantize(capture, "xnnpack", data, progress=False)
    expected = pt2qa.sensitivity(pair, data[:3], method="exact", progress=False)

    def task(ranks: Any) -> Any:
        some = dist.new_group([1, 2])
        if ranks.rank == 0:
            return None
        with pt2qa.distributed(some) as own:
            assert (own.rank, own.size) == (ranks.rank - 1, 2)
            mine = data[own.rank : 2 * own.rank + 1]
            return pt2qa.sensitivity(pair, mine, method="exact", progress=False)

    alone, *others = spawned(task, 3, tmp_path)
    assert alone is None
    for found in others:
        assert same(found, expected) == []


def test_models_that_differ(data: Any, tmp_path: Path) -> None:
    def task(ranks: Any) -> Any:
        model = Net().eval()
        with torch.no_grad():
            model.fc.weight[0, 0] += ranks.rank
        capture = pt2qa.capture(model, data[0])
        return pt2qa.quantize(capture, "xnnpack", data[:1], progress=False).quantizer

    for said in spawned(task, 2, tmp_path):
        assert said.startswith("QuantizeError: the quantized models of rank 0 and of rank 1 differ")


def test_no_batch_anywhere(capture: Any, tmp_path: Path) -> None:
    for said in spawned(lambda ranks: pt2qa.quantize(capture, "xnnpack", [], progress=False), 2, tmp_path):
        assert said.startswith("QuantizeError: calibration gave no batch")


def test_what_does_not_add_up_is_refused(capture: Any, data: Any, tmp_path: Path) -> None:
    def task(ranks: Any) -> Any:
        pair = pt2qa.quantize(capture, "xnnpack", data, progress=False)
        return pt2qa.compare_deployed(pair, data)

    for said in spawned(task, 2, tmp_path):
        assert said.startswith("RankError: compare_deployed cannot be merged over ranks")


def test_without_a_process_group() -> None:
    with pytest.raises(pt2qa.RankError, match="no process group is initialised"), pt2qa.distributed():
        pass


FLOW = """
import torch
from torch import nn

def flow():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    batches = [torch.randn(4, 3, 8, 8) for _ in range(5)]
    return model, batches[0], batches
"""


def torchrun(*arguments: str, fails: bool = False) -> str:
    """What the first process prints; if they fail, what all of them say."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pt2qa"]
    command = [sys.executable, *launch, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout


def launched(folder: Path, processes: int, *arguments: str) -> None:
    """The command in processes with the environment that torchrun gives them, forked from this one for speed."""
    (folder / "store").mkdir()

    def rank(number: int) -> None:
        os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_RANK": str(number), "MASTER_ADDR": "localhost"}
        torch.set_num_threads(1)
        start = dist.init_process_group
        store = dist.FileStore(str(folder / "store" / "file"), processes)
        dist.init_process_group = lambda of: start(of, store=store, rank=number, world_size=processes)
        main(arguments)

    context = torch.multiprocessing.get_context("fork")
    workers = [context.Process(target=rank, args=(number,)) for number in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    assert [worker.exitcode for worker in workers] == [0] * processes


def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    flow, out = f"{tmp_path}/flow.py:flow", tmp_path / "out"
    printed = torchrun("analyze", flow, "-q", "xnnpack", "--sensitivity", "-o", str(out))
    assert printed.count("Diagnosis of Sequential") == 1
    report = pt2qa.load(out / "xnnpack-layers.safetensors")
    assert report.batches == 5
    assert any(note.startswith("calibrated by 2 processes") for note in report.notes)

    before, again = out / "xnnpack-sensitivity.safetensors", tmp_path / "again.safetensors"
    launched(tmp_path, 2, "sensitivity", flow, "-q", "xnnpack", "--resume", str(before), "-o", str(again))
    assert pt2qa.load(again).batches == 5
    assert same(pt2qa.load(again), pt2qa.load(before)) == []


def test_four_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    out = tmp_path / "sensitivity.safetensors"
    flow = f"{tmp_path}/flow.py:flow"
    launched(tmp_path, 4, "sensitivity", flow, "-q", "xnnpack:mode=dynamic", "-o", str(out))
    own: dict[str, Any] = {}
    exec(FLOW, own)
    model, example, batches = own["flow"]()
    pair = pt2qa.quantize(pt2qa.capture(model, example), "xnnpack:mode=dynamic", batches, progress=False).as_deployed()
    assert same(pt2qa.load(out), pt2qa.sensitivity(pair, batches, progress=False)) == []


FAILING = """
class Broken(list):
    reads = 0

    def __iter__(self):
        self.reads += 1
        for number, batch in enumerate(super().__iter__()):
            if number == 4 and self.reads > 2:  # the second process reads it, after all have looked at the sizes
                raise ValueError("the disk is full")
            yield batch

def failing():
    model, example, batches = flow()
    return {"model": model, "example_inputs": example, "batches": batches, "evaluation": Broken(batches)}
"""


def test_torchrun_ends_with_the_message_of_the_rank_that_fails(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW + FAILING)
    out = tmp_path / "out"
    said = torchrun("analyze", f"{tmp_path}/flow.py:failing", "-q", "xnnpack", "-o", str(out), fails=True)
    assert "rank 1: ValueError: the disk is full" in said
    assert not list(out.glob("*"))


OBSERVERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "MinMaxObserver": (observers.MinMaxObserver, True),
    "PerChannelMinMaxObserver": (lambda: observers.PerChannelMinMaxObserver(ch_axis=1), True),
    "HistogramObserver": (observers.HistogramObserver, False),
    "MovingAverageMinMaxObserver": (observers.MovingAverageMinMaxObserver, False),
    "MovingAveragePerChannelMinMaxObserver": (
        lambda: observers.MovingAveragePerChannelMinMaxObserver(ch_axis=1),
        False,
    ),
}
"""Each with whether several processes get the scales of one."""


@pytest.mark.parametrize("observer", OBSERVERS)
def test_which_observers_are_exact(tmp_path: Path, observer: str) -> None:
    make, exact = OBSERVERS[observer]
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(6, 4, generator=generator) for _ in range(5)]

    def scales(parts: list[torch.Tensor]) -> list[float]:
        module = make()
        for batch in parts:
            module(batch)
        share_observed({"it": module}, {module}, len(parts))
        found: list[float] = module.calculate_qparams()[0].tolist()
        return found

    whole = scales(batches)
    for size, splits in SPLITS.items():
        (tmp_path / str(size)).mkdir()
        parts = [batches[slice(*ends)] for ends in splits]
        found = spawned(lambda ranks, own=parts: scales(own[ranks.rank]), size, tmp_path / str(size))
        for own in found:
            assert own == found[0]
            assert own == whole if exact else own == pytest.approx(whole, rel=0.5)


WITHIN_A_GROUP = """
import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from pt2qa.cli import flow

start = dist.init_process_group
os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "LOCAL_RANK": "0"}
with mock.patch.object(dist, "init_process_group", lambda of: start(of, store=dist.HashStore(), rank=0, world_size=1)):
    with mock.patch.multiple(flow, load_flow=mock.DEFAULT, part_of=mock.DEFAULT), flow.own_part("flow.py:flow"):
        torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
print([name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())])
"""


def test_a_group_leaves_no_threads() -> None:
    """Those that are there when a process ends may abort it."""
    command = [sys.executable, "-W", "ignore", "-c", WITHIN_A_GROUP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
