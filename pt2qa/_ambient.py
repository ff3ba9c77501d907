"""What a caller has set for all of torch: inside of pt2qa it is torch's own default, and afterwards what it was.

A default dtype or device, autocast and the grad mode change what ops compute, and so what a report would say; pt2qa in
turn draws random numbers, and so do prepare and export.  Every public function that computes is therefore decorated
with :func:`torch_defaults`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


class Call:
    """A call of a public function, with those that it makes of others; only its identity counts."""


class _Process:
    """The default dtype and the random generators, which threads share: the first call saves, the last one restores."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0
        self.dtype = torch.float32
        self.random: list[Any] = []

    @contextmanager
    def defaults(self) -> Iterator[None]:
        with self.lock:
            if not self.calls:
                self.dtype = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)
                self.random = [torch.get_rng_state()]
                if torch.cuda.is_initialized():
                    self.random.append(torch.cuda.get_rng_state_all())
            self.calls += 1
        try:
            yield
        finally:
            with self.lock:
                self.calls -= 1
                if not self.calls:
                    torch.set_default_dtype(self.dtype)
                    torch.set_rng_state(self.random[0])
                    for states in self.random[1:]:
                        torch.cuda.set_rng_state_all(states)
                    self.random = []


class _Thread(threading.local):
    """The outermost call of a thread, and the default device of its caller."""

    call: Call | None = None
    device: torch.device | None = None


_process, _thread = _Process(), _Thread()


def torch_defaults(function: Function) -> Function:
    """A public function: inside, torch is as it is when a program starts; afterwards, as the caller had it.

    That holds for the default dtype and device, autocast, the grad mode, and the state of the random generators.
    """
    return _defaults()(function)


@contextmanager
def _defaults() -> Iterator[None]:
    outermost, device = _thread.call is None, torch.get_default_device()
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        stack.enter_context(_process.defaults())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if outermost:
            _thread.call, _thread.device = Call(), device
        try:
            yield
        finally:
            if outermost:
                _thread.call = _thread.device = None


def call_under_way() -> Call | None:
    """The outermost call of a public function in this thread; None outside of all."""
    return _thread.call


def callers_device(model: torch.device | None) -> AbstractContextManager[object]:
    """A context with the caller's default device, if ``model`` lies there: its forward may rely on it."""
    device = _thread.device
    return device if device is not None and model is not None and device.type == model.type else nullcontext()
