"""What the caller has set for all of torch changes no number, and stays as it was."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import pt2qa
from pt2qa._ambient import call_under_way, torch_defaults
from pt2qa._metrics import _Scratch
from pt2qa.testing import check_quantizer
from tests.analyses import ANALYSES, batches, model


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": float64,
    "meta": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
SLOW = ("check", "reconfiguration", "repair", "deployed", "qat", "quantizer")
"""What is not run under each state alone, but under all of them at once."""


def ambient() -> tuple[Any, ...]:
    """What the analyses must leave as it is."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return torch.get_default_dtype(), torch.get_default_device(), *modes, call_under_way()


def generators() -> list[Any]:
    """The state of the generators that have one for the whole process."""
    ours = np.random.get_state()  # noqa: NPY002  others draw from it
    return [torch.get_rng_state().tolist(), str(ours), random.getstate()]


def content(file: Path) -> Any:
    """All that a report holds, but for times."""
    with safe_open(file, "np") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dict
        texts = opened.metadata()
    texts.pop("pt2qa.checksum", None)
    arrays.pop("rows/seconds", None)
    return texts, {name: (each.dtype, each.shape, each.tobytes()) for name, each in arrays.items()}


@contextmanager
def all_at_once() -> Iterator[None]:
    with ExitStack() as stack:
        for state in STATES.values():
            stack.enter_context(state())
        yield


def everything(net: nn.Module, data: list[Tensor], folder: Path, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """What capture, quantize and all analyses give."""
    capture = pt2qa.capture(net, data[0])
    pair = pt2qa.quantize(capture, "xnnpack", data, progress=False)
    elsewhere = pt2qa.pair(capture.module(), pair.quantized, quantizer="xnnpack")
    analyses = ANALYSES | {
        "pair": lambda *_: pt2qa.compare_layers(elsewhere, data, progress=False),
        "deployed": lambda *_: pt2qa.compare_deployed(pair, data, progress=False),
        "qat": lambda *_: pt2qa.compare_weights(pt2qa.quantize(capture, "xnnpack", data, qat=True, progress=False)),
        "annotation diff": lambda *_: pt2qa.diff_annotations("xnnpack", "x86", capture=capture),
        "quantizer": lambda *_: check_quantizer("xnnpack", models=["linear"], progress=False),
    }
    found: dict[str, Any] = {"sqnr": pt2qa.sqnr(data[0], data[1]), "verified": pair.verify(data[0])}
    pt2qa.record_inputs(pair, data, folder / "inputs", progress=False)
    found["inputs"] = content(folder / "inputs")
    for name in analyses.keys() - set(leave_out):
        before = generators()
        report = analyses[name](pair, data)
        assert generators() == before, name
        report.save(folder / "report")
        found[name] = content(folder / "report")
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return everything(model(), batches(), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("state", [*STATES, "all at once"])
def test_no_number_depends_on_what_the_caller_has_set(state: str, plain: dict[str, Any], tmp_path: Path) -> None:
    net, data = model(), batches()
    with STATES.get(state, all_at_once)():
        before = ambient()
        found = everything(net, data, tmp_path, SLOW if state in STATES else ())
        assert ambient() == before
    assert plain.keys() - found.keys() == (set(SLOW) if state in STATES else set())
    assert {name for name in found if found[name] != plain[name]} == set()


def test_of_calls_side_by_side_the_last_one_gives_the_default_dtype_back() -> None:
    first_is_in, second_is_out = threading.Event(), threading.Event()
    seen: list[Any] = []

    @torch_defaults
    def first() -> None:
        first_is_in.set()
        second_is_out.wait(10)
        seen.append(torch.get_default_dtype())

    with float64():
        thread = threading.Thread(target=first)
        thread.start()
        first_is_in.wait(10)
        torch_defaults(seen.append)("second")
        second_is_out.set()
        thread.join()
        assert torch.get_default_dtype() == torch.float64
    assert seen == ["second", torch.float32]


def test_an_error_leaves_everything_as_it_was() -> None:
    with float64(), torch.device("meta"), torch.no_grad():
        before = ambient()
        with pytest.raises(pt2qa.SelectionError):
            pt2qa.compare_layers(None, [])  # type: ignore[arg-type]
        assert ambient() == before


def test_a_model_and_batches_that_were_made_in_inference_mode() -> None:
    with torch.inference_mode():
        net, data = model(), batches()
    pair = pt2qa.quantize(pt2qa.capture(net, data[0]), "xnnpack", data, progress=False)
    expected = pt2qa.quantize(pt2qa.capture(model(), batches()[0]), "xnnpack", batches(), progress=False)
    for analysis in (ANALYSES["projection"], ANALYSES["budget"], ANALYSES["repair"]):
        assert analysis(pair, data).rows == analysis(expected, batches()).rows


def test_a_profiler_leaves_the_grad_mode_to_the_graph() -> None:
    data = torch.linspace(-1, 1, 32).reshape(8, 4)
    graph = pt2qa.capture(nn.Linear(4, 2).eval(), data).module()
    with float64(), pt2qa.Profiler(graph) as profiler:
        assert profiler.graph(data).requires_grad
        with torch.inference_mode():
            assert profiler.graph(data).is_inference()
    assert profiler.profile().rows == pt2qa.profile(graph, [data] * 2, progress=False).rows


def test_memory_that_is_made_at_import_does_not_depend_on_the_caller() -> None:
    with float64(), torch.device("meta"), torch.inference_mode():
        memory = _Scratch().memory
    assert (memory.dtype, memory.device.type, memory.is_inference()) == (torch.float32, "cpu", False)
